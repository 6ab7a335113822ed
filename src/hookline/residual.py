"""What the residual stream is made of, from a cache: its parts, and what each adds to a logit.

All of it holds as it stands, with the norm's weight and bias where they are: nothing need be folded first. Where the
parts do not add up to the whole (a model that norms the stream itself, a readout that is not linear), it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.anatomy.norms import Norm, norm_of
from hookline.anatomy.variants import is_post_norm
from hookline.cache import ActivationCache
from hookline.errors import HooklineError
from hookline.passes import tokenizers
from hookline.positions import Positions, picked
from hookline.taps import now
from hookline.text import single_token
from hookline.weights import Weights

if TYPE_CHECKING:
    from hookline.anatomy.names import ModelPoints


class ModelCache(ActivationCache):
    """The activations of a language model; see `ActivationCache`."""

    _points: ModelPoints | None
    logits: Tensor | None = None
    """What the run gave, if it gave that."""

    def _with(self, tensors: dict[str, Tensor]) -> Self:
        new = super()._with(tensors)
        new.logits = self.logits
        return new

    @property
    def _model(self) -> ModelPoints:
        if self._points is None:
            raise HooklineError("this cache has lost its model: it was pickled; ask the model for another")
        return self._points

    @property
    def _weights(self) -> Weights:
        weights = Weights()
        weights._points = self._model
        return weights

    @property
    def n_layers(self) -> int:
        """How many layers the model has."""
        return len(self._model.anatomy.blocks)

    def stack_activation(self, name: str, layer: int = -1, sublayer: str | None = None) -> Float[Tensor, "layer ..."]:
        """The same point of all layers, or of those before `layer`."""
        more = () if sublayer is None else (sublayer,)
        return torch.stack([self[(name, each, *more)] for each in range(self._upto(layer))])

    def accumulated_resid(
        self,
        layer: int | None = None,
        *,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """The stream as it enters each layer up to `layer`, and as it leaves the last if that is the end."""
        self._check_sums()
        last = self._upto(layer)
        parts = {}
        for each in range(last):
            parts[f"{each}_pre"] = self["resid_pre", each]
            if incl_mid:
                parts[f"{each}_mid"] = self["resid_mid", each]
        parts["final_post" if last == self.n_layers else f"{last}_pre"] = self._stream(last)
        return self._given(parts, last, apply_ln, pos_slice, return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        *,
        mode: str = "all",
        incl_embeds: bool = True,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """What was added to the stream before `layer`, or before the end: the parts sum to it.

        `mode` is "all", "attn" or "mlp". What the embeddings are but for tokens and positions is `embed_other`.
        """
        if mode not in ("all", "attn", "mlp"):
            raise HooklineError(f'mode is "all", "attn" or "mlp", not {mode!r}')
        self._check_sums()
        last = self._upto(layer)
        parts = self._embeddings() if incl_embeds else {}
        for each in range(last):
            for kind in ("attn", "mlp"):
                if mode in ("all", kind) and self._has(each, f"hook_{kind}_out"):
                    parts[f"{each}_{kind}_out"] = self[f"{kind}_out", each]
        return self._given(parts, last, apply_ln, pos_slice, return_labels)

    def compute_head_results(self) -> None:
        """Work out what each head adds, from `z`, and keep it as `result`."""
        for each in range(self.n_layers):
            name = f"{self._model.layer(each)}.attn.hook_result"
            if name not in self._tensors and self._has(each, "attn.hook_z"):
                out = self._model.hook_dict[name].site.lens
                self._tensors[name] = out.of(self["z", each])  # type: ignore[attr-defined]
        vars(self).pop("_keys", None)

    def stack_head_results(
        self,
        layer: int = -1,
        *,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """What each head adds, of all layers before `layer`; the remainder is all else in the stream."""
        self._check_sums()
        self.compute_head_results()
        last = self._upto(layer)
        parts = {
            f"L{each}H{head}": result
            for each in range(last)
            if self._has(each, "attn.hook_result")
            for head, result in enumerate(self["result", each].unbind(-2))
        }
        if incl_remainder:
            parts["remainder"] = self._stream(last) - sum(parts.values())
        return self._given(parts, last, apply_ln, pos_slice, return_labels)

    def apply_ln_to_stack(
        self, stack: Float[Tensor, "part ... d_model"], layer: int | None = None, *, mlp_input: bool = False,
        pos_slice: Positions = None,
    ) -> Float[Tensor, "part ... d_model"]:  # fmt: skip
        """The parts as the norm before `layer`, or the final one, scales their sum: centred, and divided alike."""
        last = self._upto(layer)
        if last == self.n_layers:
            norm, scale = self._final_norm(), self["ln_final.hook_scale"]
        else:
            name = "ln2" if mlp_input else "ln1"
            norm, scale = self._norm(getattr(self._model.anatomy.blocks[last], name)), self["scale", last, name]
        centred = stack - stack.mean(-1, keepdim=True) if norm.subtracts_mean else stack
        return centred / self._at(scale, pos_slice)

    def logit_attrs(
        self,
        residual_stack: Float[Tensor, "part ... d_model"],
        tokens: Any,
        incorrect_tokens: Any = None,
        *,
        pos_slice: Positions = None,
    ) -> Float[Tensor, "part ..."]:
        """What each part adds to the logit of a token for each row, or to its lead over another.

        Over all parts of the stream it sums to the logit, less what the norm's and the unembedding's biases give
        (`logit_bias`).
        """
        factor = self._readout_factor()
        scaled = self.apply_ln_to_stack(residual_stack, pos_slice=pos_slice) * factor
        direction = self._direction(tokens)
        if incorrect_tokens is not None:
            direction = direction - self._direction(incorrect_tokens)
        while direction.ndim < scaled.ndim - 1:
            direction = direction.unsqueeze(-2)
        return (scaled * self._final_norm().gain * direction).sum(-1)

    def logit_bias(self, tokens: Any, incorrect_tokens: Any = None) -> Tensor:
        """The part of a logit that no part of the stream gives: from the final norm's and the unembedding's biases."""
        bias, factor = self._final_norm().bias, self._readout_factor()
        found = ((self._direction(tokens) * bias).sum(-1) + self._weights.b_U[self._ids(tokens)]) * factor
        return found if incorrect_tokens is None else found - self.logit_bias(incorrect_tokens)

    def logit_lens(self, layer: int | None = None, *, pos_slice: Positions = None, return_labels: bool = False) -> Any:
        """The logits if the stream were read out as it enters each layer, by the model's own norm and unembedding."""
        stack, labels = self.accumulated_resid(layer, pos_slice=pos_slice, return_labels=True)
        anatomy: Any = self._model.anatomy
        logits = anatomy.unembed.forward(anatomy.main.ln_final.forward(stack))
        return (logits, labels) if return_labels else logits

    def _embeddings(self) -> dict[str, Tensor]:
        parts = {"embed": self["hook_embed"]}
        if "hook_pos_embed" in self._model.hook_dict:
            parts["pos_embed"] = self["hook_pos_embed"]
        rest = self["resid_pre", 0] - sum(parts.values())
        if not _is_nothing(rest, self["resid_pre", 0]):
            parts["embed_other"] = rest
        return parts

    def _stream(self, layer: int) -> Tensor:
        return self["resid_post", self.n_layers - 1] if layer == self.n_layers else self["resid_pre", layer]

    def _given(self, parts: dict[str, Tensor], layer: int, apply_ln: bool, where: Positions, labels: bool) -> Any:
        stack = torch.stack([self._at(part, where) for part in parts.values()])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=where)
        return (stack, list(parts)) if labels else stack

    def _at(self, x: Tensor, where: Positions) -> Tensor:
        """At positions in the text, as everywhere: see `positions.py`."""
        if where is None:
            return x
        if self.positions is not None:
            raise HooklineError(f"this cache has {self.positions!r} only: no position can be picked from it again")
        if self.passing is None:
            raise HooklineError("this cache no longer knows its text: pick positions from what is given instead")
        before, now.passing = now.passing, self.passing
        try:
            stream = self._model.find(f"{self._model.layer(0)}.hook_resid_pre")
            found = picked(x if self.has_batch_dim else x[None], stream, where)
        finally:
            now.passing = before
        return found if self.has_batch_dim else found[0]

    def _upto(self, layer: int | None) -> int:
        if layer is None or layer == -1:
            return self.n_layers
        if layer not in range(self.n_layers + 1):
            raise HooklineError(f"layer {layer}, but the model has {self.n_layers} layers")
        return layer

    def _has(self, layer: int, point: str) -> bool:
        return f"{self._model.layer(layer)}.{point}" in self._model.hook_dict

    def _check_sums(self) -> None:
        anatomy = self._model.anatomy
        if any(block.post_norm is not None for block in anatomy.blocks) or is_post_norm(anatomy.main.config):
            raise HooklineError(f"{anatomy.kind} norms the stream after each addition: what was added does not add up")

    def _readout_factor(self) -> float:
        """What the unembedding's output is multiplied with to give the logits; most often 1.

        The logits must be that, and the unembedding must read what the final norm gives: else nothing adds up.
        """
        anatomy: Any = self._model.anatomy
        if self.logits is None:
            raise HooklineError("the readout cannot be checked without the logits: use run_with_cache")
        if self.positions is not None:
            raise HooklineError(f"this cache has {self.positions!r} only: attributions need a cache of all positions")
        into, out = self["unembed.hook_in"], self["unembed.hook_out"].float()
        logits = (self.logits if self.has_batch_dim else self.logits[0]).to(out)
        norm = anatomy.main.ln_final
        read = norm.forward(self._stream(self.n_layers)) if norm is not None else None
        if read is None or read.shape != into.shape or not _is_nothing(read - into, into):
            raise HooklineError(f"{anatomy.kind} does something between the final norm and the unembedding")
        factor = float((logits * out).sum() / (out * out).sum()) if logits.shape == out.shape else 0.0
        if not _is_nothing(logits - factor * out, logits):
            raise HooklineError(
                f"the logits of {anatomy.kind} are not linear in the stream (a soft cap?): nothing adds up"
            )
        return factor

    def _final_norm(self) -> Norm:
        return self._norm(self._model.anatomy.main.ln_final)

    def _norm(self, module: Any) -> Norm:
        norm = norm_of(module, self._model.anatomy.width)
        if norm is None:
            raise HooklineError("this model has no norm of a known form there")
        return norm

    def _ids(self, tokens: Any) -> Any:
        return single_token(tokenizers.get(self._model.root), tokens) if isinstance(tokens, str) else tokens

    def _direction(self, tokens: Any) -> Tensor:
        return self._weights.W_U.T[self._ids(tokens)]


def _is_nothing(difference: Tensor, whole: Tensor) -> bool:
    """Nothing but rounding."""
    return bool(difference.float().norm() <= 1e-4 * whole.float().norm())

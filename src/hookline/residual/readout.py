"""Readout: the contribution of each component of the stream to a logit, and the logit lens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.residual.stream import StreamCache, is_rounding
from hookline.text.token_positions import Positions
from hookline.values.rows import Rows

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "logit_cap")


class Readout(StreamCache):
    """From the stream to the logits, for models where this is linear up to the scale of the final norm."""

    def logit_attrs(
        self,
        residual_stack: Float[Tensor, "*part d_model"],
        tokens: str | int | Sequence[str] | Tensor | None,
        incorrect_tokens: str | int | Sequence[str] | Tensor | None = None,
        *,
        pos_slice: Positions = None,
        batch_slice: Rows | None = None,
        has_batch_dim: bool = True,
    ) -> Float[Tensor, "*part"] | Float[Tensor, "*part d_vocab"]:
        """The contribution of each component to the logit of a token, or to its logit difference from another token.

        Tokens are one text or id, one per row, or a tensor of ids per row and position; None is the whole vocabulary,
        as a last axis. Over all components of the stream, contributions sum to the logit without the biases of the
        final norm and the unembedding (`logit_bias`).
        """
        before, after = self._factors()
        scaled = StreamCache.apply_ln_to_stack(  # not that of a subclass, where `batch_slice` may differ
            self, residual_stack, pos_slice=pos_slice, batch_slice=batch_slice, has_batch_dim=has_batch_dim
        )
        norm = self._norm(self._model.anatomy.main.ln_final)
        gain = norm.gain if norm is not None else 1.0
        if tokens is None:
            return (scaled * gain).to(scaled) @ self._weights.W_U.to(scaled) * (before * after)
        places = self._scale(self.n_layers, False, pos_slice, batch_slice, has_batch_dim).shape[:-1]
        direction = self._direction(tokens, places)
        if incorrect_tokens is not None:
            direction = direction - self._direction(incorrect_tokens, places)
        return (scaled * gain * direction.to(scaled)).sum(-1) * (before * after)

    def logit_bias(
        self,
        tokens: str | int | Sequence[str] | Tensor,
        incorrect_tokens: str | int | Sequence[str] | Tensor | None = None,
    ) -> Tensor:
        """The contribution of the biases of the final norm and the unembedding to a logit, or to a logit difference."""
        norm = self._norm(self._model.anatomy.main.ln_final)
        (before, after), weights = self._factors(), self._weights
        of_norm = (weights.tokens_to_residual_directions(tokens) * (norm.bias if norm is not None else 0.0)).sum(-1)
        bias = (of_norm * before + weights.b_U[weights.token_ids(tokens)]) * after
        return bias if incorrect_tokens is None else bias - self.logit_bias(incorrect_tokens)

    def logit_lens(self, layer: int | None = None, *, pos_slice: Positions = None, return_labels: bool = False) -> Any:
        """The logits that the final norm and the unembedding compute from the stream at the input of each layer."""
        end = self._named(self.n_layers - 1, "hook_resid_post")
        self._check_needs(
            "logit_lens", self._upto(layer), ["hook_resid_pre"], end, "unembed.hook_in", "unembed.hook_out"
        )
        stack, labels = self.accumulated_resid(layer, pos_slice=pos_slice, return_labels=True)  # type: ignore[attr-defined]
        logits = self.stack_logits(stack)
        return (logits, labels) if return_labels else logits

    def stack_logits(self, residual_stack: Float[Tensor, "*part d_model"]) -> Float[Tensor, "*part d_vocab"]:
        """The logits that the final norm and the unembedding compute from each vector, as from the final stream."""
        normed = self.apply_ln_to_stack(residual_stack, recompute_ln=True)
        return self._finish()(self._weights._head().forward(normed * self._factor_before()))

    def _direction(self, tokens: Any, places: torch.Size) -> Float[Tensor, "*place d_model"]:
        """The unembedding of each token, with axes for the rows and positions of the stack."""
        directions = self._weights.tokens_to_residual_directions(tokens)
        shape = directions.shape[:-1]
        if not shape:
            return directions
        if len(shape) > len(places) or any(n not in (1, size) for n, size in zip(shape, places, strict=False)):
            raise HooklineError(
                f"tokens have the shape {list(shape)}, but the stack has rows and positions {list(places)}: pass one "
                f"token, one per row, or one per row and position"
            )
        return directions.reshape(*shape, *[1] * (len(places) - len(shape)), directions.shape[-1])

    def _factors(self) -> tuple[float, float]:
        """The factors before and after the unembedding, usually 1 and 1."""
        _, out, logits = self._unembedding()
        before, after = self._factor_before(), _factor(out, logits)
        if after is None:
            raise HooklineError(f"the logits of {self._model.anatomy.kind} are not linear in the stream (a soft cap?)")
        return before, after

    def _factor_before(self) -> float:
        into, _, _ = self._unembedding()
        read = self.apply_ln_to_stack(self._stream(self.n_layers), recompute_ln=True)
        factor = _factor(read, into)
        if factor is None:
            kind = self._model.anatomy.kind
            raise HooklineError(f"{kind} computes something between the final norm and the unembedding")
        return factor

    def _finish(self) -> Callable[[Tensor], Tensor]:
        """The function from the output of the unembedding to the logits of this run: a factor, or a soft cap."""
        _, out, logits = self._unembedding()
        factor, cap = factor_and_cap(out, logits, self._model.anatomy.config)
        if cap is not None:
            return lambda x: cap * (x / cap).tanh()
        return lambda x: x if factor == 1.0 else x * factor

    def _unembedding(self) -> tuple[Tensor, Tensor, Tensor]:
        """The input and the output of the unembedding, and the logits."""
        if self.logits is None:
            raise HooklineError("this cache has no logits, which the readout is checked against: use run_with_cache")
        logits = self.logits if self.has_batch_dim else self.logits[0]
        return self["unembed.hook_in"], self["unembed.hook_out"], logits.to(self["unembed.hook_out"].device)


def factor_and_cap(out: Tensor, logits: Tensor, config: Any) -> tuple[float, float | None]:
    """What makes logits of the output of the unembedding: a factor, or a soft cap."""
    factor = _factor(out, logits)
    if factor is not None:
        return factor, None
    for cap in (getattr(config, name, None) for name in _CAPS):
        if cap and is_rounding(cap * (out.float() / cap).tanh() - logits.float(), logits):
            return 1.0, cap
    raise HooklineError(f"{config.model_type} computes logits from its unembedding in an unknown way")


def _factor(x: Tensor, y: Tensor) -> float | None:
    """The factor of `y` to `x`, exactly 1 if they are equal within rounding; None if they are not proportional."""
    if x.shape != y.shape:
        return None
    wide, other = x.double(), y.double()
    if is_rounding(other - wide, y):
        return 1.0
    factor = float((wide * other).sum() / (wide * wide).sum())
    return factor if is_rounding(other - factor * wide, y) else None

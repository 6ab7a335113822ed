"""What the residual stream is made of, from a cache: its parts, and what each adds to a logit.

All of it holds as it stands, with the norm's weight and bias where they are: nothing need be folded first. Where the
parts do not add up to the whole (a model that norms the stream itself, a readout that is not linear), it is refused.
"""

from __future__ import annotations

from typing import Any

from hookline.errors import HooklineError
from hookline.residual.components import ComponentCache
from hookline.residual.readout import Readout
from hookline.text.token_positions import Positions


class ModelCache(ComponentCache, Readout):
    """The activations of a language model; see `ActivationCache`."""

    def accumulated_resid(
        self,
        layer: int | None = None,
        *,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """The stream as it enters each layer up to `layer`, and as it leaves the last if that is the end.

        With `mlp_input` also as the MLP of `layer` reads it. `apply_ln` divides by what that layer divides by; at the
        end each is normed by itself, so that `@ model.W_U + model.b_U` gives the logit lens.
        """
        self._check_sums()
        last = self._upto(layer)
        parts = {}
        for each in range(last):
            parts[f"{each}_pre"] = self._of(each, "hook_resid_pre")
            if incl_mid:
                parts[f"{each}_mid"] = self._of(each, "hook_resid_mid")
        parts["final_post" if last == self.n_layers else f"{last}_pre"] = self._stream(last)
        if self._includes_attention(last, mlp_input):
            parts[f"{last}_mid"] = self._stream(last, mlp_input)
        parts = {name: self._at(part, pos_slice) for name, part in parts.items()}
        is_end = apply_ln and last == self.n_layers
        given, labels = self._given(
            parts, last, apply_ln=apply_ln and not is_end, mlp_input=mlp_input, where=pos_slice, labels=True
        )
        given = self.apply_ln_to_stack(given, recompute_ln=True) if is_end else given
        return (given, labels) if return_labels else given

    def decompose_resid(
        self,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        mode: str = "all",
        incl_embeds: bool = True,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """What was added to the stream before `layer`, before its MLP, or before the end: the parts sum to it.

        `mode` is "all", "attn" or "mlp". What the embeddings are but for tokens and positions is `embed_other`.
        """
        if mode not in ("all", "attn", "mlp"):
            raise HooklineError(f'mode is "all", "attn" or "mlp", not {mode!r}')
        self._check_sums()
        last = self._upto(layer)
        parts = self._embeddings() if incl_embeds else {}
        for each in range(last + self._includes_attention(last, mlp_input)):
            for kind in ("attn", "cross_attn", "mlp"):
                is_there = self._has(each, f"hook_{kind}_out") and (each < last or kind == "attn")
                if is_there and mode in ("all", kind.removeprefix("cross_")):
                    parts[f"{each}_{kind}_out"] = self._of(each, f"hook_{kind}_out")
        parts = {name: self._at(part, pos_slice) for name, part in parts.items()}
        if mode == "all" and incl_embeds:
            self._check_sum(sum(parts.values()), last, mlp_input, pos_slice)  # type: ignore[arg-type]
        return self._given(parts, last, apply_ln=apply_ln, mlp_input=mlp_input, where=pos_slice, labels=return_labels)

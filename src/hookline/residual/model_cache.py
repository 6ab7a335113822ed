"""ModelCache: the activations of a language model, with decompositions of its residual stream.

Decompositions hold for any weights: nothing has to be folded first. Where the components do not sum to the whole (a
model that normalizes the stream itself, a readout that is not linear), they raise.
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
        """The stream at the input of each layer up to `layer`; by default up to the output of the last.

        With `mlp_input` also at the input of the MLP of `layer`. `apply_ln` divides by the scale of that layer's norm;
        at the end each stream is normalized on its own, so that `@ model.W_U + model.b_U` is the logit lens.
        """
        last = self._summed_upto(layer)
        mid = ["hook_resid_mid"] if incl_mid else []
        scale = [f"{self._norm_before(last, mlp_input)[0]}.hook_scale"] if apply_ln and last < self.n_layers else []
        last_mid = [self._named(last, "hook_resid_mid")] if self._includes_attention(last, mlp_input) else []
        self._check_needs("accumulated_resid", last, ["hook_resid_pre", *mid], *last_mid, *scale)
        parts = {}
        for layer_index in range(last):
            parts[f"{layer_index}_pre"] = self._of(layer_index, "hook_resid_pre")
            if incl_mid:
                parts[f"{layer_index}_mid"] = self._of(layer_index, "hook_resid_mid")
        parts["final_post" if last == self.n_layers else f"{last}_pre"] = self._stream(last)
        if self._includes_attention(last, mlp_input):
            parts[f"{last}_mid"] = self._stream(last, mlp_input)
        parts = {name: self._at(part, pos_slice) for name, part in parts.items()}
        is_end = apply_ln and last == self.n_layers
        stack, labels = self._given(
            parts, last, apply_ln=apply_ln and not is_end, mlp_input=mlp_input, where=pos_slice, labels=True
        )
        stack = self.apply_ln_to_stack(stack, recompute_ln=True) if is_end else stack
        return (stack, labels) if return_labels else stack

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
        """The outputs that were added to the stream before `layer`, before its MLP, or before the end: they sum to it.

        `mode` is "all", "attn" or "mlp". Embeddings other than of tokens and positions are `embed_other`.
        """
        kinds = {"all": ["attn", "cross_attn", "mlp"], "attn": ["attn", "cross_attn"], "mlp": ["mlp"]}
        if mode not in kinds:
            raise HooklineError(f'mode must be "all", "attn" or "mlp", not {mode!r}')
        last = self._summed_upto(layer)
        embeddings = self._embeddings() if incl_embeds else {}
        parts = {name: self._at(part, pos_slice) for name, part in embeddings.items()}
        for layer_index in range(last + self._includes_attention(last, mlp_input)):
            parts |= self._outputs(
                layer_index, [kind for kind in kinds[mode] if layer_index < last or kind == "attn"], pos_slice
            )
        if mode == "all" and incl_embeds:
            self._check_sum(parts, last, mlp_input, pos_slice)
        return self._given(parts, last, apply_ln=apply_ln, mlp_input=mlp_input, where=pos_slice, labels=return_labels)

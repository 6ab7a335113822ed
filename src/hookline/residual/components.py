"""Components: the contribution of each head and each neuron to the stream, including norms and factors on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.residual.stream import StreamCache, is_rounding
from hookline.text.token_positions import Positions
from hookline.transformer.norms import Norm
from hookline.weights.matrices import linear


def total(parts: list[Tensor]) -> Tensor | float:
    """The sum of many tensors, in blocks: one by one, rounding errors would add up."""
    blocks = (parts[start : start + 64] for start in range(0, len(parts), 64))
    return sum(torch.stack(block).sum(0) for block in blocks)


class ComponentCache(StreamCache):
    """Heads and neurons. The output of attention or MLP is linear in them, given the scale of a norm after it."""

    def compute_head_results(self) -> None:
        """Compute the output of each head from `z`, and keep it as `result`."""
        self._check_weights()
        for layer in range(self.n_layers):
            name = self._named(layer, "attn.hook_result")
            if name not in self._tensors and self._has(layer, "attn.hook_z"):
                self._tensors[name] = self._results_of(self._of(layer, "attn.hook_z"), name)
        vars(self).pop("_keys", None)

    def stack_head_results(
        self,
        layer: int = -1,
        *,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Positions = None,
        apply_ln: bool = False,
    ) -> Any:
        """The contribution of each head in the layers before `layer`; the remainder is the rest of the stream."""
        last = self._summed_upto(layer)
        parts = self._heads(range(last), pos_slice)
        return self._stacked(parts, last, pos_slice, incl_remainder, apply_ln, return_labels)

    def get_neuron_results(
        self, layer: int, neuron_slice: Any = None, pos_slice: Positions = None
    ) -> Float[Tensor, "*place neuron d_model"]:
        """The contribution of each neuron of a layer, or of some neurons: an index, a slice, or several indices."""
        self._summed_upto(None)
        if layer not in range(-self.n_layers, self.n_layers):
            raise HooklineError(f"layer {layer} is out of range: the model has {self.n_layers} layers")
        layer %= self.n_layers
        if not self._has(layer, "mlp.hook_post"):
            why = self._model.specs[self._named(layer, "mlp.hook_post")].why
            raise HooklineError(
                f"layer {layer} of {self._model.anatomy.kind} has no single list of neurons ({why}): leave neurons "
                f"out, or use get_full_resid_decomposition(expand_neurons=False)"
            )
        post, (matrix, _) = self._at(self._of(layer, "mlp.hook_post"), pos_slice), self._map(layer, "mlp")
        chosen = self._neuron_ids(layer, neuron_slice)
        contributions = post[..., chosen, None] * matrix[chosen].to(post)
        return self._through(contributions, layer, "mlp", pos_slice, is_stacked=True)

    def stack_neuron_results(
        self,
        layer: int = -1,
        *,
        pos_slice: Positions = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
    ) -> Any:
        """The contribution of each neuron in the layers before `layer`; the remainder is the rest of the stream.

        The result has a vector for every neuron at every position: use `pos_slice` to limit it.
        """
        last = self._summed_upto(layer)
        parts = self._neurons(range(last), pos_slice, neuron_slice)
        return self._stacked(parts, last, pos_slice, incl_remainder, apply_ln, return_labels)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """Every head, every neuron (or MLP), the embeddings, and the sum of all biases: they sum to the stream.

        The stream is the one that enters `layer`, its MLP (`mlp_input`), or the final norm. A layer without heads, such
        as a state-space layer, is one component.
        """
        last = self._summed_upto(layer)
        layers = range(last + self._includes_attention(last, mlp_input))
        heads = {layer_index: self._heads([layer_index], pos_slice) for layer_index in layers}
        neurons = (
            {layer_index: self._neurons([layer_index], pos_slice) for layer_index in range(last)}
            if expand_neurons
            else {}
        )
        parts = {
            name: part for layer_parts in (*heads.values(), *neurons.values()) for name, part in layer_parts.items()
        }
        for layer_index in range(0 if expand_neurons else last):
            parts |= self._outputs(layer_index, ["mlp"], pos_slice)
        for layer_index in layers:
            kinds = [
                *([] if self._has(layer_index, "attn.hook_z") else ["attn"]),
                *(["cross_attn"] if layer_index < last else []),
            ]
            parts |= self._outputs(layer_index, kinds, pos_slice)
        parts |= {name: self._at(part, pos_slice) for name, part in self._embeddings().items()}
        bias = torch.zeros_like(self._at(self._of(0, "hook_resid_pre"), pos_slice))
        for kind, by_layer in (("attn", heads), ("mlp", neurons)):
            for layer_index, layer_parts in by_layer.items():
                bias = bias + self._bias(layer_index, kind, [*layer_parts.values()], pos_slice) if layer_parts else bias
        parts["bias"] = bias
        self._check_sum(parts, last, mlp_input, pos_slice)
        return self._given(parts, last, apply_ln=apply_ln, mlp_input=mlp_input, where=pos_slice, labels=return_labels)

    def _stacked(
        self, parts: dict[str, Tensor], last: int, where: Positions, remainder: bool, apply_ln: bool, labels: bool
    ) -> Any:
        if remainder:
            parts["remainder"] = self._at(self._stream(last), where) - total([*parts.values()])
        return self._given(parts, last, apply_ln=apply_ln, mlp_input=False, where=where, labels=labels)

    def head_parts(self, layer: int) -> dict[str, Float[Tensor, "*place d_model"]]:
        """The contribution of each head of a layer to the stream, by its label; needs only `z`, and a norm after it."""
        return self._heads([layer], None)

    def _heads(self, layers: Iterable[int], where: Positions) -> dict[str, Tensor]:
        """The contribution of each head of some layers; none of a layer without heads."""
        contributions: dict[str, Tensor] = {}
        for layer in layers:
            if self._has(layer, "attn.hook_result"):
                name = self._named(layer, "attn.hook_result")
                if name in self._tensors:
                    results = self._at(self._tensors[name], where)
                else:
                    self._check_weights()
                    results = self._results_of(self._at(self._of(layer, "attn.hook_z"), where), name)
                results = self._through(results, layer, "attn", where, is_stacked=True)
                contributions |= {f"L{layer}H{head}": result for head, result in enumerate(results.unbind(-2))}
        return contributions

    def _results_of(self, z: Tensor, name: str) -> Tensor:
        """The output of each head, for `z` with any axes before heads."""
        out: Any = self._model.hook_dict[name].site.lens
        return out.of(z.reshape(-1, 1, *z.shape[-2:])).reshape(*z.shape[:-1], -1)

    def _neurons(self, layers: Iterable[int], where: Positions, chosen: Any = None) -> dict[str, Tensor]:
        """The contribution of each neuron of some layers, or of some neurons; none of a layer without an MLP."""
        contributions: dict[str, Tensor] = {}
        for layer in layers:
            if self._has(layer, "hook_mlp_out"):
                results = self.get_neuron_results(layer, chosen, where).unbind(-2)
                numbers = self._neuron_ids(layer, chosen)
                contributions |= {f"L{layer}N{number}": result for number, result in zip(numbers, results, strict=True)}
        return contributions

    def _neuron_ids(self, layer: int, chosen: Any) -> list[int]:
        n = len(self._map(layer, "mlp")[0])
        if chosen is None or isinstance(chosen, slice):
            return list(range(n))[chosen or slice(None)]
        ids = [int(neuron) for neuron in ([chosen] if isinstance(chosen, int) else chosen)]
        for neuron in ids:
            if neuron not in range(-n, n):
                raise HooklineError(f"neuron {neuron} is out of range: the MLP of layer {layer} has {n}")
        return [neuron % n for neuron in ids]

    def _map(self, layer: int, kind: str) -> tuple[Tensor, Tensor | None]:
        """The output projection of attention or MLP: its matrix and its bias."""
        self._check_weights()
        point = "attn.hook_z" if kind == "attn" else "mlp.hook_post"
        return linear(self._model.find(self._named(layer, point)).site.module)

    def _norm_after(self, layer: int, kind: str) -> Norm | None:
        """The norm of the output of attention or MLP, before it is added to the stream."""
        block = self._model.anatomy.blocks[layer]
        return self._norm(block.ln1_post if kind == "attn" else block.ln2_post)

    def _through(self, x: Tensor, layer: int, kind: str, where: Positions, *, is_stacked: bool) -> Tensor:
        """The contribution to the stream of a share of the output of attention or MLP, after a norm and a factor."""
        norm, factor = self._norm_after(layer, kind), self._model.anatomy.main.architecture.residual_factor
        if norm is not None:
            scale = self._at(self._of(layer, f"{'ln1' if kind == 'attn' else 'ln2'}_post.hook_scale"), where)
            centered = x - x.mean(-1, keepdim=True) if norm.subtracts_mean else x
            x = (centered / (scale.unsqueeze(-2) if is_stacked else scale) * norm.gain).to(x.dtype)
        return x * factor if factor != 1.0 else x

    def _bias(self, layer: int, kind: str, parts: list[Tensor], where: Positions) -> Tensor:
        """The contribution of the biases of the output projection and of the norm after it.

        Raises unless it and the parts sum to the output.
        """
        matrix, projection_bias = self._map(layer, kind)
        added = self._at(self._of(layer, f"hook_{kind}_out"), where)
        bias = torch.zeros_like(matrix[0]) if projection_bias is None else projection_bias.detach()
        share = self._through(bias.to(added).expand(added.shape), layer, kind, where, is_stacked=False)
        norm = self._norm_after(layer, kind)
        if norm is not None:
            share = share + norm.bias * self._model.anatomy.main.architecture.residual_factor
        if not is_rounding(added - share - sum(parts), added):
            of = "heads" if kind == "attn" else "neurons"
            raise HooklineError(
                f"{self._model.layer(layer)}.hook_{kind}_out is not the sum of {of} and biases: was it edited?"
            )
        return share

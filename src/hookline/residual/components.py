"""Components: what each head and each neuron adds to the stream, through whatever norm and factor comes before that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.residual.stream import StreamCache, is_rounding
from hookline.text.token_positions import Positions
from hookline.weights.matrices import linear


class ComponentCache(StreamCache):
    """Heads and neurons. What an attention or an MLP gives is linear in them, given the scale of a norm after it."""

    def compute_head_results(self) -> None:
        """Work out what each head gives, from `z`, and keep it as `result`."""
        self._check_weights()
        for each in range(self.n_layers):
            name = f"{self._model.layer(each)}.attn.hook_result"
            if name not in self._tensors and self._has(each, "attn.hook_z"):
                self._tensors[name] = self._results_of(self._of(each, "attn.hook_z"), name)
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
        """What each head adds to the stream, of all layers before `layer`; the remainder is all else in the stream."""
        self._check_sums()
        last = self._upto(layer)
        parts = {name: part for each in range(last) for name, part in self._heads(each, pos_slice)}
        return self._stacked(parts, last, pos_slice, incl_remainder, apply_ln, return_labels)

    def get_neuron_results(
        self, layer: int, neuron_slice: Any = None, pos_slice: Positions = None
    ) -> Float[Tensor, "*place neuron d_model"]:
        """What each neuron of a layer's MLP adds to the stream; or each of some: an index, a slice, or several."""
        self._check_sums()
        if layer not in range(-self.n_layers, self.n_layers):
            raise HooklineError(f"layer {layer}, but the model has {self.n_layers} layers")
        layer %= self.n_layers
        post, (matrix, _) = self._at(self._neurons_of(layer), pos_slice), self._mlp_map(layer)
        chosen = self._neuron_ids(layer, neuron_slice)
        each = post[..., chosen, None] * matrix[chosen].to(post)
        return self._through(each, layer, "mlp", pos_slice, is_stacked=True)

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
        """What each neuron adds to the stream, of all layers before `layer`; the remainder is all else in the stream.

        That is a vector for every neuron at every position: mind `pos_slice`.
        """
        self._check_sums()
        last = self._upto(layer)
        parts = {name: part for each in range(last) for name, part in self._neurons(each, pos_slice, neuron_slice)}
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
        """Every head, every neuron (or MLP), the embeddings, and all biases together: they sum to the stream.

        The stream is what enters `layer`, its MLP, or the end. Layers without heads (state spaces) count as one.
        """
        self._check_sums()
        last = self._upto(layer)
        layers = range(last + self._includes_attention(last, mlp_input))
        parts = {name: part for each in layers for name, part in self._heads(each, pos_slice)}
        biases: Any = sum(self._attention_bias(each, parts, pos_slice) for each in layers)
        for each in range(last):
            if expand_neurons:
                neurons = dict(self._neurons(each, pos_slice, None))
                biases = biases + self._mlp_bias(each, neurons, pos_slice)
                parts |= neurons
            elif self._has(each, "hook_mlp_out"):
                parts[f"{each}_mlp_out"] = self._at(self._of(each, "hook_mlp_out"), pos_slice)
        for each in layers:
            for kind in ("attn", "cross_attn") if each < last else ("attn",):
                is_one = kind == "cross_attn" or not self._has(each, "attn.hook_z")
                if is_one and self._has(each, f"hook_{kind}_out"):
                    parts[f"{each}_{kind}_out"] = self._at(self._of(each, f"hook_{kind}_out"), pos_slice)
        parts |= {name: self._at(part, pos_slice) for name, part in self._embeddings().items()}
        parts["bias"] = torch.zeros_like(self._at(self._of(0, "hook_resid_pre"), pos_slice)) + biases
        self._check_sum(sum(parts.values()), last, mlp_input, pos_slice)  # type: ignore[arg-type]
        return self._given(parts, last, apply_ln=apply_ln, mlp_input=mlp_input, where=pos_slice, labels=return_labels)

    def _stacked(
        self, parts: dict[str, Tensor], last: int, where: Positions, remainder: bool, apply_ln: bool, labels: bool
    ) -> Any:
        if remainder:
            parts["remainder"] = self._at(self._stream(last), where) - sum(parts.values())
        return self._given(parts, last, apply_ln=apply_ln, mlp_input=False, where=where, labels=labels)

    def _heads(self, layer: int, where: Positions) -> Iterator[tuple[str, Tensor]]:
        """Each head of a layer, if it has any."""
        if not self._has(layer, "attn.hook_result"):
            return
        name = f"{self._model.layer(layer)}.attn.hook_result"
        if name in self._tensors:
            results = self._at(self._tensors[name], where)
        else:
            self._check_weights()
            results = self._results_of(self._at(self._of(layer, "attn.hook_z"), where), name)
        results = self._through(results, layer, "attn", where, is_stacked=True)
        yield from ((f"L{layer}H{head}", result) for head, result in enumerate(results.unbind(-2)))

    def _results_of(self, z: Tensor, name: str) -> Tensor:
        """What each head gives, whatever rows and positions are left."""
        out: Any = self._model.hook_dict[name].site.lens
        return out.of(z.reshape(-1, 1, *z.shape[-2:])).reshape(*z.shape[:-1], -1)

    def _neurons(self, layer: int, where: Positions, chosen: Any) -> Iterator[tuple[str, Tensor]]:
        """Each neuron of a layer, or some of them, if it has an MLP."""
        if not self._has(layer, "hook_mlp_out"):
            return
        results = self.get_neuron_results(layer, chosen, where)
        numbers = self._neuron_ids(layer, chosen)
        yield from ((f"L{layer}N{number}", result) for number, result in zip(numbers, results.unbind(-2), strict=True))

    def _neurons_of(self, layer: int) -> Tensor:
        if not self._has(layer, "mlp.hook_post"):
            why = self._model.specs[f"{self._model.layer(layer)}.mlp.hook_post"].why
            raise HooklineError(
                f"layer {layer} of {self._model.anatomy.kind} has no one list of neurons ({why}): leave them out, or "
                f"use get_full_resid_decomposition(expand_neurons=False)"
            )
        return self._of(layer, "mlp.hook_post")

    def _neuron_ids(self, layer: int, chosen: Any) -> list[int]:
        n = len(self._mlp_map(layer)[0])
        if isinstance(chosen, int):
            chosen = [chosen]
        if chosen is None or isinstance(chosen, slice):
            return list(range(n))[chosen if chosen is not None else slice(None)]
        ids = [int(each) for each in chosen]
        wrong = [each for each in ids if each not in range(-n, n)]
        if wrong:
            raise HooklineError(f"neuron {wrong[0]}, but the MLP of layer {layer} has {n}")
        return [each % n for each in ids]

    def _mlp_map(self, layer: int) -> tuple[Tensor, Tensor | None]:
        self._check_weights()
        return linear(self._model.find(f"{self._model.layer(layer)}.mlp.hook_post").site.module)

    def _through(self, x: Tensor, layer: int, kind: str, where: Positions, *, is_stacked: bool) -> Tensor:
        """What a share of an attention's or an MLP's output is in the stream, after a norm and a factor."""
        factor = self._model.anatomy.main.architecture.residual_factor
        norm = self._norm(self._norm_after(layer, kind))
        if norm is not None:
            name = "ln1_post" if kind == "attn" else "ln2_post"
            scale = self._at(self._of(layer, f"{name}.hook_scale"), where)
            centered = x - x.mean(-1, keepdim=True) if norm.subtracts_mean else x
            x = (centered / (scale.unsqueeze(-2) if is_stacked else scale) * norm.gain).to(x.dtype)
        return x * factor if factor != 1.0 else x

    def _norm_after(self, layer: int, kind: str) -> nn.Module | None:
        block = self._block(layer)
        return block.ln1_post if kind == "attn" else block.ln2_post

    def _attention_bias(self, layer: int, heads: dict[str, Tensor], where: Positions) -> Any:
        if not self._has(layer, "attn.hook_z"):
            return 0
        matrix, own = linear(self._model.find(f"{self._model.layer(layer)}.attn.hook_z").site.module)
        parts = [part for name, part in heads.items() if name.startswith(f"L{layer}H")]
        return self._bias(layer, "attn", own, matrix, parts, where)

    def _mlp_bias(self, layer: int, neurons: dict[str, Tensor], where: Positions) -> Any:
        if not neurons:
            return 0
        matrix, own = self._mlp_map(layer)
        return self._bias(layer, "mlp", own, matrix, [*neurons.values()], where)

    def _bias(
        self, layer: int, kind: str, own: Tensor | None, matrix: Tensor, parts: list[Tensor], where: Positions
    ) -> Tensor:
        """What the biases add, of the map and of the norm after it; with the parts it must be all that was added."""
        added = self._at(self._of(layer, f"hook_{kind}_out"), where)
        bias = torch.zeros_like(matrix[0]) if own is None else own.detach()
        share = self._through(bias.to(added).expand(added.shape), layer, kind, where, is_stacked=False)
        norm = self._norm(self._norm_after(layer, kind))
        if norm is not None:
            share = share + norm.bias * self._model.anatomy.main.architecture.residual_factor
        rest = added - share - sum(parts)
        if not is_rounding(rest, added):
            of = "heads" if kind == "attn" else "neurons"
            raise HooklineError(
                f"what {self._model.layer(layer)}'s {kind} adds is not the sum of its {of} and biases: it was edited "
                f"on the way, or {self._model.anatomy.kind} does something in between"
            )
        return share

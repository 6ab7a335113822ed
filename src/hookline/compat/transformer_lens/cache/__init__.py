"""ActivationCache with the arguments of TransformerLens, and its in-place methods."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from inspect import Parameter, Signature, signature
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from hookline.compat.transformer_lens._impl.lens_errors import LensValueError, check
from hookline.compat.transformer_lens._impl.slices import Slice
from hookline.engine import Hooked, Points
from hookline.errors import HooklineError
from hookline.residual import ModelCache
from hookline.residual.components import total
from hookline.text.token_positions import Meaning

AnySlice: TypeAlias = Any
"""A `Slice`, an argument of one, or one of hookline's positions."""

# Methods of `ModelCache`, with their arguments in the order of TransformerLens, where all may be positional.
# `batch_slice` selects rows of a stack with a batch axis; a stack without it (`has_batch_dim=False`) has these rows.
# `project_output_onto` multiplies the result with a vector or matrix.
_ARGUMENTS = {
    "accumulated_resid": "layer incl_mid apply_ln pos_slice mlp_input return_labels",
    "decompose_resid": "layer mlp_input mode apply_ln pos_slice incl_embeds return_labels",
    "stack_head_results": "layer return_labels incl_remainder pos_slice apply_ln",
    "get_full_resid_decomposition": (
        "layer mlp_input expand_neurons apply_ln pos_slice return_labels project_output_onto"
    ),
    "apply_ln_to_stack": "residual_stack layer mlp_input pos_slice batch_slice has_batch_dim recompute_ln",
    "logit_attrs": "residual_stack tokens incorrect_tokens pos_slice batch_slice has_batch_dim",
}


class ActivationCache(ModelCache):
    """The activations of a run; see `hookline.ActivationCache`. Positions are batch columns, padding included."""

    model: Any = None

    def __init__(self, cache_dict: dict[str, Tensor], model: Hooked | Points, has_batch_dim: bool = True) -> None:
        points: Any = model if isinstance(model, Points) else model.index
        super().__init__(cache_dict, points, has_batch_dim=has_batch_dim)
        self.model = model if isinstance(model, Hooked) else None

    @property
    def cache_dict(self) -> MutableMapping[str, Tensor]:
        """The tensors by name."""
        return self._tensors

    @property
    def has_embed(self) -> bool:
        """Whether it contains the embeddings."""
        return "hook_embed" in self

    @property
    def has_pos_embed(self) -> bool:
        """Whether it contains the position embeddings."""
        return "hook_pos_embed" in self._tensors

    def to(self, device: Any = None, dtype: torch.dtype | None = None, move_model: bool = False) -> Self:
        """Move the tensors in place; with `move_model`, also the model."""
        if move_model:
            if self.model is None:
                raise HooklineError("this cache has no reference to its model: move the model separately")
            self.model.to(device)
        return self._become(super().to(device, dtype))

    def remove_batch_dim(self) -> Self:
        """Remove the batch axis in place; the batch must have one row."""
        rows = self._row_count() if self.has_batch_dim and self else 1
        check(rows == 1, f"remove_batch_dim needs a batch of one row, but this cache has {rows}")
        return self._become(super().remove_batch_dim())

    def _become(self, other: Self) -> Self:
        vars(self).pop("_keys", None)
        vars(self).update({name: value for name, value in vars(other).items() if name != "_keys"})
        return self

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Enable or disable gradients for all of torch in this thread."""
        torch.set_grad_enabled(mode)

    def _embeddings(self) -> dict[str, Tensor]:
        parts = super()._embeddings()
        if self._model.anatomy.main.pos_embed is None and "pos_embed" in parts:  # a shortformer's, not in the stream
            parts = {"embed": parts["embed"]}
        return parts

    def _at(self, x: Tensor, where: Any, name: str | None = None) -> Tensor:
        """The cache at columns of the batch, or at named positions. An index removes the axis."""
        if where is None or isinstance(where, Meaning):
            return super()._at(x, where, name)
        if self.positions is not None:
            raise HooklineError(f"this cache contains {self.positions!r} only: it cannot be sliced by position again")
        return Slice.of(where).apply(x, int(self.has_batch_dim))

    def stack_activation(self, activation_name: str, layer: int = -1, sublayer_type: str | None = None) -> Tensor:
        """The same point of all layers, or of those before `layer`, stacked."""
        return super().stack_activation(activation_name, layer, sublayer_type)

    def apply_slice_to_batch_dim(self, batch_slice: AnySlice) -> Self:
        """A cache of some rows of the batch; an index removes the axis."""
        return self.rows(Slice.of(batch_slice).index)

    def get_neuron_results(
        self, layer: int, neuron_slice: AnySlice = None, pos_slice: AnySlice = None,
        project_output_onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The output of each neuron of a layer, or its product with a vector or matrix; an index removes the axis."""
        neurons, onto = Slice.of(neuron_slice), project_output_onto
        if onto is None:
            results = super().get_neuron_results(layer, neurons.index, pos_slice)
        else:
            results = self._projected(layer, neurons.index, pos_slice, onto if onto.ndim == 2 else onto[:, None])
        results = results[..., 0, :] if neurons.mode == "int" else results
        return results.squeeze(-1) if onto is not None and onto.ndim == 1 else results

    def _projected(self, layer: int, chosen: Any, where: AnySlice, onto: Tensor) -> Tensor:
        """The products of neurons' outputs with a matrix, without the outputs themselves, [..., neuron, d_model]."""
        super().get_neuron_results(layer, [], where)  # raises if there are none
        layer %= self.n_layers
        if self._norm_after(layer, "mlp") is not None:
            return super().get_neuron_results(layer, chosen, where) @ onto
        post, (matrix, _) = self._at(self._of(layer, "mlp.hook_post"), where), self._map(layer, "mlp")
        ids, factor = self._neuron_ids(layer, chosen), self._model.anatomy.main.architecture.residual_factor
        return post[..., ids, None] * (matrix[ids].to(post) @ onto.to(post) * factor)

    def stack_neuron_results(
        self, layer: int = -1, pos_slice: AnySlice = None, neuron_slice: AnySlice = None, return_labels: bool = False,
        incl_remainder: bool = False, apply_ln: bool = False, project_output_onto: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The contribution of each neuron before `layer`, or its product with a vector or matrix."""
        chosen, onto = Slice.of(neuron_slice).index, project_output_onto
        if onto is None:
            options: dict[str, Any] = {"pos_slice": pos_slice, "neuron_slice": chosen, "return_labels": return_labels}
            return super().stack_neuron_results(layer, incl_remainder=incl_remainder, apply_ln=apply_ln, **options)
        last, matrix = self._summed_upto(layer), onto if onto.ndim == 2 else onto[:, None]
        norm = self._norm(self._norm_before(last, False)[1]) if apply_ln else None
        if norm is not None and norm.subtracts_mean:  # from the outputs, or just as well from what multiplies them
            matrix = matrix - matrix.mean(0)
        parts: dict[str, Tensor] = {}
        for layer_index in (layer_index for layer_index in range(last) if self._has(layer_index, "hook_mlp_out")):
            contributions = self._projected(layer_index, chosen, pos_slice, matrix).unbind(-2)
            parts |= {
                f"L{layer_index}N{n}": x
                for n, x in zip(self._neuron_ids(layer_index, chosen), contributions, strict=True)
            }
        if incl_remainder:
            parts["remainder"] = self._at(self._stream(last), pos_slice) @ matrix - total([*parts.values()])
        stack, labels = self._given(parts, last, apply_ln=False, mlp_input=False, where=pos_slice, labels=True)
        stack = stack / self._scale(last, False, pos_slice, None, self.has_batch_dim) if apply_ln else stack
        stack = stack if onto.ndim == 2 else stack.squeeze(-1)
        return (stack, labels) if return_labels else stack

    def _prepared(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with slices as `ModelCache` takes them, and the rows of the stack that `batch_slice` takes."""
        answers = [options.get(name) for name in ("tokens", "incorrect_tokens")]
        shapes = [list(answer.shape) for answer in answers if isinstance(answer, Tensor)]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            raise LensValueError(f"tokens has the shape {shapes[0]}, but incorrect_tokens {shapes[1]}")
        slices = {name: Slice.of(options[name]) for name in ("neuron_slice", "batch_slice") if name in options}
        options |= {name: chosen_slice.index for name, chosen_slice in slices.items()}
        if options.get("batch_slice") is None or not options.pop("has_batch_dim", True) or not self.has_batch_dim:
            return options
        stack: Tensor = options["residual_stack"]
        if stack.ndim < 3 or stack.shape[1] != self._row_count():
            raise HooklineError(
                f"batch_slice takes rows of the stack's second axis, but a stack of shape {list(stack.shape)} does "
                f"not have the {self._row_count()} rows of this cache there: pass the stack of all rows, or "
                f"has_batch_dim=False for one of a single row"
            )
        return options | {"residual_stack": slices["batch_slice"].apply(stack, dim=1)}


def _in_order(name: str, order: str) -> Callable[..., Any]:
    """A method of `ModelCache` that also takes positional arguments, in this order."""
    base_method = getattr(ModelCache, name)
    parameters = {"project_output_onto": Parameter("project_output_onto", Parameter.KEYWORD_ONLY, default=None)}
    parameters |= signature(base_method).parameters
    arguments = Signature(
        [
            parameters[parameter_name].replace(kind=Parameter.POSITIONAL_OR_KEYWORD)
            for parameter_name in ("self", *order.split())
        ]
    )

    def method(*args: Any, **kwargs: Any) -> Any:
        options = arguments.bind(*args, **kwargs).arguments
        cache, onto = options.pop("self"), options.pop("project_output_onto", None)
        result = base_method(cache, **cache._prepared(options))
        if onto is None:
            return result
        return (result[0] @ onto, result[1]) if isinstance(result, tuple) else result @ onto

    method.__name__, method.__doc__ = name, base_method.__doc__
    method.__signature__ = arguments  # type: ignore[attr-defined]
    return method


for _name, _order in _ARGUMENTS.items():
    setattr(ActivationCache, _name, _in_order(_name, _order))

"""ActivationCache with the arguments of TransformerLens, and its in-place methods."""

from __future__ import annotations

from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from hookline.compat.transformer_lens.slices import Slice
from hookline.engine.hooked import Hooked
from hookline.engine.names import Points
from hookline.errors import HooklineError
from hookline.residual import ModelCache
from hookline.text.token_positions import Meaning

AnySlice: TypeAlias = Any
"""A `Slice`, an argument of one, or one of hookline's positions."""


class ActivationCache(ModelCache):
    """The activations of a run; see `hookline.ActivationCache`. Positions are batch columns, padding included."""

    model: Any = None

    def __init__(self, cache_dict: dict[str, Tensor], model: Hooked | Points, has_batch_dim: bool = True) -> None:
        points: Any = model if isinstance(model, Points) else model._points
        super().__init__(cache_dict, points, has_batch_dim=has_batch_dim)
        self.model = model if isinstance(model, Hooked) else None

    @property
    def cache_dict(self) -> dict[str, Tensor]:
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
        return self._become(super().remove_batch_dim())

    def _become(self, other: Self) -> Self:
        vars(self).pop("_keys", None)
        vars(self).update({name: value for name, value in vars(other).items() if name != "_keys"})
        return self

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Enable or disable gradients for all of torch in this thread."""
        torch.set_grad_enabled(mode)

    def _at(self, x: Tensor, where: Any, name: str | None = None) -> Tensor:
        """The cache at columns of the batch, or at named positions. An index removes the axis."""
        if where is None or isinstance(where, Meaning):
            return super()._at(x, where, name)
        if self.positions is not None:
            raise HooklineError(f"this cache contains {self.positions!r} only: it cannot be sliced by position again")
        return (where if isinstance(where, Slice) else Slice(where)).apply(x, int(self.has_batch_dim))

    def accumulated_resid(
        self, layer: int | None = None, incl_mid: bool = False, apply_ln: bool = False, pos_slice: AnySlice = None,
        mlp_input: bool = False, return_labels: bool = False,
    ) -> Any:  # fmt: skip
        """The stream at the input of each layer up to `layer`, and at the output of the last."""
        return super().accumulated_resid(
            layer, incl_mid=incl_mid, apply_ln=apply_ln, pos_slice=pos_slice, mlp_input=mlp_input,
            return_labels=return_labels,
        )  # fmt: skip

    def decompose_resid(
        self, layer: int | None = None, mlp_input: bool = False, mode: str = "all", apply_ln: bool = False,
        pos_slice: AnySlice = None, incl_embeds: bool = True, return_labels: bool = False,
    ) -> Any:  # fmt: skip
        """The components of the stream before `layer`, or of the final stream."""
        return super().decompose_resid(
            layer, mlp_input=mlp_input, mode=mode, apply_ln=apply_ln, pos_slice=pos_slice, incl_embeds=incl_embeds,
            return_labels=return_labels,
        )  # fmt: skip

    def stack_head_results(
        self, layer: int | None = -1, return_labels: bool = False, incl_remainder: bool = False,
        pos_slice: AnySlice = None, apply_ln: bool = False,
    ) -> Any:  # fmt: skip
        """The outputs of all heads before `layer`."""
        return super().stack_head_results(
            -1 if layer is None else layer, incl_remainder=incl_remainder, apply_ln=apply_ln, pos_slice=pos_slice,
            return_labels=return_labels,
        )  # fmt: skip

    def stack_activation(self, activation_name: str, layer: int = -1, sublayer_type: str | None = None) -> Tensor:
        """The same point of all layers, or of those before `layer`, stacked."""
        return super().stack_activation(activation_name, layer, sublayer_type)

    def apply_slice_to_batch_dim(self, batch_slice: AnySlice) -> Self:
        """A cache of some rows of the batch; an index removes the axis."""
        return self.rows(_plain(batch_slice))

    def apply_ln_to_stack(
        self, residual_stack: Tensor, layer: int | None = None, mlp_input: bool = False, pos_slice: AnySlice = None,
        batch_slice: AnySlice = None, has_batch_dim: bool = True, recompute_ln: bool = False,
    ) -> Tensor:  # fmt: skip
        """Apply the norm before `layer`, or the final norm, with the scale of the full stream, to components.

        `batch_slice` takes these rows of a stack that has the batch; one without (`has_batch_dim=False`) is of them.
        """
        stack, slices = self._sliced(residual_stack, batch_slice, has_batch_dim)
        return super().apply_ln_to_stack(
            stack, layer, mlp_input=mlp_input, pos_slice=pos_slice, recompute_ln=recompute_ln, **slices
        )

    def logit_attrs(
        self, residual_stack: Tensor, tokens: Any, incorrect_tokens: Any = None, pos_slice: AnySlice = None,
        batch_slice: AnySlice = None, has_batch_dim: bool = True,
    ) -> Tensor:  # fmt: skip
        """The contribution of each component to a logit or a logit difference; slices as in `apply_ln_to_stack`.

        Tokens are those of the rows that `batch_slice` takes.
        """
        stack, slices = self._sliced(residual_stack, batch_slice, has_batch_dim)
        return super().logit_attrs(stack, tokens, incorrect_tokens, pos_slice=pos_slice, **slices)

    def _sliced(self, stack: Tensor, batch_slice: AnySlice, has_batch_dim: bool) -> tuple[Tensor, dict[str, Any]]:
        """The stack of some rows of the batch, and the matching options of hookline's own methods."""
        rows = _plain(batch_slice)
        if rows is None:
            return stack, {"has_batch_dim": has_batch_dim}
        if has_batch_dim and self.has_batch_dim:
            if stack.ndim < 3 or stack.shape[1] != self._row_count():
                raise HooklineError(
                    f"batch_slice takes rows of the stack's second axis, but a stack of shape {list(stack.shape)} does "
                    f"not have the {self._row_count()} rows of this cache there: pass the stack of all rows, or "
                    f"has_batch_dim=False for one of a single row"
                )
            stack = (batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)).apply(stack, dim=1)
        return stack, {"batch_slice": rows}

    def get_neuron_results(
        self, layer: int, neuron_slice: AnySlice = None, pos_slice: AnySlice = None,
        project_output_onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The outputs of the neurons of a layer; an index removes the axis of neurons."""
        found = super().get_neuron_results(layer, _plain(neuron_slice), pos_slice)
        found = found[..., 0, :] if isinstance(_plain(neuron_slice), int) else found
        return found if project_output_onto is None else found @ project_output_onto

    def stack_neuron_results(  # type: ignore[override]
        self, layer: int, pos_slice: AnySlice = None, neuron_slice: AnySlice = None, return_labels: bool = False,
        incl_remainder: bool = False, apply_ln: bool = False, project_output_onto: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The outputs of all neurons before `layer`."""
        stack, labels = super().stack_neuron_results(
            layer, pos_slice=pos_slice, neuron_slice=_plain(neuron_slice), return_labels=True,
            incl_remainder=incl_remainder, apply_ln=apply_ln,
        )  # fmt: skip
        stack = stack if project_output_onto is None else stack @ project_output_onto
        return (stack, labels) if return_labels else stack

    def get_full_resid_decomposition(
        self, layer: int | None = None, mlp_input: bool = False, expand_neurons: bool = True, apply_ln: bool = False,
        pos_slice: AnySlice = None, return_labels: bool = False, project_output_onto: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """All heads, all neurons (or MLPs), the embeddings, and the sum of all biases."""
        stack, labels = super().get_full_resid_decomposition(
            layer, mlp_input=mlp_input, expand_neurons=expand_neurons, apply_ln=apply_ln, pos_slice=pos_slice,
            return_labels=True,
        )  # fmt: skip
        stack = stack if project_output_onto is None else stack @ project_output_onto
        return (stack, labels) if return_labels else stack


def _plain(given: AnySlice) -> Any:
    """A slice as an index for torch; None for all."""
    if given is None:
        return None
    found = given if isinstance(given, Slice) else Slice(given)
    return found.slice.tolist() if found.mode == "array" else found.slice

"""Views of parameters in TransformerLens's layout, which can be used like parameters.

model.blocks[0].attn.W_Q.grad                       # the part of the gradient of the module's own weight
model.blocks[0].attn.W_Q.data = new                 # written into the model
model.unembed.W_U.requires_grad = False
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from hookline.errors import HooklineError


class WeightView(Tensor):
    """A view of a parameter. What is computed from it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    parameter: Tensor
    path: str

    @property
    def data(self) -> Tensor:
        """The values, without gradients; assigned values are written into the model."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise HooklineError(f"{self.path} has shape {list(self.shape)}, not {list(value.shape)}")
        self.detach().copy_(value.detach())

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the parameter, in the layout of this view."""
        own = self.parameter.grad
        if own is None:
            return None
        if own.stride() != self.parameter.stride():
            own = torch.empty_like(self.parameter).copy_(own)
        start = int(self.storage_offset()) - int(self.parameter.storage_offset()) + int(own.storage_offset())
        return own.detach().as_strided(self.size(), self.stride(), start)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._check_whole("grad")
        self.parameter.grad = None if value is None else torch.zeros_like(self.parameter)
        if value is not None:
            self.grad.copy_(value)  # type: ignore[union-attr]

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter gets a gradient."""
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.parameter.requires_grad:
            self._check_whole("requires_grad")
            self.parameter.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the parameter gets a gradient."""
        self.requires_grad = requires_grad
        return self

    def _check_whole(self, name: str) -> None:
        if self.numel() != self.parameter.numel():
            own = f"a parameter of {self.parameter.numel()} values, which has other weights too"
            raise HooklineError(f"{self.path} is a part of {own}: set {name} of the parameter, in model.module")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor when saved or copied."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        del memo
        return self.detach().clone().requires_grad_(self.requires_grad)


def weight_view(own: Tensor, parameter: Tensor, path: str) -> Tensor:
    """The view `own` of a parameter, with its gradient; the parameter itself, if the layout is the same."""
    if own is parameter:
        return own
    view = own.as_subclass(WeightView)
    view.parameter, view.path = parameter, path
    return view

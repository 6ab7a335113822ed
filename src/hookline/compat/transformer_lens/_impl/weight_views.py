"""Views of parameters in TransformerLens's layout, which can be used like parameters.

model.blocks[0].attn.W_Q.grad                       # the part of the gradient of the module's own weight
model.blocks[0].attn.W_Q.data = new                 # written into the model
model.unembed.W_U.requires_grad = False

In TransformerLens each weight has memory of its own: `W_Q.data = new` gives it another one, and what was taken from the
old one (`W_Q.data`, `model.state_dict()`) keeps the old values, with which programs put weights back. Here a weight is
a part of a parameter. So the parameter gets new memory as a whole (`replace`), and the views of its other parts follow.
"""

from __future__ import annotations

from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hookline.errors import HooklineError
from hookline.weights.read_only import shares_memory


class WeightView(Tensor):
    """A view of a parameter. What is computed from it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    parameter: Tensor
    path: str

    @property
    def data(self) -> Tensor:
        """The values, without gradients; assigned values are written into the model."""
        return following(self.detach(), self.parameter, self.path) if self._is_of_model else self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise HooklineError(f"{self.path} has shape {list(self.shape)}, not {list(value.shape)}")
        if self._is_of_model:
            replace(self.parameter, self, value, self.path, is_same_weight=True)
        else:  # as in TransformerLens, a weight that was replaced by another one is not in the model
            Tensor.data.__set__(self, value.detach().clone())  # type: ignore[attr-defined]

    @property
    def _is_of_model(self) -> bool:
        """Whether it is a view of the parameter; not if another weight was assigned in its place since."""
        return shares_memory(self, self.parameter)

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the parameter, in the layout of this view."""
        gradient = self.parameter.grad
        if gradient is None or not self._is_of_model:
            return None
        if gradient.stride() != self.parameter.stride():
            gradient = torch.empty_like(self.parameter).copy_(gradient)
        start = int(self.storage_offset()) - int(self.parameter.storage_offset()) + int(gradient.storage_offset())
        return gradient.detach().as_strided(self.size(), self.stride(), start)

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
            whole = f"a parameter of {self.parameter.numel()} values, which has other weights too"
            raise HooklineError(f"{self.path} is a part of {whole}: set {name} of the parameter, in model.module")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor when saved or copied."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        del memo
        return self.detach().clone().requires_grad_(self.requires_grad)


_followers: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter: views of it, with the path of the weight that each is, as long as somebody has them."""


def weight_view(weight: Tensor, parameter: Tensor, path: str) -> Tensor:
    """The view `weight` of a parameter, with its gradient; the parameter itself, if the layout is the same."""
    if weight is parameter:
        return weight
    view = weight.as_subclass(WeightView)
    view.parameter, view.path = parameter, path
    return following(view, parameter, path)


def following(view: Tensor, parameter: Tensor, path: str) -> Tensor:
    """The view, which from now on follows the parameter when another weight in it gets new memory."""
    _followers.setdefault(parameter, {}).setdefault(path, WeakValueDictionary())[id(view)] = view
    return view


@torch.no_grad()
def replace(parameter: Tensor, part: Tensor, value: Tensor, path: str, *, is_same_weight: bool) -> None:
    """Give a parameter new memory, in which `value` is in place of `part`, the view of it that `path` names.

    The views of that weight stay with the old memory, except those that are the weight itself: it is still the same one
    after `W_Q.data = …`, and another one after `W_Q = …`.
    """
    whole = parameter.detach()
    new = torch.empty_strided(whole.size(), whole.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
    start = int(whole.storage_offset())

    def in_new(view: Tensor) -> Tensor:
        return new.as_strided(view.size(), view.stride(), int(view.storage_offset()) - start)

    in_new(part).copy_(value.detach())
    for name, views in _followers.get(parameter, {}).items():
        for view in list(views.values()):
            follows = name != path or (is_same_weight and isinstance(view, WeightView))
            if follows and shares_memory(view, whole):
                Tensor.data.__set__(view, in_new(view))  # type: ignore[attr-defined]
    parameter.data = new

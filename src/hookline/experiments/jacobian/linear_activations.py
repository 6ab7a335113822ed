"""Activation functions whose derivative is computed once, for runs with many backward passes.

An activation function may consist of ten operations, each of which has its own backward pass. All of it together is one
product with the derivative, which is the same in all backward passes of a run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import Edit, Run, open_runs
from hookline.model import HookedModel


def linear_activations(model: HookedModel) -> Run:
    """A run in which the modules of activation functions have one product as their backward pass.

    None of them while other hooks are active: they may make the output depend on more than the input at the same place.
    """
    root = model.index.root
    is_alone = not (open_runs() or model.index.permanent.steps)
    modules = root.named_modules() if is_alone else ()
    names = [name for name, module in modules if type(module) in _elementwise() and not _is_hooked(module)]
    edits = [Edit(model.index.find(point), hook) for name in names for point, hook in _hooks(name)]
    for edit in edits:
        edit.must_fire = False  # the modules of a vision tower are not called for a text
    return Run(root, edits, is_one_pass=True)


def _hooks(name: str) -> list[tuple[str, Any]]:
    inputs: list[Tensor] = []  # a module may be called several times

    def note(x: Tensor) -> None:
        inputs.append(x)

    def replace(y: Tensor) -> Tensor | None:
        x = inputs.pop()
        if not (x.requires_grad and y.requires_grad and x.shape == y.shape):
            return None
        (derivative,) = torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)
        return None if derivative is None else _Product.apply(x, y.detach(), derivative)  # None: it returned its input

    return [(f"{name}.input", note), (name, replace)]


class _Product(torch.autograd.Function):
    """A known output, whose gradient is the product with a known derivative."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, y: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None, None


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody else has torch hooks on a module, or has replaced its `forward`."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


@cache
def _elementwise() -> frozenset[type[nn.Module]]:
    """The classes of modules that apply the same function of one number to every element."""
    from transformers.activations import ACT2CLS

    classes = (activation[0] if isinstance(activation, tuple) else activation for activation in ACT2CLS.values())
    return frozenset(
        {*(module_class for module_class in classes if isinstance(module_class, type)), nn.Tanh, nn.ELU, nn.Softplus}
    )

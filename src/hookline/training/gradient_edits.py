"""Gradients that are changed: of activations, by backward hooks; of parameters, right before the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.engine import Hooked, undo
from hookline.errors import HooklineError, a_type, unknown_point
from hookline.functions.callers import caller
from hookline.loading import hook
from hookline.types import Filter, HookFunction


def clip(points: Filter, norm: float, *, scaler: Any = None) -> list[tuple[Filter, HookFunction]]:
    """Return backward hooks that scale the gradient at each point so that its L2 norm is at most `norm`.

        with net.hooks(bwd_hooks=clip("layer3", 1.0)):
            loss(net(x)).backward()

    The norm is that of the whole tensor, of one call of the module, in one process. A `scaler` is the `GradScaler` of
    the training, if there is one: then `norm` is that of the gradient without its scale.

    Examples:
        >>> norms = []
        >>> hooks = [*hookline.training.clip("fc1", 1e-3), ("fc1", lambda grad: norms.append(grad.norm()))]
        >>> net.run_with_hooks(x, bwd_hooks=hooks).sum().backward()
        >>> print(f"{norms[0]:.4f}")
        0.0010
    """
    if not norm > 0:
        raise HooklineError(f"norm= is the largest norm of a gradient and must be above 0, not {norm!r}")

    def clip_gradient(grad: Tensor) -> Tensor:
        limit = norm * (1.0 if scaler is None else scaler.get_scale())
        size = torch.linalg.vector_norm(grad, dtype=torch.float32 if grad.dtype != torch.float64 else None)
        return grad * (limit / size.clamp(min=limit)).to(grad.dtype)

    return [(points, clip_gradient)]


def edit_gradients(
    net: nn.Module | Hooked, optimizer: Optimizer, names: str | Iterable[str], edit: Callable[..., Tensor | None]
) -> EditGradients:
    """Change gradients of parameters right before each step of an optimizer, while the context is open.

        with edit_gradients(net, optimizer, "encoder.*", lambda grad: grad * 0.1):
            train(net)

    That is after everything else: gradients are those of all processes, of all batches that were accumulated, and
    without the scale of a `GradScaler`. `names` are names or globs of parameters; `edit(grad)` or `edit(grad, name)`
    returns another gradient, or None to keep it as it is or as it was changed in place.

    Examples:
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> before = net.fc1.weight.clone()
        >>> with hookline.training.edit_gradients(net, optimizer, "fc1.*", torch.zeros_like):
        ...     net(x).sum().backward()
        ...     optimizer.step()
        >>> torch.equal(net.fc1.weight, before)
        True
    """
    return EditGradients(net, optimizer, [names] if isinstance(names, str) else [*names], edit)


class EditGradients(undo.UndoBlock):
    """The context of `edit_gradients`."""

    def __init__(self, net: Any, optimizer: Optimizer, names: list[str], edit: Callable[..., Any]) -> None:
        if not callable(getattr(optimizer, "register_step_pre_hook", None)):
            raise HooklineError(f"edit_gradients takes an optimizer of torch, not {a_type(optimizer)}")
        self._optimizer, self._edit = optimizer, caller(edit)
        parameters = dict(hook(net).index.root.named_parameters())
        unmatched = [pattern for pattern in names if not any(fnmatchcase(name, pattern) for name in parameters)]
        if unmatched or not names:
            raise unknown_point(", ".join(unmatched), parameters, hint="These are the names of parameters.")
        self._parameters = {
            name: parameter
            for name, parameter in parameters.items()
            if any(fnmatchcase(name, pattern) for pattern in names)
        }
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        foreign = [name for name, parameter in self._parameters.items() if id(parameter) not in optimized]
        if foreign:
            raise HooklineError(f"the optimizer does not have {', '.join(map(repr, foreign[:4]))}: its step ignores it")
        self._handle: Any = None

    def open(self) -> None:
        """Change gradients from now on."""
        self._handle = self._optimizer.register_step_pre_hook(self._change)

    def close(self) -> None:
        """Leave gradients as they are."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    @torch.no_grad()
    def _change(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(map(callable, (*args[1:], *kwargs.values()))):
            raise HooklineError("edit_gradients does not work with a closure: the step computes gradients after it")
        if getattr(optimizer, "grad_scale", None) is not None:
            raise HooklineError("this optimizer divides by the scale itself: call scaler.unscale_(optimizer) first")
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                new = self._edit(parameter.grad, name)
                if new is not None:
                    parameter.grad.copy_(_fitting(new, parameter.grad, name))


def _fitting(new: Any, grad: Tensor, name: str) -> Tensor:
    if not isinstance(new, Tensor) or new.shape != grad.shape:
        shape = list(new.shape) if isinstance(new, Tensor) else a_type(new)
        raise HooklineError(f"the gradient of {name!r} has the shape {list(grad.shape)}, and its edit returned {shape}")
    return new

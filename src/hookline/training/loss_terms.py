"""Terms of a loss that are about activations: penalties, and distances from another network's features."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import Hooked, HookPoint, pass_state, undo
from hookline.errors import HooklineError, a_type
from hookline.loading import hook
from hookline.training.training_mode import warn_if_changing
from hookline.types import Filter


def l1(x: Tensor) -> Tensor:
    """The mean absolute value.

    Examples:
        >>> hookline.training.l1(torch.tensor([1.0, -3.0]))
        tensor(2.)
    """
    return x.abs().mean()


def l2(x: Tensor) -> Tensor:
    """The mean square.

    Examples:
        >>> hookline.training.l2(torch.tensor([1.0, -3.0]))
        tensor(5.)
    """
    return x.square().mean()


def penalty(net: nn.Module | Hooked, points: Filter, function: Callable[[Tensor], Tensor] = l1) -> Penalty:
    """A penalty on activations: in the context, calling it returns the sum of `function(activation)` over the points.

        with penalty(net, "relu", l1) as sparsity:
            for x, y in loader:
                loss = cross_entropy(net(x), y) + 1e-3 * sparsity()
                loss.backward()

    It is about all forward passes with gradients since it was called last.

    Examples:
        >>> from hookline.training import l1, penalty
        >>> with penalty(net, "fc1", l1) as sparsity:
        ...     loss = net(x).sum() + 0.1 * sparsity()
        >>> loss.backward()
    """
    return Penalty(net, points, function)


def distill(
    student: nn.Module | Hooked,
    teacher: nn.Module | Hooked,
    points: Mapping[str, str] | Filter,
    function: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
) -> Distillation:
    """The distance of a student's activations from those of a teacher: in the context, call it with the same inputs.

        with distill(student, teacher, {"layer2": "layer4"}) as distance:
            for x, y in loader:
                loss = cross_entropy(student(x), y) + distance(x)
                loss.backward()

    `points` are the student's, with the teacher's in a dict if their names differ. It is the sum over the points of
    `function(student's, teacher's)`, which may also fit one to the shape of the other. The teacher runs without
    gradients.

    Examples:
        >>> from hookline.training import distill
        >>> teacher = nn.Sequential(OrderedDict(fc1=nn.Linear(4, 8), fc2=nn.Linear(8, 2)))
        >>> with distill(net, teacher, ["fc1"]) as distance:
        ...     loss = net(x).sum() + distance(x)
        >>> loss.backward()
    """
    return Distillation(net=student, teacher=teacher, points=points, function=function)


class _KeepsActivations(undo.UndoBlock):
    """A context that gets the activations at some points, in the graph of the loss."""

    def __init__(self, net: nn.Module | Hooked, points: Filter, function: Callable[..., Tensor]) -> None:
        if not callable(function):
            raise HooklineError(f"function= is a function of the activation, such as l1, not {function!r}")
        self._function = function
        hooked: Any = hook(net)  # type: ignore[arg-type]
        self._points = hooked.index.select(points)
        self._root: nn.Module = hooked.index.root
        self._run = hooked.hooks(fwd_hooks=[(point, self._take) for point in self._points])

    def open(self) -> Any:
        """Begin to take activations."""
        self._run.__enter__()
        return self

    def close(self) -> None:
        """End it."""
        if self._run.is_open:
            self._run.__exit__(*sys.exc_info())
        self.clear()

    def is_on(self, root: nn.Module) -> bool:
        """Whether it is about this network."""
        return self._root is root

    def _take(self, x: Tensor, hook: HookPoint) -> None:
        if torch.is_grad_enabled():
            self.keep(x, hook)
        elif pass_state.starts_with_grad:
            raise HooklineError(
                "this activation has no gradient: the module runs in torch.no_grad(), or in a checkpoint that needs "
                "use_reentrant=False"
            )

    def term(self, *activations: Tensor) -> Tensor:
        """What the function makes of activations."""
        value = self._function(*activations)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else a_type(value)
            raise HooklineError(f"function= returns one number, such as a mean, as a tensor, not {got}")
        return value.reshape(())

    def keep(self, x: Tensor, hook: HookPoint) -> None:
        """Keep what the term needs of an activation."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop what was kept."""
        raise NotImplementedError


class Penalty(_KeepsActivations):
    """The context of `penalty`."""

    def __init__(self, net: nn.Module | Hooked, points: Filter, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(net, points, function)
        self._terms: list[Tensor] = []

    def keep(self, x: Tensor, hook: HookPoint) -> None:  # noqa: ARG002
        """Keep the term of an activation."""
        self._terms.append(self.term(x))

    def clear(self) -> None:
        """Drop all terms."""
        self._terms = []

    def __call__(self) -> Tensor:
        """The sum of the terms since the last call."""
        terms = self._terms
        if not terms:
            raise HooklineError("penalty: no forward pass with gradients since the last call")
        self.clear()
        return torch.stack(terms).sum()


class Distillation(_KeepsActivations):
    """The context of `distill`."""

    def __init__(self, *, net: Any, teacher: Any, points: Any, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._teacher: Any = hook(teacher)
        self._kept: dict[str, Tensor] = {}
        super().__init__(net, [*points] if isinstance(points, Mapping) else points, function)
        own_names = [point.name for point in self._points]
        names = [*points.values()] if isinstance(points, Mapping) else own_names
        if len(names) != len(own_names):
            raise HooklineError(
                f"distill: each key of points= names one point of the student, but they name {own_names}"
            )
        self._pairs = dict(zip(own_names, names, strict=True))
        self._targets = [self._teacher.index.find(name) for name in names]

    def open(self) -> Any:
        """Begin to take activations."""
        warn_if_changing(self._teacher.index.root, "the teacher")
        return super().open()

    def keep(self, x: Tensor, hook: HookPoint) -> None:
        """Keep an activation of the student."""
        if hook.call and hook.only is None:
            raise HooklineError(
                f"distill: {hook.name!r} is called several times in a forward pass: name one call, as '{hook.name}#0'"
            )
        self._kept[hook.name] = x

    def clear(self) -> None:
        """Drop the activations."""
        self._kept = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The distance, for the inputs of the student's last forward pass."""
        activations = self._kept
        if not activations:
            raise HooklineError("distill: the student has had no forward pass with gradients since the last call")
        self.clear()
        with torch.no_grad():
            features = self._teacher.cache(*args, names_filter=self._targets, **kwargs)
        return torch.stack(
            [self._distance(name, x, features[self._pairs[name]]) for name, x in activations.items()]
        ).sum()

    def _distance(self, name: str, x: Tensor, feature: Tensor) -> Tensor:
        if self._function is nn.functional.mse_loss and x.shape != feature.shape:
            raise HooklineError(
                f"distill: {name!r} has the shape {list(x.shape)}, and the teacher's {self._pairs[name]!r} has "
                f"{list(feature.shape)}: pass a function of both that fits one to the other"
            )
        return self.term(x, feature)

"""Activations at some positions: reading them, and applying a hook there only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.functions.callers import caller
from hookline.text.token_positions import Meaning, Positions, canonical, is_one_per_row, mask_of
from hookline.values.casting import cast


def picked(x: Tensor, point: Any, positions: Positions) -> Tensor:
    """An activation at some positions: without the position axis if there is one per row, else with a shorter one."""
    axis = _axis(point, x)
    positions = canonical(positions)
    if isinstance(positions, tuple):  # in the order in which they are given
        return torch.stack([picked(x, point, position) for position in positions], axis)
    by_position = x.movedim(axis, 1)
    rows, n = by_position.shape[:2]
    mask = mask_of(positions, point, rows, n).to(x.device)
    counts = sorted(set(mask.sum(1).tolist()))
    if len(counts) > 1 or counts == [0]:
        raise HooklineError(
            f"{positions!r} matches {' or '.join(map(str, counts))} positions in a row here: cache all positions, and "
            f"select afterwards"
        )
    chosen = by_position[mask].unflatten(0, (rows, -1))
    return chosen[:, 0] if is_one_per_row(positions) else chosen.movedim(1, axis)


class PositionHook:
    """A hook that applies another one at some positions and leaves all others unchanged."""

    def __init__(self, where: Positions, func: Callable[..., Any], on: Meaning | None = None) -> None:
        self._invoke, self._acted = caller(func), threading.local()
        self.where, self.func = canonical(where), func  # error messages name `func`
        self.on = on
        """A condition beside the positions: where both hold, the hook applies."""

    @property
    def acted(self) -> bool:
        """Whether it acted when it was last called in this thread."""
        return getattr(self._acted, "did", False)

    @property
    def mask(self) -> Tensor | None:
        """Where it acted when it was last called in this thread, `[row, position]`."""
        return getattr(self._acted, "mask", None)

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        """The activation with the hook's result at these positions; None if there are none."""
        axis = _axis(hook, x)
        mask = mask_of(self.where, hook, x.shape[0], x.shape[axis])
        if self.on is not None:
            mask = mask & mask_of(self.on, hook, *mask.shape)
        self._acted.mask, self._acted.did = mask, bool(mask.any())
        if not self.acted:
            return None
        clone = x.clone()
        result = self._invoke(clone, hook)
        new = clone if result is None else result
        if not isinstance(new, Tensor) or new.shape != x.shape:
            return new  # an error, as of any hook
        shape = [x.shape[dim] if dim in (0, axis) else 1 for dim in range(x.ndim)]
        broadcast_mask = mask.to(x.device).view(shape)
        if not (x.is_floating_point() or x.is_complex()):  # `where` would promote all of x to the dtype of `new`
            new = cast(torch.where(broadcast_mask, new, torch.zeros_like(new)), x)
        return torch.where(broadcast_mask, new, x)

    def __reduce__(self) -> tuple[Any, ...]:
        return PositionHook, (self.where, self.func, self.on)


def at(positions: Positions, hook: Callable[..., Any]) -> PositionHook:
    """A hook that applies `hook` at these positions and leaves all others unchanged.

    `hook` receives the whole activation; its result is used at these positions only.
    """
    return PositionHook(positions, hook)


def _axis(point: Any, x: Tensor) -> int:
    """The index of the position axis."""
    names = point.axes.split()
    for name in ("p", "k"):
        if name in names:
            return names.index(name)
    if names or x.ndim != 3:
        raise HooklineError(
            f"this point has no known position axis: its axes are {point.axes!r}, its shape {list(x.shape)}"
        )
    if (other := _sequence_first(point.permanent.root())) is not None:
        raise HooklineError(
            f"positions at {point.name!r} are ambiguous: {other!r} has batch_first=False, so axis 1 may be the batch. "
            f"Use a function, or mask= in an edit"
        )
    return 1


def _sequence_first(root: nn.Module | None) -> str | None:
    """The name of a module whose inputs have their positions before the batch, if there is one."""
    modules = () if root is None else root.named_modules()
    return next((name for name, module in modules if vars(module).get("batch_first") is False), None)

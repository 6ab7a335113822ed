"""Lenses inside a graph: `get` and `put` as functions that the compiler can trace.

They call the lenses' own methods. What a formula needs of earlier events comes from `saved`, a list that one call of
the graph fills, because a graph has none of what the engine keeps for a pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeAlias

from torch import Tensor

from hookline.engine import Derived, Formula, Lens, Site, parts_of

Get: TypeAlias = Callable[[Any, list[Any]], Any]
"""Takes the value at an event, and the values saved at earlier events."""
Put: TypeAlias = Callable[[Any, Tensor, list[Any]], Any]


def can_trace(lens: Lens) -> bool:
    """Whether a lens can be traced: not if it remembers edits, or depends on more than tensors of the pass."""
    return all(getattr(part, "is_root", False) or _is_traceable(part) for part in parts_of(lens))


def _is_traceable(part: Lens) -> bool:
    is_plain = isinstance(part, Formula) and not isinstance(part, Derived) and part.can_wait and part.needs_all
    return is_plain and not any(map(callable, part.needs))  # type: ignore[attr-defined]


def getter(lens: Lens, places: Mapping[Site, int]) -> Get:
    """`lens.get` for a graph; `places` says where in `saved` the value of a site is."""
    steps = [_step(part, "compute" if isinstance(part, Formula) else "get", places) for part in parts_of(lens)]

    def get(value: Any, saved: list[Any]) -> Any:
        for compute, needed in steps:
            value = compute(value, *needed(saved))
        return value

    return get


def putter(lens: Lens, places: Mapping[Site, int]) -> Put:
    """`lens.put` for a graph."""
    outer = [getter(part, places) for part in parts_of(lens)[:-1]]
    steps = [_step(part, "restore" if isinstance(part, Formula) else "put", places) for part in parts_of(lens)]

    def put(value: Any, tensor: Tensor, saved: list[Any]) -> Any:
        values = [value]
        for get in outer:
            values.append(get(values[-1], saved))
        for index in range(len(steps) - 1, -1, -1):
            restore, needed = steps[index]
            tensor = restore(values[index], tensor, *needed(saved))
        return tensor

    return put


def _step(
    part: Any, method: str, places: Mapping[Site, int]
) -> tuple[Callable[..., Any], Callable[[list[Any]], list[Any]]]:
    """The method of a lens, without what tests wrap around it, and what it needs, from what is saved."""
    function = inspect.unwrap(getattr(type(part), method))
    is_static = isinstance(inspect.getattr_static(type(part), method), staticmethod)
    bound = function if is_static else MethodType(function, part)
    sources = [(None, places[need]) if isinstance(need, Site) else (need, -1) for need in getattr(part, "needs", ())]

    def needed(saved: list[Any]) -> list[Any]:
        return [saved[place] if place >= 0 else number for number, place in sources]

    return bound, needed

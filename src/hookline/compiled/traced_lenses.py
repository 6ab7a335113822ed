"""Lenses inside a graph: `get` and `put` as functions that the compiler can trace.

They call the lenses' own methods. Only where a lens looks up a value of an earlier event, in a variable of the thread
that a graph cannot have, the value comes from `saved`, a list that one call of the graph fills.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from hookline.engine.derived import Added, Difference, Unflatten
from hookline.engine.lenses import Argument, Chain, First, Item, Lens
from hookline.engine.points import Site
from hookline.transformer.layout_lenses import Heads, Interleaved, Slice, Times

Get: TypeAlias = Callable[[Any, list[Any]], Any]
"""Takes the value at an event, and the values saved at earlier events."""
Put: TypeAlias = Callable[[Any, Tensor, list[Any]], Any]

_PURE = (First, Item, Argument, Slice, Heads, Interleaved, Times)


def needed_by(lens: Lens) -> Iterator[Site] | None:
    """The sites whose values a lens looks up; None if it cannot be traced."""
    if isinstance(lens, Chain):
        parts = [needed_by(part) for part in lens.lenses]
        return None if None in parts else (site for part in parts for site in part or ())
    if isinstance(lens, Added | Difference):
        inner = needed_by(lens.lens)
        return None if inner is None else iter((lens.base, *inner))
    if isinstance(lens, Unflatten):
        return iter((lens.like,))
    return iter(()) if isinstance(lens, _PURE) else None


def getter(lens: Lens, places: Mapping[Site, int]) -> Get:
    """`lens.get` for a graph; `places` says where in `saved` the value of a site is."""
    if isinstance(lens, Chain):
        gets = tuple(getter(part, places) for part in lens.lenses)

        def chain(value: Any, saved: list[Any]) -> Any:
            for get in gets:
                value = get(value, saved)
            return value

        return chain
    if isinstance(lens, Added | Difference):
        inner, place, sign = getter(lens.lens, places), places[lens.base], 1 if isinstance(lens, Added) else -1
        if sign == 1:
            return lambda value, saved: saved[place] + inner(value, saved)
        return lambda value, saved: inner(value, saved) - saved[place]
    if isinstance(lens, Unflatten):
        like = places[lens.like]
        return lambda value, saved: value if value.ndim == 3 else value.unflatten(0, saved[like].shape[:2])
    get = inspect.unwrap(type(lens).get)
    return lambda value, _saved: get(lens, value)


def putter(lens: Lens, places: Mapping[Site, int]) -> Put:
    """`lens.put` for a graph."""
    if isinstance(lens, Chain):
        return _chained(lens, places)
    if isinstance(lens, Added | Difference):
        inner, place = putter(lens.lens, places), places[lens.base]
        if isinstance(lens, Added):
            return lambda value, tensor, saved: inner(value, tensor - saved[place], saved)
        return lambda value, tensor, saved: inner(value, saved[place] + tensor, saved)
    if isinstance(lens, Unflatten):
        return lambda value, tensor, _saved: tensor if value.ndim == 3 else tensor.flatten(0, 1)
    put = inspect.unwrap(type(lens).put)
    return lambda value, tensor, _saved: put(lens, value, tensor)


def _chained(lens: Chain, places: Mapping[Site, int]) -> Put:
    gets = tuple(getter(part, places) for part in lens.lenses)
    puts = tuple(putter(part, places) for part in lens.lenses)

    def chain(value: Any, tensor: Tensor, saved: list[Any]) -> Any:
        outer = [value]
        for get in gets[:-1]:
            outer.append(get(outer[-1], saved))
        for index in range(len(puts) - 1, -1, -1):
            tensor = puts[index](outer[index], tensor, saved)
        return tensor

    return chain

"""Changes: another value at a place inside one run of a model. Several together are a variant of that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from hookline.engine.casting import cast
from hookline.errors import HooklineError
from hookline.transformer.architectures import is_parallel, is_post_norm

if TYPE_CHECKING:
    from hookline.engine.points import HookPoint
    from hookline.transformer.index import ModelPoints

Index: TypeAlias = int | slice
WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class Change:
    """At a point, at an index of what is there for one text, another value.

    `where` has an index for each axis after the batch. Positions before `first` are as they were. `before` is what the
    run had there, if that is known: what is only added to the stream can then be changed without running its layer.
    """

    point: HookPoint
    where: tuple[Index, ...]
    value: Tensor
    first: int = 0
    before: Tensor | None = None

    @cached_property
    def position(self) -> int | None:
        """The one position that it is at, if it is at one."""
        at = dict(zip(self.axes, self.where, strict=True)).get("p")
        return at if isinstance(at, int) else None

    @cached_property
    def axes(self) -> list[str]:
        """The point's axes after the batch: `p h e`; of a point by its native name it is not known what they are."""
        return self.point.axes.split()[1:] or [""] * len(self.where)


Variant: TypeAlias = Sequence[Change]
"""Changes that are made together, in one run."""

LETTERS = {"pos": "p", "head": "hg", "src": "k", "neuron": "m", "dim": "d"}


def index_of(point: HookPoint, **at: int | None) -> tuple[Index, ...]:
    """The index of a point's value by the names of its axes: `index_of(z, pos=3, head=2)`."""
    axes = point.axes.split()[1:]
    where: list[Index] = [WHOLE] * len(axes)
    for name, number in at.items():
        if number is None:
            continue
        places = [place for place, letter in enumerate(axes) if letter in LETTERS[name]]
        if not places:
            raise HooklineError(f"{point.name!r} has no axis {name!r}: its axes are {point.axes}")
        where[places[0]] = number
    return tuple(where)


@dataclass(frozen=True)
class Entry:
    """Where a variant leaves the run it is a variant of."""

    layer: int
    """The first layer that must be run; the number of layers if none need be."""
    position: int
    """The first position that may differ."""


BEFORE_LAYERS = -1


class Entries:
    """Where changes come in, for one model: at which layer, and whether as the stream itself."""

    def __init__(self, points: ModelPoints) -> None:
        self._points = points
        self._known: dict[str, tuple[int, str]] = {}
        self._adds_up = adds_up(points)

    def of(self, variant: Variant) -> Entry:
        """Where a variant of a run begins to differ from it."""
        return Entry(min(self.layer(change) for change in variant), min(change.first for change in variant))

    def layer(self, change: Change) -> int:
        """The first layer that must be run for a change; -1 if it is made before the first one."""
        layer, kind = self._place(change.point)
        return layer + 1 if kind == "end" or (kind == "added" and change.before is not None) else layer

    def is_stream(self, change: Change) -> bool:
        """Whether it is the stream itself that is changed, as it enters a layer."""
        return self._place(change.point)[1] in ("stream", "end")

    def is_added(self, change: Change) -> bool:
        """Whether it is something that is added to the stream as it enters the next layer, and what it was is known."""
        return self._place(change.point)[1] == "added" and change.before is not None

    def _place(self, point: HookPoint) -> tuple[int, str]:
        name = point.listed
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def _found(self, listed: str) -> tuple[int, str]:
        anatomy = self._points.anatomy
        stack, _, rest = listed.partition(".")
        layer, _, name = rest.partition(".")
        if stack != anatomy.main.name or not layer.isdigit():
            return (len(anatomy.blocks) if stack in ("ln_final", "unembed") else BEFORE_LAYERS), ""
        kind = {"hook_resid_pre": "stream", "hook_resid_post": "end"}.get(name, "")
        is_last = name == "hook_mlp_out" or (name == "hook_attn_out" and is_parallel(anatomy.main.config))
        return int(layer), "added" if is_last and self._adds_up else kind


def adds_up(points: ModelPoints) -> bool:
    """Whether the stream is the sum of what is added to it: not in models that norm the stream itself."""
    anatomy = points.anatomy
    return not (any(block.post_norm is not None for block in anatomy.blocks) or is_post_norm(anatomy.config))


Placed: TypeAlias = tuple[int, Change]
"""A change, and the row of a batch that it is for."""


def put_all(x: Tensor, placed: Iterable[Placed], span: range, *, as_difference: bool = False) -> None:
    """Write each change into its row of `x`, which has the positions of `span`. Those alike are written at once."""
    alike: dict[object, list[Placed]] = {}
    times: Counter[object] = Counter()  # changes of one place (a parallel attention's and MLP's) come one by one
    for row, change in placed:
        if change.position is not None and change.position >= span.stop:
            continue  # nobody reads so far
        key = tuple("i" if isinstance(each, int) else (each.start, each.stop, each.step) for each in change.where)
        here = (row, key, *(each for each in change.where if isinstance(each, int)))
        alike.setdefault((key, times[here]), []).append((row, change))
        times[here] += 1
    for group in alike.values():
        _put_alike(x, group, span, as_difference=as_difference)


def _put_alike(x: Tensor, group: list[Placed], span: range, *, as_difference: bool) -> None:
    device = x.device
    index: list[Tensor | slice] = [torch.tensor([row for row, _ in group], device=device)]
    for place, letter in enumerate(group[0][1].axes):
        whole = group[0][1].where[place]
        if isinstance(whole, slice):
            index.append(whole)
            continue
        numbers = [number for _, change in group if isinstance(number := change.where[place], int)]
        start = span.start if letter == "p" else 0
        index.append(torch.tensor([number - start for number in numbers], device=device))
    pieces = [_of_span(change, change.value, span) for _, change in group]
    _check_shapes(x, group, pieces)
    values = cast(torch.stack(pieces), x)
    if as_difference:
        before = [_of_span(change, change.before, span) for _, change in group]
        values = x[tuple(index)] + (values - torch.stack(before).to(x))
    x[tuple(index)] = values


def _check_shapes(x: Tensor, group: list[Placed], pieces: list[Tensor]) -> None:
    where = group[0][1].where
    sizes = x.shape[1:]
    kept = [size for size, each in zip(sizes, where, strict=False) if isinstance(each, slice)]
    shape = (*kept, *sizes[len(where) :])  # axes without a name are whole
    for (_, change), piece in zip(group, pieces, strict=True):
        if piece.shape != shape:
            raise HooklineError(
                f"the value to put in at {change.point.name!r} has the shape {list(change.value.shape)}; there it is "
                f"{list(shape)}, at index {change.where}"
            )


def _of_span(change: Change, value: Tensor | None, span: range) -> Tensor:
    """The part of a value that is about these positions: a value for all positions may be one for too many."""
    assert value is not None
    letters = [letter for letter, each in zip(change.axes, change.where, strict=True) if isinstance(each, slice)]
    for place, letter in enumerate(letters):
        if letter in ("p", "k") and place < value.ndim and value.shape[place] >= span.stop:
            start = span.start if letter == "p" else 0
            value = value.narrow(place, start, span.stop - start)
    return value

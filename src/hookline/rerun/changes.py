"""Changes: a new value at an index of a point in one run. Several together are a variant of that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.values.casting import cast

if TYPE_CHECKING:
    from hookline.engine import HookPoint
    from hookline.transformer.index import ModelPoints

Index: TypeAlias = int | slice
WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class Change:
    """A new value at a point, at an index of the activation of one text.

    `where` has an index for each axis after the batch. Positions before `first` are unchanged. `before` is the value in
    the baseline, if known: what is only added to the stream can then be changed without running its layer.
    """

    point: HookPoint
    where: tuple[Index, ...]
    value: Tensor
    first: int = 0
    before: Tensor | None = None

    @cached_property
    def position(self) -> int | None:
        """The position of the change, if it is at a single one."""
        at = dict(zip(self.axes, self.where, strict=True)).get("p")
        return at if isinstance(at, int) else None

    @cached_property
    def axes(self) -> list[str]:
        """The point's axes after the batch: `p h e`; empty strings for a native point, whose axes are unknown."""
        return self.point.axes.split()[1:] or [""] * len(self.where)

    @cached_property
    def free_axes(self) -> list[str]:
        """The axes that are not indexed by a number: those of the value."""
        return [letter for letter, at in zip(self.axes, self.where, strict=True) if isinstance(at, slice)]


Variant: TypeAlias = Sequence[Change]
"""Changes made together, in one run."""

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


def first_changed(point: HookPoint, where: tuple[Index, ...], value: Tensor, before: Tensor | None) -> int:
    """The first position where a value differs from what was there; one past the last if it differs nowhere."""
    letters = [letter for letter, at in zip(point.axes.split()[1:], where, strict=False) if isinstance(at, slice)]
    if before is None or value.shape != before.shape or "p" not in letters:
        return 0
    changed = (value.to(before.device) != before).movedim(letters.index("p"), 0)
    by_position = changed.reshape(len(changed), -1).any(1)
    return int(by_position.int().argmax()) if bool(by_position.any()) else len(by_position)


@dataclass(frozen=True)
class Entry:
    """Where a variant departs from its baseline."""

    layer: int
    """The first layer to run; the number of layers if none."""
    position: int
    """The first position that may differ."""


BEFORE_LAYERS = -1


class Entries:
    """Where changes enter a model: at which layer, and whether they are changes of the stream itself."""

    def __init__(self, points: ModelPoints) -> None:
        self._points = points
        self._known: dict[str, tuple[int, str]] = {}
        self._adds_up = adds_up(points)

    def of(self, variant: Variant) -> Entry:
        """Where a variant starts to differ from its baseline."""
        return Entry(min(self.place(change)[0] for change in variant), min(change.first for change in variant))

    def place(self, change: Change) -> tuple[int, str]:
        """The first layer to run for a change (-1 if it is before all layers), and its relation to the stream there.

        That is "stream" for a change of the stream itself, "added" for one of a known value that is added to it, or "".
        """
        name = change.point.canonical_name
        if name not in self._known:
            self._known[name] = self._found(name)
        layer, kind = self._known[name]
        if kind == "added" and change.before is None:
            return layer, ""
        return (layer + 1, "stream" if kind == "end" else kind) if kind in ("end", "added") else (layer, kind)

    def _found(self, name: str) -> tuple[int, str]:
        anatomy = self._points.anatomy
        stack, _, rest = name.partition(".")
        layer, _, name = rest.partition(".")
        if stack != anatomy.main.name or not layer.isdigit():
            return (len(anatomy.blocks) if stack in ("ln_final", "unembed") else BEFORE_LAYERS), ""
        kind = {"hook_resid_pre": "stream", "hook_resid_post": "end"}.get(name, "")
        is_last = name == "hook_mlp_out" or (name == "hook_attn_out" and anatomy.main.architecture.parallel)
        return int(layer), "added" if is_last and self._adds_up else kind


def adds_up(points: ModelPoints) -> bool:
    """Whether the stream is the sum of what is added to it: not in models that normalize the stream itself."""
    return not points.anatomy.main.is_post_norm


RowChange: TypeAlias = tuple[int, Change]
"""The row of a batch, and the change to make in it."""


def write_all(x: Tensor, placed: Iterable[RowChange], span: range, *, as_difference: bool = False) -> None:
    """Write each change into its row of `x`, which has the positions of `span`; similar changes in one operation."""
    alike: dict[object, list[RowChange]] = {}
    times: Counter[object] = Counter()  # changes at one index (of parallel attention and MLP) come one by one
    for row, change in placed:
        if change.position is not None and change.position >= span.stop:
            continue  # after the last position that is read
        key = tuple("i" if isinstance(index, int) else (index.start, index.stop, index.step) for index in change.where)
        place = (row, key, *(index for index in change.where if isinstance(index, int)))
        alike.setdefault((key, times[place]), []).append((row, change))
        times[place] += 1
    for group in alike.values():
        _put_alike(x, group, span, as_difference=as_difference)


def _put_alike(x: Tensor, group: list[RowChange], span: range, *, as_difference: bool) -> None:
    index: list[Tensor | slice] = [_numbers([row for row, _ in group], x, 0)]
    for place, letter in enumerate(group[0][1].axes):
        whole = group[0][1].where[place]
        if isinstance(whole, slice):
            index.append(whole)
            continue
        numbers = [number for _, change in group if isinstance(number := change.where[place], int)]
        start = span.start if letter == "p" else 0
        index.append(_numbers([number - start for number in numbers], x, place + 1))
    pieces = [_of_span(change, change.value, span) for _, change in group]
    _check_shapes(x, group, pieces)
    values = cast(torch.stack(pieces), x)
    if as_difference:
        before = [_of_span(change, change.before, span) for _, change in group]
        values = x[tuple(index)] + (values - torch.stack(before).to(x))
    x[tuple(index)] = values


def _numbers(index: list[int], x: Tensor, axis: int) -> Tensor:
    """Return indices of an axis, checked: on a GPU, a wrong one would end the use of the GPU by the process."""
    size = x.shape[axis]
    if wrong := [number for number in index if not -size <= number < size]:
        raise IndexError(f"index {wrong[0]} is out of bounds for an axis of size {size}")
    return torch.tensor(index, device=x.device)


def _check_shapes(x: Tensor, group: list[RowChange], pieces: list[Tensor]) -> None:
    where = group[0][1].where
    sizes = x.shape[1:]
    kept_sizes = [size for size, index in zip(sizes, where, strict=False) if isinstance(index, slice)]
    shape = (*kept_sizes, *sizes[len(where) :])  # unnamed axes are not indexed
    for (_, change), piece in zip(group, pieces, strict=True):
        if piece.shape != shape:
            raise HooklineError(
                f"the value for {change.point.name!r} has shape {list(change.value.shape)}, but the activation has "
                f"{list(shape)} at index {change.where}"
            )


def _of_span(change: Change, value: Tensor | None, span: range) -> Tensor:
    """The part of a value for these positions: a value for all positions may have more."""
    assert value is not None
    for place, letter in enumerate(change.free_axes):
        if letter in ("p", "k") and place < value.ndim and value.shape[place] >= span.stop:
            start = span.start if letter == "p" else 0
            value = value.narrow(place, start, span.stop - start)
    return value

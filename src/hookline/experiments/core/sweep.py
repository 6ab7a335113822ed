"""Sweeps: the points that an experiment goes over, its cells, and the variants of runs that the cells stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError, UnknownPointError
from hookline.experiments.core.labels import Label
from hookline.experiments.core.prompts import Prompts
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import LETTERS, Change, Variant, index_of

INSIDE = tuple(LETTERS)
"""The axes of a point that a sweep may go over, besides `layer` and `point`."""


@dataclass(frozen=True, eq=False)
class SweepPoints:
    """The points of a sweep: one for each label of `point` and `layer`, as far as they are axes of it."""

    over: tuple[str, ...]
    coords: dict[str, list[Label]]
    """The labels of `point` and `layer`, as far as they are in `over`."""
    points: dict[tuple[Label, ...], HookPoint]
    """By the labels in `coords`, in the order of `over`."""

    @property
    def names(self) -> list[str]:
        """The names of the points, without duplicates."""
        return list(dict.fromkeys(point.name for point in self.points.values()))


def sweep_points(
    model: HookedModel, points: str | Sequence[str], over: Sequence[str], layers: Sequence[int] | None = None
) -> SweepPoints:
    """The points of a sweep over these axes."""
    kinds = [points] if isinstance(points, str) else list(points)
    axes = tuple(over) if not isinstance(over, str) else (over,)
    if not kinds or not axes:
        raise HooklineError(f"a sweep needs points and axes, got points={points!r}, over={over!r}")
    known = ("layer", "point", *INSIDE)
    for axis in axes:
        if axis not in known or axes.count(axis) > 1:
            raise HooklineError(f"over={axes!r}: the axes of a sweep are {', '.join(known)}, each at most once")
    if "layer" not in axes:
        return _by_name(model, kinds, axes, layers)
    if len(kinds) > 1 and "point" not in axes:
        axes = ("point", *axes)
    return _by_layer(model, kinds, axes, layers)


def _by_layer(model: HookedModel, kinds: list[str], axes: tuple[str, ...], layers: Sequence[int] | None) -> SweepPoints:
    if model._points.anatomy.is_encoder_decoder:
        raise HooklineError("experiments support models with one stack of layers, not encoder-decoder models")
    there = range(_depth(model, kinds))
    if isinstance(layers, int) or (layers is not None and len(set(layers)) != len(list(layers))):
        raise HooklineError(f"layers is a list without duplicates, such as [3, 4], got {layers!r}")
    wrong = next((layer for layer in layers or () if layer not in range(-len(there), len(there))), None)
    if wrong is not None:
        raise HooklineError(f"layer {wrong!r} is out of range: the model has layers 0 to {there[-1]}")
    wanted = there if layers is None else [layer % len(there) for layer in layers]
    found: dict[tuple[str, int], HookPoint] = {}
    for kind, layer in product(kinds, wanted):
        point = _of_layer(model, kind, layer)
        if point is not None:
            found[kind, layer] = point
    having = [layer for layer in wanted if all((kind, layer) in found for kind in kinds)]
    if not having:
        raise HooklineError(f"no layer of this model has {' and '.join(map(repr, kinds))}")
    coords: dict[str, list[Label]] = {"layer": list(having)}
    if "point" in axes:
        coords["point"] = list(kinds)
    outer = [axis for axis in axes if axis in coords]
    points = {}
    for labels in product(*(coords[axis] for axis in outer)):
        at = dict(zip(outer, labels, strict=True))
        points[tuple(labels)] = found[str(at.get("point", kinds[0])), int(at["layer"])]
    return SweepPoints(axes, coords, points)


def _depth(model: HookedModel, kinds: list[str]) -> int:
    """The number of layers of the stack that these points are in."""
    anatomy = model._points.anatomy
    in_tower = [kind.startswith("vision.") for kind in kinds]
    if not any(in_tower) or not anatomy.towers:
        return len(anatomy.blocks)
    if not all(in_tower):
        raise HooklineError(
            f"points={kinds!r} mixes the vision tower and the language model: sweep over them separately"
        )
    return len(anatomy.towers[0].blocks)


def _of_layer(model: HookedModel, kind: str, layer: int) -> HookPoint | None:
    """The point of this kind in a layer, or None; an error if no layer has one."""
    asked: tuple[Any, ...] = (kind, layer)
    if kind.startswith("vision.") and kind.count(".") == 1:  # vision.z, the shorthand of the language model
        asked = (kind.removeprefix("vision."), layer, "vision")
    try:
        name = model._points.name_of(asked)
    except UnknownPointError:
        name = kind
    if name not in model._points.specs:
        raise UnknownPointError(
            f"layers have no point {kind!r}: use resid_pre, attn_out, mlp_out, z, q, k, v, pattern, post, … (vision "
            f"tower: vision.resid_pre, vision.z, …); or names of points, without 'layer' in over"
        )
    return model._points.hook_dict.get(name)


def _by_name(model: HookedModel, names: list[str], axes: tuple[str, ...], layers: Sequence[int] | None) -> SweepPoints:
    if layers is not None:
        raise HooklineError("layers= selects layers of a sweep over layers: add 'layer' to over")
    found = list({point.name: point for name in names for point in model._points.select(name)}.values())
    if len(found) > 1 and "point" not in axes:
        axes = ("point", *axes)
    if "point" not in axes:
        return SweepPoints(axes, {}, {(): found[0]})
    return SweepPoints(axes, {"point": [point.name for point in found]}, {(point.name,): point for point in found})


Values: TypeAlias = Mapping[str, Tensor]
"""The activations of one prompt by point, without a batch axis."""
Key: TypeAlias = tuple[Label, ...]
Covered: TypeAlias = list[tuple[HookPoint, dict[str, int]]]
"""The points that a cell covers, each at indices of its axes; positions in the text are columns of the batch."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The cells to measure: axes with labels, and for each cell the variant of each prompt."""

    axes: tuple[str, ...]
    coords: dict[str, list[Label]]
    variants: list[list[Variant]]


def make_grid(
    where: SweepPoints, given: Sequence[Values], bases: Sequence[Baseline], prompts: Prompts, labels: Sequence[Label]
) -> Grid:
    """A grid whose cells each write the `given` values of a prompt into the run on that prompt."""
    cells = make_cells([where], bases, prompts, labels)
    return CellBuilder(cells, given, bases, prompts).grid()


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a sweep, by their labels: the points that each covers, and at which index."""

    coords: dict[str, list[Label]]
    covered: dict[Key, Covered]


def make_cells(
    rows: Sequence[SweepPoints], bases: Sequence[Baseline], prompts: Prompts, labels: Sequence[Label]
) -> Cells:
    """The cells of a sweep over points; of several kinds of points, those of each layer form one cell."""
    if len(rows) > 1:
        layers = sorted({int(key[0]) for each in rows for key in each.points})
        covered: dict[Key, Covered] = {
            (layer,): [(each.points[(layer,)], {}) for each in rows if (layer,) in each.points] for layer in layers
        }
        return Cells({"layer": list(layers)}, covered)
    (where,) = rows
    inner = [axis for axis in where.over if axis not in where.coords]
    sizes = {axis: axis_size(where, bases, axis, prompts.width) for axis in inner}
    is_text = not any(point.stream == "image" for point in where.points.values())
    named: dict[str, list[Label]] = {
        axis: list(labels) if axis in ("pos", "src") and is_text else list(range(sizes[axis])) for axis in inner
    }
    coords = {axis: (where.coords | named)[axis] for axis in where.over}
    shared = {
        point.name: {axis: _shared(point, axis, sizes[axis], bases[0]) for axis in inner}
        for point in where.points.values()
    }
    covered = {}
    for cell in product(*(range(len(coords[axis])) for axis in where.over)):
        at = dict(zip(where.over, cell, strict=True))
        key = tuple(coords[axis][number] for axis, number in at.items())
        point = where.points[tuple(coords[axis][number] for axis, number in at.items() if axis in where.coords)]
        covered[key] = [(point, {axis: at[axis] // shared[point.name][axis] for axis in inner})]
    return Cells(coords, covered)


def _shared(point: HookPoint, axis: str, size: int, base: Baseline) -> int:
    """How many labels share an index: heads of one group have the same keys and values."""
    if axis in ("pos", "src") and point.stream != "image":
        return 1
    return size // base.kept[point.name].shape[axis_index(point, axis)]


def axis_size(where: SweepPoints, bases: Sequence[Baseline], axis: str, width: int) -> int:
    """How many labels an axis inside the points has. Where heads share keys and values, as many as there are heads."""
    if axis in ("pos", "src") and not any(point.stream == "image" for point in where.points.values()):
        for point in where.points.values():
            index_of(point, **{axis: 0})  # raises if the point has no such axis
        return width
    for point in where.points.values():
        of_prompts = {base.kept[point.name].shape[axis_index(point, axis)] for base in bases}
        if len(of_prompts) > 1:
            raise HooklineError(
                f"the prompts differ in the size of axis {axis!r} at {point.name!r}: {sorted(of_prompts)}. Use images "
                f"of one size, the same number in each prompt, or remove {axis!r} from over"
            )
    sizes = {point.name: bases[0].kept[point.name].shape[axis_index(point, axis)] for point in where.points.values()}
    most = max(sizes.values())
    if any(most % size for size in sizes.values()) or (axis != "head" and len(set(sizes.values())) > 1):
        raise HooklineError(f"the points differ in the size of axis {axis!r}: {sizes}. Sweep over them separately")
    return most


def axis_index(point: HookPoint, axis: str) -> int:
    """The index of an axis in a point's value without the batch."""
    where = index_of(point, **{axis: 0})
    return next(place for place, each in enumerate(where) if isinstance(each, int))


class CellBuilder:
    """Builds the variants of cells: the values `given` for each prompt, written into the run on that prompt.

    With `positions`, of each prompt, values are written at these positions only.
    """

    def __init__(
        self,
        cells: Cells,
        given: Sequence[Values],
        bases: Sequence[Baseline],
        prompts: Prompts,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.cells, self._given, self._bases, self._prompts, self._positions = cells, given, bases, prompts, positions
        self._points: dict[tuple[int, str], PointChanges] = {}
        self._known: dict[tuple[int, str, Any], list[tuple[Change, bool]]] = {}

    def grid(self) -> Grid:
        """All cells, each by itself."""
        variants = [self.variant_for([key]) for key in self.cells.covered]
        return Grid(tuple(self.cells.coords), self.cells.coords, variants)

    def variant_for(self, keys: Sequence[Key]) -> list[Variant]:
        """For each prompt, the changes of these cells together; none if no value would change."""
        return [self._variant(row, keys) for row in range(len(self._prompts))]

    def _variant(self, row: int, keys: Sequence[Key]) -> Variant:
        made = [each for key in keys for point, at in self.cells.covered[key] for each in self._changes(row, point, at)]
        # A change that is none by itself stays beside others: they would have made something else of that value.
        return [change for change, _ in made] if any(differs for _, differs in made) else ()

    def _changes(self, row: int, point: HookPoint, at: dict[str, int]) -> list[tuple[Change, bool]]:
        known = (row, point.name, tuple(at.items()))
        if known not in self._known:
            self._known[known] = self._made(row, point, at)
        return self._known[known]

    def _made(self, row: int, point: HookPoint, at: dict[str, int]) -> list[tuple[Change, bool]]:
        span, inside = self._prompts.span(row), dict(at)
        for axis in ("pos", "src") if point.stream != "image" else ():
            if axis in inside and inside[axis] not in span:
                return []  # padding
            if axis in inside:
                inside[axis] -= span.start
        if self._positions is None:
            return [self._point(row, point, tuple(inside)).at(inside)]
        build = self._point(row, point, (*inside, "pos"))
        return [build.at(inside | {"pos": each}) for each in self._positions[row]]

    def _point(self, row: int, point: HookPoint, axes: tuple[str, ...]) -> PointChanges:
        if (row, point.name) not in self._points:
            self._points[row, point.name] = PointChanges(self._bases[row], point, self._given[row][point.name], axes)
        return self._points[row, point.name]


class PointChanges:
    """The changes that write a given value into a run at one point, at indices of some of its axes."""

    def __init__(self, base: Baseline, point: HookPoint, given: Tensor, axes: Sequence[str]) -> None:
        before = base.kept[point.name]
        if given.shape != before.shape:
            raise HooklineError(
                f"the value for {point.name!r} has shape {list(given.shape)}, but the run has {list(before.shape)} "
                f"there: do the clean and corrupted prompts have the same length?"
            )
        self._base, self._point, self._value = base, point, given.to(before.device)
        self._others = [axis for axis in axes if axis != "pos"]
        self._changed = self._changed_at(self._value != before)

    def _changed_at(self, changed: Tensor) -> np.ndarray:
        """Whether anything changes, by the indices of a cell except its position, and then by position."""
        letters = self._point.axes.split()[1:]
        order = [axis_index(self._point, axis) for axis in self._others]
        order += [letters.index("p")] if "p" in letters else []
        for place in reversed(range(changed.ndim)):
            if place not in order:
                changed = changed.any(place)
        found = changed.cpu().numpy().transpose([sorted(order).index(place) for place in order])
        return found if "p" in letters else found[..., None]

    def at(self, index: dict[str, int]) -> tuple[Change, bool]:
        """The change at an index, and whether it changes anything."""
        changed, pos = self._changed[tuple(index[axis] for axis in self._others)], index.get("pos")
        differs = bool(changed.any() if pos is None else changed[pos])
        first = pos if pos is not None else int(changed.argmax()) if differs else len(changed)
        value = self._value[index_of(self._point, **index)]
        return self._base.change(self._point, value, first=first, **index), differs

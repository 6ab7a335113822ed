"""Grids: the cells of a sweep, a place inside the model for each, and what one run has there that another has not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError, UnknownPointError
from hookline.experiments.core.labels import Label
from hookline.experiments.core.prompts import Prompts
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import LETTERS, Change, Index, Variant, index_of

INSIDE = tuple(LETTERS)
"""The axes of a point that a sweep may go along, beside `layer` and `point`."""


@dataclass(frozen=True, eq=False)
class Places:
    """The places of a sweep: a point for each label of `point` and `layer`, whichever of those it goes along."""

    over: tuple[str, ...]
    coords: dict[str, list[Label]]
    """Of `point` and `layer`, as far as they are in `over`."""
    points: dict[tuple[Label, ...], HookPoint]
    """By the labels in `coords`, in the order of `over`."""

    @property
    def names(self) -> list[str]:
        """The points, each once."""
        return list(dict.fromkeys(point.name for point in self.points.values()))


def places(
    model: HookedModel, points: str | Sequence[str], over: Sequence[str], layers: Sequence[int] | None = None
) -> Places:
    """The points that a sweep over these axes goes to."""
    kinds = [points] if isinstance(points, str) else list(points)
    axes = tuple(over) if not isinstance(over, str) else (over,)
    if not kinds or not axes:
        raise HooklineError(f"a sweep needs points and axes to go along, but has points={points!r}, over={over!r}")
    known = ("layer", "point", *INSIDE)
    for axis in axes:
        if axis not in known or axes.count(axis) > 1:
            raise HooklineError(f"over={axes!r}: the axes of a sweep are {', '.join(known)}, each at most once")
    if "layer" not in axes:
        return _by_name(model, kinds, axes, layers)
    if len(kinds) > 1 and "point" not in axes:
        axes = ("point", *axes)
    return _by_layer(model, kinds, axes, layers)


def _by_layer(model: HookedModel, kinds: list[str], axes: tuple[str, ...], layers: Sequence[int] | None) -> Places:
    if model._points.anatomy.is_encoder_decoder:
        raise HooklineError("experiments are for models with one stack of layers, not for an encoder and a decoder")
    there = range(_depth(model, kinds))
    if isinstance(layers, int) or (layers is not None and len(set(layers)) != len(list(layers))):
        raise HooklineError(f"layers are a list of different ones, as in [3, 4], not {layers!r}")
    wrong = next((layer for layer in layers or () if layer not in range(-len(there), len(there))), None)
    if wrong is not None:
        raise HooklineError(f"layer {wrong!r}, but the model has {len(there)}: 0 to {there[-1]}")
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
    points = {
        tuple(labels): found[str(dict(zip(outer, labels, strict=True)).get("point", kinds[0])), int(layer)]
        for labels in product(*(coords[axis] for axis in outer))
        for layer in (dict(zip(outer, labels, strict=True))["layer"],)
    }
    return Places(axes, coords, points)


def _depth(model: HookedModel, kinds: list[str]) -> int:
    """How many layers the stack has that these kinds of points are in."""
    anatomy = model._points.anatomy
    in_tower = [kind.startswith("vision.") for kind in kinds]
    if not any(in_tower) or not anatomy.towers:
        return len(anatomy.blocks)
    if not all(in_tower):
        raise HooklineError(f"points={kinds!r} are of the vision tower and of the language part: sweep them apart")
    return len(anatomy.towers[0].blocks)


def _of_layer(model: HookedModel, kind: str, layer: int) -> HookPoint | None:
    """The point of that kind in a layer, if it has one; an error if no layer ever has."""
    asked: tuple[Any, ...] = (kind, layer)
    if kind.startswith("vision.") and kind.count(".") == 1:  # vision.z, by the shorthand of the language part
        asked = (kind.removeprefix("vision."), layer, "vision")
    try:
        name = model._points.spelled(asked)
    except UnknownPointError:
        name = kind
    if name not in model._points.specs:
        raise UnknownPointError(
            f"{kind!r} is no kind of point that layers have: give resid_pre, attn_out, mlp_out, z, q, k, v, "
            f"pattern, post, … (of what sees: vision.resid_pre, vision.z, …); or names of points, and leave layer out "
            f"of over"
        )
    return model._points.hook_dict.get(name)


def _by_name(model: HookedModel, names: list[str], axes: tuple[str, ...], layers: Sequence[int] | None) -> Places:
    if layers is not None:
        raise HooklineError("layers= picks layers of a sweep over layers: put layer into over")
    found = list({point.name: point for name in names for point in model._points.select(name)}.values())
    if len(found) > 1 and "point" not in axes:
        axes = ("point", *axes)
    if "point" not in axes:
        return Places(axes, {}, {(): found[0]})
    return Places(axes, {"point": [point.name for point in found]}, {(point.name,): point for point in found})


Values = Mapping[str, Tensor]
"""What one prompt has at each point, without a batch axis."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The cells of a sweep over some prompts: axes with labels, and the variant of each prompt for each cell."""

    axes: tuple[str, ...]
    coords: dict[str, list[Label]]
    variants: list[list[Variant]]


def make_grid(
    rows: Places, given: Sequence[Values], bases: Sequence[Baseline], prompts: Prompts, labels: Sequence[Label]
) -> Grid:
    """Cells that put what is `given`, for each prompt, into runs on the prompts."""
    inner = [axis for axis in rows.over if axis not in rows.coords]
    sizes = {axis: axis_size(rows, bases, axis, prompts.width) for axis in inner}
    of_text = not any(point.stream == "image" for point in rows.points.values())
    coords = rows.coords | {
        axis: list(labels) if axis in ("pos", "src") and of_text else list(range(sizes[axis])) for axis in inner
    }
    makers = {
        key: [_Maker(point, sizes, given[row], base, prompts.span(row)) for row, base in enumerate(bases)]
        for key, point in rows.points.items()
    }
    variants: list[list[Variant]] = []
    for cell in product(*(range(len(coords[axis])) for axis in rows.over)):
        at = dict(zip(rows.over, cell, strict=True))
        key = tuple(coords[axis][number] for axis, number in at.items() if axis in rows.coords)
        inside = tuple(at[axis] for axis in inner)
        variants.append([make(inside) for make in makers[key]])
    return Grid(rows.over, {axis: coords[axis] for axis in rows.over}, variants)


def axis_size(rows: Places, bases: Sequence[Baseline], axis: str, width: int) -> int:
    """How many labels an axis inside the points has. Where heads share keys and values, as many as there are heads."""
    if axis in ("pos", "src") and not any(point.stream == "image" for point in rows.points.values()):
        for point in rows.points.values():
            index_of(point, **{axis: 0})  # it must have one
        return width
    for point in rows.points.values():
        of_prompts = {base.kept[point.name].shape[place_of(point, axis)] for base in bases}
        if len(of_prompts) > 1:
            raise HooklineError(
                f"the prompts differ in their number of {axis} at {point.name!r}: {sorted(of_prompts)}. Give images "
                f"of one size, as many in each prompt, or leave {axis!r} out of over"
            )
    sizes = {point.name: bases[0].kept[point.name].shape[place_of(point, axis)] for point in rows.points.values()}
    most = max(sizes.values())
    if any(most % size for size in sizes.values()) or (axis != "head" and len(set(sizes.values())) > 1):
        raise HooklineError(f"the points differ in how many {axis}s they have: {sizes}. Sweep them apart")
    return most


def place_of(point: HookPoint, axis: str) -> int:
    """Which axis of a point's value, without the batch, that is."""
    where = index_of(point, **{axis: 0})
    return next(place for place, each in enumerate(where) if isinstance(each, int))


class _Maker:
    """Makes the changes of one prompt at one point. Where nothing would change, there are none."""

    def __init__(self, point: HookPoint, sizes: Mapping[str, int], given: Values, base: Baseline, span: range) -> None:
        self.point, self.span = point, span
        inner = list(sizes)
        self.value, self.before = _alike(point, given[point.name], base.kept[point.name])
        self.places = [place_of(point, axis) for axis in inner]
        self.is_text = [axis in ("pos", "src") and point.stream != "image" for axis in inner]
        self.at_position = inner.index("pos") if "pos" in inner else None
        self.shared = [  # by how many labels an index is shared: heads of one group have the same keys
            1 if text else size // self.value.shape[place]
            for place, size, text in zip(self.places, sizes.values(), self.is_text, strict=True)
        ]
        self.changed = self._changed()

    def _changed(self) -> np.ndarray:
        """Whether anything changes, by the indices of a cell but for its position, and then by position."""
        letters = self.point.axes.split()[1:]
        position = letters.index("p") if "p" in letters else None
        kept = [place for place in range(self.value.ndim) if place in self.places or place == position]
        changed = self.value != self.before
        for place in reversed(range(self.value.ndim)):
            if place not in kept:
                changed = changed.any(place)
        order = [place for place in self.places if place != position] + ([] if position is None else [position])
        found = changed.cpu().numpy().transpose([kept.index(place) for place in order])
        return found if position is not None else found[..., None]

    def __call__(self, cell: tuple[int, ...]) -> Variant:
        where: list[Index] = [slice(None)] * self.value.ndim
        for number, at in enumerate(cell):
            if not self.is_text[number]:
                where[self.places[number]] = at // self.shared[number]
            elif at in self.span:
                where[self.places[number]] = at - self.span.start
            else:
                return ()  # padding
        numbers = [where[place] for place in self.places]
        position = numbers.pop(self.at_position) if self.at_position is not None else None
        changed = self.changed[tuple(numbers)]
        if not (changed[position] if position is not None else changed.any()):
            return ()
        first = position if isinstance(position, int) else int(changed.argmax())
        first = 0 if self.point.stream == "image" else first  # pictures come before the text
        index = tuple(where)
        return (Change(self.point, index, self.value[index], first, self.before[index]),)


def _alike(point: HookPoint, value: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    if value.shape != before.shape:
        raise HooklineError(
            f"what is to be put in at {point.name!r} has the shape {list(value.shape)}, but there it is "
            f"{list(before.shape)}: were clean and corrupted prompts of the same length?"
        )
    return value.to(before.device), before

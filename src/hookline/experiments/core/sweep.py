"""Sweeps: the points that an experiment goes over, its cells, and the changes that each cell makes to a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.engine import HookPoint
from hookline.errors import HooklineError, UnknownPointError
from hookline.experiments.core.aligned import Aligned, PromptPositions, aligned_pair
from hookline.experiments.core.labels import Label
from hookline.experiments.core.prompts import Prompts, check_language_model
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import LETTERS, Change, Variant, index_of
from hookline.text.token_positions import is_index

Values: TypeAlias = Mapping[str, Tensor]
"""The activations of one prompt by point, without a batch axis."""
Key: TypeAlias = tuple[Label, ...]
Covered: TypeAlias = list[tuple[HookPoint, dict[str, int]]]
"""The points that a cell covers, each at indices of its axes; positions in the text are columns of the batch."""


@dataclass(frozen=True, eq=False)
class SweepPoints:
    """The points of a sweep: one for each label of `point` and `layer`, as far as these are axes of the sweep."""

    over: tuple[str, ...]
    coords: dict[str, list[Label]]
    """The labels of `point` and `layer`, as far as they are in `over`."""
    points: dict[Key, HookPoint]
    """By the labels in `coords`, in the order of `over`."""

    @property
    def names(self) -> list[str]:
        """The names of the points, without duplicates."""
        return list(dict.fromkeys(point.name for point in self.points.values()))

    @property
    def inner(self) -> list[str]:
        """The axes of the sweep that are inside the points."""
        return [axis for axis in self.over if axis not in self.coords]

    @property
    def in_tower(self) -> bool:
        """Whether any of the points is in the vision tower."""
        return any(point.stream == "image" for point in self.points.values())

    def laid_out(self, values: Sequence[Tensor], inner: Sequence[str]) -> Tensor:
        """A value for each point, with the axes `inner`, as one tensor over the axes of the sweep and then any others.

        Raises if the points differ in the size of these axes.
        """
        if len({x.shape for x in values}) > 1:
            sizes = {point.name: list(x.shape) for point, x in zip(self.points.values(), values, strict=True)}
            raise HooklineError(f"the points differ in the size of {' and '.join(self.inner)}: {sizes}. Use them apart")
        x = torch.stack([*values]).reshape([*map(len, self.coords.values()), *values[0].shape])
        axes = [*self.coords, *inner]
        target_axes = [*self.over, *(axis for axis in inner if axis not in self.over)]
        return x.permute([axes.index(axis) for axis in target_axes])

    def labels(self, sizes: Mapping[str, int], positions: Sequence[Label]) -> dict[str, list[Label]]:
        """The labels of each axis, given the sizes of the inner axes, and labels for positions in the text."""
        labels: dict[str, list[Label]] = {}
        for axis in self.over:
            is_text = axis in ("pos", "src") and not self.in_tower
            labels[axis] = self.coords.get(axis) or (list(positions) if is_text else list(range(sizes[axis])))
        return labels


def sweep_points(
    model: HookedModel, points: str | Sequence[str], over: str | Sequence[str], layers: Sequence[int] | None = None
) -> SweepPoints:
    """The points of a sweep over these axes."""
    check_language_model(model)
    kinds = [points] if isinstance(points, str) else list(points)
    axes = tuple(over) if not isinstance(over, str) else (over,)
    if not kinds or not axes:
        raise HooklineError(f"a sweep needs points and axes, got points={points!r}, over={over!r}")
    if not all(isinstance(kind, str) for kind in kinds):
        raise HooklineError(
            f"points={points!r}: points are names; for one layer, use for example points='z', layers=[1]"
        )
    allowed_axes = ("layer", "point", *LETTERS)
    for axis in axes:
        if axis not in allowed_axes or axes.count(axis) > 1:
            raise HooklineError(f"over={axes!r}: the axes of a sweep are {', '.join(allowed_axes)}, each at most once")
    if "layer" not in axes:
        return _by_name(model, kinds, axes, layers)
    if len(kinds) > 1 and "point" not in axes:
        axes = ("point", *axes)
    return _by_layer(model, kinds, axes, layers)


def _by_layer(model: HookedModel, kinds: list[str], axes: tuple[str, ...], layers: Sequence[int] | None) -> SweepPoints:
    if model.anatomy.is_encoder_decoder:
        raise HooklineError("experiments support models with one stack of layers, not encoder-decoder models")
    all_layers = range(_depth(model, kinds))
    requested = all_layers if layers is None else layer_numbers(layers, len(all_layers))
    candidates: dict[Any, Any] = {
        (kind, layer): _of_layer(model, kind, layer) for kind, layer in product(kinds, requested)
    }
    having: list[Label] = [layer for layer in requested if all(candidates[kind, layer] is not None for kind in kinds)]
    if not having:
        raise HooklineError(f"none of the layers {list(requested)} has {' and '.join(map(repr, kinds))}")
    all_coords: dict[str, list[Label]] = {"point": [*kinds], "layer": having}
    coords = {axis: all_coords[axis] for axis in axes if axis in all_coords}
    points = {}
    for labels in product(*coords.values()):
        at = dict(zip(coords, labels, strict=True))
        points[labels] = candidates[at.get("point", kinds[0]), at["layer"]]
    return SweepPoints(axes, coords, points)


def layer_numbers(layers: Any, count: int) -> list[int]:
    """The layers of a list, none negative; an error for what is not a layer of `count`."""
    if isinstance(layers, int | str) or not 0 < len({*layers}) == len(list(layers)):
        raise HooklineError(f"layers is a list without duplicates, such as [3, 4], got {layers!r}")
    return [layer_number(layer, count) for layer in layers]


def layer_number(layer: Any, count: int) -> int:
    """A layer counted from the first, given from the first or, negative, from the last."""
    if not is_index(layer):
        raise HooklineError(f"a layer is an int, 0 to {count - 1} or -1 for the last, not {layer!r:.60}")
    if layer not in range(-count, count):
        raise HooklineError(f"layer {layer!r} is out of range: the model has layers 0 to {count - 1}")
    return index(layer) % count


def _depth(model: HookedModel, kinds: list[str]) -> int:
    """The number of layers of the stack that these points are in."""
    anatomy = model.anatomy
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
    address: tuple[Any, ...] = (kind, layer)
    if kind.startswith("vision.") and kind.count(".") == 1:  # vision.z: the shorthand z, in the vision tower
        address = (kind.removeprefix("vision."), layer, "vision")
    try:
        name = model.index.name_of(address)
    except UnknownPointError:
        name = kind
    if name not in model.index.specs:
        raise UnknownPointError(
            f"layers have no point {kind!r}: use resid_pre, attn_out, mlp_out, z, q, k, v, pattern, post, … (vision "
            f"tower: vision.resid_pre, vision.z, …); or names of points, without 'layer' in over"
        )
    if str(layer) not in name.split("."):
        raise HooklineError(
            f"points={kind!r} is one point, not a point of every layer: use for example points='resid_pre' with "
            f"layers=[1], or leave 'layer' out of over"
        )
    return model.index.hook_dict.get(name)


def _by_name(model: HookedModel, names: list[str], axes: tuple[str, ...], layers: Sequence[int] | None) -> SweepPoints:
    if layers is not None:
        raise HooklineError("layers= selects layers of a sweep over layers: add 'layer' to over")
    points = {point.name: point for name in names for point in model.index.select(name)}
    if len(points) > 1 and "point" not in axes:
        axes = ("point", *axes)
    if "point" not in axes:
        return SweepPoints(axes, {}, {(): next(iter(points.values()))})
    return SweepPoints(axes, {"point": list(points)}, {(name,): point for name, point in points.items()})


@dataclass(frozen=True, eq=False)
class Grid:
    """The cells to measure: axes with labels, and for each cell the variant of each prompt."""

    axes: tuple[str, ...]
    coords: dict[str, list[Label]]
    variants: list[list[Variant]]


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a sweep, by their labels: the points that each covers, and at which index."""

    coords: dict[str, list[Label]]
    covered: dict[Key, Covered]

    @property
    def points(self) -> list[HookPoint]:
        """The points that the cells cover, without duplicates."""
        return list(dict.fromkeys(point for covered in self.covered.values() for point, _ in covered))

    @property
    def names(self) -> list[str]:
        """The names of these points."""
        return [point.name for point in self.points]

    def without(self, axis: str) -> Cells:
        """The cells without an axis that has a single label."""
        place = list(self.coords).index(axis)
        coords = {name: labels for name, labels in self.coords.items() if name != axis}
        return Cells(coords, {key[:place] + key[place + 1 :]: covered for key, covered in self.covered.items()})


def make_cells(where: SweepPoints, bases: Sequence[Baseline], labels: Sequence[Label]) -> Cells:
    """The cells of a sweep over points; `labels` are those of positions in the text: of all columns, or aligned."""
    sizes = {axis: _sizes(where, bases, axis, len(labels)) for axis in where.inner}
    coords = where.labels({axis: max(by_point.values()) for axis, by_point in sizes.items()}, labels)
    covered: dict[Key, Covered] = {}
    for cell in product(*(range(len(axis_labels)) for axis_labels in coords.values())):
        key = tuple(coords[axis][number] for axis, number in zip(coords, cell, strict=True))
        point = where.points[tuple(label for axis, label in zip(coords, key, strict=True) if axis in where.coords)]
        at = dict(zip(coords, cell, strict=True))
        # Heads of one group have the same keys and values, so that labels share an index.
        inside = {axis: at[axis] * sizes[axis][point.name] // len(coords[axis]) for axis in sizes}
        covered[key] = [(point, inside)]
    return Cells(coords, covered)


def _sizes(where: SweepPoints, bases: Sequence[Baseline], axis: str, width: int) -> dict[str, int]:
    """The size of an axis inside each point; positions in the text are columns of the batch."""
    sizes: dict[str, int] = {}
    for point in where.points.values():
        place = axis_index(point, axis)
        lengths = {base.kept[point.name].shape[place] for base in bases}
        if axis in ("pos", "src") and not where.in_tower:
            lengths = {width}
        if len(lengths) > 1:
            raise HooklineError(
                f"the prompts differ in the size of axis {axis!r} at {point.name!r}: {sorted(lengths)}. Use images of "
                f"one size, the same number in each prompt, or remove {axis!r} from over"
            )
        sizes[point.name] = lengths.pop()
    most = max(sizes.values())
    if any(most % size for size in sizes.values()) or (axis != "head" and len(set(sizes.values())) > 1):
        raise HooklineError(f"the points differ in the size of axis {axis!r}: {sizes}. Sweep over them separately")
    return sizes


def check_aligned(where: SweepPoints) -> None:
    """Raise unless positions can be selected at these points."""
    if where.in_tower:
        raise HooklineError(
            "positions=… is a position in the text, but these points are in the vision tower: remove it"
        )
    if "src" in where.over:
        raise HooklineError("positions=… selects positions of the text, not key positions: remove 'src' from over")
    for point in where.points.values():
        axis_index(point, "pos")  # raises if there is none


def aligned_sweep(
    model: HookedModel, where: SweepPoints, source: Prompts, target: Prompts, positions: PromptPositions
) -> tuple[Aligned, Aligned]:
    """The cells of positions in the prompts to patch from, and in those to patch."""
    check_aligned(where)
    with_keys = [point.name for point in where.points.values() if "k" in point.axes.split()]
    if with_keys and list(map(len, source.spans)) != list(map(len, target.spans)):
        raise HooklineError(
            f"{with_keys[0]!r} has a value for each key position, so clean and corrupted prompts must have the same "
            f"length: use such prompts, or another point"
        )
    return aligned_pair(model, source, target, positions, apart="pos" in where.over)


def axis_index(point: HookPoint, axis: str) -> int:
    """The index of an axis in a point's value without the batch; an error if the point has no such axis."""
    where = index_of(point, **{axis: 0})
    return next(place for place, selector in enumerate(where) if isinstance(selector, int))


def moved_values(
    where: SweepPoints, values: Sequence[Values], bases: Sequence[Baseline], source: Aligned, target: Aligned
) -> list[dict[str, Tensor]]:
    """The values of other runs at aligned positions, in the shape of these runs, whose values they have elsewhere."""
    rows = []
    for row, (others, base) in enumerate(zip(values, bases, strict=True)):
        of_row: dict[str, Tensor] = {}
        for point in where.points.values():
            before, axis = base.kept[point.name], axis_index(point, "pos")
            places = [[at for cell in aligned.at for at in cell[row]] for aligned in (source, target)]
            of_row[point.name] = moved(others[point.name].to(before), before, axis, *places, name=point.name)
        rows.append(of_row)
    return rows


def moved(
    source: Tensor, target: Tensor, axis: int, places: Sequence[int], target_places: Sequence[int], *, name: str
) -> Tensor:
    """The target with the source's values at some places along an axis."""
    if source.shape[:axis] != target.shape[:axis] or source.shape[axis + 1 :] != target.shape[axis + 1 :]:
        raise HooklineError(
            f"{name!r} has the shape {list(source.shape)} in the run to patch from, but {list(target.shape)} in the "
            f"other, which differ in more than positions: use prompts of the same length for this point"
        )
    index = [torch.tensor([*at], device=target.device) for at in (places, target_places)]
    return target.index_copy(axis, index[1], source.index_select(axis, index[0]))


class CellBuilder:
    """Builds the variants of cells: the `values` for each prompt, written into the run on that prompt.

    With `positions`, the axis `pos` has those cells in place of columns; without that axis, values are written at the
    positions of the only cell.
    """

    def __init__(
        self,
        cells: Cells,
        values: Sequence[Values],
        bases: Sequence[Baseline],
        prompts: Prompts,
        positions: Aligned | None = None,
    ) -> None:
        self.cells, self.bases, self.prompts, self.positions, self._given = cells, bases, prompts, positions, values
        self._known: dict[tuple[int, str, Any], list[tuple[Change, bool]]] = {}

    def grid(self) -> Grid:
        """All cells, each by itself."""
        variants = [self.variant_for([key]) for key in self.cells.covered]
        return Grid(tuple(self.cells.coords), self.cells.coords, variants)

    def variant_for(self, keys: Sequence[Key]) -> list[Variant]:
        """For each prompt, the changes of these cells together; none if no value would change."""
        return [self._variant(row, keys) for row in range(len(self.prompts))]

    def _variant(self, row: int, keys: Sequence[Key]) -> Variant:
        made = [pair for key in keys for point, at in self.cells.covered[key] for pair in self._changes(row, point, at)]
        # A change to the baseline's own value is kept beside others, which would change that value.
        return [change for change, _ in made] if any(differs for _, differs in made) else ()

    def _changes(self, row: int, point: HookPoint, at: dict[str, int]) -> list[tuple[Change, bool]]:
        """The changes at an index of a point, each with whether the value differs from the baseline's."""
        key = (row, point.name, tuple(at.items()))
        if key not in self._known:
            base, activation, inside = self.bases[row], self._given[row][point.name], dict(at)
            before, span = base.kept[point.name], self.prompts.spans[row]
            if activation.shape != before.shape:
                raise HooklineError(
                    f"the value for {point.name!r} has shape {list(activation.shape)}, but the run has "
                    f"{list(before.shape)} there: do the clean and corrupted prompts have the same length?"
                )
            if self.positions is not None:
                every = [inside | {"pos": at} for at in self.positions.at[inside.get("pos", 0)][row]]
            else:
                text_axes = [axis for axis in ("pos", "src") if axis in inside and point.stream != "image"]
                is_padding = any(inside[axis] not in span for axis in text_axes)
                every = [] if is_padding else [inside | {axis: inside[axis] - span.start for axis in text_axes}]
            self._known[key] = [_change(base, point, activation, indices) for indices in every]
        return self._known[key]


def _change(base: Baseline, point: HookPoint, activation: Tensor, at: dict[str, int]) -> tuple[Change, bool]:
    before = base.kept[point.name][index_of(point, **at)]
    value = activation[index_of(point, **at)].to(before.device)
    return base.change(point, value, **at), bool((value != before).any())

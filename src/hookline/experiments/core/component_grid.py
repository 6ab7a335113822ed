"""Units: the parts of a model that are ablated one by one or together, and the changes that ablate them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, TypeAlias

import torch
from numpy import generic, ndarray
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.core.measure import Reader, padded_logits
from hookline.experiments.core.prompts import Prompts, baselines
from hookline.experiments.core.replacements import Replacement
from hookline.experiments.core.sweep import Places, Values, axis_size, places
from hookline.experiments.metrics import as_metric
from hookline.experiments.result import Cell
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Change, Variant, adds_up, index_of
from hookline.rerun.strategy import stream_names
from hookline.residual.stream import is_rounding
from hookline.text.token_positions import Meaning, canonical, image_tokens

Of: TypeAlias = Literal["heads", "attention", "mlps", "layers", "neurons"]
Key: TypeAlias = tuple[Label, ...]

_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "heads": ("z", ("layer", "head")),
    "attention": ("attn_out", ("layer",)),
    "mlps": ("mlp_out", ("layer",)),
    "neurons": ("post", ("layer", "neuron")),
}


@dataclass(frozen=True, eq=False)
class Choice:
    """Which parts are meant, as the caller said it."""

    of: Of | None
    points: str | Sequence[str] | None
    over: str | Sequence[str]
    layer: int | Sequence[int] | None

    def __post_init__(self) -> None:
        if self.of is not None and self.points is not None:
            raise HooklineError(f"of={self.of!r} says which points: leave out points, or of")
        if self.of is not None and self.of not in (*_KINDS, "layers"):
            raise HooklineError(f"of is one of {', '.join(map(repr, (*_KINDS, 'layers')))}, not {self.of!r}")
        if self.points is None and self.over != ("layer",):
            raise HooklineError(f"over={self.over!r} goes with points=…: of={self.of or 'heads'!r} has axes of its own")

    def of_ranking(self, info: Mapping[str, Any]) -> Choice:
        """The parts that a result with this `info` is of; what else is said must be the same."""
        known = info.get("choice")
        if known is None:
            raise HooklineError("the order is a result, but not of ablate(…): give its cells in order, result.top(k)")
        said = self.points is not None or self.of not in (None, known["of"])
        if said or (self.layer is not None and self.to_dict()["layer"] != known["layer"]):
            raise HooklineError(f"the ranking is of {known}: leave out of, points, over and layer")
        return Choice(known["of"], known["points"], tuple(known["over"]), known["layer"])

    def to_dict(self) -> dict[str, Any]:
        """As it is kept with a result."""
        points = self.points if isinstance(self.points, str | None) else list(self.points)
        layer = self.layer if isinstance(self.layer, int | None) else list(self.layer)
        over = [self.over] if isinstance(self.over, str) else list(self.over)
        of = self.of if self.of is not None or points is not None else "heads"
        return {"of": of, "points": points, "over": over, "layer": layer}

    def layers(self, model: HookedModel) -> list[int] | None:
        """The layers, counted from the first."""
        if self.layer is None:
            return None
        wanted = [self.layer] if isinstance(self.layer, int) else list(self.layer)
        n = model.cfg.n_layers
        wrong = next((each for each in wanted if each not in range(-n, n)), None)
        if wrong is not None or not wanted:
            raise HooklineError(f"layer {wrong}, but the model has {n}: 0 to {n - 1}" if wanted else "layer=[] is none")
        return [each % n for each in wanted]


Unit: TypeAlias = list[tuple[HookPoint, dict[str, int | None]]]
"""Points that are ablated together, each at an index of its axes."""


@dataclass(frozen=True, eq=False)
class Units:
    """The parts of a model that can be ablated in runs on some prompts, and what comes in their place."""

    model: HookedModel
    prompts: Prompts
    bases: list[Baseline]
    given: list[Values]
    positions: list[list[int]] | None
    axes: tuple[str, ...]
    coords: dict[str, list[Label]]
    units: dict[Key, Unit]
    _known: dict[tuple[int, str, Any], tuple[Change, ...]] = field(default_factory=dict)

    @classmethod
    def found(
        cls, model: HookedModel, prompts: Prompts, what: Choice, whole: Replacement, pos: int | Sequence[int] | None
    ) -> Units:
        """The parts that are asked for. The model is run on the prompts, and on data if that is needed."""
        rows = _layers(model, what) if what.of == "layers" else [_places(model, what)]
        points = list({point.name: point for each in rows for point in each.points.values()}.values())
        bases = baselines(model, prompts, keep=[point.name for point in points])
        if what.of == "layers":
            _check_layers(model, prompts, rows)
        coords, units = _units(rows, bases, prompts, [*prompts.labels(model)])
        axes = tuple(coords)
        if isinstance(what.layer, int) and "layer" in axes and len(axes) > 1:
            place = axes.index("layer")
            axes = axes[:place] + axes[place + 1 :]
            units = {key[:place] + key[place + 1 :]: unit for key, unit in units.items()}
        if pos is not None and any(point.stream == "image" for point in points):
            raise HooklineError("pos=… is a place in the text, but these points are of pictures: leave it out")
        positions = None if pos is None else [_positions(model, prompts, pos, row) for row in range(len(prompts))]
        if pos is not None and "pos" in axes:
            raise HooklineError("pos=… says where to ablate, but the positions are an axis already: leave one out")
        given = whole.values(model, points, bases, prompts, at_all_positions=pos is None and "pos" not in axes)
        return cls(model, prompts, bases, given, positions, axes, {axis: coords[axis] for axis in axes}, units)

    def reader(self, metric: Any) -> Reader:
        """Shows the metric what comes out."""
        logits = padded_logits(self.bases, self.prompts)
        metrics = as_metric(metric, self.model, logits, None, self.prompts.tokens, self.prompts.mask)
        return Reader(self.bases, self.prompts, metrics)

    def key(self, part: Cell | Mapping[str, Label] | Key | Label) -> Key:
        """The unit that is meant by its labels."""
        if isinstance(part, str) and (head := re.fullmatch(r"L(\d+)H(\d+)", part)):
            part = (int(head[1]), int(head[2]))
        labels = part.labels if isinstance(part, Cell) else part
        if isinstance(labels, Mapping):
            found: Key = tuple(labels[axis] for axis in self.axes) if {*labels} == {*self.axes} else ()
        else:
            found = labels if isinstance(labels, tuple) else (labels,)
        if found not in self.units:
            some = ", ".join(map(str, list(self.units)[:4]))
            raise HooklineError(f"no part to ablate is {labels!r}: by {', '.join(self.axes)}, there are {some}, …")
        return found

    def together(self, keys: Sequence[Key]) -> list[Variant]:
        """The changes of each prompt when these parts are ablated."""
        return [
            [change for key in keys for point, at in self.units[key] for change in self._changes(row, point, at)]
            for row in range(len(self.prompts))
        ]

    def _changes(self, row: int, point: HookPoint, at: dict[str, int | None]) -> tuple[Change, ...]:
        known = (row, point.name, tuple(at.items()))
        if known not in self._known:
            self._known[known] = tuple(self._made(row, point, at))
        return self._known[known]

    def _made(self, row: int, point: HookPoint, at: dict[str, int | None]) -> list[Change]:
        span, inside = self.prompts.span(row), dict(at)
        for axis in ("pos", "src") if point.stream != "image" else ():
            column = inside.get(axis)
            if column is not None and column not in span:
                return []  # padding
            if column is not None:
                inside[axis] = column - span.start
        given, base = self.given[row][point.name], self.bases[row]
        if self.positions is None:
            return [_change(point, given, base, inside)]
        return [_change(point, given, base, inside | {"pos": each}) for each in self.positions[row]]


def _change(point: HookPoint, given: Tensor, base: Baseline, at: dict[str, int | None]) -> Change:
    """The part at an index, replaced. It stays so where other changes would have made something else of it."""
    where = index_of(point, **at)
    value, before = given[where], base.kept[point.name][where]
    pos = at.get("pos")
    first = pos if pos is not None else _first(point, where, value != before)
    first = 0 if point.stream == "image" else first  # pictures come before the text
    return Change(point, where, value, first, before)


def _first(point: HookPoint, where: tuple[int | slice, ...], changed: Tensor) -> int:
    """The first position where anything changes; one after the last if nothing does."""
    letters = [letter for letter, at in zip(point.axes.split()[1:], where, strict=True) if isinstance(at, slice)]
    if "p" not in letters:
        return 0
    by_position = changed.movedim(letters.index("p"), -1).reshape(-1, changed.shape[letters.index("p")]).any(0)
    return int(by_position.int().argmax()) if bool(by_position.any()) else len(by_position)


def _places(model: HookedModel, what: Choice) -> Places:
    if what.points is not None:
        return places(model, what.points, what.over, what.layers(model))
    kind, over = _KINDS[what.of or "heads"]
    return places(model, kind, over, what.layers(model))


def _layers(model: HookedModel, what: Choice) -> list[Places]:
    """What layers add to the stream, of each kind that some have."""
    kinds = [kind for kind in ("attn_out", "cross_attn_out", "mlp_out") if _is_somewhere(model, kind)]
    if not kinds:
        raise HooklineError("no layer of this model has attn_out or mlp_out")
    return [places(model, kind, "layer", what.layers(model)) for kind in kinds]


def _is_somewhere(model: HookedModel, kind: str) -> bool:
    return any(f"{model._points.layer(layer)}.hook_{kind}" in model.hook_dict for layer in range(model.cfg.n_layers))


def _check_layers(model: HookedModel, prompts: Prompts, rows: Sequence[Places]) -> None:
    """All that a layer adds must be known to be ablated. Where the stream itself is normed, there is no such sum."""
    if not adds_up(model._points):
        return
    with torch.no_grad():
        cache = model.cache(
            **prompts.one(0), names_filter=[*stream_names(model._points), *(n for each in rows for n in each.names)]
        )
    streams = [cache[name] for name in stream_names(model._points)]
    for layer in sorted({int(key[0]) for each in rows for key in each.points}):
        names = [each.points[(layer,)].name for each in rows if (layer,) in each.points]
        added = streams[layer + 1] - streams[layer]
        is_alike = all(cache[name].shape == added.shape for name in names)
        if not is_alike or not is_rounding(added - sum(cache[name] for name in names), streams[layer + 1]):
            raise HooklineError(
                f"layer {layer} adds more to the stream than {' and '.join(names)}: it cannot be ablated as a whole"
            )


def _units(
    rows: Sequence[Places], bases: Sequence[Baseline], prompts: Prompts, labels: list[Label]
) -> tuple[dict[str, list[Label]], dict[Key, Unit]]:
    """The labels of each axis, and what each unit is made of."""
    if len(rows) > 1:  # of several kinds, by layer
        layers = sorted({int(key[0]) for each in rows for key in each.points})
        return {"layer": list(layers)}, {
            (layer,): [(each.points[(layer,)], {}) for each in rows if (layer,) in each.points] for layer in layers
        }
    (each,) = rows
    inner = [axis for axis in each.over if axis not in each.coords]
    sizes = {axis: axis_size(each, bases, axis, prompts.width) for axis in inner}
    of_text = not any(point.stream == "image" for point in each.points.values())
    own = each.coords | {
        axis: labels if axis in ("pos", "src") and of_text else list(range(sizes[axis])) for axis in inner
    }
    units: dict[Key, Unit] = {}
    for cell in product(*(range(len(own[axis])) for axis in each.over)):
        at = dict(zip(each.over, cell, strict=True))
        key = tuple(own[axis][number] for axis, number in at.items())
        outer = tuple(own[axis][number] for axis, number in at.items() if axis in each.coords)
        units[key] = [(each.points[outer], {axis: at[axis] for axis in inner})]
    return {axis: own[axis] for axis in each.over}, units


def _positions(model: HookedModel, prompts: Prompts, pos: Any, row: int) -> list[int]:
    """Positions in one prompt: by number, or all that are a picture's."""
    if pos is image_tokens:
        found = model.image_token_mask(prompts.row(row))[0].nonzero().flatten().tolist()
        if not found:
            raise HooklineError(f"pos=image_tokens, but there is no picture in prompt {row}")
        return found
    if isinstance(pos, Meaning):
        raise HooklineError(f"pos is a position, several, or image_tokens, not {pos!r}")
    return _checked(pos, prompts.length(row), row)


def _checked(pos: Any, length: int, row: int) -> list[int]:
    if isinstance(pos, list | tuple) and not pos:
        raise HooklineError("pos=[] is nowhere")
    given: Any = canonical(pos.tolist() if isinstance(pos, Tensor | ndarray | generic) else pos)
    wanted = [given] if isinstance(given, int) else [*(range(length)[given] if isinstance(given, slice) else given)]
    wrong = next((each for each in wanted if each not in range(-length, length)), None)
    if not wanted:
        raise HooklineError(f"pos={pos!r} is nowhere in prompt {row}")
    if wrong is not None:
        raise HooklineError(f"position {wrong}, but prompt {row} has {length} tokens")
    return sorted({each % length for each in wanted})

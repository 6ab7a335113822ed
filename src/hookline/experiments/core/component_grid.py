"""Components: the parts of a model that are ablated, one at a time or together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from numpy import generic, ndarray
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.core.measure import Reader, padded_logits
from hookline.experiments.core.prompts import Prompts, baselines
from hookline.experiments.core.replacements import Replacement
from hookline.experiments.core.sweep import CellBuilder, Cells, Key, SweepPoints, make_cells, sweep_points
from hookline.experiments.metrics import as_metric
from hookline.experiments.result import Cell
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import adds_up
from hookline.rerun.strategy import stream_names
from hookline.residual.stream import is_rounding
from hookline.text.token_positions import Meaning, canonical, image_tokens

Of: TypeAlias = Literal["heads", "attention", "mlps", "layers", "neurons"]

_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "heads": ("z", ("layer", "head")),
    "attention": ("attn_out", ("layer",)),
    "mlps": ("mlp_out", ("layer",)),
    "neurons": ("post", ("layer", "neuron")),
}


@dataclass(frozen=True, eq=False)
class Selection:
    """Which components are meant, as the caller selected them."""

    of: Of | None
    points: str | Sequence[str] | None
    over: str | Sequence[str]
    layers: int | Sequence[int] | None

    def __post_init__(self) -> None:
        if self.of is not None and self.points is not None:
            raise HooklineError(f"of={self.of!r} already selects points: use either of= or points=")
        if self.of is not None and self.of not in (*_KINDS, "layers"):
            raise HooklineError(f"of is one of {', '.join(map(repr, (*_KINDS, 'layers')))}, got {self.of!r}")
        if self.points is None and self.over != ("layer",):
            raise HooklineError(f"over={self.over!r} needs points=…: of={self.of or 'heads'!r} has its own axes")

    def of_ranking(self, info: Mapping[str, Any]) -> Selection:
        """The components that a result with this `info` is about; whatever else is selected must agree."""
        known = info.get("choice")
        if known is None:
            raise HooklineError("the order is a result, but not of ablate(…): pass its cells in order, result.top(k)")
        said = self.points is not None or self.of not in (None, known["of"])
        if said or (self.layers is not None and self.to_dict()["layer"] != known["layer"]):
            raise HooklineError(f"the ranking is of {known}: remove of=, points=, over= and layers=")
        return Selection(known["of"], known["points"], tuple(known["over"]), known["layer"])

    def to_dict(self) -> dict[str, Any]:
        """The selection as it is saved with a result."""
        points = self.points if isinstance(self.points, str | None) else list(self.points)
        layers = self.layers if isinstance(self.layers, int | None) else list(self.layers)
        over = [self.over] if isinstance(self.over, str) else list(self.over)
        of = self.of if self.of is not None or points is not None else "heads"
        return {"of": of, "points": points, "over": over, "layer": layers}

    def layer_list(self, model: HookedModel) -> list[int] | None:
        """The layers, counted from the first, or None for all."""
        if self.layers is None:
            return None
        wanted = [self.layers] if isinstance(self.layers, int) else list(self.layers)
        n = model.cfg.n_layers
        wrong = next((each for each in wanted if each not in range(-n, n)), None)
        if wrong is not None or not wanted:
            raise HooklineError(
                f"layer {wrong} is out of range: the model has layers 0 to {n - 1}"
                if wanted
                else "layers=[] selects nothing"
            )
        return [each % n for each in wanted]


@dataclass(frozen=True, eq=False)
class Components:
    """The components of a model that can be ablated in runs on some prompts, and the values that replace them."""

    model: HookedModel
    prompts: Prompts
    bases: list[Baseline]
    cells: Cells
    builder: CellBuilder
    positions: list[list[int]] | None

    @classmethod
    def found(
        cls, model: HookedModel, prompts: Prompts, what: Selection, whole: Replacement, pos: int | Sequence[int] | None
    ) -> Components:
        """The selected components. Runs the model on the prompts, and on the replacement's data if it needs any."""
        rows = _layers(model, what) if what.of == "layers" else [_points(model, what)]
        points = list({point.name: point for each in rows for point in each.points.values()}.values())
        bases = baselines(model, prompts, keep=[point.name for point in points])
        if what.of == "layers":
            _check_layers(model, prompts, rows)
        cells = make_cells(rows, bases, prompts, [*prompts.labels(model)])
        if isinstance(what.layers, int) and len(cells.coords) > 1:
            cells = _without_layer(cells)
        if pos is not None and any(point.stream == "image" for point in points):
            raise HooklineError("pos=… is a position in the text, but these points are in the vision tower: remove it")
        positions = None if pos is None else [_positions(model, prompts, pos, row) for row in range(len(prompts))]
        if pos is not None and "pos" in cells.coords:
            raise HooklineError("pos=… selects positions, but positions are already an axis: use one of the two")
        everywhere = pos is None and "pos" not in cells.coords
        given = whole.values(model, points, bases, prompts, at_all_positions=everywhere)
        return cls(model, prompts, bases, cells, CellBuilder(cells, given, bases, prompts, positions), positions)

    def reader(self, metric: Any) -> Reader:
        """What evaluates the metric on variants of the runs."""
        logits = padded_logits(self.bases, self.prompts)
        metrics = as_metric(metric, self.model, logits, None, self.prompts.tokens, self.prompts.mask)
        return Reader(self.bases, self.prompts, metrics)

    def key(self, component: Cell | Mapping[str, Label] | Key | Label) -> Key:
        """The cell of a component given by its labels: `(3, 4)`, `"L3H4"` or `{"layer": 3, "head": 4}`."""
        axes = tuple(self.cells.coords)
        if isinstance(component, str) and (head := re.fullmatch(r"L(\d+)H(\d+)", component)):
            component = (int(head[1]), int(head[2]))
        labels = component.labels if isinstance(component, Cell) else component
        if isinstance(labels, Mapping):
            found: Key = tuple(labels[axis] for axis in axes) if {*labels} == {*axes} else ()
        else:
            found = labels if isinstance(labels, tuple) else (labels,)
        if found not in self.cells.covered:
            some = ", ".join(map(str, list(self.cells.covered)[:4]))
            raise HooklineError(f"there is no component {labels!r}: by {', '.join(axes)}, there are {some}, …")
        return found


def _without_layer(cells: Cells) -> Cells:
    """The cells of a single layer, without an axis for it."""
    place = list(cells.coords).index("layer") if "layer" in cells.coords else len(cells.coords)
    coords = {axis: labels for axis, labels in cells.coords.items() if axis != "layer"}
    return Cells(coords, {key[:place] + key[place + 1 :]: covered for key, covered in cells.covered.items()})


def _points(model: HookedModel, what: Selection) -> SweepPoints:
    if what.points is not None:
        return sweep_points(model, what.points, what.over, what.layer_list(model))
    kind, over = _KINDS[what.of or "heads"]
    return sweep_points(model, kind, over, what.layer_list(model))


def _layers(model: HookedModel, what: Selection) -> list[SweepPoints]:
    """The points where layers add to the stream, for each kind that some layer has."""
    kinds = [kind for kind in ("attn_out", "cross_attn_out", "mlp_out") if _is_somewhere(model, kind)]
    if not kinds:
        raise HooklineError("no layer of this model has attn_out or mlp_out")
    return [sweep_points(model, kind, "layer", what.layer_list(model)) for kind in kinds]


def _is_somewhere(model: HookedModel, kind: str) -> bool:
    return any(f"{model._points.layer(layer)}.hook_{kind}" in model.hook_dict for layer in range(model.cfg.n_layers))


def _check_layers(model: HookedModel, prompts: Prompts, rows: Sequence[SweepPoints]) -> None:
    """Everything that a layer adds must be ablated; a model that normalizes the stream itself has no such sum."""
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
                f"layer {layer} adds more to the stream than {' and '.join(names)}: it is not one component"
            )


def _positions(model: HookedModel, prompts: Prompts, pos: Any, row: int) -> list[int]:
    """Positions in one prompt: by number, or all image tokens."""
    if pos is image_tokens:
        found = model.image_token_mask(prompts.row(row))[0].nonzero().flatten().tolist()
        if not found:
            raise HooklineError(f"pos=image_tokens, but prompt {row} has no image")
        return found
    if isinstance(pos, Meaning):
        raise HooklineError(f"pos is a position, a list of positions, or image_tokens, got {pos!r}")
    return _checked(pos, prompts.length(row), row)


def _checked(pos: Any, length: int, row: int) -> list[int]:
    if isinstance(pos, list | tuple) and not pos:
        raise HooklineError("pos=[] selects nothing")
    given: Any = canonical(pos.tolist() if isinstance(pos, Tensor | ndarray | generic) else pos)
    wanted = [given] if isinstance(given, int) else [*(range(length)[given] if isinstance(given, slice) else given)]
    wrong = next((each for each in wanted if each not in range(-length, length)), None)
    if not wanted:
        raise HooklineError(f"pos={pos!r} selects nothing in prompt {row}")
    if wrong is not None:
        raise HooklineError(f"position {wrong} is out of range: prompt {row} has {length} tokens")
    return sorted({each % length for each in wanted})

"""Ablation: the metric without a component of the model, each alone, or the first of a ranking together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, Unpack

import torch

from hookline.errors import HooklineError
from hookline.experiments.core.aligned import Aligned, PromptPositions, one_of
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import (
    CellOptions,
    ControlledCellOptions,
    ControlledOptions,
    Options,
    Reader,
    measured,
    reader_of,
)
from hookline.experiments.core.prompts import Prompt, Prompts, baselines, prompts_of
from hookline.experiments.core.replacements import Method, Replacement
from hookline.experiments.core.sweep import (
    CellBuilder,
    Cells,
    Covered,
    Grid,
    Key,
    SweepPoints,
    check_aligned,
    make_cells,
    sweep_points,
)
from hookline.experiments.result import Cell, Result, TopCells
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.rerun.changes import adds_up
from hookline.rerun.strategy import stream_names
from hookline.residual.stream import is_rounding
from hookline.text.outliers import Outliers

__all__ = ["ablate", "cumulative", "ranking"]

Of: TypeAlias = Literal["heads", "attention", "mlps", "layers", "neurons"]
Order: TypeAlias = Result | Sequence[Cell | Mapping[str, Label] | Key | Label]

_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "heads": ("z", ("layer", "head")),
    "attention": ("attn_out", ("layer",)),
    "mlps": ("mlp_out", ("layer",)),
    "neurons": ("post", ("layer", "neuron")),
    "layers": ("resid_pre", ("layer",)),
}
"""The points and axes of each kind of component; of layers, the points where the stream enters them."""


def __dir__() -> list[str]:
    return __all__


@lists(ControlledCellOptions, ControlledOptions)
def ablate(
    model: HookedModel,
    prompts: Prompt,
    metric: Any,
    *,
    of: Of | None = None,
    points: str | Sequence[str] | None = None,
    over: str | Sequence[str] = ("layer",),
    layers: int | Sequence[int] | None = None,
    method: Method = "zero",
    data: Prompt | None = None,
    per_position: bool = False,
    seed: int | None = None,
    positions: PromptPositions = None,
    pos: PromptPositions = None,
    outliers: Outliers = "exclude",
    **options: Unpack[ControlledCellOptions],
) -> Result:
    """Ablate each component of the model by itself, and measure: `result.values[layer, head]`.

        >>> result = ablation.ablate(model, prompt, metrics.logit_diff(" Mary", " John"))
        >>> ablation.ranking(result)[:2]
        layer  head  change
        3      4     -8.765
        3      7     4.19
        >>> ablation.ablate(model, prompt, metric, of="mlps", method="mean", data=texts).axes
        ('layer',)

    The components are `of` "heads" (the default; at `z`), "attention", "mlps", "layers" (attention and MLP together;
    norms of the stream itself stay) or "neurons"; or `points`, `over` axes, as in `patching.sweep`. `layers` is one
    layer, without an axis for it, or several. `method` is what replaces them:

    - "zero": zeros;
    - "mean": the mean over all positions of the texts in `data`, or with `per_position`, over texts at each position;
    - "resample": the activation of a random other text of `data` of the same length (`seed`, 0 by default).

    `data` defaults to the prompts themselves: for one prompt, "mean" is the mean over its own positions. `positions`
    ablates at these positions only: indices (negative ones from the end of each prompt), a list for each prompt, or
    meanings such as `last` and `token(" Mary")`. If `over` has `pos`, they are its cells. `pos` is deprecated.

    A mean excludes outlying positions, such as attention sinks: those where the norm at the point is more than 10 times
    the median. They are not replaced either, unless `positions` has them or `pos` is an axis, since no average of other
    positions can replace them. `result.info["outlying"]` reports how many there were, by point.
    `outliers="include"` averages and replaces everything, and a number replaces the 10.

    The metric of the unmodified model is `result.info["clean"]`. Further `options`: see `Options`.
    """
    how, replacement = ControlledOptions.of(options), Replacement(method, data, per_position, seed, outliers)
    selection = Selection(of, points, over, layers)
    where = one_of(positions, pos)
    components, reader, info = prepared(model, prompts, metric, selection, replacement, where)
    return measured(reader, components.builder.grid(), info, how)


def ranking(result: Result, *, by: Literal["abs", "value", "lowest"] = "abs") -> TopCells:
    """The components by the change of the metric when they are ablated, by its size, its value, or the lowest first.

        >>> result = ablation.ablate(model, prompt, metric)
        >>> ablation.ranking(result, by="lowest")[:1]
        layer  head  change
        3      4     -8.765

    The change is the metric without the component, minus that of the unmodified model: with "lowest", the components
    whose ablation lowers the metric most come first.
    """
    if "choice" not in result.info or "metric" in result.axes:
        raise HooklineError("ranking needs a result of ablate(…) with one metric: select it with sel(metric=…)")
    if not result.complete:
        raise HooklineError("this ablation was interrupted: resume it before ranking")
    mean = result.mean("example") if "example" in result.axes else result
    cells = (mean - mean.info["clean"]).top(mean.values.numel(), by)
    cells.info, cells.title = mean.info, "change"
    return cells


@lists(CellOptions, Options)
def cumulative(
    model: HookedModel,
    prompts: Prompt,
    metric: Any,
    order: Order,
    *,
    of: Of | None = None,
    points: str | Sequence[str] | None = None,
    over: str | Sequence[str] = ("layer",),
    layers: int | Sequence[int] | None = None,
    method: Method = "zero",
    data: Prompt | None = None,
    per_position: bool = False,
    seed: int | None = None,
    positions: PromptPositions = None,
    pos: PromptPositions = None,
    outliers: Outliers = "exclude",
    **options: Unpack[CellOptions],
) -> Result:
    """Ablate the first `count` components of a ranking together, from none to all: `result.values[order, count]`.

        curve = ablation.cumulative(model, prompts, metric, ablation.ranking(result))
        curve.sel(order="as ranked").plot()

    `order` is a ranking, or any list of components: `(3, 4)`, `"L3H4"`, `{"layer": 3, "head": 4}`. A result of `ablate`
    is ranked by the size of the change; like a ranking, it also selects the components. The second row of the result
    has the order reversed. Everything else is as in `ablate`; the method is not taken from the ranking.
    """
    how, replacement = Options.of(options), Replacement(method, data, per_position, seed, outliers)
    selection = Selection(of, points, over, layers)
    if isinstance(order, Result):
        selection, order = selection.of_ranking(order.info), ranking(order)
    elif isinstance(order, TopCells) and order.info and of is None and points is None:
        selection = selection.of_ranking(order.info)
    where = one_of(positions, pos)
    components, reader, info = prepared(model, prompts, metric, selection, replacement, where)
    keys = [components.key(component) for component in order]
    twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
    if not keys or twice is not None:
        raise HooklineError("the order is empty" if not keys else f"the order contains {twice} twice")
    coords: dict[str, list[Label]] = {"order": ["as ranked", "reversed"], "count": list(range(len(keys) + 1))}
    variants = [
        components.builder.variant_for(ordering[:count])
        for ordering in (keys, keys[::-1])
        for count in range(len(keys) + 1)
    ]
    info |= {"parts": [list(key) for key in keys]}
    return measured(reader, Grid(("order", "count"), coords, variants), info, how)


def _aligned(
    model: HookedModel, prompts: Prompts, where: SweepPoints, positions: PromptPositions, cells: Cells | None
) -> Aligned:
    if cells is None:
        check_aligned(where)
    return Aligned.of(model, prompts, positions, apart=cells is None and "pos" in where.over)


def prepared(
    model: HookedModel, prompts: Prompt, metric: Any, selection: Selection, replacement: Replacement, pos: Any
) -> tuple[Components, Reader, dict[str, Any]]:
    """The components to ablate, a reader of the metric, and the `info` of the result."""
    metric, (text,) = continued(model, metric, prompts_of(model, prompts))
    components = Components.found(model, text, selection, replacement, pos)
    reader = components.reader(metric)
    info = {**replacement.info(), "clean": reader.baseline, "choice": selection.to_dict()}
    info |= {"seed": replacement.seed or 0} if replacement.method == "resample" else {}
    aligned = components.builder.positions
    info |= (
        {}
        if aligned is None
        else {"positions": aligned.at if "pos" in components.builder.cells.coords else aligned.at[0]}
    )
    said = selection.of or said_points(selection.points or "heads")
    return components, reader, info | about(model, f"{said} ablated ({replacement.method})")


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
        if self.of not in (None, *_KINDS):
            raise HooklineError(f"of is one of {', '.join(map(repr, _KINDS))}, got {self.of!r}")
        if self.points is None and self.over != ("layer",):
            raise HooklineError(f"over={self.over!r} needs points=…: of={self.of or 'heads'!r} has its own axes")

    def of_ranking(self, info: Mapping[str, Any]) -> Selection:
        """The components that a result with this `info` is about; whatever else is selected must agree."""
        choice = info.get("choice")
        if choice is None:
            raise HooklineError("the order is a result, but not of ablate(…): pass its cells in order, result.top(k)")
        said = self.points is not None or self.of not in (None, choice["of"])
        if said or (self.layers is not None and self.to_dict()["layer"] != choice["layer"]):
            raise HooklineError(f"the ranking is of {choice}: remove of=, points=, over= and layers=")
        return Selection(choice["of"], choice["points"], tuple(choice["over"]), choice["layer"])

    def to_dict(self) -> dict[str, Any]:
        """The selection as it is saved with a result."""
        points = self.points if isinstance(self.points, str | None) else list(self.points)
        layers = self.layers if isinstance(self.layers, int | None) else list(self.layers)
        over = [self.over] if isinstance(self.over, str) else list(self.over)
        of = self.of if self.of is not None or points is not None else "heads"
        return {"of": of, "points": points, "over": over, "layer": layers}

    def points_of(self, model: HookedModel) -> SweepPoints:
        """The points of the components; for whole layers, the points where the stream enters them."""
        layers = [self.layers] if isinstance(self.layers, int) else self.layers
        points, over = (self.points, self.over) if self.points is not None else _KINDS[self.of or "heads"]
        return sweep_points(model, points, over, layers)


@dataclass(frozen=True, eq=False)
class Components:
    """The components of a model that can be ablated in runs on some prompts, and the values that replace them."""

    model: HookedModel
    builder: CellBuilder

    @classmethod
    def found(
        cls, model: HookedModel, prompts: Prompts, selection: Selection, replacement: Replacement, pos: Any
    ) -> Components:
        """The selected components. Runs the model on the prompts, and on the replacement's data if it needs any."""
        where = selection.points_of(model)
        cells = _layer_cells(model, prompts, where) if selection.of == "layers" else None
        bases = baselines(model, prompts, keep=where.names if cells is None else cells.names)
        aligned = None if pos is None else _aligned(model, prompts, where, pos, cells)
        labels = prompts.labels(model) if aligned is None else aligned.labels
        cells = make_cells(where, bases, labels) if cells is None else cells
        if isinstance(selection.layers, int) and len(cells.coords) > 1:
            cells = cells.without("layer")
        everywhere = pos is None and "pos" not in cells.coords
        values = replacement.values(model, cells.points, bases, prompts, at_all_positions=everywhere)
        return cls(model, CellBuilder(cells, values, bases, prompts, aligned))

    def reader(self, metric: Any) -> Reader:
        """A reader of the metric on variants of the runs."""
        return reader_of(self.model, self.builder.bases, self.builder.prompts, metric)

    def key(self, component: Cell | Mapping[str, Label] | Key | Label) -> Key:
        """The cell of a component given by its labels: `(3, 4)`, `"L3H4"` or `{"layer": 3, "head": 4}`."""
        axes, covered = tuple(self.builder.cells.coords), self.builder.cells.covered
        if isinstance(component, str) and (head := re.fullmatch(r"L(\d+)H(\d+)", component)):
            component = (int(head[1]), int(head[2]))
        labels = component.labels if isinstance(component, Cell) else component
        if isinstance(labels, Mapping):
            key: Key = tuple(labels[axis] for axis in axes) if {*labels} == {*axes} else ()
        else:
            key = labels if isinstance(labels, tuple) else (labels,)
        if key not in covered:
            examples = ", ".join(map(str, list(covered)[:4]))
            raise HooklineError(f"there is no component {labels!r}: by {', '.join(axes)}, there are {examples}, …")
        return key


def _layer_cells(model: HookedModel, prompts: Prompts, where: SweepPoints) -> Cells:
    """Cells of whole layers: all points where a layer adds to the stream."""
    covered: dict[Key, Covered] = {}
    for layer in sorted(where.coords["layer"]):
        names = [f"{model.index.layer(int(layer))}.hook_{kind}" for kind in ("attn_out", "cross_attn_out", "mlp_out")]
        covered[(layer,)] = [(model.index.find(name), {}) for name in names if name in model.hook_dict]
    covered = {key: points for key, points in covered.items() if points}
    if not covered:
        raise HooklineError("no layer of this model has attn_out or mlp_out")
    cells = Cells({"layer": [layer for (layer,) in covered]}, covered)
    if adds_up(model.index):
        _check_layers(model, prompts, cells)
    return cells


@torch.no_grad()
def _check_layers(model: HookedModel, prompts: Prompts, cells: Cells) -> None:
    """Raise if a layer adds more to the stream than what is ablated."""
    streams = stream_names(model.index)
    cache = model.cache(**prompts.one(0), names_filter=[*streams, *cells.names])
    for (layer,), covered in cells.covered.items():
        names, after = [point.name for point, _ in covered], cache[streams[int(layer) + 1]]
        added = after - cache[streams[int(layer)]]
        is_alike = all(cache[name].shape == added.shape for name in names)
        if not is_alike or not is_rounding(added - sum(cache[name] for name in names), after):
            raise HooklineError(
                f"layer {layer} adds more to the stream than {' and '.join(names)}: it is not one component"
            )

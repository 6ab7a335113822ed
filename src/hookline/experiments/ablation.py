"""Ablation: what a metric becomes without a part of the model; each alone, or the first of a ranking together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from hookline.errors import HooklineError
from hookline.experiments.core.component_grid import Choice, Key, Of, Units
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import Options, Reader, measured
from hookline.experiments.core.prompts import Prompt, prompts_of
from hookline.experiments.core.replacements import By, Replacement
from hookline.experiments.core.sweep import Grid
from hookline.experiments.result import Cell, Result, Top
from hookline.model import HookedModel
from hookline.text.outliers import Outliers

Order: TypeAlias = Result | Sequence[Cell | Mapping[str, Label] | Key | Label]


def ablate(
    model: HookedModel,
    prompts: Prompt,
    metric: Any,
    *,
    of: Of | None = None,
    points: str | Sequence[str] | None = None,
    over: str | Sequence[str] = ("layer",),
    layer: int | Sequence[int] | None = None,
    by: By = "zero",
    data: Prompt | None = None,
    per_position: bool = False,
    seed: int | None = None,
    pos: int | Sequence[int] | None = None,
    outliers: Outliers = "exclude",
    **options: Any,
) -> Result:
    """Ablate each part of the model by itself, and measure: `result.values[layer, head]`.

        from hookline.experiments import ablation, metrics
        result = ablation.ablate(model, prompt, metrics.logit_diff(" Mary", " John"))
        ablation.ranking(result)                                         # heads by what they matter
        ablation.ablate(model, prompts, metric, of="mlps", by="mean", data=texts)

    The parts are `of` "heads" (unless told; at `z`), "attention", "mlps", "layers" (attention and MLP together; norms
    of the stream itself stay) or "neurons"; or those at `points`, `over` axes, as in `patching.sweep`. `layer` is one
    layer, without an axis for it, or several. What comes in their place is, `by`:

    - "zero": zeros;
    - "mean": the average over all positions of the texts in `data`, or `per_position`, over those that have it;
    - "resample": what another text of `data`, as long and chosen by chance (`seed`, 0 unless told), has there.

    Without `data` these are the prompts themselves. `pos` ablates at these positions only, counted in each prompt.

    A mean is taken without outlying positions, such as attention sinks: those where the norm at the point is over 10
    times the median. They also stay as they are, unless `pos` names them or positions are an axis, since no average of
    others can stand in for them. `result.info["outlying"]` says how many they were, by point. `outliers="include"`
    averages and replaces all of them, and a number takes the place of the 10.

    The metric of the whole model is `result.info["clean"]`. Further `options`: see `Options`.
    """
    how, whole = Options.of(options), Replacement(by, data, per_position, seed, outliers)
    what = Choice(of, points, over, layer)
    metric, (text,) = continued(model, metric, prompts_of(model, prompts))
    parts = Units.found(model, text, what, whole, pos)
    reader = parts.reader(metric)
    cells = list(parts.units)
    grid = Grid(parts.axes, parts.coords, [parts.together([cell]) for cell in cells])
    return measured(reader, grid, _info(what, whole, parts, reader), how)


def ranking(result: Result, *, by: Literal["abs", "value", "lowest"] = "abs") -> Top:
    """The parts by what ablating them changes, most first: by the size of the change, its value, or the lowest first.

    The values are the changes: with "lowest", parts without which the metric falls most come first.
    """
    if "choice" not in result.info or "metric" in result.axes:
        raise HooklineError("a ranking is of what ablate(…) gave, with one metric: choose it with sel(metric=…)")
    if not result.complete:
        raise HooklineError("this ablation was interrupted: resume it before ranking")
    mean = result.mean("example") if "example" in result.axes else result
    found = (mean - mean.info["clean"]).top(mean.values.numel(), by)
    found.info = mean.info
    return found


def cumulative(
    model: HookedModel,
    prompts: Prompt,
    metric: Any,
    order: Order,
    *,
    of: Of | None = None,
    points: str | Sequence[str] | None = None,
    over: str | Sequence[str] = ("layer",),
    layer: int | Sequence[int] | None = None,
    by: By = "zero",
    data: Prompt | None = None,
    per_position: bool = False,
    seed: int | None = None,
    pos: int | Sequence[int] | None = None,
    outliers: Outliers = "exclude",
    **options: Any,
) -> Result:
    """Ablate the first `count` parts of a ranking together, from none to all: `result.values[order, count]`.

        curve = ablation.cumulative(model, prompts, metric, ablation.ranking(result))
        curve.sel(order="as ranked").plot()

    `order` is a ranking, or any list of parts: `(3, 4)`, `"L3H4"`, `{"layer": 3, "head": 4}`; a result of `ablate` is
    ranked by the size of the change, and says, as a ranking does, what its parts are. The second row of the result has
    the order reversed. All else is as in `ablate`; how to ablate is not taken from the ranking.
    """
    how, whole = Options.of(options), Replacement(by, data, per_position, seed, outliers)
    what = Choice(of, points, over, layer)
    if isinstance(order, Result):
        what, order = what.of_ranking(order.info), ranking(order)
    elif isinstance(order, Top) and order.info and of is None and points is None:
        what = what.of_ranking(order.info)
    metric, (text,) = continued(model, metric, prompts_of(model, prompts))
    parts = Units.found(model, text, what, whole, pos)
    keys = [parts.key(each) for each in order]
    twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
    if not keys or twice is not None:
        raise HooklineError("the order is empty" if not keys else f"the order has {twice} twice")
    reader = parts.reader(metric)
    coords: dict[str, list[Label]] = {"order": ["as ranked", "reversed"], "count": list(range(len(keys) + 1))}
    variants = [parts.together(some[:count]) for some in (keys, keys[::-1]) for count in range(len(keys) + 1)]
    info = _info(what, whole, parts, reader) | {"parts": [list(key) for key in keys]}
    return measured(reader, Grid(("order", "count"), coords, variants), info, how)


def _info(what: Choice, whole: Replacement, parts: Units, reader: Reader) -> dict[str, Any]:
    seed = {"seed": whole.seed or 0} if whole.by == "resample" else {}
    at = {} if parts.positions is None else {"positions": parts.positions}
    said = about(parts.model, f"{what.of or said_points(what.points or 'heads')} ablated ({whole.by})")
    return {**whole.info(), "clean": reader.baseline, "choice": what.to_dict(), **seed, **at, **said}

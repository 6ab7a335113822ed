"""Ablation: the metric without a component of the model, each alone, or the first of a ranking together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from hookline.errors import HooklineError
from hookline.experiments.core.component_grid import Components, Of, Selection
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import Options, Reader, measured
from hookline.experiments.core.prompts import Prompt, prompts_of
from hookline.experiments.core.replacements import Method, Replacement
from hookline.experiments.core.sweep import Grid, Key
from hookline.experiments.result import Cell, Result, TopCells
from hookline.model import HookedModel
from hookline.text.outliers import Outliers

__all__ = ["ablate", "cumulative", "ranking"]

Order: TypeAlias = Result | Sequence[Cell | Mapping[str, Label] | Key | Label]


def __dir__() -> list[str]:
    return __all__


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
    pos: int | Sequence[int] | None = None,
    outliers: Outliers = "exclude",
    **options: Any,
) -> Result:
    """Ablate each component of the model by itself, and measure: `result.values[layer, head]`.

        from hookline.experiments import ablation, metrics
        result = ablation.ablate(model, prompt, metrics.logit_diff(" Mary", " John"))
        ablation.ranking(result)                                         # heads by their effect
        ablation.ablate(model, prompts, metric, of="mlps", method="mean", data=texts)

    The components are `of` "heads" (the default; at `z`), "attention", "mlps", "layers" (attention and MLP together;
    norms of the stream itself stay) or "neurons"; or `points`, `over` axes, as in `patching.sweep`. `layers` is one
    layer, without an axis for it, or several. `method` is what replaces them:

    - "zero": zeros;
    - "mean": the mean over all positions of the texts in `data`, or with `per_position`, over texts at each position;
    - "resample": the activation of a random other text of `data` of the same length (`seed`, 0 by default).

    `data` defaults to the prompts themselves. `pos` ablates at these positions only, counted within each prompt.

    A mean excludes outlying positions, such as attention sinks: those where the norm at the point is more than 10 times
    the median. They are not replaced either, unless `pos` names them or positions are an axis, since no average of
    other positions can replace them. `result.info["outlying"]` reports how many there were, by point.
    `outliers="include"` averages and replaces everything, and a number replaces the 10.

    The metric of the unmodified model is `result.info["clean"]`. Further `options`: see `Options`.
    """
    how, whole = Options.of(options), Replacement(method, data, per_position, seed, outliers)
    what = Selection(of, points, over, layers)
    metric, (text,) = continued(model, metric, prompts_of(model, prompts))
    parts = Components.found(model, text, what, whole, pos)
    reader = parts.reader(metric)
    return measured(reader, parts.builder.grid(), _info(what, whole, parts, reader), how)


def ranking(result: Result, *, by: Literal["abs", "value", "lowest"] = "abs") -> TopCells:
    """The components by the change of the metric when they are ablated, by its size, its value, or the lowest first.

    The values are the changes: with "lowest", the components whose ablation lowers the metric most come first.
    """
    if "choice" not in result.info or "metric" in result.axes:
        raise HooklineError("ranking needs a result of ablate(…) with one metric: select it with sel(metric=…)")
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
    layers: int | Sequence[int] | None = None,
    method: Method = "zero",
    data: Prompt | None = None,
    per_position: bool = False,
    seed: int | None = None,
    pos: int | Sequence[int] | None = None,
    outliers: Outliers = "exclude",
    **options: Any,
) -> Result:
    """Ablate the first `count` components of a ranking together, from none to all: `result.values[order, count]`.

        curve = ablation.cumulative(model, prompts, metric, ablation.ranking(result))
        curve.sel(order="as ranked").plot()

    `order` is a ranking, or any list of components: `(3, 4)`, `"L3H4"`, `{"layer": 3, "head": 4}`. A result of `ablate`
    is ranked by the size of the change; like a ranking, it also selects the components. The second row of the result
    has the order reversed. Everything else is as in `ablate`; the method is not taken from the ranking.
    """
    how, whole = Options.of(options), Replacement(method, data, per_position, seed, outliers)
    what = Selection(of, points, over, layers)
    if isinstance(order, Result):
        what, order = what.of_ranking(order.info), ranking(order)
    elif isinstance(order, TopCells) and order.info and of is None and points is None:
        what = what.of_ranking(order.info)
    metric, (text,) = continued(model, metric, prompts_of(model, prompts))
    parts = Components.found(model, text, what, whole, pos)
    keys = [parts.key(each) for each in order]
    twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
    if not keys or twice is not None:
        raise HooklineError("the order is empty" if not keys else f"the order contains {twice} twice")
    reader = parts.reader(metric)
    coords: dict[str, list[Label]] = {"order": ["as ranked", "reversed"], "count": list(range(len(keys) + 1))}
    variants = [
        parts.builder.variant_for(some[:count]) for some in (keys, keys[::-1]) for count in range(len(keys) + 1)
    ]
    info = _info(what, whole, parts, reader) | {"parts": [list(key) for key in keys]}
    return measured(reader, Grid(("order", "count"), coords, variants), info, how)


def _info(what: Selection, whole: Replacement, parts: Components, reader: Reader) -> dict[str, Any]:
    seed = {"seed": whole.seed or 0} if whole.method == "resample" else {}
    at = {} if parts.positions is None else {"positions": parts.positions}
    said = about(parts.model, f"{what.of or said_points(what.points or 'heads')} ablated ({whole.method})")
    return {**whole.info(), "clean": reader.baseline, "choice": what.to_dict(), **seed, **at, **said}

"""Trials of an estimate: some of its cells truly measured, and how well the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.experiments.grid import Places, Values
from hookline.experiments.labels import Label
from hookline.experiments.measure import Metrics, Options, Reader, measure
from hookline.experiments.prompts import Prompts, baselines, unpadded
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.passes import is_of_pictures
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Change, Variant, index_of

Cell = tuple[int, ...]


def sampled(changed: Bool[Tensor, "*grid"], count: int, seed: int) -> list[Cell]:
    """Some cells, of those where something changes."""
    cells = changed.cpu().nonzero().tolist()
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))
    return [tuple(cells[at]) for at in sorted(order[:count].tolist())]


def true_values(
    model: HookedModel,
    where: Places,
    prompts: Prompts,
    metrics: Metrics,
    given: Values,
    cells: Sequence[Cell],
    how: Options,
) -> Float[Tensor, "metric cell"]:
    """What the metrics are when each of these cells is patched; NaN where that was interrupted."""
    if not cells:
        return torch.zeros(len(metrics), 0)
    bases = baselines(model, prompts, keep=where.names)
    variants = [[patch(where, cell, given, prompts, base, row) for row, base in enumerate(bases)] for cell in cells]
    return measure(Reader(bases, prompts, metrics), variants, how)[0].mean(-1)


def patch(where: Places, cell: Cell, given: Values, prompts: Prompts, base: Baseline, row: int) -> Variant:
    """The change that one cell is, in one prompt: what is given is of all prompts, padding and all."""
    at = dict(zip(where.over, cell, strict=True))
    point = where.points[tuple(labels[at[axis]] for axis, labels in _outer(where))]
    span = prompts.span(row)
    inside = {axis: number for axis, number in at.items() if axis not in where.coords}
    is_text = not is_of_pictures(point.listed)
    for axis in ("pos", "src") if is_text else ():
        if axis in inside and inside[axis] not in span:
            return ()
        if axis in inside:
            inside[axis] -= span.start
    index, value = index_of(point, **inside), unpadded(given[point.name][row], point, span, prompts.width)
    first = inside.get("pos", 0) if is_text else 0  # images come before the text
    return (Change(point, index, value[index], first, base.kept[point.name][index]),)


def _outer(where: Places) -> list[tuple[str, list[Label]]]:
    return [(axis, where.coords[axis]) for axis in where.over if axis in where.coords]


def agreement(
    estimates: Float[Tensor, "metric *grid example"],
    true: Float[Tensor, "metric cell"],
    cells: Sequence[Cell],
    labels: list[dict[str, Label]],
    metrics: list[str],
) -> dict[str, Any]:
    """What to say of estimates, of which the true values of some cells are known."""
    places = [int(np.ravel_multi_index(cell, estimates.shape[1:-1])) for cell in cells]
    found = estimates.mean(-1).flatten(1)[:, places]
    done = ~true.isnan().any(0)
    found, true = found[:, done].cpu().double(), true[:, done].cpu().double()
    labels = [each for each, is_done in zip(labels, done.tolist(), strict=True) if is_done]
    said: dict[str, Any] = {"checked": len(labels)}
    if labels:
        said["mean_abs_error"] = _of_metrics((found - true).abs().mean(1), metrics)
    if len(labels) > 2:
        said["correlation"] = _of_metrics(
            torch.stack([correlation(*each) for each in zip(found, true, strict=True)]), metrics
        )
    said["sample"] = [
        {**at, "estimate": _numbers(found[:, cell]), "true": _numbers(true[:, cell])} for cell, at in enumerate(labels)
    ]
    return said


def correlation(a: Float[Tensor, " cell"], b: Float[Tensor, " cell"]) -> Float[Tensor, ""]:
    """Pearson's; NaN if one of them is the same everywhere."""
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.norm() * b.norm())


def _of_metrics(values: Float[Tensor, " metric"], metrics: list[str]) -> Any:
    return float(values[0]) if len(metrics) == 1 else Result(values, ("metric",), {"metric": list(metrics)})


def _numbers(values: Float[Tensor, " metric"]) -> Any:
    return values.tolist() if len(values) > 1 else float(values[0])

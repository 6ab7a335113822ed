"""Trials of an estimate: some of its cells truly measured, and how well the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.experiments.core.labels import Label
from hookline.experiments.core.measure import Metrics, Options, Reader, measure
from hookline.experiments.core.prompts import Prompts, baselines, unpadded
from hookline.experiments.core.sweep import Places, Values
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Change, Variant, index_of

Cell = tuple[int, ...]


class Sample(NamedTuple):
    """Cells to try: those with the largest estimates, and others drawn at random."""

    top: list[Cell]
    random: list[Cell]

    @property
    def cells(self) -> list[Cell]:
        """All of them."""
        return [*self.top, *self.random]


def sampled(effects: Float[Tensor, "*grid"], changed: Bool[Tensor, "*grid"], count: int, seed: int) -> Sample:
    """Half of the cells by the size of their estimated effects, half at random, of those where something changes.

    Most cells of a large grid do next to nothing: a random sample alone would say little about those that matter.
    """
    cells = changed.cpu().nonzero()
    sizes = effects.cpu().abs()[tuple(cells.T)]
    by_size = sizes.argsort(descending=True, stable=True)
    n_top = min(len(cells), count - count // 2)
    others = by_size[n_top:]
    drawn = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[: count - n_top]]
    top, random = ([tuple(cells[at].tolist()) for at in some] for some in (by_size[:n_top], drawn.sort().values))
    return Sample(top, random)


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
    is_text = point.stream != "image"
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
    sample: Sample,
    labels: list[dict[str, Label]],
    metrics: list[str],
) -> dict[str, Any]:
    """What to say of estimates, of which the true values of some cells are known: of all, of the top, of the others."""
    places = [int(np.ravel_multi_index(cell, estimates.shape[1:-1])) for cell in sample.cells]
    found = estimates.mean(-1).flatten(1)[:, places].cpu().double()
    true, done = true.cpu().double(), ~true.isnan().any(0).cpu()
    is_top = torch.arange(len(places)) < len(sample.top)
    said: dict[str, Any] = {"checked": int(done.sum())}
    for prefix, some in (("", done), ("top_", done & is_top), ("random_", done & ~is_top)):
        said |= {prefix + key: x for key, x in _agreeing(found[:, some], true[:, some], metrics).items()}
    said["sample"] = [
        {
            **labels[cell],
            "chosen": "top" if is_top[cell] else "random",
            "estimate": _numbers(found[:, cell]),
            "true": _numbers(true[:, cell]),
        }
        for cell in done.nonzero().flatten().tolist()
    ]
    return said


def _agreeing(
    found: Float[Tensor, "metric cell"], true: Float[Tensor, "metric cell"], metrics: list[str]
) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if found.shape[1]:
        said["mean_abs_error"] = _of_metrics((found - true).abs().mean(1), metrics)
    if found.shape[1] > 2:
        said["correlation"] = _of_metrics(
            torch.stack([correlation(*each) for each in zip(found, true, strict=True)]), metrics
        )
    return said


def correlation(a: Float[Tensor, " cell"], b: Float[Tensor, " cell"]) -> Float[Tensor, ""]:
    """Pearson's; NaN if one of them is the same everywhere."""
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.norm() * b.norm())


def _of_metrics(values: Float[Tensor, " metric"], metrics: list[str]) -> Any:
    return float(values[0]) if len(metrics) == 1 else Result(values, ("metric",), {"metric": list(metrics)})


def _numbers(values: Float[Tensor, " metric"]) -> Any:
    return values.tolist() if len(values) > 1 else float(values[0])

"""Checks of an estimate: some of its cells actually measured, and how well the two agree."""

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
from hookline.experiments.core.sweep import CellBuilder, SweepPoints, Values, make_cells
from hookline.experiments.result import Result
from hookline.model import HookedModel

Cell = tuple[int, ...]


class Sample(NamedTuple):
    """Cells to measure: those with the largest estimates, and others drawn at random."""

    top: list[Cell]
    random: list[Cell]

    @property
    def cells(self) -> list[Cell]:
        """The cells of both kinds."""
        return [*self.top, *self.random]


def sampled(effects: Float[Tensor, "*grid"], changed: Bool[Tensor, "*grid"], count: int, seed: int) -> Sample:
    """Half of the cells by the size of their estimated effects, half at random, of those where something changes.

    Most cells of a large grid have almost no effect: a random sample alone would say little about the others.
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
    where: SweepPoints,
    prompts: Prompts,
    metrics: Metrics,
    given: Values,
    cells: Sequence[Cell],
    how: Options,
) -> Float[Tensor, "metric cell"]:
    """The metrics when each of these cells is patched; NaN if interrupted."""
    if not cells:
        return torch.zeros(len(metrics), 0)
    points = where.points.values()
    bases = baselines(model, prompts, keep=where.names)
    own = [
        {point.name: unpadded(given[point.name][row], point, prompts.span(row), prompts.width) for point in points}
        for row in range(len(prompts))
    ]
    grid = make_cells([where], bases, prompts, range(prompts.width))
    builder, keys, shape = (
        CellBuilder(grid, own, bases, prompts),
        list(grid.covered),
        list(map(len, grid.coords.values())),
    )
    variants = [builder.variant_for([keys[int(np.ravel_multi_index(cell, shape))]]) for cell in cells]
    return measure(Reader(bases, prompts, metrics), variants, how)[0].mean(-1)


def agreement(
    estimates: Float[Tensor, "metric *grid example"],
    true: Float[Tensor, "metric cell"],
    sample: Sample,
    labels: list[dict[str, Label]],
    metrics: list[str],
) -> dict[str, Any]:
    """The agreement of estimates with true values: of all measured cells, of the top ones, of the random ones."""
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
    """Pearson correlation; NaN if one side is constant."""
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.norm() * b.norm())


def _of_metrics(values: Float[Tensor, " metric"], metrics: list[str]) -> Any:
    return float(values[0]) if len(metrics) == 1 else Result(values, ("metric",), {"metric": list(metrics)})


def _numbers(values: Float[Tensor, " metric"]) -> Any:
    return values.tolist() if len(values) > 1 else float(values[0])

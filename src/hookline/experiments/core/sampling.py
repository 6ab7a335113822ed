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
from hookline.experiments.core.prompts import Prompts, baselines
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
    bases = baselines(model, prompts, keep=where.names)
    own = [
        {point.name: prompts.unpadded(given[point.name][row], point, row) for point in where.points.values()}
        for row in range(len(prompts))
    ]
    grid = make_cells(where, bases, prompts, range(prompts.width))
    builder = CellBuilder(grid, own, bases, prompts)
    keys = [tuple(labels[at] for labels, at in zip(grid.coords.values(), cell, strict=True)) for cell in cells]
    return measure(Reader(bases, prompts, metrics), [builder.variant_for([key]) for key in keys], how)[0].mean(-1)


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
        each = list(zip(found[:, some], true[:, some], strict=True))
        if bool(some.any()):
            said[f"{prefix}mean_abs_error"] = _of_metrics([(a - b).abs().mean() for a, b in each], metrics)
        if int(some.sum()) > 2:
            said[f"{prefix}correlation"] = _of_metrics(
                [torch.corrcoef(torch.stack(pair))[0, 1] for pair in each], metrics
            )
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


def _of_metrics(values: Sequence[Tensor], metrics: list[str]) -> Any:
    several = len(metrics) > 1
    return Result(torch.stack([*values]), ("metric",), {"metric": [*metrics]}) if several else float(values[0])


def _numbers(values: Float[Tensor, " metric"]) -> Any:
    return values.tolist() if len(values) > 1 else float(values[0])

"""Activation patching: the metric when activations of one run are written into another, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

import torch
from torch import Tensor

from hookline.engine import ActivationCache
from hookline.errors import HooklineError, how_many, warn
from hookline.experiments.core.aligned import PromptPositions
from hookline.experiments.core.continuations import continued, prompt_pair, ready_metrics
from hookline.experiments.core.labels import Label, about, number_text, said_points
from hookline.experiments.core.measure import ControlledCellOptions, ControlledOptions, Reader, measured, metric_values
from hookline.experiments.core.prompts import Prompt, Prompts, baselines, prompts_of
from hookline.experiments.core.sweep import (
    CellBuilder,
    SweepPoints,
    Values,
    aligned_sweep,
    make_cells,
    moved_values,
    sweep_points,
)
from hookline.experiments.metrics import as_metric
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.rerun.image_inputs import in_one_row
from hookline.residual import ModelCache

__all__ = ["sweep"]

Direction: TypeAlias = Literal["denoise", "noise"]


def __dir__() -> list[str]:
    return __all__


@lists(ControlledCellOptions, ControlledOptions)
def sweep(
    model: HookedModel,
    clean: Prompt | ActivationCache,
    corrupted: Prompt,
    metric: Any,
    *,
    points: str | Sequence[str] = "resid_pre",
    over: str | Sequence[str] = ("layer", "pos"),
    direction: Direction = "denoise",
    layers: Sequence[int] | None = None,
    positions: PromptPositions = None,
    **options: Unpack[ControlledCellOptions],
) -> Result:
    """Patch each cell of a grid from one run into the other, and measure: `result.values[layer, pos]`.

        >>> metric = metrics.logit_diff(" Mary", " John")
        >>> patching.sweep(model, clean, corrupted, metric, points="z", over=("layer", "head")).normalized.top(2)
        layer  head  value
        3      4     0.9678
        0      6     0.04654

    `points` is a point that layers have (`resid_pre`, `z`, `mlp_out`, `pattern`, …), or several, which become an axis
    `point`; without `layer` in `over`, point names or a filter. `over` are the axes of the result: `layer`, `pos`,
    `head`, `src` (key positions of a pattern), `neuron`, `dim`; axes that are not listed are patched as a whole.
    "denoise" writes clean activations into the corrupted run, "noise" the reverse. `info` has the metric of both runs,
    and `result.normalized` is 1 where a cell has the effect of the whole input. `clean` may be a cache of the clean
    run. With several prompts, positions are columns of the padded batch; or, with `positions`, those that mean the same
    in each prompt: indices (negative ones from its end), a list for each prompt, or meanings such as `last` and
    `token(" Mary")`. Clean and corrupted prompts may then differ in length. Without `pos` in `over`, they are patched
    together. Further options: `per_example` (the value of
    each prompt, as an axis `example`), `batch_size` (how many cells run at once, or "auto"), `progress`, and `resume`
    (the result of an interrupted sweep).
    """
    check_patch_direction(direction)
    how, where = ControlledOptions.of(options), sweep_points(model, points, over, layers)
    if isinstance(clean, ActivationCache):
        if direction == "noise":
            raise HooklineError("noise patches into the clean run, so it needs the clean prompt, not a cache")
        both, sources = _from_cache(model, clean, prompts_of(model, corrupted), metric, where), None
    else:
        metric, pair = prompt_pair(model, clean, corrupted, metric, may_differ=positions is not None)
        both = both_runs(model, pair, metric, where.names, direction)
        sources = pair[0 if direction == "denoise" else 1]
    bases, prompts = both.reader.bases, both.reader.prompts
    given, labels, aligned, info = both.given, both.labels, None, both.info
    if positions is not None:
        source, aligned = aligned_sweep(model, where, sources or prompts, prompts, positions)
        given = moved_values(where, given, bases, source, aligned)
        labels, info = aligned.labels, info | {"positions": aligned.at}
    builder = CellBuilder(make_cells(where, bases, labels), given, bases, prompts, aligned)
    info |= about(model, f"{said_points(points)} patched, {into(direction)}")
    return measured(both.reader, builder.grid(), info, how, both.source)


class Both(NamedTuple):
    """A run, and the activations of another run that are written into it."""

    reader: Reader
    """Of the run that is changed."""
    given: Sequence[Values]
    """The activations of the other run, for each prompt."""
    source: str
    """The checksum of the other run's prompts."""
    info: dict[str, Any]
    labels: list[Label]
    """The labels of positions: tokens of the clean prompt."""


def both_runs(
    model: HookedModel, pair: Sequence[Prompts], metric: Any, keep: Sequence[str], direction: Direction
) -> Both:
    """Run the clean and the corrupted prompts, and keep their activations at some points."""
    runs = [baselines(model, prompts, keep=keep) for prompts in pair]
    logits = [prompts.padded([base.logits for base in bases]) for bases, prompts in zip(runs, pair, strict=True)]
    metrics = ready_metrics(metric, model, logits, pair)
    clean, corrupted = (metric_values(*side) for side in zip(metrics, logits, strict=True))
    _warn_of_blind_metrics(list(metrics[0]), clean, corrupted, are_equal=torch.equal(*logits))
    source, target = (0, 1) if direction == "denoise" else (1, 0)
    info: dict[str, Any] = {"direction": direction, "clean": clean, "corrupted": corrupted}
    info["prompts"] = pair[0].checksums
    activations = [base.kept for base in runs[source]]
    reader = Reader(runs[target], pair[target], metrics[target])
    return Both(reader, activations, pair[source].checksum, info, [*pair[0].labels(model)])


def _warn_of_blind_metrics(names: list[str], clean: Tensor, corrupted: Tensor, *, are_equal: bool) -> None:
    """Warn of metrics that are the same in both runs, in every row, although the logits differ."""
    for name, one, other in zip(names, clean, corrupted, strict=True):
        if not are_equal and bool((one == other).all()):
            warn(
                f"{name} is {number_text(float(one.mean()))} in the clean run and in the corrupted run, although their "
                f"logits differ: it may read nothing that depends on the prompts"
            )


def check_patch_direction(direction: str) -> None:
    """Raise unless the direction is "denoise" or "noise"."""
    if direction not in ("denoise", "noise"):
        raise HooklineError(f'direction is "denoise" (clean into corrupted) or "noise", got {direction!r}')


def into(direction: Direction) -> str:
    """The direction in words."""
    return "clean into corrupted" if direction == "denoise" else "corrupted into clean"


def _from_cache(
    model: HookedModel, clean: ActivationCache, corrupted: Prompts, metric: Any, where: SweepPoints
) -> Both:
    """The run on the corrupted prompts, and a cache of the clean run in place of the clean prompts."""
    if continued(model, metric, corrupted)[1][0] is not corrupted:
        raise HooklineError(
            "an answer of several tokens extends the prompt, but the clean cache has the prompt only: pass the clean "
            "prompt itself"
        )
    bases = baselines(model, corrupted, keep=where.names)
    logits = corrupted.padded([base.logits for base in bases])
    clean_logits = clean.logits if isinstance(clean, ModelCache) else None
    clean_logits = clean_logits if clean_logits is not None and clean_logits.shape == logits.shape else None
    metrics = as_metric(
        metric, model, logits if clean_logits is None else clean_logits, logits, corrupted.tokens, corrupted.mask
    )
    reader = Reader(bases, corrupted, metrics)
    info: dict[str, Any] = {"direction": "denoise", "corrupted": reader.baseline}
    if clean_logits is not None:
        info["clean"] = metric_values(metrics, clean_logits)
    activations = {}
    for point in where.points.values():
        x = clean[point.name] if clean.has_batch_dim else clean[point.name][None]
        x = in_one_row(x, point) if len(corrupted) == 1 and point.stream == "image" else x
        if len(x) != len(corrupted):
            raise HooklineError(
                f"the clean cache has {how_many(len(x), 'row')} at {point.name!r}, but there "
                f"{'is' if len(corrupted) == 1 else 'are'} {how_many(len(corrupted), 'prompt')}"
            )
        activations[point.name] = x
    return Both(reader, corrupted.by_row(activations, where.points.values()), "", info, [*corrupted.labels(model)])

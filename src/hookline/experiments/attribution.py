"""Attribution patching: an estimate of every cell of a patching sweep from one gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.engine import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.aligned import Aligned, PromptPositions
from hookline.experiments.core.continuations import prompt_pair, ready_metrics
from hookline.experiments.core.integration import Along, ByMetric, Line, ran
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import (
    ExampleOptions,
    Metrics,
    Options,
    Reader,
    check_per_example,
    is_one_for_all,
    measure,
    metric_values,
    packed,
)
from hookline.experiments.core.prompts import Prompt, Prompts, baselines, warn_of_dropout
from hookline.experiments.core.sweep import (
    CellBuilder,
    SweepPoints,
    Values,
    aligned_sweep,
    axis_index,
    make_cells,
    moved,
    sweep_points,
)
from hookline.experiments.patching import Direction, check_patch_direction, into
from hookline.experiments.result import Result
from hookline.experiments.results.statistics import BASELINES
from hookline.functions.listed_options import lists
from hookline.model import HookedModel

__all__ = ["attribution_patching"]


def __dir__() -> list[str]:
    return __all__


@lists(ExampleOptions, Options)
def attribution_patching(
    model: HookedModel,
    clean: Prompt,
    corrupted: Prompt,
    metric: Any,
    *,
    points: str | Sequence[str] = "resid_pre",
    over: str | Sequence[str] = ("layer", "pos"),
    direction: Direction = "denoise",
    layers: Sequence[int] | None = None,
    steps: int | None = None,
    along: Along = "activations",
    positions: PromptPositions = None,
    check: int = 16,
    seed: int = 0,
    **options: Unpack[ExampleOptions],
) -> Result:
    """Estimate, from gradients, what `patching.sweep` with the same arguments would measure.

        >>> over = ("layer", "head")
        >>> attribution.attribution_patching(model, clean, corrupted, metric, points="z", over=over).normalized.top(1)
        layer  head  value
        3      4     0.5498

    An estimate is the metric of the run that is patched into, plus its gradient there times the difference between the
    two runs. All cells together cost one run of each prompt and one backward pass. `steps` averages the gradient over
    that many points on the line from one run to the other (integrated gradients): along the `activations` of each
    point separately, so that the cells of a point sum to the effect of patching all of it, at the cost of a forward and
    a backward pass per step and point; or along the `inputs`, at that cost per step. `positions` are as in
    `patching.sweep`.

    `check` cells are actually patched: half of them those with the largest estimates, half drawn with this `seed` from
    the others where anything changes. `info` then has the `correlation` and `mean_abs_error` of their estimates, also
    of each half (`top_correlation`, …), and the `sample` itself. Further options: per_example, batch_size, progress.
    """
    how, where = checked_options(direction, steps, along, check, options), sweep_points(model, points, over, layers)
    metric, pair = prompt_pair(model, clean, corrupted, metric, may_differ=positions is not None)
    if positions is not None and along == "inputs":
        raise HooklineError('along="inputs" moves all positions together: with positions=…, use along="activations"')
    line = Line(model, pair[1 if direction == "denoise" else 0], where.names, steps, along)
    settings: dict[str, Any] = {"direction": direction} | ({} if steps is None else {"steps": steps, "along": along})
    said = about(model, f"{said_points(points)} patched, {into(direction)}, estimated from gradients")
    return Estimate(line, where, pair, direction, how, check, seed, positions).result(metric, said | settings)


@dataclass(frozen=True)
class Estimate:
    """An estimate of a patching sweep: changes of activations times the gradients of a line, with a check."""

    line: Line
    where: SweepPoints
    pair: Sequence[Prompts]
    direction: Direction
    how: Options
    check: int
    seed: int
    positions: PromptPositions = None

    def result(self, metric: Any, about: dict[str, Any]) -> Result:
        """Run both prompts, and estimate every cell; `about` is what `info` says besides."""
        where, pair, line, how = self.where, self.pair, self.line, self.how
        model, logits = line.model, {}
        source, target = (0, 1) if self.direction == "denoise" else (1, 0)
        logits[source], source_values = ran(model, pair[source], line.names)
        logits[target], target_values = line.start()
        by_side = ready_metrics(metric, model, [logits[0], logits[1]], pair)
        metrics, aligned = by_side[target], None
        _check_shapes(source_values, target_values)
        if self.positions is not None:
            sides = aligned_sweep(model, where, pair[source], pair[target], self.positions)
            source_values, aligned = _moved(where, source_values, target_values, pair, source, sides), sides[1]
            about = about | {"positions": aligned.at}
        changes = {name: _change(source_values[name].float(), target_values[name].float()) for name in where.names}
        values = [metric_values(by_side[side], logits[side]) for side in (0, 1)]
        gradients = line.gradients(metrics, source_values, target_values)
        check_gradients(gradients, values, line.steps)
        effects = torch.stack([_effects(where, changes, gradients[name], pair[target], aligned) for name in metrics])
        _add_up(effects, metrics, logits[target], per_example=how.per_example)
        names = pair[0].labels(model) if aligned is None else aligned.labels
        coords = where.labels(dict(zip(where.over, effects.shape[1:-1], strict=True)), names)
        estimates = effects + values[target].reshape(len(metrics), *(1 for _ in coords), -1)
        keep = not any(is_one_for_all(metric, logits[target]) for metric in metrics.values())
        shown: dict[str, Any] = {"per_example": how.per_example, "copies": pair[0].copies, "keep": keep}
        info: dict[str, Any] = {**dict(zip(BASELINES, values, strict=True)), **about, **line.info}
        info["prompts"] = pair[0].checksums
        if self.check:
            is_changed = _effects(where, changes, changes, pair[target], aligned).ne(0).any(-1)
            cells, n_top = sampled(effects[0].mean(-1), is_changed, self.check, self.seed)
            true, labels = _true(model, where, pair[target], metrics, source_values, cells, names, how, aligned)
            info |= agreement(estimates.mean(-1).flatten(1)[:, cells], true, n_top, labels, list(metrics))
        else:
            warn_of_dropout(model)
        return packed(estimates, coords, list(metrics), **shown, info=info)


def _change(source: Tensor, target: Tensor) -> Tensor:
    """The difference, which is 0 where scores are masked in both runs."""
    return torch.where(source == target, 0.0, source - target)


def _moved(
    where: SweepPoints,
    source_values: Values,
    target_values: Values,
    pair: Sequence[Prompts],
    source: int,
    sides: Sequence[Aligned],
) -> dict[str, Tensor]:
    """The values of the run to patch from at aligned positions, in the columns of the run to patch."""
    values = {}
    for point in where.points.values():
        axis, rows = axis_index(point, "pos"), []
        for row, before in enumerate(target_values[point.name]):
            places = [
                aligned.columns(prompts, row)
                for aligned, prompts in zip(sides, (pair[source], pair[1 - source]), strict=True)
            ]
            rows.append(moved(source_values[point.name][row], before, axis, *places, name=point.name))
        values[point.name] = torch.stack(rows)
    return values


def _add_up(effects: Tensor, metrics: Metrics, logits: Tensor, *, per_example: bool) -> None:
    """Sum the effects of all prompts on a metric that is one number for all of them."""
    if per_example:
        check_per_example(metrics, logits)
    for row, metric in enumerate(metrics.values()):
        if is_one_for_all(metric, logits):
            effects[row] = effects[row].sum(-1, keepdim=True)


def _check_shapes(source: Values, target: Values) -> None:
    """Raise unless the two runs have the same shapes; images may differ in their number of patches."""
    for name, x in target.items():
        if source[name].shape != x.shape:
            raise HooklineError(
                f"{name!r} has the shape {list(source[name].shape[1:])} in the run to patch from, but "
                f"{list(x.shape[1:])} in the other: use images of one size, the same number in each prompt"
            )


def check_gradients(gradients: ByMetric, values: Sequence[Tensor], steps: int | None) -> None:
    """Raise if a gradient is 0 everywhere, although the metric differs between the runs."""
    for row, (name, by_point) in enumerate(gradients.items()):
        is_flat = all(not bool(gradient.any()) for gradient in by_point.values())
        if is_flat and not torch.allclose(values[0][row], values[1][row]):
            hint = "" if steps else ", or try steps=8"
            raise HooklineError(
                f"the gradient of {name} is 0 everywhere in the run to patch, although the metric differs between the "
                f"runs (does it count, round or clamp?): use a differentiable metric{hint}"
            )


def checked_options(
    direction: str, steps: Any, along: str, check: Any, options: Mapping[str, Any], *without: str
) -> Options:
    """The checked options of an attribution, which is not resumed: it takes a few runs only."""
    check_patch_direction(direction)
    if along not in ("inputs", "activations"):
        raise HooklineError(f'along is "inputs" or "activations", got {along!r}')
    if along != "activations" and steps is None:
        raise HooklineError(f"along={along!r} needs steps, for example steps=8")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise HooklineError(f"steps is the number of gradients to average, at least 1, or None, got {steps!r}")
    if steps == 1 and along == "inputs":
        raise HooklineError(
            "steps=1 takes one gradient, halfway between the inputs of the two runs, which is a worse estimate than "
            "the gradient of the run itself: remove steps, or use at least 2 (5 or more are good)"
        )
    if isinstance(check, bool) or not isinstance(check, int) or check < 0:
        raise HooklineError(f"check is how many cells are actually patched, 0 for none, got {check!r}")
    return Options.of(options, "resume", *without)


def _effects(
    where: SweepPoints,
    changes: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    prompts: Prompts,
    aligned: Aligned | None,
) -> Float[Tensor, "*grid example"]:
    """The gradient times the change, summed in each cell."""
    effects = [_summed(changes[x.name] * gradients[x.name].float(), x, where, prompts) for x in where.points.values()]
    if aligned is not None and "pos" in where.inner:
        member, place = aligned.membership(prompts), 1 + where.inner.index("pos")
        effects = [torch.einsum("bp...,bpc->bc...", x.movedim(place, 1), member).movedim(1, place) for x in effects]
    return where.laid_out(effects, ["example", *where.inner])


def _summed(x: Tensor, point: HookPoint, where: SweepPoints, prompts: Prompts) -> Tensor:
    """The sum over everything that a cell covers, [batch, *cell], without padding."""
    for place, letter in enumerate(point.axes.split()):
        if letter in "pk" and x.shape[place] == prompts.width and point.stream != "image":
            shape = [len(prompts), *(prompts.width if at == place else 1 for at in range(1, x.ndim))]
            x = x * prompts.mask.to(x).reshape(shape)
    cell_axes = [0, *(1 + axis_index(point, axis) for axis in where.inner)]
    x = x.permute([*cell_axes, *(at for at in range(x.ndim) if at not in cell_axes)])
    return x.reshape(*x.shape[: len(cell_axes)], -1).sum(-1)


def sampled(
    effects: Float[Tensor, "*grid"], changed: Bool[Tensor, "*grid"], count: int, seed: int
) -> tuple[list[int], int]:
    """Half of the cells by the size of their estimated effects, half at random, of those where something changes.

    Returns indices into the flattened grid, the largest effects first, and how many these are. Most cells of a large
    grid have almost no effect: a random sample alone would say little about the others.
    """
    cells = changed.cpu().flatten().nonzero().flatten()
    by_size = cells[effects.cpu().flatten()[cells].abs().argsort(descending=True, stable=True)]
    n_top = min(len(cells), count - count // 2)
    others = by_size[n_top:]
    drawn = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[: count - n_top]]
    return [*by_size[:n_top].tolist(), *drawn.sort().values.tolist()], n_top


def _true(
    model: HookedModel,
    where: SweepPoints,
    prompts: Prompts,
    metrics: Metrics,
    source_values: Values,
    cells: Sequence[int],
    labels: Sequence[Label],
    how: Options,
    aligned: Aligned | None,
) -> tuple[Float[Tensor, "metric cell"], list[dict[str, Label]]]:
    """The metrics when each of these cells is patched, NaN if interrupted; and the labels of the cells."""
    bases = baselines(model, prompts, keep=where.names)
    values_by_row = prompts.by_row(source_values, where.points.values())
    grid = make_cells(where, bases, labels)
    builder, keys = CellBuilder(grid, values_by_row, bases, prompts, aligned), list(grid.covered)
    variants = [builder.variant_for([keys[cell]]) for cell in cells]
    true = measure(Reader(bases, prompts, metrics), variants, how)[0].mean(-1)
    return true, [dict(zip(grid.coords, keys[cell], strict=True)) for cell in cells]


def agreement(
    estimates: Float[Tensor, "metric cell"],
    true: Float[Tensor, "metric cell"],
    n_top: int,
    labels: Sequence[Mapping[str, Label]],
    metrics: list[str],
) -> dict[str, Any]:
    """The agreement of estimates with true values: of all measured cells, of the top ones, of the random ones."""
    estimates, true, done = estimates.cpu().double(), true.cpu().double(), ~true.isnan().any(0).cpu()
    is_top = torch.arange(len(done)) < n_top
    said: dict[str, Any] = {"checked": int(done.sum())}
    for prefix, mask in (("", done), ("top_", done & is_top), ("random_", done & ~is_top)):
        pairs = list(zip(estimates[:, mask], true[:, mask], strict=True))
        if bool(mask.any()):
            said[f"{prefix}mean_abs_error"] = _packed([(a - b).abs().mean() for a, b in pairs], metrics)
        if int(mask.sum()) > 2:
            said[f"{prefix}correlation"] = _packed([torch.corrcoef(torch.stack(x))[0, 1] for x in pairs], metrics)
    said["sample"] = []
    for cell in done.nonzero().flatten().tolist():
        values = {"estimate": estimates[:, cell].tolist(), "true": true[:, cell].tolist()}
        values = values if len(metrics) > 1 else {key: x[0] for key, x in values.items()}
        said["sample"].append({**labels[cell], "chosen": "top" if is_top[cell] else "random", **values})
    return said


def _packed(values: Sequence[Float[Tensor, ""]], metrics: list[str]) -> Any:
    """One number per metric, or the number if there is one metric."""
    return packed(torch.stack([*values])[:, None], {}, metrics)

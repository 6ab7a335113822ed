"""Attribution patching: an estimate of every cell of a patching sweep from one gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.integration import Along, Line, ran
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import Metrics, Options, packed
from hookline.experiments.core.prompts import Prompt, Prompts, check_pair, prompts_of, warn_of_dropout
from hookline.experiments.core.sampling import agreement, sampled, true_values
from hookline.experiments.core.sweep import SweepPoints, Values, axis_index, sweep_points
from hookline.experiments.metrics import as_metric, value_of
from hookline.experiments.patching import Direction, into
from hookline.experiments.result import Result
from hookline.model import HookedModel

__all__ = ["attribution_patching"]


def __dir__() -> list[str]:
    return __all__


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
    check: int = 16,
    seed: int = 0,
    **options: Any,
) -> Result:
    """Estimate, from gradients, what `patching.sweep` with the same arguments would measure.

        metric = metrics.logit_diff(" Mary", " John")
        attribution.attribution_patching(model, clean, corrupted, metric, points="z", over=("layer", "head"))

    An estimate is the metric of the run that is patched into, plus its gradient there times the difference between the
    two runs. All cells together cost one run of each prompt and one backward pass. `steps` averages the gradient over
    that many points on the line from one run to the other (integrated gradients): along the `activations` of each
    point separately, so that the cells of a point sum to the effect of patching all of it, at the cost of a forward and
    a backward pass per step and point; or along the `inputs`, at that cost per step.

    `check` cells are actually patched: half of them those with the largest estimates (of the first metric), half drawn
    with this `seed` from the others where anything changes. `info` then has the `correlation` and `mean_abs_error` of
    their estimates, those of each half (`top_correlation`, `random_correlation`, …), and the `sample` itself. Further
    `options`: per_example, batch_size, progress.
    """
    how, where = checked_options(direction, steps, along, check, options), sweep_points(model, points, over, layers)
    pair = [prompts_of(model, clean), prompts_of(model, corrupted)]
    check_pair(model, *pair)
    metric, pair = continued(model, metric, *pair)
    source, target = (0, 1) if direction == "denoise" else (1, 0)
    line, logits = Line(model, pair[target], where.names, steps, along), {}
    logits[source], given = ran(model, pair[source], line.names)
    logits[target], there = line.start()
    found = as_metric(metric, model, logits[0], logits[1], pair[0].tokens, pair[0].mask)
    _check_alike(given, there)
    changes = {name: given[name].float() - there[name].float() for name in where.names}
    gradients = line.gradients(found, given, there)
    _check_gradients(gradients, found, logits, steps)
    effects = torch.stack([_effects(where, changes, gradients[name], pair[target]) for name in found])
    _add_up(effects, found, logits[0], per_example=how.per_example)
    coords = _labels(where, effects.shape[1:-1], [*pair[0].labels(model)])
    values = [_values_of(found, logits[each]) for each in (0, 1)]
    estimates = effects + values[target].reshape(len(found), *(1 for _ in coords), -1)
    names = list(found)
    shown: dict[str, Any] = {"per_example": how.per_example, "copies": pair[0].copies}
    clean_value, corrupted_value = (packed(each, {}, names, **shown) for each in values)
    info = {"direction": direction, "clean": clean_value, "corrupted": corrupted_value}
    info |= about(model, f"{said_points(points)} patched, {into(direction)}, estimated from gradients")
    info |= {} if steps is None else {"steps": steps, "along": along}
    if check:
        sample = sampled(effects[0].mean(-1), _where_changed(where, changes, pair[target]), check, seed)
        true = true_values(model, where, pair[target], found, given, sample.cells, how)
        labels = [{axis: coords[axis][at] for axis, at in zip(coords, cell, strict=True)} for cell in sample.cells]
        info |= agreement(estimates, true, sample, labels, names)
    else:
        warn_of_dropout(model)
    return packed(estimates, coords, names, **shown, info=info)


def _check_alike(given: Values, there: Values) -> None:
    """Activations of the two runs must have the same shapes; images may differ in their number of patches."""
    for name, x in there.items():
        if given[name].shape != x.shape:
            raise HooklineError(
                f"{name!r} has the shape {list(given[name].shape[1:])} in the run to patch from, but "
                f"{list(x.shape[1:])} in the other: use images of one size, the same number in each prompt"
            )


def _add_up(effects: Tensor, metrics: Metrics, logits: Tensor, *, per_example: bool) -> None:
    """For a metric that is one number for all prompts, the effects of the prompts add up."""
    for row, (name, metric) in enumerate(metrics.items()):
        if is_one_for_all(metric, logits):
            if per_example:
                raise HooklineError(f"per_example=True, but {name} returns one number for all prompts, not [batch]")
            effects[row] = effects[row].sum(-1, keepdim=True)


def _check_gradients(gradients: Any, found: Metrics, logits: dict[int, Tensor], steps: int | None) -> None:
    """A gradient of 0 everywhere is useless where the metric differs between the runs."""
    values = [_values_of(found, logits[each]) for each in (0, 1)]
    for row, name in enumerate(found):
        is_flat = all(not bool(each.ne(0).any()) for each in gradients[name].values())
        if is_flat and not torch.allclose(values[0][row], values[1][row]):
            hint = "" if steps else ", or try steps=8"
            raise HooklineError(
                f"the gradient of {name} is 0 everywhere in the run to patch, although the metric differs between the "
                f"runs (does it count, round or clamp?): use a differentiable metric{hint}"
            )


def _where_changed(where: SweepPoints, changes: Values, prompts: Prompts) -> Bool[Tensor, "*grid"]:
    """The cells where the two runs differ."""
    return _effects(where, changes, changes, prompts).ne(0).any(-1)


def checked_options(direction: str, steps: Any, along: str, check: Any, options: dict[str, Any]) -> Options:
    """The checked options of an attribution."""
    if direction not in ("denoise", "noise"):
        raise HooklineError(f'direction is "denoise" (clean into corrupted) or "noise", got {direction!r}')
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
    if "resume" in options:
        raise HooklineError("attribution takes a few runs only, so it has no resume=")
    return Options.of(options)


def _values_of(metrics: Metrics, logits: Tensor) -> Float[Tensor, "metric example"]:
    with torch.no_grad():
        found = [value_of(metric, logits, name) for name, metric in metrics.items()]
    return torch.stack([each.expand(len(logits)) for each in found])


def is_one_for_all(metric: Any, logits: Tensor) -> bool:
    """Whether a metric returns one number for all prompts together."""
    with torch.no_grad():
        return len(logits) > 1 and value_of(metric, logits, "the metric").ndim == 0


def _effects(
    where: SweepPoints, changes: Mapping[str, Tensor], gradients: Mapping[str, Tensor], prompts: Prompts
) -> Float[Tensor, "*grid example"]:
    """The gradient times the change, summed in each cell."""
    inner = [axis for axis in where.over if axis not in where.coords]
    each = [_summed(changes[p.name] * gradients[p.name].float(), p, inner, prompts) for p in where.points.values()]
    if len({x.shape for x in each}) > 1:
        sizes = {point.name: list(x.shape[1:]) for point, x in zip(where.points.values(), each, strict=True)}
        raise HooklineError(f"the points differ in the size of {' and '.join(inner)}: {sizes}. Use them separately")
    outer = [axis for axis in where.over if axis in where.coords]
    x = torch.stack(each).reshape([*(len(where.coords[axis]) for axis in outer), *each[0].shape])
    axes = [*outer, "example", *inner]
    return x.permute([axes.index(axis) for axis in (*where.over, "example")])


def _summed(product: Tensor, point: HookPoint, inner: Sequence[str], prompts: Prompts) -> Tensor:
    """Summed over everything that a cell covers, [batch, *cell], without padding."""
    for place, letter in enumerate(point.axes.split()):
        if letter in "pk" and product.shape[place] == prompts.width and point.stream != "image":
            shape = [len(prompts), *(prompts.width if at == place else 1 for at in range(1, product.ndim))]
            product = product * prompts.mask.to(product).reshape(shape)
    kept = [1 + axis_index(point, axis) for axis in inner]
    gone = [at for at in range(1, product.ndim) if at not in kept]
    product = product.sum(gone) if gone else product
    return product.permute([0, *(1 + sorted(kept).index(place) for place in kept)])


def _labels(where: SweepPoints, shape: Sequence[int], positions: list[Label]) -> dict[str, list[Label]]:
    """The labels of each axis of the grid."""
    found: dict[str, list[Label]] = {}
    of_text = not any(point.stream == "image" for point in where.points.values())
    for axis, size in zip(where.over, shape, strict=True):
        numbers: list[Label] = list(range(size))
        found[axis] = where.coords.get(axis, positions if axis in ("pos", "src") and of_text else numbers)
    return found

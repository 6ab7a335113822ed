"""Differentiable runs: the gradient of a metric at many points, and integrated gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.engine.batch_index import drawn_once
from hookline.engine.halving import Fit
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.measure import Metrics
from hookline.experiments.core.prompt_batches import batches, gathered, scattered
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.core.sweep import Values
from hookline.experiments.metrics import value_of
from hookline.model import HookedModel

Along: TypeAlias = Literal["inputs", "activations"]
ByMetric: TypeAlias = dict[str, dict[str, Tensor]]
"""The gradient of each metric at each point."""


Among: TypeAlias = tuple[Float[Tensor, "batch pos vocab"], Int[Tensor, " row"]]
"""The logits of all prompts, and the rows that a run has."""


@dataclass(frozen=True, eq=False)
class Traced:
    """Runs on all prompts, with the graph that leads from some of their points to their logits."""

    logits: Float[Tensor, "batch pos vocab"]
    prompts: Prompts
    watched: Mapping[HookPoint, list[Tensor]]
    """The activation of each run at a point: see `prompt_batches.py`."""

    def values(self) -> dict[str, Tensor]:
        """The activations at the watched points, with one row per prompt."""
        return {
            point.name: gathered([x.detach() for x in parts], point, self.prompts)
            for point, parts in self.watched.items()
        }

    def gradients(
        self, metric: Callable[[Tensor], Any], name: str = "the metric", among: Among | None = None
    ) -> dict[str, Tensor]:
        """The gradient of the metric, summed over prompts, at each watched point; zeros where it does not depend on it.

        `among` are the logits of all prompts, if this run is of some of them, and which.
        """
        with torch.enable_grad():
            logits = self.logits if among is None else among[0].index_copy(0, among[1], self.logits)
            value = value_of(metric, logits, name).sum()
        if not value.requires_grad:
            raise HooklineError(
                f"{name} has no gradient: attribution needs a differentiable metric (logit_diff, log_prob, prob, kl, "
                f"loss), not one that counts or compares"
            )
        every = [x for parts in self.watched.values() for x in parts]
        found = torch.autograd.grad(value, every, retain_graph=True, allow_unused=True)
        left = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(every, found, strict=True)]
        return {
            point.name: gathered([left.pop(0) for _ in parts], point, self.prompts)
            for point, parts in self.watched.items()
        }


def traced(
    model: HookedModel, prompts: Prompts, watch: Sequence[str], *, added: Mapping[str, Tensor] | None = None
) -> Traced:
    """Run the prompts with gradients at the points in `watch`, and something `added` at points."""
    if torch.is_inference_mode_enabled():
        raise HooklineError(
            "attribution needs gradients, which torch.inference_mode() disables: use torch.no_grad() instead"
        )
    points = [model._points.find(name) for name in watch]
    moved = {model._points.find(name): x for name, x in (added or {}).items()}
    runs = batches(prompts, [*points, *moved])
    watched: dict[HookPoint, list[Tensor]] = {point: [] for point in points}
    logits = []
    for number, some in enumerate(runs):
        noted: dict[str, Tensor] = {}

        def note(x: Tensor, hook: HookPoint, noted: dict[str, Tensor] = noted) -> None:
            if hook.name in noted:
                raise HooklineError(
                    f"{hook.name!r} fires more than once per forward pass, so its gradient is ambiguous"
                )
            noted[hook.name] = x if x.requires_grad else x.requires_grad_()

        run = number if len(runs) > 1 else None
        hooks: list[Any] = [(point.name, _adding(x, point, prompts, run)) for point, x in moved.items()]
        hooks += [(point.name, note) for point in points]
        with torch.enable_grad(), drawn_once(len(some)):
            logits.append(model.run_with_hooks(**some.call(model), fwd_hooks=hooks))
        for point, parts in watched.items():
            parts.append(noted[point.name])
    return Traced(_all_logits(logits, prompts), prompts, watched)


def _adding(x: Tensor, point: HookPoint, prompts: Prompts, run: int | None) -> Callable[[Tensor], Tensor]:
    return lambda there: there + scattered(x, point, prompts, there.shape, run)


def _all_logits(parts: list[Tensor], prompts: Prompts) -> Float[Tensor, "batch pos vocab"]:
    """The logits of all runs in one tensor, zeros at padding."""
    if len(parts) == 1:
        return parts[0]
    every = parts[0].new_zeros(len(prompts), prompts.width, parts[0].shape[-1])
    for row, logits in enumerate(parts):
        every[row, prompts.span(row).start : prompts.span(row).stop] = logits[0]
    return every


@torch.no_grad()
def ran(model: HookedModel, prompts: Prompts, names: Sequence[str], fit: Fit | None = None) -> tuple[Tensor, Values]:
    """The logits of runs on all prompts, and their activations at these points, with one row per prompt."""
    points = [model._points.find(name) for name in names]

    def run(some: Sequence[list[int]]) -> tuple[Tensor, Values]:
        part = prompts.part([row for rows in some for row in rows])
        logits, found = [], []
        for each in batches(part, points):
            with drawn_once(len(each)):
                out, cache = model.run_with_cache(**each.call(model), names_filter=list(names))
            logits.append(out)
            found.append(cache)
        values = {point.name: gathered([cache[point.name] for cache in found], point, part) for point in points}
        return _all_logits(logits, part), values

    fit = fit if fit is not None else Fit("prompts")
    return _joined([found for _, found in fit.parts(_rows(prompts), run)])


def _rows(prompts: Prompts) -> list[list[int]]:
    """The smallest groups of prompts that can be run: single prompts, or all, since images may be one row."""
    return [[row] for row in range(len(prompts))] if not prompts.more else [list(range(len(prompts)))]


def _joined(runs: Sequence[tuple[Tensor, Values]]) -> tuple[Tensor, Values]:
    """Runs of some prompts each as one of all of them."""
    if len(runs) == 1:
        return runs[0]
    values = {name: torch.cat([given[name] for _, given in runs]) for name in runs[0][1]}
    return torch.cat([logits for logits, _ in runs]), values


class Line:
    """The line from one run to another along which gradients are taken; without steps, only its start.

    If memory runs out, prompts are run in smaller groups.
    """

    def __init__(
        self, model: HookedModel, prompts: Prompts, points: list[str], steps: int | None, along: Along
    ) -> None:
        self.model, self.prompts, self.points, self.steps = model, prompts, points, steps
        first = f"{model._points.layer(0)}.hook_resid_pre"
        self.moved = {first: points} if along == "inputs" else {name: [name] for name in points}
        """The points that are moved along the line, and the points whose gradients are then taken."""
        self.fit = Fit("prompts")
        self._start: Traced | None = None
        """The run at the start, if its gradients are needed and all prompts fit."""

    @property
    def names(self) -> list[str]:
        """The points at which both runs must be known."""
        return self.points if self.steps is None else list(dict.fromkeys([*self.points, *self.moved]))

    def start(self) -> tuple[Tensor, Values]:
        """The logits of the run at the start, and its activations at the points."""
        if self.steps is not None:
            return ran(self.model, self.prompts, self.names, self.fit)

        def run(some: Sequence[list[int]]) -> tuple[Tensor, Values]:
            rows = [row for each in some for row in each]
            found = traced(self.model, self.prompts.part(rows), self.points)
            self._start = found if len(rows) == len(self.prompts) else None
            return found.logits.detach(), found.values()

        return _joined([found for _, found in self.fit.parts(_rows(self.prompts), run)])

    def gradients(self, metrics: Metrics, end: Values, start: Values) -> ByMetric:
        """The gradient of each metric at each point, averaged over the steps."""
        if self.steps is None:
            return self._gradients(metrics, self.points, {})
        sums: ByMetric = {name: {point: torch.zeros_like(start[point]) for point in self.points} for name in metrics}
        for moved, points in self.moved.items():
            for step in range(self.steps):
                way = (end[moved] - start[moved]) * ((step + 0.5) / self.steps)
                found = self._gradients(metrics, points, {moved: way})
                for name, gradients in found.items():
                    for point, gradient in gradients.items():
                        sums[name][point] += gradient / self.steps
        return sums

    def _gradients(self, metrics: Metrics, points: Sequence[str], added: Mapping[str, Tensor]) -> ByMetric:
        """The gradient of each metric at some points, in runs with `added` values at others."""
        others: list[Tensor] = []

        def run(some: Sequence[list[int]]) -> ByMetric:
            rows = [row for each in some for row in each]
            is_whole = len(rows) == len(self.prompts)
            among = None if is_whole else self._among(rows, added, others)
            here, self._start = self._start if is_whole else None, None
            if here is None:
                here = self._traced(rows, points, added)
            return {name: here.gradients(metric, name, among) for name, metric in metrics.items()}

        found = [each for _, each in self.fit.parts(_rows(self.prompts), run)]
        return {
            name: {point: torch.cat([each[name][point] for each in found]) for point in found[0][name]}
            if len(found) > 1
            else found[0][name]
            for name in metrics
        }

    def _traced(self, rows: list[int], points: Sequence[str], added: Mapping[str, Tensor]) -> Traced:
        part = {name: x[rows] if len(rows) < len(self.prompts) else x for name, x in added.items()}
        return traced(self.model, self.prompts.part(rows), points, added=part)

    def _among(self, rows: list[int], added: Mapping[str, Tensor], known: list[Tensor]) -> Among:
        """The logits of all prompts with the added values, and the rows that are run."""
        if not known:
            known.append(self._logits(added))
        return known[0], torch.tensor(rows, device=known[0].device)

    @torch.no_grad()
    def _logits(self, added: Mapping[str, Tensor]) -> Tensor:
        def run(some: Sequence[list[int]]) -> Tensor:
            return self._traced([row for each in some for row in each], (), added).logits.detach()

        return torch.cat([found for _, found in self.fit.parts(_rows(self.prompts), run)])

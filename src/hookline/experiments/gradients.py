"""Runs that can be differentiated: what a metric would gain from a change at any of many points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.batches import batches, gathered, scattered
from hookline.experiments.grid import Values
from hookline.experiments.measure import Metrics
from hookline.experiments.metrics import value_of
from hookline.experiments.prompts import Prompts
from hookline.model import HookedModel
from hookline.points import HookPoint
from hookline.rows import drawn_once

Along: TypeAlias = Literal["inputs", "activations"]
ByMetric: TypeAlias = dict[str, dict[str, Tensor]]
"""Of each metric, its gradient at each point."""


@dataclass(frozen=True, eq=False)
class Traced:
    """Runs on all prompts, with the graph that leads from some of their points to their logits."""

    logits: Float[Tensor, "batch pos vocab"]
    prompts: Prompts
    watched: Mapping[HookPoint, list[Tensor]]
    """What each run had at a point: see `batches.py`."""

    def values(self) -> dict[str, Tensor]:
        """What was at the watched points, with a row for each prompt."""
        return {
            point.name: gathered([x.detach() for x in parts], point, self.prompts)
            for point, parts in self.watched.items()
        }

    def gradients(self, metric: Callable[[Tensor], Any], name: str = "the metric") -> dict[str, Tensor]:
        """Of the metric, summed over prompts, at each watched point; zeros where it makes no difference."""
        with torch.enable_grad():
            value = value_of(metric, self.logits, name).sum()
        if not value.requires_grad:
            raise HooklineError(
                f"{name} has no gradient: attribution needs a metric that changes smoothly with the logits "
                f"(logit_diff, log_prob, prob, kl, loss), not one that counts or compares"
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
            "attribution needs gradients, and torch.inference_mode() has none: leave it, or use no_grad"
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
                raise HooklineError(f"{hook.name!r} comes by more than once in a run: it has no one gradient")
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
    """Those of all runs in one tensor, zeros at padding."""
    if len(parts) == 1:
        return parts[0]
    every = parts[0].new_zeros(len(prompts), prompts.width, parts[0].shape[-1])
    for row, logits in enumerate(parts):
        every[row, prompts.span(row).start : prompts.span(row).stop] = logits[0]
    return every


@torch.no_grad()
def ran(model: HookedModel, prompts: Prompts, names: Sequence[str]) -> tuple[Tensor, Values]:
    """The logits of runs on all prompts, and what they have at these points, with a row for each prompt."""
    points = [model._points.find(name) for name in names]
    logits, found = [], []
    for some in batches(prompts, points):
        with drawn_once(len(some)):
            out, cache = model.run_with_cache(**some.call(model), names_filter=list(names))
        logits.append(out)
        found.append(cache)
    values = {point.name: gathered([cache[point.name] for cache in found], point, prompts) for point in points}
    return _all_logits(logits, prompts), values


class Line:
    """The way from one run to another along which gradients are taken; without steps, only where it starts."""

    def __init__(
        self, model: HookedModel, prompts: Prompts, points: list[str], steps: int | None, along: Along
    ) -> None:
        self.model, self.prompts, self.points, self.steps = model, prompts, points, steps
        first = f"{model._points.layer(0)}.hook_resid_pre"
        self.moved = {first: points} if along == "inputs" else {name: [name] for name in points}
        """What is moved, and the points whose gradients are then taken."""

    @property
    def names(self) -> list[str]:
        """The points at which both runs must be known."""
        return self.points if self.steps is None else list(dict.fromkeys([*self.points, *self.moved]))

    def start(self) -> tuple[Tensor, Values, Traced | None]:
        """The logits of the run where it starts, what that has at the points, and the run if it is differentiated."""
        if self.steps is None:
            run = traced(self.model, self.prompts, self.points)
            return run.logits.detach(), run.values(), run
        return *ran(self.model, self.prompts, self.names), None

    def gradients(self, metrics: Metrics, run: Traced | None, end: Values, start: Values) -> ByMetric:
        """Of each metric at each point, averaged over the steps."""
        if run is not None:
            return {name: run.gradients(metric, name) for name, metric in metrics.items()}
        assert self.steps is not None
        sums: ByMetric = {name: {point: torch.zeros_like(start[point]) for point in self.points} for name in metrics}
        for moved, points in self.moved.items():
            for step in range(self.steps):
                way = (end[moved] - start[moved]) * ((step + 0.5) / self.steps)
                here = traced(self.model, self.prompts, points, added={moved: way})
                for name, metric in metrics.items():
                    for point, gradient in here.gradients(metric, name).items():
                        sums[name][point] += gradient / self.steps
        return sums

"""Runs that can be differentiated: what a metric would gain from a change at any of many points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.grid import Values
from hookline.experiments.measure import Metrics
from hookline.experiments.metrics import value_of
from hookline.experiments.prompts import Prompts
from hookline.model import HookedModel
from hookline.points import HookPoint
from hookline.residual import ModelCache
from hookline.rows import drawn_once
from hookline.verbs import HookList

Along: TypeAlias = Literal["inputs", "activations"]
ByMetric: TypeAlias = dict[str, dict[str, Tensor]]
"""Of each metric, its gradient at each point."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A run on all prompts at once, with the graph that leads from some of its points to its logits."""

    logits: Float[Tensor, "batch pos vocab"]
    cache: ModelCache
    watched: Mapping[str, Tensor]

    def values(self) -> dict[str, Tensor]:
        """What was at the watched points."""
        return {name: x.detach() for name, x in self.watched.items()}

    def gradients(self, metric: Callable[[Tensor], Any], name: str = "the metric") -> dict[str, Tensor]:
        """Of the metric, summed over prompts, at each watched point; zeros where it makes no difference."""
        with torch.enable_grad():
            value = value_of(metric, self.logits, name).sum()
        if not value.requires_grad:
            raise HooklineError(
                f"{name} has no gradient: attribution needs a metric that changes smoothly with the logits "
                f"(logit_diff, log_prob, prob, kl, loss), not one that counts or compares"
            )
        points = list(self.watched.values())
        found = torch.autograd.grad(value, points, retain_graph=True, allow_unused=True)
        pairs = zip(self.watched.items(), found, strict=True)
        return {key: torch.zeros_like(x) if grad is None else grad for (key, x), grad in pairs}


def traced(
    model: HookedModel, prompts: Prompts, watch: Sequence[str], *, keep: Sequence[str] = (), fwd_hooks: HookList = ()
) -> Traced:
    """Run the prompts with gradients at the points in `watch`; keep activations of those in `keep`."""
    if torch.is_inference_mode_enabled():
        raise HooklineError(
            "attribution needs gradients, and torch.inference_mode() has none: leave it, or use no_grad"
        )
    watched: dict[str, Tensor] = {}

    def note(x: Tensor, hook: HookPoint) -> None:
        if hook.name in watched:
            raise HooklineError(f"{hook.name!r} comes by more than once in a run: it has no one gradient")
        watched[hook.name] = x if x.requires_grad else x.requires_grad_()

    hooks = [*fwd_hooks, *((name, note) for name in watch)]
    names = list(keep) or list(watch[:1])
    with torch.enable_grad(), drawn_once(len(prompts)):
        logits, cache = model.run_with_cache(**prompts.call(model), names_filter=names, fwd_hooks=hooks)
    return Traced(logits, cache, watched)


@torch.no_grad()
def ran(model: HookedModel, prompts: Prompts, names: Sequence[str]) -> tuple[Tensor, Values]:
    """The logits of a run, and what it has at these points."""
    with drawn_once(len(prompts)):
        logits, cache = model.run_with_cache(**prompts.call(model), names_filter=list(names))
    return logits, {name: cache[name] for name in names}


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
                here = traced(self.model, self.prompts, points, fwd_hooks=[(moved, lambda x, way=way: x + way)])
                for name, metric in metrics.items():
                    for point, gradient in here.gradients(metric, name).items():
                        sums[name][point] += gradient / self.steps
        return sums

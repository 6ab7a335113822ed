"""Runs that can be differentiated: what a metric would gain from a change at any of many points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.grid import Values
from hookline.experiments.measure import Metrics
from hookline.experiments.metrics import checked
from hookline.experiments.prompts import Prompts
from hookline.halving import Fit
from hookline.model import HookedModel
from hookline.points import HookPoint
from hookline.residual import ModelCache
from hookline.verbs import HookList

Along: TypeAlias = Literal["inputs", "activations"]
ByMetric: TypeAlias = dict[str, dict[str, Tensor]]
"""Of each metric, its gradient at each point."""


Among: TypeAlias = tuple[Float[Tensor, "batch pos vocab"], Int[Tensor, " row"]]
"""The logits of all prompts, and which of them a run is of."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A run on all prompts at once, with the graph that leads from some of its points to its logits."""

    logits: Float[Tensor, "batch pos vocab"]
    cache: ModelCache
    watched: Mapping[str, Tensor]

    def values(self) -> dict[str, Tensor]:
        """What was at the watched points."""
        return {name: x.detach() for name, x in self.watched.items()}

    def gradients(
        self, metric: Callable[[Tensor], Any], name: str = "the metric", among: Among | None = None
    ) -> dict[str, Tensor]:
        """Of the metric, summed over prompts, at each watched point; zeros where it makes no difference.

        `among` are the logits of all prompts, if this run is of some of them, and which.
        """
        with torch.enable_grad():
            logits = self.logits if among is None else among[0].index_copy(0, among[1], self.logits)
            value = checked(metric(logits), len(logits), name).sum()
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
    with torch.enable_grad():
        logits, cache = model.run_with_cache(**prompts.call(model), names_filter=names, fwd_hooks=hooks)
    return Traced(logits, cache, watched)


@torch.no_grad()
def ran(model: HookedModel, prompts: Prompts, names: Sequence[str], fit: Fit | None = None) -> tuple[Tensor, Values]:
    """The logits of a run, and what it has at these points."""

    def run(some: Sequence[list[int]]) -> tuple[Tensor, Values]:
        part = prompts.part([row for rows in some for row in rows])
        logits, cache = model.run_with_cache(**part.call(model), names_filter=list(names))
        return logits, {name: cache[name] for name in names}

    fit = fit if fit is not None else Fit("prompts")
    return _joined([found for _, found in fit.parts(_rows(prompts), run)])


def _rows(prompts: Prompts) -> list[list[int]]:
    """What goes through the model by itself if need be: each prompt, or all, since pictures may be one row."""
    return [[row] for row in range(len(prompts))] if not prompts.more else [list(range(len(prompts)))]


def _joined(runs: Sequence[tuple[Tensor, Values]]) -> tuple[Tensor, Values]:
    """Runs of some prompts each as one of all of them."""
    if len(runs) == 1:
        return runs[0]
    values = {name: torch.cat([given[name] for _, given in runs]) for name in runs[0][1]}
    return torch.cat([logits for logits, _ in runs]), values


class Line:
    """The way from one run to another along which gradients are taken; without steps, only where it starts.

    Where memory runs out, some prompts at a time go through the model, beside the logits of the others.
    """

    def __init__(
        self, model: HookedModel, prompts: Prompts, points: list[str], steps: int | None, along: Along
    ) -> None:
        self.model, self.prompts, self.points, self.steps = model, prompts, points, steps
        first = f"{model._points.layer(0)}.hook_resid_pre"
        self.moved = {first: points} if along == "inputs" else {name: [name] for name in points}
        """What is moved, and the points whose gradients are then taken."""
        self.fit = Fit("prompts")
        self._start: Traced | None = None
        """The run where it starts, if its gradients are wanted and all prompts fit."""

    @property
    def names(self) -> list[str]:
        """The points at which both runs must be known."""
        return self.points if self.steps is None else list(dict.fromkeys([*self.points, *self.moved]))

    def start(self) -> tuple[Tensor, Values]:
        """The logits of the run where it starts, and what that has at the points."""
        if self.steps is not None:
            return ran(self.model, self.prompts, self.names, self.fit)

        def run(some: Sequence[list[int]]) -> tuple[Tensor, Values]:
            rows = [row for each in some for row in each]
            found = traced(self.model, self.prompts.part(rows), self.points)
            self._start = found if len(rows) == len(self.prompts) else None
            return found.logits.detach(), found.values()

        return _joined([found for _, found in self.fit.parts(_rows(self.prompts), run)])

    def gradients(self, metrics: Metrics, end: Values, start: Values) -> ByMetric:
        """Of each metric at each point, averaged over the steps."""
        if self.steps is None:
            return self._gradients(metrics, self.points, lambda _: ())
        sums: ByMetric = {name: {point: torch.zeros_like(start[point]) for point in self.points} for name in metrics}
        for moved, points in self.moved.items():
            for step in range(self.steps):
                way = (end[moved] - start[moved]) * ((step + 0.5) / self.steps)
                found = self._gradients(metrics, points, partial(_moving, moved, way))
                for name, gradients in found.items():
                    for point, gradient in gradients.items():
                        sums[name][point] += gradient / self.steps
        return sums

    def _gradients(
        self, metrics: Metrics, points: Sequence[str], hooks: Callable[[Sequence[int]], HookList]
    ) -> ByMetric:
        """Of each metric at some points, in a run with the hooks that there are for some prompts."""
        others: list[Tensor] = []

        def run(some: Sequence[list[int]]) -> ByMetric:
            rows = [row for each in some for row in each]
            is_whole = len(rows) == len(self.prompts)
            among = None if is_whole else self._among(rows, hooks, others)
            here, self._start = self._start if is_whole else None, None
            if here is None:
                here = traced(self.model, self.prompts.part(rows), points, fwd_hooks=hooks(rows))
            return {name: here.gradients(metric, name, among) for name, metric in metrics.items()}

        found = [each for _, each in self.fit.parts(_rows(self.prompts), run)]
        return {
            name: {point: torch.cat([each[name][point] for each in found]) for point in found[0][name]}
            if len(found) > 1
            else found[0][name]
            for name in metrics
        }

    def _among(self, rows: list[int], hooks: Callable[[Sequence[int]], HookList], known: list[Tensor]) -> Among:
        """The logits of all prompts under these hooks, and which rows of them are run."""
        if not known:
            known.append(self._logits(hooks))
        return known[0], torch.tensor(rows, device=known[0].device)

    @torch.no_grad()
    def _logits(self, hooks: Callable[[Sequence[int]], HookList]) -> Tensor:
        def run(some: Sequence[list[int]]) -> Tensor:
            rows = [row for each in some for row in each]
            part = self.prompts.part(rows)
            return self.model.run_with_hooks(**part.call(self.model), fwd_hooks=hooks(rows))

        return torch.cat([found for _, found in self.fit.parts(_rows(self.prompts), run)])


def _moving(moved: str, way: Tensor, rows: Sequence[int]) -> HookList:
    """The hook that moves what some prompts have at a point."""
    return [(moved, lambda x: x + way[list(rows)] if len(rows) < len(way) else x + way)]

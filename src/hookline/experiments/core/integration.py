"""Differentiable runs: the gradient of a metric at many points, and integrated gradients.

Prompts run together; one by one where the rows at a point are images, not prompts. If memory runs out, they run in
smaller groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine import HookPoint, compiling
from hookline.errors import HooklineError
from hookline.experiments.core.measure import Metrics
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.core.sweep import Values
from hookline.experiments.metrics import value_of
from hookline.model import HookedModel
from hookline.rerun.image_inputs import in_one_row
from hookline.transformer.memory.halving import BatchFitter
from hookline.values.rows import drawn_once

Along: TypeAlias = Literal["inputs", "activations"]
ByMetric: TypeAlias = dict[str, dict[str, Tensor]]
"""The gradient of each metric at each point."""
Traced: TypeAlias = tuple[Float[Tensor, "batch pos vocab"], dict[str, Tensor]]
"""The logits of a run, and its activations at some points."""


def ran(model: HookedModel, prompts: Prompts, names: Sequence[str]) -> tuple[Tensor, Values]:
    """The logits of runs on all prompts, and their activations at these points, with one row per prompt."""
    return Line(model, prompts, list(names), None, "activations").start(with_grad=False)


class Line:
    """The line from one run to another along which gradients are taken; without steps, only its start."""

    def __init__(
        self, model: HookedModel, prompts: Prompts, points: list[str], steps: int | None, along: Along
    ) -> None:
        self.model, self.prompts, self.points, self.steps = model, prompts, points, steps
        first = f"{model.index.layer(0)}.hook_resid_pre"
        self.moved = {first: points} if along == "inputs" else {name: [name] for name in points}
        """The points that are moved along the line, and the points whose gradients are then taken."""
        self.names = points if steps is None else list(dict.fromkeys([*points, *self.moved]))
        """The points at which both runs must be known."""
        self._in_tower = {name for name in self.names if model.index.find(name).stream == "image"}
        self._fit = BatchFitter("prompts")
        self._fit.most = 1 if self._in_tower else None
        self._start: Traced | None = None
        """The run at the start, if its gradients are needed and all prompts fit."""
        self.info: dict[str, Any] = {}
        """What is known about the gradients once they are computed."""

    def start(self, *, with_grad: bool = True) -> tuple[Tensor, Values]:
        """The logits of the run at the start, and its activations at the points."""
        with_grad = with_grad and self.steps is None

        def run(rows: Sequence[int]) -> tuple[Tensor, Values]:
            logits, activations = self._traced(rows, self.names, {}, with_grad=with_grad)
            self._start = (logits, activations) if with_grad and len(rows) == len(self.prompts) else None
            return logits.detach(), {name: self._by_prompt(x.detach(), name) for name, x in activations.items()}

        runs = self._in_groups(run)
        values = {name: _joined([activations[name] for _, activations in runs], name) for name in self.names}
        return _joined([logits for logits, _ in runs], "logits"), values

    def gradients(self, metrics: Metrics, end: Values, start: Values) -> ByMetric:
        """The gradient of each metric at each point, averaged over the steps."""
        if self.steps is None:
            return self._gradients(metrics, self.points, {})
        sums: ByMetric = {name: {point: torch.zeros_like(start[point]) for point in self.points} for name in metrics}
        for moved, points in self.moved.items():
            for step in range(self.steps):
                way = (end[moved] - start[moved]) * ((step + 0.5) / self.steps)
                for name, gradients in self._gradients(metrics, points, {moved: way}).items():
                    for point, gradient in gradients.items():
                        sums[name][point] += gradient / self.steps
        return sums

    def _gradients(self, metrics: Metrics, points: Sequence[str], added: Values) -> ByMetric:
        """The gradient of each metric at some points, in runs with `added` values at others."""
        all_logits: list[Tensor] = []

        def run(rows: Sequence[int]) -> ByMetric:
            is_whole = len(rows) == len(self.prompts)
            if not is_whole and not all_logits:  # the metric is of all prompts
                all_logits.extend(self._in_groups(lambda group: self._traced(group, (), added, with_grad=False)[0]))
            start, self._start = self._start if is_whole else None, None
            logits, activations = start or self._traced(rows, points, added, with_grad=True)
            if not is_whole:
                logits = torch.cat(all_logits).index_copy(0, torch.tensor(rows, device=logits.device), logits)
            every = {name: self._of_metric(metric, name, logits, activations) for name, metric in metrics.items()}
            return {
                name: {key: self._by_prompt(x, key) for key, x in gradients.items()}
                for name, gradients in every.items()
            }

        by_group = self._in_groups(run)
        return {
            name: {x: _joined([gradients[name][x] for gradients in by_group], x) for x in points} for name in metrics
        }

    def _in_groups(self, run: Callable[[Sequence[int]], Any]) -> list[Any]:
        """The results of `run` for the rows of all prompts, in groups that fit into memory."""
        return [result for _, result in self._fit.parts(range(len(self.prompts)), run)]

    def _traced(self, rows: Sequence[int], watch: Sequence[str], added: Values, *, with_grad: bool) -> Traced:
        """Run some of the prompts, with gradients at the points in `watch`, and with values `added` at points."""
        first: list[Any] = [(name, _adding(x[list(rows)])) for name, x in added.items()]
        run = partial(self._ran, rows, with_grad=with_grad)
        return traced_run(run, len(rows), watch, first, with_grad=with_grad)

    def _ran(self, rows: Sequence[int], hooks: list[Any], *, with_grad: bool) -> Float[Tensor, "batch pos vocab"]:  # noqa: ARG002
        """The logits of a run of some of the prompts."""
        return self.model.run_with_hooks(**self.prompts.part(rows).call(self.model), fwd_hooks=hooks)

    def _of_metric(
        self, metric: Callable[[Tensor], Any], name: str, logits: Tensor, activations: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The gradient of a metric at each point of a run."""
        return gradients_of(metric, name, logits, activations)

    def _by_prompt(self, x: Tensor, name: str) -> Tensor:
        """An activation, with the images of a prompt in one row."""
        return in_one_row(x, self.model.index.find(name)) if name in self._in_tower else x


def traced_run(
    run: Callable[[list[Any]], Tensor],
    n_rows: int,
    watch: Sequence[str],
    hooks: Sequence[Any] = (),
    *,
    with_grad: bool = True,
) -> Traced:
    """The logits that `run` returns for these hooks, and its activations at the points in `watch`, with gradients."""
    if torch.is_inference_mode_enabled():
        raise HooklineError("gradients are needed, which torch.inference_mode() disables: use torch.no_grad() instead")
    activations: dict[str, Tensor] = {}

    def note(x: Tensor, hook: HookPoint) -> Tensor | None:
        if hook.name in activations:
            raise HooklineError(f"{hook.name!r} fires more than once per forward pass, so its gradient is ambiguous")
        activations[hook.name] = x.requires_grad_() if with_grad and not x.requires_grad else x
        # The model continues with a copy, which is in the graph even where a module returns its argument (an identity
        # in place of a norm, dropout that is off). Memory shared with the argument would be given back to the caller.
        return x.clone() if with_grad else None

    every = [*hooks, *((name, note) for name in watch)]
    with torch.set_grad_enabled(with_grad), drawn_once(n_rows), compiling.left_out("gradients are needed"):
        return run(every), activations


def _adding(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda activation: activation + x.reshape(activation.shape)


def gradients_of(
    metric: Callable[[Tensor], Any], name: str, logits: Tensor, activations: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient of a metric, summed over prompts, at each point; zeros where it does not depend on the point."""
    with torch.enable_grad():
        value = value_of(metric, logits, name).sum()
    if not value.requires_grad:
        raise HooklineError(
            f"{name} has no gradient: attribution needs a differentiable metric (logit_diff, log_prob, prob, kl, "
            f"loss), not one that counts or compares"
        )
    gradients = torch.autograd.grad(value, list(activations.values()), retain_graph=True, allow_unused=True)
    pairs = zip(activations.items(), gradients, strict=True)
    return {key: torch.zeros_like(x) if gradient is None else gradient for (key, x), gradient in pairs}


def _joined(parts: Sequence[Tensor], name: str) -> Tensor:
    """The values of several groups of prompts at a point as one tensor."""
    if len({x.shape[1:] for x in parts}) > 1:
        raise HooklineError(
            f"the prompts have the shapes {[list(x.shape[1:]) for x in parts]} at {name!r}: use images of one size, "
            f"the same number in each prompt, or one prompt at a time"
        )
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

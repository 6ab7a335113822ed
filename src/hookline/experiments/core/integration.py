"""Differentiable runs: the gradient of a metric at many points, and integrated gradients.

Prompts run together, or one by one where the rows at a point are images, not prompts. If memory runs out, they are run
in smaller groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from hookline.engine.batch_index import drawn_once
from hookline.engine.halving import Fit
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.measure import Metrics
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.core.sweep import Values
from hookline.experiments.metrics import value_of
from hookline.model import HookedModel
from hookline.rerun.image_inputs import in_one_row

T = TypeVar("T")
Along: TypeAlias = Literal["inputs", "activations"]
ByMetric: TypeAlias = dict[str, dict[str, Tensor]]
"""The gradient of each metric at each point."""
Among: TypeAlias = tuple[Float[Tensor, "batch pos vocab"], Int[Tensor, " row"]]


@dataclass(frozen=True, eq=False)
class Traced:
    """Runs on some prompts, with the graph that leads from some of their points to their logits."""

    logits: Float[Tensor, "batch pos vocab"]
    prompts: Prompts
    watched: Mapping[HookPoint, list[Tensor]]
    """The activation of each run at a point."""

    def values(self) -> dict[str, Tensor]:
        """The activations at the watched points, with one row per prompt."""
        found = {point: [x.detach() for x in parts] for point, parts in self.watched.items()}
        return {point.name: _gathered(parts, point, self.prompts) for point, parts in found.items()}

    def gradients(self, metric: Callable[[Tensor], Any], name: str, among: Among | None) -> dict[str, Tensor]:
        """The gradient of the metric, summed over prompts, at each watched point; zeros where it does not depend on it.

        `among` are the logits of all prompts, and the rows of these runs, if they are on some of the prompts only.
        """
        with torch.enable_grad():
            logits = self.logits if among is None else among[0].index_copy(0, among[1], self.logits)
            value = value_of(metric, logits, name).sum()
        if not value.requires_grad:
            raise HooklineError(
                f"{name} has no gradient: attribution needs a differentiable metric (logit_diff, log_prob, prob, kl, "
                f"loss), not one that counts or compares"
            )
        inputs = [x for parts in self.watched.values() for x in parts]
        found = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
        left = iter([torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)])
        return {
            point.name: _gathered([next(left) for _ in parts], point, self.prompts)
            for point, parts in self.watched.items()
        }


def traced(
    model: HookedModel, prompts: Prompts, watch: Sequence[str], added: Values | None = None, *, with_grad: bool = True
) -> Traced:
    """Run the prompts, with gradients at the points in `watch`, and with values `added` at points."""
    if torch.is_inference_mode_enabled():
        raise HooklineError(
            "attribution needs gradients, which torch.inference_mode() disables: use torch.no_grad() instead"
        )
    watched: dict[HookPoint, list[Tensor]] = {model._points.find(name): [] for name in watch}
    moved = {model._points.find(name): x for name, x in (added or {}).items()}
    has_images = any(point.stream == "image" for point in (*watched, *moved))
    runs = [prompts.only(row) for row in range(len(prompts))] if has_images and len(prompts) > 1 else [prompts]
    logits = []
    for number, some in enumerate(runs):

        def note(x: Tensor, hook: HookPoint, number: int = number) -> None:
            parts = watched[model._points.find(hook.name)]
            if len(parts) > number:
                raise HooklineError(
                    f"{hook.name!r} fires more than once per forward pass, so its gradient is ambiguous"
                )
            parts.append(x.requires_grad_() if with_grad and not x.requires_grad else x)

        hooks: list[Any] = [
            (point.name, _adding(x if len(runs) == 1 else prompts.unpadded(x[number], point, number)))
            for point, x in moved.items()
        ]
        hooks += [(point.name, note) for point in watched]
        with torch.set_grad_enabled(with_grad), drawn_once(len(some)):
            logits.append(model.run_with_hooks(**some.call(model), fwd_hooks=hooks))
    every = prompts.padded([each[0] for each in logits]) if len(runs) > 1 else logits[0]
    return Traced(every, prompts, watched)


def _adding(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda there: there + x.reshape(there.shape)


def _gathered(parts: Sequence[Tensor], point: HookPoint, prompts: Prompts) -> Tensor:
    """The activations of one or several runs at a point, as one tensor with one row per prompt."""
    if point.stream == "image":
        parts = [in_one_row(x, point) for x in parts]
    elif len(parts) > 1:
        parts = [_padded(x, point, span, prompts.width) for x, span in zip(parts, prompts.spans, strict=True)]
    if len({x.shape[1:] for x in parts}) > 1:
        raise HooklineError(
            f"the prompts have the shapes {[list(x.shape[1:]) for x in parts]} at {point.name!r}: use images of one "
            f"size, the same number in each prompt, or one prompt at a time"
        )
    return _cat(parts)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor, without a copy if there is one part."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _padded(x: Tensor, point: HookPoint, span: range, width: int) -> Tensor:
    """The activation of one prompt, with zeros at the padding that it has in the batch of all."""
    axes = zip(point.axes.split(), x.shape, strict=True)
    ends = [(span.start, width - span.stop) if letter in "pk" and n == len(span) else (0, 0) for letter, n in axes]
    return F.pad(x, [end for pair in reversed(ends) for end in pair])


def _in_groups(fit: Fit, prompts: Prompts, run: Callable[[list[int]], T]) -> list[T]:
    """The results of `run` for the rows of all prompts, or of several groups of them if not all fit into memory.

    With images, prompts are one group, since the images of several prompts may be one row.
    """
    groups = [[row] for row in range(len(prompts))] if not prompts.more else [list(range(len(prompts)))]
    return [found for _, found in fit.parts(groups, lambda some: run([row for rows in some for row in rows]))]


def ran(model: HookedModel, prompts: Prompts, names: Sequence[str]) -> tuple[Tensor, Values]:
    """The logits of runs on all prompts, and their activations at these points, with one row per prompt."""
    return Line(model, prompts, list(names), None, "activations").start(with_grad=False)


class Line:
    """The line from one run to another along which gradients are taken; without steps, only its start."""

    def __init__(
        self, model: HookedModel, prompts: Prompts, points: list[str], steps: int | None, along: Along
    ) -> None:
        self.model, self.prompts, self.points, self.steps = model, prompts, points, steps
        first = f"{model._points.layer(0)}.hook_resid_pre"
        self.moved = {first: points} if along == "inputs" else {name: [name] for name in points}
        """The points that are moved along the line, and the points whose gradients are then taken."""
        self.names = points if steps is None else list(dict.fromkeys([*points, *self.moved]))
        """The points at which both runs must be known."""
        self._fit = Fit("prompts")
        self._start: Traced | None = None
        """The run at the start, if its gradients are needed and all prompts fit."""

    def start(self, *, with_grad: bool = True) -> tuple[Tensor, Values]:
        """The logits of the run at the start, and its activations at the points."""
        with_grad = with_grad and self.steps is None

        def run(rows: list[int]) -> tuple[Tensor, Values]:
            found = traced(self.model, self.prompts.part(rows), self.names, with_grad=with_grad)
            self._start = found if with_grad and len(rows) == len(self.prompts) else None
            return found.logits.detach(), found.values()

        runs = _in_groups(self._fit, self.prompts, run)
        values = {name: _cat([given[name] for _, given in runs]) for name in self.names}
        return _cat([logits for logits, _ in runs]), values

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
        known: list[Tensor] = []

        def run(rows: list[int]) -> ByMetric:
            is_whole = len(rows) == len(self.prompts)
            if not is_whole and not known:  # a metric may compare prompts
                known.extend(_in_groups(self._fit, self.prompts, lambda some: self._traced(some, (), added).logits))
            here, self._start = self._start if is_whole else None, None
            here = self._traced(rows, points, added) if here is None else here
            among = None if is_whole else (_cat(known), torch.tensor(rows, device=here.logits.device))
            return {name: here.gradients(metric, name, among) for name, metric in metrics.items()}

        found = _in_groups(self._fit, self.prompts, run)
        return {name: {x: _cat([each[name][x] for each in found]) for x in points} for name in metrics}

    def _traced(self, rows: list[int], points: Sequence[str], added: Values) -> Traced:
        part = {name: x[rows] if len(rows) < len(self.prompts) else x for name, x in added.items()}
        return traced(self.model, self.prompts.part(rows), points, part, with_grad=bool(points))

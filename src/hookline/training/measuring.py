"""Measure: the action of `watch` at the output of a module, which reads the activation and, later, its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.engine import HookPoint, Kind, PointAction, Record, parts_of, pass_state
from hookline.errors import UnavailablePointError
from hookline.training.steps import MeasuredStep
from hookline.values.structures import NoTensorError


def is_plain_output(point: HookPoint) -> bool:
    """Whether the point is the tensor that a module returns, as it is."""
    site = point.site
    is_tensor_of_model = all(getattr(part, "is_root", False) for part in parts_of(site.lens))
    return site.kind is Kind.OUTPUT and is_tensor_of_model and not site.effects and point.only is None


class Measure(PointAction):
    """Measures what leaves a module, and the gradient of that tensor.

    A hook on the tensor costs less than a backward hook at the point, which makes a tensor of its own.
    """

    phase = Record.phase
    is_late = True
    only_reads = True

    def __init__(self, point: HookPoint, step: MeasuredStep, series: bool) -> None:
        super().__init__(point)
        self._step, self._has_series = step, series
        self._waiting = 0
        """Calls in reentrant checkpoints, which have a graph only when they are recomputed."""

    def __call__(self, value: Any) -> Any:
        """Measure the value, which continues unchanged."""
        self.fired = True
        if pass_state.hooks:
            return value  # a hook called the module, not the model
        try:
            x = self.lens.get(value)
        except NoTensorError as error:
            if self.must_fire:
                raise UnavailablePointError(f"nothing can be measured at {self.point.name!r}: {error}") from error
            return value
        if not pass_state.is_recomputing:
            measure_activation(self._step, self.point.name, x, self._has_series)
        if not torch.is_grad_enabled():
            if pass_state.starts_with_grad:
                self._waiting += 1
                self.keep_for_second_run()
        elif x.requires_grad and (not pass_state.is_recomputing or self._waiting):
            self._waiting -= pass_state.is_recomputing
            x.register_hook(self._note_gradient)
        return value

    def _note_gradient(self, grad: Tensor) -> None:
        self._step.note(self.point.name, "gradient", grad)


def measure_activation(step: MeasuredStep, name: str, x: Tensor, has_series: bool) -> None:
    """Measure an activation, and which of its units are not 0.

    Units are on the second axis of images, series and rows, and on the last one of texts.
    """
    axis = 1 if x.ndim != 3 or has_series else -1
    step.note(name, "activation", x, axis if x.ndim > 1 else None)

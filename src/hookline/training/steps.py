"""One step that is measured: what was seen in its forward and backward pass, and what an optimizer did afterward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hookline.training.host_copies import HostCopy
from hookline.training.record import Kind, MeasuredRow, MeasuredUpdate, TrainingRecord
from hookline.training.tensor_statistics import TensorMoments, combined, is_measurable, moments_of


class MeasuredStep:
    """The moments of a step, on the device until the step has ended."""

    def __init__(self, number: int, record: TrainingRecord) -> None:
        self.number, self._record = number, record
        self._moments: list[tuple[str, Kind, TensorMoments]] = []
        self._copy: HostCopy | None = None

    def note(self, point: str, kind: Kind, x: Tensor, unit_axis: int = -1) -> None:
        """Measure a tensor; nothing if it has no numbers, or the step has ended."""
        if self._copy is not None or not is_measurable(x):
            return
        moments, nonzero = moments_of(x, unit_axis)
        self._moments.append((point, kind, moments))
        if kind == "activation" and x.ndim > 1:
            self._record.note_units(point, nonzero)

    def end(self) -> None:
        """The step has ended: begin to copy what was measured."""
        self._copy = self._copied()

    def _copied(self) -> HostCopy:
        return HostCopy([number for *_, moments in self._moments for number in moments[1:]])

    def rows(self) -> list[MeasuredRow]:
        """The statistics, also of a step that has not ended."""
        values = iter((self._copy or self._copied()).values())
        calls: dict[tuple[str, Kind], list[tuple[int, list[float]]]] = {}
        for point, kind, moments in self._moments:
            numbers = [next(values) for _ in moments[1:]]
            calls.setdefault((point, kind), []).append((moments.size, numbers))
        return [
            MeasuredRow(self.number, point, kind, combined(measurements))
            for (point, kind), measurements in calls.items()
        ]


class WeightsBefore:
    """Copies of parameters, to compare with once an optimizer has updated them."""

    def __init__(self, step: int, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.step = step
        self._parameters = [(name, weight, weight.detach().clone()) for name, weight in parameters]
        self._copy: HostCopy | None = None

    @torch.no_grad()
    def compare(self) -> None:
        """Begin to copy how far the parameters are from what they were."""
        self._copy = HostCopy(
            [
                torch.linalg.vector_norm(weight - before) / torch.linalg.vector_norm(before)
                for _, weight, before in self._parameters
            ]
        )

    def read(self) -> Sequence[MeasuredUpdate]:
        """The updates; none if no parameter has changed yet, as while gradients are accumulated."""
        ratios = [] if self._copy is None else self._copy.values()
        self._copy = None
        if not any(ratios):
            return []
        names = [name for name, *_ in self._parameters]
        return [MeasuredUpdate(self.step, name, ratio) for name, ratio in zip(names, ratios, strict=True)]

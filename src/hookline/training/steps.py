"""One step that is measured: what was seen in its forward and backward pass, and what an optimizer did afterward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hookline.training.host_copies import HostCopy
from hookline.training.record import Kind, MeasuredRow, MeasuredUpdate, TrainingRecord
from hookline.training.tensor_statistics import TensorMoments, combined, is_measurable, moments_of, nonzero_counts


class MeasuredStep:
    """The moments of a step, on the device until the step has ended."""

    def __init__(self, number: int, record: TrainingRecord) -> None:
        self.number, self._record = number, record
        self._moments: list[tuple[str, Kind, TensorMoments]] = []
        self._copy: HostCopy | None = None
        self.has_gradients = False
        """Whether its backward pass has begun."""

    def note(self, point: str, kind: Kind, x: Tensor, axis: int | None = None) -> None:
        """Measure a tensor, and which units along an axis are not 0; nothing if it has no numbers, or after the end."""
        if self._copy is not None or not is_measurable(x):
            return
        counts = nonzero_counts(x, axis)
        self._moments.append((point, kind, moments_of(x, counts)))
        self.has_gradients = self.has_gradients or kind == "gradient"
        if axis is not None:
            self._record.note_units(point, self.number, counts > 0)

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
        return [
            MeasuredUpdate(self.step, name, ratio, is_matrix=weight.ndim > 1)
            for (name, weight, _), ratio in zip(self._parameters, ratios, strict=True)
        ]

"""TrainingRecord: what `watch` measured, as rows, with warnings in words."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.errors import HooklineError, a_type, how_many
from hookline.experiments.core.labels import needed
from hookline.training.tensor_statistics import Statistics

Kind = Literal["activation", "gradient"]
Warned: TypeAlias = tuple[str, str]
"""A point, and what is wrong there."""

STATISTICS = tuple(field.name for field in fields(Statistics))
COLUMNS = ("step", "point", "kind", *STATISTICS)

_VANISHED = 1e-5
"""Gradients smaller than this share of the largest are reported."""
_UPDATES = (1e-7, 0.1)
"""Updates of a parameter, relative to its norm, outside of these bounds are reported."""
_DEAD = 0.5
"""A larger share of dead units is reported."""

_RECENT = 3
"""The recorded steps that count for dead units."""

_log = logging.getLogger("hookline")


@dataclass(frozen=True)
class MeasuredRow:
    """The statistics of a point or of a parameter at one step."""

    step: int
    point: str
    kind: Kind
    statistics: Statistics

    def cells(self) -> tuple[Any, ...]:
        """The values of the columns."""
        return self.step, self.point, self.kind, *astuple(self.statistics)


@dataclass(frozen=True)
class MeasuredUpdate:
    """How much an optimizer changed a parameter after a step: the norm of the change over that of the parameter."""

    step: int
    point: str
    ratio: float
    is_matrix: bool
    """Whether the parameter has several axes. Biases begin at 0, so that their first updates are large."""


class TrainingRecord:
    """What was measured. It can be read while the training goes on.

    `rows` has one entry for each point, kind and step; `updates` one for each parameter that was updated after a step.
    """

    def __init__(self, to: Any = None) -> None:
        self._rows: list[MeasuredRow] = []
        self.unfinished: Callable[[], list[MeasuredRow]] = list
        """Returns the rows of steps that have not ended, or whose numbers are still on their way to the host."""
        self.updates: list[MeasuredUpdate] = []
        self.warnings: list[str] = []
        """What looks wrong, in words: each is also logged once, by the logger "hookline"."""
        self._topics: set[tuple[str, str]] = set()
        self._alive: dict[str, dict[int, Tensor]] = {}
        self._sink = _sink(to)

    @property
    def rows(self) -> list[MeasuredRow]:
        """What was measured until now; reading it waits for the device."""
        return [*self._rows, *self.unfinished()]

    def begin(self) -> None:
        """Begin to write, if there is a file."""
        self._sink.begin()

    def to_dataframe(self) -> Any:
        """A pandas table with the columns step, point, kind, mean, std, norm, zeros, max and nonfinite."""
        pandas = needed("pandas", "to_dataframe", "data")
        return pandas.DataFrame([row.cells() for row in self.rows], columns=list(COLUMNS))

    def updates_to_dataframe(self) -> Any:
        """A pandas table with the columns step, point and ratio: the update of each parameter, relative to its norm."""
        pandas = needed("pandas", "updates_to_dataframe", "data")
        return pandas.DataFrame(
            [(update.step, update.point, update.ratio) for update in self.updates], columns=["step", "point", "ratio"]
        )

    def dead_units(self) -> dict[str, list[int]]:
        """The units (neurons, channels) that were 0 for every input at the last three recorded steps, by point."""
        return {point: units for point, (units, _) in self._dead([*self._alive]).items() if units}

    def _dead(self, points: list[str]) -> dict[str, tuple[list[int], int]]:
        """The dead units of some points, and how many units they have; all are copied from the device together."""
        lived = [self._has_lived(point) for point in points]
        flat = iter(torch.cat([units.to(lived[0].device) for units in lived]).tolist() if lived else [])
        marks = {point: [next(flat) for _ in units] for point, units in zip(points, lived, strict=True)}
        return {point: ([i for i, lives in enumerate(row) if not lives], len(row)) for point, row in marks.items()}

    def _has_lived(self, point: str) -> Tensor:
        """Which units of a point had a value that is not 0 at the last recorded steps."""
        lived = [*self._alive[point].values()]
        return torch.stack([alive for alive in lived if alive.shape == lived[-1].shape]).any(0)

    def note_units(self, point: str, step: int, alive: Tensor) -> None:
        """Note which units were not 0 in a call of a module; nothing is read from the device."""
        steps = self._alive.setdefault(point, {})
        before = steps.get(step)
        steps[step] = alive if before is None or before.shape != alive.shape else before | alive
        if len(steps) > _RECENT:
            del steps[min(steps)]

    def add_step(self, rows: list[MeasuredRow]) -> None:
        """Add the rows of one step, which has ended."""
        if rows:
            self._rows += rows
            self._sink.write(rows)
            self._note("nonfinite", _nonfinite(rows))
            self._note("vanished", _vanished(rows))
            self._note("dead", self._mostly_dead(rows))

    def add_updates(self, updates: list[MeasuredUpdate]) -> None:
        """Add how an optimizer changed parameters after a step."""
        self.updates += updates
        low, high = _UPDATES
        matrices = [update for update in updates if update.is_matrix and isfinite(update.ratio)]
        outside = [update for update in matrices if not low <= update.ratio <= high]
        self._note(
            "update", ((update.point, f"an update changes it by {update.ratio:.1g} of its norm") for update in outside)
        )

    def _mostly_dead(self, rows: list[MeasuredRow]) -> Iterator[Warned]:
        measured = [row for row in rows if row.kind == "activation" and row.point in self._alive]
        with_zeros = [row.point for row in measured if row.statistics.zeros > 0]
        for point, (units, width) in self._dead(with_zeros).items():
            if len(units) > _DEAD * width:
                yield point, f"{len(units)} of {how_many(width, 'unit')} are 0 for every input"

    def _note(self, topic: str, warned: Iterable[Warned]) -> None:
        """Add warnings, and log them: one on each topic for each point."""
        for point, message in warned:
            if (topic, point) not in self._topics:
                self._topics.add((topic, point))
                self.warnings.append(f"{point}: {message}")
                _log.warning("%s: %s", point, message)

    def __repr__(self) -> str:
        rows = self.rows
        steps, points = {row.step for row in rows}, {row.point for row in rows}
        lines = [f"TrainingRecord({how_many(len(steps), 'step')} of {how_many(len(points), 'point')})", *self.warnings]
        return "\n  ".join(lines)


def _nonfinite(rows: list[MeasuredRow]) -> Iterator[Warned]:
    for row in rows:
        if not row.statistics.is_finite:
            values = how_many(row.statistics.nonfinite, f"{row.kind} value")
            yield row.point, f"{values} NaN or infinite at step {row.step}"


def _vanished(rows: list[MeasuredRow]) -> Iterator[Warned]:
    """Points whose gradients are tiny beside those of another point, by their norms; parameters likewise."""
    points = {row.point for row in rows if row.kind == "activation"}
    norms = {row.point: row.statistics.norm for row in rows if row.kind == "gradient" and row.statistics.is_finite}
    for is_point in (True, False):
        group = {name: norm for name, norm in norms.items() if norm > 0 and (name in points) is is_point}
        largest = max(group, key=group.__getitem__, default="")
        for name, norm in group.items():
            if norm < _VANISHED * group[largest]:
                yield name, f"gradients {norm / group[largest]:.0e} of those of {largest}"


class _Nowhere:
    """Writes nothing."""

    def begin(self) -> None:
        """Begin to write."""

    def write(self, rows: list[MeasuredRow]) -> None:
        """Write the rows of one step."""


class _CsvFile(_Nowhere):
    def __init__(self, path: Path) -> None:
        self._path, self._has_begun = path, False

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._append([COLUMNS], "w")

    def write(self, rows: list[MeasuredRow]) -> None:
        self._append([row.cells() for row in rows], "a")

    def _append(self, lines: list[tuple[Any, ...]], mode: str) -> None:
        with self._path.open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)


class _Scalars(_Nowhere):
    """A `SummaryWriter` of TensorBoard, or what has the same method."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, rows: list[MeasuredRow]) -> None:
        for row in rows:
            for name in STATISTICS:
                self._writer.add_scalar(f"{row.kind}/{row.point}/{name}", getattr(row.statistics, name), row.step)


class _Log(_Nowhere):
    """A run of Weights & Biases, or what has the same method."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, rows: list[MeasuredRow]) -> None:
        values = {
            f"{row.kind}/{row.point}/{name}": getattr(row.statistics, name) for row in rows for name in STATISTICS
        }
        self._run.log({"watch/step": rows[0].step, **values})


def _sink(to: Any) -> _Nowhere:
    """Where rows are written to. Of several processes, only the first one writes."""
    if to is None:
        return _Nowhere()
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if isinstance(to, str | Path):
        path = Path(to)
        if not path.absolute().parent.is_dir():
            raise HooklineError(f"to={str(to)!r}: the folder {str(path.absolute().parent)!r} does not exist")
        sink: _Nowhere = _CsvFile(path)
    elif callable(getattr(to, "add_scalar", None)):
        sink = _Scalars(to)
    elif callable(getattr(to, "log", None)):
        sink = _Log(to)
    else:
        raise HooklineError(
            f"to= takes a path of a CSV file, an object with add_scalar (a SummaryWriter of TensorBoard) or with log "
            f"(a run of Weights & Biases), not {a_type(to)}"
        )
    return sink if is_first else _Nowhere()

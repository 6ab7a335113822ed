"""Where the edits of a run acted: at which positions of the text, and at how many rows.

While a model runs, an edit notes only the pass, its shape and its positions; what is shared by all edits of a pass is
noted once. Counting waits until somebody asks, or until there are many notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hookline.engine import HookPoint, pass_state
from hookline.text.forward_pass import ForwardPass, Span
from hookline.values.structures import first_tensor, look

_MOST = 1024
"""How many notes wait to be counted."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a text that a forward pass covers, and which of them are text."""

    positions: range
    real: Tensor | None = None
    """Which columns of each row are text, `[row, column]`; None: all, in this pass and before it."""
    before: Tensor | None = None
    """How many positions of the text of each row are before these columns."""

    @classmethod
    def of(cls, positions: range, mask: Tensor | None, ended: Tensor | None = None) -> Columns:
        """Columns under a mask that is 0 at padding; `ended` is true where a row has ended, `[row, column]`."""
        if mask is None or mask.shape[1] < positions.stop:
            return cls(positions, None if ended is None else ~ended)
        real = mask[:, positions.start : positions.stop].bool()  # a copy: the caller may write to the mask
        before = mask[:, : positions.start].sum(1)
        return cls(positions, real if ended is None else real & ~ended, before)

    def numbers(self) -> Tensor:
        """The position in its text of each column, `[row or 1, column]`."""
        if self.real is None:
            return torch.arange(self.positions.start, self.positions.stop)[None]
        before = self.positions.start if self.before is None else self.before.cpu()[:, None]
        return self.real.cpu().cumsum(1) - 1 + before


class PassNotes:
    """The columns of the newest pass, which all edits of a run note: a run belongs to one thread."""

    def __init__(self) -> None:
        self._pass: Callable[[], ForwardPass | None] = lambda: None
        self._columns: dict[tuple[str, int], Columns | None] = {}
        self._before: Tensor | None = None
        self._ended: Tensor | None = None

    def columns(self, point: HookPoint, n: int) -> Columns | None:
        """The columns that a point with `n` positions has in the current pass; None if they are no part of a text."""
        passing: ForwardPass | None = pass_state.forward_pass
        if passing is None or point.stream == "image":
            return Columns(range(n)) if point.axes else None
        if self._pass() is not passing:
            self._pass, self._columns = ref(passing), {}
            self._before = self._ended_before(passing)
        key = (point.stream, n)
        if key not in self._columns:
            self._columns[key] = self._made(passing, passing.span_at(point.stream), n)
        return self._columns[key]

    def _made(self, passing: ForwardPass, span: Span, n: int) -> Columns | None:
        if passing.refusal is not None:
            return None
        if len(span.positions) == n:
            return Columns.of(span.positions, span.mask, self._before if span is passing.span else None)
        # Keys: of this pass and of all before it.
        return Columns.of(range(n), span.mask) if span.positions.stop == n else None

    def _ended_before(self, passing: ForwardPass) -> Tensor | None:
        """Which rows of a generation ended before its newest token: theirs is padding, although no mask says so."""
        span, generation = passing.span, passing.generation
        stops = None if generation is None else getattr(generation.settings(), "eos_token_id", None)
        if stops is None or span.tokens is None:
            return None
        if span.positions.start < passing.prompt or len(span.positions) > 1:
            self._ended = None
            return None
        is_stop = torch.isin(span.tokens, torch.as_tensor(stops, device=span.tokens.device))
        before = torch.zeros_like(is_stop) if self._ended is None else self._ended
        self._ended = before | is_stop
        return before


class PositionTally:
    """At how many rows one edit acted at each position of the text; None where there are no positions."""

    def __init__(self, notes: PassNotes, point: HookPoint, entries: Tensor | None) -> None:
        self._notes, self._point, self._entries = notes, point, entries
        self.log: list[tuple[Columns | None, torch.Size, Tensor | None]] = []
        self._counts: Counter[int | None] = Counter()
        self.source: Callable[[], None] | None = None
        """Notes what was done in a graph since it was last called, while one runs."""

    def clear(self) -> None:
        """Begin a run."""
        self.log, self._counts = [], Counter()

    def note(self, x: Any, where: Tensor | None) -> None:
        """Note that the edit acted on a value, at some positions `[row, position]` or all of them."""
        shape = x.shape if isinstance(x, Tensor) else look(x, first_tensor(x)).shape
        axis = _position_axis(self._point, shape)
        self.add(None if axis is None else self._notes.columns(self._point, shape[axis]), shape, where)

    def add(self, columns: Columns | None, shape: torch.Size, where: Tensor | None) -> None:
        """Note columns at which the edit acted."""
        self.log.append((columns, shape, where))
        if len(self.log) > _MOST:
            self.counts()

    def restore(self, counts: Counter[int | None]) -> None:
        """Return to what was counted before."""
        self.log, self._counts = [], counts

    def counts(self) -> Counter[int | None]:
        """The number of rows at each position."""
        if self.source is not None:
            self.source()
        log, self.log = self.log, []
        for columns, shape, where in log:
            self._counts += self._counted(columns, shape, where)
        return Counter(dict(sorted(self._counts.items(), key=lambda item: -1 if item[0] is None else item[0])))

    def _counted(self, columns: Columns | None, shape: torch.Size, where: Tensor | None) -> Counter[int | None]:
        axis = None if columns is None else _position_axis(self._point, shape)
        covered = self._covered(shape, axis)
        if axis is None or columns is None:
            return Counter({None: int(covered.any(1).sum())})
        if where is not None:
            covered = covered & where.cpu()
        if columns.real is not None:
            if columns.real.shape[0] not in (1, shape[0]):
                return Counter({None: int(covered.any(1).sum())})
            covered = covered & columns.real.cpu()
        numbers, rows = columns.numbers().expand(covered.shape)[covered].unique(return_counts=True)
        return Counter(dict(zip(numbers.tolist(), rows.tolist(), strict=True)))

    def _covered(self, shape: torch.Size, axis: int | None) -> Tensor:
        """Whether the mask of the edit selects anything, `[row, position]`; without positions `[row, 1]`."""
        rows, n = shape[0] if shape else 1, 1 if axis is None else shape[axis]
        if self._entries is None:
            return torch.ones(rows, n, dtype=torch.bool)
        entries = self._entries.cpu().expand(shape)
        return (entries if axis is None else entries.movedim(axis, 1)).reshape(rows, n, -1).any(-1)


def tallies(hooks: Sequence[tuple[HookPoint, Tensor | None]]) -> list[PositionTally]:
    """What counts where each hook of one run acts, given its point and its mask."""
    notes = PassNotes()
    return [PositionTally(notes, point, entries) for point, entries in hooks]


def _position_axis(point: HookPoint, shape: Sequence[int]) -> int | None:
    """The index of the axis of positions; None if there is none, as far as is known."""
    names = point.axes.split()
    if not names:
        return 1 if len(shape) == 3 else None
    for name in "pk":
        if name in names and names.index(name) < len(shape):
            return names.index(name)
    return None

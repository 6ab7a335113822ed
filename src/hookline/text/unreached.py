"""Positions that were asked for and that a text did not have.

Where a run is one forward pass, such a position is an error at once. In a context, a later step of a generation may
bring it; so what never came is told when the context is over, or of hooks that stay when the generation is.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from hookline.engine.passes import current


class UnreachedPositions(threading.local):
    """What a hook for some positions has missed so far, of all texts that ran: in each thread its own."""

    def __init__(self, positions: Any) -> None:
        self._wanted = _indices(positions)
        self._token = positions if hasattr(positions, "lacking") else None
        self.clear()

    def clear(self) -> None:
        """Nothing yet."""
        self._open: dict[tuple[int, int], str] = {}  # of the text at hand: row and index, and what is missing
        self._closed: dict[tuple[int, int], str] = {}
        self._tokens: Tensor | None = None

    def note(self, point: Any) -> None:
        """Look at the text of the forward pass going on, as the point sees it."""
        passing = current.forward_pass
        if (self._wanted is None and self._token is None) or passing is None or passing.is_only:
            return
        span = passing.span_at(point.stream)
        is_first = not passing.number and not span.positions.start
        if is_first and not _goes_on(self._tokens, span.tokens):  # another text
            self._closed |= self._open
        self._tokens = span.tokens
        self._open = self._lacking(passing, span)

    def _lacking(self, passing: Any, span: Any) -> dict[tuple[int, int], str]:
        if self._token is not None:
            counts = self._token.lacking(*passing.parts(span)[-1])
            return {(row, 0): f"{self._token!r} in row {row}, which has {n} of them" for row, n in counts.items()}
        return {
            (row, index): f"position {index} of row {row}, which has {length}"
            for row, length in enumerate(span.real().sum(1).tolist())
            for index in self._of_row(row)
            if index not in range(-length, length)
        }

    def _of_row(self, row: int) -> list[int]:
        if isinstance(self._wanted, Tensor):
            return [int(self._wanted[row])] if row < len(self._wanted) else []
        return self._wanted or []

    def message(self) -> str | None:
        """What never came by, in words; None if all did."""
        parts = [*(self._closed | self._open).values()]
        if not parts:
            return None
        return f"it never reached {', '.join(parts[:4])}" + (f" (and {len(parts) - 4} more)" * (len(parts) > 4))


def _goes_on(before: Tensor | None, tokens: Tensor | None) -> bool:
    """Whether it is the same text and a token more: a generation that keeps nothing of the steps before."""
    if before is None or tokens is None or before.shape[0] != tokens.shape[0]:
        return False
    return tokens.shape[1] == before.shape[1] + 1 and bool((tokens[:, :-1] == before).all())


def _indices(positions: Any) -> list[int] | Tensor | None:
    """The indices, for all rows or one for each; None for what is no index."""
    if isinstance(positions, Tensor):
        if positions.dtype == torch.bool:
            return None
        return positions if positions.ndim else [int(positions)]
    if isinstance(positions, list | tuple | range):
        return [int(each) for each in positions]
    return [int(positions)] if hasattr(positions, "__index__") else None

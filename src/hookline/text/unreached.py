"""Positions that were requested, but that a text did not have.

In a run of one forward pass, such a position is an error at once. In a context, a later step of a generation may reach
it, so positions that were never reached are reported when the context ends; for permanent hooks, when the generation
ends.
"""

from __future__ import annotations

import threading

from torch import Tensor

from hookline.engine import HookPoint, pass_state
from hookline.text.token_positions import Lacking, Positions, lacking


class UnreachedPositions(threading.local):
    """The positions that a hook has not reached so far, in all texts that ran in this thread."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        self._current: Lacking = {}
        self._earlier: Lacking = {}
        self._tokens: Tensor | None = None

    def note(self, point: HookPoint) -> None:
        """Look at the text of the current forward pass, as the point sees it."""
        passing = pass_state.forward_pass
        if passing is None or passing.is_only:
            return
        span = passing.span_at(point.stream)
        is_first = not passing.number and not span.positions.start
        if is_first and not _continues(self._tokens, span.tokens):
            self._earlier |= self._current
        self._tokens = span.tokens
        self._current = lacking(self._positions, passing, span)

    def message(self) -> str | None:
        """A sentence about the positions that were never reached; None if all were."""
        parts = [*(self._earlier | self._current).values()]
        more = f" (and {len(parts) - 4} more)" if len(parts) > 4 else ""
        return f"it never reached {', '.join(parts[:4])}{more}" if parts else None


def _continues(before: Tensor | None, tokens: Tensor | None) -> bool:
    """Whether it is the same text with one more token, as in a generation without a cache."""
    if before is None or tokens is None or before.shape[0] != tokens.shape[0]:
        return False
    return tokens.shape[1] == before.shape[1] + 1 and bool((tokens[:, :-1] == before).all())

"""Traced functions: how often each was compiled. A graph is for one length of text and one set of values in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookline.compiled.classify import placed
from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.tables import spec_of
from hookline.engine import Action, HookAction


class TracedFunctions:
    """The functions that were traced, with the lengths and values that they were traced for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[Any, list[Any]] = {}

    def check(self, actions: Sequence[Action], length: int = 1) -> None:
        """Raise NotCompiled if one of these functions, which was not traced for this length, is not traced again."""
        for action in actions:
            if not isinstance(action, HookAction) or placed(action) != "traced":
                continue
            spec = spec_of(action)
            traced = self._known.setdefault(spec.code, [])
            if (spec.constants, length) in traced:
                continue
            if len(traced) >= self._limit:
                raise NotCompiled(
                    f"the function at {action.point.name!r} was compiled for {len(traced)} values or lengths of text: "
                    f"put values that change into tensors, or use an edit such as add(vector, coefficient), which "
                    f"takes all lengths"
                )
            traced.append((spec.constants, length))

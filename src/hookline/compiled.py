"""Compiled code and hooks: while hooks are attached, compiled code runs as plain Python.

A compiled graph does not look at hooks added after it was made, and one made while hooks are there keeps them after
they are gone; either would be silently wrong. Running the original code instead honours every hook, compiles
nothing, and leaves the compiled graphs as they are for the next run without hooks.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_lock = threading.RLock()  # a model may be collected, hooks and all, in the middle of anything
_users: set[int] = set()
_before: Any = None  # the stance that was there before ours
_ours: Any = None
_is_blind = False  # hooks were attached when the compiler was not there yet


def pause(user: object) -> None:
    """From now on, until `user` resumes, compiled functions run uncompiled."""
    with _lock:
        _users.add(id(user))
        _settle()


def resume(user: object) -> None:
    """Undo `pause`. Doing so twice does no harm."""
    with _lock:
        _users.discard(id(user))
        _settle()


def _settle() -> None:
    """Bring the compiler's stance in line with whether there are users."""
    global _before, _ours, _is_blind
    dynamo = sys.modules.get("torch._dynamo")
    if not hasattr(dynamo, "eval_frame"):
        # Importing the compiler takes a second, and nothing is compiled before: never be the cause.
        _is_blind = bool(_users)
        return
    compiler: Any = dynamo.eval_frame  # type: ignore[union-attr]
    if _is_blind:  # it came while hooks were attached, and may have compiled them into something
        dynamo.reset()  # type: ignore[union-attr]
        _is_blind = False
    # An interrupt may have come between any two of these lines: what is done goes by the stance that is there. One that
    # somebody else has set since then is left alone.
    if _users:
        if _ours is None:
            _before, _ours = compiler._stance, compiler.DynamoStance("force_eager")
        if compiler._stance is _before:
            compiler._set_stance(_ours)
    elif _ours is not None:
        if compiler._stance is _ours:
            compiler._set_stance(_before)
        _before = _ours = None

"""Compiled code and hooks: while hooks are attached, compiled code runs as plain Python.

A compiled graph does not look at hooks added after it was made, and one made while hooks are there keeps them after
they are gone; either would be silently wrong. Running the original code instead honours every hook, compiles
nothing, and leaves the compiled graphs as they are for the next run without hooks.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

_lock = threading.Lock()
_users = 0
_stance: Any = None


def pause() -> None:
    """From now on, until as many calls of `resume`, compiled functions run uncompiled."""
    global _users, _stance
    with _lock:
        _users += 1
        # Nothing is compiled before torch's compiler has been imported, which takes a second: never be the cause.
        if _stance is None and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")


def resume() -> None:
    """Undo one `pause`."""
    global _users, _stance
    with _lock:
        _users -= 1
        if _users == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None

"""Untraced: code of ours that torch's compiler never traces, because runs, hooks and counts are not part of a graph.

Compiled code may call it: the compiler ends its graph before the call, and begins another one after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

from hookline.engine._torch.eval_frames import frame_callback, never_trace, set_frame_callback

_T = TypeVar("_T", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

users: set[int] = set()
"""The `id`s of all that have hooks attached, in any thread."""

_WHY = "hookline attaches hooks and runs models outside of compiled graphs: compile this code without fullgraph=True"


def untraced(function: _T) -> _T:
    """The function itself, which compiled code calls as it is. What it calls may be traced."""
    never_trace(function, _WHY)
    return function


@untraced
def leave_compiled_code() -> None:
    """If this is called from compiled code, run the rest of that call uncompiled: a graph has no hooks."""
    set_frame_callback(None)


def outside_compiler(function: _T) -> _T:
    """The function, such that compiled code calls it as it is, with all that it calls.

    If hooks are attached when it returns, the rest of the compiled call runs uncompiled too.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        callback = frame_callback()
        if callback is None:  # nearly always: no compiled code is running in this thread
            return function(*args, **kwargs)
        set_frame_callback(None)
        try:
            return function(*args, **kwargs)
        finally:
            if not users:
                set_frame_callback(callback)

    return cast("_T", untraced(call))


def verbs(cls: _Class) -> _Class:
    """A class whose public methods run outside the compiler. Calling the model can be traced."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_") and name != "forward":
            setattr(cls, name, outside_compiler(method))
    return cls

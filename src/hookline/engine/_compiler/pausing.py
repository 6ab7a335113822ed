"""Compiled code and hooks: while hooks are attached, compiled code runs as plain Python.

A compiled graph ignores hooks that were added after it was compiled, and one that was compiled with hooks keeps them
after they are removed; both would be silently wrong. Running the original code instead respects every hook, compiles
nothing, and keeps the compiled graphs for the next run without hooks.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from hookline.engine._compiler.untraced import users as _users
from hookline.engine._torch.stance import (
    compiler,
    compiler_lock,
    forget_graphs,
    install,
    need_stance,
    stance_class,
    stance_in,
)
from hookline.engine._undo.blocks import UndoBlock, interrupt_safe
from hookline.engine.pass_state import pass_state

_lock = interrupt_safe(threading.RLock())  # a model may be collected, hooks and all, in the middle of anything
_ours: Any = None  # our stance, while it is installed in the compiler
_last: Any = None  # the last one, to be installed again
_frames: Any = None  # the part of the compiler that has its stance, once it is imported
_is_blind = False  # hooks were attached before the compiler was imported

_no_tracing = interrupt_safe(threading.RLock())
_tracing: Any = None  # the lock of the compiler, once it is imported


class _Said(UndoBlock):
    """A block in which something is said of this thread."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value, self._before = name, value, getattr(pass_state, name)

    def open(self) -> None:
        """Say it."""
        setattr(pass_state, self._name, self._value)

    def close(self) -> None:
        """Return to what was said before."""
        if self.is_here:
            setattr(pass_state, self._name, self._before)


def hooks_in_graph() -> UndoBlock:
    """Call compiled code in this thread although hooks are attached: the graph was compiled for these hooks.

    For `hookline.compiled` only. Other threads, and everything after the block, run uncompiled as before.
    """
    with _lock:
        _settle()  # the compiler may have been imported since hooks were attached
    return _Said("has_hooks_in_graph", True)


def left_out(why: str) -> UndoBlock:
    """A block in which `hookline.compiled` leaves the passes of this thread uncompiled: a graph would not pay."""
    return _Said("left_out", pass_state.left_out or why)


def why_left_out() -> str:
    """Why passes of this thread are left uncompiled; empty if they are not."""
    return pass_state.left_out


def tracing_lock() -> Any:
    """The lock that the compiler holds while it traces: a module whose hooks change meanwhile would fail to compile.

    Code that takes both locks takes this one before `taps.lock`.
    """
    global _tracing
    if _tracing is None:
        lock = compiler_lock()
        _tracing = None if lock is None else interrupt_safe(lock)
    return _no_tracing if _tracing is None else _tracing


def pause(user: object) -> None:
    """Run compiled functions uncompiled until `user` calls `resume`."""
    with _lock:
        _users.add(id(user))
        _settle()


def resume(user: object) -> None:
    """Undo `pause`. Safe to call twice."""
    with _lock:
        _users.discard(id(user))
        _settle()


def why_no_graphs() -> str | None:
    """Why torch would not run each graph as it was compiled; None if it would.

    Under another stance it may run the code of a graph as plain Python, which our graphs' hooks do not act in.
    """
    frames = _frames or _imported()
    if frames is None:
        return None
    stance = stance_in(frames)
    stance = getattr(stance, "before", stance)
    if stance.stance != "default":
        return f'torch.compiler.set_stance("{stance.stance}") is on'
    for option, name in (("backend", "force_backend=…"), ("skip_guard_eval_unsafe", "skip_guard_eval_unsafe=True")):
        if getattr(stance, option, None):
            return f"torch.compiler.set_stance({name}) is on"
    return None


def has_users() -> bool:
    """Whether hooks are attached anywhere, in any thread."""
    return bool(_users)


def is_traced() -> bool:
    """Whether the code that asks is being traced.

    Not `is_compiling`: that is true in all threads while one of them compiles, and their hooks must act.
    """
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def leaves_hooks_out() -> bool:
    """Whether to compile code without hooks: it does not run while there are any."""
    return not _is_blind


def _settle() -> None:
    """Install our stance if there are users; otherwise restore the previous one.

    An interrupt may come between any two lines, so this looks at the stance that is installed. One that somebody else
    has set since is left alone.
    """
    global _is_blind, _ours, _last
    frames = _frames or _imported()
    if frames is None:
        _is_blind = bool(_users)
        return
    if _is_blind:  # it was imported while hooks were attached, and may have compiled them
        forget_graphs()
        _is_blind = False
    stance = stance_in(frames)
    if _users:
        if _ours is None:
            need_stance()
            if _last is None or _last.before is not stance:
                _last = stance_class(type(stance), _wants_eager)(stance)  # type: ignore[arg-type]
            _ours = _last
        new = _ours if stance is _ours.before else stance
    elif _ours is None or (_ours.eager and _ours.is_needed()):
        return
    else:
        new = _ours.before if stance is _ours else stance
    if new is not stance:
        install(frames, new)
    if not _users:
        _ours = None


def _imported() -> Any:
    """The part of the compiler that has its stance; None if nobody has imported the compiler."""
    global _frames
    _frames = compiler()
    return _frames


def _wants_eager() -> bool:
    """Whether a call of compiled code that begins in this thread is to run uncompiled."""
    return bool(_users) and not pass_state.has_hooks_in_graph

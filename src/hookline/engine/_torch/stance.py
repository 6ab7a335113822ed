"""The stance of torch's compiler: whether compiled code runs compiled.

Why: `torch.compiler.set_stance` sets one for the whole process, imports something at every call, and knows no
threads.
Needs: the compiler keeps its stance in `_stance` of one module, asks it in every call of compiled code, and asks for
the first time in the first line of `_callback_from_stance`; the lock that it holds while it traces.
The compiler is never imported for this: nothing is compiled before.
If it does not hold, no hook can be attached while the compiler is imported: the first raises an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hookline.engine._torch.eval_frames import frame_callback
from hookline.engine._torch.frames import frame_at, frames_of_threads
from hookline.engine._torch.proofs import insist, requirement

WRAPPED = "_orig_mod"
"""The name of the module that `torch.compile` wraps, among the children of the wrapper."""
_FIRST_QUESTION = "_callback_from_stance"
stance_in = attrgetter("_stance")
"""The stance that is installed in the part of the compiler that `compiler` returns."""


def compiler() -> Any:
    """The part of the compiler that has its stance; None if nobody has imported the compiler.

    Importing it takes a second, and nothing is compiled before that: never import it here. Another thread may be
    importing it at this moment.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or getattr(dynamo.__spec__, "_initializing", False):
        return None
    return dynamo.eval_frame


def install(frames: Any, stance: Any) -> None:
    """Install a stance in the compiler; its own function raises if compiled code is running in this thread."""
    if frame_callback() in (None, False):
        frames._stance = stance  # as the compiler's own function, which imports something at every call
    else:
        frames._set_stance(stance)  # which raises


def forget_graphs() -> None:
    """Let the compiler forget what it has compiled."""
    sys.modules["torch._dynamo"].reset()


def compiler_lock() -> Any:
    """The lock that the compiler holds while it traces; None if it is not imported."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


@cache
def stance_class(base: type[Any], wants_eager: Callable[[], bool]) -> type[Any]:
    """The class of a stance that is "force_eager" for calls that want it, and otherwise the previous one.

    The compiler asks for its stance several times in one call, and fails if the answers differ: a call of another
    thread that began under one stance must not see the other before it ends.
    """

    class Stance(base):  # type: ignore[misc]
        def __init__(self, before: Any) -> None:
            self.before = before
            self.eager: set[int] = set()  # the threads whose last call began while there were users

        def is_needed(self) -> bool:
            """Whether a call of another thread that began under it may still be running."""
            self.eager &= frames_of_threads().keys() - {threading.get_ident()}
            return bool(self.eager)

        @property
        def stance(self) -> Any:
            thread = threading.get_ident()
            if _begins_a_call(frame_at(1)):
                (self.eager.add if wants_eager() else self.eager.discard)(thread)
            return "force_eager" if thread in self.eager else self.before.stance

        @property
        def skip_guard_eval_unsafe(self) -> bool:
            return bool(self.before.skip_guard_eval_unsafe)

        @property
        def backend(self) -> Any:
            return self.before.backend

    return Stance


def _begins_a_call(frame: Any) -> bool:
    """Whether the compiler asks for the first time in a call of compiled code."""
    code = frame.f_code
    return code.co_name == _FIRST_QUESTION and frame.f_lineno == code.co_firstlineno + 1


def probe() -> None:
    """The compiler's question is answered by our stance, once for each call. The installed stance is not touched."""
    import_module("torch._dynamo.convert_frame")  # slow, where nothing was compiled yet
    frames, wants_eager = compiler(), [True]
    insist(compiler_lock() is not None, "the compiler has a lock for tracing")
    question = getattr(frames, _FIRST_QUESTION)
    before = frames.DynamoStance()
    kind: Any = type(before)
    stance = stance_class(kind, lambda: wants_eager[0])(before)
    ask = FunctionType(question.__code__, {**vars(frames), "_stance": stance})

    def callback() -> None:
        pass

    insist(ask(callback) is None, "a stance that wants it lets compiled code run uncompiled")
    wants_eager[0] = False
    insist(stance.stance == "force_eager", "the stance is the same until a call ends")
    insist(ask(callback) is callback, "under the default stance, compiled code runs compiled")
    insist(stance.stance == "default" and not stance.eager, "the next call asks for the stance again")
    module = nn.Identity()
    compiled: Any = torch.compile(module, backend="eager")
    insist(getattr(compiled, WRAPPED, None) is module, "a compiled module has the original")
    insist(hasattr(frames, "_set_stance"), "the compiler's own function to set its stance is there")


need_stance = requirement(probe)

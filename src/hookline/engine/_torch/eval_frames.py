"""Code that torch's compiler never traces, and leaving compiled code in the middle.

Why: runs, hooks and counts are not part of a graph; `torch.compiler.disable` imports the compiler, and costs a call.
Needs: the strategy that the compiler keeps with the code of a function, the attributes by which it knows such
functions, and the callback of this thread, by which it sees frames before they run.
If it does not hold, code of ours can become part of a graph; only `hookline doctor` looks, as it takes a frame
evaluation of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from torch._C._dynamo import eval_frame

from hookline.engine._torch.proofs import insist, private

frame_callback = private(eval_frame, "get_eval_frame_callback")
"""What the compiler calls with the frames of this thread; None or False outside of compiled code."""
set_frame_callback = private(eval_frame, "set_eval_frame")
_Action, _Strategy = private(eval_frame, "_FrameAction"), private(eval_frame, "_FrameExecStrategy")
_set_strategy = private(eval_frame, "set_code_exec_strategy")


def never_trace(function: Callable[..., Any], why: str) -> None:
    """Let compiled code call a function as it is. What it calls may be traced."""
    cast("Any", function)._torchdynamo_disable = True
    cast("Any", function)._torchdynamo_disable_msg = why
    _set_strategy(cast("FunctionType", function).__code__, _Strategy(_Action.SKIP, _Action.DEFAULT))


class _AsItIs:
    """The compiler's answer about a frame that it leaves as it is."""

    apply_to_code = False
    guarded_code = None
    frame_exec_strategy = _Strategy(_Action.DEFAULT, _Action.DEFAULT)


def probe() -> None:
    """Frames of this thread are shown to a callback, but for those that are never traced."""
    seen: list[str] = []

    def inside() -> None:
        pass

    def untraced() -> None:
        inside()

    def leaves() -> None:
        set_frame_callback(None)

    def after() -> None:
        pass

    def note(frame: Any, *_rest: Any) -> Any:
        seen.append(getattr(frame, "f_code", frame).co_name)
        return _AsItIs

    never_trace(untraced, "a probe")
    never_trace(leaves, "a probe")
    insist(frame_callback() is None, "outside of compiled code there is no callback")
    set_frame_callback(note)
    try:
        is_on = frame_callback() is note
        untraced()
        leaves()
        after()
    finally:
        set_frame_callback(None)
    insist(is_on, "the callback of a thread can be read")
    insist("inside" in seen, "the callback sees the frames of the thread")
    insist("untraced" not in seen and "leaves" not in seen, "the callback does not see what is never traced")
    insist("after" not in seen, "without a callback, nothing is traced any more")

"""Activation checkpointing: regions of a forward pass that run a second time, inside the backward pass.

What was edited the first time must be edited again then, or the gradients would silently be those of another
computation. But the run may be over by then. So a run that acts in such a region leaves a lease on it: while the
graph lives that may recompute the region, the run stays on its modules, and acts only when that region recomputes.
"""

from __future__ import annotations

import inspect
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

if TYPE_CHECKING:
    from hookline.runtime import Run

# torch has two kinds of checkpoint. One builds the graph at once and recomputes when a saved tensor is unpacked; its
# region is known by the object that its pack and unpack functions share. The other ("reentrant") is an autograd
# function without a graph inside; its region is known by that function's context.
_FIRST_RUN = "_checkpoint_hook.__init__.<locals>.pack_hook"
_SECOND_RUN = "_checkpoint_hook.__init__.<locals>.unpack_hook"
_REENTRANT_FIRST_RUN = checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_SECOND_RUN = checkpoint.CheckpointFunction.backward.__code__


class Lease:
    """Held by a region for as long as it may recompute; the run's modules are let go with the last one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.retain()

    def __del__(self) -> None:
        self.run.release()


def keep_for_second_run(run: Run) -> bool:
    """If the code running now is in a checkpointed region, let `run` act when it recomputes. Says whether it is.

    To be asked only in a forward pass that began with gradients on: the answer is slow where they are off now.
    """
    region = _region_in_first_run()
    if region is None:
        return False
    leases = region.__dict__.setdefault("_hookline_leases", [])
    if all(lease.run is not run for lease in leases):
        leases.append(Lease(run))
    return True


def runs_in_second_run() -> list[Run] | None:
    """The runs that acted in the region now recomputing; None if the code running now is no second run."""
    region = _region_in_second_run()
    if region is None:
        return None
    return [lease.run for lease in region.__dict__.get("_hookline_leases", ())]


def _region_in_first_run() -> Any:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and hooks[0].__qualname__ == _FIRST_RUN:
        return inspect.getclosurevars(hooks[0]).nonlocals["frame"]
    if not torch.is_grad_enabled():
        for frame in _callers():
            if frame.f_code is _REENTRANT_FIRST_RUN:
                return frame.f_locals["ctx"]
    return None


def _region_in_second_run() -> Any:
    for frame in _callers():
        if frame.f_code is _REENTRANT_SECOND_RUN:
            return frame.f_locals["ctx"]
        if _is_unpacking(frame.f_code):
            return frame.f_locals["frame"]
    return None


def _is_unpacking(code: CodeType) -> bool:
    return code.co_qualname == _SECOND_RUN and code.co_filename == checkpoint.__file__


def _callers() -> list[FrameType]:
    frames, frame = [], inspect.currentframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames

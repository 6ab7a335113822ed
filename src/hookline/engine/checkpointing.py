"""Activation checkpointing: regions of a forward pass that run a second time, inside the backward pass.

What was edited the first time must be edited again then, or the gradients would silently be those of another
computation. But the run may be over by then. So a run that acts in such a region leaves a lease on it: while the
graph lives that may recompute the region, the run stays on its modules, and acts only when that region recomputes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

if TYPE_CHECKING:
    from hookline.engine.runs import Run

# torch has two kinds of checkpoint. One builds the graph at once and recomputes when a saved tensor is unpacked; its
# region is known by an object that lives in a generator of torch's `checkpoint`. The other ("reentrant") is an autograd
# function without a graph inside; its region is known by that function's context.
_FIRST_RUN = "_checkpoint_hook.__init__.<locals>.pack_hook"
_SECOND_RUN = "_checkpoint_hook.__init__.<locals>.unpack_hook"
_REENTRANT_FIRST_RUN = checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_SECOND_RUN = checkpoint.CheckpointFunction.backward.__code__


class Lease:
    """Held by a region for as long as it may recompute; the run's modules are let go with the last one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.retain(self)

    def __del__(self) -> None:
        self.run.release(self)


def is_first_run() -> bool:
    """Whether the code running now will run again. To be asked only in a forward pass that began with gradients on."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and getattr(hooks[0], "__qualname__", "") == _FIRST_RUN:
        return True
    return not torch.is_grad_enabled() and any(frame.f_code is _REENTRANT_FIRST_RUN for frame in _callers())


def keep_for_second_run(run: Run | None, passing: Any) -> None:
    """Let `run` act when the regions recompute that the code running now is in. There may be none, or several.

    `passing` is what the forward pass is about: another one may be going on by then, or none.
    """
    if not is_first_run():
        return
    for region in _regions_in_first_run():
        region.__dict__["_hookline_passing"] = passing
        if run is None:
            continue
        leases = region.__dict__.setdefault("_hookline_leases", [])
        if all(lease.run is not run for lease in leases):
            leases.append(Lease(run))


def runs_in_second_run() -> list[Run] | None:
    """The runs that acted in the regions now recomputing; None if the code running now is no second run."""
    regions = list(_regions_in_second_run())
    if not regions:
        return None
    runs = {id(lease.run): lease.run for region in regions for lease in region.__dict__.get("_hookline_leases", ())}
    return list(runs.values())


def passing_in_second_run() -> Any:
    """What the forward pass was about in which the region first ran that recomputes now."""
    return next((region.__dict__.get("_hookline_passing") for region in _regions_in_second_run()), None)


def _regions_in_first_run() -> Iterator[Any]:
    for frame in _callers():
        if frame.f_code is _REENTRANT_FIRST_RUN:
            yield frame.f_locals["ctx"]
        elif frame.f_code.co_filename == checkpoint.__file__ and "gen" in frame.f_locals:
            generator = frame.f_locals["gen"]
            if generator.gi_frame is not None and "new_frame" in generator.gi_frame.f_locals:
                yield generator.gi_frame.f_locals["new_frame"]


def _regions_in_second_run() -> Iterator[Any]:
    for frame in _callers():
        if frame.f_code is _REENTRANT_SECOND_RUN:
            yield frame.f_locals["ctx"]
        elif frame.f_code.co_filename == checkpoint.__file__ and frame.f_code.co_qualname == _SECOND_RUN:
            yield frame.f_locals["frame"]


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back

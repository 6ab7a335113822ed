"""The checkpointed regions that the current code is in, as they run first or again.

Why: torch does not say that a region will run again, or is running again, nor which one.
Needs: torch's stack of hooks on saved tensors, the names of its checkpoint's own hooks there, and the local variables
of its checkpoint's functions: `gen`, `new_frame`, `frame`, `args`, `ctx`, `detached_inputs`.
If it does not hold, the first hook that runs in a region raises an error. Torch's checkpoint imports the compiler,
which takes a second: so this is not tried before some hooks on saved tensors are on.

Torch has two kinds of checkpoint. One builds the graph at once and recomputes when a saved tensor is unpacked; its
region is known by an object that lives in a generator of torch's `checkpoint`. The other ("reentrant") is an autograd
function without a graph inside; its region is known by that function's context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.utils import checkpoint

from hookline.engine._torch.frames import callers
from hookline.engine._torch.proofs import insist, private, requirement

FILE = checkpoint.__file__
FIRST_RUN = "_checkpoint_hook.__init__.<locals>.pack_hook"
RECOMPUTATION = "_recomputation_hook.__init__.<locals>.pack_hook"
REENTRANT_FIRST_RUN: CodeType = private(checkpoint.CheckpointFunction, "forward.__code__")
_REENTRANT_SECOND_RUN: CodeType = private(checkpoint.CheckpointFunction, "backward.__code__")
_SECOND_RUN = "_checkpoint_hook.__init__.<locals>.unpack_hook"

hooks_on_saved_tensors = partial(private(torch, "_C._autograd._top_saved_tensors_default_hooks"), False)
"""The hooks on tensors that are saved for the backward pass, those on top; None if there are none."""
pop_hooks_on_saved_tensors = private(torch, "_C._autograd._pop_saved_tensors_default_hooks")
push_hooks_on_saved_tensors = private(torch, "_C._autograd._push_saved_tensors_default_hooks")


class _NeverRaisedError(Exception):
    pass


StopRecomputation: type[Exception] = getattr(checkpoint, "_StopRecomputationError", _NeverRaisedError)
"""Raised by torch in a region that runs again, when it has recomputed all that it needs."""

CACHES: tuple[type[Any], ...] = tuple(
    vars(checkpoint)[name]
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if name in vars(checkpoint)
)
"""The modes of selective checkpointing: the first keeps results in a region's first run, the other returns them again.

They go by the operator and by how often it was called. So they must not see what hooks compute: a hook that only reads
is not called in the second run, where the model would get its results.
"""


def regions_in_first_run() -> Iterator[tuple[Any, Sequence[Any]]]:
    """The regions that the current code is in, the innermost first, and their arguments."""
    for frame in callers():
        if frame.f_code is REENTRANT_FIRST_RUN:
            yield frame.f_locals["ctx"], frame.f_locals["args"]
        elif frame.f_code.co_filename == FILE and "gen" in frame.f_locals:
            generator = frame.f_locals["gen"]
            if generator.gi_frame is not None and "new_frame" in generator.gi_frame.f_locals:
                yield generator.gi_frame.f_locals["new_frame"], frame.f_locals["args"]


def regions_in_second_run() -> Iterator[tuple[Any, Sequence[Any]]]:
    """The regions that are recomputing, the innermost first, and the arguments that they have this time."""
    args: Sequence[Any] = ()
    for frame in callers():
        if frame.f_code is _REENTRANT_SECOND_RUN:
            if "detached_inputs" in frame.f_locals:  # else a region around it recomputes what it was called with
                yield frame.f_locals["ctx"], frame.f_locals["detached_inputs"]
        elif frame.f_code.co_filename == FILE and frame.f_code.co_name == "recompute_fn":
            args = frame.f_locals["args"]
        elif frame.f_code.co_filename == FILE and frame.f_code.co_qualname == _SECOND_RUN:
            yield frame.f_locals["frame"], args


def probe() -> None:
    """A region is found when it runs first, and found again when it recomputes, for both kinds of checkpoint."""
    _try(is_reentrant=False)
    _try(is_reentrant=True)


def _try(*, is_reentrant: bool) -> None:
    seen: list[tuple[list[Any], list[Any], Any]] = []
    stopped: set[type[BaseException]] = set()

    def region(x: torch.Tensor) -> torch.Tensor:
        hooks = hooks_on_saved_tensors()
        first, second = list(regions_in_first_run()), list(regions_in_second_run())
        seen.append((first, second, getattr(hooks[0], "__qualname__", "") if hooks else ""))
        if hooks:
            pop_hooks_on_saved_tensors()
            insist(hooks_on_saved_tensors() is None, "hooks on saved tensors can be taken off")
            push_hooks_on_saved_tensors(*hooks)
        try:
            return (x * x).exp()
        except BaseException as error:
            stopped.add(type(error))
            raise

    run = partial(checkpoint.checkpoint, use_reentrant=is_reentrant, preserve_rng_state=False)
    run(region, torch.ones(1, requires_grad=True)).sum().backward()
    kind = "reentrant" if is_reentrant else "other"
    insist(len(seen) == 2, f"the region of a checkpoint ({kind}) runs twice")
    (first, not_yet, on_first), (_, second, on_second) = seen
    insist(len(first) == len(second) == 1 and not not_yet, f"the region of a checkpoint ({kind}) is found")
    insist(first[0][0] is second[0][0], f"the region of a checkpoint ({kind}) is the same when it runs again")
    insist(len(first[0][1]) == len(second[0][1]) == 1, f"the arguments of a checkpoint's region ({kind}) are found")
    names = ("", "") if is_reentrant else (FIRST_RUN, RECOMPUTATION)
    insist((on_first, on_second) == names, f"the hooks of a checkpoint ({kind}) have the names that are known")
    insist(stopped <= {StopRecomputation}, f"what ends a recomputation ({kind}) is known")


need_regions = requirement(probe)

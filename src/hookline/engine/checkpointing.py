"""Activation checkpointing: regions of a forward pass that run a second time, inside the backward pass.

Edits must be applied again then, or the gradients would silently be those of another computation. But the run may have
ended by then. So a run that acts in such a region takes a lease on it: as long as the graph that may recompute the
region exists, the run stays attached to its modules, and acts only when that region recomputes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from hookline.engine._torch.checkpoint_regions import (
    FIRST_RUN,
    RECOMPUTATION,
    REENTRANT_FIRST_RUN,
    hooks_on_saved_tensors,
    need_regions,
    pop_hooks_on_saved_tensors,
    push_hooks_on_saved_tensors,
    regions_in_first_run,
    regions_in_second_run,
)
from hookline.engine._torch.frames import callers
from hookline.engine.calls import stashed

if TYPE_CHECKING:
    from hookline.engine.actions import PointAction
    from hookline.engine.runs import Run


class _Recomputing(threading.local):
    """What checkpointing means for the forward pass in this thread."""

    def __init__(self) -> None:
        self.is_on = False  # whether a checkpointed region is recomputing
        self.starts_with_grad = False  # whether gradients were enabled when the forward pass began


recomputing = _Recomputing()


class Lease:
    """Held by a region as long as it may recompute; the run detaches from its modules with the last lease."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.retain(self)

    def __del__(self) -> None:
        self.run.release(self)


def is_first_run() -> bool:
    """Whether the current code will run again. Only valid in a forward pass that began with gradients enabled."""
    hooks = hooks_on_saved_tensors()
    if hooks is None and torch.is_grad_enabled():
        return False
    need_regions()
    if hooks is not None and getattr(hooks[0], "__qualname__", "") == FIRST_RUN:
        return True
    return not torch.is_grad_enabled() and any(frame.f_code is REENTRANT_FIRST_RUN for frame in callers())


def leave_regions() -> list[tuple[Any, Any]]:
    """Let the regions that the current code is in save no tensors until `enter_again`.

    A region must save the same tensors each time it runs. A hook that only reads runs once, and may compute something
    with a graph; what hooks compute is kept as outside a region.
    """
    left: list[tuple[Any, Any]] = []
    while (hooks := hooks_on_saved_tensors()) is not None:
        need_regions()
        if getattr(hooks[0], "__qualname__", "") not in (FIRST_RUN, RECOMPUTATION):
            break
        pop_hooks_on_saved_tensors()
        left.append(hooks)
    return left


def enter_again(left: list[tuple[Any, Any]]) -> None:
    """Undo `leave_regions`."""
    while left:
        push_hooks_on_saved_tensors(*left.pop())


class _TapLease:
    """Keeps the tap of a permanent hook on its module, so that a recomputation notices if the hook is gone."""

    def __init__(self, action: PointAction) -> None:
        self._tap, self._module = action.tap, action.module
        self._tap.acquire(self._module, self)

    def __del__(self) -> None:
        self._tap.release(self._module, self)


def keep_for_second_run(action: PointAction, forward_pass: Any) -> None:
    """Let `action` act again when the regions that the current code is in recompute. There may be none, or several.

    `forward_pass` is the current one of a language model: another one may be running by then, or none.
    """
    if not is_first_run():
        return
    for region, args in regions_in_first_run():
        region.__dict__["_hookline_pass"] = forward_pass
        given = region.__dict__.setdefault("_hookline_given", {})
        given |= {site: index for site, x in stashed.saved.items() for index, arg in enumerate(args) if arg is x}
        acted = region.__dict__.setdefault("_hookline_acted", {})
        if action not in acted:
            run = action.run
            known = [lease for lease in acted.values() if isinstance(lease, Lease) and lease.run is run]
            acted[action] = known[0] if known else _TapLease(action) if run is None else Lease(run)


def runs_in_second_run() -> list[Run] | None:
    """The runs that acted in the regions that are recomputing; None if none is recomputing."""
    regions = list(regions_in_second_run())
    if not regions:
        return None
    leases = [lease for region, _ in regions for lease in region.__dict__.get("_hookline_acted", {}).values()]
    return list({id(lease.run): lease.run for lease in leases if isinstance(lease, Lease)}.values())


def acted_in_first_run() -> list[PointAction]:
    """The actions that acted in the regions that are recomputing, when these ran first."""
    return [each for region, _ in regions_in_second_run() for each in region.__dict__.get("_hookline_acted", ())]


def pass_in_second_run() -> Any:
    """The forward pass in which the region that is recomputing ran first."""
    return next((region.__dict__.get("_hookline_pass") for region, _ in regions_in_second_run()), None)


def stash_again() -> None:
    """Save the arguments of the regions that are recomputing where they were saved before these regions ran first.

    The events at which they were saved need not be inside: transformers 5.23 checkpoints a layer without its hooks.
    """
    for region, args in reversed(list(regions_in_second_run())):  # the innermost last: its arguments are the latest
        for site, index in region.__dict__.get("_hookline_given", {}).items():
            stashed.saved[site], stashed.memo[site] = args[index], {}

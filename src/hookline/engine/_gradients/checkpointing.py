"""Activation checkpointing: regions of a forward pass that run a second time, inside the backward pass.

Edits must be applied again then, or the gradients would silently be those of another computation. But the run may have
ended by then. So a run that acts in such a region takes a lease on it: as long as the graph that may recompute the
region exists, the run stays attached to its modules, and acts only when that region recomputes.
"""

from __future__ import annotations

import ctypes
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor, nn

from hookline.engine._torch.checkpoint_regions import (
    FILE,
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
from hookline.engine._torch.frames import callers, frame_at
from hookline.engine._torch.graph_tasks import current_graph_task
from hookline.engine.calls import is_call_of
from hookline.engine.pass_state import Saved, pass_state

if TYPE_CHECKING:
    from hookline.engine.actions import PointAction
    from hookline.engine.runs import Run


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
    if hooks is not None:
        need_regions()
        if (name := getattr(hooks[0], "__qualname__", "")) != RECOMPUTATION:
            return name == FIRST_RUN or any(True for _ in regions_in_first_run())  # hooks of others in a region
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = frame_at(1)  # not `callers`: this is asked in every pass without gradients
    while frame is not None and frame.f_code is not REENTRANT_FIRST_RUN:
        frame = frame.f_back
    if frame is not None:
        need_regions()  # which takes a second, so not before
    return frame is not None


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


def keep_for_second_run(action: PointAction, forward_pass: Any, *, must_act: bool) -> None:
    """Let `action` act again when the regions that the current code is in recompute. There may be none, or several.

    `forward_pass` is the current one of a language model: another one may be running by then, or none. With `must_act`,
    raise if the action will not be there, because the region is a part of the module that it looks into.
    """
    if not is_first_run():
        return
    if must_act and action.tap.kind.is_inner and _is_part_of(action.module):
        action.refuse(
            "its module computes it in a checkpointed region, which runs again without the rest of the module: turn "
            "gradient checkpointing off, or run the model under torch.no_grad()"
        )
    if pass_state.is_recomputing:  # a region inside the one that recomputes
        forward_pass = pass_in_second_run()
    for region, args in regions_in_first_run():
        region.__dict__["_hookline_pass"] = forward_pass
        indices = region.__dict__.setdefault("_hookline_given", {})
        indices |= {
            site: index for site, saved in pass_state.saved.items() for index, arg in enumerate(args) if arg is saved.x
        }
        acted = region.__dict__.setdefault("_hookline_acted", {})
        if action not in acted:
            run = action.run
            leases = [lease for lease in acted.values() if isinstance(lease, Lease) and lease.run is run]
            acted[action] = leases[0] if leases else _TapLease(action) if run is None else Lease(run)


class _State(NamedTuple):
    """The state of a generator of random numbers."""

    bits: bytes
    tensor: Tensor


def _random_states() -> dict[Generator, _State]:
    """The states of the generators that torch restores before a region runs again."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in generators]
    # Not `numpy()` or `equal`, which modes of others would see.
    bits = [ctypes.string_at(state.data_ptr(), state.numel()) for state in states]
    return dict(zip(generators, map(_State, bits, states), strict=True))


def is_second_run() -> bool:
    """Whether the current code runs again."""
    return current_graph_task() != -1 and runs_in_second_run() is not None


class Absence:
    """The time of a hook's call in a region: the region is left meanwhile, and what the hook draws is noted.

    A hook that only reads is not called in the second run, which begins with the random state of the first one. So the
    second run has to continue with the state in which the hook left the generators, or dropout draws another mask.
    """

    def __init__(self) -> None:
        self._states = _random_states() if is_first_run() else {}
        self._left = leave_regions() if torch.is_grad_enabled() else []

    def end(self, action: PointAction) -> None:
        """The hook has returned, or raised."""
        enter_again(self._left)
        if self._states:
            after = _random_states()
            draws = {
                (generator, state.bits): after[generator]
                for generator, state in self._states.items()
                if generator in after
            }
            _keep_draws(action, {key: state for key, state in draws.items() if state.bits != key[1]})


_Draws: TypeAlias = dict[tuple[Generator, bytes], _State]
"""The state of a generator after a hook, by that before it: so it does not matter how often a region runs again."""


def _keep_draws(action: PointAction, draws: _Draws) -> None:
    if draws:
        action.keep_for_second_run(must_act=True)
        for region, _ in regions_in_first_run():
            region.__dict__.setdefault("_hookline_draws", {}).setdefault(action, {}).update(draws)


def draw_again(action: PointAction) -> None:
    """Move the generators as a hook did in the first run, which is not called in the second."""
    draws: _Draws = {}
    for region, _ in regions_in_second_run():
        draws |= region.__dict__.get("_hookline_draws", {}).get(action, {})
    if draws:
        draws = {
            key: draws[key] for source, state in _random_states().items() if (key := (source, state.bits)) in draws
        }
        for (generator, _), state in draws.items():
            generator.set_state(state.tensor)
        if is_first_run():  # of a region inside
            _keep_draws(action, draws)


def runs_in_second_run() -> list[Run] | None:
    """The runs that acted in the regions that are recomputing; None if none is recomputing."""
    regions = list(regions_in_second_run())
    if not regions:
        return None
    leases = [lease for region, _ in regions for lease in region.__dict__.get("_hookline_acted", {}).values()]
    return list({id(lease.run): lease.run for lease in leases if isinstance(lease, Lease)}.values())


def acted_in_first_run() -> list[PointAction]:
    """The actions that acted in the regions that are recomputing, when these ran first."""
    return [action for region, _ in regions_in_second_run() for action in region.__dict__.get("_hookline_acted", ())]


def pass_in_second_run() -> Any:
    """The forward pass in which the region that is recomputing ran first."""
    return next((region.__dict__.get("_hookline_pass") for region, _ in regions_in_second_run()), None)


def stash_again() -> None:
    """Save the arguments of the regions that are recomputing where they were saved before these regions ran first.

    The events at which they were saved need not be inside: transformers 5.23 checkpoints a layer without its hooks.
    """
    for region, args in reversed(list(regions_in_second_run())):  # the innermost last: its arguments are the latest
        for site, index in region.__dict__.get("_hookline_given", {}).items():
            pass_state.saved[site] = Saved(args[index])


def _is_part_of(module: nn.Module) -> bool:
    """Whether the innermost region that runs for the first time began in the running call of `module`."""
    for frame in callers():
        if is_call_of(frame, module):
            return False
        if frame.f_code is REENTRANT_FIRST_RUN or frame.f_code.co_filename == FILE:
            return True
    return False

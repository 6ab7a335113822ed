"""The event path: from torch's call of a tap to the user's function and back. Read it from top to bottom.

torch calls a module, and with it the tap on that event
  Listener.__call__   notes the arguments of the call, and pauses interception
    flow              finds the runs of this thread that listen here, and counts the call
      step, step, …   the actions of those runs at this event, in the order that `order.py` states; that of an edit is
                      made by `composed`, with what its options ask for around it
        edit          lends the activation to a hook, and sends on what the hook made of it
          call_hook   calls the user's function
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from hookline.engine._compiler import pausing
from hookline.engine._gradients import checkpointing
from hookline.engine._inner import interception
from hookline.engine._memory.aliases import is_discarded
from hookline.engine._memory.outside import is_whole
from hookline.engine._reports import failures
from hookline.engine._torch.checkpoint_regions import StopRecomputation, hooks_on_saved_tensors
from hookline.engine._torch.graph_tasks import current_graph_task
from hookline.engine._torch.mode_stacks import count_dispatch_modes
from hookline.engine._torch.refcounts import can_count, references
from hookline.engine._undo.modes import has_caches, uncached
from hookline.engine.order import Kind, arrange
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import Schedule, Step, active
from hookline.errors import HookError, NonFiniteError
from hookline.values.structures import NoTensorError

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.hook_actions import Edit, HookAction


_is_traced, _is_exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting


def ignore(_value: Any) -> None:
    """The capture where there is none."""


class Listener:
    """The part of a tap that torch calls; `taps.py` attaches it to its module."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.users: set[int] = set()
        self.permanent: tuple[Schedule, ...] = ()
        self.alone: tuple[Schedule, ...] | None = None
        """The value of `active` under which only `capture` acts here; None if others do."""
        self.capture: Callable[[Any], None] = ignore

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Called by torch with `(module, args, kwargs)` or `(module, args, kwargs, output)`."""
        if (_is_traced() or _is_exporting()) and pausing.leaves_hooks_out():
            return None  # another thread hooks the module while this one compiles it
        if len(rest) != (1 if self.kind is Kind.INPUT else 2):
            return None  # another thread detached the tap meanwhile, so no run of this thread needs it
        if active.get() is self.alone and not (self.permanent or pass_state.hooks) and current_graph_task() == -1:
            given = (args, rest[0]) if self.kind is Kind.INPUT else rest[1]
            return uncached(self.capture, given) if count_dispatch_modes() else self.capture(given)
        before = pass_state.arguments, pass_state.originals
        pass_state.arguments, pass_state.originals = (args, rest[0]), ()
        value = pass_state.arguments if self.kind is Kind.INPUT else rest[1]
        try:
            new = interception.unintercepted(self.flow, value) if pass_state.interceptors else self.flow(value)
        finally:
            pass_state.arguments, pass_state.originals = before
        return None if new is value else new

    def flow(self: Any, value: Any) -> Any:
        """Pass a value through the steps of the runs that listen here in this thread, and return the outcome."""
        if count_dispatch_modes() and has_caches():
            return uncached(self.flow, value)
        runs = active.get()
        here: Sequence[Schedule]
        if len(runs) == 1 and not self.permanent and current_graph_task() == -1:  # nearly always
            here, is_replay = runs if self in runs[0].steps and runs[0].is_open else (), False
        else:
            here, is_replay = self.schedules()
        if not here:
            if not runs and not is_replay:
                self.tell_other_threads()
            return value
        pass_state.is_recomputing = is_replay
        if is_replay:
            checkpointing.stash_again()
        else:
            for run in here:
                run.count.next(self)
        is_usual = len(here) == 1 and not is_replay
        # Another thread may have removed a permanent hook since.
        for step in here[0].steps.get(self, ()) if is_usual else arrange(self.actions(here), is_replay=is_replay):
            value = step(value)
        return value

    def schedules(self: Any) -> tuple[list[Schedule], bool]:
        """The runs that act here at this moment, and whether a checkpointed region is recomputing."""
        is_in_backward = current_graph_task() != -1
        again = checkpointing.runs_in_second_run() if is_in_backward else None
        runs: Sequence[Schedule] = again if again is not None else active.get()
        here = [run for run in runs if self in run.steps and (run.is_open or again is not None)]
        here += [run for run in self.permanent if self in run.steps]
        if again is not None:
            failures.check_nothing_is_gone(self, self.actions(here))
        return here, again is not None

    def actions(self: Any, schedules: Sequence[Schedule] | None = None) -> list[Action]:
        """The actions of these schedules, or of those that act at this moment, that wait here."""
        is_now = schedules is None and not self.permanent and current_graph_task() == -1
        if is_now and len(runs := active.get()) == 1 and runs[0].is_open:  # nearly always
            return runs[0].actions_at.get(self, [])
        some = self.schedules()[0] if schedules is None else schedules
        return [action for each in some for action in each.actions_at.get(self, ())]


def edit(action: Edit, value: Any) -> Any:
    """Let one hook work on the activation in `value`. Returns the value to continue with."""
    if pass_state.is_recomputing:
        call = action.call()
    else:
        call = action.count.of(action.tap)
        action.times = (call or 0) + 1
    try:
        x = action.view.get(value)
    except NoTensorError as error:
        if not action.must_fire:
            return value
        raise action.nothing_there(error) from error
    # A snapshot is lent: a differentiable copy-on-write clone, to which a hook may write even where `x` is a leaf.
    given: Any  # the only reference to it besides those of the hook
    given, kept = action.lend(x)
    action.fired = True
    result = call_hook(action, given, call)
    if result is None or result is given:
        result = None  # so that this frame refers to what was lent only once
        if action.tally is not None and not pass_state.is_recomputing:
            action.note_acted(x)
        if action.is_as_lent(given, kept, x):
            wants_gradient = action.wants_gradient(given, x)
            if wants_gradient is None:
                lent, given = ref(given), None
                given = lent()  # None unless the hook kept it
                wants_gradient = given is not None
            return action.passed_on(value, x, given) if wants_gradient else value
        # Counted against an object that only this frame has: how Python counts depends on its version, and on whether
        # a compiler is active in the process.
        alone = object()
        is_kept = not can_count() or references(given) > references(alone)
        new = action.view.put(value, action.fitted_loan(given, x, is_kept=is_kept))
    else:
        new = action.view.put(value, action.fitted_result(result, x, given))
        if action.tally is not None and not pass_state.is_recomputing:
            action.note_acted(x)
    action.has_edited = True
    if pass_state.starts_with_grad or torch.is_grad_enabled():
        action.keep_for_second_run(must_act=True)
    is_inside = action.tap.kind is Kind.OUTPUT and not is_whole(action.module)
    return action.written_back(value, new) if is_inside and is_discarded(in_place=action.may_write) else new


def call_hook(action: HookAction, given: Any, call: int | None) -> Any:
    """Call the user's function. Its errors are raised as a `HookError`, unless the model wants them unchanged."""
    before = pass_state.call, pass_state.hooks, pass_state.forward_pass, pass_state.at_hook
    recomputed = pass_state.is_recomputing, pass_state.starts_with_grad
    saved = pass_state.saved, pass_state.edited
    may_be_reentrant = pass_state.starts_with_grad and not torch.is_grad_enabled() and action.dir == "fwd"
    in_region = checkpointing.Absence() if may_be_reentrant or hooks_on_saved_tensors() is not None else None
    try:
        if pass_state.is_recomputing:
            pass_state.forward_pass = checkpointing.pass_in_second_run()
        pass_state.call, pass_state.hooks, pass_state.at_hook = call, pass_state.hooks + 1, pass_state.forward_pass
        if pass_state.saved:  # the hook may run the model, which saves other values at the same sites
            pass_state.saved, pass_state.edited = pass_state.saved.copy(), pass_state.edited.copy()
        return action.invoke(given, action.point)
    except (StopRecomputation, NonFiniteError):  # no failures: torch has recomputed all that it needs; what was sought
        raise
    except Exception as error:  # not swallowed: every error of a hook reaches the caller
        if action.point.permanent.raises_own and action.on_error != "skip":
            error.add_note(str(failures.raised(action, error)))
            raise
        raise failures.raised(action, error) from error  # not in a variable: that would be a reference cycle
    finally:
        pass_state.call, pass_state.hooks, pass_state.forward_pass, pass_state.at_hook = before
        pass_state.is_recomputing, pass_state.starts_with_grad = recomputed
        pass_state.saved, pass_state.edited = saved
        if in_region is not None:
            in_region.end(action)


def composed(action: Edit, *, is_replay: bool) -> Step:
    """The step of an edit, with what its options ask for around it."""
    step: Step = partial(replayed if is_replay else edit, action)
    if action.reach is not None:
        step = partial(at_positions, action, step)
    if action.point.only is not None:
        step = partial(only_call, action, step)
    return partial(skip_errors, action, step) if action.on_error == "skip" else step


def replayed(action: Edit, value: Any) -> Any:
    """What an edit did in the first run of a checkpointed region. A hook that only read is not called again."""
    if action.has_edited and action in checkpointing.acted_in_first_run():
        return edit(action, value)
    checkpointing.draw_again(action)
    if not action.has_passed_on:
        return value
    x = action.view.get(value)
    return action.passed_on(value, x, x)


def at_positions(action: Edit, step: Step, value: Any) -> Any:
    """For a hook at some positions only: it has fired once it has reached one of them."""
    fired, reach = action.fired, action.reach
    assert reach is not None
    value = step(value)
    action.fired = fired or reach.has_acted()
    action.why_not = None if action.fired else reach.why_not()
    if not pass_state.is_recomputing:
        reach.note(action.point)
    return value


def only_call(action: Edit, step: Step, value: Any) -> Any:
    """For a point such as `fc#1`: act at one call of the module."""
    if not pass_state.is_recomputing:
        action.times = (action.count.of(action.tap) or 0) + 1
    return step(value) if action.is_for_this_call() else value


def skip_errors(action: Edit, step: Step, value: Any) -> Any:
    """With `on_error="skip"`: drop the effect of a hook that fails, and continue."""
    try:
        return step(value)
    except HookError as failure:
        failures.skip(action, failure)
        return value

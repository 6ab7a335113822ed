"""Runs: a set of actions on a model's modules, from entering a `with` block until leaving it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch import nn

from hookline.engine._compiler import pausing
from hookline.engine._compiler.untraced import leave_compiled_code, untraced
from hookline.engine._gradients.checkpointing import is_first_run, is_second_run
from hookline.engine._inner import interception
from hookline.engine._inner.inner import InnerTap, scope_of
from hookline.engine._memory.outside import OwnedTensors, sharing
from hookline.engine._memory.snapshots import stop_sharing
from hookline.engine._reports.reports import (
    missed_by,
    not_current,
    report_elsewhere,
    report_missed,
    report_silent,
    report_skipped,
)
from hookline.engine._sharding.comparing import Compare, CompareInputs
from hookline.engine._sharding.split_values import processes
from hookline.engine._staying.pass_bounds import bounds
from hookline.engine._staying.permanent import PermanentHooks
from hookline.engine._staying.registration import Registration
from hookline.engine._torch.hooks_on_modules import hooks_after, hooks_before
from hookline.engine._torch.interrupts import cover_entry
from hookline.engine._torch.mode_stacks import count_function_modes
from hookline.engine._undo.blocks import UndoBlock
from hookline.engine._undo.modes import remove_ended
from hookline.engine.actions import Action, PointAction, numbers
from hookline.engine.helpers import with_needs
from hookline.engine.hook_actions import HookAction, acted_by, count_positions
from hookline.engine.order import Kind
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import Schedule, active
from hookline.engine.taps import Tap, acquire_all, has_foreign_hooks, lock, release_all
from hookline.errors import HookError, HooklineError


class Run(Schedule, UndoBlock):
    """The hooks of a `with` block, in the thread or task that entered it and no other.

    Everything is resolved and checked when it is created; entering attaches everything or nothing; leaving, in any way,
    detaches exactly what this run attached.
    """

    def __init__(
        self,
        root: nn.Module,
        actions: Iterable[Action],
        *,
        is_one_pass: bool = False,
        on_exit: Callable[[], None] | None = None,
        held: Callable[[], OwnedTensors] | None = None,
    ) -> None:
        self.errors: list[HookError] = []
        """The first error of each hook that is skipped when it fails."""
        self._swallowed: HookError | None = None
        # A single forward pass, as in `run_with_cache`, needs no actions at its beginning and end.
        self.is_one_pass = is_one_pass
        self._bounds: list[Action] = [] if is_one_pass else bounds(root, held=held)
        self._others = processes.get(root) if processes else None
        every = with_needs(actions, is_one_pass=is_one_pass)
        if self._others is not None:
            self._others.watch(every)
            every += [CompareInputs(root, every[:]), *([] if is_one_pass else [Compare(root, every[:])])]
        super().__init__([*self._bounds, *every])
        self._backward = [action for action in self.actions if action.dir == "bwd"]
        self._modules = {action.tap: action.module for action in self.actions}
        self._taps = {tap: module for tap, module in self._modules.items() if not tap.kind.is_inner}
        inner = [(module, type(tap)) for tap, module in self._modules.items() if isinstance(tap, InnerTap)]
        self._scopes = {scope_of(module): (module, tap_type) for module, tap_type in inner}
        self.root = root
        self._elsewhere: dict[nn.Module, str] = {}
        self._holders: set[int] = set()
        self._on_exit = on_exit
        self._depth = self._hooks = 0
        self.is_open = False
        itself = ref(self)
        for action in self.actions:
            action.owner = itself
        self._share_errors()
        if not is_one_pass:
            count_positions(self._hook_actions)

    @property
    def acted(self) -> dict[str, Counter[int | None]]:
        """At how many rows the edits at each point acted, by position of the text; also after leaving the context.

            >>> with model.hooks([("blocks.2.hook_resid_post", edits.scale(2.0, pos=last))]) as run:
            ...     model.generate(prompt, max_new_tokens=3)
            >>> run.acted
            {'blocks.2.hook_resid_post': Counter({14: 1, 15: 1, 16: 1})}

        Passes add up, and so do several edits at one point. Positions are counted in the text of each row, so padding
        is never among them; of images they are patches. Where a point has no positions, the key is None. A function
        without positions acts wherever it is called, whatever it returns; hooks that stay, and hooks of gradients, are
        not counted.
        """
        return acted_by(self._hook_actions)

    def set(self, actions: Sequence[Action]) -> None:
        """Replace all actions."""
        super().set(actions)
        self._at_points = [each for each in actions if isinstance(each, PointAction)]
        self._hook_actions = [each for each in self._at_points if isinstance(each, HookAction)]
        self._reaching = [each for each in self._hook_actions if each.reach is not None]
        self._registered = [each for each in self._hook_actions if type(each.registration) is not Registration]
        self._beginning = [each for each in actions if type(each).begin is not Action.begin]
        self._settling = [each for each in actions if type(each).settle is not Action.settle]
        self._reported = actions

    @untraced
    def __enter__(self) -> Self:
        leave_compiled_code()
        if self.is_open:
            raise HooklineError("this context is open already: make another one with hooks(…)")
        if self.errors:  # of an earlier use, whose caller may hold the list
            self.errors = []
            self._share_errors()
        for hook in self._registered:
            hook.registration.check_place(hook)
        for action in self._reported:
            action.fired = False
        for hook in self._reaching:
            hook.reach.clear()  # type: ignore[union-attr]
        for hook in self._hook_actions:
            if hook.tally is not None:
                hook.tally.clear()
        for action in self._beginning:
            action.begin()
        if self._others is not None and not self.is_one_pass:  # a single pass compares them when it begins
            self._others.begin(self.actions)
        if not self.is_one_pass and self._is_outermost():
            permanent = PermanentHooks.of(self.root)
            permanent.settle()
            permanent.forget_missed()
        self._depth, self._hooks = len(pass_state.interceptors), pass_state.hooks
        return self.begin()

    def _share_errors(self) -> None:
        for action in self._hook_actions:
            action.errors = self.errors

    @cover_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self.is_here:
            pass_state.hooks = self._hooks  # an interrupt on the way out of a hook may have left it counted
        try:
            self._end()
        except BaseException:
            self.end()
            raise
        if not self._bounds:
            self.end_forward(has_succeeded=kind is None)
        swallowed, self._swallowed = self._swallowed, None
        if self._others is not None:
            self._others.end(self.actions, error)
        if kind is None:
            if swallowed is not None:
                raise swallowed
            if self.errors:
                report_skipped(self.errors)
            self._report()

    def is_alone(self) -> bool:
        """Whether nobody else has hooks on its modules, now and when it was made: see `PointAction.is_late`."""
        for tap, module in self._modules.items():
            hooks = hooks_before(module) if tap.kind is Kind.INPUT else hooks_after(module)
            if tap.late or (hooks and has_foreign_hooks(module, tap.kind)):
                return False
        return True

    def modules(self) -> Iterable[nn.Module] | None:
        """The modules that it depends on; None if there is a derived point, which may depend on any others."""
        is_derived = any(each.is_derived or each.point.site.effects for each in self._at_points)
        return None if is_derived else self._modules.values()

    @property
    def is_held(self) -> bool:
        """Whether it is attached, or has to be attached again for a checkpoint."""
        return bool(self._holders)

    def renew(self) -> None:
        """Prepare for another use, as if it had been made now."""
        self.count.forget()
        for action in self.actions:
            action.order = next(numbers)

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """Call the model itself in this run, and return its output."""
        with sharing(self.root, inputs):
            return self.root(**inputs)

    def open(self) -> Self:
        """Attach everything."""
        if not self._depth and count_function_modes():
            remove_ended()
        active.set((*[run for run in active.get() if run.is_open], self))
        self.retain(self)
        pass_state.starts_with_grad = torch.is_grad_enabled() or is_first_run()
        self.count.open()
        self.is_open = True
        return self

    def is_on(self, root: nn.Module) -> bool:
        """Whether it is a run of this model."""
        return self.root is root

    def close(self) -> None:
        """Detach everything. Safe to call twice."""
        self.is_open = False
        # Not a reset to what it was before: contexts may be left in another order than they were entered.
        active.set(tuple([run for run in active.get() if run is not self]))
        if len(pass_state.interceptors) > self._depth and self.is_here:
            interception.stop(self._depth)
        for action in self._backward:
            action.end_pass()
        self.release(self)
        clear_state()
        if self._on_exit is not None:
            self._on_exit()

    def retain(self, holder: object) -> None:
        """Stay attached to the modules for `holder`."""
        with pausing.tracing_lock(), lock:
            self._holders.add(id(holder))
            pausing.pause(self)
            self.attach()

    def release(self, holder: object) -> None:
        """Undo `retain`; without holders every module is as it was."""
        with pausing.tracing_lock(), lock:
            self._holders.discard(id(holder))
            if not self._holders:
                self.detach()
                pausing.resume(self)

    def attach(self) -> None:
        """Attach the taps to the modules."""
        acquire_all(self._taps, self)
        for scope, (module, tap_type) in self._scopes.items():
            scope.acquire(module, tap_type, id(self))

    def detach(self) -> None:
        """Undo `attach`. Safe to call twice."""
        release_all(self._taps, self)
        for scope, (module, _) in self._scopes.items():
            scope.release(module, id(self))

    def note(self, failure: HookError) -> None:
        """A hook has failed in the forward pass going on."""
        if self in active.get():
            self.count.here().failure = failure

    def end_forward(self, *, has_succeeded: bool) -> None:
        """End a forward pass. If a hook failed in it and it continued, the model swallowed the error."""
        calls = self.count.here()
        if has_succeeded and calls.failure is not None:
            self._swallowed = calls.failure
        calls.failure = None
        for action in self._backward if not calls.passes_on else ():
            action.end_pass()

    def note_elsewhere(self, where: nn.Module | Tap) -> None:
        """A module was called in a thread that does not have this run, in no forward pass of the whole model there."""
        module = self._modules[where] if isinstance(where, Tap) else where
        self._elsewhere[module] = threading.current_thread().name

    def _report(self) -> None:
        for action in self._settling:
            action.settle()
        if self._elsewhere:
            report_elsewhere(self._elsewhere, self.root)
            self._elsewhere = {}
        if is_second_run():
            return  # opened in a checkpointed region: the run that was opened there first acts, and has reported
        silent = [each for each in self._at_points if not each.fired and each.must_fire]
        if silent:
            report_silent(silent, has_run=not self._bounds or self._bounds[0].fired)
        missed = missed_by(self._reaching) if self._reaching else []
        if not self.is_one_pass:
            self._report_replaced()
            if self._is_outermost():
                missed += PermanentHooks.of(self.root).missed()
        if missed:
            report_missed(missed)

    def _report_replaced(self) -> None:
        """Warn of hooks that have fired, but whose module has been replaced since."""
        attached = PermanentHooks.of(self.root).attached() or {}
        there = {module for each in (self.root, *attached.values()) for module in each.modules()}
        gone = [each for each in self._hook_actions if each.fired and each.module not in there]
        report_silent(gone, has_run=True, why={each: not_current(each) for each in gone})

    def _is_outermost(self) -> bool:
        """Whether it, a context of several passes, is in no other: it reports on permanent hooks when it ends."""
        return all(run.is_one_pass for run in open_runs() if run is not self)


def open_runs() -> tuple[Schedule, ...]:
    """The open runs of this thread or task. Runs that were left in another thread are removed."""
    runs = active.get()
    if False not in [run.is_open for run in runs]:
        return runs
    active.set(tuple(run for run in runs if run.is_open))
    return active.get()


def clear_state() -> None:
    """Drop what only a run needs, if none is open in this thread."""
    if not (pass_state.hooks or (active.get() and open_runs())):
        pass_state.saved.clear()
        pass_state.edited.clear()
        pass_state.forward_pass = None
        pass_state.sent.clear()
        pass_state.copies.clear()
        stop_sharing()

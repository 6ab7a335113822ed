"""Runs: a set of actions on a model's modules, from the moment it is entered until it is left."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self
from weakref import ref

import torch
from torch import nn

from hookline.engine import compiling
from hookline.engine.actions import Action, HookAction, PointAction, bounds
from hookline.engine.blocks import Block, covered
from hookline.engine.derived import with_needs
from hookline.engine.inner import stop_intercepting, sweep
from hookline.engine.permanent import standing_of
from hookline.engine.snapshots import stop_sharing
from hookline.engine.taps import Routes, Tap, active, lock, now
from hookline.errors import HookError, HooklineError, NeverFiredWarning, SkippedHookWarning, describe, users_level


class Run(Routes, Block):
    """What is hooked while a `with` block lasts, in the thread or task that entered it and no other.

    Everything is resolved and checked when it is made; entering attaches all of it or nothing; leaving, by whatever
    way, takes off exactly what this run put on.
    """

    def __init__(
        self,
        root: nn.Module,
        actions: Iterable[Action],
        *,
        is_one_pass: bool = False,
        on_exit: Callable[[], None] | None = None,
    ) -> None:
        self.errors: list[HookError] = []
        """What went wrong in hooks that are to be skipped when they fail: the first error of each."""
        self._swallowed: HookError | None = None
        # Where there is one forward pass only, as for `run_with_cache`, nobody need look out for its beginning and end.
        self.is_one_pass = is_one_pass
        self._bounds: list[Action] = [] if is_one_pass else bounds(root)
        super().__init__([*self._bounds, *with_needs(actions)])
        self._backward = [action for action in self.actions if action.dir == "bwd"]
        self._modules = {action.tap: action.module for action in self.actions}
        self.root = root
        self._elsewhere: dict[Tap, str] = {}
        self._holders: set[int] = set()
        self._on_exit = on_exit
        self._depth = self._hooks = 0
        self.is_open = False
        itself = ref(self)
        for action in self.actions:
            action.owner = itself
        self._share_errors()

    def __enter__(self) -> Self:
        if self.is_open:
            raise HooklineError("this context is open already: make another one with hooks(…)")
        if self.errors:  # of an earlier time; whoever has them keeps them
            self.errors = []
            self._share_errors()
        for action in self.actions:
            if isinstance(action, HookAction):
                action.check_place()
        for action in self.actions:
            action.begin()
        if self._is_outermost():
            standing = standing_of(self.root)
            standing.settle()
            standing.forget_missed()
        self._depth, self._hooks = len(now.watches), now.hooks
        return self.begin()

    def _share_errors(self) -> None:
        for action in self.actions:
            if isinstance(action, HookAction):
                action.errors = self.errors

    @covered
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self.is_here:
            now.hooks = self._hooks  # an interrupt on the way out of a hook may have left it counted
        try:
            self._end()
        except BaseException:
            self.end()
            raise
        if not self._bounds:
            self.end_forward(has_succeeded=kind is None)
        swallowed, self._swallowed = self._swallowed, None
        if kind is None:
            if swallowed is not None:
                raise swallowed
            report_skipped(self.errors)
            self._report()

    def open(self) -> Self:
        """Attach everything."""
        if not now.watches and torch._C._len_torch_function_stack():
            sweep()
        self.retain(self)
        now.starts_with_grad = torch.is_grad_enabled()
        active.set((*(run for run in active.get() if run.is_open), self))
        self.count.open()
        self.is_open = True
        return self

    def is_on(self, root: nn.Module) -> bool:
        """Whether it is a run of this model."""
        return self.root is root

    def close(self) -> None:
        """Undo everything; doing so twice does no harm."""
        self.is_open = False
        # Not a reset to what it was before: contexts may be left in another order than they were entered.
        active.set(tuple(run for run in active.get() if run is not self))
        if self.is_here:
            stop_intercepting(self._depth)
        self._end_pass()
        self.release(self)
        let_go()
        if self._on_exit is not None:
            self._on_exit()

    def retain(self, holder: object) -> None:
        """Stay on the modules for `holder`."""
        with compiling.tracing_lock(), lock:
            self._holders.add(id(holder))
            compiling.pause(self)
            for tap, module in self._modules.items():
                tap.acquire(module, self)

    def release(self, holder: object) -> None:
        """Undo `retain`; without holders every module is as before."""
        with compiling.tracing_lock(), lock:
            self._holders.discard(id(holder))
            if not self._holders:
                for tap, module in self._modules.items():
                    tap.release(module, self)
                compiling.resume(self)

    def note(self, failure: HookError) -> None:
        """A hook has failed in the forward pass going on."""
        if self in active.get():
            self.count.here().failure = failure

    def end_forward(self, *, has_succeeded: bool) -> None:
        """A forward pass is over. If a hook failed in it and it went on all the same, the model swallowed the error."""
        calls = self.count.here()
        if has_succeeded and calls.failure is not None:
            self._swallowed = calls.failure
        calls.failure = None
        if not self.count.here().is_on():
            self._end_pass()

    def _end_pass(self) -> None:
        for action in self._backward:
            action.end_pass()

    def note_elsewhere(self, tap: Tap) -> None:
        """A module was called in a thread that does not have this run, in no forward pass of the whole model there."""
        self._elsewhere[tap] = threading.current_thread().name

    def _report(self) -> None:
        for action in self.actions:
            action.settle()
        if self._elsewhere:
            report_elsewhere({self._modules[tap]: thread for tap, thread in self._elsewhere.items()}, self.root)
            self._elsewhere = {}
        silent = [action for action in self.actions if not action.fired]
        if silent:
            wanted = [action for action in silent if isinstance(action, PointAction) and action.must_fire]
            report_silent(wanted, has_run=all(bound.fired for bound in self._bounds))
        self._report_replaced()
        fired = [action for action in self.actions if action.fired and isinstance(action, HookAction)]
        missed = [(action, told) for action in fired if action.missed and (told := action.missed.message())]
        report_missed(missed + (standing_of(self.root).missed() if self._is_outermost() else []))

    def _report_replaced(self) -> None:
        """Warn of hooks that have fired, but whose module has been replaced since."""
        if self.is_one_pass:
            return
        there = set(self.root.modules())
        gone = [each for each in self.actions if isinstance(each, HookAction) and each.fired]
        gone = [each for each in gone if each.module not in there]
        report_silent(gone, has_run=True, why={each: not_current(each) for each in gone})

    def _is_outermost(self) -> bool:
        """Whether it is a context of several passes, and in no other: what stays is reported when it is over."""
        return not self.is_one_pass and all(run.is_one_pass for run in open_runs() if run is not self)


def open_runs() -> tuple[Routes, ...]:
    """The runs going on in this thread or task. One that was left in another thread is struck off."""
    runs = active.get()
    if all(run.is_open for run in runs):
        return runs
    active.set(tuple(run for run in runs if run.is_open))
    return active.get()


def let_go() -> None:
    """Keep nothing alive that only a run needs, if none is going on in this thread."""
    if not open_runs() and not now.hooks:
        now.kept.clear()
        now.worked_out.clear()
        now.passing = None
        now.sent.clear()
        stop_sharing()


def report_silent(
    actions: Iterable[PointAction], *, has_run: bool, why: Mapping[PointAction, str] | None = None
) -> None:
    """Warn that these actions never fired, and say why."""
    silent = list(actions)
    if not silent:
        return
    known = why or {}
    lines = [f"  {_label(action)}: {known.get(action) or _reason(action, has_run=has_run)}" for action in silent]
    text = f"{len(silent)} hook{'s' if len(silent) > 1 else ''} never fired:\n" + "\n".join(lines)
    warnings.warn(text, NeverFiredWarning, stacklevel=users_level())


def report_elsewhere(calls: Mapping[nn.Module, str], root: nn.Module) -> None:
    """Warn of calls in other threads, at which the hooks of a run were not called."""
    names = {module: name for name, module in root.named_modules()}
    lines = [f"  {names.get(module, '')!r} ({type(module).__name__}) in {thread}" for module, thread in calls.items()]
    text = (
        "modules with hooks were called in another thread too, where the hooks were not called:\n"
        + "\n".join(lines)
        + "\nHooks belong to the thread that opened the run. If the model starts threads itself, it can start them "
        "with contextvars.copy_context().run"
    )
    warnings.warn(text, NeverFiredWarning, stacklevel=users_level())


def report_missed(missed: list[tuple[HookAction, str]]) -> None:
    """Warn of hooks that fired, but not at all the positions they are for."""
    if missed:
        lines = [f"  {_label(action)}: {told}" for action, told in missed]
        text = "hooks did not come to all of their positions:\n" + "\n".join(lines)
        warnings.warn(text, NeverFiredWarning, stacklevel=users_level())


def report_skipped(errors: Iterable[HookError]) -> None:
    """Warn of hooks that failed and whose effect was dropped."""
    for error in errors:
        text = f"{error}. Its effect was dropped, and the run went on." + (
            f" It failed {error.times} times." if error.times > 1 else ""
        )
        warnings.warn(text, SkippedHookWarning, stacklevel=users_level())


def _label(action: PointAction) -> str:
    what = describe(action.hook) if isinstance(action, HookAction) else "the cache"
    return f"{what} at {action.point.name!r}"


def _reason(action: PointAction, *, has_run: bool) -> str:
    if action.why_not is not None:
        return action.why_not
    if not has_run:
        return "no forward pass of the model ran"
    if action.fired:
        return not_current(action)
    if action.point.site.kind.is_inner:
        return (
            f"its module ({type(action.module).__name__}) was not called, or computes attention where it cannot be "
            f"looked into, as flash attention does: model.set_attn_implementation('sdpa') or 'eager'"
        )
    if action.point.only is not None:
        return f"its module was not called for the {action.point.only + 1}. time"
    return f"its module ({type(action.module).__name__}) was not called in this forward pass"


def not_current(action: PointAction) -> str:
    """The reason of a hook that stands at a module which was replaced."""
    return f"its module ({type(action.module).__name__}) is no longer in the model by that name: add the hook anew"

"""Standing hooks: those that stay from run to run, for everybody, until they are removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, finalize, ref

from torch import nn

from hookline.engine import compiling
from hookline.engine.actions import HookAction, bounds
from hookline.engine.blocks import surely
from hookline.engine.derived import with_needs
from hookline.engine.taps import Calls, Count, Routes, Tap, lock, now
from hookline.errors import HookError

if TYPE_CHECKING:
    from hookline.engine.points import HookPoint


class _StandingCalls(Calls):
    """Standing hooks are for every call, also of a module by itself, where calls cannot be counted."""

    def __init__(self, *, is_home: bool = False) -> None:
        super().__init__(is_home=is_home)
        self.passes = 0
        self.told: WeakKeyDictionary[HookAction, int] = WeakKeyDictionary()

    def begin(self, tap: Tap, root: nn.Module) -> None:
        """One pass more, unless it is inside another."""
        super().begin(tap, root)
        self.passes += len(self.passes_on) == 1

    def is_news(self, hook: HookAction) -> bool:
        """Whether it is the first time in this run that something is told of `hook`.

        A run is a forward pass of the whole model, or all those of one generation; a module by itself is in none.
        """
        if not self.is_on():
            return True
        earlier = now.passing.number if now.passing is not None else 0
        before, self.told[hook] = self.told.get(hook), self.passes
        return before is None or before < self.passes - earlier


class _User:
    """Stands for a set of standing hooks, and outlives it."""


class Standing(Routes):
    """The standing hooks of one model, on its modules while there is at least one."""

    raises_own = False
    """Whether an exception that a hook of this model raises reaches the caller as it is, not as a `HookError`."""

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self._hooks: list[HookAction] = []
        self._is_settled = True
        self._joined: list[HookAction] = []
        self._tapped: dict[Tap, nn.Module] = {}
        self.past_errors: list[HookError] = []
        """Of registered hooks that are no longer there."""
        self._user: _User | None = None
        self.root = ref(root) if root is not None else lambda: None

    def new_count(self) -> Count:
        """Each thread for itself, and none of them at home."""
        return Count(_StandingCalls)

    def is_news(self, hook: HookAction) -> bool:
        """Whether it is the first time in the run going on that something is told of `hook`."""
        calls = cast("_StandingCalls", self.count.here())
        return calls.is_news(hook)

    def note(self, failure: HookError) -> None:
        """A hook has failed; if that is in a forward pass of the whole model, the end of the pass looks at it."""
        if (calls := self.count.here()).is_on():
            calls.failure = failure

    def hooks(self) -> list[HookAction]:
        """The hooks, also those that are disabled, in the order in which they fire."""
        return sorted(self._hooks, key=lambda hook: hook.order)

    def forget_missed(self) -> None:
        """A run of several passes begins in this thread: no hook has missed a position in it."""
        for hook in self._hooks:
            if hook.missed is not None:
                hook.missed.clear()

    def missed(self) -> list[tuple[HookAction, str]]:
        """The hooks that fired in this run, but not at all of their positions, and which they missed."""
        active = [hook for hook in self.hooks() if hook.fired and hook.is_enabled()]
        return [(hook, told) for hook in active if hook.missed is not None and (told := hook.missed.message())]

    def add(self, hook: HookAction) -> None:
        """Add a hook, or leave nothing of it."""
        hook.check_place()
        try:
            with compiling.tracing_lock(), lock:
                self._change([*self.hooks(), hook])
        except BaseException:
            self.remove(lambda other: other is hook)
            raise

    def remove(self, unwanted: Callable[[HookAction], bool]) -> None:
        """Remove every hook for which `unwanted` is true, even if an interrupt arrives meanwhile."""
        surely(partial(self._remove, unwanted))

    def _remove(self, unwanted: Callable[[HookAction], bool]) -> None:
        with compiling.tracing_lock(), lock:
            self._change([hook for hook in self.hooks() if not unwanted(hook)])

    def refresh(self) -> None:
        """A hook was enabled or disabled: disabled ones are taken off the modules."""
        with compiling.tracing_lock(), lock:
            self._change(self.hooks())

    def move_to(self, other: Standing) -> None:
        """Hand all hooks over."""
        if other is not self and (hooks := self.hooks()):
            with compiling.tracing_lock(), lock:
                both, none = [*other.hooks(), *hooks], list[HookAction]()
                # No call between these, so no interrupt: every hook is in one of the two.
                self._is_settled = other._is_settled = False
                other._hooks, self._hooks = both, none
                self.settle()
                other.settle()

    def _change(self, hooks: list[HookAction]) -> None:
        self._is_settled = False
        self._hooks = hooks
        self.settle()

    def settle(self) -> None:
        """Bring the modules in line with the hooks, after a change or after one that an interrupt ended early.

        What is put somewhere is noted before, and what is taken away is struck off after: doing all of this again, from
        wherever it was left, comes to the same.
        """
        if self._is_settled:
            return
        with compiling.tracing_lock(), lock:
            self._settle_hooks()
            active = [hook for hook in self._hooks if hook.is_enabled()]
            actions, root = with_needs(active), self.root()
            if root is not None and active:
                actions += bounds(root)
            self.set(actions)
            self._settle_taps({action.tap: action.module for action in actions})
            if self._user is None:
                self._user = _User()
                finalize(self, compiling.resume, self._user)  # also if the model is freed, hooks and all
            (compiling.pause if actions else compiling.resume)(self._user)
            self._is_settled = True

    def _settle_hooks(self) -> None:
        for hook in [each for each in self._joined if each not in self._hooks]:
            hook.leave(self)
            errors = hook.errors if hook.registered is not None else []
            self.past_errors += [error for error in errors if error not in self.past_errors]
            self._joined.remove(hook)
        for hook in self._hooks:
            if hook not in self._joined:
                self._joined.append(hook)
            hook.join(self)

    def _settle_taps(self, wanted: dict[Tap, nn.Module]) -> None:
        for tap, module in wanted.items():
            if self not in tap.standing:
                self._tapped[tap] = module
                tap.acquire(module, self)
                tap.standing = (*tap.standing, self)
        for tap, module in list(self._tapped.items()):
            if tap not in wanted:
                tap.standing = tuple(other for other in tap.standing if other is not self)
                tap.release(module, self)
                self._tapped.pop(tap, None)


def keep(hooks: Sequence[tuple[HookPoint, HookAction]]) -> Callable[[], None]:
    """Add standing hooks at their points, all of them or none. Returns the function that removes them."""
    actions = [action for _, action in hooks]

    def remove() -> None:
        for standing in dict.fromkeys(point.standing for point, _ in hooks):
            standing.remove(lambda other: other in actions)

    undo = partial(surely, remove)
    try:
        for point, action in hooks:
            point.standing.add(action)
    except BaseException:
        undo()
        raise
    return undo


_standings: WeakKeyDictionary[nn.Module, ref[Standing]] = WeakKeyDictionary()


def standing_of(root: nn.Module) -> Standing:
    """The standing hooks of this model: the same however often it is wrapped."""
    with lock:
        known = _standings.get(root, lambda: None)()
        if known is None:
            known = Standing(root)
            _standings[root] = ref(known)
        return known

"""Permanent hooks: they stay from run to run, for every thread, until they are removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self, cast
from weakref import WeakKeyDictionary, WeakMethod, finalize, ref

from torch import nn

from hookline.engine._compiler import pausing
from hookline.engine._compiler.untraced import leave_compiled_code, untraced
from hookline.engine._reports.reports import missed_by
from hookline.engine._sharding.comparing import Compare, CompareInputs
from hookline.engine._sharding.split_values import processes
from hookline.engine._staying.pass_bounds import bounds
from hookline.engine._undo.blocks import UndoBlock, run_twice_on_interrupt
from hookline.engine.actions import Action
from hookline.engine.calls import Calls, Count, running_modules
from hookline.engine.derived import Effect
from hookline.engine.helpers import Send, with_needs
from hookline.engine.hook_actions import HookAction, acted_by, count_positions
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import Schedule
from hookline.engine.taps import Tap, lock
from hookline.errors import HookError, describe

if TYPE_CHECKING:
    from hookline.engine.points import HookPoint


class _PermanentCalls(Calls):
    """The calls that permanent hooks see. Calls of a module by itself, outside a pass, have no number."""

    def __init__(self, *, is_home: bool = False) -> None:
        super().__init__(is_home=is_home)
        self.passes = 0
        self.reported: WeakKeyDictionary[HookAction, int] = WeakKeyDictionary()

    def begin(self, tap: Tap, root: nn.Module) -> None:
        """Begin a pass; one inside another does not count."""
        super().begin(tap, root)
        self.passes += len(self.passes_on) == 1

    def is_news(self, hook: HookAction) -> bool:
        """Whether nothing was reported about `hook` in this run yet.

        A run is a forward pass of the whole model, or all passes of one generation; a module by itself is in none.
        """
        if not self.is_on():
            return True
        earlier = pass_state.forward_pass.number if pass_state.forward_pass is not None else 0
        before, self.reported[hook] = self.reported.get(hook), self.passes
        return before is None or before < self.passes - earlier


class _User:
    """Identifies a set of permanent hooks to `compiling`, and outlives it."""


class PermanentHooks(Schedule):
    """The permanent hooks of one model, on its modules while there is at least one."""

    raises_own = False
    """Whether an exception of a hook of this model reaches the caller unchanged, not as a `HookError`."""

    attached: Callable[[], Mapping[str, nn.Module] | None] = staticmethod(lambda: None)
    """Returns the modules that the model calls without having them as submodules, by path. They may refer to it."""
    _by_root: ClassVar[WeakKeyDictionary[nn.Module, ref[PermanentHooks]]] = WeakKeyDictionary()

    @classmethod
    def of(cls, root: nn.Module) -> PermanentHooks:
        """The permanent hooks of this model: one set, however often the model is wrapped."""
        with lock:
            hooks = cls._by_root.get(root, lambda: None)()
            if hooks is None:
                hooks = PermanentHooks(root)
                cls._by_root[root] = ref(hooks)
            return hooks

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self._hooks: list[HookAction] = []
        self._is_settled = True
        self._joined: dict[HookAction, None] = {}
        self._tapped: dict[Tap, nn.Module] = {}
        self._places: dict[object, Action] = {}
        self._users: Counter[object] | None = None
        """How many hooks need each of the other actions; None until it is asked for."""
        self.past_errors: list[HookError] = []
        """Skipped errors of registered hooks that were removed."""
        self._user: _User | None = None
        self.root = ref(root) if root is not None else lambda: None

    def new_count(self) -> Count:
        """Where calls are counted: in each thread separately."""
        return Count(_PermanentCalls)

    def is_news(self, hook: HookAction) -> bool:
        """Whether nothing was reported about `hook` in the current run yet."""
        calls = cast("_PermanentCalls", self.count.here())
        return calls.is_news(hook)

    def note(self, failure: HookError) -> None:
        """A hook has failed; if that is in a forward pass of the whole model, the end of the pass looks at it."""
        if (calls := self.count.here()).is_on():
            calls.failure = failure

    def hooks(self) -> list[HookAction]:
        """The hooks, also those that are disabled, in the order in which they fire."""
        return sorted(self._hooks, key=lambda hook: hook.order)

    def forget_missed(self) -> None:
        """Begin a run of several passes in this thread, in which no hook has missed a position yet."""
        for hook in self._hooks:
            if hook.reach is not None:
                hook.reach.clear()

    def missed(self) -> list[tuple[HookAction, str]]:
        """The hooks that fired in this run, but not at all of their positions, with a message about these."""
        enabled = [hook for hook in self.hooks() if hook.registration.is_enabled()]
        return missed_by(enabled)

    def add(self, *hooks: HookAction) -> None:
        """Add hooks, all of them or none."""
        try:
            with pausing.tracing_lock(), lock:
                for hook in hooks:
                    hook.registration.check_place(hook)
                is_growing = self._is_settled
                self._is_settled = False
                self._hooks = [*self._hooks, *hooks]
                self._is_settled = is_growing and self._grow(hooks)
                self.settle()
        except BaseException:
            self.remove({*hooks}.__contains__)
            raise

    def remove(self, unwanted: Callable[[HookAction], bool]) -> None:
        """Remove every hook for which `unwanted` is true, even if an interrupt arrives meanwhile."""
        run_twice_on_interrupt(partial(self._remove, unwanted))

    def _remove(self, unwanted: Callable[[HookAction], bool]) -> None:
        with pausing.tracing_lock(), lock:
            removed = dict.fromkeys(filter(unwanted, self._hooks))
            is_shrinking = self._is_settled
            self._is_settled = False
            self._hooks = [hook for hook in self._hooks if hook not in removed]
            self._is_settled = is_shrinking and self._shrink(removed)
            self.settle()

    def refresh(self) -> None:
        """A hook was enabled or disabled: disabled ones are taken off the modules."""
        with pausing.tracing_lock(), lock:
            self._change(self.hooks())

    def move_to(self, other: PermanentHooks) -> None:
        """Move all hooks to another model."""
        if other is not self and (hooks := self.hooks()):
            with pausing.tracing_lock(), lock:
                both, none = [*other.hooks(), *hooks], list[HookAction]()
                # There is no call between these lines, so no interrupt: every hook is in one of the two.
                self._is_settled = other._is_settled = False
                other._hooks, self._hooks = both, none
                self.settle()
                other.settle()

    def _change(self, hooks: list[HookAction]) -> None:
        self._is_settled = False
        self._hooks = hooks
        self.settle()

    def _grow(self, hooks: Sequence[HookAction]) -> bool:
        """Attach hooks that were added to settled ones. Returns whether that was all: sometimes others are affected.

        To settle all of them for each that is added would take long for a program that adds thousands, one by one.
        """
        if not self.actions or self.root() in processes:
            return False
        needed = with_needs([hook for hook in hooks if hook.registration.is_enabled()])
        known = [(action, self._places.get(_place(action))) for action in needed if isinstance(action, Send)]
        if any(isinstance(other, Send) and other.copies < action.copies for action, other in known):
            return False  # the one that is there does not copy, and now has to
        new = [action for action in needed if _place(action) not in self._places]
        self._join(hooks)
        self.extend(new)
        self._places |= {_place(action): action for action in new}
        if self._users is not None:
            self._users.update(_helper_places(hook for hook in hooks if hook in self._places))
        self._hook_taps({action.tap: action.module for action in new})
        return True

    def _shrink(self, removed: Iterable[HookAction]) -> bool:
        """Detach hooks that were removed from settled ones. Returns whether that was all: see `_grow`."""
        if all(hook not in self._places for hook in self._hooks):
            return False  # no hook is left that acts: nothing stays on the modules
        if self.root() in processes or self._helpers_in_use():
            return False
        gone = [hook for hook in removed if hook in self._places]
        if self._users is None:
            self._users = Counter(_helper_places([hook for hook in (*self._hooks, *gone) if hook in self._places]))
        left = Counter(_helper_places(gone))
        self._users.subtract(left)
        if any(isinstance(send := self._places[place], Send) and send.copies and self._users[place] for place in left):
            return False  # perhaps only the removed one had to copy
        places = [*gone, *(place for place in left if not self._users[place])]
        actions = dict.fromkeys(self._places.pop(place) for place in places)
        self._leave(removed)
        self.discard(actions)
        self._release_taps(tap for tap in {action.tap for action in actions} if tap not in self.actions_at)
        return True

    def settle(self) -> None:
        """Bring the modules in line with the hooks, after a change or after an interrupted one.

        Attachments are noted before they are made and struck off after they are removed, so doing all of this again,
        from wherever it stopped, has the same outcome.
        """
        if self._is_settled:
            return
        with pausing.tracing_lock(), lock:
            self._settle_hooks()
            active = [hook for hook in self._hooks if hook.registration.is_enabled()]
            actions, root = with_needs(active), self.root()
            if root is not None and active:
                actions += bounds(root, WeakMethod(self.settle))
                if root in processes:
                    processes[root].watch(active)
                    actions += [CompareInputs(root, active), Compare(root, active)]
            helpers = self._helpers_in_use()
            places = {_place(each) for each in helpers}
            actions = [*helpers, *(each for each in actions if _place(each) not in places)]
            self.set(actions)
            self._users = None
            self._places = {_place(action): action for action in actions}
            self._settle_taps({action.tap: action.module for action in actions})
            if self._user is None:
                self._user = _User()
                finalize(self, pausing.resume, self._user)  # also if the model is freed, hooks and all
            (pausing.pause if actions else pausing.resume)(self._user)
            self._is_settled = not helpers

    def _helpers_in_use(self) -> list[Action]:
        """The actions beside the hooks that a running pass still needs: hooks may be removed in the middle of one."""
        root = self.root()
        if not self.count.here().is_on() or all(module is not root for module in running_modules()):
            return []
        return [action for action in self.actions if not isinstance(action, HookAction)]

    def _settle_hooks(self) -> None:
        hooks = dict.fromkeys(self._hooks)
        self._leave([joined for joined in self._joined if joined not in hooks])
        self._join(hooks)

    def _leave(self, hooks: Iterable[HookAction]) -> None:
        for hook in hooks:
            hook.registration.leave(self)
            errors = hook.errors if hook.registration.id is not None else []
            self.past_errors += [error for error in errors if error not in self.past_errors]
            self._joined.pop(hook, None)

    def _join(self, hooks: Iterable[HookAction]) -> None:
        for hook in hooks:
            self._joined[hook] = None
            hook.registration.join(self)

    def _settle_taps(self, wanted: dict[Tap, nn.Module]) -> None:
        self._hook_taps(wanted)
        self._release_taps([tap for tap in self._tapped if tap not in wanted])

    def _release_taps(self, taps: Iterable[Tap]) -> None:
        for tap in taps:
            tap.permanent = tuple(other for other in tap.permanent if other is not self)
            tap.release(self._tapped[tap], self)
            self._tapped.pop(tap, None)

    def _hook_taps(self, wanted: dict[Tap, nn.Module]) -> None:
        for tap, module in wanted.items():
            if self not in tap.permanent:
                self._tapped[tap] = module
                tap.acquire(module, self)
                tap.permanent = (*tap.permanent, self)


def _place(action: Action) -> object:
    """Actions of one kind at one place do the same; each hook does something of its own."""
    if isinstance(action, HookAction):
        return action
    what = action.consequence if isinstance(action, Effect) else getattr(action, "site", None)
    return type(action), action.tap, what


def _helper_places(hooks: Iterable[HookAction]) -> Iterator[object]:
    """The places of the actions that each of these hooks needs beside it."""
    for hook in hooks:
        yield from {_place(action) for action in with_needs([hook]) if action is not hook}


class AddedHooks(UndoBlock):
    """Hooks that `add_hook` added: call it, call `remove()`, or use it in a `with` statement to remove them."""

    def __init__(self, hooks: Sequence[tuple[HookPoint, HookAction]]) -> None:
        self._by_model: dict[PermanentHooks, dict[HookAction, None]] = {}
        for point, action in hooks:
            self._by_model.setdefault(point.permanent, {})[action] = None
        try:
            for permanent, actions in self._by_model.items():
                permanent.add(*actions)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the hooks; those that were removed already are none."""
        run_twice_on_interrupt(self._remove)

    def _remove(self) -> None:
        for permanent, actions in self._by_model.items():
            permanent.remove(actions.__contains__)

    def __call__(self) -> None:
        """Remove the hooks."""
        self.remove()

    def open(self) -> Self:
        """Return the handle: the hooks are attached already."""
        return self

    def close(self) -> None:
        """Remove the hooks."""
        self.remove()

    def is_on(self, root: nn.Module) -> bool:
        """Whether they are hooks of this model."""
        return any(permanent.root() is root for permanent in self._by_model)

    def __repr__(self) -> str:
        hooks = [hook for actions in self._by_model.values() for hook in actions]
        return f"AddedHooks({', '.join(f'{describe(hook.hook)} at {hook.point.name!r}' for hook in hooks)})"


class StayingHooks:
    """The context of `hooks(reset_hooks_end=False)`: entering it adds the hooks, and leaving it keeps them."""

    def __init__(self, actions: list[HookAction], on_exit: Callable[[], None] | None) -> None:
        self._actions, self._on_exit = actions, on_exit
        self._acted: dict[str, Counter[int | None]] | None = None
        self.errors: list[HookError] = []
        for action in actions:
            action.errors = self.errors

    @untraced
    def __enter__(self) -> Self:
        leave_compiled_code()
        self._acted = None
        count_positions(self._actions)
        AddedHooks([(action.point, action) for action in self._actions])
        return self

    @property
    def acted(self) -> dict[str, Counter[int | None]]:
        """Where the edits acted until the context was left: see `Run.acted`."""
        return acted_by(self._actions) if self._acted is None else self._acted

    def __exit__(self, *_: object) -> None:
        self._acted = acted_by(self._actions)
        for action in self._actions:
            action.tally = None
        if self._on_exit is not None:
            self._on_exit()

"""Taps: the torch hooks that hookline attaches to modules, only while a run or a permanent hook needs them.

A tap is for one event of one module and is shared by all runs that listen there, in any thread. `events.py` has what
happens when torch calls it; this file attaches and detaches it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from hookline.engine._gradients import checkpointing
from hookline.engine._torch import need_basics
from hookline.engine._torch.frames import callers
from hookline.engine._torch.graph_tasks import current_graph_task
from hookline.engine._torch.hooks_on_modules import HookPlace, hooks_after, hooks_before, put_all, take_all
from hookline.engine._undo import blocks
from hookline.engine.calls import is_call_of
from hookline.engine.events import Listener
from hookline.engine.order import Kind
from hookline.errors import HooklineError

lock = blocks.interrupt_safe(threading.RLock())
"""Held while taps are attached to modules or detached."""


class Tap(Listener, HookPlace):
    """A torch hook on one event of one module."""

    def __init__(self, kind: Kind, *, late: bool = False) -> None:
        Listener.__init__(self, kind)
        need_basics()
        self.late = late
        # First, so that other people's hooks see what we changed; a late tap last, to see what they changed.
        is_first = not late and kind is not Kind.END
        HookPlace.__init__(self, is_before=kind is Kind.INPUT, is_first=is_first, is_always=kind is Kind.END)

    def tell_other_threads(self) -> None:
        """No run of this thread listens here."""
        tell_other_threads(self.users, self)

    def acquire(self, module: nn.Module, user: object) -> None:
        """Attach to `module` for `user`."""
        self.users.add(id(user))
        put_all([(self, module, self)])

    def release(self, module: nn.Module, user: object) -> None:
        """Undo `acquire`; without users the module is as it was. Safe to call twice."""
        self.users.discard(id(user))
        if not self.users:
            take_all([(self, module, self)])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HooklineError(
            "a model cannot be copied or pickled while hooks are on it: leave the context, or call "
            "reset_hooks(including_permanent=True), first"
        )


def acquire_all(taps: Mapping[Tap, nn.Module], user: object) -> None:
    """Attach taps to their modules for `user`, at once."""
    number = id(user)
    for tap in taps:
        tap.users.add(number)
    put_all([(tap, module, tap) for tap, module in taps.items()])


def release_all(taps: Mapping[Tap, nn.Module], user: object) -> None:
    """Undo `acquire_all`. Safe to call twice."""
    number = id(user)
    for tap in taps:
        tap.users.discard(number)
    take_all([(tap, module, tap) for tap, module in taps.items() if not tap.users])


def tell_other_threads(users: set[int], where: nn.Module | Tap) -> None:
    """If the model started this thread, a run of another one misses a call."""
    if current_graph_task() != -1 and checkpointing.runs_in_second_run() is not None:
        return  # a checkpointed region that recomputes
    for run in [each for user in list(users) if (each := blocks.find(user)) is not None]:
        is_in_pass = where is run.root or any(is_call_of(frame, run.root) for frame in callers())
        if not run.is_here and not is_in_pass:
            run.note_elsewhere(where)


_taps: WeakKeyDictionary[nn.Module, WeakValueDictionary[tuple[Kind, bool], Tap]] = WeakKeyDictionary()


def tap_on(module: nn.Module, kind: Kind, *, late: bool = False, make: type[Tap] = Tap) -> Tap:
    """The one tap for this event, attached or not."""
    with lock:
        if module not in _taps:
            _taps[module] = WeakValueDictionary()
        tap = _taps[module].get((kind, late))
        if tap is None:
            tap = _taps[module][kind, late] = make(kind, late=late)
        return tap


def taps_of(module: nn.Module) -> list[Tap]:
    """The taps of a module, attached or not."""
    return list(_taps.get(module, {}).values())


def has_foreign_hooks(module: nn.Module, kind: Kind) -> bool:
    """Whether somebody else has torch hooks on this event; hooks by which transformers captures outputs do not count.

    LLaVA reads captured outputs: a gradient must be that of the captured tensor, so our hooks come first.
    """
    if kind.is_inner:
        return False
    hooks = hooks_after(module) if kind is Kind.OUTPUT else hooks_before(module)
    return bool(hooks) and any(not _is_ours(hook) and not captures_outputs(hook) for hook in list(hooks.values()))


def _is_ours(hook: Any) -> bool:
    """Whether it is a tap, a hook that `_inner/inner.py` puts around a module, or one of a compiled run."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return type(hook) is Tap or module.startswith(("hookline.engine.", "hookline.compiled."))


def captures_outputs(hook: Any) -> bool:
    """Whether it is a hook by which transformers collects hidden states: a part of the model, which reads them."""
    return getattr(hook, "__name__", "") == "output_capturing_hook"

"""Torch hooks, put into a module's own tables of them.

Why: torch's `register_forward_hook` returns a handle, which an interrupt can lose, costs as much as everything else
at an event, and cannot put a hook before all others.
Needs: the tables `_forward_pre_hooks` and `_forward_hooks`, ordered by the time of the call; the flags beside them;
numbers of hooks from `RemovableHandle`; the tables of hooks on all modules of the process.
If it does not hold, no hook can be attached: the first raises an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _torch_module
from torch.utils.hooks import RemovableHandle

from hookline.engine._torch.proofs import insist, private

hooks_before, hooks_after = attrgetter("_forward_pre_hooks"), attrgetter("_forward_hooks")
"""The hooks of a module before and after its call, by number; they are called in this order."""
hooks_on_gradients = attrgetter("_backward_hooks")
"""The hooks on the gradients of a module or a tensor."""
keywords_before, keywords_after = attrgetter("_forward_pre_hooks_with_kwargs"), attrgetter("_forward_hooks_with_kwargs")
"""The numbers of the hooks that also get the keywords of the call."""
always_after = attrgetter("_forward_hooks_always_called")
"""The numbers of the hooks that are called even if the module raises."""
before_all, after_all, gradients_of_all = (
    private(_torch_module, "_global_forward_pre_hooks"),
    private(_torch_module, "_global_forward_hooks"),
    private(_torch_module, "_global_backward_hooks"),
)
"""The hooks on all modules of the process."""
has_hooks_on_all = private(_torch_module, "_has_any_global_hook")
next_number = partial(getattr, RemovableHandle, "next_id", None)
"""The number of the next hook that anybody registers."""


def new_number() -> int:
    """A number that torch assigns to no other hook."""
    return RemovableHandle(OrderedDict()).id


class HookPlace:
    """The place of one of our hooks in the tables of a module, under a number of its own.

    The same as torch's `register_forward_hook`, in an order in which an interrupt leaves nothing that `take_all` does
    not find.
    """

    def __init__(self, *, is_before: bool, is_first: bool, is_always: bool = False) -> None:
        self.number = new_number()
        self.is_first = is_first
        """Whether it is before all other hooks; otherwise it is behind those that are there when it is put."""
        self.table_of = hooks_before if is_before else hooks_after
        self.flags_of = [keywords_before] if is_before else [keywords_after, *([always_after] if is_always else [])]


def put_all(places: Iterable[tuple[HookPlace, nn.Module, Callable[..., Any]]]) -> None:
    """Attach hooks to modules. One loop, because it runs for every tap of every run."""
    for place, module, hook in places:
        table, number = place.table_of(module), place.number
        if number not in table:
            for flags_of in place.flags_of:
                flags_of(module)[number] = True
            table[number] = hook
            if place.is_first:
                table.move_to_end(number, last=False)
        elif not place.is_first:
            table.move_to_end(number)


def take_all(places: Iterable[tuple[HookPlace, nn.Module, Callable[..., Any]]]) -> None:
    """Detach hooks from modules. Safe to call twice."""
    for place, module, _ in places:
        place.table_of(module).pop(place.number, None)
        for flags_of in place.flags_of:
            flags_of(module).pop(place.number, None)


class _Raising(nn.Module):
    def forward(self, x: Any, **_kwargs: Any) -> Any:
        if x is None:
            raise KeyError
        return x


def probe() -> None:
    """Hooks in the tables are called, in their order, with what was requested."""
    module, calls = _Raising(), []

    def note(name: str) -> Any:
        return lambda _module, *rest: calls.append((name, len(rest)))

    first, foreign = note("before"), note("foreign")
    before = next_number()
    handle = module.register_forward_pre_hook(foreign)
    number = new_number()
    insist(before == handle.id < number < next_number(), "hooks are numbered one after the other")
    keywords_before(module)[number] = True
    hooks_before(module)[number] = first
    hooks_before(module).move_to_end(number, last=False)
    keywords_after(module)[number] = always_after(module)[number] = True
    hooks_after(module)[number] = note("after")
    module(torch.ones(1), key=1)
    insist(calls == [("before", 2), ("foreign", 1), ("after", 3)], f"hooks are called in order (found {calls})")
    calls.clear()
    with suppress(KeyError):
        module(None)
    insist(("after", 3) in calls, "a hook is called if its module raises")
    for table in (hooks_before, hooks_after, keywords_before, keywords_after, always_after):
        table(module).pop(number, None)
    handle.remove()
    calls.clear()
    module(torch.ones(1))
    insist(not calls, "a hook that was removed from the tables is not called")
    is_any = bool(before_all or after_all)
    insist(not is_any or has_hooks_on_all(), "torch says whether there are hooks on all modules")

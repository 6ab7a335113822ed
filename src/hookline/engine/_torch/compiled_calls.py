"""Calls of a module that go somewhere else: torch looks in an attribute for a compiled version of the module's call.

Why: a call that goes there runs no hook. So a module can be skipped, and recorded at a lower cost than by torch's
hooks.
Needs: torch reads `_compiled_call_impl` from the module's attributes in every call, and calls it instead of
`_call_impl`, from a frame in which the module is `self`.
If it does not hold, records are made by torch's hooks, which is slower; skipping a layer raises an error.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import nn

from hookline.engine._torch.bytecode import code_or_none
from hookline.engine._torch.frames import frame_at
from hookline.engine._torch.proofs import insist, once, private, requirement

ATTRIBUTE = "_compiled_call_impl"
"""The attribute that torch calls instead of a module and its hooks, if it is not None."""
call_with_hooks = attrgetter("_call_impl")


def traceable_call(module: nn.Module) -> Any:
    """`call_with_hooks`, as the compiler can trace it: it traces a module that another thread records."""
    return module._call_impl


"""The method of a module that runs it with its hooks."""
_WRAPPED = private(nn.Module, "_wrapped_call_impl")


def takes_detours(call: Any) -> bool:
    """Whether a class's `__call__` looks for a compiled version of the call before it runs hooks."""
    names = getattr(code_or_none(call), "co_names", ())
    return call is _WRAPPED or ("__call__" in names and "_call_impl" not in names)


@lru_cache(maxsize=512)
def looks_for_hooks(code: Any) -> bool:
    """Whether a function, or one inside it, mentions the attribute in which torch keeps hooks, or torch's own call."""
    if not isinstance(code, CodeType):
        return False
    is_found = any(name in (*code.co_names, *code.co_consts) for name in ("_forward_hooks", "_call_impl"))
    return is_found or any(map(looks_for_hooks, code.co_consts))


def probe() -> None:
    """A call goes where the attribute says, past all hooks, and back when it is removed."""
    module, x = nn.Identity(), torch.ones(1)
    calls: list[Any] = []
    module.register_forward_hook(lambda *_: calls.append("hook"))

    def instead(*args: Any, **kwargs: Any) -> str:
        calls.append(frame_at(1).f_locals.get("self"))
        return f"{len(args)} {len(kwargs)}"

    module.__dict__[ATTRIBUTE] = instead
    answer = module(x, key=1)
    insist(answer == "1 1" and calls == [module], "torch calls the attribute instead of the module and its hooks")
    insist(call_with_hooks(module)(x) is x and calls == [module, "hook"], "the module's own call runs its hooks")
    del module.__dict__[ATTRIBUTE]
    insist(module(x) is x and calls == [module, "hook", "hook"], "without the attribute, the module is called")
    insist(takes_detours(vars(nn.Module).get("__call__")), "torch's own `__call__` looks for the attribute")


can_detour = once(probe)
need_detours = requirement(probe)

"""Calls of a module that go somewhere else: torch looks in an attribute for a compiled version of the module's call.

Why: a call that goes there runs neither the module nor its hooks. So a module can be skipped.
Needs: torch reads `_compiled_call_impl` from the module's attributes in every call, and calls it instead of
`_call_impl`, from a frame in which the module is `self`.
If it does not hold, skipping a layer raises an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookline.engine._torch.frames import frame_at
from hookline.engine._torch.proofs import insist, requirement

ATTRIBUTE = "_compiled_call_impl"
"""The attribute that torch calls instead of a module and its hooks, if it is not None."""


def call_with_hooks(module: nn.Module) -> Any:
    """The method of a module that runs it with its hooks. A function, because the compiler may trace this."""
    return module._call_impl


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


need_detours = requirement(probe)

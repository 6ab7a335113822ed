"""The stacks of modes on which torch looks for who handles a function or an operator.

Why: an interrupt can skip the removal of a mode, which then acts for ever, and a mode must be removed from below
others.
Needs: functions that push, pop and show the modes of this thread, the last one on top.
If it does not hold, no hook can be attached: the first raises an error. Dispatch modes are tried by `hookline doctor`,
the matrix and a test only: torch imports its compiler when one acts, which takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.engine._torch.proofs import insist, private

__all__ = ["TorchDispatchMode", "TorchFunctionMode"]

function_modes = private(overrides, "_get_current_function_mode_stack")
count_function_modes = private(torch, "_C._len_torch_function_stack")
function_mode_at = private(torch, "_C._get_function_stack_at")
push_function_mode = private(torch, "_C._push_on_torch_function_stack")
pop_function_mode = private(torch, "_C._pop_torch_function_stack")
count_dispatch_modes = private(torch, "_C._len_torch_dispatch_stack")
dispatch_modes = private(_python_dispatch, "_get_current_dispatch_mode_stack")
push_dispatch_mode = private(torch, "_C._push_on_torch_dispatch_stack")
_pop_dispatch_mode = private(torch, "_C._pop_torch_dispatch_stack")


def pop_dispatch_mode() -> Any:
    """Remove the mode on top of the stack, and return it."""
    return _pop_dispatch_mode(None)


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "function" if func is torch.add else func(*args, **kwargs or {})


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {}) + 1


def probe() -> None:
    """A mode of either kind that is pushed acts, is on top, and does not act when it was popped."""
    probe_functions()
    x, dispatch = torch.ones(1), _Dispatch()
    push_dispatch_mode(dispatch)
    insist(dispatch_modes()[-1] is dispatch, "the last dispatch mode is on top")
    y = x + 1
    insist(pop_dispatch_mode() is dispatch and (x + 1).item() == 2, "a dispatch mode can be removed")
    insist(y.item() == 3, "a dispatch mode on the stack acts")


def probe_functions() -> None:
    """A function mode that is pushed acts, is on top, and does not act when it was popped."""
    x, function = torch.ones(1), _Function()
    push_function_mode(function)
    depth = count_function_modes()
    insist(torch.add(x, 1) == "function", "a function mode on the stack acts")
    insist(function_mode_at(depth - 1) is function is function_modes()[-1], "the last function mode is on top")
    insist(pop_function_mode() is function and count_function_modes() == depth - 1, "a function mode can be removed")

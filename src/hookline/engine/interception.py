"""Interception of torch functions inside a module while it runs.

A module computes its intermediate values with a few torch functions. While a run looks into a module, the calls of
those functions are intercepted, in this thread and this module only; `attention.py` and
`transformer/router.py` define what is intercepted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import _C, nn
from torch.overrides import TorchFunctionMode

from hookline.engine.modes import remove_ended

if TYPE_CHECKING:
    from hookline.engine.order import Kind
    from hookline.engine.taps import Tap


class FunctionInterceptor(TorchFunctionMode):
    """Intercepts every call of a torch function in one module."""

    kinds: ClassVar[tuple[Kind, ...]]
    """The inner events that it reports."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """The names of children in which nothing is intercepted."""
    captures: Sequence[Callable[[Any], None]] | None = None
    """What a run that only records does at each of the events, if it was alone when the module was called."""
    plain: ClassVar[frozenset[type[nn.Module]]] = frozenset()
    """Classes of children that call none of the functions that are intercepted."""

    @classmethod
    def ignored_in(cls, module: nn.Module) -> frozenset[str]:
        """The names of the children of a module in which nothing is intercepted."""
        return cls.ignored & module._modules.keys()

    def __init__(self, module: nn.Module, taps: Mapping[Kind, Tap]) -> None:
        super().__init__()
        self.module, self.taps = module, taps
        self.muted = 0  # how many ignored children are running; nothing is intercepted while any is
        self.is_over = False


class _Stack(threading.local):
    """The interceptors of the modules now running in this thread, innermost last."""

    def __init__(self) -> None:
        self.interceptors: list[FunctionInterceptor] = []


stack = _Stack()


def start(interceptor: FunctionInterceptor) -> None:
    """Intercept from now on."""
    stack.interceptors.append(interceptor)
    interceptor.__enter__()


def stop(depth: int) -> None:
    """End all interceptors except the outermost `depth`; some of their modules may have been interrupted."""
    while len(stack.interceptors) > depth:
        interceptor = stack.interceptors[-1]
        # Torch removes a mode from its stack while calling it; an interrupt at that moment restores the mode late, when
        # the traceback is freed. It must do nothing then.
        interceptor.is_over, interceptor.muted = True, 1
        if is_on_top(interceptor):
            _C._pop_torch_function_stack()
        else:
            remove_ended()
        stack.interceptors.pop()


def stop_in(module: nn.Module) -> None:
    """End the interceptor of `module` and those inside it."""
    mine = [depth for depth, each in enumerate(stack.interceptors) if each.module is module]
    if mine:
        stop(mine[-1])


def mute(module: nn.Module, more: int) -> None:
    """Enter (1) or leave (-1) a child of `module` that is ignored."""
    for interceptor in reversed(stack.interceptors):
        if interceptor.module is module:
            interceptor.muted += more
            return


def is_on_top(interceptor: FunctionInterceptor) -> bool:
    """Whether torch would call it first."""
    depth = _C._len_torch_function_stack()
    return depth > 0 and _C._get_function_stack_at(depth - 1) is interceptor


def unintercepted(function: Callable[[Any], Any], value: Any) -> Any:
    """Call `function` without interception: what hooks compute is not part of the model."""
    if not is_on_top(stack.interceptors[-1]):
        return function(value)  # in a nested hook, or under another mode
    mode = _C._pop_torch_function_stack()
    try:
        return function(value)
    finally:
        _C._push_on_torch_function_stack(mode)

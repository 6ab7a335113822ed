"""Interception of what a module computes with torch while it runs.

A module computes its intermediate values with a few torch functions. While a run looks into a module, the calls of
those functions are intercepted, in this thread and this module only; `attention.py`, `plain_attention.py` and
`transformer/experts.py` define what is intercepted. There are two ways:

  ModeInterceptor       a torch function mode: called for every torch function, even for reading a shape
  OperatorInterceptor   kernels of a few operators (`operators.py`): all other functions run as always, at no cost
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import nn
from torch.overrides import TorchFunctionMode, has_torch_function

from hookline.engine._inner import operators
from hookline.engine._torch.dispatch_keys import can_dispatch
from hookline.engine._torch.mode_stacks import (
    count_function_modes,
    function_mode_at,
    function_modes,
    pop_function_mode,
    push_function_mode,
)
from hookline.engine._undo.modes import remove_ended
from hookline.engine.pass_state import pass_state

if TYPE_CHECKING:
    from hookline.engine.order import Kind
    from hookline.engine.taps import Tap

    Arguments: TypeAlias = tuple[Any, dict[str, Any]]
    MakeInterceptor: TypeAlias = Callable[[nn.Module, Mapping[Kind, Tap], Arguments], "FunctionInterceptor"]


class FunctionInterceptor:
    """Intercepts calls of torch functions in one module."""

    kinds: ClassVar[tuple[Kind, ...]]
    """The inner events that it reports."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """The names of children in which nothing is intercepted."""
    plain: ClassVar[frozenset[type[nn.Module]]] = frozenset()
    """Classes of children that call none of the functions that are intercepted."""

    @classmethod
    def ignored_in(cls, module: nn.Module) -> frozenset[str]:
        """The names of the children of a module in which nothing is intercepted."""
        return cls.ignored & module._modules.keys()

    @classmethod
    def for_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MakeInterceptor:  # noqa: ARG003
        """What makes the interceptor of a call of a module with these arguments."""
        return cls

    def __init__(
        self, module: nn.Module, taps: Mapping[Kind, Tap], arguments: tuple[Any, dict[str, Any]] = ((), {})
    ) -> None:
        super().__init__()
        self.module, self.taps, self.arguments = module, taps, arguments
        self.muted = 0  # how many ignored children are running; nothing is intercepted while any is
        self.is_over = False

    def mute(self, more: int) -> None:
        """Enter (1) or leave (-1) a child in which nothing is intercepted."""
        self.muted += more

    def begin(self) -> None:
        """Intercept from now on."""
        raise NotImplementedError

    def end(self) -> None:
        """Undo `begin`; the module may have been interrupted."""
        raise NotImplementedError

    def without(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function, of whose calls none is intercepted."""
        raise NotImplementedError

    def has_other(self) -> bool:
        """Whether others see what is computed here: a second copy of hookline, or a mode for functions."""
        return False

    def check(self) -> None:
        """The module has returned: raise if what it computed is not what the points in it are."""


class NoInterceptor(FunctionInterceptor):
    """For a call of a module inside which there is nothing to intercept."""

    def __init__(
        self, module: nn.Module, taps: Mapping[Kind, Tap], arguments: tuple[Any, dict[str, Any]], *, why_not: str
    ) -> None:
        super().__init__(module, taps, arguments)
        for action in (action for tap in taps.values() for action in tap.actions()):
            action.why_not = why_not

    def begin(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def without(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function."""
        return function(*args, **kwargs)


class ModeInterceptor(FunctionInterceptor, TorchFunctionMode):
    """Intercepts every call of a torch function: torch calls `__torch_function__` instead."""

    def begin(self) -> None:
        """Put the mode on torch's stack."""
        self.__enter__()

    def mute(self, more: int) -> None:
        """Take the mode off the stack meanwhile: torch computes some things in one step only where no mode is on.

        Not from below a mode of somebody else, who expects to find theirs on top when they remove it.
        """
        super().mute(more)
        if self.muted and not self.is_over:
            above = takewhile(lambda mode: mode is not self, reversed(function_modes()))
            if all(isinstance(mode, ModeInterceptor) for mode in above):
                self.is_over = True
                remove_ended()
        elif self.is_over and not self.muted:
            self.is_over = False
            self.__enter__()

    def end(self) -> None:
        """Remove it."""
        # Torch removes a mode from its stack while calling it; an interrupt at that moment restores the mode late, when
        # the traceback is freed. It must do nothing then.
        self.is_over, self.muted = True, 1
        if self._is_on_top():
            pop_function_mode()
        else:
            remove_ended()

    def without(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the mode off the stack for this call."""
        if not self._is_on_top():
            return function(*args, **kwargs)  # in a nested hook, or under another mode
        mode = pop_function_mode()
        try:
            return function(*args, **kwargs)
        finally:
            push_function_mode(mode)

    def has_other(self) -> bool:
        """Whether another mode is for the same module, or for functions."""
        others = [mode for mode in function_modes() if mode is not self]
        return any(getattr(mode, "module", None) is self.module or _is_of_others(mode) for mode in others)

    def _is_on_top(self) -> bool:
        """Whether torch would call it first."""
        depth = count_function_modes()
        return depth > 0 and function_mode_at(depth - 1) is self


class OperatorInterceptor(FunctionInterceptor):
    """Intercepts the calls of some operators: their kernels call `operator` instead."""

    outer: OperatorInterceptor | None = None
    """The interceptor that its own calls reach, of a module that calls this one."""
    place: tuple[int, bool]
    """Where its module was called: see `operators`."""
    by_mode: ClassVar[type[ModeInterceptor]]
    """The same as a mode, for calls under modes of others (a default device) and of subclasses of tensors: both act
    before any operator, and would not see what hooks do."""

    @classmethod
    def for_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MakeInterceptor:
        """What makes the interceptor of a call of a module with these arguments."""
        is_seen = can_dispatch() and not has_torch_function((*args, *kwargs.values()))
        return cls if is_seen else cls.by_mode

    def operator(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of `func`, the torch function of the operator."""
        raise NotImplementedError

    def begin(self) -> None:
        """Turn the kernels on."""
        operators.push(self)

    def end(self) -> None:
        """Turn them off."""
        operators.remove(self)

    def without(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Turn the kernels off for this call."""
        return operators.without_kernels(function, args, kwargs)

    def has_other(self) -> bool:
        """Whether its own calls reach an interceptor of the same module, or a mode for functions."""
        if self.outer is not None and self.outer.module is self.module:
            return True
        return count_function_modes() > 0 and any(map(_is_of_others, function_modes()))


def _is_of_others(mode: Any) -> bool:
    """Whether it is no mode of torch itself (for a default device, say), and none of these."""
    return not (isinstance(mode, FunctionInterceptor) or type(mode).__module__.startswith("torch."))


def start(interceptor: FunctionInterceptor) -> None:
    """Intercept from now on."""
    pass_state.interceptors.append(interceptor)
    interceptor.begin()


def stop(depth: int) -> None:
    """End all interceptors except the outermost `depth`; some of their modules may have been interrupted."""
    while len(pass_state.interceptors) > depth:
        pass_state.interceptors[-1].end()
        pass_state.interceptors.pop()


def stop_in(module: nn.Module) -> FunctionInterceptor | None:
    """End the interceptor of `module` and those inside it. Returns that of the module."""
    depths = [depth for depth, each in enumerate(pass_state.interceptors) if each.module is module]
    if not depths:
        return None
    interceptor = pass_state.interceptors[depths[-1]]
    stop(depths[-1])
    return interceptor


def mute(module: nn.Module | None, more: int) -> None:
    """Enter (1) or leave (-1) a child of `module` that is ignored."""
    for interceptor in reversed(pass_state.interceptors):
        if interceptor.module is module:
            interceptor.mute(more)
            return


def unintercepted(function: Callable[[Any], Any], value: Any) -> Any:
    """Call `function` without interception: what hooks compute is not part of the model."""
    return pass_state.interceptors[-1].without(function, (value,), {})

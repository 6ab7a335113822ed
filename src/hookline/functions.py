"""Hook functions: what may be one, and how each is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn

from hookline.errors import InvalidHookError, describe

HookFunction: TypeAlias = Callable[..., Any]
Caller: TypeAlias = Callable[[Any, Any], Any]

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def caller(hook: HookFunction) -> Caller:
    """How to call `hook` with an activation and its point, decided once from its signature.

    A parameter called `hook` gets the point by name; a second parameter without default gets it by position; a
    hook with one parameter gets the activation alone. A second parameter *with* a default is the user's own
    (`lambda x, i=i: …`) and is left alone.
    """
    if not callable(hook):
        raise InvalidHookError(
            f"a hook must be callable as hook(activation) or hook(activation, hook), but {hook!r} is not callable"
        )
    style = _style_of(hook)
    if style == "keyword":
        return lambda activation, point: hook(activation, hook=point)
    if style == "position":
        return hook
    return lambda activation, _point: hook(activation)


_styles: dict[tuple[Any, ...], str] = {}


def _style_of(hook: HookFunction) -> str:
    """How the hook takes the point. Looking at a signature is slow; that of one function never changes."""
    if not isinstance(hook, FunctionType):
        return _style(hook)
    key = (hook.__code__, len(hook.__defaults__ or ()), *(hook.__kwdefaults__ or ()))
    if key not in _styles:
        _styles[key] = _style(hook)
    return _styles[key]


def _parameters(hook: HookFunction) -> list[inspect.Parameter] | None:
    """The parameters still open, or None for a built-in that does not tell."""
    target = hook.forward if isinstance(hook, nn.Module) else hook
    try:
        return list(inspect.signature(target).parameters.values())
    except ValueError:
        return None


def _style(hook: HookFunction) -> str:
    parameters = _parameters(hook)
    if parameters is None:
        return "alone"
    positional = [p for p in parameters if p.kind in _BY_POSITION]
    kinds = {p.kind for p in parameters}
    named = {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    takes_args = inspect.Parameter.VAR_POSITIONAL in kinds
    if not positional and not takes_args:
        raise InvalidHookError(f"hook {describe(hook)} takes no activation: it must accept hook(activation)")
    required = [p.name for p in positional[1:] if p.default is p.empty]
    required += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if "hook" in named:
        style, required = "keyword", [name for name in required if name != "hook"]
    elif required and required[0] in {p.name for p in positional}:
        style, required = "position", required[1:]
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        style = "keyword"
    else:
        style = "position" if takes_args else "alone"
    if required:
        raise InvalidHookError(
            f"hook {describe(hook)} is called as hook(activation, hook), and nothing is given for "
            f"{', '.join(map(repr, required))}. Bind it first: functools.partial(hook, {required[0]}=…). "
            f"(A torch hook's (module, input, output) becomes hook(output) at 'name', hook(input) at 'name.input'.)"
        )
    return style

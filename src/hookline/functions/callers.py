"""How a hook is called: with the activation alone, or with its point too, by position or as `hook=`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn

from hookline.errors import HooklineError, InvalidHookError, describe
from hookline.functions.signatures import code_of
from hookline.types import HookFunction

Caller: TypeAlias = Callable[[Any, Any], Any]


def caller(hook: HookFunction) -> Caller:
    """Return a function that calls `hook` with an activation and its point, chosen once from its signature.

    A parameter called `hook` gets the point by name; a second parameter without a default gets it by position; a hook
    with one parameter gets the activation alone. A second parameter *with* a default is the user's own
    (`lambda x, i=i: …`) and keeps its value.
    """
    refuse_class(hook)
    if not callable(hook):
        raise InvalidHookError(
            f"a hook must be callable as hook(activation) or hook(activation, hook), but {hook!r} is not callable"
        )
    return called_in_style(hook, call_style(hook))


def called_in_style(hook: HookFunction, style: str) -> Caller:
    """As `caller`, for a function whose `call_style` is known."""
    if style == "keyword":
        return lambda activation, point: hook(activation, hook=point)
    if style == "position":
        return hook
    return lambda activation, _point: hook(activation)


def refuse_class(hook: Any) -> None:
    """Raise if a class is given instead of a hook: its brackets were forgotten."""
    if isinstance(hook, type):
        name = getattr(hook, "kind", hook.__name__)
        raise InvalidHookError(f"{name} is a class, not a hook: make one, with {name}(…)")


_styles: dict[tuple[Any, ...], str] = {}


def call_style(hook: HookFunction) -> str:
    """How a hook takes the point: "keyword", "position" or "alone". Remembered: reading a signature is slow."""
    if not isinstance(hook, FunctionType):
        return _style(hook)
    key = (code_of(hook), len(hook.__defaults__ or ()), *(hook.__kwdefaults__ or ()))
    if key not in _styles:
        _styles[key] = _style(hook)
    return _styles[key]


def _style(hook: HookFunction) -> str:
    """How a hook takes the point: by "keyword", by "position", or not at all ("alone")."""
    try:
        signature = inspect.signature(hook.forward if isinstance(hook, nn.Module) else hook)
    except ValueError:  # a built-in function without a signature
        return "alone"
    if not binds(signature.bind_partial, None):
        raise InvalidHookError(f"hook {describe(hook)} takes no activation: it must accept hook(activation)")
    if binds(signature.bind, None, hook=None):
        return "keyword"
    parameters = signature.parameters.values()
    if binds(signature.bind, None) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return "alone"
    if binds(signature.bind, None, None):
        return "position"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each for each in list(parameters)[1:] if each.default is each.empty and each.kind not in variadic]
    names = [each.name for each in required if each.name != "hook"]
    raise InvalidHookError(
        f"a hook is called as hook(activation) or hook(activation, hook), but {describe(hook)} also requires "
        f"{', '.join(map(repr, names))}. Bind other arguments first: functools.partial(hook, {names[-1]}=…). Instead "
        f"of a torch hook(module, input, output), pass hook(output) at 'name', or hook(input) at 'name.input'."
    )


def binds(bind: Callable[..., Any], *args: None, **kwargs: None) -> bool:
    """Whether a signature accepts these arguments."""
    try:
        bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def check_on_error(given: str) -> None:
    """Raise unless it is one of the two words."""
    if given not in ("raise", "skip"):
        raise HooklineError(f'on_error must be "raise" or "skip", not {given!r}')

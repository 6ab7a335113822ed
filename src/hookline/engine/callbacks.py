"""Hook functions: what may be one, and how each is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn

from hookline.errors import HooklineError, InvalidHookError, describe

if TYPE_CHECKING:
    from hookline.engine.hook_actions import HookAction
    from hookline.engine.names import Points
    from hookline.engine.points import HookPoint

HookFunction: TypeAlias = Callable[..., Any]
OnError: TypeAlias = Literal["raise", "skip"]
Caller: TypeAlias = Callable[[Any, Any], Any]

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def caller(hook: HookFunction) -> Caller:
    """How to call `hook` with an activation and its point, decided once from its signature.

    A parameter called `hook` gets the point by name; a second parameter without default gets it by position; a
    hook with one parameter gets the activation alone. A second parameter *with* a default is the user's own
    (`lambda x, i=i: …`) and is left alone.
    """
    refuse_class(hook)
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


def refuse_class(hook: Any) -> None:
    """A class in a hook's place is one whose brackets were forgotten."""
    if isinstance(hook, type):
        name = getattr(hook, "kind", hook.__name__)
        raise InvalidHookError(f"{name} is a class, not a hook: make one, with {name}(…)")


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


class HookObject:
    """A hook that is more than a function: it makes the action that stands for it, wherever a hook is accepted."""

    on_error: OnError | None = None
    """What to do when it fails; None leaves that to the run."""

    @property
    def described(self) -> str:
        """How messages name it."""
        return repr(self)

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> HookAction:
        """What is done for it at `point`; every mistake that can be seen now is raised now."""
        raise NotImplementedError

    def declared(self, points: Points) -> list[HookPoint]:  # noqa: ARG002 (a kind that declares no target)
        """The points of a model that it says itself it is for."""
        raise InvalidHookError(f"{self.described} does not say where it belongs: give it as (name, hook)")

    def attached(self, model: Any) -> None:
        """It is about to be used on `model`."""

    def check_points(self, points: list[HookPoint]) -> None:
        """Whether it can be at all of these points at once."""

    def check_target(self, given: list[HookPoint], points: Points) -> None:
        """Whether the points of a model that are given for it are those it says itself, if it says any."""


def check_on_error(given: str) -> None:
    """Another word would mean nothing, in silence."""
    if given not in ("raise", "skip"):
        raise HooklineError(f'on_error must be "raise" or "skip", not {given!r}')


def hook_pairs(pairs: Iterable[Any], argument: str) -> Iterator[tuple[Any, Any]]:
    """The names and hooks in what was given for `argument`. An object that declares its target stands for its name."""
    if type(pairs) not in (list, tuple) and (isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable)):
        raise InvalidHookError(f"{argument} must be a list of (name, hook) pairs, not {pairs!r}")
    for pair in pairs:
        refuse_class(pair)
        if isinstance(pair, HookObject):
            yield pair, pair  # it declares its target itself
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidHookError(f"{argument} must be a list of (name, hook) pairs, but it has {pair!r}")
        if isinstance(pair[0], HookObject) or (isinstance(pair[1], str | int) and callable(pair[0])):
            raise InvalidHookError(f"{argument} takes (name, hook), the name first, but it has {pair!r}")
        yield pair[0], pair[1]

"""Hooks as users write them: how a function is called, and the base class of hook objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn

from hookline.engine._torch.bytecode import code_of
from hookline.errors import HooklineError, InvalidHookError, describe

if TYPE_CHECKING:
    from hookline.engine.hook_actions import HookAction
    from hookline.engine.names import Points
    from hookline.engine.points import HookPoint

HookFunction: TypeAlias = Callable[..., Any]
OnError: TypeAlias = Literal["raise", "skip"]
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


class HookObject:
    """A hook that is an object: it makes its own action, wherever a hook is accepted."""

    on_error: OnError | None = None
    """What to do when it fails; None: as the run says."""

    @property
    def described(self) -> str:
        """Its name in messages."""
        return repr(self)

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> HookAction:
        """Return the action that calls it at `point`; mistakes are raised here, not during the run."""
        raise NotImplementedError

    def declared(self, points: Points) -> list[HookPoint]:  # noqa: ARG002 (for objects that declare a target)
        """Return the points of a model that it declares as its target."""
        raise InvalidHookError(f"{self.described} declares no point: give it as (name, hook)")

    def attached(self, model: Any) -> None:
        """Called before it is used on `model`."""

    def check_points(self, points: list[HookPoint]) -> None:
        """Raise if it cannot be at all of these points at once."""

    def check_target(self, given: list[HookPoint], points: Points) -> None:
        """Raise if the points given for it are not those that it declares."""


def check_on_error(given: str) -> None:
    """Raise unless it is one of the two words."""
    if given not in ("raise", "skip"):
        raise HooklineError(f'on_error must be "raise" or "skip", not {given!r}')


def is_none(pairs: Any) -> bool:
    """Whether this is an empty list of hooks. An iterator may have some."""
    return type(pairs) in (tuple, list) and not pairs


def hook_pairs(pairs: Iterable[Any], argument: str) -> Iterator[tuple[Any, Any]]:
    """The names and hooks in the value of `argument`. A hook object that declares its target is its own name."""
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise InvalidHookError(f"{argument} must be a list of (name, hook) pairs, not {pairs!r}")
    for pair in pairs:
        refuse_class(pair)
        if isinstance(pair, HookObject):
            yield pair, pair
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidHookError(f"{argument} must be a list of (name, hook) pairs, but it has {pair!r}")
        if isinstance(pair[0], HookObject) or (isinstance(pair[1], str | int) and callable(pair[0])):
            raise InvalidHookError(f"{argument} takes (name, hook), the name first, but it has {pair!r}")
        yield pair[0], pair[1]

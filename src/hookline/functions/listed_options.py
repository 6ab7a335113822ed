"""Options that several functions share: declared once as a TypedDict, and listed in the signature of each.

Type checkers and editors read `**options: Unpack[CellOptions]`. `help`, notebooks and `inspect.signature` would show
`**options` only: `lists` gives them every name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from hookline.errors import HooklineError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MANY = 12
"""As many options are not listed in a message."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def option_names(options: type) -> list[str]:
    """The names of the options in a TypedDict."""
    return list(options.__annotations__)


def lists(
    options: type, defaults: object = None, *, args_of: Callable[..., Any] | None = None
) -> Callable[[_Function], _Function]:
    """List the options of a TypedDict in the signature of a function whose `**options` they are.

    `defaults` has a default as an attribute of that name; without one it is None. A function that passes its `*args` on
    to `args_of` gets its positional parameters.
    """

    def listed(function: _Function) -> _Function:
        signature = inspect.signature(function)
        plain = [parameter for parameter in signature.parameters.values() if parameter.kind not in _VARIADIC]
        if args_of is not None:
            passed_on = inspect.signature(args_of).parameters.values()
            positional = [parameter for parameter in passed_on if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
            plain = [*positional, *(parameter for parameter in plain if parameter.kind is parameter.KEYWORD_ONLY)]
        names = {parameter.name for parameter in plain}
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(defaults, name, None),
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in options.__annotations__.items()
            if name not in names
        ]
        function.__signature__ = signature.replace(parameters=[*plain, *more])  # type: ignore[attr-defined]
        return function

    return listed


def check_names(function: str, names: Iterable[str], options: Iterable[str]) -> None:
    """Raise if one of these names is none of the options of a function."""
    option_list = sorted(options)
    for name in names:
        if name not in option_list:
            near = get_close_matches(name, option_list, n=1, cutoff=0.6)
            short = ", ".join(option_list) if len(option_list) < _MANY else f"those that help({function}) lists"
            hint = f"did you mean {near[0]!r}?" if near else f"there are {short}"
            raise HooklineError(f"{function} has no option {name!r}: {hint}")

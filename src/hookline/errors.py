"""Exceptions and warnings, and how messages name points and hooks.

HooklineError
├── UnknownPointError      (a KeyError)    no point has that name, or a filter matches none
│   ├── UnavailablePointError              the name is known, but this model or this run has no such value
│   └── UnknownHookPointError (a ValueError)  a hook object declares a target that the model does not have
├── InvalidHookError       (a TypeError)   a value cannot be used as a hook
├── HookError                              a hook failed during a run, or returned a wrong value
├── NonFiniteError                         a module call computed a NaN or an infinite value
└── StoreError                             a store is damaged, in use, full, or from another harvest

HooklineWarning            (a UserWarning)
├── NeverFiredWarning                      a hook was registered for a run and never fired
├── SkippedHookWarning                     a hook failed and its effect was dropped (`on_error="skip"`)
└── HooklineDeprecationWarning (a DeprecationWarning)  a name that will be removed, and what replaces it
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from traceback import format_tb
from types import FunctionType
from typing import Any

__all__ = [
    "HooklineError",
    "UnknownPointError",
    "UnavailablePointError",
    "UnknownHookPointError",
    "InvalidHookError",
    "HookError",
    "NonFiniteError",
    "StoreError",
    "HooklineWarning",
    "NeverFiredWarning",
    "SkippedHookWarning",
    "HooklineDeprecationWarning",
]


def __dir__() -> list[str]:
    return sorted(__all__)


class HooklineError(Exception):
    """Base class of hookline's exceptions."""


class UnknownPointError(HooklineError, KeyError):
    """No point has that name, or a filter matches no point."""

    # KeyError shows its argument's repr, which would put the message in quotes with escaped newlines.
    __str__ = Exception.__str__


class UnavailablePointError(UnknownPointError):
    """The name is known, but this model or run has no such value; the message says why."""


class UnknownHookPointError(UnknownPointError, ValueError):
    """A hook object declares a `hook_point` and `layer` that this model does not have; the message lists others."""


class InvalidHookError(HooklineError, TypeError):
    """A value is not callable, or cannot be called as a hook."""


class HookError(HooklineError):
    """A hook failed during a run, or returned a value that does not fit its point."""

    def __init__(
        self,
        message: str,
        *,
        point: Any,
        hook: Any,
        hook_id: str | None = None,
        original_error: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.point, self.hook, self.hook_id, self.original_error = point, hook, hook_id, original_error
        self.times = 1
        """How often it occurred, if errors are collected (`on_error="skip"`): one is kept for each hook."""

    def drop_traceback(self) -> None:
        """Replace the traceback by a note: it would keep every activation of the pass alive."""
        errors: list[BaseException] = [self] if self.original_error is None else [self, self.original_error]
        for error in errors:
            errors += [
                cause for cause in (error.__cause__, error.__context__) if cause is not None and cause not in errors
            ]
        lines = [line for error in reversed(errors[1:]) for line in format_tb(error.__traceback__)]
        if lines:
            self.add_note("Traceback of the error in the hook (most recent call last):\n" + "".join(lines).rstrip())
        for error in errors:
            error.__traceback__ = None

    @property
    def hook_type(self) -> str:
        """When the hook is called: "forward", or before its module, "pre_forward"."""
        return "pre_forward" if getattr(self.hook, "is_pre", False) else "forward"


class NonFiniteError(HooklineError):
    """A module call computed a NaN or an infinite value, or a gradient of one: see `training.find_nonfinite`."""

    def __init__(self, message: str, *, first: Any = None) -> None:
        super().__init__(message)
        self.first = first
        """What was found, as `first` of the context."""


class StoreError(HooklineError):
    """A store of activations is damaged, in use, full, or from another harvest."""


class HooklineWarning(UserWarning):
    """Base class of hookline's warnings."""


class NeverFiredWarning(HooklineWarning):
    """A hook was registered for a run and never fired."""


class SkippedHookWarning(HooklineWarning):
    """A hook failed, its effect was dropped, and the run continued."""


class HooklineDeprecationWarning(HooklineWarning, DeprecationWarning):
    """A name that will be removed in a later version; the message says in which, and what replaces it."""


class _NoPoint:
    """The message for an unknown name.

    It looks for similar names only when it is read: that takes milliseconds, and `name in cache` catches this error.
    """

    def __init__(self, requested: object, names: list[str], hint: str, meant: Callable[[], list[str]]) -> None:
        self.asked, self.names, self.hint, self.meant = str(requested), names, hint, meant
        self.quoted = repr(requested)

    def __str__(self) -> str:
        near = [*dict.fromkeys([*self.meant(), *get_close_matches(self.asked, self.names, n=5, cutoff=0.5)])]
        if near:
            advice = "Did you mean " + ", ".join(map(repr, near[:5])) + "?"
        else:
            advice = f"The points are {', '.join(map(repr, self.names[:8]))}{', …' if len(self.names) > 8 else ''}."
        return f"no point is named {self.quoted}. {advice}{' ' + self.hint if self.hint else ''}"

    def __repr__(self) -> str:
        return repr(str(self))

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (str(self),)


def unknown_point(
    requested: object, point_names: Iterable[str], *, hint: str = "", meant: Callable[[], list[str]] = list
) -> UnknownPointError:
    """The error for an unknown name, with the names that may be `meant`, and then the most similar ones."""
    return UnknownPointError(_NoPoint(requested, list(point_names), hint, meant))


def no_match(requested: object, point_names: Iterable[str], hint: str = "") -> UnknownPointError:
    """The error for a filter that selects nothing; `hint` is a last sentence."""
    names = list(point_names)
    first_names = ", ".join(map(repr, names[:8])) + (", …" if len(names) > 8 else "")
    called = requested.__name__ if isinstance(requested, FunctionType) else repr(requested)
    return UnknownPointError(
        f"the filter {called} matches none of the {len(names)} points: {first_names}{hint and f'. {hint}.'}"
    )


def describe(hook: Callable[..., Any]) -> str:
    """A hook as an error message names it: its name, and the file and line of its definition."""
    inner = hook
    while hasattr(inner, "func"):  # functools.partial, however often
        inner = inner.func
    name = getattr(inner, "described", None) or getattr(inner, "__qualname__", None) or type(inner).__name__
    code = getattr(inner, "__code__", None)
    return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else name


def how_many(n: int, thing: str) -> str:
    """A number of things, as a message says it: "1 point", "2,000 points", "no points"."""
    return f"{f'{n:,}' if n else 'no'} {thing}{'' if n == 1 else 's'}"


def a_type(value: object) -> str:
    """The type of a value with its article, as a message says it: "a list", "an int", "an ndarray"."""
    name = type(value).__name__
    return f"{'an' if name == 'ndarray' or name[0] in 'aeioAEIO' else 'a'} {name}"


def shown_bytes(count: float) -> str:
    """A number of bytes, as a message says it: "538 MB"."""
    power = 0
    while count >= 999.5 and power < 4:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def warn(message: str, kind: type[HooklineWarning] = HooklineWarning) -> None:
    """Issue a warning at the line of the user's code that led to it."""
    warnings.warn(message, kind, stacklevel=users_level())


def warn_deprecated(old: str, new: str, *, since: str) -> None:
    """Warn that a name is deprecated. It stays for two minor versions: what 0.2 deprecates, 0.4 removes."""
    message = f"{old} is deprecated since hookline {since} and will be removed in {removal_of(since)}: use {new}"
    warn(message, HooklineDeprecationWarning)


def removal_of(since: str) -> str:
    """The version that removes what was deprecated in another."""
    major, minor = map(int, since.split("."))
    return f"{major}.{minor + 2}"


def users_level() -> int:
    """The stack level of the first frame outside this package, for warnings."""
    package_folder = str(Path(__file__).parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(package_folder) or "contextlib" in frame.f_code.co_filename
    ):
        level, frame = level + 1, frame.f_back
    return level

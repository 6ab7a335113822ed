"""Errors that are also of the types that TransformerLens raises, so that code which catches those still does."""

from __future__ import annotations

from hookline.errors import HooklineError


class LensAssertionError(HooklineError, AssertionError):
    """Where TransformerLens has an assertion."""


class LensValueError(HooklineError, ValueError):
    """Where TransformerLens raises a ValueError."""


def check(is_right: bool, message: str) -> None:
    """Raise a LensAssertionError with this message, unless something is right."""
    if not is_right:
        raise LensAssertionError(message)

"""NotCompiled: why something is not in a graph. Whoever began the run catches it, and runs uncompiled."""

from __future__ import annotations


class NotCompiled(Exception):  # noqa: N818 (the uncompiled run is as right)
    """A run, a hook or a function is not compiled; the text says why."""

    def __init__(self, reason: str, *, warns: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.warns = reason, warns


def check_no(reason: str | None, *, warns: bool = True) -> None:
    """Raise NotCompiled if there is a reason."""
    if reason:
        raise NotCompiled(reason, warns=warns)

"""Progress bars of work that takes more than two seconds."""

from __future__ import annotations

from typing import Any, Self


class HiddenBar:
    """A bar that is not shown.

    tqdm's own one takes a lock of the whole process, which an interrupt may leave locked: all other threads that make
    a bar would wait forever.
    """

    n = 0
    """How much is done, as with tqdm: a bar that is not shown does not count."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, as all its methods."""

    def update(self, n: float = 1) -> None:
        """Do nothing."""

    def set_postfix(self, **figures: object) -> None:
        """Do nothing."""


def progress_bar(shown: bool, total: int | None, unit: str, what: str | None = None) -> Any:
    """A `with` block whose `update(n)` moves a bar, if it is to be shown and the work takes more than two seconds."""
    if not shown:
        return HiddenBar()
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, delay=2, leave=False, unit=unit, desc=what)


def tell(text: str) -> None:
    """Print a line above the bars that are shown."""
    from tqdm.auto import tqdm

    tqdm.write(text)

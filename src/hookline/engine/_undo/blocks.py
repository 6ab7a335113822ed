"""Blocks: `with` blocks that undo what they did, even if an interrupt arrives on the way out.

Python raises `KeyboardInterrupt`, or whatever a signal handler raises, at certain instructions. One of them is the
entry of a function, before its first line, where no `try` of the function applies. A signal that arrives while an
exception unwinds or tensors are freed is raised there: on the way into `__exit__`, which then has not begun. `covered`
extends a function's first `try` to that instruction.

Another is the end of a call of a function written in C. From Python 3.14 on, `with lock:` has such a call, and then the
lock is taken but nothing releases it. `entered` enters a lock, or what else is written in C, without one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import nn

from hookline.engine._compiler.untraced import leave_compiled_code, untraced
from hookline.engine._torch.interrupts import cover_entry


class _Entered:
    """A context manager written in C: entered by a `for`, which calls it between two instructions; left as before."""

    __slots__ = ("__exit__", "_enter")

    def __init__(self, manager: AbstractContextManager[Any]) -> None:
        self._enter, self.__exit__ = manager.__enter__, manager.__exit__

    def __enter__(self) -> Any:
        for target in iter(self._enter, self):
            return target
        return None


def interrupt_safe(manager: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """`manager`, whose `__enter__` and `__exit__` are written in C, such that an interrupt cannot skip its exit."""
    return manager if sys.version_info < (3, 14) else _Entered(manager)


@cover_entry
def run_twice_on_interrupt(undo: Callable[[], None]) -> None:
    """Call `undo`, and once more if an interrupt arrives meanwhile."""
    try:
        undo()
    except BaseException:
        undo()
        raise


_open: dict[int, UndoBlock] = {}
"""The blocks that are open now, in all threads, in the order in which they were opened."""


class UndoBlock:
    """A `with` block. `close` is always called on the way out; calling it twice must be safe."""

    _thread: threading.Thread | None = None

    def open(self) -> Any:
        """Do what the block is for. Returns the target of the `with` statement."""
        raise NotImplementedError

    def close(self) -> None:
        """Undo it, even if `open` was interrupted."""
        raise NotImplementedError

    @property
    def is_here(self) -> bool:
        """Whether it was opened in this thread."""
        return self._thread is threading.current_thread()

    def is_on(self, root: nn.Module) -> bool:  # noqa: ARG002
        """Whether it acts on this model."""
        return False

    def begin(self) -> Any:
        """Open the block, completely or not at all."""
        try:
            self._thread = threading.current_thread()
            _open[id(self)] = self
            return self.open()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Close the block, even if an interrupt arrives meanwhile."""
        run_twice_on_interrupt(self._end)

    def _end(self) -> None:
        self.close()
        _open.pop(id(self), None)

    @untraced
    def __enter__(self) -> Any:
        leave_compiled_code()
        return self.begin()

    @cover_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end()
        except BaseException:
            self.end()
            raise


def find(number: int) -> Any:
    """The open block with that `id`, if it is one."""
    return _open.get(number)


def end_all(root: nn.Module) -> None:
    """End every block on this model that is open in this thread, or was left open by a thread that has ended."""
    for block in reversed(list(_open.values())):
        if block.is_on(root) and (block.is_here or (block._thread is not None and not block._thread.is_alive())):
            block.end()

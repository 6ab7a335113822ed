"""Code that an interrupt cannot skip.

Why: Python may raise a `KeyboardInterrupt` on the entry of a function, before its first line, where no `try` of the
function applies.
Needs: the exception table of CPython 3.11 and later, which says for each instruction where an exception continues.
If it does not hold, all works as long as no interrupt arrives at that one instruction of an exit, which is then
skipped; `hookline doctor` says so.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from types import FunctionType
from typing import Any, TypeVar, cast

from hookline.engine._torch.proofs import insist

_F = TypeVar("_F", bound=Callable[..., Any])
is_held_here = methodcaller("_is_owned")
"""Whether this thread holds a lock that it may take several times."""


def cover_entry(function: _F) -> _F:
    """`function`, which begins with a `try`, with that `try` covering its entry too."""
    code = cast("FunctionType", function).__code__
    entries = list(table_entries(code.co_exceptiontable))
    start, length, *rest = entries[0]
    entries[0] = (0, start + length, *rest)
    table = b"".join(_number(entry[0], first=0x80) + b"".join(map(_number, entry[1:])) for entry in entries)
    cast("FunctionType", function).__code__ = code.replace(co_exceptiontable=table)
    return function


def table_entries(table: bytes) -> Iterator[tuple[int, ...]]:
    """The rows of an exception table: start, length, target, depth. See CPython's notes on exception handling."""
    numbers: list[int] = []
    value = 0
    for byte in table:
        value = value << 6 | byte & 0x3F
        if not byte & 0x40:  # the last byte of a number
            numbers.append(value)
            value = 0
        if len(numbers) == 4:
            yield tuple(numbers)
            numbers = []


def _number(value: int, *, first: int = 0) -> bytes:
    digits = [value & 0x3F]
    while value := value >> 6:
        digits.append(value & 0x3F | 0x40)
    digits.reverse()
    return bytes([digits[0] | first, *digits[1:]])


def probe() -> None:
    """An exception on the entry of a function reaches its first `try`, if that covers the entry."""

    lock = threading.RLock()
    with lock:
        insist(is_held_here(lock), "a lock says that this thread holds it")
    insist(not is_held_here(lock), "a lock says that nobody holds it")
    done: list[str] = []

    class Block:
        def __enter__(self) -> None:
            pass

        @cover_entry
        def __exit__(self, *error: object) -> bool:
            try:
                done.append("undone")
            except KeyError:
                done.append("interrupted")
            return True

    # An error in C code, with an exception for this thread on its way: Python raises it on entering `__exit__`.
    interrupt = partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident()))
    with Block():
        list(map(interrupt, [ctypes.py_object(KeyError), object()]))
    insist(done == ["interrupted"], "an exception on the entry of a function reaches the `try` that covers it")
    with Block():
        pass
    insist(done == ["interrupted", "undone"], "a function whose entry is covered does what it did before")

"""What a function's code says about it: names, constants, and what becomes of the result of a call.

Why: Python does not tell whether a caller ignores what it is given; then an edit of it is written to the argument
that it aliases.
Needs: CPython's instructions, as `dis` names them, and the place of the current one in a frame.
If it does not hold, every caller counts as using what it is given.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from types import CodeType
from typing import Any

from hookline.engine._torch.frames import frame_at
from hookline.engine._torch.proofs import insist, once

code_of = attrgetter("__code__")
"""The code of a function."""
USED, DISCARDED, RETURNED = range(3)


def code_or_none(function: Any) -> CodeType | None:
    """The code of a function; None if it is written in C, or has a class."""
    return getattr(function, "__code__", None)


@lru_cache(maxsize=512)
def fates(code: CodeType) -> dict[int, int]:
    """What becomes of the result of each instruction that is not simply used: it is discarded, or returned."""
    instructions = list(dis.get_instructions(code))
    reads = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "DELETE_FAST")
    read = {name for each in instructions if any(op in each.opname for op in reads) for name in _names(each)}
    read |= set(code.co_cellvars)
    by_offset: dict[int, int] = {}
    for each, after in pairwise(instructions):
        if after.opname == "POP_TOP" or (after.opname.startswith("STORE_FAST") and _stored(after) not in read):
            fate = DISCARDED
        elif after.opname == "RETURN_VALUE":
            fate = RETURNED
        else:
            continue
        # While a call runs, the current instruction of its frame is the call or, for a Python function, its cache.
        by_offset |= dict.fromkeys(range(each.offset, after.offset, 2), fate)
    return by_offset


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """The variables that an instruction reads; two for one that combines two, of which one may be written."""
    given = instruction.argval
    if not isinstance(given, tuple):
        return (given,)
    return given[1:] if instruction.opname.startswith("STORE_FAST_LOAD") else given


def _stored(instruction: dis.Instruction) -> Any:
    """The variable that an instruction writes first."""
    return instruction.argval[0] if isinstance(instruction.argval, tuple) else instruction.argval


def probe() -> None:
    """Callers that discard, return and use a result are distinguished while they wait for it."""
    found = []

    def look() -> int:
        frame = frame_at(1)
        found.append(fates(frame.f_code).get(frame.f_lasti, USED))
        return 1

    def discards() -> None:
        look()

    def stores() -> None:
        _unused = look()

    def returns() -> int:
        return look()

    def uses() -> int:
        result = look()
        return result + 1

    for caller in (discards, stores, returns, uses):
        caller()
    insist(found == [DISCARDED, DISCARDED, RETURNED, USED], f"the bytecode tells what a caller does (found {found})")


can_read = once(probe)

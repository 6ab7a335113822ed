"""What a function's code says about it: its names, what becomes of the result of a call, and what the call calls.

Why: Python does not tell whether a caller ignores what it is given; then an edit of it is written to the argument
that it aliases. Nor does it show the frames of functions written in C: `out.extend(map(self.drop, xs))` drops what
`extend` returns, not what `drop` returns. So only a call that certainly calls the frame above it says what becomes of
its result.
Needs: CPython's instructions, as `dis` names them, and the place of the current one in a frame.
If it does not hold, every caller counts as using what it is given.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from hookline.engine._torch.frames import frame_at
from hookline.engine._torch.proofs import insist, once

USED, DISCARDED, RETURNED = range(3)

Steps: TypeAlias = tuple[tuple[str, Any], ...]
"""How to find again what a call calls: operations on a stack, each with its argument."""


class Outcome(NamedTuple):
    """What becomes of the result of a call, and what it calls; None where that is unknown."""

    fate: int
    callee: Steps | None


def fate_of(frame: FrameType, inner: FrameType) -> int:
    """What becomes, in `frame`, of what the frame `inner` above it returns. Unless it is certain, it is used."""
    call = _calls(frame.f_code).get(frame.f_lasti)
    if call is None or call.callee is None or call.fate == USED:
        return USED
    try:
        return call.fate if _is_call_of(_found(call.callee, frame), inner) else USED
    except LookupError:
        return USED


def is_calling(frame: FrameType, name: str) -> bool:
    """Whether a frame is calling its variable `name`."""
    call = _calls(frame.f_code).get(frame.f_lasti)
    return call is not None and call.callee == (("LOCAL", name),)


class _Operation(NamedTuple):
    """An instruction, with the number of values on the stack before and after it, from an arbitrary zero."""

    offset: int
    name: str
    value: Any
    before: int
    after: int


_WITHOUT_MEANING = {"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def _operations(code: CodeType) -> Iterator[_Operation]:
    depth, at = 0, dict[int, int]()
    for instruction in dis.get_instructions(code):
        depth = at.get(instruction.offset, depth)
        if instruction.opcode in _JUMPS:
            at.setdefault(instruction.argval, depth + dis.stack_effect(instruction.opcode, instruction.arg, jump=True))
        parts = re.findall("(?:LOAD|STORE)_FAST", instruction.opname)
        if len(parts) > 1:  # Python 3.13 combines two
            for part, name in zip(parts, instruction.argval, strict=True):
                after = depth + (1 if part == "LOAD_FAST" else -1)
                yield _Operation(instruction.offset, part, name, depth, after)
                depth = after
        elif instruction.opname not in _WITHOUT_MEANING:  # in Python 3.11, `PRECALL` counts the arguments, not `CALL`
            is_call = instruction.opname == "CALL"
            after = depth + (
                -1 - instruction.argval
                if is_call
                else dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
            )
            is_item = instruction.opname == "BINARY_SUBSCR" or (
                instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
            )
            yield _Operation(
                instruction.offset, "ITEM" if is_item else instruction.opname, instruction.argval, depth, after
            )
            depth = after


_READS_ALL = {"locals", "vars", "eval", "exec"}
_READS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "DELETE_FAST")
_CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}
_COLLECTED = "(?:LIST_APPEND|SET_ADD|MAP_ADD) JUMP_BACKWARD "
_END_OF_LOOP = "END_FOR " if sys.version_info < (3, 13) else "END_FOR (?:POP_TOP|POP_ITER) "

_IS_DISCARDED = re.compile(
    f"POP_TOP |{_COLLECTED}{_END_OF_LOOP}(?:SWAP (?:STORE_FAST )+POP_TOP |POP_TOP (?:STORE_FAST )+)"
)
"""In Python 3.12, a comprehension is a loop in the function that it is in, which restores variables after it."""

_IS_RETURNED = re.compile(
    "(?:(?:SWAP )+(?:(?:LOAD_CONST ){3}CALL )?POP_TOP )*RETURN_VALUE |"  # from `with` blocks and loops
    f"{_COLLECTED}{_END_OF_LOOP}SWAP (?:STORE_FAST )+RETURN_VALUE "
)
_IS_COLLECTED = re.compile(_COLLECTED)


@lru_cache(maxsize=512)
def _calls(code: CodeType) -> dict[int, Outcome]:
    """The calls in a function, by the offsets where its frame may be meanwhile."""
    operations = list(_operations(code))
    read = {operation.value for operation in operations if operation.name.startswith(_READS)} | set(code.co_cellvars)
    reads_all = any(
        operation.name in ("LOAD_GLOBAL", "LOAD_NAME") and operation.value in _READS_ALL for operation in operations
    )
    sources: dict[int, int] = {}
    for index, operation in enumerate(operations):
        if "JUMP" in operation.name:
            sources.setdefault(operation.value, index)
    outcomes: dict[int, Outcome] = {}
    for index, operation in enumerate(operations[:-1]):
        if operation.name not in _CALLS:
            continue
        after = operations[index + 1]
        ahead = "".join(f"{other.name} " for other in operations[index + 1 : index + 40])
        is_unread = after.name == "STORE_FAST" and not reads_all and after.value not in read
        if is_unread or _IS_DISCARDED.match(ahead):
            fate = DISCARDED
        elif _IS_RETURNED.match(ahead) or (code.co_name in _COMPREHENSIONS and _IS_COLLECTED.match(ahead)):
            fate = RETURNED
        else:
            fate = USED
        # While a call runs, the current instruction of its frame is the call or, for a Python function, its cache.
        offsets = range(operation.offset, after.offset, 2)
        outcomes |= dict.fromkeys(offsets, Outcome(fate, _callee(operations, index, sources)))
    return outcomes


_STEPS = {
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF"), "LOCAL"),
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME"), "GLOBAL"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), "ATTRIBUTE"),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), "CONSTANT"),
    "ITEM": "ITEM",
}
_OF_FUNCTIONS = {"PUSH_NULL", "SET_FUNCTION_ATTRIBUTE"}


def _callee(operations: list[_Operation], call: int, sources: dict[int, int]) -> Steps | None:
    """The steps that find what is called; None if they are more than names, attributes and items."""
    below = operations[call].after - 1  # then come two places for what is called, one of them perhaps empty
    first = call
    while first and operations[first].before > below:
        first -= 1
    if operations[first].before != below or any(
        sources.get(operation.offset, first) < first for operation in operations[first + 1 : call + 1]
    ):
        return None  # it begins in several ways
    stop = first
    for index in range(first, call + 1):
        stop = index if operations[index].before == below + 2 else stop
        if "JUMP" in operations[index].name:  # in an argument
            break
    pushes = [operation for operation in operations[first:stop] if operation.name != "PUSH_NULL"]
    for index, push in enumerate(pushes):
        if push.name == "MAKE_FUNCTION":  # a lambda, or a comprehension with what it iterates over
            code = pushes[index - 1].value
            is_last = {other.name for other in pushes[index + 1 :]} <= _OF_FUNCTIONS
            return (("CONSTANT", code),) if is_last or code.co_name in _COMPREHENSIONS else None
    kinds = ["LOCAL" if push.name.startswith("LOAD_FAST") else _STEPS.get(push.name) for push in pushes]
    return None if not pushes or None in kinds else tuple(zip(kinds, (push.value for push in pushes), strict=True))  # type: ignore[arg-type]


def _found(steps: Steps, frame: FrameType) -> Any:
    """What the steps lead to now, without running the model's code. A `LookupError` means that it is unknown."""
    variables, stack = _variables(frame), list[Any]()
    for kind, value in steps:
        if kind == "CONSTANT":
            stack.append(value)
        elif kind == "LOCAL":
            stack.append(variables[value])
        elif kind == "GLOBAL":
            stack.append(frame.f_globals[value])
        elif kind == "ATTRIBUTE":
            stack.append(_attribute(stack.pop(), value))
        else:
            key = stack.pop()
            stack.append(_item(stack.pop(), key))
    if len(stack) != 1:
        raise LookupError
    return stack[0]


def _variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame. Before Python 3.13 it would keep the dictionary, and so the tensors in it."""
    variables, code = frame.f_locals, frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & CO_OPTIMIZED or not _READS_ALL.isdisjoint(code.co_names):
        return variables
    copy = dict(variables)
    variables.clear()
    return copy


_MISSING = object()
_GET_ITEM_PLAINLY = (nn.ModuleList.__getitem__, nn.ModuleDict.__getitem__, nn.Sequential.__getitem__)


def _attribute(x: Any, name: str) -> Any:
    """Return `x.name`; for a method, its function."""
    variables: Mapping[str, Any]
    if type(x) is type:
        variables, classes = {}, x.__mro__
    elif isinstance(type(x).__getattribute__, FunctionType):
        raise LookupError
    else:
        variables, classes = getattr(x, "__dict__", {}), type(x).__mro__
    of_class = next((vars(cls)[name] for cls in classes if name in vars(cls)), _MISSING)
    if hasattr(type(of_class), "__set__"):
        raise LookupError  # a property
    if name in variables:
        return variables[name]
    if of_class is _MISSING:
        if isinstance(x, nn.Module):
            return variables["_modules"][name]
        raise LookupError
    if isinstance(of_class, staticmethod | classmethod):
        return of_class.__func__
    if isinstance(of_class, FunctionType) or not hasattr(type(of_class), "__get__"):
        return of_class
    raise LookupError


def _item(x: Any, key: Any) -> Any:
    is_plain = type(x) in (list, tuple, dict) or getattr(type(x), "__getitem__", None) in _GET_ITEM_PLAINLY
    if type(key) not in (int, str) or not is_plain:
        raise LookupError
    return x[key]


def _is_call_of(callee: Any, inner: FrameType) -> bool:
    """Whether a call of `callee` runs the frame `inner` at once, with no function written in C between them."""
    code = inner.f_code
    if isinstance(callee, CodeType):
        return callee is code
    function = callee.__func__ if isinstance(callee, MethodType) else callee
    if isinstance(function, FunctionType):
        return function.__code__ is code
    call = next((vars(cls)["__call__"] for cls in type(callee).__mro__ if "__call__" in vars(cls)), None)
    is_its = isinstance(call, FunctionType) and call.__code__ is code and code.co_argcount > 0
    return is_its and _variables(inner).get(code.co_varnames[0]) is callee


def probe() -> None:
    """Callers that discard, return and use a result are distinguished while they wait for it."""
    fates: list[int] = []

    def look() -> int:
        fates.append(fate_of(frame_at(1), frame_at(0)))
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
    insist(fates == [DISCARDED, DISCARDED, RETURNED, USED], f"the bytecode tells what a caller does (found {fates})")


can_read = once(probe)

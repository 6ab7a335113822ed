"""Fingerprints: a sum of what a function, a hook or another object is made of, the same in another process.

Of a function: its code, what it closes over, its defaults, and the global values that it reads. Of an object: its
class and its state. Of a module: its parameters, buffers and attributes. Libraries are known by name. Of what cannot be
looked into (a lock, a generator, an open file) no two are the same.
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pickle import PicklingError
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

import torch
from torch import Tensor, nn

from hookline.cache import ActivationCache
from hookline.errors import HooklineError
from hookline.hooks import Detector, Hook
from hookline.points import HookPoint
from hookline.store.sums import tensor_sum
from hookline.verbs import Hooked

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.layout)
_DESCRIPTORS = (FunctionType, staticmethod, classmethod, property, cached_property)
_OF_TORCH = {*vars(nn.Module()), "generation_config"} - {"training"}
_OF_HOOKS = {*vars(Detector()), *Hook.__annotations__}
"""What a hook object keeps about its use, and where it stands: not what it does."""


@runtime_checkable
class Fingerprinted(Protocol):
    """An object that says itself what decides what it does; all else of it may change."""

    def fingerprinted(self) -> Any:
        """What it is made of: values, tensors, functions, or a tuple of such."""


def fingerprint(value: Any, known: Mapping[int, str] | None = None) -> str:
    """The sum of a value, and what in it could not be looked into. `known` names objects by their id."""
    walk = _Walk(known or {})
    found = walk.of(value)
    return f"with a {walk.opaque[0]}, which cannot be compared, {found}" if walk.opaque else found


class _Walk:
    """One way through a value and all that is in it."""

    def __init__(self, known: Mapping[int, str]) -> None:
        self._known = known
        self._open: dict[int, int] = {}
        self._done: dict[int, tuple[str, Any]] = {}  # with the object, so that no other gets its id meanwhile
        self.opaque: list[str] = []

    def of(self, value: Any) -> str:
        """The sum of one value."""
        if id(value) in self._known:
            return _digest("known", self._known[id(value)])
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return _digest(type(value).__name__, repr(value))
        if id(value) in self._open:
            return _digest("again", str(self._open[id(value)]))
        if id(value) not in self._done:
            self._open[id(value)] = len(self._open)
            self._done[id(value)] = _digest(*self._parts(value)), value
            del self._open[id(value)]
        return self._done[id(value)][0]

    def _parts(self, value: Any) -> Iterator[str]:
        yield type(value).__qualname__
        match value:
            case Tensor():
                yield tensor_sum(value)
            case FunctionType():
                yield from self._function(value)
            case CodeType():
                yield from self._code(value)
            case CellType():
                yield from map(self.of, _contents(value))
            case MethodType():
                yield from (self.of(value.__func__), self.of(value.__self__))
            case BuiltinFunctionType():
                yield from (value.__qualname__, self.of(value.__self__))
            case ModuleType():
                yield value.__name__
            case type():
                yield from self._class(value)
            case dict():
                yield from self._mapping(value)
            case set() | frozenset():
                yield from sorted(map(self.of, value))
            case list() | tuple():
                yield from map(self.of, (type(value), *value))
            case torch.Generator():
                yield self.of(value.get_state())
            case _:
                yield self.of(type(value))
                yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:
        match value:
            case Fingerprinted():
                yield self.of(value.fingerprinted())
            case Hook():
                yield self.of({name: each for name, each in vars(value).items() if name not in _OF_HOOKS})
            case Hooked():
                yield self.of(value.module)
            case HookPoint():
                yield value.name
            case ActivationCache():
                yield self.of(dict(value))
            case nn.Module():
                yield self.of([value._parameters, value._buffers, value._modules])
                yield self.of({name: each for name, each in vars(value).items() if name not in _OF_TORCH})
            case staticmethod() | classmethod():
                yield self.of(value.__func__)
            case property():
                yield self.of([value.fget, value.fset])
            case cached_property():
                yield self.of(value.func)
            case MemberDescriptorType() | GetSetDescriptorType():
                yield value.__name__
            case _:
                yield from self._reduced(value)

    def _reduced(self, value: Any) -> Iterator[str]:
        """What pickle would write of it; nothing is pickled."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            found = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except (TypeError, AttributeError, NotImplementedError, RuntimeError, PicklingError, HooklineError):
            self.opaque.append(type(value).__qualname__)
            yield uuid4().hex
            return
        if isinstance(found, str):
            yield found
            return
        make, args, state, items, pairs = (*found, None, None, None)[:5]
        if isinstance(state, dict):  # what was worked out meanwhile is no part of it
            state = {name: x for name, x in state.items() if not _is_worked_out(value, name)}
        yield self.of([make, args, state, list(items or ()), list(pairs or ())])

    def _function(self, value: FunctionType) -> Iterator[str]:
        code, of_user = value.__code__, not _is_library(value.__globals__.get("__name__"))
        yield code.co_name
        yield from map(self.of, (value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())))
        if of_user:
            yield from (self.of(code), self.of(vars(value)))
            names = sorted({*_globals(code)} & {*value.__globals__})
            yield from map(self.of, (value.__globals__[name] for name in names))
        else:
            yield value.__qualname__

    def _code(self, code: CodeType) -> Iterator[str]:
        """What is done, wherever it is written."""
        yield from (code.co_code.hex(), repr(code.co_names))
        yield from map(self.of, code.co_consts)

    def _class(self, kind: type) -> Iterator[str]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if not _is_library(kind.__module__):
            yield from map(self.of, kind.__bases__)
            own = {
                name: each
                for name, each in vars(kind).items()
                if isinstance(each, _DESCRIPTORS) or not name.startswith(("__", "_abc_"))
            }
            yield self.of(own)

    def _mapping(self, value: Mapping[Any, Any]) -> Iterator[str]:
        yield from sorted(_digest(self.of(key), self.of(each)) for key, each in value.items())


def _is_worked_out(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), str(name), None), cached_property)


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _globals(code: CodeType) -> Iterator[str]:
    """The global names that code reads, with what is defined in it."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


def _is_library(module: str | None) -> bool:
    """Whether it is installed, and not the user's own."""
    package = (module or "").partition(".")[0]
    if package == "__main__":
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return (
        package == "hookline"
        or package in sys.stdlib_module_names
        or "site-packages" in file
        or "dist-packages" in file
    )


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

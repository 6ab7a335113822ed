"""Fingerprints: a sum of what a function, a hook or another object is made of, the same in another process.

Of a function: its code, what it closes over, its defaults, and the global values that it reads. Of an object: its
class and its state. Of a module: its parameters, buffers, attributes and hooks. Libraries are known by name. Of what
cannot be looked into (a lock, a generator, a file that is read) no two are the same.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cached_property
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

from hookline.engine.cache import ActivationCache
from hookline.engine.hooked import Hooked
from hookline.engine.permanent import standing_of
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.hooks import Detector, Hook
from hookline.store.checksums import tensor_sum
from hookline.store.code import is_library, read_by, replaced_methods
from hookline.store.external_hooks import changing, torch_hooks
from hookline.store.tokenizing import fast_digest, is_fast, is_tokenizer, settings_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.layout)
_CONTAINERS = (dict, OrderedDict, list, tuple, set, frozenset)
_DESCRIPTORS = (FunctionType, staticmethod, classmethod, property, cached_property)
OF_TORCH = {*vars(nn.Module()), "generation_config", "name_or_path", "_hookline"} - {"training"}
"""What torch and others keep on a module about its use; its parameters and the like are looked at apart."""
_OF_HOOKS = {*vars(Detector()), *Hook.__annotations__}
"""What a hook object keeps about its use, and where it stands: not what it does."""


@runtime_checkable
class Fingerprinted(Protocol):
    """An object that says itself what decides what it does; all else of it may change."""

    def fingerprinted(self) -> Any:
        """What it is made of: values, tensors, functions, or a tuple of such."""


@dataclass(frozen=True)
class Fingerprint:
    """The sum of a value; that of each part of it, to say what is another; and what could not be looked into."""

    sum: str
    parts: dict[str, str]
    opaque: str = ""


def fingerprint(value: Any, known: Mapping[int, str] | None = None) -> str:
    """The sum of a value, and what in it could not be looked into. `known` names objects by their id."""
    walk = _Walk(known or {})
    found = walk.of(value)
    return f"with a {walk.opaque[0]}, which cannot be compared, {found}" if walk.opaque else found


def detailed(value: Any, known: Mapping[int, str] | None = None) -> Fingerprint:
    """The fingerprint with that of each part."""
    walk = _Walk(known or {})
    return Fingerprint(walk.of(value), dict(walk.parts(value)), walk.opaque[0] if walk.opaque else "")


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

    def parts(self, value: Any) -> Iterator[tuple[str, str]]:
        """The sums of what a value is made of, each with a name for it."""
        match value:
            case FunctionType():
                yield from self._function(value)
            case MethodType():
                yield from (("function", self.of(value.__func__)), ("object", self.of(value.__self__)))
            case _ if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
                yield "class", self.of(type(value))
                names = [name for name in vars(value) if not isinstance(value, Hook) or name not in _OF_HOOKS]
                yield from ((f"attribute {name!r}", self.of(vars(value)[name])) for name in names)

    def _parts(self, value: Any) -> Iterator[str]:
        yield type(value).__qualname__
        match value:
            case Tensor():
                yield from (tensor_sum(value), self.of(_public(getattr(value, "__dict__", {}))))
            case FunctionType():
                yield from (part for each in self._function(value) for part in each)
            case CodeType():
                yield from self._code(value)
            case CellType():
                yield from map(self.of, _contents(value))
            case MethodType():
                yield from (self.of(value.__func__), self.of(value.__self__))
            case BuiltinFunctionType():
                yield from (value.__qualname__, self.of(value.__self__))
            case ModuleType():
                yield from self._module(value)
            case type():
                yield from self._class(value)
            case dict() | list() | tuple() | set() | frozenset():
                yield from self._container(value)
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
            case Hooked() if value.module is not value:
                yield self.of(value.module)
            case HookPoint():
                yield value.name
            case ActivationCache():
                yield self.of(dict(value))
            case nn.Module():
                yield self.of([value._parameters, value._buffers, value._modules])
                yield self.of({name: each for name, each in vars(value).items() if name not in OF_TORCH})
                ours = changing(standing_of(value).hooks())
                yield self.of([torch_hooks(value), [(each.point.listed, each.hook) for each in ours]])
            case staticmethod() | classmethod():
                yield self.of(value.__func__)
            case property():
                yield self.of([value.fget, value.fset])
            case cached_property():
                yield self.of(value.func)
            case _lru_cache_wrapper():
                yield self.of(value.__wrapped__)
            case MemberDescriptorType() | GetSetDescriptorType():
                yield value.__name__
            case weakref.ref():
                yield self.of(value())
            case threading.local():
                yield self.of(vars(value))
            case io.IOBase() if not value.closed and value.writable() and not value.readable():
                yield "a file that is written"
            case _ if is_tokenizer(value):
                yield self.of(settings_of(value))
            case _ if is_fast(value):
                yield fast_digest(value)
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
            yield from (found, self.of(getattr(value, "__wrapped__", None)))
            return
        make, args, state, items, pairs = (*found, None, None, None)[:5]
        if isinstance(state, dict):  # what was worked out meanwhile is no part of it
            state = {name: x for name, x in state.items() if not _is_worked_out(value, name)}
        yield self.of([make, args, state, list(items or ()), list(pairs or ())])

    def _function(self, value: FunctionType) -> Iterator[tuple[str, str]]:
        code = value.__code__
        yield "name", _digest(code.co_name)
        yield "defaults", self.of([value.__defaults__, value.__kwdefaults__])
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            yield f"closure {name!r}", self.of(cell)
        if is_library(value.__globals__.get("__name__")):
            yield "code", _digest(str(value.__module__), value.__qualname__)
            return
        yield from (("code", self.of(code)), ("attributes", self.of(vars(value))))
        for name, each in sorted(dict(read_by(code, value.__globals__)).items()):
            yield f"global {name!r}", self.of(each)

    def _code(self, code: CodeType) -> Iterator[str]:
        """What is done, wherever it is written."""
        yield from (code.co_code.hex(), repr(code.co_names))
        yield from map(self.of, code.co_consts)

    def _module(self, module: ModuleType) -> Iterator[str]:
        yield module.__name__
        if not is_library(module.__name__):
            yield self.of({name: each for name, each in vars(module).items() if not name.startswith("__")})

    def _class(self, kind: type) -> Iterator[str]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        yield from map(self.of, kind.__bases__)
        if is_library(kind.__module__):
            yield self.of(replaced_methods(kind))
            return
        own = {
            name: each
            for name, each in vars(kind).items()
            if isinstance(each, _DESCRIPTORS) or not name.startswith(("__", "_abc_"))
        }
        yield self.of(own)

    def _container(self, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from sorted(_digest(self.of(key), self.of(each)) for key, each in value.items())
        else:
            yield from (sorted if isinstance(value, set | frozenset) else list)(map(self.of, value))
        if type(value) not in _CONTAINERS:
            more = [getattr(value, name, None) for name in ("__dict__", "default_factory")]
            yield from map(self.of, (type(value), *more))


def _public(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in attributes.items() if not name.startswith("_")}


def _is_worked_out(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), str(name), None), cached_property)


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

"""Code: what of the world around it a function reads, and whose it is."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping, Sequence
from dis import Instruction
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec, resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any

_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def read_by(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The global values that code reads, each with its name, out of the globals `names`.

    Of a module of the user's own these are the attributes that the code names, or else all of it. Modules that are
    imported inside are imported now.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for at, step in enumerate(steps):
        if step.opname in _READS and step.argval in names:
            yield _followed(step.argval, names[step.argval], steps[at + 1 :])
        elif step.opname == "IMPORT_NAME":
            yield from _imported(step.argval, steps[at - 2].argval, names, steps[at + 1 :])
    if "globals" in code.co_names:
        yield from ((name, names[name]) for name in code.co_consts if isinstance(name, str) and name in names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from read_by(inner, names)


def _followed(name: str, value: Any, then: Sequence[Instruction]) -> tuple[str, Any]:
    """The value that is meant by `name`, or by `name.attribute` if that is a module of the user's own."""
    for step in then:
        is_own_module = isinstance(value, ModuleType) and not is_library(value.__name__)
        if not is_own_module or step.opname not in _ATTRIBUTES or step.argval not in vars(value):
            break
        name, value = f"{name}.{step.argval}", vars(value)[step.argval]
    return name, value


def _imported(
    name: str, level: int, names: Mapping[str, Any], then: Sequence[Instruction]
) -> Iterator[tuple[str, Any]]:
    """What an import inside a function brings."""
    full = resolve_name("." * level + name, names.get("__package__") or "") if level else name
    if is_library(full):
        yield full, full
        return
    try:
        module = import_module(full)
        top = import_module(full.partition(".")[0])
    except ImportError:
        yield full, None
        return
    chosen = [step.argval for step in then[: _end_of_import(then)] if step.opname == "IMPORT_FROM"]
    for each in chosen:
        yield f"{full}.{each}", getattr(module, each, None)
    if not chosen:
        yield from ((full, module), (top.__name__, top))


def _end_of_import(then: Sequence[Instruction]) -> int:
    is_part = (step.opname == "IMPORT_FROM" or step.opname.startswith("STORE_") for step in then)
    return next((at for at, each in enumerate(is_part) if not each), len(then))


def is_library(module: str | None) -> bool:
    """Whether it is installed, and not the user's own."""
    package = (module or "").partition(".")[0]
    if package in ("", "__main__"):
        return False
    file = _file_of(package)
    return (
        package in _ALWAYS or package in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file
    )


_ALWAYS = ("hookline", "torch", "transformers", "accelerate")
"""Also where they are worked on, outside the folder of what is installed."""


def _file_of(package: str) -> str:
    try:
        module = sys.modules.get(package)
        spec = module.__spec__ if module is not None else find_spec(package)
    except (AttributeError, ValueError):
        spec = None
    places = [
        getattr(module, "__file__", None),
        spec and spec.origin,
        *((spec and spec.submodule_search_locations) or ()),
    ]
    return next((place for place in places if isinstance(place, str)), "")


def replaced_methods(kind: type) -> dict[str, FunctionType]:
    """What a user has put in the place of a library class's methods."""
    found = {name: _function_in(each) for name, each in vars(kind).items()}
    return {
        name: each
        for name, each in found.items()
        if each is not None and not is_library(each.__globals__.get("__name__") or kind.__module__)
    }


def _function_in(value: Any) -> FunctionType | None:
    match value:
        case staticmethod() | classmethod():
            value = value.__func__
        case property():
            value = value.fget
        case cached_property():
            value = value.func
    return value if isinstance(value, FunctionType) else None

"""Checks the shapes in hookline's signatures while tests run.

`install()` wraps, as each module of the package is imported, the functions and methods whose annotations have shapes
(`Float[Tensor, "batch pos d_model"]`). Other functions run as they are, so that tests stay quick and profiles true.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from jaxtyping import AbstractArray
from jaxtyping._storage import pop_shape_memo, push_shape_memo  # jaxtyped() as a context knows no arguments: {self.n}

_SHAPED = re.compile(r"\b(Float|Int|Bool|Num|Shaped|Real|Integer)\[")


class ShapeError(TypeError):
    """A tensor's shape or dtype is not what a signature says."""


class Finder(MetaPathFinder):
    """Finds the modules of one package, and has their functions wrapped once they have run."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            for key, value in list(vars(module).items()):
                if inspect.isclass(value) and value.__module__ == name:
                    _wrap_methods(value)
                elif inspect.isfunction(value) and value.__module__ == name:
                    setattr(module, key, _checked(value))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(package: str = "hookline") -> None:
    """From now on, check the shapes in the signatures of this package's functions."""
    assert package not in sys.modules, "the package was imported before its shapes could be checked"
    sys.meta_path.insert(0, Finder(package))


def _wrap_methods(cls: type) -> None:
    for key, value in list(vars(cls).items()):
        if key == "__init__" and dataclasses.is_dataclass(cls):
            continue  # made by dataclass; what is wrong is said by `__post_init__`
        if inspect.isfunction(value):
            new: Any = _checked(value)
        elif isinstance(value, property) and value.fget is not None:
            new = property(_checked(value.fget), value.fset, value.fdel, value.__doc__)
        elif isinstance(value, classmethod | staticmethod):
            new = type(value)(_checked(value.__func__))
        else:
            continue
        if new is not value and getattr(new, "fget", new) is not getattr(value, "fget", value):
            setattr(cls, key, new)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    notes = getattr(function, "__annotations__", {})
    shaped = {key: note for key, note in notes.items() if isinstance(note, str) and _SHAPED.search(note)}
    if not shaped or inspect.isgeneratorfunction(function):
        return function
    arguments = _arguments_of(inspect.signature(function))
    space, resolved = inspect.unwrap(function).__globals__, dict[str, Any]()  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not resolved:
            resolved.update((key, eval(note, space)) for key, note in shaped.items())
        given = arguments(args, kwargs)
        push_shape_memo(given)
        try:
            wrong = [_wrong(function, key, given[key], hint) for key, hint in resolved.items() if key in given]
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                from hookline.errors import HooklineError

                if not isinstance(error, HooklineError):  # with one of ours it refuses by itself what does not fit
                    _raise(wrong, error)
                raise
            if "return" in resolved:
                wrong.append(_wrong(function, "return", result, resolved["return"]))
            _raise(wrong)
        finally:
            pop_shape_memo()
        return result

    return call


def _arguments_of(signature: inspect.Signature) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """What tells the arguments of a call by name; `Signature.bind` would take longer than the checks."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return lambda args, kwargs: signature.bind(*args, **kwargs).arguments
    names = tuple(signature.parameters)
    return lambda args, kwargs: dict(zip(names, args, strict=False)) | kwargs


def _wrong(function: Callable[..., Any], key: str, value: Any, hint: Any) -> str | None:
    if _fits(value, hint):
        return None
    shape = tuple(getattr(value, "shape", ())), getattr(value, "dtype", type(value).__name__)
    return f"{function.__module__}.{function.__qualname__}: {key} is {shape}, not {hint}"


def _raise(wrong: list[str | None], cause: Exception | None = None) -> None:
    messages = [each for each in wrong if each is not None]
    if messages and not isinstance(cause, ShapeError):
        raise ShapeError("\n".join(messages)) from cause


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a hint says, as far as tensors with shapes are concerned."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return isinstance(value, hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple and isinstance(value, tuple) and Ellipsis not in parts and len(parts) == len(value):
        return all(_fits(item, part) for item, part in zip(value, parts, strict=True))
    if origin in (list, Sequence) and isinstance(value, list):
        return all(_fits(item, parts[0]) for item in value)
    if origin is dict and isinstance(value, dict):
        return all(_fits(item, parts[1]) for item in value.values())
    return not isinstance(hint, type) or isinstance(value, hint)

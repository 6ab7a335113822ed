"""Signatures: the parameters of a module's `forward`, and the code of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

code_of = attrgetter("__code__")
"""The code of a function."""

_ANYTHING = (("args", "kwargs"), 0)
_known: WeakKeyDictionary[Callable[..., Any], tuple[tuple[str, ...], int]] = WeakKeyDictionary()


def parameters_of(module: nn.Module) -> tuple[tuple[str, ...], int]:
    """Return the names of the parameters, and how many of them can be passed by position."""
    found = _parameters(getattr(module.forward, "__func__", module.forward))
    if found == _ANYTHING and "forward" in vars(module):  # something wraps it, and passes on what it gets
        return _parameters(type(module).forward)
    return found


def _parameters(forward: Callable[..., Any]) -> tuple[tuple[str, ...], int]:
    found = _known.get(forward)
    if found is None:
        found = _known[forward] = _read(forward)
    return found


def _read(forward: Callable[..., Any]) -> tuple[tuple[str, ...], int]:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [each for each in inspect.signature(forward).parameters.values() if each.name != "self"]
    return tuple(each.name for each in parameters), sum(each.kind in by_position for each in parameters)


def code_or_none(function: Any) -> CodeType | None:
    """The code of a function; None if it is written in C, or has a class."""
    return getattr(function, "__code__", None)


def is_called(module: nn.Module) -> bool:
    """Whether the module can run; a ModuleList only holds others."""
    if isinstance(module, torch.jit.ScriptModule):
        return True  # the class of a traced module raises an error if it is asked for its `forward`
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward

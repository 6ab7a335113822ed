"""Signatures: the parameters of a module's `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

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

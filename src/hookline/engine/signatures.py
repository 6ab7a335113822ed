"""Signatures: the parameters of a module's `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_known: WeakKeyDictionary[Callable[..., Any], tuple[tuple[str, ...], int]] = WeakKeyDictionary()


def parameters_of(module: nn.Module) -> tuple[tuple[str, ...], int]:
    """Return the names of the parameters, and how many of them can be passed by position."""
    forward = getattr(module.forward, "__func__", module.forward)
    if forward not in _known:
        _known[forward] = _read(forward)
    return _known[forward]


def _read(forward: Callable[..., Any]) -> tuple[tuple[str, ...], int]:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [each for each in inspect.signature(forward).parameters.values() if each.name != "self"]
    return tuple(each.name for each in parameters), sum(each.kind in by_position for each in parameters)

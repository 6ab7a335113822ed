"""The types of what people write: names of points, hooks, and options about both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias

from torch import nn

Filter: TypeAlias = (
    str
    | int
    | tuple[Any, ...]
    | nn.Module
    | type[nn.Module]
    | re.Pattern[str]
    | Callable[[str], bool]
    | Iterable["Filter"]
    | dict[str, Any]
    | None
)
"""Which points: a name in any dialect, a glob, a regex, a predicate, a point, a module, a class of modules (the outputs
of all modules of exactly this class), or a list of these; or a dict from new names to points."""

HookFunction: TypeAlias = Callable[..., Any]
"""A hook: `hook(activation)` or `hook(activation, hook)`."""


class DeclaresPoints(Protocol):
    """A hook object that declares its own target: see `engine.HookObject`."""

    def declared(self, points: Any) -> Any:
        """Return the points of a model that it declares as its target."""


HookList: TypeAlias = Iterable[tuple[Filter, HookFunction] | DeclaresPoints]
"""Hooks with the names of their points; a hook object that declares its own target needs no name."""

Direction: TypeAlias = Literal["fwd", "bwd"]
"""Whether a hook gets activations or gradients."""

OnError: TypeAlias = Literal["raise", "skip"]
"""What is to be done when a hook fails."""

Stream: TypeAlias = Literal["text", "encoder", "image"]
"""What a point's positions belong to: the text, the input of an encoder beside a decoder, or the patches of images."""

ModuleCall: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Takes the arguments of a module's call, and returns its value."""

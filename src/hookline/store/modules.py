"""Modules: what a model is made of beside its weights, so that one whose parts were changed is another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import dtype, nn

from hookline.engine.points import HookPoint
from hookline.store.code import is_library
from hookline.store.fingerprint import OF_TORCH, fingerprint

_BY_USE = {"max_seq_len_cached", "gradient_checkpointing", "training"}
"""What libraries write on modules while these are used, and what has no effect on what they compute."""


def modules_digests(module: nn.Module, known: Mapping[int, str]) -> dict[str, str]:
    """The sum of the types of all modules, and for each attribute of modules that of its values."""
    parts = dict(module.named_modules())
    found: dict[str, Any] = {"class": {path: type(part) for path, part in parts.items()}}
    for path, part in parts.items():
        for name, value in _attributes(part):
            found.setdefault(f"attribute {name!r}", {})[path] = value
    return {name: fingerprint(values, known) for name, values in found.items()}


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Of a class of the user's own all of them; of a library's those that are plain: others are made in use."""
    if isinstance(part, HookPoint):
        return
    is_own = not is_library(type(part).__module__)
    for name, value in vars(part).items():
        if name in OF_TORCH or name == "forward":  # that is among the hooks
            continue
        if is_own or (name not in _BY_USE and not name.startswith("_") and _is_plain(value)):
            yield name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | complex | str | dtype | FunctionType)

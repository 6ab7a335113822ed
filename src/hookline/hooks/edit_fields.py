"""The fields of an edit: each says how its value is checked, printed, saved and loaded.

@dataclass(frozen=True, eq=False, repr=False)
class Scale(DataEdit):
    factor: float = edit_field(NUMBER)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any

import torch
from numpy import generic
from torch import Tensor

from hookline.errors import HooklineError
from hookline.hooks.fitting import as_tensor, described, number, own_copy, shown, units
from hookline.text.outliers import factor_of
from hookline.text.token_positions import Meaning, canonical, image_tokens, last, new_tokens, step, token

Tensors = dict[str, Tensor]
"""The tensors of a file, by their keys."""
_WORDS: dict[str, Meaning] = {"last": last, "image_tokens": image_tokens, "new_tokens": new_tokens}


def _unchanged(_: str, value: Any, __: Tensors) -> Any:
    return value


@dataclass(frozen=True)
class FieldType:
    """What a field of an edit holds."""

    check: Callable[[str, Any], Any]
    """From the field's name and the value that was given: the value to keep, or an error."""
    load: Callable[[str, Any, Tensors], Any]
    """From the field's name, what the JSON has, and the file's tensors: the value that was saved."""
    save: Callable[[str, Any, Tensors], Any] = _unchanged
    """From the key for a tensor, the value, and the file's tensors so far: what goes into the JSON."""
    show: Callable[[Any], str] = shown
    """The value as the edit prints it."""


def edit_field(kind: FieldType, default: Any = MISSING) -> Any:
    """A field of an edit that holds values of that type; None is allowed only as the default."""
    return dataclasses.field(default=default, metadata={"type": kind})


def type_of(field: dataclasses.Field[Any]) -> FieldType:
    """The type of a field that was made by `edit_field`."""
    kind: FieldType = field.metadata["type"]
    return kind


def _check_tensor(name: str, given: Any) -> Tensor:
    return own_copy(name, as_tensor(name, given))


def _check_bools(name: str, given: Any) -> Tensor:
    if not (isinstance(given, Tensor) and given.dtype == torch.bool):
        raise HooklineError(f"{name}= must be a bool tensor, not {described(given)}")
    return own_copy(name, given)


def _check_positions(name: str, given: Any) -> Any:
    found = canonical(given)
    return own_copy(name, found) if isinstance(found, Tensor) else found


def _check_integer(name: str, given: Any) -> int:
    found = given.item() if isinstance(given, generic) else given
    if isinstance(found, bool) or not isinstance(found, int):
        raise HooklineError(f"{name}= must be an integer, not {given!r}")
    return found


def _check_outliers(_: str, given: Any) -> Any:
    factor_of(given)
    return given


def _save_tensor(key: str, value: Tensor, tensors: Tensors) -> Any:
    tensors[key] = value.detach().cpu().contiguous()
    return {"tensor": key}


def _save_units(_: str, value: Any, __: Tensors) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _save_positions(key: str, value: Any, tensors: Tensors) -> Any:
    match value:
        case Meaning():
            return _save_meaning(value)
        case slice():
            return {"slice": [value.start, value.stop, value.step]}
        case Tensor() if value.ndim:
            return _save_tensor(key, value, tensors)
    return [int(each) for each in value] if isinstance(value, list | tuple | range) else int(value)


def _save_meaning(value: Meaning) -> dict[str, Any]:
    for word, meaning in _WORDS.items():
        if value == meaning:
            return {"meaning": word}
    only, what = getattr(value, "only", None), getattr(value, "what", None)
    if only is not None and value == step(only):
        return {"step": only}
    if what is not None:
        return {"token": what, "nth": getattr(value, "nth", -1)}
    raise HooklineError(f"the position {value!r} cannot be saved")


def _load_tensor(name: str, saved: Any, tensors: Tensors) -> Tensor:
    if isinstance(saved, dict) and list(saved) == ["tensor"] and saved["tensor"] in list(tensors):
        return tensors.pop(saved["tensor"])
    raise HooklineError(f"{name}: {saved!r} is not a tensor of the file")


def _load_number(name: str, saved: Any, _: Tensors) -> float:
    if isinstance(saved, bool) or not isinstance(saved, int | float):
        raise HooklineError(f"{name}: {saved!r} is not a number")
    return saved


def _load_units(name: str, saved: Any, _: Tensors) -> Any:
    parts = saved if isinstance(saved, list) else [saved]
    if not parts or not all(isinstance(each, int) and not isinstance(each, bool) for each in parts):
        raise HooklineError(f"{name}: {saved!r} is not an index or a list of indices")
    return saved


def _load_positions(name: str, saved: Any, tensors: Tensors) -> Any:
    if not isinstance(saved, dict):
        return _load_units(name, saved, tensors)
    match list(saved.items()):
        case [("tensor", _)]:
            return _load_tensor(name, saved, tensors)
        case [("meaning", str() as word)] if word in _WORDS:
            return _WORDS[word]
        case [("step", k)]:
            return step(k)
        case [("token", what), ("nth", nth)]:
            return token(what, nth)
        case [("slice", [start, stop, every])]:
            return slice(start, stop, every)
    raise HooklineError(f"{name}: {saved!r} is not a position")


TENSOR = FieldType(_check_tensor, _load_tensor, _save_tensor)
"""A tensor, or a number that is kept as one."""
BOOLS = FieldType(_check_bools, _load_tensor, _save_tensor)
NUMBER = FieldType(number, _load_number)
INTEGER = FieldType(_check_integer, _load_number)
UNITS = FieldType(units, _load_units, _save_units)
"""Indices of heads or neurons: one or several."""
POSITIONS = FieldType(_check_positions, _load_positions, _save_positions)
OUTLIERS = FieldType(_check_outliers, _unchanged)

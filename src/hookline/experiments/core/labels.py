"""Labels and plain values of a result: what may be one, how they are found, and how they are shown."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from operator import index
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hookline.errors import HooklineError

Label: TypeAlias = int | float | str
VERSION = "2"  # of the file format
_LARGEST = sys.float_info.max


def token_labels(tokens: Iterable[str]) -> list[str]:
    """Labels for positions: "3: Mary"; white space is written out where it is all there is."""
    return [f"{at}: {text.strip() or repr(text)}" for at, text in enumerate(tokens)]


def floats(values: Any) -> Tensor:
    """A copy of the values as floats on the CPU; whole numbers in double precision, which keeps them exact."""
    if not isinstance(values, Tensor | np.ndarray):
        raise HooklineError(f"the values of a result are a tensor, not {type(values).__name__}")
    x = torch.as_tensor(values).detach()
    if x.is_complex() or x.layout is not torch.strided:
        raise HooklineError(f"the values of a result are a plain tensor of real numbers, not {x.dtype}, {x.layout}")
    exact = x.dtype in (torch.float32, torch.float64)
    dtype = x.dtype if exact else torch.float32 if x.is_floating_point() else torch.float64
    return x.to("cpu", dtype, copy=True).contiguous()


def checked_axes(axes: Any, values: Tensor) -> tuple[str, ...]:
    """Names, one for each axis of the values."""
    if isinstance(axes, str) or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
        raise HooklineError(f'axes are names, as in ("layer", "pos"), not {axes!r}')
    if len(set(axes)) != len(axes) or "value" in axes:
        raise HooklineError(f'the axes must differ, and none be called "value": not {listed(axes)}')
    if len(axes) != values.ndim:
        raise HooklineError(f"{len(axes)} axes ({listed(axes)}) for values of shape {list(values.shape)}")
    return tuple(axes)


def checked_coords(coords: Any, axes: tuple[str, ...], values: Tensor) -> dict[str, list[Label]]:
    """A label for each place on each axis."""
    if set(coords) != set(axes):
        raise HooklineError(f"every axis has coords and nothing else has: {listed(axes)}, not {listed(coords)}")
    checked = {axis: [_label(axis, each) for each in coords[axis]] for axis in axes}
    for (axis, labels), size in zip(checked.items(), values.shape, strict=True):
        if len(labels) != size:
            raise HooklineError(f"axis {axis!r} has {size} places but {len(labels)} labels: {_some(labels)}")
        if not labels:
            raise HooklineError(f"axis {axis!r} is empty: a result has at least one cell")
        twice = next((each for at, each in enumerate(labels) if each in labels[:at]), None)
        if twice is not None:
            raise HooklineError(f"axis {axis!r} has the label {twice!r} twice: number them, as token_labels(…) does")
    return checked


def _label(axis: str, label: Any) -> Label:
    plain = label.item() if isinstance(label, Tensor | np.generic) and label.ndim == 0 else label
    if not is_label(plain):
        raise HooklineError(f"a label is a number or a string, but axis {axis!r} has {label!r}")
    return plain


def is_label(x: Any) -> bool:
    """Whether something may be a label."""
    return isinstance(x, str) or (isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= _LARGEST)


def matches(label: Label, want: Any) -> bool:
    """Whether "3: Mary" is meant by 3 or by "Mary"."""
    number, colon, text = str(label).partition(": ")
    if not isinstance(label, str) or not colon or not number.isdigit() or not is_label(want):
        return False
    return number == str(want) if isinstance(want, int) else text.strip() == str(want).strip() != ""


def not_found(axis: str, labels: list[Label], want: Any, several: list[Label]) -> str:
    """What to say of a label that is not there, or there several times."""
    if several:
        return f"{axis} {want!r} is there {len(several)} times: give one of {listed(several)}"
    near = get_close_matches(str(want), list(map(str, labels)), n=5, cutoff=0.4) if isinstance(want, str) else []
    advice = f"Did you mean {listed(near)}?" if near else f"The labels are {_some(labels)}."
    is_place = isinstance(want, int) and not isinstance(want, bool) and -len(labels) <= want < len(labels)
    by_place = f" By place it is isel({axis}={want})." if is_place else ""
    return f"axis {axis!r} has no label {want!r}. {advice}{by_place}"


def indices(axis: str, labels: list[Label], at: Any) -> int | list[int]:
    """Places on an axis as an index, or as a list of them, none of it negative."""
    size = len(labels)
    if isinstance(at, slice):
        chosen = list(range(size))[at]
        if not chosen:
            raise HooklineError(f"{at!r} chooses nothing of axis {axis!r}, which has {size} labels: {_some(labels)}")
        return chosen
    if isinstance(at, Tensor | np.ndarray):
        at = at.tolist()
    if isinstance(at, list | tuple | range) and len(at):
        return [_one(axis, size, each) for each in at]
    return _one(axis, size, at)


def _one(axis: str, size: int, at: Any) -> int:
    if isinstance(at, bool) or not hasattr(at, "__index__"):
        raise HooklineError(f"{at!r} is no place on axis {axis!r}: give an index, a list, or a slice; sel takes labels")
    if not -size <= index(at) < size:
        raise HooklineError(f"place {at} of axis {axis!r}, but it has {size}: 0 to {size - 1}")
    return index(at) % size


def taken(values: Tensor, dim: int, at: int | list[int]) -> Tensor:
    """What is at one place, or at several, of an axis."""
    return values.select(dim, at) if isinstance(at, int) else values.index_select(dim, torch.tensor(at))


def checked_key(key: Any) -> str:
    """A name in `info`."""
    if not isinstance(key, str):
        raise HooklineError(f"the keys of info are strings, not {key!r}")
    return key


def plain(value: Any, key: str) -> Any:
    """A value as JSON can keep it."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise HooklineError(f"info[{key!r}] has a whole number above {_LARGEST:g}")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [plain(each, key) for each in value]
    if isinstance(value, dict):
        return {checked_key(name): plain(each, key) for name, each in value.items()}
    raise HooklineError(f"info[{key!r}] must be plain (numbers, strings, lists, dicts) or a Result, not {value!r}")


def needed(library: str, verb: str, extra: str) -> Any:
    """A library that not everybody has."""
    try:
        return import_module(library)
    except ImportError as error:
        raise HooklineError(f'{verb} needs {library}: pip install "hookline[{extra}]"') from error


def first_sum(content: str, tensors: dict[str, Tensor]) -> str:
    """The checksum that results of the first version have."""
    total = zlib.crc32(content.encode())
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def about(model: Any, what: str) -> dict[str, str]:
    """What `info` says about an experiment in words, for titles: what was done, and on which model."""
    return {"about": what, "model": model.cfg.model_name}


def said_points(points: str | Iterable[str]) -> str:
    """The points that were asked for, in words."""
    return points if isinstance(points, str) else ", ".join(points)


def number(x: float) -> str:
    """A number as people read it."""
    return f"{x:.4g}"


def said(value: bool | float | str) -> str:
    """A plain value as people read it."""
    return number(value) if isinstance(value, float) else str(value)


def listed(names: Iterable[Any]) -> str:
    """Names, quoted, in a row."""
    return ", ".join(map(repr, names)) or "none"


def _some(labels: list[Label]) -> str:
    return listed(labels) if len(labels) <= 8 else f"{listed(labels[:4])}, … {listed(labels[-2:])}"

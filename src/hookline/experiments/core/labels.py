"""Labels and plain values of a result: which are allowed, how they are found, and how they are printed."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
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
_LARGEST = sys.float_info.max


def token_labels(tokens: Iterable[str]) -> list[str]:
    """Labels of positions: "3: Mary". A token of white space only is written as in Python."""
    return [f"{at}: {text.strip() or repr(text)}" for at, text in enumerate(tokens)]


def floats(values: Any) -> Tensor:
    """A copy of the values as floats on the CPU; integers become float64, which represents them exactly."""
    if not isinstance(values, Tensor | np.ndarray):
        raise HooklineError(f"the values of a result are a tensor, not {type(values).__name__}")
    x = torch.as_tensor(values).detach()
    if x.is_complex() or x.layout is not torch.strided:
        raise HooklineError(f"the values of a result are a dense tensor of real numbers, not {x.dtype}, {x.layout}")
    dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.float64
    return x.to("cpu", dtype, copy=True).contiguous()


def checked_axes(axes: Any, values: Tensor) -> tuple[str, ...]:
    """The names of the axes, one for each dimension of the values."""
    if isinstance(axes, str) or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
        raise HooklineError(f'axes are names, as in ("layer", "pos"), not {axes!r}')
    if len(set(axes)) != len(axes) or "value" in axes:
        raise HooklineError(f'the axes must have different names, and none may be called "value", not {listed(axes)}')
    if len(axes) != values.ndim:
        raise HooklineError(f"{len(axes)} axes ({listed(axes)}) for values of shape {list(values.shape)}")
    return tuple(axes)


def checked_coords(coords: Any, axes: tuple[str, ...], values: Tensor) -> dict[str, list[Label]]:
    """The labels of each axis: one for each index, without duplicates."""
    if set(coords) != set(axes):
        raise HooklineError(f"coords must have labels for the axes {listed(axes)}, but has them for {listed(coords)}")
    checked = {axis: [_label(axis, label) for label in coords[axis]] for axis in axes}
    for (axis, labels), size in zip(checked.items(), values.shape, strict=True):
        if len(labels) != size:
            raise HooklineError(f"axis {axis!r} has size {size} but {len(labels)} labels: {_some(labels)}")
        if not labels:
            raise HooklineError(f"axis {axis!r} is empty: a result has at least one cell")
        if len(set(labels)) < len(labels):
            twice = next(label for label, count in Counter(labels).items() if count > 1)
            raise HooklineError(f"axis {axis!r} has the label {twice!r} twice: number them, as token_labels(…) does")
    return checked


def _label(axis: str, label: Any) -> Label:
    if type(label) is str or (type(label) is int and abs(label) <= _LARGEST):
        return label
    plain = scalar(label)
    if not is_label(plain):
        raise HooklineError(f"a label is a number or a string, but axis {axis!r} has {label!r}")
    return plain


def scalar(x: Any) -> Any:
    """A tensor or array of one number as that number; anything else unchanged."""
    return x.item() if isinstance(x, Tensor | np.generic) and x.ndim == 0 else x


def is_label(x: Any) -> bool:
    """Whether a value can be a label."""
    return isinstance(x, str) or (isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= _LARGEST)


def find_label(axis: str, labels: list[Label], want: Any, *, has_isel: bool = False) -> int:
    """The index of a label; "3: Mary" is also found by 3 and by "Mary". `has_isel`: errors suggest `isel`."""
    want = scalar(want)
    matches = [at for at, label in enumerate(labels) if is_label(want) and label == want]
    matches = matches or [at for at, label in enumerate(labels) if is_label(want) and _matches(label, want)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise HooklineError(
            f"{axis} {want!r} occurs {len(matches)} times: use one of {listed(labels[at] for at in matches)}"
        )
    same = next((label for label in labels if isinstance(want, str) and str(label) == want), None)
    if same is not None:
        raise HooklineError(f"axis {axis!r} has no label {want!r}: its labels are numbers, so use {axis}={same!r}")
    near = get_close_matches(str(want), list(map(str, labels)), n=5, cutoff=0.4) if isinstance(want, str) else []
    advice = f"Did you mean {listed(near)}?" if near else f"The labels are {_some(labels)}."
    is_index = isinstance(want, int) and not isinstance(want, bool) and -len(labels) <= want < len(labels)
    by_index = f" To select by index, use isel({axis}={want})." if is_index and has_isel else ""
    raise HooklineError(f"axis {axis!r} has no label {want!r}. {advice}{by_index}")


def _matches(label: Label, want: Label) -> bool:
    number, colon, text = str(label).partition(": ")
    if not isinstance(label, str) or not colon or not number.isdigit():
        return False
    return number == str(want) if isinstance(want, int) else text.strip() == str(want).strip() != ""


def indices(axis: str, labels: list[Label], at: Any) -> int | list[int]:
    """An index, a list or a slice along an axis, as one index or a list of them, none negative."""
    size = len(labels)
    if isinstance(at, slice):
        chosen = list(range(size))[at]
        if not chosen:
            raise HooklineError(f"{at!r} selects nothing of axis {axis!r}, which has {size} labels: {_some(labels)}")
        return chosen
    if isinstance(at, Tensor | np.ndarray):
        at = at.tolist()
    if isinstance(at, list | tuple | range) and len(at):
        return [_index(axis, size, number) for number in at]
    return _index(axis, size, at)


def _index(axis: str, size: int, at: Any) -> int:
    if isinstance(at, bool) or not hasattr(at, "__index__"):
        raise HooklineError(f"{at!r} is not an index of axis {axis!r}: use an index, a list or a slice, or sel(…)")
    if not -size <= index(at) < size:
        raise HooklineError(f"index {at} of axis {axis!r} is out of range: it has {size} labels")
    return index(at) % size


def plain_label(value: Any, key: Any) -> Any:
    """A value of `info` as JSON can store it."""
    if not isinstance(key, str):
        raise HooklineError(f"the keys of info are strings, not {key!r}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise HooklineError(f"info[{key!r}] has an integer above {_LARGEST:g}")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [plain_label(element, key) for element in value]
    if isinstance(value, dict):
        return {name: plain_label(element, name) for name, element in value.items()}
    raise HooklineError(f"info[{key!r}] must be plain (numbers, strings, lists, dicts) or a Result, not {value!r}")


def needed(library: str, verb: str, extra: str) -> Any:
    """Import an optional library."""
    try:
        return import_module(library)
    except ImportError as error:
        raise HooklineError(f'{verb} needs {library}: pip install "hookline[{extra}]"') from error


def first_sum(content: str, tensors: dict[str, Tensor]) -> str:
    """The checksum in result files of the first version."""
    total = zlib.crc32(content.encode())
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def about(model: Any, what: str) -> dict[str, Any]:
    """What was done, on which model, and the points where it has hooks, if any: entries of `info`."""
    hooks = [hook.point.name for hook in model.index.active_hooks()]
    return {"about": what, "model": model.cfg.model_name, **({"hooks": hooks} if hooks else {})}


def said_points(points: str | Iterable[str]) -> str:
    """The points that were asked for, as text."""
    return points if isinstance(points, str) else ", ".join(points)


def number_text(x: float | str) -> str:
    """A float with four digits; anything else as text."""
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def listed(names: Iterable[Any]) -> str:
    """Names in quotes, separated by commas."""
    return ", ".join(map(repr, names)) or "none"


def _some(labels: list[Label]) -> str:
    return listed(labels) if len(labels) <= 8 else f"{listed(labels[:4])}, … {listed(labels[-2:])}"

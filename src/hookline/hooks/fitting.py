"""What edits as data are made of: checked when an edit is made, and fitted to an activation when it is applied."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from numpy import generic, ndarray
from torch import Tensor

from hookline.engine.casting import cast
from hookline.errors import HooklineError
from hookline.text.outliers import Outliers, Outlying, RowMean, is_outlying, row_norms

Units: TypeAlias = int | Sequence[int] | None
"""Heads or neurons: one, several, or all."""


def units(name: str, given: Any) -> Units:
    """One index, or a tuple of them."""
    items = given.tolist() if isinstance(given, Tensor | ndarray | generic) else given
    if items is None or (isinstance(items, int) and not isinstance(items, bool)):
        return items
    if isinstance(items, Sequence) and not isinstance(items, str) and items:
        indices = tuple(each.item() if isinstance(each, generic) else each for each in items)
        if all(isinstance(each, int) and not isinstance(each, bool) for each in indices):
            return indices
    raise HooklineError(f"{name}= is an index or several, not {described(given)}")


def as_tensor(name: str, given: Any) -> Tensor:
    """A tensor, also of a number."""
    if isinstance(given, Tensor):
        return given
    if not isinstance(given, int | float):
        raise HooklineError(f"{name}= is a tensor or a number, not {described(given)}: torch.as_tensor(…) makes one")
    return torch.tensor(number(name, given), dtype=torch.float64)


def number(name: str, given: Any) -> float:
    """A number that JSON can hold."""
    plain = given.item() if isinstance(given, generic) else given
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not abs(plain) <= sys.float_info.max:
        raise HooklineError(f"{name}= is a number, not {described(given)}")
    return float(plain)


def own_copy(name: str, given: Tensor) -> Tensor:
    """A copy that nobody else writes to."""
    if given.requires_grad:
        raise HooklineError(
            f"{name}= needs gradients, but an edit is data: pass {name}.detach(), or write a hook function to train it"
        )
    if given.layout != torch.strided or given.is_nested:
        raise HooklineError(f"{name}= is {_kind(given)}, but an edit takes a dense one: pass {name}.to_dense()")
    if given.device.type == "meta":
        raise HooklineError(f"{name}= has no values: it is on the device 'meta'")
    return given.clone(memory_format=torch.contiguous_format)


def _kind(x: Tensor) -> str:
    return "a nested tensor" if x.is_nested else f"a tensor of the layout {x.layout}"


def like(value: Any, x: Tensor) -> Tensor:
    """A value as wide as the activation."""
    if value.ndim not in (0, 1, x.ndim):
        raise HooklineError(
            f"a value of shape {list(value.shape)} for an activation of shape {list(x.shape)}: give it as many axes, "
            f"with 1 where it is the same for all, or only the last"
        )
    if value.is_floating_point() and not x.is_floating_point() and not bool((value == value.round()).all()):
        raise HooklineError(f"a value with fractions for an activation of {x.dtype}")
    _check_range(value, x.dtype)
    return broadcast(cast(value, x), x)


def _check_range(value: Tensor, dtype: torch.dtype) -> None:
    """An error if a finite value would become infinite."""
    if not (value.is_floating_point() and dtype.is_floating_point):
        return
    limit = torch.finfo(dtype).max
    if torch.finfo(value.dtype).max > limit and value.numel():
        largest = value.abs().masked_fill(~value.isfinite(), 0).max().item()
        if largest > limit:
            raise HooklineError(f"a value of {largest:g} for an activation of {dtype}, which ends at {limit:g}")


def broadcast(value: Tensor, x: Tensor) -> Tensor:
    """The value in the shape of the activation, on its device."""
    try:
        return value.to(x.device).expand(x.shape)
    except RuntimeError:
        raise HooklineError(
            f"a {'mask' if value.dtype == torch.bool else 'value'} of shape {list(value.shape)} does not broadcast to "
            f"the activation's shape {list(x.shape)} (for positions there is pos=)"
        ) from None


def chosen(name: str, indices: Units, x: Tensor, axis: int) -> Tensor:
    """A mask that is true at some places of one axis."""
    wanted = [indices] if isinstance(indices, int) else list(indices or ())
    size = x.shape[axis]
    outside = [index for index in wanted if index not in range(-size, size)]
    if outside:
        raise HooklineError(f"{name}={outside[0]}, but there are {size}")
    mask = torch.zeros(size, dtype=torch.bool)
    mask[wanted] = True
    return mask.to(x.device).view([size if each == axis else 1 for each in range(x.ndim)])


def head_axis(point: Any) -> int:
    """Which axis of a point is that of heads."""
    names = point.axes.split()
    for name in ("h", "g"):
        if name in names:
            return names.index(name)
    raise HooklineError(
        f"head= is for a point with an axis of heads, such as 'blocks.0.attn.hook_z'; {point.name!r} has "
        f"{'the axes ' + point.axes if point.axes else 'none that is known'}"
    )


def averaged(value: Tensor, axes: str, over: Tensor | None, outliers: Outliers) -> tuple[Tensor, Outlying]:
    """The mean over rows and positions, or those selected by `over`, without outlying positions; and their number.

    Attention patterns are averaged over rows only, separately at each position.
    """
    names = axes.split() or (["b", "p", "d"] if value.ndim == 3 else ["b"])
    places = _places(names)
    if over is not None and [*over.shape] != [value.shape[place] for place in places]:
        raise HooklineError(f"over= has the shape {list(over.shape)}, but the value {list(value.shape)} ({names})")
    rows = value.double().movedim(places, list(range(len(places))))
    over = torch.ones(rows.shape[: len(places)], dtype=torch.bool) if over is None else over
    over = over.to(value.device)
    at_each = {"p", "k"} <= set(names)
    if not bool(over.any(0).all() if at_each else over.any()):
        raise HooklineError("over= leaves nothing to average" + (" at some positions" if at_each else ""))
    mean = RowMean(outliers if len(places) > 1 and not at_each else "include", per_position=at_each)
    if at_each:
        for row, counts in zip(rows, over, strict=True):
            mean.add(row, counts)
    else:
        mean.add(rows[over])
        if mean.finds_outliers():
            mean.add(rows[over])
    found = mean.value if len(places) == 1 else mean.value[None]
    return found.movedim(list(range(len(places))), places), mean.outlying


def kept_where_outlying(new: Tensor, x: Tensor, axes: str, bounds: float | Tensor) -> Tensor:
    """A new value, with the activation unchanged at positions where its norm is above `bounds`."""
    places = _places(axes.split() or ["b", "p", "d"])
    norms = row_norms(x.movedim(places, list(range(len(places)))), len(places))
    is_out = is_outlying(norms, bounds)
    sizes = [x.shape[index] if index in places else 1 for index in range(x.ndim)]
    return torch.where(is_out.view(sizes), x, new) if bool(is_out.any()) else new


def _places(names: Sequence[str]) -> list[int]:
    """The axes of rows and positions."""
    return [index for index, name in enumerate(names) if name in "bpk"][:2]


def check_float(kind: str, x: Tensor, hook: Any) -> None:
    """Some edits mean nothing for whole numbers."""
    if not (x.is_floating_point() or x.is_complex()):
        raise HooklineError(f"{kind} is for numbers with fractions; at {hook.name!r} there are {x.dtype}")


def is_same(a: Any, b: Any) -> bool:
    """Whether two fields of edits are equal; tensors by value, NaN equal to itself."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        b = b.to(a.device)
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return list(a) == list(b)
    return type(a) is type(b) and bool(a == b)


def described(value: Any) -> str:
    """What was given in place of something else, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}, of shape {list(value.shape)}"
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "one that is too large for a float"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """A field of an edit, as it prints."""
    if isinstance(value, Tensor) and value.ndim:
        return f"<{list(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
    if isinstance(value, Tensor):
        return f"{value.item():g}"
    return f"{value:g}" if isinstance(value, float) else repr(list(value) if isinstance(value, tuple) else value)

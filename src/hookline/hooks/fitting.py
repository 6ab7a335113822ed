"""How the values of an edit are fitted to an activation: shape, dtype, heads, neurons, and means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.hooks.edit_fields import Units
from hookline.text.outliers import Outliers, Outlying, RowMean, is_outlying, row_norms
from hookline.values.casting import cast


def like(value: Any, x: Tensor) -> Tensor:
    """The value in the shape, dtype and device of the activation."""
    if value.ndim not in (0, 1, x.ndim):
        raise HooklineError(
            f"a value of shape {list(value.shape)} for an activation of shape {list(x.shape)}: give it as many axes, "
            f"with size 1 where it is the same for all, or only the last axis"
        )
    if value.is_floating_point() and not x.is_floating_point() and not bool((value == value.round()).all()):
        raise HooklineError(f"a value with fractions for an activation of {x.dtype}")
    if value.is_floating_point() and x.is_floating_point() and value.numel():
        limit = torch.finfo(x.dtype).max
        if torch.finfo(value.dtype).max > limit and bool((value.isfinite() & (value.abs() > limit)).any()):
            raise HooklineError(f"the value does not fit into {x.dtype}: its maximum is {limit:g}")
    return broadcast(cast(value, x), x)


def broadcast(value: Tensor, x: Tensor) -> Tensor:
    """The value in the shape of the activation, on its device."""
    try:
        return value.to(x.device).expand(x.shape)
    except RuntimeError:
        raise HooklineError(
            f"a {'mask' if value.dtype == torch.bool else 'value'} of shape {list(value.shape)} does not broadcast to "
            f"the activation's shape {list(x.shape)} (to select positions, use pos=)"
        ) from None


def chosen(name: str, indices: Units, x: Tensor, axis: int) -> Tensor:
    """A mask that is true at the given indices of one axis, and broadcasts to the activation."""
    requested = [indices] if isinstance(indices, int) else list(indices or ())
    size = x.shape[axis]
    outside = [index for index in requested if index not in range(-size, size)]
    if outside:
        raise HooklineError(f"{name}={outside[0]} is out of range: there are {size}, 0 to {size - 1}")
    mask = torch.zeros(size, dtype=torch.bool)
    mask[requested] = True
    return mask.to(x.device).view([size if dimension == axis else 1 for dimension in range(x.ndim)])


def head_axis(point: Any) -> int:
    """The index of the head axis of a point."""
    names = point.axes.split()
    for name in ("h", "g"):
        if name in names:
            return names.index(name)
    raise HooklineError(
        f"head= needs a point with a head axis, such as 'blocks.0.attn.hook_z'; the axes of {point.name!r} are "
        f"{point.axes or 'unknown'}"
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
    average = mean.value if len(places) == 1 else mean.value[None]
    return average.movedim(list(range(len(places))), places), mean.outlying


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
    """Raise an error if the activation is an integer tensor."""
    if not (x.is_floating_point() or x.is_complex()):
        raise HooklineError(f"{kind} needs a floating-point activation; {hook.name!r} has {x.dtype}")


def real_upcast(kind: str, x: Tensor, hook: Any) -> Tensor:
    """A real activation in at least float32."""
    if not x.is_floating_point():
        raise HooklineError(f"{kind} needs a real floating-point activation; {hook.name!r} has {x.dtype}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit_of(vector: Tensor, like: Tensor) -> Tensor:
    """A vector, or one for each position, with norm 1 along the last axis; in the dtype of `like`."""
    unit = vector.to(like.device, torch.promote_types(vector.dtype, torch.float64))
    unit = unit / unit.abs().amax(-1, keepdim=True)  # so that no square overflows or vanishes
    return (unit / unit.norm(dim=-1, keepdim=True)).to(like.dtype)

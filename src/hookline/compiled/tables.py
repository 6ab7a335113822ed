"""Tables: an edit as data, written into the tensors of its slot.

The values are computed by the edits themselves, with the checks and the rounding of an uncompiled run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hookline.compiled.classify import code_of, function_of
from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.program import Slot, SlotSpec
from hookline.compiled.traceable import constants_of
from hookline.engine import HookAction
from hookline.errors import HooklineError
from hookline.hooks.data_edits import Add, DataEdit, Mean, ProjectOut, Scale, Zero
from hookline.hooks.fitting import averaged


@contextmanager
def all_are_tables() -> Iterator[None]:
    """A block that writes tables; NotCompiled if an edit is not one for this text."""
    try:
        yield
    except (HooklineError, NotCompiled) as error:
        raise NotCompiled(f"an edit is not a table here: {error}") from None


def spec_of(action: HookAction) -> SlotSpec:
    """The slot that a hook needs."""
    edit, site = action.hook, action.point.site
    if not isinstance(edit, DataEdit):
        function = function_of(action)
        return SlotSpec(site, "function", code=code_of(function), constants=constants_of(function))
    kind: Any = "project" if isinstance(edit, ProjectOut) else "affine"
    return SlotSpec(site, kind, _spread(edit, len(action.point.axes.split()) or 3))


def _spread(edit: DataEdit, ndim: int) -> int:
    """Whether the values of an edit differ by row (1), by position (2), or not at all."""
    spread = 0
    for name in ("value", "vector", "mask"):
        values = getattr(edit, name, None)
        if isinstance(values, Tensor) and not isinstance(edit, Mean):
            sizes = [*[1] * (ndim - values.ndim), *values.shape] if values.ndim > 1 else [1, 1]
            spread = max(spread, 2 if sizes[1] > 1 else 1 if sizes[0] > 1 else 0)
    return spread


def write_table(slot: Slot, action: HookAction, width: int) -> None:
    """Write the values of an edit into its slot, for so many positions."""
    if slot.kind == "function":
        slot.set_function(function_of(action), action.point)
        return
    edit: Any = action.hook
    x = torch.zeros((slot.clock.rows, width, *slot.features.shape), dtype=slot.features.dtype, device=slot.gate.device)
    where = edit._where(x, action.point)
    where = None if where is None else where.expand(x.shape)
    keep, add, unit = 1.0, x, None
    if isinstance(edit, ProjectOut):
        edit.changed(x, action.point)  # for its checks
        unit = _unit(edit.direction, slot.unit)
    else:
        keep, add = _affine(edit, x, action.point)
    if slot.kind != "project":
        is_on = torch.ones_like(x, dtype=torch.bool) if where is None else where
        _fill(slot.keep, torch.where(is_on, keep, torch.ones_like(x, dtype=slot.keep.dtype)))
        _fill(slot.add, torch.where(is_on, add, torch.zeros_like(add)))
    if slot.kind != "affine":
        slot.unit.copy_(torch.zeros_like(slot.unit) if unit is None else unit)
        _fill(slot.where, torch.ones_like(x, dtype=torch.bool) if where is None or unit is None else where)


def _fill(table: Tensor, values: Tensor) -> None:
    """Write values of all rows and positions, or those that the table distinguishes."""
    rows, width = (values.shape[axis] if table.shape[axis] > 1 else 1 for axis in (0, 1))
    table[:, :width].copy_(values[:rows, :width])


def _affine(edit: Any, x: Tensor, point: Any) -> tuple[float, Tensor]:
    """What the activation is multiplied by, and what is added to it."""
    if isinstance(edit, Zero):
        return 0.0, x
    if isinstance(edit, Scale):
        edit.changed(x, point)
        return edit.factor, x
    if isinstance(edit, Add):
        return 1.0, edit.changed(x, point)
    if isinstance(edit, Mean) and edit.value.ndim == x.ndim and edit.pos is None:  # type: ignore[union-attr]
        outlying = averaged(edit.value, point.axes, edit.over, edit.outliers)[1]  # type: ignore[arg-type]
        if outlying.count:
            raise NotCompiled("mean leaves outlying positions as they are; outliers='include' does not")
    return 0.0, edit.changed(x, point)


def _unit(direction: Tensor, like: Tensor) -> Tensor:
    unit = direction.to(like.device, torch.float64)
    unit = unit / unit.abs().max()
    return (unit / unit.norm()).to(like.dtype)

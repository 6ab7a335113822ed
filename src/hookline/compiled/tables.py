"""Tables: an edit as data, written into the tensors of its slot.

The values are computed by the edits themselves, with the checks and the rounding of an uncompiled run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hookline.compiled.classify import ALONG, code_of, function_of
from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.program import Slot, SlotSpec
from hookline.compiled.traceable import constants_of
from hookline.engine import HookAction
from hookline.errors import HooklineError
from hookline.hooks.data_edits import Add, Cap, DataEdit, Mean, Scale, Zero
from hookline.hooks.fitting import averaged, unit_of


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
    kind: Any = "along" if _is_along(edit) else "affine"
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
    is_on = torch.ones_like(x, dtype=torch.bool) if where is None else where
    is_along = _is_along(edit)
    keep, add = (1.0, x) if is_along else _affine(edit, x, action.point)
    if slot.kind != "along":
        _fill(slot.keep, torch.where(is_on, keep, torch.ones_like(x, dtype=slot.keep.dtype)))
        _fill(slot.add, torch.where(is_on, add, torch.zeros_like(add)))
    if slot.kind != "affine":
        _write_along(slot, edit if is_along else None, x, action.point)
        _fill(slot.where, is_on if is_along else torch.ones_like(is_on))


def _is_along(edit: DataEdit) -> bool:
    """Whether an edit moves the activation along a direction, by a length that depends on the activation."""
    return type(edit) in ALONG or (isinstance(edit, Add) and edit.match_norm)


def _write_along(slot: Slot, edit: Any, x: Tensor, point: Any) -> None:
    """Write the direction of an edit, the bounds of the component along it, and what is added; None: nothing."""
    low, high, gain, unit = -torch.inf, torch.inf, 0.0, torch.zeros_like(x, dtype=slot.unit.dtype)
    if edit is not None:
        edit.changed(x, point)  # for its checks
        unit = (edit.unit(unit) if isinstance(edit, Add) else unit_of(edit.direction, unit)).expand(x.shape)
    if isinstance(edit, Add):
        gain = edit.coefficient
    elif isinstance(edit, Cap):
        low, high = (low if edit.low is None else edit.low), (high if edit.high is None else edit.high)
    elif edit is not None:
        low = high = 0.0
    _fill(slot.unit, unit)
    slot.bounds.copy_(torch.tensor([low, high]))
    slot.gain.fill_(gain)


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

"""Edits as data: what is done to an activation, as a value that prints, compares, and can be saved.

    model.run_with_hooks(prompt, fwd_hooks=[("blocks.3.attn.hook_z", zero(head=5))])
    with model.hooks([("blocks.2.hook_resid_post", add(direction, 4.0, pos=last))]): …

Each takes `pos=` (see `positions.py`), `head=`, `neuron=` (places on the last axis) and `mask=` (a bool tensor that
broadcasts to the activation); several together mean where all of them hold. Elsewhere nothing is changed.

A tensor given as a value has as many axes as the activation (1 where it is the same for all), or one: the last; or
none. It is copied when the edit is made.
"""

from __future__ import annotations

import logging
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar
from zlib import crc32

import torch
from numpy import generic
from torch import Tensor

from hookline.engine.actions import Edit, HookAction
from hookline.engine.batch_index import one_draw
from hookline.engine.callbacks import HookObject
from hookline.engine.gradients import BackwardHook
from hookline.engine.points import HookPoint
from hookline.engine.taps import now
from hookline.errors import HooklineError
from hookline.hooks.fitting import (
    Units,
    as_tensor,
    averaged,
    broadcast,
    check_float,
    chosen,
    head_axis,
    is_same,
    kept_where_outlying,
    like,
    number,
    own_copy,
    shown,
    told,
    units,
)
from hookline.text.outliers import Outliers, factor_of
from hookline.text.token_positions import Positions, at, canonical

_log = logging.getLogger("hookline")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DataEdit(HookObject):
    """What all edits have in common: where they apply."""

    kind: ClassVar[str]

    pos: Positions = None
    head: Units = None
    neuron: Units = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("head", "neuron"):
            self._set(name, units(name, getattr(self, name)))
        if self.mask is not None and not (isinstance(self.mask, Tensor) and self.mask.dtype == torch.bool):
            raise HooklineError(f"mask= is a tensor of bools that broadcasts to the activation, not {told(self.mask)}")
        if self.pos is not None:
            self._set("pos", canonical(self.pos))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                self._set(field.name, own_copy(field.name, value))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """What becomes of the activation, where the edit applies."""
        raise NotImplementedError

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        """The activation after the edit."""
        return self.everywhere(x, hook) if self.pos is None else at(self.pos, self.everywhere)(x, hook)

    def everywhere(self, x: Tensor, hook: Any) -> Tensor:
        """The activation after the edit, at all positions."""
        new = self.changed(x, hook)
        where = self._where(x, hook)
        return new if where is None else torch.where(where, new, x)

    def _where(self, x: Tensor, hook: Any) -> Tensor | None:
        masks = []
        if self.head is not None:
            masks.append(chosen("head", self.head, x, head_axis(hook)))
        if self.neuron is not None:
            masks.append(chosen("neuron", self.neuron, x, x.ndim - 1))
        if self.mask is not None:
            masks.append(broadcast(self.mask, x))
        found: Tensor | None = None
        for mask in masks:
            found = mask if found is None else found & mask
        return found

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> HookAction:
        """The edit of the activation at a point, or of its gradient."""
        if self.head is not None:
            head_axis(point)
        if self.neuron is not None and point.axes.split()[-1:] in (["p"], ["k"]):
            raise HooklineError(f"neuron= is a place on the last axis, which at {point.name!r} is one of positions")
        return (EditAction if dir == "fwd" else BackwardHook)(point, self, prepend=prepend)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(is_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    def __hash__(self) -> int:
        return hash((self.kind, *(repr(value) for value in vars(self).values() if not isinstance(value, Tensor))))

    def __repr__(self) -> str:
        parts = [f"{field.name}={shown(getattr(self, field.name))}" for field in fields(self) if self._says(field)]
        order = sorted(parts, key=lambda each: each.startswith(("pos=", "head=", "neuron=", "mask=")))
        return f"{self.kind}({', '.join(order)})"

    def _says(self, field: Any) -> bool:
        return field.default is MISSING or not is_same(getattr(self, field.name), field.default)


class EditAction(Edit):
    """An edit as data, at its positions."""

    def __init__(self, point: HookPoint, edit: DataEdit, *, prepend: bool = False) -> None:
        super().__init__(point, edit, prepend=prepend)
        self.is_idle = edit.mask is not None and not bool(edit.mask.any())
        if self.is_idle:
            self.why_not = "its mask is true nowhere"
        elif edit.pos is not None:
            self.invoke = at(edit.pos, edit.everywhere)
            self.only_at(self.invoke)

    def __call__(self, value: Any) -> Any:
        """The value after the edit."""
        return value if self.is_idle else super().__call__(value)


@dataclass(frozen=True, eq=False, repr=False)
class Zero(DataEdit):
    """Nothing there."""

    kind = "zero"

    def changed(self, x: Tensor, hook: Any) -> Tensor:  # noqa: ARG002
        """Zeros."""
        return torch.zeros_like(x)


@dataclass(frozen=True, eq=False, repr=False)
class Replace(DataEdit):
    """Another value there."""

    kind = "replace"
    value: Tensor | float

    def __post_init__(self) -> None:
        self._set("value", as_tensor("value", self.value))
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:  # noqa: ARG002
        """The value."""
        return like(self.value, x)


@dataclass(frozen=True, eq=False, repr=False)
class Mean(Replace):
    """The mean of recorded activations there. What is given with all axes is averaged over rows and positions.

    `over` says which rows and positions count, `[row, pos]`; by default all that are no padding, of a tensor that a
    cache gave, and all of any other.

    Outlying positions, such as attention sinks (norms over 10 times the median of those recorded), do not count, and
    stay as they are unless `pos` names them. `outliers="include"` averages and replaces all, and a number takes the
    place of the 10. The logger "hookline" says at level INFO how many were left out.
    """

    kind = "mean"
    over: Tensor | None = None
    outliers: Outliers = "exclude"

    def __post_init__(self) -> None:
        factor_of(self.outliers)  # it checks them
        known = getattr(self.value, "padding_mask", None)
        if self.over is None and known is not None:
            self._set("over", known.bool())
        if self.over is not None and not (isinstance(self.over, Tensor) and self.over.dtype == torch.bool):
            raise HooklineError(f"over= is a tensor of bools, one for each row and position, not {told(self.over)}")
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """The same mean for every row and position that is not outlying."""
        value = as_tensor("value", self.value)
        if value.ndim == x.ndim and x.ndim:
            mean, outlying = averaged(value, hook.axes, self.over, self.outliers)
            if not outlying.count:
                return like(mean, x)
            _log.info("mean at %r: left out %s", hook.name, outlying)
            new = like(mean, x)
            return kept_where_outlying(new, x, hook.axes, outlying.bound) if self.pos is None else new
        if self.over is not None and value.ndim < 2:
            raise HooklineError(f"over= is for a value with all axes, but it has the shape {list(value.shape)}")
        return like(value, x)


@dataclass(frozen=True, eq=False, repr=False)
class Freeze(Replace):
    """The value that another run had there, held: the shape must be the very same."""

    kind = "freeze"

    def changed(self, x: Tensor, hook: Any) -> Tensor:  # noqa: ARG002
        """The value."""
        if not isinstance(self.value, Tensor) or self.value.shape != x.shape:
            shape = list(self.value.shape) if isinstance(self.value, Tensor) else []
            raise HooklineError(f"what is frozen has the shape {shape}, but the activation {list(x.shape)}")
        return like(self.value, x)


@dataclass(frozen=True, eq=False, repr=False)
class Add(DataEdit):
    """A vector added, times a coefficient: steering."""

    kind = "add"
    vector: Tensor | float
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        self._set("vector", as_tensor("vector", self.vector))
        self._set("coefficient", number("coefficient", self.coefficient))
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """The sum."""
        check_float(self.kind, x, hook)
        return x + self.coefficient * like(self.vector, x)


@dataclass(frozen=True, eq=False, repr=False)
class Scale(DataEdit):
    """As many times as much."""

    kind = "scale"
    factor: float

    def __post_init__(self) -> None:
        self._set("factor", number("factor", self.factor))
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """The product."""
        check_float(self.kind, x, hook)
        return x * self.factor


@dataclass(frozen=True, eq=False, repr=False)
class Noise(DataEdit):
    """Normal noise added. It is the same whenever the same seed meets the same place: point, call and step.

    Each row of a batch has its own. In an experiment all variants of a prompt have the noise of its only row.
    """

    kind = "noise"
    std: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._set("std", number("std", self.std))
        if self.std < 0:
            raise HooklineError(f"std= is a spread, not {self.std}")
        self._set("seed", self.seed.item() if isinstance(self.seed, generic) else self.seed)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise HooklineError(f"seed= is a whole number, not {self.seed!r}")
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """With the noise."""
        check_float(self.kind, x, hook)
        step = now.passing.whole_step(self) if now.passing is not None else 0
        place = crc32(f"{hook.listed} {now.call} {step}".encode())
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + place) % 2**63)
        rows = one_draw.get()
        if rows is not None:
            self._check_rows(x, rows, hook)
        shape = x.shape if rows is None else x.shape[1:]
        noise = torch.randn(shape, generator=generator)  # on the CPU, so that it is the same on every device
        return x + (self.std * noise).to(x)

    def _check_rows(self, x: Tensor, rows: int, hook: Any) -> None:
        """In an experiment, one row for each variant or prompt, with positions where they are in a run by itself."""
        span = now.passing.span if now.passing is not None else None
        is_padded = span is not None and span.mask is not None and not bool(span.mask.all())
        if is_padded and rows > 1:
            raise HooklineError(
                f"{self!r} is active at {hook.name!r}, and prompts of different lengths run as one batch: their noise "
                f"would not be that of a run by itself. Give prompts of one length, or one prompt at a time"
            )
        if x.shape[:1] != (rows,):
            raise HooklineError(
                f"{self!r} is active at {hook.name!r}, which has the shape {list(x.shape)} for a batch of {rows}: its "
                f"rows have no noise of their own there. Say batch_size=1, or remove it while the experiment runs"
            )


@dataclass(frozen=True, eq=False, repr=False)
class ProjectOut(DataEdit):
    """The activation without its part along a direction: what is left is orthogonal to it.

    The direction is a vector along the last axis; its length and sign do not matter.
    """

    kind = "project_out"
    direction: Tensor

    def __post_init__(self) -> None:
        given = self.direction
        if not isinstance(given, Tensor) or given.ndim != 1 or not given.is_floating_point():
            raise HooklineError(
                f"direction= is a vector along the last axis, a 1-D tensor of floats, not {told(given)}"
            )
        if not bool(given.isfinite().all()) or not bool(given.any()):
            raise HooklineError(
                "direction= must be finite and not all zeros: there is nothing to project out otherwise"
            )
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """The component orthogonal to the direction."""
        check_float(self.kind, x, hook)
        if x.shape[-1:] != self.direction.shape:
            raise HooklineError(
                f"project_out: the direction has {len(self.direction)} components, but {hook.name!r} has the shape "
                f"{list(x.shape)}: its last axis must be as long"
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        unit = self.direction.to(x.device, torch.float64)
        unit = unit / unit.abs().max()  # so that no square overflows or vanishes
        unit = (unit / unit.norm()).to(wide)
        upcast = x.to(wide)
        return (upcast - (upcast @ unit)[..., None] * unit).to(x.dtype)


zero, mean, replace, add, scale, noise, freeze = Zero, Mean, Replace, Add, Scale, Noise, Freeze
project_out = ProjectOut
KINDS: dict[str, type[DataEdit]] = {
    kind.kind: kind for kind in (Zero, Mean, Replace, Add, Scale, Noise, Freeze, ProjectOut)
}
"""All that a file may name."""

"""Edits as data: what to do to an activation, as a value that prints, compares, saves and loads.

    model.run_with_hooks(prompt, fwd_hooks=[("blocks.3.attn.hook_z", zero(head=5))])
    with model.hooks([("blocks.2.hook_resid_post", add(direction, 4.0, pos=last))]): …

Each takes `pos=` (see `token_positions.py`), `head=`, `neuron=` (indices on the last axis), `mask=` (a bool tensor
that broadcasts to the activation) and `on=` (the bound of a monitor: it applies to the tokens after the one at which
the score crosses it). Given together, the edit applies where all of them do; the rest is unchanged.

A tensor given as a value has as many axes as the activation (size 1 broadcasts), only the last axis, or none. It is
copied when the edit is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from functools import reduce
from typing import Any, ClassVar, Self
from zlib import crc32

import torch
from torch import Tensor

from hookline.engine import Edit, HookAction, HookObject, HookPoint, pass_state
from hookline.errors import HooklineError
from hookline.hooks import edit_fields as check
from hookline.hooks.edit_fields import Units, checked, described, edit_field, is_same, shown
from hookline.hooks.fitting import (
    averaged,
    broadcast,
    check_float,
    chosen,
    head_axis,
    kept_where_outlying,
    like,
    real_upcast,
    unit_of,
)
from hookline.text.at_positions import PositionHook
from hookline.text.outliers import Outliers
from hookline.text.score_positions import Crossed
from hookline.text.token_positions import Positions
from hookline.values.rows import one_draw

_log = logging.getLogger("hookline")

EDITS: dict[str, type[DataEdit]] = {}
"""Every kind of edit by its name, which is also its name in a file. A subclass of `DataEdit` adds itself."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DataEdit(HookObject):
    """Base of all edits: where they apply. A subclass has a `kind`, fields made by `edit_field`, and `changed`."""

    kind: ClassVar[str]

    pos: Positions = edit_field(check.token_positions, None)
    head: Units = edit_field(check.units, None)
    neuron: Units = edit_field(check.units, None)
    mask: Tensor | None = edit_field(check.bools, None)
    on: Crossed | None = edit_field(check.condition, None)

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):  # without its own kind, a subclass of an edit cannot be saved
            EDITS[cls.kind] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004
        names = [field.name for field in cls._fields()]
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{cls.kind} has no argument {name!r}: it takes {', '.join(names)}")
        return super().__new__(cls)

    @classmethod
    def _fields(cls) -> list[Field[Any]]:
        """The fields, its own before those of every edit."""
        common = {field.name for field in fields(DataEdit)}
        return sorted(fields(cls), key=lambda field: field.name in common)

    def __post_init__(self) -> None:
        for field in fields(self):
            self._set(field.name, checked(field, getattr(self, field.name)))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """The new activation; it is used where the edit applies."""
        raise NotImplementedError

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        """The activation after the edit."""
        there = self.at_positions()
        return self.everywhere(x, hook) if there is None else there(x, hook)

    def at_positions(self) -> PositionHook | None:
        """The edit at its positions, once its condition holds; None if it applies everywhere."""
        if self.pos is None and self.on is None:
            return None
        return PositionHook(self.pos, self.everywhere, self.on)

    def everywhere(self, x: Tensor, hook: Any) -> Tensor:
        """The activation after the edit, at all positions."""
        new = self.changed(x, hook)
        where = self._where(x, hook)
        return new if where is None else torch.where(where, new, x)

    def _where(self, x: Tensor, hook: Any) -> Tensor | None:
        head = None if self.head is None else chosen("head", self.head, x, head_axis(hook))
        if self.neuron is not None and not hook.axes and x.ndim > 3:
            raise HooklineError(
                f"neuron= indexes the last axis, and {hook.name!r} has the shape {list(x.shape)}, as of an image: use "
                f"mask= (a channel: torch.arange({x.shape[1]})[:, None, None] == 5)"
            )
        neuron = None if self.neuron is None else chosen("neuron", self.neuron, x, x.ndim - 1)
        mask = None if self.mask is None else broadcast(self.mask, x)
        masks = [selection for selection in (head, neuron, mask) if selection is not None]
        return reduce(torch.logical_and, masks) if masks else None

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> HookAction:
        """The edit of the activation at a point, or of its gradient."""
        if self.head is not None:
            head_axis(point)
        if self.neuron is not None and point.axes.split()[-1:] in (["p"], ["k"]):
            raise HooklineError(f"neuron= indexes the last axis, which at {point.name!r} is an axis of positions")
        if dir == "bwd":
            return point.backward_action(self, prepend=prepend)
        return EditAction(point, self, prepend=prepend)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(is_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    def __hash__(self) -> int:
        return hash((self.kind, *(repr(value) for value in vars(self).values() if not isinstance(value, Tensor))))

    def __repr__(self) -> str:
        values = [f"{field.name}={shown(getattr(self, field.name))}" for field in self._fields() if self._shows(field)]
        return f"{self.kind}({', '.join(values)})"

    def _shows(self, field: Field[Any]) -> bool:
        return field.default is MISSING or not is_same(getattr(self, field.name), field.default)


class EditAction(Edit):
    """Applies an edit at its positions."""

    def __init__(self, point: HookPoint, edit: DataEdit, *, prepend: bool = False) -> None:
        super().__init__(point, edit, prepend=prepend)
        self.entries = edit.mask
        self.is_idle = edit.mask is not None and not bool(edit.mask.any())
        if self.is_idle:
            self.why_not = "its mask is all False"
        elif (there := edit.at_positions()) is not None:
            self.invoke = there
            self.only_at(there)
            self.must_fire = edit.on is None

    def extend(self, steps: list[Callable[[Any], Any]], *, is_replay: bool = False) -> None:
        """Append the step, unless the mask selects nothing."""
        if not self.is_idle:
            super().extend(steps, is_replay=is_replay)


@dataclass(frozen=True, eq=False, repr=False)
class Zero(DataEdit):
    """Set the activation to zero.

    Examples:
        >>> logits = model.run_with_hooks(prompt, fwd_hooks=[("blocks.3.attn.hook_z", edits.zero(head=4))])
        >>> model.to_string([logits[0, -1].argmax()])
        ' John'
    """

    kind = "zero"

    def changed(self, x: Tensor, hook: Any) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(x)


@dataclass(frozen=True, eq=False, repr=False)
class Replace(DataEdit):
    """Replace the activation by a value.

    Examples:
        >>> z = model.cache(clean)["z", 3]
        >>> logits = model.run_with_hooks(corrupted, fwd_hooks=[("z3", edits.replace(z, head=4))])
        >>> model.to_string([logits[0, -1].argmax()])
        ' Mary'
    """

    kind = "replace"
    value: Tensor | float = edit_field(check.tensor)

    def changed(self, x: Tensor, hook: Any) -> Tensor:  # noqa: ARG002
        return like(self.value, x)


@dataclass(frozen=True, eq=False, repr=False)
class Mean(Replace):
    """Replace the activation by the mean of recorded activations (mean ablation).

    A value with all axes of the activation is averaged over rows and positions; `over`, `[row, pos]`, selects which.
    By default a tensor from a cache is averaged without its padding, and any other tensor over everything.

    Outlying positions, such as attention sinks (norm above 10 times the median), are excluded from the mean, and keep
    their activation unless `pos` selects them. `outliers="include"` averages and replaces all positions; a number
    replaces the 10. The logger "hookline" reports at level INFO how many were excluded.
    """

    kind = "mean"
    over: Tensor | None = edit_field(check.bools, None)
    outliers: Outliers = edit_field(check.outliers, "exclude")

    def __post_init__(self) -> None:
        padding_mask = getattr(self.value, "padding_mask", None)
        if self.over is None and padding_mask is not None:
            self._set("over", padding_mask.bool())
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        """The same mean at every row and position that is not an outlier."""
        value: Any = self.value
        if value.ndim == x.ndim and x.ndim:
            mean, outlying = averaged(value, hook.axes, self.over, self.outliers)
            if not outlying.count:
                return like(mean, x)
            _log.info("mean at %r: left out %s", hook.name, outlying)
            new = like(mean, x)
            return kept_where_outlying(new, x, hook.axes, outlying.bound) if self.pos is None else new
        if self.over is not None and value.ndim < 2:
            raise HooklineError(f"over= needs a value with all axes, but it has the shape {list(value.shape)}")
        return like(value, x)


@dataclass(frozen=True, eq=False, repr=False)
class Freeze(Replace):
    """Hold the activation at its value from another run: the shapes must be equal."""

    kind = "freeze"

    def changed(self, x: Tensor, hook: Any) -> Tensor:  # noqa: ARG002
        value: Any = self.value
        if value.shape != x.shape:
            raise HooklineError(
                f"the frozen value has shape {list(value.shape)}, but the activation has shape {list(x.shape)}"
            )
        return like(value, x)


@dataclass(frozen=True, eq=False, repr=False)
class Add(DataEdit):
    """Add a vector times a coefficient to the activation (steering).

    With `match_norm`, the vector's length does not matter: it is scaled to the norm of the activation along the last
    axis, at each position and head, so that coefficient 0.5 adds half of that norm.

    Examples:
        >>> edits.add(torch.ones(128), 4.0, pos=last)
        add(vector=<[128] float32>, coefficient=4, pos=last)
        >>> edits.add(torch.ones(128), 0.5, match_norm=True)
        add(vector=<[128] float32>, coefficient=0.5, match_norm=True)
    """

    kind = "add"
    vector: Tensor | float = edit_field(check.tensor)
    coefficient: float = edit_field(check.number, 1.0)
    match_norm: bool = edit_field(check.flag, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        vector: Any = self.vector
        if self.match_norm and not (vector.isfinite().all() and (vector != 0).any(-1).all()):
            raise HooklineError("match_norm=True scales vector= to a norm, so it must be finite and not all zeros")

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        check_float(self.kind, x, hook)
        vector = like(self.vector, x)
        if not self.match_norm:
            return x + self.coefficient * vector
        upcast = real_upcast("add(match_norm=True)", x, hook)
        norm = upcast.norm(dim=-1, keepdim=True)
        return (upcast + self.coefficient * norm * self.unit(upcast)).to(x.dtype)

    def unit(self, x: Tensor) -> Tensor:
        """The vector with norm 1 along the last axis of the activation."""
        vector: Any = self.vector
        return unit_of(vector.expand((*vector.shape[:-1], x.shape[-1])), x)


@dataclass(frozen=True, eq=False, repr=False)
class Scale(DataEdit):
    """Multiply the activation by a factor.

    Examples:
        >>> edits.scale(0.5, head=[2, 3])
        scale(factor=0.5, head=[2, 3])
    """

    kind = "scale"
    factor: float = edit_field(check.number)

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        check_float(self.kind, x, hook)
        return x * self.factor


@dataclass(frozen=True, eq=False, repr=False)
class Noise(DataEdit):
    """Add Gaussian noise. The same seed gives the same noise at the same point, call and generation step.

    Every row of a batch gets different noise. In an experiment all variants of a prompt get the same noise.
    """

    kind = "noise"
    std: float = edit_field(check.number)
    seed: int = edit_field(check.integer, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise HooklineError(f"std= is a standard deviation and must not be negative, but it is {self.std}")

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        check_float(self.kind, x, hook)
        step = pass_state.forward_pass.whole_step(self) if pass_state.forward_pass is not None else 0
        place = crc32(f"{hook.canonical_name} {pass_state.call} {step}".encode())
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + place) % 2**63)
        rows = one_draw.get()
        if rows is not None:
            self._check_rows(x, rows, hook)
        shape = x.shape if rows is None else x.shape[1:]
        noise = torch.randn(shape, generator=generator)  # on the CPU, so that it is the same on every device
        return x + (self.std * noise).to(x)

    def _check_rows(self, x: Tensor, rows: int, hook: Any) -> None:
        """In an experiment, each row must get the noise of a run by itself."""
        span = pass_state.forward_pass.span if pass_state.forward_pass is not None else None
        is_padded = span is not None and span.mask is not None and not bool(span.mask.all())
        if is_padded and rows > 1:
            raise HooklineError(
                f"{self!r} is active at {hook.name!r}, and prompts of different lengths run as one batch: their noise "
                f"would differ from that of separate runs. Use prompts of one length, or one prompt at a time"
            )
        if x.shape[:1] != (rows,):
            raise HooklineError(
                f"{self!r} is active at {hook.name!r}, which has the shape {list(x.shape)} for a batch of {rows}, so "
                f"rows cannot get separate noise there. Pass batch_size=1, or remove the edit during the experiment"
            )


@dataclass(frozen=True, eq=False, repr=False)
class _Along(DataEdit):
    """Base of edits along a direction, a vector along the last axis, whose length does not matter."""

    direction: Tensor = edit_field(check.tensor)

    def component(self, before: Tensor) -> Tensor:
        """The component along the unit direction after the edit, from that before it."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        direction = self.direction
        if not isinstance(direction, Tensor) or direction.ndim != 1 or not direction.is_floating_point():
            raise HooklineError(
                f"direction= must be a 1-D float tensor, as long as the last axis; not {described(direction)}"
            )
        if not bool(direction.isfinite().all()) or not bool(direction.any()):
            raise HooklineError("direction= must be finite and not all zeros")
        super().__post_init__()

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        check_float(self.kind, x, hook)
        if x.shape[-1:] != self.direction.shape:
            raise HooklineError(
                f"{self.kind}: the direction has {len(self.direction)} components, but {hook.name!r} has the shape "
                f"{list(x.shape)}: its last axis must be as long"
            )
        upcast = x.to(torch.promote_types(x.dtype, torch.float32))
        unit = unit_of(self.direction, upcast)
        before = (upcast * unit).sum(-1, keepdim=True)  # a product of matrices would be in bfloat16 under autocast
        return (upcast + (self.component(before) - before) * unit).to(x.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class ProjectOut(_Along):
    """Remove the component of the activation along a direction: the result is orthogonal to it.

    The direction is a vector along the last axis; its length and sign do not matter.
    """

    kind = "project_out"

    def component(self, before: Tensor) -> Tensor:
        return torch.zeros_like(before)


@dataclass(frozen=True, eq=False, repr=False)
class Reflect(_Along):
    """Reverse the component of the activation along a direction.

    Along the difference of two vectors of the same length, it exchanges what the activation has of the two.
    """

    kind = "reflect"

    def component(self, before: Tensor) -> Tensor:
        return -before


@dataclass(frozen=True, eq=False, repr=False)
class Cap(_Along):
    """Keep the projection of the activation on a direction within bounds: above `high` it becomes `high`.

    The projection is that on the direction scaled to norm 1; what is orthogonal to it stays. Activations within the
    bounds are unchanged.

    Examples:
        >>> edits.cap(torch.ones(128), high=2.5, pos=last)
        cap(direction=<[128] float32>, high=2.5, pos=last)
    """

    kind = "cap"
    low: float | None = edit_field(check.number, None)
    high: float | None = edit_field(check.number, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise HooklineError("cap has no bounds: pass low=, high= or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise HooklineError(f"cap needs low ≤ high, but low={self.low:g} is above high={self.high:g}")

    def changed(self, x: Tensor, hook: Any) -> Tensor:
        real_upcast(self.kind, x, hook)
        return super().changed(x, hook)

    def component(self, before: Tensor) -> Tensor:
        return before.clamp(self.low, self.high)

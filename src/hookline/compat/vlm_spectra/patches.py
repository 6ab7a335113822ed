"""Patch hooks: hook objects that replace activations with those of another run, at a point they declare.

    with model.hooks([PatchResidualHook(3, token_idx=-1, replacement=other["lm.layer.3.post"][:, -1])]): model(prompt)

Each is for a layer of the language model; `hook_point="vision.layer.post"` and the like, as an argument or in a
subclass, make it one for another place. `token_idx` is a position, or several, in any of the ways of `positions.py`;
None means all of them. The replacement has the shape of what it replaces, `x[:, token_idx]`, or one that broadcasts to
it: `[d]`, `[rows, d]` for one position, `[positions, d]` or `[rows, positions, d]` for several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.casting import cast
from hookline.engine.lenses import FIRST
from hookline.engine.names import Points
from hookline.engine.passes import current
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError, InvalidHookError
from hookline.hooks.action import ObjectEdit, here
from hookline.hooks.fitting import Units, described, units
from hookline.hooks.hook import Hook
from hookline.text.token_positions import Positions, at, canonical, is_one_per_row, mask_of


class Patch(Hook):
    """Base class of patch hooks: layer, tokens, rows and replacement."""

    is_pre = False  # on either side of a module it is given the point's tensor
    acted = False
    """Whether the last call included any of its positions."""

    def __init__(
        self,
        layer: int,
        replacement: Tensor,
        token_idx: Positions,
        *,
        batch_idx: Units = None,
        hook_point: str | None = None,
        hook_id: str | None = None,
    ) -> None:
        super().__init__(hook_id=hook_id)
        if not isinstance(replacement, Tensor):
            given = described(replacement)
            raise InvalidHookError(f"{type(self).__name__}: the replacement must be a tensor, not {given}")
        self.layer, self.replacement, self.token_idx = layer, replacement, canonical(token_idx)
        self.batch_idx = units("batch_idx", batch_idx)
        if hook_point is not None:
            self.hook_point = hook_point

    @property
    def where(self) -> Positions:
        """Its positions, for reports."""
        return self.token_idx

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> ObjectEdit:
        """The action that runs it at `point`."""
        action = super().action(point, dir, prepend=prepend)
        if self.token_idx is not None and point.stream != "image":
            action.only_at(self)
        return action

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ARG002
        """The output with the replacement; None if this pass has none of its positions."""
        x = FIRST.get(output)
        patched = at(self.token_idx, self._replaced)
        new = patched(self.part_of(x), here.get() or HookPoint())
        self.acted = patched.acted  # type: ignore[attr-defined]
        return None if new is None else FIRST.put(output, self.with_part(x, new))

    def part_of(self, x: Tensor) -> Tensor:
        """The part of an activation to replace: [rows, positions, width]."""
        return x

    def with_part(self, x: Tensor, part: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        """The activation with that part replaced."""
        return part

    def _replaced(self, x: Tensor, hook: HookPoint) -> Tensor | None:
        value = self._spread(cast(self.replacement, x), x, hook)
        if value is None or self.batch_idx is None:
            return value
        rows = [self.batch_idx] if isinstance(self.batch_idx, int) else list(self.batch_idx)
        if any(row not in range(-len(x), len(x)) for row in rows):
            raise HooklineError(f"batch_idx={self.batch_idx} is out of range: the batch has {len(x)} rows")
        chosen = torch.zeros(len(x), dtype=torch.bool)
        chosen[rows] = True
        return torch.where(chosen.to(x.device).view(-1, *[1] * (x.ndim - 1)), value, x)

    def _spread(self, value: Tensor, x: Tensor, hook: HookPoint) -> Tensor | None:
        """The replacement in the shape of the activation, used at its positions only; None if not in this pass."""
        if value.ndim < 2:
            return self._fit(value, x)
        if is_one_per_row(self.token_idx):
            return self._fit(value[..., None, :], x)
        if self.token_idx is None:
            return self._of_all(value, x, hook)
        if isinstance(self.token_idx, list | tuple | range):
            return self._of_each(value, x, hook)
        places = mask_of(self.token_idx, hook, *x.shape[:2]).to(x.device)
        counts = set(places.sum(1).tolist())
        if value.shape[-2] != 1 and counts != {value.shape[-2]}:
            raise self._misfit(x, f"where {self.token_idx!r} is {' or '.join(map(str, sorted(counts)))} tokens")
        wide = value.expand(len(x), *value.shape[-2:])
        order = (places.cumsum(1) - 1).clamp(0, value.shape[-2] - 1)
        return wide.gather(1, order[..., None].expand(-1, -1, value.shape[-1]))

    def _of_all(self, value: Tensor, x: Tensor, hook: HookPoint) -> Tensor | None:
        """A replacement of all positions of a text; in later steps of generation, its remaining positions."""
        passing = None if hook.stream == "image" else current.forward_pass
        start = 0 if passing is None else passing.span_at(hook.stream).positions.start
        length = value.shape[-2]
        if not start or length == 1:
            return self._fit(value, x)
        if start >= length:
            return None
        new = x.clone()
        new[:, : length - start] = self._fit(value[..., start : start + x.shape[1], :], new[:, : length - start])
        return new

    def _of_each(self, value: Tensor, x: Tensor, hook: HookPoint) -> Tensor:
        """A replacement of selected positions, in the order in which they were given."""
        wanted: Any = self.token_idx
        if value.shape[-2] not in (1, len(wanted)):
            raise self._misfit(x, f"at {len(wanted)} tokens")
        new = x
        for index, token in enumerate(wanted):
            one = value[..., index % value.shape[-2], None, :]
            places = mask_of(token, hook, *x.shape[:2]).to(x.device)
            new = torch.where(places[..., None], self._fit(one, x), new)
        return new

    def _fit(self, value: Tensor, x: Tensor) -> Tensor:
        try:
            return value.expand(x.shape)
        except RuntimeError:
            raise self._misfit(x, "") from None

    def _misfit(self, x: Tensor, where: str) -> HooklineError:
        return HooklineError(
            f"a replacement of shape {list(self.replacement.shape)} does not fit {list(x.shape)}"
            f"{' ' if where else ''}{where}: pass [{x.shape[-1]}], or [positions, {x.shape[-1]}]"
        )


class PatchResidualHook(Patch):
    """Replace the residual stream after a layer, at one, several, or all (None) tokens."""

    hook_point = "lm.layer.post"

    def __init__(self, layer: int, token_idx: Positions, replacement: Tensor, **options: Any) -> None:
        super().__init__(layer, replacement, token_idx, **options)


class PatchMLPHook(Patch):
    """Replace the output of an MLP, at one, several, or all tokens."""

    hook_point = "lm.mlp.out"

    def __init__(self, layer: int, replacement: Tensor, token_idx: Positions = None, **options: Any) -> None:
        super().__init__(layer, replacement, token_idx, **options)


class PatchHeadHook(Patch):
    """Replace the output of one head, at one, several, or all tokens.

    A head is a slice of what goes *into* the attention's output projection, so that is where it is replaced: the point
    is `lm.attn.z`, and the replacement `d_head` wide. After the projection no unit belongs to one head. With
    `hook_point="lm.attn.q"` and the like it is a head's query, key or value that is replaced.
    """

    hook_point = "lm.attn.out"

    def __init__(
        self, layer: int, head_idx: int, replacement: Tensor, token_idx: Positions = None, **options: Any
    ) -> None:
        super().__init__(layer, replacement, token_idx, **options)
        if isinstance(head_idx, bool) or not isinstance(head_idx, int):
            raise InvalidHookError(f"PatchHeadHook: head_idx must be the index of a head, not {described(head_idx)}")
        self.head_idx = head_idx

    def _found(self, points: Points) -> list[HookPoint]:
        return [self._with_heads(point, points) for point in super()._found(points)]

    def _with_heads(self, point: HookPoint, points: Points) -> HookPoint:
        """The point with separate heads (`hook_z`) that precedes this one."""
        if point.axes.split()[2:3] in (["h"], ["g"]):
            return point
        before, dot, name = point.canonical_name.rpartition(".")
        if name not in ("hook_attn_out", "hook_cross_attn_out"):
            raise InvalidHookError(
                f"{type(self).__name__} needs a point with heads, 'lm.attn.out' or 'lm.attn.z', not {point.name!r}"
            )
        return points.find(f"{before}{dot}{name.removeprefix('hook_').removesuffix('_out')}.hook_z")

    def part_of(self, x: Tensor) -> Tensor:
        """The part of the head."""
        if x.ndim != 4 or self.head_idx not in range(-x.shape[2], x.shape[2]):
            raise HooklineError(f"head_idx={self.head_idx}, but the activation has shape {list(x.shape)} (b p h e)")
        return x[:, :, self.head_idx]

    def with_part(self, x: Tensor, part: Tensor) -> Tensor:
        """The activation with the head replaced."""
        new = x.clone()
        new[:, :, self.head_idx] = part
        return new

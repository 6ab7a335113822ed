"""Patch hooks: hook objects that replace activations with those of another run, at a point they declare.

    with model.hooks([PatchResidualHook(3, token_idx=-1, replacement=other["lm.layer.3.post"][:, -1])]): model(prompt)

Each is for a layer of the language model; `hook_point="vision.layer.post"` and the like, as an argument or in a
subclass, place it elsewhere. `token_idx` is a position, or several, in any form that `hookline.positions` takes; None
means all of them. The replacement has the shape of what it replaces, `x[:, token_idx]`, or one that broadcasts to it:
`[d]`, `[rows, d]` for one position, `[positions, d]` or `[rows, positions, d]` for several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.compat.vlm_spectra.hooks.base import Hook
from hookline.engine import FIRST, HookPoint, Points, pass_state
from hookline.errors import HooklineError, InvalidHookError
from hookline.hooks.action import ObjectEdit, here
from hookline.hooks.edit_fields import Units, described, units
from hookline.hooks.fitting import chosen
from hookline.text.at_positions import at
from hookline.text.token_positions import Positions, canonical, is_one_per_row, mask_of
from hookline.values.casting import cast


class Patch(Hook):
    """Base class of patch hooks: layer, tokens, rows and replacement."""

    is_pre = False  # on either side of a module it is given the point's tensor
    acted = False
    """Whether the last call included any of its positions."""
    mask: Tensor | None = None
    """Which these were, `[row, position]`."""
    head_idx: int | None = None

    def __init__(
        self,
        layer: int | None,
        replacement: Tensor,
        token_idx: Positions,
        *,
        batch_idx: Units = None,
        hook_point: str | None = None,
        hook_id: str | None = None,
    ) -> None:
        super().__init__(hook_id=hook_id)
        if not isinstance(replacement, Tensor):
            description = described(replacement)
            raise InvalidHookError(f"{type(self).__name__}: the replacement must be a tensor, not {description}")
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
        if self.head_idx is not None and (x.ndim != 4 or self.head_idx not in range(-x.shape[2], x.shape[2])):
            raise HooklineError(f"head_idx={self.head_idx}, but the activation has shape {list(x.shape)} (b p h e)")
        index = slice(None) if self.head_idx is None else (slice(None), slice(None), self.head_idx)
        patch = at(self.token_idx, self._replaced)
        part = patch(x[index], here.get() or HookPoint())
        self.acted, self.mask = patch.acted, self._of_rows(patch.mask)
        if part is None:
            return None
        new = x.clone()
        new[index] = part
        return FIRST.put(output, new)

    def _of_rows(self, mask: Tensor | None) -> Tensor | None:
        """A mask in the rows that the patch is for."""
        if mask is None or self.batch_idx is None:
            return mask
        rows = torch.zeros_like(mask)
        rows[self.batch_idx] = mask[self.batch_idx]
        return rows

    def _replaced(self, x: Tensor, hook: HookPoint) -> Tensor | None:
        """The replacement in the shape of `x`, used at its positions only; None if this pass has none of them."""
        value = cast(self.replacement, x)
        is_spread = value.ndim > 1 and not is_one_per_row(self.token_idx)
        try:
            if is_spread and value.shape[-2] > 1:
                value = self._spread(value.expand(len(x), -1, x.shape[-1]), x, hook)
            else:
                value = (value if is_spread or value.ndim < 2 else value[..., None, :]).expand(x.shape)
        except RuntimeError:
            raise self._misfit(x, "") from None
        new = self.combined(x, value)
        return new if self.batch_idx is None else torch.where(chosen("batch_idx", self.batch_idx, x, 0), new, x)

    def combined(self, x: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        """The new activation, from the current one and the replacement in its shape: the replacement."""
        return value

    def _spread(self, value: Tensor, x: Tensor, hook: HookPoint) -> Tensor:
        """A replacement of several positions, each moved to its place among the positions of this pass."""
        n_given, (rows, n_here, _) = value.shape[1], x.shape
        if self.token_idx is None:
            passing = None if hook.stream == "image" else pass_state.forward_pass
            start = 0 if passing is None else passing.span_at(hook.stream).positions.start
            if not start:
                return value.expand(x.shape)
            # A later step of a generation: the rest of the replacement, if there is any.
            order = torch.arange(start, start + n_here).expand(rows, -1)
        elif isinstance(self.token_idx, list | tuple | range):  # in the order in which they were given
            masks = [mask_of(token, hook, rows, n_here) for token in self.token_idx]
            order, count = torch.zeros(rows, n_here, dtype=torch.long), {len(masks)}
            for place, mask in enumerate(masks):
                order[mask] = place
        else:
            mask = mask_of(self.token_idx, hook, rows, n_here)
            order, count = mask.cumsum(1) - 1, set(mask.sum(1).tolist())
        if self.token_idx is not None and count != {n_given}:
            raise self._misfit(x, f" at {' or '.join(map(str, sorted(count)))} tokens")
        order = order.to(x.device)[..., None]
        moved = value.gather(1, order.clamp(0, n_given - 1).expand(-1, -1, x.shape[-1]))
        return torch.where(order < n_given, moved, x)

    def _misfit(self, x: Tensor, where: str) -> HooklineError:
        return HooklineError(
            f"a replacement of shape {list(self.replacement.shape)} does not fit {list(x.shape)}{where}: "
            f"pass [{x.shape[-1]}], or [positions, {x.shape[-1]}]"
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

    A head is a slice of the input of the attention's output projection, so it is replaced there: the point is
    `lm.attn.z`, and the replacement `d_head` wide. After the projection no unit belongs to one head.
    `hook_point="lm.attn.q"` and the like replace a head's query, key or value.
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

"""Hooks for `run_with_hooks([("lm.blocks.5.hook_resid_post", hook)])`: patch, ablate, scale, and block attention.

As in vlm-spectra they apply to one row of a batch, by default the first; `batch_idx=None` means all rows. `token_idx`
counts as in all patch hooks: see `hookline.compat.vlm_spectra.hooks.patch_hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hookline.compat.vlm_spectra.core.hook_points import HookNameError, HookPoint
from hookline.compat.vlm_spectra.hooks.patch_hooks import Patch
from hookline.engine import HookPoint as Point
from hookline.errors import HooklineError, InvalidHookError
from hookline.hooks.edit_fields import Units
from hookline.text.token_positions import Positions

HookFn: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], Tensor | None]
MaskHookFn: TypeAlias = HookFn

_REAL = {name: config for name, config in HookPoint.HOOK_CONFIGS.items() if not config.is_virtual}
VALID_PATCH_HOOK_TYPES = {name for name, config in _REAL.items() if not config.is_pre}
VALID_PRE_PATCH_HOOK_TYPES = {name for name, config in _REAL.items() if config.is_pre}


def validate_patch_hook_type(hook_type: str) -> bool:
    """Whether a type of point is before its module. Types that vlm-spectra cannot patch raise."""
    if HookPoint.is_virtual(hook_type):
        raise HookNameError(f"{hook_type!r} is a virtual point of vlm-spectra. hookline's run_with_hooks can patch it")
    return HookPoint.is_pre_hook(hook_type)


class PatchActivation(Patch):
    """Replaces an activation: with [d], or [positions, d]."""

    hook_point = None

    def __init__(self, replacement: Tensor, token_idx: Positions = None, batch_idx: Units = 0) -> None:
        super().__init__(None, replacement, token_idx, batch_idx=batch_idx)


class ZeroAblation(PatchActivation):
    """Sets an activation to 0."""

    def __init__(self, token_idx: Positions = None, batch_idx: Units = 0) -> None:
        super().__init__(torch.zeros(()), token_idx, batch_idx)


class AddActivation(PatchActivation):
    """Adds `scale * direction` to an activation."""

    def __init__(
        self, direction: Tensor, scale: float = 1.0, token_idx: Positions = None, batch_idx: Units = 0
    ) -> None:
        super().__init__(direction, token_idx, batch_idx)
        self.direction, self.scale = direction, scale

    def combined(self, x: Tensor, value: Tensor) -> Tensor:
        """The activation plus the direction."""
        return x + self.scale * value


class ScaleActivation(PatchActivation):
    """Multiplies an activation by `scale`."""

    def __init__(self, scale: float, token_idx: Positions = None, batch_idx: Units = 0) -> None:
        super().__init__(torch.tensor(float(scale)), token_idx, batch_idx)
        self.scale = scale

    def combined(self, x: Tensor, value: Tensor) -> Tensor:
        """The activation times the scale."""
        return x * value


class PatchHead(PatchActivation):
    """Replaces one head, at `attn.hook_z`: with [d_head], or [positions, d_head]."""

    def __init__(
        self,
        head_idx: int,
        replacement: Tensor,
        num_heads: int | None = None,
        token_idx: Positions = None,
        batch_idx: Units = 0,
    ) -> None:
        super().__init__(replacement, token_idx, batch_idx)
        self.head_idx, self.num_heads = head_idx, num_heads

    def check_points(self, points: list[Point]) -> None:
        """Raise unless the points have heads."""
        for point in points:
            if point.axes.split()[2:3] not in (["h"], ["g"]):
                raise InvalidHookError(f"PatchHead needs a point with heads, such as attn.hook_z, not {point.name!r}")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The output with the replacement."""
        if self.num_heads not in (None, output.shape[2]):
            raise HooklineError(f"num_heads is {self.num_heads}, but the activation has {output.shape[2]} heads")
        return super().__call__(module, args, kwargs, output)


class BlockAttention:
    """Blocks attention between pairs of positions, at `attn.hook_mask`: from each query to its key."""

    def __init__(self, indices_list: Sequence[tuple[int, int]], batch_idx: int | None = 0) -> None:
        self.indices_list, self.batch_idx = list(indices_list), batch_idx

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor) -> Tensor:  # noqa: ARG002
        """The mask with -inf at these places. Queries count from the first position of the text."""
        heads, n_new, n_keys = mask.shape[1:]
        mask, first = mask.expand(len(_input_of(args, kwargs)), heads, n_new, n_keys).clone(), n_keys - n_new
        for query, key in self.indices_list:
            query, key = (index % n_keys if -n_keys <= index < n_keys else index for index in (query, key))
            if key >= n_keys or query >= n_keys:
                raise HooklineError(f"positions {query} and {key} are out of range: there are {n_keys}")
            if query >= first:
                mask[slice(None) if self.batch_idx is None else self.batch_idx, :, query - first, key] = float("-inf")
        return mask


class SetAttentionMask:
    """Replaces the whole attention mask, at `attn.hook_mask`."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor) -> Tensor:  # noqa: ARG002
        """The given mask, on the device and in the dtype of the model's, if it fits."""
        x = _input_of(args, kwargs)
        try:
            torch.broadcast_shapes(self.mask.shape, (len(x), 1, *mask.shape[-2:]))
        except RuntimeError:
            have, want = list(self.mask.shape), list(mask.shape)
            raise HooklineError(f"a mask of shape {have} does not fit the model's, {want}") from None
        return self.mask.to(x.device) if self.mask.dtype == torch.bool else self.mask.to(x)


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]

"""What a hook returned, checked against the activation that it replaces."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine import passes
from hookline.engine._memory.snapshots import snapshot
from hookline.engine._reports.failures import hook_error
from hookline.engine.pass_state import pass_state
from hookline.errors import HooklineError, a_type
from hookline.values.casting import cast

if TYPE_CHECKING:
    from hookline.engine.hook_actions import HookAction


def fit(
    action: HookAction,
    result: Any,
    like: Tensor,
    given: Any = None,  # noqa: ARG001 (see `Edit.fitted_result`)
    *,
    is_free: bool = False,
) -> Tensor:
    """Return a snapshot of the result in the dtype and on the device of `like`, or raise an error that says why not.

    It is a snapshot because the model may write to what flows on, and the hook may have kept its result. If the result
    `is_free`, nobody has kept it.
    """
    if not isinstance(result, Tensor):
        raise hook_error(
            f"returned {a_type(result)}; it must return None, or a tensor of shape {tuple(like.shape)}", action
        )
    if action.allows_shape and result.shape != like.shape:
        pass_state.forward_pass = passes.text().reshaped(pass_state.forward_pass, action.point, like, result)
    elif not like.is_nested and result.shape != like.shape:
        hint = "; allow_shape=True lets it change the shape" if action.may_change_shape() else ""
        raise hook_error(
            f"returned a tensor of shape {tuple(result.shape)}, but the shape there is {tuple(like.shape)}{hint}",
            action,
        )
    if result.is_meta and not like.is_meta:
        raise hook_error("returned a tensor without data (on the device 'meta')", action)
    if result.dtype != like.dtype or result.device != like.device:
        try:
            result = cast(result, like)
        except HooklineError as error:
            raise hook_error(
                f"returned a tensor of {result.dtype} that does not fit: {error}", action, error
            ) from error
    if action.choices is not None and (wrong := action.choices.wrong(result, like)) is not None:
        raise hook_error(wrong, action)
    if action.keeps_masked and result.is_floating_point():
        numbers = _numbers_of_masks(action.module, like)
        unmasked = _unmasked(result, like, numbers)
        if unmasked.is_meta or bool(unmasked.any()):
            return _masked_alike(result, like, unmasked, numbers)
    return result if is_free else snapshot(result)


def _numbers_of_masks(module: nn.Module, scores: Tensor) -> torch.finfo:
    """The numbers whose lowest one masks scores: those of the model's dtype, though scores are often in a wider one."""
    known = [x.dtype for x in module.parameters() if x.dtype in (torch.float16, torch.bfloat16, torch.float32)]
    return max((torch.finfo(dtype) for dtype in (scores.dtype, *known[:1])), key=attrgetter("min"))


@torch.no_grad()
def _unmasked(scores: Tensor, before: Tensor, numbers: torch.finfo) -> Tensor:
    """Which entries of edited attention scores were masked, and are neither as they were nor an ordinary number."""
    return (before < numbers.min / 64) & ~(scores.abs() < numbers.max**0.5) & (scores != before)


def _masked_alike(scores: Tensor, before: Tensor, unmasked: Tensor, numbers: torch.finfo) -> Tensor:
    """Return edited attention scores in which an entry that was masked still is, unless it got an ordinary number.

    Masked entries are -inf or near the lowest number of the dtype, so arithmetic that is meant for the others makes
    them NaN, infinite or the highest ones: scaled, a row of padding would be all -inf, and its pattern NaN.
    """
    # A query that attends to nothing keeps what the model has there; in other rows, masked is -inf.
    is_masked = before < numbers.min / 64
    return before.where(is_masked.all(-1, keepdim=True), -torch.inf).where(unmasked, scores)

"""What a hook returned, checked against the activation that it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.engine import failures
from hookline.engine.casting import cast
from hookline.engine.snapshots import snapshot
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.engine.hook_actions import HookAction


def fit(action: HookAction, result: Any, like: Tensor, given: Any = None) -> Tensor:  # noqa: ARG001 (see `Edit`)
    """Return a snapshot of the result in the dtype and on the device of `like`, or raise an error that says why not.

    It is a snapshot because the model may write to what flows on, and the hook may have kept its result.
    """
    if not isinstance(result, Tensor):
        what = f"returned a {type(result).__name__}; it must return None, or a tensor of shape {tuple(like.shape)}"
        raise failures.hook_error(action, what)
    if not like.is_nested and result.shape != like.shape:
        what = f"returned a tensor of shape {tuple(result.shape)}, but the shape there is {tuple(like.shape)}"
        raise failures.hook_error(action, what)
    if result.is_meta and not like.is_meta:
        raise failures.hook_error(action, "returned a tensor without data (on the device 'meta')")
    if result.dtype != like.dtype or result.device != like.device:
        try:
            result = cast(result, like)
        except HooklineError as error:
            what = f"returned a tensor of {result.dtype} that does not fit: {error}"
            raise failures.hook_error(action, what, error) from error
    if action.choices is not None and (wrong := action.choices.wrong(result, like)) is not None:
        raise failures.hook_error(action, wrong)
    return snapshot(result)

"""Warnings about hooks: those that never fired, missed positions, or failed and were skipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from hookline.errors import HookError, NeverFiredWarning, SkippedHookWarning, describe, users_level

if TYPE_CHECKING:
    from hookline.engine.actions import PointAction
    from hookline.engine.hook_actions import HookAction


def report_silent(
    actions: Iterable[PointAction], *, has_run: bool, why: Mapping[PointAction, str] | None = None
) -> None:
    """Warn that these actions never fired, and why."""
    silent = list(actions)
    if not silent:
        return
    known = why or {}
    lines = [f"  {_label(action)}: {known.get(action) or _reason(action, has_run=has_run)}" for action in silent]
    _warn(f"{len(silent)} hook{'s' if len(silent) > 1 else ''} never fired:", lines)


def report_elsewhere(calls: Mapping[nn.Module, str], root: nn.Module) -> None:
    """Warn of calls in other threads, at which the hooks of a run were not called."""
    names = {module: name for name, module in root.named_modules()}
    lines = [f"  {names.get(module, '')!r} ({type(module).__name__}) in {thread}" for module, thread in calls.items()]
    advice = (
        "Hooks belong to the thread that opened the run. If the model starts threads itself, it can start them with "
        "contextvars.copy_context().run"
    )
    _warn("modules with hooks were also called in another thread, where the hooks were not called:", [*lines, advice])


def report_missed(missed: Iterable[tuple[HookAction, str]]) -> None:
    """Warn of hooks that fired, but not at all of their positions."""
    lines = [f"  {_label(action)}: {message}" for action, message in missed]
    if lines:
        _warn("hooks did not reach all of their positions:", lines)


def missed_by(actions: Iterable[HookAction]) -> list[tuple[HookAction, str]]:
    """Those of the hooks that fired, but not at all of their positions, with a message about these."""
    found = [(each, each.reach.message()) for each in actions if each.fired and each.reach is not None]
    return [(action, message) for action, message in found if message]


def report_skipped(errors: Iterable[HookError]) -> None:
    """Warn of hooks that failed and whose effect was dropped."""
    for error in errors:
        times = f" It failed {error.times} times." if error.times > 1 else ""
        text = f"{error}. Its effect was dropped, and the run continued.{times}"
        warnings.warn(text, SkippedHookWarning, stacklevel=users_level())


def not_current(action: PointAction) -> str:
    """The reason for a hook on a module that was replaced."""
    return f"its module ({type(action.module).__name__}) is no longer in the model under that name: add the hook again"


def _warn(head: str, lines: list[str]) -> None:
    warnings.warn("\n".join([head, *lines]), NeverFiredWarning, stacklevel=users_level())


def _label(action: PointAction) -> str:
    hook = getattr(action, "hook", None)
    kind = "the cache" if hasattr(action, "recorder") else type(action).__name__
    return f"{kind if hook is None else describe(hook)} at {action.point.name!r}"


def _reason(action: PointAction, *, has_run: bool) -> str:
    if action.why_not is not None:
        return action.why_not
    if not has_run:
        return "no forward pass of the model ran"
    if action.fired:
        return not_current(action)
    module = type(action.module).__name__
    if action.point.site.kind.is_inner:
        return (
            f"its module ({module}) was not called, or computes attention in a child, or in a fused "
            f"kernel, as flash attention does: model.set_attn_implementation('sdpa') or 'eager'"
        )
    if action.point.only is not None:
        times = action.point.only + 1
        return f"its module was called fewer than {times} time{'s' if times > 1 else ''}"
    return f"its module ({module}) was not called in this forward pass"

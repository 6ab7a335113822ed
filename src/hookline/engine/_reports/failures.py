"""The errors of hooks: how they are described, raised, or skipped with a warning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookline.engine._gradients.checkpointing import acted_in_first_run
from hookline.engine._reports.reports import report_skipped
from hookline.errors import HookError, HooklineError, describe

if TYPE_CHECKING:
    from hookline.engine.actions import Action
    from hookline.engine.hook_actions import HookAction


def hook_error(what: str, action: HookAction, original: BaseException | None = None) -> HookError:
    """The error that names a hook and its point."""
    failure = HookError(
        f"hook {describe(action.hook)} at point {action.point.name!r} {what}",
        point=action.point,
        hook=action.hook,
        hook_id=action.registration.id or getattr(action.hook, "id", None),
        original_error=original,
    )
    schedule = action.run if action.is_in_run else action.point.permanent
    if action.on_error != "skip" and schedule is not None:
        schedule.note(failure)
    return failure


def raised(action: HookAction, error: Exception) -> HookError:
    """The error for an exception of the user's function."""
    return hook_error(f"raised {type(error).__name__}: {error}", action, error)


def skip(action: HookAction, failure: HookError) -> None:
    """Keep the first error of its kind, and warn: at the end of the run, or now if there is none."""
    action.fired = True
    failure.drop_traceback()
    known = next((each for each in action.errors if each.hook is failure.hook and each.point is failure.point), None)
    if known is None:
        action.errors.append(failure)
    else:
        known.times += 1
    if action.is_in_run:
        run = action.run
        is_news = known is None and (run is None or not run.is_open)
    else:
        is_news = action.point.permanent.is_news(action)
    if is_news:
        report_skipped([failure])


def check_nothing_is_gone(tap: Any, there: list[Action]) -> None:
    """Raise if a checkpointed region recomputes without a hook that changed a value when it ran first."""
    for action in acted_in_first_run():
        if action.tap is tap and action not in there:
            raise HooklineError(
                f"the hook at {action.point.name!r} was removed or disabled between the forward pass and the backward "
                f"pass, which recomputes a checkpointed region: the gradients would be those of another model. Call "
                f"backward() first"
            )

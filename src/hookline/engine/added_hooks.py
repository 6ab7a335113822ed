"""Reports of added hooks: after a forward pass, those that did not fire are named in a warning, once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hookline.engine.recorder import StopForward
from hookline.engine.reports import not_current, report_missed, report_silent
from hookline.engine.runs import clear_state
from hookline.engine.schedule import active

if TYPE_CHECKING:
    from hookline.engine.actions import PointAction
    from hookline.engine.hook_actions import HookAction
    from hookline.engine.names import Points


def run_and_report(points: Points, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a model, and warn about added hooks that did not fire, or not at all of their positions."""
    permanent = points.permanent
    permanent.settle()
    if not permanent.steps:
        return forward(*args, **kwargs)
    is_alone = all(run.is_one_pass for run in active.get())
    before = [(hook, hook.registration.switches, hook.registration.last_fired) for hook in permanent.hooks()]
    if is_alone:
        permanent.forget_missed()
    try:
        output = forward(*args, **kwargs)
    except StopForward:
        _report(points, before, has_ended=False)
        raise
    finally:
        clear_state()
    _report(points, before, has_ended=True)
    if is_alone:  # in an open context, more of the text may follow, and the context reports at its end
        report_missed(permanent.missed())
    return output


def _report(points: Points, before: list[tuple[HookAction, int, object]], *, has_ended: bool) -> None:
    there, is_current = set(points.permanent.hooks()), points.is_current
    whole = [
        (hook, last) for hook, switches, last in before if hook in there and hook.registration.switches == switches
    ]
    silent = [hook for hook, _ in whole if has_ended and hook.must_fire]
    silent = [hook for hook in silent if not (hook.fired and is_current(hook.point))]
    stale = [hook for hook, last in whole if hook.registration.is_stale(last)]
    what = "its module was not called in this run" if has_ended else "the run stopped before it"
    why: dict[PointAction, str] = dict.fromkeys(stale, f"{what}, and its captured values are from an earlier run")
    why |= {hook: not_current(hook) for hook, _ in whole if not is_current(hook.point)}
    report_silent(dict.fromkeys([*silent, *stale]), has_run=True, why=why)
    for hook in silent:
        hook.must_fire = False

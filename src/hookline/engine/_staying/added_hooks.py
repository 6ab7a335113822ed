"""Added hooks: which are active, and a warning after a forward pass about those that did not fire, once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.engine._recording.recorder import StopForward
from hookline.engine._reports.reports import not_current, report_missed, report_silent
from hookline.engine.hook_actions import HookAction
from hookline.engine.runs import clear_state
from hookline.engine.schedule import active

if TYPE_CHECKING:
    from hookline.engine.actions import PointAction
    from hookline.engine.names import Points


def active_hooks(points: Points) -> list[HookAction]:
    """The enabled hooks of a model that may change activations: added ones, and those of open contexts."""
    runs = [run for run in active.get() if run.actions and _share_modules(getattr(run, "root", None), points.root)]
    opened = (each for run in runs for each in run.actions if isinstance(each, HookAction))
    every = [*points.permanent.hooks(), *opened]
    return [each for each in every if each.dir == "fwd" and each.registration.is_enabled() and not each.only_reads]


def _share_modules(one: nn.Module | None, other: nn.Module) -> bool:
    """Whether one of two modules contains the other; True if it is not known."""
    return one is None or one is other or one in {*other.modules()} or other in {*one.modules()}


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

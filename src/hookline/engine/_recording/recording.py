"""Recording runs: runs that only record. Where no other run acts, all that they do at an event is a capture."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.engine._compiler import pausing
from hookline.engine._recording.captures import captures_in
from hookline.engine._recording.deferred import is_replayable
from hookline.engine._recording.lineage import Lineage, is_exact
from hookline.engine._recording.recorder import Recorder
from hookline.engine._torch.hooks_on_modules import hooks_after, hooks_before, next_number
from hookline.engine.actions import Record
from hookline.engine.events import ignore
from hookline.engine.pass_state import pass_state
from hookline.engine.runs import Run, open_runs
from hookline.engine.schedule import active

if TYPE_CHECKING:
    from hookline.engine.names import Points
    from hookline.engine.points import HookPoint


class RecordingRun(Run):
    """Records points in one forward pass. It can be used again.

    Other runs may have hooks on some of the modules, `hooked`.
    """

    lineage: Lineage
    """What its plan depends on."""

    def __init__(
        self,
        root: nn.Module,
        points: Sequence[HookPoint],
        recorder: Recorder,
        planned_from: tuple[Any, ...],
        hooked: frozenset[nn.Module],
    ) -> None:
        super().__init__(root, [Record(point, recorder, hooked) for point in points], is_one_pass=True)
        self.recorder, self.planned_from = recorder, planned_from
        self._captures = captures_in(self, recorder)
        self._called = [*dict.fromkeys(self._modules.values())]
        self._is_late = any(tap.late for tap in self._modules)
        self._numbered: int | None = None  # the number of torch's next hook, when there were none on the modules
        if recorder.skips_missing:
            self._reported = self._at_points = []  # no record has to fire

    def renew(self) -> None:
        """Prepare for another use."""
        self.count.forget()

    def attach(self) -> None:
        """Attach the taps, and let those where no other run of this thread acts call the captures."""
        super().attach()
        runs = active.get()
        shared = {tap for run in runs if run is not self for tap in run.actions_at}
        for tap, capture in self._captures.items():
            if tap.alone is None and tap not in shared:
                tap.capture, tap.alone = capture, runs

    def detach(self) -> None:
        """Undo `attach`. Safe to call twice."""
        for tap, capture in self._captures.items():
            if tap.capture is capture:
                tap.alone, tap.capture = None, ignore
        super().detach()

    def is_ready(self) -> bool:
        """Whether it can be used now: nobody else acts behind its taps, which are then to come after theirs."""
        if self._is_late or (pausing.has_users() and any(map(_permanent, self._modules))):
            return False
        if self._numbered == next_number():
            return True  # since it was last looked, torch has numbered no hook
        if any(map(hooks_before, self._called)) or any(map(hooks_after, self._called)):
            return self.is_alone()
        self._numbered = next_number()
        return True


def recording_run(points: Points, chosen: str | list[HookPoint] | None) -> RecordingRun | None:
    """Return a run that only records: all points, those of a name or glob, or these. The last one of this thread again,
    if possible; None if something else acts on the model too.
    """
    if pass_state.hooks or is_replayable():
        return None
    hooked = frozenset(module for run in open_runs() for module in run.hooked_modules())
    planned_from = ("cache", chosen, hooked)
    run: RecordingRun | None = points.ready_runs.take(planned_from)
    if run is not None and run.lineage.is_same():
        run.renew()
    else:
        selected, is_full = chosen if isinstance(chosen, list) else points.select(chosen), chosen is None
        recorder = Recorder(selected, skips_missing=is_full, defers=is_full)
        run = RecordingRun(points.root, selected, recorder, planned_from, hooked)
        run.lineage = points.lineage(run.modules() if isinstance(chosen, list) or is_exact(chosen) else None)
    return run if run.is_ready() else None


_permanent = attrgetter("permanent")

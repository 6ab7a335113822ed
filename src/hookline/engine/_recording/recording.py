"""Recording runs: runs that only record, alone in their thread.

The modules are called through detours, which cost less than torch's hooks, and there is nothing to arrange at an event:
see `captures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor, nn

from hookline.engine._compiler import compiling
from hookline.engine._inner.inner import InnerTap
from hookline.engine._memory.snapshots import shared
from hookline.engine._recording.captures import Capture, captures_in, whole_output
from hookline.engine._recording.deferred import is_replayable
from hookline.engine._recording.detours import PLACE, called_if_hooked, detour_of, is_interceptable
from hookline.engine._recording.lineage import Lineage, is_exact
from hookline.engine._recording.recorder import Recorder
from hookline.engine._reports.reports import report_compiled
from hookline.engine._torch.compiled_calls import call_with_hooks
from hookline.engine._torch.hooks_on_modules import (
    after_all,
    before_all,
    has_hooks_on_all,
    hooks_after,
    hooks_before,
    next_number,
)
from hookline.engine._torch.refcounts import references
from hookline.engine.actions import Record
from hookline.engine.order import Kind
from hookline.engine.pass_state import pass_state
from hookline.engine.runs import Run, open_runs
from hookline.engine.schedule import ModuleCall, active
from hookline.engine.taps import Tap, lock

if TYPE_CHECKING:
    from hookline.engine.names import Points
    from hookline.engine.points import HookPoint


class RecordingRun(Run):
    """Records points in one forward pass. It can be used again.

    Other runs may have hooks on some of the modules, `hooked`: these are called with all taps.
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
        captures = captures_in(self, recorder)
        taps: dict[nn.Module, list[Tap]] = {}
        for tap, module in self._modules.items():
            taps.setdefault(module, []).append(tap)
        tapped = called_if_hooked(root)
        led = {
            m: module_taps for m, module_taps in taps.items() if m not in tapped and _can_lead(m, module_taps, captures)
        }
        self._tapped = {tap: module for tap, module in self._modules.items() if module not in led}
        self.ways = {module: self._way(module, module_taps, captures) for module, module_taps in led.items()}
        self._detours = [(detour_of(module), module.__dict__, way) for module, way in self.ways.items()]
        # Outside the modules, these taps are not attached, and act on nothing even if another run attaches them.
        self._outer = {
            m: {tap: self.steps.pop(tap) for tap in module_taps if not tap.kind.is_inner}
            for m, module_taps in led.items()
        }
        self._led, self._types = [*led], [type(module) for module in led]
        self._calls = [(kind, kind.__call__) for kind in dict.fromkeys(self._types)]
        self._taps, self._hooked = led, dict[nn.Module, None]()
        self.captures = {tap: capture for tap, capture in captures.items() if tap in self.steps}
        self._called = [*taps]
        self._compiled: list[nn.Module] = []  # modules that were compiled during the run
        self._is_late = any(tap.late for tap in self._modules)
        self._numbered: int | None = None  # the number of torch's next hook, when there were none on the modules
        if recorder.skips_missing:
            self._reported = self._at_points = []  # no record has to fire

    def renew(self) -> None:
        """Prepare for another use."""
        self.count.forget()
        self._compiled = []

    def _report(self) -> None:
        if self._compiled:
            report_compiled(self._compiled, self.root)
        super()._report()

    def _way(self, module: nn.Module, taps: list[Tap], captures: dict[Tap, Capture]) -> ModuleCall:
        """What the calls of a module do instead of calling it."""
        at = {tap.kind: captures[tap] for tap in taps}
        into, out = at.get(Kind.INPUT), at.get(Kind.OUTPUT)
        inner = next((tap for tap in taps if isinstance(tap, InnerTap)), None)
        around = None if inner is None else inner.around(module, {tap: captures[tap] for tap in taps})
        detour, itself = detour_of(module), ref(self)
        if len(taps) == 1 and out is not None and (record := whole_output(self.steps[taps[0]])) is not None:
            return self._short_way(module, record, out)

        def way(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if hooks_after(module) or hooks_before(module) or before_all or after_all:
                return itself().with_hooks(module, args, kwargs)  # type: ignore[union-attr]
            if into is not None:
                into((args, kwargs))
            call = detour.own or call_with_hooks(module)
            if around is not None:
                output = around(call, args, kwargs)
            elif pass_state.interceptors and type(module) in pass_state.interceptors[-1].plain:
                output = pass_state.interceptors[-1].without(call, args, kwargs)
            else:
                output = call(*args, **kwargs)
            if out is not None:
                alone = object()  # counted as the output is if only this frame has it
                out(output, references(output) <= references(alone))
            return output

        return way

    def _short_way(self, module: nn.Module, record: Record, out: Capture) -> ModuleCall:
        """What the calls of a module do if one record of its output is all that is done there."""
        recorder, detour, itself, name = self.recorder, detour_of(module), ref(self), record.point.name

        def way(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if hooks_after(module) or hooks_before(module) or before_all or after_all:
                return itself().with_hooks(module, args, kwargs)  # type: ignore[union-attr]
            output = (detour.own or call_with_hooks(module))(*args, **kwargs)
            is_noted = recorder.forward_pass is pass_state.forward_pass and not recorder.is_padded
            if is_noted and type(output) is Tensor and not output.requires_grad:
                alone = object()
                is_new = references(output) <= references(alone)
                same = shared(output, is_for_reading=True, is_new=is_new)
                if same is not None:
                    record.fired = True
                    recorder.log.append((name, same))
                    return output
            out(output)
            return output

        return way

    def with_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that somebody else has hooked meanwhile: its taps know what to do then."""
        call = detour_of(module).original_call
        if module in self._hooked:  # a module that calls itself
            return call(*args, **kwargs)
        try:
            with lock:
                self._hooked[module] = None
                self.steps.update(self._outer[module])
                for tap in self._taps[module]:
                    tap.acquire(module, self)
            self.recorder.stash(module)
            return call(*args, **kwargs)
        finally:
            with lock:
                self._unhook(module)

    def _unhook(self, module: nn.Module) -> None:
        for tap in self._taps[module]:
            tap.release(module, self)
        for tap in self._outer[module]:
            self.steps.pop(tap, None)
        self._hooked.pop(module, None)

    def attach(self) -> None:
        """Lead the calls of modules, and attach taps where that does not suffice."""
        for tap, module in self._tapped.items():
            tap.acquire(module, self)
        number, runs = id(self), active.get()
        for detour, attributes, way in self._detours:
            detour.users.add(number)
            if (
                compiled_call := attributes.get(PLACE)
            ) is not detour:  # as `Detour.acquire`, without a call for each module
                detour.own = compiled_call
                attributes[PLACE] = detour
            if detour.alone is None:
                detour.way, detour.alone = way, runs

    def detach(self) -> None:
        """Undo `attach`. Safe to call twice."""
        number = id(self)
        for detour, attributes, way in self._detours:
            detour.users.discard(number)
            if detour.way is way:
                detour.alone = detour.way = None
            now = attributes.get(PLACE)
            if now is not detour:
                if now is not None and now is not detour.own:
                    self._compiled.append(detour.module)
            elif not detour.users:
                if detour.own is None:
                    del attributes[PLACE]
                else:
                    attributes[PLACE] = detour.own
        for tap, module in self._tapped.items():
            tap.release(module, self)
        for module in list(self._hooked):
            self._unhook(module)

    def is_ready(self) -> bool:
        """Whether it can be used now: nobody else acts on its modules, and they are called as when it was made."""
        if self._is_late or [*map(type, self._led)] != self._types:
            return False
        if False in [kind.__call__ is call for kind, call in self._calls]:
            return False
        if compiling.has_users() and any(map(_permanent, self._modules)):
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
    if pass_state.hooks or is_replayable() or has_hooks_on_all():
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


def _can_lead(module: nn.Module, taps: list[Tap], captures: dict[Tap, Capture]) -> bool:
    """Whether calling the module through a detour is enough to record all that happens at its taps."""
    is_muted = any(isinstance(tap, InnerTap) and tap.ignored_in(module) for tap in taps)
    return is_interceptable(module) and not is_muted and all(tap in captures for tap in taps)

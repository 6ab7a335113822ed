"""Watches: actions that want the gradient of what flows out of a point.

A watched tensor is sent on as one of its own, so that its gradient is the point's and no other's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.engine.actions import HookAction, PointAction
from hookline.engine.aliases import OVERWRITTEN, Handed, in_same_memory, is_discarded, is_passed_through, lead_through
from hookline.engine.checkpointing import is_first_run
from hookline.engine.snapshots import is_from_outside, is_part_of_pass, is_unchanged, snapshot
from hookline.engine.structures import NoTensorError
from hookline.engine.taps import Kind, Phase, Step, now

if TYPE_CHECKING:
    from hookline.engine.points import HookPoint
    from hookline.engine.recorder import Recorder


class Watch(PointAction):
    """Something that wants the gradient of what flows out of a point."""

    phase = Phase.GRADIENT
    is_late = True
    dir = "bwd"

    def extend(self, steps: list[Step]) -> None:
        """Share one step with the other watches of the same tensor, so that they see it in order."""
        last = steps[-1] if steps else None
        if isinstance(last, _WatchStep) and (last.first.lens, last.first.point.only) == (
            self.lens,
            self.point.only,
        ):
            last.watches.append(self)
        else:
            steps.append(_WatchStep(self))

    def attach(self, mine: Tensor, out: Tensor) -> None:
        """Ask for the gradient of `out`, which is on its way out of the point, or of `mine` just before it."""
        raise NotImplementedError

    def miss(self, error: NoTensorError) -> None:
        """There is no tensor at the point."""
        raise NotImplementedError


class _WatchStep:
    """Sends on a tensor of its own, so that its gradient is the point's and no other's."""

    def __init__(self, first: Watch) -> None:
        self.first, self.watches = first, [first]

    def __call__(self, value: Any) -> Any:
        first = self.first
        if not first.is_for_this_call():
            return value
        try:
            x = first.lens.get(value)
        except NoTensorError as error:
            for watch in self.watches:
                watch.miss(error)
            return value
        why_not = self._why_not(x)
        for watch in self.watches:
            watch.why_not, watch.fired = why_not, watch.fired or why_not is None
        if why_not is not None or not torch.is_grad_enabled():
            return value
        if first.is_worked_out:
            first.keep_for_second_run()
        if self._is_callers(x):
            mine, out = in_same_memory(x)
        else:
            mine = snapshot(x)
            if not mine.requires_grad:
                mine.requires_grad_()
            out = snapshot(mine)  # the model may write to this one; `mine` keeps standing for what left the point
        for watch in self.watches:
            watch.attach(mine, out)
        if self._is_read_in_place(x) and lead_through(x, out):
            return value
        return first.lens.put(value, out)

    def _is_callers(self, x: Tensor) -> bool:
        """Whether what the model's own code holds must go on being the same memory as what is sent on."""
        first = self.first
        if first.is_worked_out:
            return False
        if first.tap.kind is Kind.INPUT:
            # What a module writes in place has no gradient of its own; see `aliases.py` for how the caller gets it.
            return not getattr(first.module, "inplace", False) or is_from_outside(x)
        return is_passed_through(x) or is_from_outside(x)

    def _is_read_in_place(self, x: Tensor) -> bool:
        first = self.first
        is_output = first.tap.kind is Kind.OUTPUT and not first.is_worked_out and is_part_of_pass(first.module)
        return is_output and is_passed_through(x) and is_discarded()

    def _why_not(self, x: Tensor) -> str | None:
        if not (x.is_floating_point() or x.is_complex()):
            return f"its dtype {x.dtype} has no gradient"
        if torch.is_grad_enabled() or self._comes_later():
            return None
        return "gradients are switched off (torch.no_grad or torch.inference_mode)"

    def _comes_later(self) -> bool:
        if not (now.starts_with_grad and is_first_run()):
            return False
        self.first.keep_for_second_run()
        return True


class BackwardHook(Watch, HookAction):
    """A backward hook: reads the gradient, changes it in place, or returns another."""

    def __init__(self, point: HookPoint, hook: Any, *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self._handed: list[Handed] = []
        self._is_overwritten = False

    def begin(self) -> None:
        """Nothing has been handed on yet."""
        super().begin()
        self._handed, self._is_overwritten = [], False

    def end_pass(self) -> None:
        """Note whether the model wrote over what was handed on, and let go of it: it has the hook, which has this."""
        handed, self._handed = self._handed, []
        self._is_overwritten = self._is_overwritten or any(each.is_overwritten() for each in handed)

    def settle(self) -> None:
        """Whether the model lets it be called."""
        self.end_pass()
        if self._is_overwritten:
            self.fired, self.why_not = False, OVERWRITTEN

    def attach(self, mine: Tensor, out: Tensor) -> None:  # noqa: ARG002 (hooks of one point share `out`, in order)
        """Be called with the gradient, whenever it is computed."""
        run = self.run
        if run is not None and run.is_open:
            if not run.is_one_pass and not self.count.here().is_on():
                self.end_pass()  # a module by itself, or a checkpointed region that recomputes: no pass will end
            self._handed.append(Handed(out))
        call, passing = self.call(), now.passing

        def on_gradient(grad: Tensor) -> Tensor | None:
            given = snapshot(grad, is_ours=True)
            before, now.passing = now.passing, passing  # the text is that of the forward pass
            try:
                result = self.ask(given, call)
            finally:
                now.passing = before
            if isinstance(result, tuple) and len(result) == 1:
                result = result[0]
            if result is None or result is given:
                return None if is_unchanged(given, grad) else given
            return self.fitted(result, grad)

        out.register_hook(on_gradient)

    def miss(self, error: NoTensorError) -> None:
        """A hook cannot work on nothing."""
        failure = self.error(f"has nothing to work on: {error}", error)
        if self.on_error != "skip":
            raise failure from error
        self._skip(failure)


class GradientRecord(Watch):
    """Keeps the tensor, so that its gradient can be asked for when the forward pass is over."""

    def __init__(self, point: HookPoint, recording: Recorder) -> None:
        super().__init__(point)
        self.recording = recording
        self.must_fire = False  # the record of the value, at the same point, tells

    def attach(self, mine: Tensor, out: Tensor) -> None:
        """Remember `mine`: its gradient is what flows back from the point, after every hook."""
        if not now.is_second_run:
            self.recording.watch(self.point, mine, Handed(out))

    def miss(self, error: NoTensorError) -> None:
        """The record of the value, at the same point, says so."""

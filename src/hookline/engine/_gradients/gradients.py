"""Gradient taps: actions that want the gradient of the activation that leaves a point.

The activation is sent on as a tensor of its own, so that its gradient is exactly that of the point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.engine._gradients.checkpointing import is_first_run
from hookline.engine._gradients.gradient_sources import OVERWRITTEN, GradientSource, SentTensor
from hookline.engine._memory.aliases import is_discarded, is_overwriting, is_passed_through
from hookline.engine._memory.outside import is_whole
from hookline.engine._memory.results import fit
from hookline.engine._memory.snapshots import is_from_outside, is_unchanged, snapshot
from hookline.engine._reports import failures
from hookline.engine.actions import PointAction
from hookline.engine.events import call_hook
from hookline.engine.hook_actions import HookAction
from hookline.engine.order import Kind, Phase
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import Step
from hookline.errors import HookError, UnavailablePointError
from hookline.functions.callers import Caller
from hookline.values.structures import NoTensorError

if TYPE_CHECKING:
    from hookline.engine._recording.recorder import Recorder
    from hookline.engine.points import HookPoint


class GradientTap(PointAction):
    """An action that wants the gradient of the activation that leaves a point."""

    phase = Phase.GRADIENT
    is_late = True
    dir = "bwd"

    def extend(self, steps: list[Step], *, is_replay: bool = False) -> None:  # noqa: ARG002 (the same in a replay)
        """Share one step with the other gradient taps of the same lens, so that they get its gradient in order.

        A step of another lens goes before those of hooks: gradients reach the last step first.
        """
        place = len(steps)
        while place and isinstance(step := steps[place - 1], _GradientStep) and step.taps[0].stage == self.stage:
            if step.taps[0].lens == self.lens:
                step.taps.append(self)
                return
            place -= 1
        steps.insert(place, _GradientStep(self))

    def attach(self, sent: SentTensor) -> None:
        """Ask for the gradient of what is sent on."""
        raise NotImplementedError

    def miss(self, error: NoTensorError) -> None:
        """The point has no tensor in this call."""
        raise NotImplementedError


class _GradientStep:
    """Sends on a tensor of its own and lets the gradient taps of one lens attach to it."""

    def __init__(self, first: GradientTap) -> None:
        self.first, self.taps = first, [first]

    def __call__(self, value: Any) -> Any:
        first = self.first
        taps = [tap for tap in self.taps if tap.is_for_this_call()]
        if not taps:
            return value
        try:
            x = first.lens.get(value)
        except NoTensorError as error:
            for tap in taps:
                tap.miss(error)
            return value
        if x.is_nested and x.layout is torch.strided and torch.is_grad_enabled():
            raise UnavailablePointError(
                f"there is no gradient at {first.point.name!r}: the activation is a nested tensor in the strided "
                f"layout, of which torch can make no view; make it with layout=torch.jagged"
            )
        why_not = self._why_not(x)
        for tap in taps:
            tap.why_not, tap.fired = why_not, tap.fired or why_not is None
        if why_not is not None or not torch.is_grad_enabled():
            return value
        if first.is_derived or not x.requires_grad:  # a graph that begins here must begin here again
            self._keep_for_second_run(must_act=False)
        sent = SentTensor.in_memory_of(x) if self._shares_memory(x) else SentTensor.as_copy(x)
        is_led = (self._is_read_in_place(x) or self._is_written_whole(x)) and sent.lead(x)
        for tap in taps:
            tap.attach(sent)
        sent.attach()
        return value if is_led else first.lens.put(value, sent.out)

    def _shares_memory(self, x: Tensor) -> bool:
        """Whether the model's own code may rely on `x` being in the same memory as what is sent on."""
        first = self.first
        if first.is_derived or not (x.layout is torch.strided or x.is_nested):
            return False  # torch makes no views of sparse tensors
        if first.tap.kind is Kind.INPUT:
            # What a module writes in place must have a graph for the caller too, who has none otherwise.
            return not first.is_inplace or x.requires_grad or is_from_outside(x)
        return is_passed_through(x) or is_from_outside(x)

    def _is_read_in_place(self, x: Tensor) -> bool:
        """Whether the module's caller continues with the tensor that it passed in."""
        first = self.first
        is_output = first.tap.kind is Kind.OUTPUT and not first.is_derived and not is_whole(first.module)
        return is_output and is_passed_through(x) and is_discarded()

    def _is_written_whole(self, x: Tensor) -> bool:
        """Whether the module overwrites its input `x`, so that nobody can use it as it is but the module.

        A view would do too. But the gradient of what is written to a view has the strides of its base, and kernels for
        other strides round differently.
        """
        first = self.first
        is_input = first.tap.kind is Kind.INPUT and not first.is_derived and first.is_inplace
        return is_input and x.requires_grad and is_overwriting(first.module)

    def _why_not(self, x: Tensor) -> str | None:
        if not (x.is_floating_point() or x.is_complex()):
            return f"its dtype {x.dtype} has no gradient"
        if torch.is_grad_enabled() or self._comes_later():
            return None
        return "gradients are disabled (torch.no_grad or torch.inference_mode)"

    def _comes_later(self) -> bool:
        if not (pass_state.starts_with_grad and is_first_run()):
            return False
        self._keep_for_second_run(must_act=True)
        return True

    def _keep_for_second_run(self, *, must_act: bool) -> None:
        for tap in self.taps:
            tap.keep_for_second_run(must_act=must_act)


class BackwardHook(GradientTap, HookAction):
    """A backward hook: reads the gradient, changes it in place, or returns another one."""

    def __init__(self, point: HookPoint, hook: Any, *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self._sources: list[GradientSource] = []
        self._is_overwritten = False

    def begin(self) -> None:
        """Prepare for a run."""
        super().begin()
        self._sources, self._is_overwritten = [], False

    def end_pass(self) -> None:
        """Note whether the model overwrote the tensors that were sent on."""
        sources, self._sources = self._sources, []
        self._is_overwritten = self._is_overwritten or any(source.is_lost() for source in sources)

    def settle(self) -> None:
        """At the end of the run: a hook whose tensor was overwritten is never called."""
        self.end_pass()
        if self._is_overwritten:
            self.fired, self.why_not = False, OVERWRITTEN

    def skip_on_error(self) -> None:
        """From now on, keep the gradient unchanged when the hook fails."""
        if self.on_error != "skip":
            self.invoke = _skipping(self, self.invoke)
        super().skip_on_error()

    def attach(self, sent: SentTensor) -> None:
        """Call the hook with the gradient whenever it is computed."""
        run = self.run
        if run is not None and run.is_open:
            if not run.is_one_pass and not self.count.here().is_on():
                self.end_pass()  # a module by itself, or a checkpointed region that recomputes: no pass will end
            self._sources.append(sent.source())
        call, forward_pass = self.call(), pass_state.forward_pass

        def on_gradient(grad: Tensor) -> Tensor | None:
            given = snapshot(grad, is_ours=True)
            before = pass_state.forward_pass, pass_state.is_recomputing
            pass_state.forward_pass, pass_state.is_recomputing = forward_pass, False  # the text is that of then
            try:
                result = _unpacked(call_hook(self, given, call))
            finally:
                pass_state.forward_pass, pass_state.is_recomputing = before
            if result is None or result is given:
                return None if is_unchanged(given, grad) else given
            return fit(self, result, grad)

        sent.register_hook(on_gradient)

    def miss(self, error: NoTensorError) -> None:
        """A hook needs a tensor."""
        if not self.must_fire:
            return
        failure = self.nothing_there(error)
        if self.on_error != "skip":
            raise failure from error
        failures.skip(self, failure)


def _unpacked(result: Any) -> Any:
    """The gradient that a backward hook returned: torch's own hooks return a tuple of one."""
    return result[0] if isinstance(result, tuple) and len(result) == 1 else result


def _skipping(action: BackwardHook, invoke: Caller) -> Caller:
    """`invoke`, which calls a backward hook, so that an error drops its effect and keeps the gradient."""

    def call(grad: Tensor, point: Any) -> Tensor:
        before = snapshot(grad, is_ours=True)
        try:
            result = _unpacked(invoke(grad, point))
            return fit(action, grad if result is None else result, before)
        except HookError as failure:
            failures.skip(action, failure)
        except Exception as error:  # not swallowed: it is kept, and a warning reports it
            failures.skip(action, failures.raised(action, error))
        return before

    return call


class GradientRecord(GradientTap):
    """Keeps the tensor, so that its gradient can be computed after the forward pass."""

    must_fire = False  # the record of the value, at the same point, reports it

    def __init__(self, point: HookPoint, recorder: Recorder) -> None:
        super().__init__(point)
        self.recorder = recorder

    def attach(self, sent: SentTensor) -> None:
        """Remember where the gradient at the point, after every hook, is to be found."""
        is_of_model = not (pass_state.hooks and self.count.here().is_below_hook())
        if is_of_model and not pass_state.is_recomputing:
            self.recorder.watch(self.point, sent.source())

    def miss(self, error: NoTensorError) -> None:
        """The record of the value, at the same point, reports it."""

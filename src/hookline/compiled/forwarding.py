"""CompiledForward: one forward pass over whole texts, as `run_with_hooks` and `run_with_cache` make it.

Texts are padded on the right to one of a few lengths, where a causal model does not see the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers.modeling_outputs import CausalLMOutputWithPast

from hookline.compiled.classify import positions_of
from hookline.compiled.plain import plain_tensors
from hookline.compiled.program import Clock, Program
from hookline.compiled.proof import why_unproved
from hookline.compiled.tables import NoTableError, write_table
from hookline.compiled.variants import Variant
from hookline.engine.actions import Action, Record
from hookline.engine.hook_actions import HookAction
from hookline.engine.passes import current
from hookline.engine.recorder import Recorder
from hookline.engine.runs import Run, open_runs
from hookline.errors import HooklineError
from hookline.text.token_positions import mask_of

if TYPE_CHECKING:
    from hookline.compiled.executor import CompiledRuns

INPUTS = ("input_ids", "attention_mask", "position_ids")
"""What a compiled pass takes: a tensor `[row, pos]` each."""


class ForwardState:
    """The inputs of a pass in tensors of fixed address, for one size of batch and one length."""

    def __init__(self, module: nn.Module, names: Sequence[str], rows: int, length: int) -> None:
        device = next(module.parameters()).device
        self.module, self.rows, self.length = module, rows, length
        self.inputs = {name: torch.zeros(rows, length, dtype=torch.long, device=device) for name in names}
        for each in self.inputs.values():
            torch._dynamo.mark_static_address(each)
        self.clock = Clock(rows, length, device)
        self.variants: list[Variant] = []

    def set(self, inputs: Mapping[str, Tensor]) -> None:
        """Use these inputs."""
        for name, each in inputs.items():
            self.inputs[name].zero_()
            self.inputs[name][:, : each.shape[1]] = each

    def passer(self, program: Program) -> Callable[[], Tensor]:
        """The function that runs the model, for a program."""

        def forward() -> Tensor:
            program.seen()
            output = self.module(**self.inputs, use_cache=False)
            program.forget()
            return output.logits

        return forward


class CompiledForward:
    """One pass with the hooks of this thread."""

    def __init__(self, owner: CompiledRuns, state: ForwardState, actions: Sequence[Action], inputs: Mapping[str, Any]):
        self.owner, self.state, self.inputs = owner, state, inputs
        self.hooks = [each for each in actions if isinstance(each, HookAction) and not getattr(each, "is_idle", False)]
        self.records = sorted((each for each in actions if type(each) is Record), key=lambda each: each.order)
        self.rows, self.width = inputs["input_ids"].shape

    def run(self) -> Any:
        """The model's output: its logits."""
        try:
            with plain_tensors():
                return self._run()
        finally:
            self.owner.give_back(self.state, tuple(self.state.inputs))

    def _run(self) -> Any:
        points = [each.point for each in self.records]
        variant = self.owner.variant(self.state, self.hooks, points, None, self.state.passer)
        slots = None if isinstance(variant, str) else variant.assigned(self.hooks, [point.site for point in points])
        if isinstance(variant, str) or slots is None:
            return self._eager(variant if isinstance(variant, str) else "its hooks have no order in a graph")
        for slot in variant.program.slots:
            slot.off()
        try:
            for hook, slot in slots.items():
                positions = positions_of(hook)
                where = True if positions is None else mask_of(positions, hook.point, self.rows, self.width)
                slot.gate[:, : self.width] = where
                write_table(slot, hook, self.width)
        except (HooklineError, NoTableError) as error:
            return self._eager(f"an edit depends on the text: {error}")
        self.state.set(self.inputs)
        return self._used(variant, slots) if variant.is_proved else self._proved(variant)

    def _eager(self, why: str) -> Any:
        self.owner.refused(why)
        return self.state.module(**self.inputs)

    def _used(self, variant: Variant, slots: Mapping[HookAction, Any]) -> Any:
        try:
            with variant.program.attached():
                logits = variant.call()[:, : self.width].clone()
        except TorchDynamoException as error:  # before anything has run
            variant.refusal = f"it could not be compiled again ({type(error).__name__})"
            return self._eager(variant.refusal)
        variant.runs += 1
        for hook, slot in slots.items():
            hook.fired = hook.fired or hook.reach is None or bool(slot.gate.any())
            if hook.reach is not None:
                hook.reach.note(hook.point)
        for record in self.records:
            buffer = variant.program.reads[record.point.site].buffer
            record.fired = True
            record.recorder.keep(record.point, buffer[:, : self.width].clone())
        if not all(run.is_one_pass for run in open_runs()):
            current.forward_pass = None  # the pass has ended
        return CausalLMOutputWithPast(logits=logits)

    def _proved(self, variant: Variant) -> Any:
        """The output of an uncompiled pass, after comparing the graph's with it."""
        own = Recorder([each.point for each in self.records])
        with Run(self.owner.points.root, [Record(each.point, own) for each in self.records], is_one_pass=True):
            output = self.state.module(**self.inputs)
        if not isinstance(getattr(output, "logits", None), Tensor):
            variant.settle("the model returns no logits")
        else:
            expected: dict[Any, Tensor] = {"logits": output.logits}
            expected |= {name: values[-1] for name, values in own.by_point().items()}
            variant.settle(why_unproved(variant, expected, lambda way: self._values(variant, way)))
        if variant.refusal is not None:
            self.owner.refused(variant.refusal)
        return output

    def _values(self, variant: Variant, way: Callable[[], Tensor]) -> dict[Any, Tensor]:
        with variant.program.attached():
            found = {"logits": way()[:, : self.width].clone()}
        for record in self.records:
            buffer = variant.program.reads[record.point.site].buffer
            found[record.point.name] = buffer[:, : self.width].clone()
        return found

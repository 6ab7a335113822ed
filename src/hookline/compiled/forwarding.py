"""CompiledForward: one forward pass over whole texts, as `run_with_hooks` and `run_with_cache` make it.

Texts are padded on the right to one of a few lengths, where a causal model does not see the padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers.modeling_outputs import CausalLMOutputWithPast

from hookline.compiled.classify import positions_of
from hookline.compiled.fixed import fixed
from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.plain import PlainTensors
from hookline.compiled.program import Clock, Program, ReadSpec, Slot
from hookline.compiled.proof import why_unproved
from hookline.compiled.tables import all_are_tables, write_table
from hookline.compiled.variants import Variant
from hookline.engine import Action, HookAction, PointAction, Record, Recorder, Run, StopForward, open_runs, pass_state
from hookline.hooks.scores import Score
from hookline.text.token_positions import mask_of
from hookline.transformer.index import ModelPoints

if TYPE_CHECKING:
    from hookline.compiled.executor import CompiledRuns

INPUTS = ("input_ids", "attention_mask", "position_ids")
"""What a compiled pass takes: a tensor `[row, pos]` each."""


class ForwardState:
    """The inputs of a pass in tensors of fixed address, for one size of batch and one length."""

    def __init__(self, module: nn.Module, rows: int, length: int, names: tuple[str, ...], stops: bool) -> None:
        device = next(module.parameters()).device
        self.module, self.rows, self.length, self.key = module, rows, length, (rows, length, names, stops)
        self.inputs = {name: fixed(torch.zeros(rows, length, dtype=torch.long, device=device)) for name in names}
        self.stops = self.is_one_of_many = stops
        self.kind = "up to the last read" if stops else ""
        self.clock = Clock(rows, length, device)
        self.variants: list[Variant] = []

    def set(self, inputs: Mapping[str, Tensor]) -> None:
        """Use these inputs."""
        for name, tensor in inputs.items():
            self.inputs[name].zero_()
            self.inputs[name][:, : tensor.shape[1]] = tensor

    def passer(self, program: Program) -> Callable[[], Tensor | None]:
        """The function that runs the model, for a program. If nothing is returned, only what is read is computed."""

        def forward() -> Tensor | None:
            program.seen()
            output = self.module(**self.inputs, use_cache=False)
            program.forget()
            return None if self.stops else output.logits

        return forward


def order_of(points: ModelPoints) -> dict[str, int]:
    """A number for each point, which is larger for one that a pass reaches later."""
    return {name: number for number, name in enumerate(points.hook_dict)}


def before_end(points: ModelPoints, actions: Sequence[Action]) -> list[Action]:
    """The actions that a pass reaches: all, or those up to where a recorder ends it; NotCompiled if that is unknown."""
    names = {action: action.point.canonical_name for action in actions if isinstance(action, PointAction)}
    ends = {record for record in records_of(actions) if record.recorder.stops}
    if not ends or ends == names.keys():
        return list(actions)
    order = order_of(points)
    if unknown := [name for name in names.values() if name not in order]:
        raise NotCompiled(f"it stops early, perhaps before {unknown[0]!r}")
    last = max(order[names[record]] for record in ends)
    return [action for action in actions if action not in names or order[names[action]] <= last]


def records_of(actions: Sequence[Action]) -> list[Record]:
    """The reads among the actions of a run, in their order."""
    return sorted((record for record in actions if type(record) is Record), key=lambda record: record.order)


def read_specs(records: Sequence[Record]) -> dict[Record, ReadSpec]:
    """What a graph has to read for each of these."""
    specs: dict[Record, ReadSpec] = {}
    alike: Counter[ReadSpec] = Counter()
    for record in records:
        spec = ReadSpec(record.point.site, len(record.bias) if isinstance(record, Score) else 0)
        specs[record] = replace(spec, number=alike[spec] if spec.scores else 0)
        alike[spec] += 1
    return specs


class CompiledForward:
    """One pass with the hooks of this thread."""

    def __init__(self, owner: CompiledRuns, state: ForwardState, actions: Sequence[Action], inputs: Mapping[str, Any]):
        self.owner, self.state, self.inputs = owner, state, inputs
        self.hooks = [
            action for action in actions if isinstance(action, HookAction) and not getattr(action, "is_idle", False)
        ]
        order = order_of(owner.points)  # that of a cache
        self.records = sorted(
            records_of(actions), key=lambda record: order.get(record.point.canonical_name, len(order))
        )
        self._specs = read_specs(self.records)
        self.rows, self.width = inputs["input_ids"].shape

    def run(self) -> Any:
        """The model's output: its logits."""
        try:
            with PlainTensors():
                return self._run()
        finally:
            self.owner.give_back(self.state)

    def _run(self) -> Any:
        prepared = self.owner.unless_refused(self._prepared)
        if prepared is None:
            return self.state.module(**self.inputs)
        variant, slots = prepared
        self.state.set(self.inputs)
        new = self._unproved(variant)
        return self._used(variant, slots) if variant.is_proved and not new else self._proved(variant, new)

    def _prepared(self) -> tuple[Variant, dict[HookAction, Slot]]:
        """The graph for this pass, and where its hooks are in it."""
        variant, slots = self.owner.variant(self.state, self.hooks, self.records, None, self.state.passer)
        with all_are_tables():
            for hook, slot in slots.items():
                positions = positions_of(hook)
                where = True if positions is None else mask_of(positions, hook.point, self.rows, self.width)
                slot.gate[:, : self.width] = where
                write_table(slot, hook, self.width)
        return variant, slots

    def _unproved(self, variant: Variant) -> set[str]:
        """The conditions of this call, such as padding, under which the graph was not proved yet."""
        mask = self.inputs.get("attention_mask")
        conditions = {"padding"} if self.width < self.state.length else set()
        if mask is not None and "mask" not in variant.proved_on and not bool(mask.all()):
            conditions.add("mask")
        return conditions - variant.proved_on

    def _used(self, variant: Variant, slots: Mapping[HookAction, Any]) -> Any:
        try:
            with variant.program.attached():
                logits = self._logits(variant.call())
        except TorchDynamoException:  # before anything has run: it has to be compiled again
            return self._proved(variant, set())
        variant.runs += 1
        for hook, slot in slots.items():
            hook.fired = hook.fired or hook.reach is None or bool(slot.gate.any())
            if hook.tally is not None:
                where = slot.gate[:, : self.width].cpu()
                hook.tally.note(torch.empty(*where.shape, *slot.features.shape, device="meta"), where)
            if hook.reach is not None:
                hook.reach.note(hook.point)
                hook.why_not = None if hook.fired else hook.reach.why_not()
        with self._going_on():
            for record in self.records:
                buffer = variant.program.reads[self._specs[record]].buffer
                record.fired = True
                record.recorder.keep(record.point, buffer[:, : self.width].clone())
        if not all(run.is_one_pass for run in open_runs()):
            pass_state.forward_pass = None  # the pass has ended
        if self.state.stops:
            raise StopForward
        return CausalLMOutputWithPast(logits=logits)  # type: ignore[arg-type]

    def _logits(self, logits: Tensor | None) -> Tensor | None:
        return None if logits is None else logits[:, : self.width].clone()

    def _going_on(self) -> ExitStack:
        """A context in which no recorder ends the pass."""
        stack = ExitStack()
        for recorder in {id(record.recorder): record.recorder for record in self.records}.values():
            stack.enter_context(recorder.going_on())
        return stack

    def _proved(self, variant: Variant, new: set[str]) -> Any:
        """The output of an uncompiled pass, after comparing the graph's with it."""
        recorder, output = Recorder([record.point for record in self.records], stops=self.state.stops), None
        run = Run(self.owner.points.root, [Record(record.point, recorder) for record in self.records], is_one_pass=True)
        with self._going_on(), suppress(StopForward), run:
            output = self.state.module(**self.inputs)
        logits: Any = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) and not self.state.stops:
            variant.settle("the model returns no logits")
        else:
            expected: dict[Any, Tensor] = {} if self.state.stops else {"logits": logits}
            expected |= {name: values[-1] for name, values in recorder.by_point().items()}
            values_of = partial(self._values, variant)
            variant.settle(why_unproved(variant, self._of_text(expected), lambda way: self._of_text(values_of(way))))
        if variant.refusal is not None:
            self.owner.refused(variant.refusal)
        else:
            variant.proved_on |= new
        if self.state.stops:
            raise StopForward
        return output

    def _of_text(self, values: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """The values at tokens; at padding, which attends to no position, they may depend on the length."""
        mask = self.inputs.get("attention_mask")
        return values if mask is None else {name: tensor[mask.bool()] for name, tensor in values.items()}

    def _values(self, variant: Variant, way: Callable[[], Tensor | None]) -> dict[Any, Tensor]:
        with variant.program.attached():
            logits = self._logits(way())
        values = {} if logits is None else {"logits": logits}
        for record in self.records:
            buffer = variant.program.reads[self._specs[record]].buffer
            values[record.point.name] = buffer[:, : self.width].clone()
        return values

"""CompiledGeneration: one generation, from the prompt to the last token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from hookline.compiled import entry
from hookline.compiled.decoding import DecodeState
from hookline.compiled.forwarding import records_of
from hookline.compiled.gates import Continuation, in_pass
from hookline.compiled.plain import PlainTensors
from hookline.compiled.program import Program, Slot
from hookline.compiled.proof import why_unproved
from hookline.compiled.sampling import Sampling
from hookline.compiled.tables import NoTableError, write_table
from hookline.compiled.variants import Variant
from hookline.engine.actions import Action, Record
from hookline.engine.hook_actions import HookAction
from hookline.engine.recorder import Recorder
from hookline.engine.runs import Run
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compiled.executor import CompiledRuns

_AHEAD = 8
"""How many steps run before the host looks whether every text has ended."""


class CompiledGeneration:
    """A generation on the tensors of a `DecodeState`: the prompt with the engine's hooks, new tokens in a graph."""

    def __init__(
        self,
        owner: CompiledRuns,
        state: DecodeState,
        actions: Sequence[Action],
        ids: Tensor,
        mask: Tensor,
        sampling: Sampling,
        count: int,
        *,
        all_logits: bool = False,
        is_compiled: bool = True,
    ) -> None:
        self.owner, self.state, self.ids, self.mask = owner, state, ids, mask
        self.sampling, self.count, self._all_logits, self._is_compiled = sampling, count, all_logits, is_compiled
        self._plan(actions)
        self.made = 0
        self.start = ids.shape[1]
        self._new = set() if bool(mask.all()) else {"mask"}  # what it has that a graph may not be proved on
        self.text = Continuation(owner.points.root, ids, mask, self.start + count - 1)
        self.variant: Variant | None = None
        """None: it runs uncompiled."""
        self._slots: dict[HookAction, Slot] = {}

    def _plan(self, actions: Sequence[Action]) -> None:
        self._actions = list(actions)
        self.hooks = [each for each in actions if isinstance(each, HookAction) and not getattr(each, "is_idle", False)]
        self.records = records_of(actions)

    def run(self) -> Tensor:
        """All tokens, the prompt included."""
        try:
            self.begin()
            while self.made < self.count and not self._has_ended():
                self.advance(min(_AHEAD, self.count - self.made))
            return self.finish()
        finally:
            self.owner.give_back(self.state)

    def columns(self, seed: int | None) -> Iterator[Tensor]:
        """Each new column of tokens, `[row]`; random numbers are drawn from a seed, or from torch's own state."""
        random = None if seed is None else torch.Generator(self.ids.device).manual_seed(seed)
        self.state.sampler.random = random
        try:
            self.begin()
            yield self.newest()
            while self.made < self.count and not self._has_ended():
                self._keep_up()
                self.advance(1)
                self._note_step()
                yield self.newest()
            self.finish()
        finally:
            self.state.sampler.random = None
            self.owner.give_back(self.state)

    def newest(self) -> Tensor:
        """The last column of tokens."""
        return self.state.tokens[:, self.start + self.made - 1].clone()

    def _keep_up(self) -> None:
        """Follow hooks that were added or removed since the last step."""
        if not self._is_compiled:
            return
        found = entry.actions_of(self.owner.points)
        why = found if isinstance(found, str) else entry.placements(found)[1]
        if isinstance(found, str) or why is not None:
            self.owner.refused(str(why))
            self.variant, self._is_compiled = None, False
        elif found != self._actions:
            self._plan(found)
            with PlainTensors():
                self._choose_variant()

    def begin(self) -> None:
        """Run the prompt, and choose the first token."""
        with PlainTensors():
            self.state.begin(self.ids, self.mask, self.sampling)
            self.state.prefill(self.ids, self.mask, self.sampling, all_logits=self._all_logits)
            self.made = 1
            if self.count > 1:
                self._choose_variant()

    def _choose_variant(self) -> None:
        self._uncompiled = self.state.stepper(self.sampling)(Program([]))
        if not self._is_compiled:
            return
        points = [each.point for each in self.records]
        make = self.state.stepper(self.sampling)
        variant = self.owner.variant(self.state, self.hooks, points, self.sampling.structure, make)
        slots = None if isinstance(variant, str) else variant.assigned(self.hooks, [point.site for point in points])
        if isinstance(variant, str) or slots is None:
            self.owner.refused(variant if isinstance(variant, str) else "its hooks have no order in a graph")
            return
        for slot in variant.program.slots:
            slot.off()
        try:
            for hook, slot in slots.items():
                self.text.open_gate(slot, hook)
                if slot.kind == "function" or bool(slot.gate.any()):
                    write_table(slot, hook, 1)
        except (HooklineError, NoTableError) as error:
            self.owner.refused(f"an edit is not a table here: {error}")
            return
        self._slots, self.variant = slots, variant

    def advance(self, steps: int) -> None:
        """Run that many tokens."""
        with PlainTensors():
            if self.variant is not None and not (self.variant.is_proved and self._new <= self.variant.proved_on):
                steps -= self._prove()
            if self.variant is not None:
                with self.variant.program.attached():
                    steps -= self._compiled(self.variant, steps)
            for _ in range(steps):
                self._draw()
                self._uncompiled()
                self.made += 1

    def _compiled(self, variant: Variant, steps: int) -> int:
        """Run the graph, that many times if nothing has to be compiled anew and fails. Returns how often it ran."""
        for done in range(steps):
            self._draw()
            try:
                variant.call()
            except TorchDynamoException as error:  # before anything has run
                self._give_up(variant, f"it could not be compiled again ({type(error).__name__})")
                return done
            self.made += 1
        return steps

    def _give_up(self, variant: Variant, why: str) -> None:
        variant.refusal = why
        self.owner.refused(why)
        self._report(self.state.tokens[:, : self.start + self.made])
        self.variant = None

    def _draw(self) -> None:
        if self.sampling.temperature is not None:
            self.state.sampler.draw()

    def _prove(self) -> int:
        """Run one step both ways, and use the graph only if they agree. Returns the number of steps that were run."""
        state, variant = self.state, self.variant
        assert variant is not None
        column, before, kept = int(state.column), state.saved(), self._kept()
        self._draw()
        own = Recorder([each.point for each in self.records])
        with Run(self.owner.points.root, [Record(each.point, own) for each in self.records], is_one_pass=True):
            expected: dict[Any, Tensor] = {"logits": self._uncompiled().to(self.owner.dtype)}
        expected |= {name: values[-1] for name, values in own.by_point().items()}
        self._cut(kept)

        def again(way: Callable[[], Tensor]) -> dict[Any, Tensor]:
            state.restore(before)
            with variant.program.attached():
                found = {"logits": way().to(self.owner.dtype, copy=True)}
            for record in self.records:
                buffer = variant.program.reads[record.point.site].buffer
                found[record.point.name] = buffer[:, column : column + 1].clone()
            return found

        variant.settle(why_unproved(variant, expected, again))
        if variant.refusal is None:
            variant.proved_on |= self._new
        else:
            self.owner.refused(variant.refusal)
            self.variant = None
            state.restore(before)
            self._uncompiled()
        self.made += 1
        return 1

    def _kept(self) -> list[tuple[Recorder, int]]:
        return [(each.recorder, len(each.recorder.log)) for each in self.records]

    def _cut(self, kept: list[tuple[Recorder, int]]) -> None:
        """Drop what was recorded since: the step runs again."""
        for recorder, size in kept:
            del recorder.log[size:]

    def _has_ended(self) -> bool:
        return bool(self.sampling.stops) and bool(self.state.finished.all())

    def finish(self) -> Tensor:
        """The tokens so far; what was read and which hooks acted is reported to the run."""
        stop = self.start + self.made
        with PlainTensors():
            stop = self.state.ended(self.start, stop) if self.sampling.stops else stop
            tokens = self.state.tokens[:, :stop].clone()
            if self.variant is not None:
                self.variant.runs += 1
                self._report(tokens)
        return tokens

    def _note_step(self) -> None:
        """Note which hooks acted in the last step of a stream: their context may end before the stream does."""
        stop = self.start + self.made - 1
        for hook, slot in self._slots.items() if self.variant is not None else ():
            hook.fired = hook.fired or _acts(slot, self.state.tokens, stop - 1, stop)

    def _report(self, tokens: Tensor) -> None:
        assert self.variant is not None
        stop = tokens.shape[1] - 1  # the last token has not been run
        for hook, slot in self._slots.items():
            hook.fired = hook.fired or _acts(slot, tokens, self.start, stop)
            if hook.reach is not None:
                hook.why_not = None if hook.fired else hook.reach.why_not()
        if stop <= self.start:
            return
        whole = Continuation(self.owner.points.root, self.ids, self.mask, stop)
        with in_pass(whole.as_pass(tokens[:, :stop])):
            for hook in self._slots:
                if hook.reach is not None:
                    hook.reach.note(hook.point)
        with in_pass(whole.as_pass()):
            for record in self.records:
                buffer = self.variant.program.reads[record.point.site].buffer
                record.recorder.keep(record.point, buffer[:, self.start : stop].clone())


def _acts(slot: Slot, tokens: Tensor, start: int, stop: int) -> bool:
    """Whether an edit is on at one of these positions of the text."""
    is_on = slot.gate[:, start:stop]
    if int(slot.wanted) >= 0:
        is_on = is_on & (tokens[:, start:stop] == slot.wanted)
    return bool(is_on.any())

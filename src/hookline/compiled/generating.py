"""CompiledGeneration: one generation, from the prompt to the last token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from hookline.compiled.classify import condition_of
from hookline.compiled.decoding import DecodeState
from hookline.compiled.forwarding import read_specs, records_of
from hookline.compiled.gates import Continuation, in_pass
from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.plain import PlainTensors
from hookline.compiled.program import Program, Slot
from hookline.compiled.proof import why_unproved
from hookline.compiled.sampling import Sampling
from hookline.compiled.tables import all_are_tables, write_table
from hookline.compiled.variants import Variant
from hookline.engine import Action, HookAction, Record, Recorder, Run
from hookline.hooks.scores import Score
from hookline.text.acted import Columns
from hookline.text.score_positions import Crossed

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
        scores: Sequence[Score] = (),
        all_logits: bool = False,
        is_compiled: bool = True,
    ) -> None:
        self.owner, self.state, self.ids, self.mask = owner, state, ids, mask
        self.sampling, self.count, self._all_logits, self._is_compiled = sampling, count, all_logits, is_compiled
        self._scores = list(scores)
        self._scoring = Run(owner.points.root, scores, is_one_pass=True)
        self._plan(actions)
        self.made = 0
        self.start = ids.shape[1]
        self._new = set() if bool(mask.all()) else {"mask"}  # what it has that a graph may not be proved on
        self.text = Continuation(owner.points.root, ids, mask, self.start + count - 1)
        self.variant: Variant | None = None
        """None: it runs uncompiled."""
        self._slots: dict[HookAction, Slot] = {}
        self._since = self.start
        """The first column that the variant runs."""
        self._noted = self.start
        """The first column of which the hooks do not know yet that they acted there."""
        self._scored = self.start
        """The first column whose scores are not kept yet."""
        self._conditional: dict[Slot, tuple[Tensor, Crossed]] = {}
        """The gates of edits that begin when a score crosses a bound, if it had crossed before."""
        self._draws: list[Tensor] = []
        """The random states before the draws of the last steps in the graph."""
        self._code = owner.code
        self._on_modules = owner.code.on_modules()

    def _plan(self, actions: Sequence[Action]) -> None:
        self._actions = list(actions)
        self.hooks = [
            action for action in actions if isinstance(action, HookAction) and not getattr(action, "is_idle", False)
        ]
        self.records = [*records_of(actions), *self._scores]
        self._specs = read_specs(self.records)
        self._can_end = any(score.ended() is not None for score in self._scores)

    def run(self) -> Tensor:
        """All tokens, the prompt included."""
        try:
            self.begin()
            while self.made < self.count and not self._has_ended():
                self.advance(1 if self._conditional or self._can_end else _AHEAD)
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
            self._note_acted()  # a stream may be left at any token
            self.state.sampler.random = None
            self.owner.give_back(self.state)

    def newest(self) -> Tensor:
        """The last column of tokens."""
        return self.state.tokens[:, self.start + self.made - 1].clone()

    def _keep_up(self) -> None:
        """Choose the graph anew if hooks, modules or methods of the model have changed since the last step."""
        if not self._is_compiled:
            return
        on_modules = self._code.on_modules()
        is_same = self._code.is_current() and on_modules == self._on_modules
        try:
            actions = self.owner.actions_now(is_unchanged=is_same)
        except NotCompiled as error:
            self._is_compiled = False
            self._leave_graph(error.reason)
            return
        is_same_code = self._code is self.owner.code
        if not is_same:
            self._on_modules = self.owner.code.on_modules()
        if actions != self._actions or not is_same_code:
            self._leave_graph()
            self._plan(actions)
            self._code = self.owner.code
            if not is_same_code:
                self.state.variants = []  # of the methods that the model had before
            with PlainTensors():
                self._choose_variant()

    def begin(self) -> None:
        """Run the prompt, and choose the first token."""
        with PlainTensors():
            self.state.begin(self.ids, self.mask, self.sampling)
            with self._scoring:
                self.state.prefill(self.ids, self.mask, self.sampling, all_logits=self._all_logits)
            self.made = 1
            if self.count > 1:
                self._choose_variant()
            self._follow_scores()

    def _choose_variant(self) -> None:
        draws = self.sampling.temperature is not None
        self._uncompiled = self.state.stepper(self.sampling, draws=draws)(Program([]))
        if self._is_compiled:
            self.owner.unless_refused(self._enter_graph)

    def _enter_graph(self) -> None:
        make = self.state.stepper(self.sampling)
        variant, slots = self.owner.variant(self.state, self.hooks, self.records, self.sampling.structure, make)
        with all_are_tables():
            for hook, slot in slots.items():
                self.text.open_gate(slot, hook)
                if slot.kind == "function" or bool(slot.gate.any()):
                    write_table(slot, hook, 1)
        self._slots, self.variant = slots, variant
        self._since = self._noted = self._scored = self.start + self.made - 1
        self._conditional = {
            slot: (slot.gate.clone(), condition) for hook, slot in slots.items() if (condition := condition_of(hook))
        }
        for score in self._scores:
            read = variant.program.reads[self._specs[score]]
            read.weight.copy_(score.weight)
            read.bias.copy_(score.bias)
        for hook in slots:
            if hook.tally is not None:
                hook.tally.source = self._note_acted

    def advance(self, steps: int) -> None:
        """Run one token, or, in a graph that is proved, up to `steps` tokens."""
        variant, made, self._draws = self.variant, self.made, []
        with PlainTensors():
            if variant is None:
                with self._scoring:
                    self._uncompiled()
                self.made += 1
                self._follow_scores()
                return
            if variant.is_proved and self._new <= variant.proved_on:
                with variant.program.attached():
                    self._compiled(variant, min(steps, self.count - made))
            if self.made == made:
                self._prove(variant)
            self._follow_scores()

    def _compiled(self, variant: Variant, steps: int) -> None:
        """Run the graph up to `steps` times; stop before a call that would need compiling."""
        for _ in range(steps):
            random_state = self._draw()
            try:
                variant.call()
            except TorchDynamoException:  # before anything has run
                if random_state is not None:
                    self.state.sampler.return_to(random_state)
                return
            self.made += 1

    def _draw(self) -> Tensor | None:
        """Draw the random numbers of a step in the graph. Returns the random state before that."""
        if self.sampling.temperature is None:
            return None
        self._draws.append(self.state.sampler.random_state())
        self.state.sampler.draw()
        return self._draws[-1]

    def _prove(self, variant: Variant) -> None:
        """Run one step both ways, and use the graph only if they agree.

        The hooks act once, as in an uncompiled run, whatever becomes of the graph.
        """
        state, column = self.state, int(self.state.column)
        before, sizes = _copies(state.moving()), [len(record.recorder.log) for record in self.records]
        tallies = [hook.tally for hook in self._slots if hook.tally is not None]
        counts = [tally.counts() for tally in tallies]
        points = [record.point for record in self.records if not isinstance(record, Score)]
        step_recorder = Recorder(points)
        with (
            Run(self.owner.points.root, [Record(point, step_recorder) for point in points], is_one_pass=True),
            self._scoring,
        ):
            expected: dict[Any, Tensor] = {"logits": self._uncompiled().to(self.owner.dtype)}
        expected |= {name: values[-1] for name, values in step_recorder.by_point().items()}
        expected |= {self._name(score): score.pieces[-1] for score in self._scores}
        written = [*state.moving(), *state.cached(column)]
        after, logs = _copies(written), self._cut(sizes)

        def again(way: Callable[[], Tensor]) -> dict[Any, Tensor]:
            _restore(state.moving(), before)
            with variant.program.attached():
                values = {"logits": way().to(self.owner.dtype, copy=True)}
            for record in self.records:
                buffer = variant.program.reads[self._specs[record]].buffer
                values[self._name(record)] = buffer[:, column : column + 1].clone()
            return values

        variant.settle(why_unproved(variant, expected, again))
        if variant.refusal is None:
            variant.proved_on |= self._new
            for tally, count in zip(tallies, counts, strict=True):
                tally.restore(count)  # the graph's report has this step too
        else:
            _restore(written, after)
            self._leave_graph(variant.refusal)
            for recorder, log in logs:
                recorder.log += log
        self.made += 1

    def _name(self, record: Record) -> str:
        """What is read, by its point."""
        spec, name = self._specs[record], record.point.name
        return f"score {spec.number} at {name}" if spec.scores else name

    def _follow_scores(self) -> None:
        """Keep the scores of the newest columns, and do what depends on them, from the next column on."""
        stop = self.start + self.made - 1
        for score in self._scores if self.variant is not None and self._scored < stop else ():
            buffer = self.variant.program.reads[self._specs[score]].buffer  # type: ignore[union-attr]
            score.recorder.keep(score.point, buffer[:, self._scored : stop].clone())
        self._scored = stop
        for slot, (gate, condition) in self._conditional.items():
            slot.gate[:, stop] = gate[:, stop] & condition.rows(stop)
        for score in self._scores if self._can_end else ():
            if (ended := score.ended()) is not None:
                self.state.finished.logical_or_(ended[:, None])

    def _cut(self, sizes: Sequence[int]) -> list[tuple[Recorder, list[Any]]]:
        """Remove the newest records from the recorders and return them: the graph's buffers have the same values."""
        logs = []
        for record, size in zip(self.records, sizes, strict=True):
            logs.append((record.recorder, record.recorder.log[size:]))
            del record.recorder.log[size:]
        return logs

    def _leave_graph(self, why: str | None = None) -> None:
        """Report what the graph did so far; with a reason, the steps after it are uncompiled."""
        if self.variant is not None:
            self._follow_scores()
            self._report(self.state.tokens[:, : self.start + self.made])
        self.variant, self._conditional = None, {}
        if why is not None:
            self.owner.refused(why)

    def _has_ended(self) -> bool:
        return (bool(self.sampling.stops) or self._can_end) and bool(self.state.finished.all())

    def finish(self) -> Tensor:
        """The tokens so far; what was read and which hooks acted is reported to the run."""
        stop = self.start + self.made
        with PlainTensors():
            stop = self.state.ended(self.start, stop) if self.sampling.stops else stop
            if (unused := self.start + self.made - stop) and self._draws:
                self.state.sampler.return_to(self._draws[-unused])
            tokens = self.state.tokens[:, :stop].clone()
            if self.variant is not None:
                self.variant.runs += 1
                self._report(tokens)
        return tokens

    def _note_step(self) -> None:
        """Mark the hooks that acted in the newest step of a stream: their context may end before the stream does."""
        stop = self.start + self.made - 1
        for hook, slot in self._slots.items() if self.variant is not None else ():
            hook.fired = hook.fired or _acts(slot, self.state.tokens, stop - 1, stop)

    def _report(self, tokens: Tensor) -> None:
        assert self.variant is not None
        self._note_acted()
        stop = tokens.shape[1] - 1  # the last token has not been run
        for hook, slot in self._slots.items():
            if hook.tally is not None:
                hook.tally.source = None
            hook.fired = hook.fired or _acts(slot, tokens, self._since, stop)
            if hook.reach is not None:
                hook.why_not = None if hook.fired else hook.reach.why_not()
        if stop <= self._since:
            return
        whole = Continuation(self.owner.points.root, self.ids, self.mask, stop)
        with in_pass(whole.as_pass(tokens[:, :stop])):
            for hook in self._slots:
                if hook.reach is not None:
                    hook.reach.note(hook.point)
        with in_pass(whole.as_pass()):
            for record in self.records:
                if not isinstance(record, Score):
                    buffer = self.variant.program.reads[self._specs[record]].buffer
                    record.recorder.keep(record.point, buffer[:, self._since : stop].clone())

    def _note_acted(self) -> None:
        """Note where the edits in the graph have acted since this was last called."""
        tokens, span = self.state.tokens, range(self._noted, self.start + self.made - 1)
        if not span:
            return
        self._noted = span.stop
        mask = torch.nn.functional.pad(self.mask, (0, span.stop - self.start), value=1)
        is_stop = (tokens[:, self.start : span.stop, None] == self.state.sampler.stops).any(-1)
        has_ended = (is_stop.cumsum(1) - is_stop.long())[:, span.start - self.start :] > 0
        columns = Columns.of(range(span.start, span.stop), mask, has_ended)
        for hook, slot in self._slots.items():
            if hook.tally is not None:
                where = _is_on(slot, tokens, span.start, span.stop)
                hook.tally.add(columns, torch.Size([*where.shape, *slot.features.shape]), where)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _restore(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)


def _acts(slot: Slot, tokens: Tensor, start: int, stop: int) -> bool:
    """Whether an edit is on at one of these positions of the text."""
    return bool(_is_on(slot, tokens, start, stop).any())


def _is_on(slot: Slot, tokens: Tensor, start: int, stop: int) -> Tensor:
    """At which of these positions of the text an edit is on, `[row, position]`."""
    return slot.gate[:, start:stop] & slot.allowed[tokens[:, start:stop]]

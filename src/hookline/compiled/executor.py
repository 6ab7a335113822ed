"""CompiledRuns: the variants of one model, and the choice between them and an uncompiled run for every call."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from hookline.compiled import entry, tails
from hookline.compiled.classify import check_placed, no_site, placed, placement_text
from hookline.compiled.decoding import DecodeState, GrowingState, bucket, static_cache, vocab_of
from hookline.compiled.forwarding import INPUTS, CompiledForward, ForwardState, before_end, read_specs, records_of
from hookline.compiled.gates import in_pass
from hookline.compiled.generating import CompiledGeneration
from hookline.compiled.model_code import ModelCode
from hookline.compiled.not_compiled import NotCompiled, check_no
from hookline.compiled.options import CompileOptions, compile_options
from hookline.compiled.plain import PlainTensors
from hookline.compiled.program import Features, Program, Read, ReadSpec, Slot, SlotSpec
from hookline.compiled.repeats import Repeats
from hookline.compiled.sampling import sampling_of, way_to_choose
from hookline.compiled.tables import spec_of
from hookline.compiled.traced_functions import TracedFunctions
from hookline.compiled.variants import Variant
from hookline.engine import (
    Action,
    HookAction,
    HookPoint,
    Plan,
    PointAction,
    Record,
    Recorder,
    Run,
    Site,
    compiling,
    undo,
)
from hookline.errors import HooklineError, HooklineWarning, users_level
from hookline.hooks.scores import Score
from hookline.rerun.joined import JoinedRun
from hookline.transformer.architectures import rotary_change
from hookline.transformer.index import ModelPoints

T = TypeVar("T")
State: TypeAlias = DecodeState | ForwardState | tails.TailState
_LAYER = re.compile(r"\.\d+\.")


class CompiledRuns:
    """The compiled runs of a model; printing it shows what was compiled, and what runs uncompiled and why."""

    def __init__(self, points: ModelPoints, options: CompileOptions) -> None:
        self.points, self.options, self.is_open = points, options, True
        self.reasons: dict[str, int] = {}
        """Why runs were not compiled, with the number of runs."""
        self._features: dict[Site, Features] = {}
        self._idle: dict[tuple[Any, ...], list[Any]] = {}
        self._variants: list[tuple[State, Variant]] = []
        self._lock = undo.interrupt_safe(threading.RLock())
        self._past = 0
        self._traced = TracedFunctions(options.limit)
        self.repeats = Repeats(options.limit, options.seconds)
        self._computes_in = self._place()
        self.code = ModelCode(points.root)
        self._states: WeakSet[State] = WeakSet()

    def _place(self) -> tuple[Any, ...]:
        first = next(self.points.root.parameters())
        return first.device, first.dtype

    def _keep_up(self) -> None:
        """Start over if the model has moved to another device or dtype, or has other modules or methods."""
        if self._place() != self._computes_in or not self.code.is_of(self.points.root):
            with self._lock:
                self._past, self._computes_in, self.code = self.graphs, self._place(), ModelCode(self.points.root)
                self._variants, self._idle, self._features, self._states = [], {}, {}, WeakSet()
                self.repeats = Repeats(self.options.limit, self.options.seconds)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return next(self.points.root.parameters()).dtype

    @property
    def graphs(self) -> int:
        """How many graphs were compiled so far."""
        return self._past + sum(variant.backend.graphs for _, variant in self._variants)

    def annotated(self, plan: Plan, hooks: Sequence[Action], reads: Sequence[HookPoint]) -> Plan:
        """Add to a plan how each hook and read would run; if one is "eager", the whole run is not compiled."""
        how = [placement_text(action) for action in hooks]
        how += ["read" if (why := no_site(point)) is None else f"eager: {why}" for point in reads]
        return replace(
            plan, rows=tuple(replace(row, compiled=placement) for row, placement in zip(plan.rows, how, strict=True))
        )

    def close(self) -> None:
        """Drop all graphs and buffers, and run uncompiled from now on."""
        with self._lock:
            self.is_open, self._past = False, self.graphs
            self._variants, self._idle = [], {}

    def refused(self, why: str) -> None:
        """Count a run that cannot be compiled, by its reason; warn when a reason occurs for the first time."""
        if why not in self.reasons and not compiling.why_left_out():
            warnings.warn(f"this runs uncompiled: {why}", HooklineWarning, stacklevel=users_level())
        self.left(compiling.why_left_out() or why)

    def left(self, why: str) -> None:
        """Count a run that is not compiled, by its reason, without a warning."""
        self.reasons[why] = self.reasons.get(why, 0) + 1

    def unless_refused(self, prepare: Callable[[], T]) -> T | None:
        """What a function returns; None, after counting the run, if it raises NotCompiled."""
        try:
            return prepare()
        except NotCompiled as error:
            (self.refused if error.warns else self.left)(error.reason)
            return None

    def actions_now(self, *, is_unchanged: bool) -> list[Action]:
        """The actions for the next step of a generation; raises NotCompiled if that step cannot be compiled.

        `is_unchanged` says that the model's modules and methods are those of its last step.
        """
        if is_unchanged:
            check_no(compiling.why_not_here())
        else:
            self._keep_up()
            entry.check_call(self.points)
        actions = entry.actions_of(self.points)
        check_placed(actions)
        return actions

    def generation(
        self, ids: Tensor, options: Mapping[str, Any], scores: Sequence[Score] = ()
    ) -> CompiledGeneration | None:
        """A compiled generation; None, after a warning, if it cannot be compiled."""
        return self.unless_refused(partial(self._generation, ids, options, scores))

    def stream(
        self,
        ids: Tensor,
        options: Mapping[str, Any],
        seed: int | None,
        scores: Sequence[Score] = (),
        *,
        is_compiled: bool,
    ) -> Iterator[Tensor]:
        """Yield each new column of tokens as soon as it is computed."""
        generation = self.generation(ids, options, scores) if is_compiled else None
        return (generation or self._uncompiled(ids, options, scores)).columns(seed)

    def _uncompiled(self, ids: Tensor, options: Mapping[str, Any], scores: Sequence[Score]) -> CompiledGeneration:
        """A generation one token at a time, for streaming, which is not compiled."""
        keywords = dict(options)
        mask = keywords.pop("attention_mask", None)
        module: Any = self.points.root
        try:
            if module.config.is_encoder_decoder:
                raise NotCompiled("it is an encoder-decoder model")
            config, processors = entry.generation_settings(module, ids, keywords)
            sampling = sampling_of(config, processors)
        except NotCompiled as error:
            raise HooklineError(f"stream cannot do this: {error}. Use generate") from None
        count = config.max_new_tokens
        mask = entry.inferred_mask(module, ids, config) if mask is None else mask
        with PlainTensors():
            state = GrowingState(module, ids.shape[0], ids.shape[1] + count, vocab_of(module))
        return CompiledGeneration(self, state, [], ids, mask, sampling, count, scores=scores, is_compiled=False)

    def _generation(self, ids: Tensor, options: Mapping[str, Any], scores: Sequence[Score]) -> CompiledGeneration:
        keywords = dict(options)
        mask, logits_to_keep = keywords.pop("attention_mask", None), keywords.pop("logits_to_keep", 1)
        self._keep_up()
        entry.check_call(self.points)
        actions = entry.actions_of(self.points)
        check_placed([*actions, *scores])
        self._traced.check(actions)
        config, processors = entry.generation_settings(self.points.root, ids, keywords)
        sampling, count = sampling_of(config, processors), config.max_new_tokens
        mask = entry.inferred_mask(self.points.root, ids, config) if mask is None else mask
        change = rotary_change(entry.text_config(self.points))
        if change is not None and ids.shape[1] <= change < ids.shape[1] + count:
            raise NotCompiled(
                f"its rotary angles change at {change} tokens, where the model's own generate may start over"
            )
        state = self._state(ids.shape[0], bucket(ids.shape[1] + count))
        more: dict[str, Any] = {"scores": scores, "all_logits": logits_to_keep == 0}
        return CompiledGeneration(self, state, actions, ids, mask, sampling, count, **more)

    def taken(self, key: tuple[Any, ...]) -> Any:
        """Take an idle state from the pool, or None. Each thread has its own pool, as CUDA graphs require."""
        with self._lock:
            idle = self._idle.get((*key, threading.get_ident()))
            return idle.pop() if idle else None

    def _state(self, rows: int, length: int) -> DecodeState:
        """An idle or a new state for a generation; raises NotCompiled if the model's cache cannot have a fixed size."""
        if (idle_state := self.taken((rows, length))) is not None:
            return idle_state
        module: Any = self.points.root
        with PlainTensors():
            cache = static_cache(module.config, length)
            return self._registered(DecodeState(module, cache, rows, length, vocab_of(module)))

    def _registered(self, state: Any) -> Any:
        """Register a new state, which `give_back` then keeps for later runs of the same model."""
        self._states.add(state)
        return state

    def give_back(self, state: State) -> None:
        """Return a state to the pool at the end of a run."""
        with self._lock:
            if state not in self._states:
                return
            self._idle.setdefault((*state.key, threading.get_ident()), []).append(state)

    def forward(self, inputs: Mapping[str, Any]) -> CompiledForward | None:
        """A compiled forward pass; None, after a warning, if it cannot be compiled."""
        return self.unless_refused(partial(self._forward, inputs))

    def _forward(self, inputs: Mapping[str, Any]) -> CompiledForward:
        actions = self._for_pass(inputs)
        stops = any(record.recorder.stops for record in records_of(actions))
        rows, width = inputs["input_ids"].shape
        has_function = any(placed(action) == "traced" for action in actions)  # it would see the padding
        length = width if has_function or entry.is_for_one_length(self.points) else bucket(width, 16)
        key = (rows, length, tuple(inputs), stops)
        if stops:
            where = tuple(action.point.site for action in actions if isinstance(action, PointAction))
            check_no(self.repeats.why_not((key, where)), warns=False)
        with PlainTensors():
            state = self.taken(key) or self._registered(ForwardState(self.points.root, *key))
        return CompiledForward(self, state, actions, inputs)

    def joined(self, run: JoinedRun) -> Tensor | None:
        """The logits of a batch of variants in an experiment; None if it cannot be compiled or is not worth it."""
        return self.unless_refused(partial(self._joined, run))

    def _joined(self, run: JoinedRun) -> Tensor:
        self._keep_up()
        check_no(compiling.why_left_out())
        tails.check_batch(run)
        shape = tails.shape_of(run)
        check_no(self.repeats.why_not(shape), warns=False)
        state = self.taken(shape) or self._tail(run)
        try:
            with PlainTensors():
                return state.logits(run)
        finally:
            self.give_back(state)

    def _tail(self, run: JoinedRun) -> tails.TailState:
        self._check_features([run.points.find(name) for name in run.changes])
        if tails.room_for(run, self._features) > tails.MOST:
            raise NotCompiled("a batch of variants is too large for tensors of its own")
        with PlainTensors():
            return self._registered(tails.TailState(self, run, self._features))

    def _check_features(self, points: Sequence[HookPoint]) -> None:
        """Raise NotCompiled if the shapes and dtypes of some of these points are unknown."""
        self._learn([point.site for point in points])
        unknown = [point.name for point in points if point.site not in self._features]
        if unknown:
            raise NotCompiled(f"the value at {unknown[0]!r} is not a float tensor of batch, position and features")

    def _for_pass(self, inputs: Mapping[str, Any]) -> list[Action]:
        """The actions of a pass with these inputs; raises NotCompiled if it cannot be compiled."""
        self._keep_up()
        check_no(compiling.why_left_out())
        if torch.is_grad_enabled():
            raise NotCompiled("gradients are on: use torch.no_grad()")
        others = [name for name in inputs if name not in INPUTS]
        if others or "input_ids" not in inputs:
            raise NotCompiled(f"it is called with {', '.join(others) or 'no input_ids'}")
        shape = inputs["input_ids"].shape
        if any(tensor.shape != shape or tensor.is_floating_point() for tensor in inputs.values()):
            raise NotCompiled("its inputs do not all have one number per token")
        ids = None if "attention_mask" in inputs else inputs.get("position_ids")
        if ids is not None and not entry.are_one_text(ids):
            raise NotCompiled(
                "its position ids are not consecutive: pass attention_mask too, so that each row is one text"
            )
        entry.check_call(self.points)
        actions = before_end(self.points, entry.actions_of(self.points))
        check_placed(actions)
        self._traced.check(actions, shape[1])
        return actions

    def variant(
        self,
        state: DecodeState | ForwardState,
        hooks: Sequence[HookAction],
        records: Sequence[Record],
        structure: Any,
        make: Callable[[Program], Callable[[], Any]],
    ) -> tuple[Variant, dict[HookAction, Slot]]:
        """The smallest variant that has a place for every hook and read, or a new one, and those places.

        Raises NotCompiled if it is not used.
        """
        reads = [*read_specs(records).values()]
        candidates = [variant for variant in state.variants if variant.structure == structure]
        fitting = [variant for variant in candidates if variant.assigned(hooks, reads) is not None]
        if fitting:
            smallest = min(fitting, key=lambda variant: variant.size)
            self.used(state, smallest)
            return smallest, _places(smallest, hooks, reads)
        needs = [spec_of(hook) for hook in hooks]
        edited = (
            0
            if any(spec.code is not None for spec in needs) or not needs
            else sum(variant.is_data for variant in candidates)
        )
        specs = self._structure(needs, hooks, edited)
        self._learn([*(spec.site for spec in specs), *(spec.site for spec in reads)])
        self._check_features([action.point for action in (*hooks, *records)])
        specs = [spec for spec in specs if spec.site in self._features]
        slots = [Slot(spec, self._features[spec.site], state.clock) for spec in specs]
        program = Program(slots, [Read(spec, self._features[spec.site], state.clock) for spec in dict.fromkeys(reads)])
        new = Variant(program, make, self.options, state.clock.device, structure)
        state.variants.append(new)
        self.used(state, new)
        return new, _places(new, hooks, reads)

    def used(self, state: State, variant: Variant) -> None:
        """Mark a variant as the most recently used, and drop the least recently used ones beyond the limit."""
        with self._lock:
            others = [pair for pair in self._variants if pair[1] is not variant]
            self._variants = [*others, (state, variant)]
            alike = [pair for pair in self._variants if pair[0].is_one_of_many == state.is_one_of_many]
            for old_state, old in alike[: -self.options.limit]:
                self._variants = [pair for pair in self._variants if pair[1] is not old]
                old_state.variants.remove(old)
                self._past += old.backend.graphs
            self._idle = {key: [idle for idle in states if idle.variants] for key, states in self._idle.items()}

    def _structure(self, specs: list[SlotSpec], hooks: Sequence[HookAction], earlier_count: int) -> list[SlotSpec]:
        """The slots of a new variant.

        The first variant has what is asked for, the second also the points of the same kinds in all layers, and any
        later one all points: so changing the points again and again compiles three times.
        """
        more: list[HookPoint] = [] if self.options.points is None else self.points.select(self.options.points)
        if earlier_count:
            kinds = {_LAYER.sub(".*.", point.canonical_name) for point in (*more, *(hook.point for hook in hooks))}
            more = [
                point for point in self._all() if earlier_count > 1 or _LAYER.sub(".*.", point.canonical_name) in kinds
            ]
        sites = dict.fromkeys(point.site for point in more if no_site(point) is None)
        spread = max((spec.spread for spec in specs), default=0) if earlier_count == 1 else 0
        requested = [replace(spec, kind="any") if spec.site in sites and spec.code is None else spec for spec in specs]
        return [
            *requested,
            *(SlotSpec(site, "any", spread) for site in sites if site not in {spec.site for spec in requested}),
        ]

    def _all(self) -> list[HookPoint]:
        return [point for point in self.points.hook_dict.values() if no_site(point) is None and point.axes]

    def _learn(self, sites: Sequence[Site]) -> None:
        """Find the shapes and dtypes at these sites by running one token."""
        unknown = [site for site in sites if site not in self._features]
        if not unknown:
            return
        points = {
            f"p{index}": HookPoint.at_site(f"p{index}", site, self.points.permanent)
            for index, site in enumerate(unknown)
        }
        recorder = Recorder(list(points.values()), skips_missing=True)
        module: Any = self.points.root

        def look() -> None:
            with (
                Run(module, [Record(point, recorder) for point in points.values()], is_one_pass=True),
                undo.GradMode(False),
            ):
                module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=module.device), use_cache=False)

        with in_pass(None):
            Context().run(look)  # without the hooks of this thread
        for name, values in recorder.by_point().items():
            if values[0].ndim > 2 and values[0].shape[:2] == (1, 1) and values[0].is_floating_point():
                self._features[points[name].site] = Features(tuple(values[0].shape[2:]), values[0].dtype)

    def __repr__(self) -> str:
        lines = [f"compiled runs of {type(self.points.root).__name__}: {_number(self.graphs, 'graph')}"]
        for state, variant in self._variants:
            numbers = (
                (len(variant.program.slots), "edit"),
                (len(variant.program.reads), "read"),
                (variant.backend.graphs, "graph"),
            )
            what = ", ".join(_number(*number) for number in (*numbers, (variant.runs, "run")))
            status = (
                "not used: " + variant.refusal if variant.refusal else "proved" if variant.is_proved else "not run yet"
            )
            kind = state.kind or way_to_choose(variant.structure)
            lines.append(f"  {' '.join([f'{state.rows} × {state.length}', kind]).rstrip()}: {what}, {status}")
        if self._past and self.is_open:
            lines.append(f"  {_number(self._past, 'graph')} dropped; compile(limit=…) sets how many are kept")
        lines += [f"  uncompiled, {_number(count, 'run')}: {why}" for why, count in self.reasons.items()]
        return "\n".join(lines)


def _places(variant: Variant, hooks: Sequence[HookAction], reads: Sequence[ReadSpec]) -> dict[HookAction, Slot]:
    """A slot for each hook, all others off."""
    check_no(variant.refusal)
    slots = variant.assigned(hooks, reads)
    if slots is None:
        raise NotCompiled("its hooks have no order in a graph")
    for slot in variant.program.slots:
        slot.off()
    return slots


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def compiled_runs(points: ModelPoints, options: Mapping[str, Any]) -> CompiledRuns:
    """The compiled runs of a model, with the options of `model.compile`."""
    checked = compile_options(options)
    chosen = [] if checked.points is None else points.select(checked.points)
    reasons = [no_site(point) for point in chosen]
    if reasons and None not in reasons:
        raise HooklineError(f"points={checked.points!r}: {chosen[0].name!r} cannot be edited in a graph: {reasons[0]}")
    return CompiledRuns(points, checked)


def uncompiled_runs(points: ModelPoints) -> CompiledRuns:
    """Runs that generate step by step without compiling anything, which also works where torch cannot compile."""
    return CompiledRuns(points, CompileOptions())

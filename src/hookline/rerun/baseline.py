"""Baselines: a run of a model on one text, and variants of it that recompute only what changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.engine import Run, compiling, open_runs, sharding, undo
from hookline.errors import HooklineError
from hookline.functions.signatures import parameters_of
from hookline.rerun.batching import Budget, budget_for, make_batches
from hookline.rerun.changes import (
    BEFORE_LAYERS,
    Change,
    Entries,
    Entry,
    RowChange,
    Variant,
    first_changed,
    index_of,
    write_all,
)
from hookline.rerun.image_inputs import ImageInputs, in_one_row
from hookline.rerun.joined import JoinedRun, change_action
from hookline.rerun.prefix import empty_past, kept_pairs, prefix_cache
from hookline.rerun.strategy import Strategy, fastest_strategy, is_close, stream_names
from hookline.transformer.architectures import depends_on_length
from hookline.transformer.memory.halving import BatchFitter
from hookline.transformer.outputs import outcome
from hookline.values.rows import drawn_once

if TYPE_CHECKING:
    from hookline.engine import HookPoint
    from hookline.transformer.wrapped import WrappedTransformer
    from hookline.types import HookList


_strategies: WeakKeyDictionary[nn.Module, dict[frozenset[str], Strategy]] = WeakKeyDictionary()
"""The strategy found for each model, by the names of its inputs besides tokens."""


class Baseline:
    """A run of a model on one text, and a way to run variants of it.

        base = model.baseline("When Mary and John went to the store, John gave a drink to")
        base.logits                                # [pos, d_vocab]
        z = base.change("blocks.3.attn.hook_z", torch.zeros(16), pos=-1, head=4)
        for numbers, logits in base.rerun([[z]]):
            logits.shape                           # [1, pos, d_vocab]: one row per variant

    A variant starts at the first layer where it differs and, in a causal model, at the first position where it differs,
    with the known keys and values before it. Variants run as a batch. Where this is not possible (permanent hooks, or
    layers that pass on more than the residual stream), variants are full runs; `strategy` says which. `inputs` are
    keyword inputs besides the tokens, such as images.
    """

    def __init__(
        self,
        model: WrappedTransformer,
        tokens: Tensor,
        *,
        inputs: Mapping[str, Any] | None = None,
        fwd_hooks: HookList = (),
        keep: Sequence[str] = (),
        strategy: Strategy | None = None,
    ) -> None:
        if tokens.ndim != 2 or tokens.shape[0] != 1:
            raise HooklineError(f"a baseline needs one text: tokens of shape [1, pos], got {list(tokens.shape)}")
        if model.anatomy.is_encoder_decoder:
            raise HooklineError(
                "baselines, and experiments that use them, need a model with one stack of layers, not an "
                "encoder-decoder model: use run_with_hooks"
            )
        self.model, self.tokens = model, tokens
        self._points = model.index
        self.images = ImageInputs(self._points.root, inputs or {})
        self._hooks = list(fwd_hooks)
        self._entries = Entries(self._points)
        self._n_layers = len(self._points.anatomy.blocks)
        self.is_causal = self._points.anatomy.main.name != "encoder"
        self.strategy = strategy if strategy is not None else self._find_strategy()
        self._state = self._current_state()
        self._is_checked = False
        self._run(keep)

    @property
    def budget(self) -> Budget:
        """How many tokens run through the model at once."""
        budget, together = budget_for(self._points.anatomy.blocks[0].module), sharding.processes.get(self._points.root)
        return budget if together is None else replace(budget, tokens=together.least(budget.tokens))

    def _find_strategy(self) -> Strategy:
        """The fastest strategy that works, found once per model by running some variants with each."""
        if open_runs() or self._points.permanent.steps or not self._hooks_come_first():
            return Strategy.FULL
        strategies = _strategies.setdefault(self.model.module, {})
        inputs = self.images.inputs
        tokens = self.tokens if inputs else self.model.example_tokens()[:1]
        key = frozenset(inputs)
        if key not in strategies:
            with compiling.left_out("it tries how variants of a run can be computed"):
                strategies[key] = fastest_strategy(self.model, Baseline, tokens, inputs)
        return strategies[key]

    def _hooks_come_first(self) -> bool:
        """Whether the baseline's own hooks act before the first layer, so that its streams include them."""
        points = [action.point for action in self.model._hook_actions(self._hooks, ())]
        main = self._points.anatomy.main
        before = {id(module) for module in (main.embed, main.embed_norm, main.pos_embed)}
        names = ("hook_embed", "hook_pos_embed", "hook_tokens")
        return all(point.canonical_name in names and id(point.site.module) in before for point in points)

    @undo.GradMode(False)
    def _run(self, keep: Sequence[str]) -> None:
        names = stream_names(self._points) if self.strategy != Strategy.FULL else []
        past = empty_past(self._points.root) if self.strategy == Strategy.FROM_POSITION else None
        inputs = {"input_ids": self.tokens, **self.images.inputs}
        if past is not None:
            inputs |= {"past_key_values": past, "use_cache": True}
        cache: Mapping[str, Tensor] = {}
        with self.images.noted(), compiling.left_out("it is a baseline"):
            if names_to_cache := list(dict.fromkeys([*names, *keep])):
                logits, cache = self.model.run_with_cache(**inputs, names_filter=names_to_cache, fwd_hooks=self._hooks)
            else:
                logits = self.model.run_with_hooks(**inputs, fwd_hooks=self._hooks)
        self.logits: Float[Tensor, "pos vocab"] = logits[0]
        self.streams: list[Float[Tensor, "pos d_model"]] = [cache[name][0] for name in names]
        self.kept: dict[str, Tensor] = {name: in_one_row(cache[name], self._points.find(name))[0] for name in keep}
        self._check_positions()
        self._pairs = kept_pairs(past)

    def _current_state(self) -> tuple[object, ...]:
        """What must stay the same between the baseline and its variants: active hooks and weights."""
        # Accelerate replaces parameters on the meta device.
        loaded = (parameter for parameter in self.model.module.parameters() if not parameter.is_meta)
        weights = [(id(parameter), None if parameter.is_inference() else parameter._version) for parameter in loaded]
        return open_runs(), tuple(self._points.permanent.actions), tuple(weights)

    def _check_unchanged(self) -> None:
        before, now = self._state, self._current_state()
        if before != now:
            what = "its weights changed" if before[2] != now[2] else "hooks were added or removed"
            raise HooklineError(
                f"the model changed since this baseline was created ({what}): create a new one, model.baseline(…)"
            )

    def _check_positions(self) -> None:
        """Positions in the text must be positions at each point, too."""
        for name, value in self.kept.items():
            if self._points.find(name).stream == "image":
                continue
            axes = zip(self._points.find(name).axes.split()[1:], value.shape, strict=False)
            size = next((size for letter, size in axes if letter in "pk" and size != self.tokens.shape[1]), None)
            if size is not None:
                raise HooklineError(
                    f"{name!r} has {size} positions, the text has {self.tokens.shape[1]}: this model inserts extra "
                    f"positions, so indices would be ambiguous"
                )

    def change(
        self,
        point: str | HookPoint,
        value: Tensor,
        *,
        pos: int | None = None,
        first: int | None = None,
        **at: int | None,
    ) -> Change:
        """A new value at a point of this run: at a position (`pos`), a `head`, a `neuron`, or everywhere.

        Positions before `first` stay as they were; by default it is found, if the baseline keeps the point.
        """
        point = self._points.find(point) if isinstance(point, str) else point
        if not isinstance(value, Tensor):
            raise HooklineError(f"the value for {point.name!r} must be a tensor, got {value!r}")
        is_image, length = point.stream == "image", self.tokens.shape[1]
        if pos is not None and not is_image:
            pos = _position(pos, length)
        where = index_of(point, pos=pos, **at)
        before = self.kept[point.name][where] if point.name in self.kept else None
        if is_image:  # images come before the text, so every position may change
            return Change(point, where, value, 0, before)
        if first is None:
            first = pos if pos is not None else first_changed(point, where, value, before)
        change = Change(point, where, value, first, before)
        for letter, size in zip(change.free_axes, value.shape, strict=False):
            if letter in ("p", "k") and size != length:
                raise HooklineError(
                    f"the value for {point.name!r} has shape {list(value.shape)}, with {size} positions, but the text "
                    f"has {length} tokens: pass a value with {length} positions, or select one, pos=…"
                )
        return change

    def rerun(
        self,
        variants: Sequence[Variant],
        *,
        positions: Sequence[int] | None = None,
        most_rows: int | None = None,
        fit: BatchFitter | None = None,
    ) -> Iterator[tuple[tuple[int, ...], Float[Tensor, "variant pos vocab"]]]:
        """Run variants, and yield the indices of a batch of them with their logits at `positions`, batch by batch.

        The batches, and their order, are chosen so that little is computed twice. If memory runs out, batches get
        smaller; `fit` remembers the size, also for other baselines.
        """
        length = self.tokens.shape[1]
        if positions is not None and (isinstance(positions, int) or not len(positions)):
            raise HooklineError(f"positions must be a non-empty list, such as [-1], got {positions!r}")
        requested = [_position(position, length) for position in (range(length) if positions is None else positions)]
        where = sorted(set(requested))
        if most_rows is not None and most_rows < 1:
            raise HooklineError(f"most_rows is how many variants run at once, at least 1, got {most_rows!r}")
        changes = _checked_changes(variants)
        self._check_unchanged()
        fit = fit if fit is not None else BatchFitter("variants of a run")
        entries = {number: self._entries.of(variant) for number, variant in enumerate(variants) if variant}
        starts_early = any(entry.layer == BEFORE_LAYERS for entry in entries.values())
        strategy = Strategy.FULL if starts_early else self.strategy
        if any(change.point.stream == "image" for change in changes):
            most_rows = 1  # images of several texts may be one row
        can_be_cut = (
            self.is_causal
            and strategy != Strategy.FULL
            and not depends_on_length(self._points.anatomy.config)
            and (not self.images or strategy == Strategy.FROM_POSITION)  # each image needs all of its tokens
            and not any(_goes_by_length(change) for change in changes)
        )
        stop = where[-1] + 1 if can_be_cut else length
        # A pass that resumes at a position leaves earlier positions unchanged, also where it cannot be cut.
        reach = where[-1] + 1 if strategy == Strategy.FROM_POSITION else stop
        same = [number for number in range(len(variants)) if number not in entries or entries[number].position >= reach]
        if same:
            yield tuple(same), self.logits[requested].expand(len(same), -1, -1)
        order = None if requested == where else [where.index(position) for position in requested]
        entries = {number: entry for number, entry in entries.items() if entry.position < reach}
        if entries and strategy == Strategy.FULL:
            self._check_hooks(min(2, most_rows or 2))
        for part in make_batches(
            entries, self._n_layers, stop, self.budget, most_rows, from_any=strategy == Strategy.FROM_POSITION
        ):
            span = range(part.start, stop)

            def run(numbers: Sequence[int], span: range = span) -> Tensor:
                batch = [variants[number] for number in numbers]
                if strategy == Strategy.FULL:
                    return self._plain(batch, where)
                return self._joined(batch, [entries[number] for number in numbers], span, where)

            for numbers, logits in fit.parts(part.numbers, run, weight=len(span)):
                yield tuple(numbers), logits if order is None else logits[:, order]

    @undo.GradMode(False)
    def _plain(self, variants: Sequence[Variant], where: list[int]) -> Tensor:
        """Full runs, one row per variant."""
        if self.model._graphs is not None:
            self.model._graphs.refused("variants of a run are full runs of this model, or with these hooks")
        placed: dict[str, list[RowChange]] = {}
        for row, variant in enumerate(variants):
            for change in variant:
                placed.setdefault(change.point.canonical_name, []).append((row, change))
        text = range(self.tokens.shape[1])
        hook_actions = self.model._hook_actions(self._hooks, ())
        writes = [change_action(self._points.find(name), changes, text) for name, changes in placed.items()]
        inputs = {"input_ids": self.tokens.expand(len(variants), -1), **self.images.repeated(len(variants))}
        run = Run(self._points.root, [*hook_actions, *writes], is_one_pass=True)
        with run, drawn_once(len(variants)):
            return outcome(run.call(inputs))[:, where]

    def _check_hooks(self, count: int) -> None:
        """Variants are rows of batches: hooks must do the same to every row, in every run."""
        has_hooks = bool(open_runs() or self._points.permanent.steps or self._hooks)
        if self._is_checked or not has_hooks or self.model.module.training or not bool(self.logits.isfinite().all()):
            return
        rows = self._plain([()] * count, list(range(self.tokens.shape[1])))
        if not is_close(rows, self.logits.expand_as(rows)):
            raise HooklineError(
                "an active hook changes the same text differently from run to run, or from row to row of a batch, so "
                "the effect of a variant cannot be measured. Use noise(std, seed=…) for random numbers, or remove the "
                "hook during the experiment"
            )
        self._is_checked = True

    @undo.GradMode(False)
    def _joined(self, variants: Sequence[Variant], entries: Sequence[Entry], span: range, where: list[int]) -> Tensor:
        """Each variant from its first layer; all of them from the first position of the batch."""
        rows: dict[int, list[int]] = {}
        for row, entry in enumerate(entries):  # in the order of their layers
            rows.setdefault(entry.layer, []).append(row)
        joins: dict[int, Tensor] = {}
        placed: dict[str, list[RowChange]] = {}
        for layer, members in rows.items():
            stream = self.streams[layer][span.start : span.stop]
            joins[layer] = stream.expand(len(members), -1, -1).clone()
            self._sort(layer, [variants[row] for row in members], members[0], joins[layer], span, placed)
        inputs = self._inputs(span, where)
        read = [position - span.start for position in where if position in span]
        joined = JoinedRun(self._points, joins, placed, span, inputs, read, self.images.skipped())
        logits = None if self.model._graphs is None else self.model._graphs.joined(joined)
        logits = outcome(joined.output()) if logits is None else logits
        if "logits_to_keep" not in inputs:
            logits = logits[:, read]
        before = [position for position in where if position < span.start]
        return torch.cat([self.logits[before].expand(len(variants), -1, -1), logits], 1) if before else logits

    def _sort(
        self,
        layer: int,
        members: Sequence[Variant],
        first_row: int,
        stream: Tensor,
        span: range,
        placed: dict[str, list[RowChange]],
    ) -> None:
        """Apply changes of the incoming stream; collect the others in `placed`, by point."""
        values: list[RowChange] = []
        sums: list[RowChange] = []
        for number, variant in enumerate(members):
            for change in variant:
                start, kind = self._entries.place(change)
                if start == layer and kind:
                    (values if kind == "stream" else sums).append((number, change))
                else:
                    placed.setdefault(change.point.canonical_name, []).append((first_row + number, change))
        write_all(stream, sums, span, as_difference=True)
        write_all(stream, values, span)

    def _inputs(self, span: range, where: list[int]) -> dict[str, Any]:
        """The inputs of the model for these positions."""
        parameter_names = parameters_of(self._points.root)[0]
        inputs: dict[str, Any] = {"input_ids": self.tokens[:, span.start : span.stop]}
        positions = self.images.positions
        if self.images and self.strategy == Strategy.FROM_LAYER:
            inputs |= self.images.inputs
        elif positions is not None and "position_ids" in parameter_names:
            inputs["position_ids"] = positions[..., span.start : span.stop]
        if "use_cache" in parameter_names:
            inputs["use_cache"] = bool(span.start)
        if span.start:
            assert self._pairs is not None
            inputs["past_key_values"] = prefix_cache(self._pairs, span.start)
            if "position_ids" in parameter_names and positions is None:
                inputs["position_ids"] = torch.arange(span.start, span.stop, device=self.tokens.device)[None]
        if "logits_to_keep" in parameter_names:
            read = [position - span.start for position in where if position in span]
            inputs["logits_to_keep"] = torch.tensor(read, device=self.tokens.device)
        return inputs


def _position(position: int, length: int) -> int:
    """A position in a text of that length, counted from the start."""
    if position not in range(-length, length):
        raise HooklineError(f"position {position} is out of range: the text has {length} tokens")
    return position % length


def _checked_changes(variants: Sequence[Variant]) -> list[Change]:
    for variant in variants:
        if not isinstance(variant, Sequence) or not all(isinstance(change, Change) for change in variant):
            raise HooklineError(f"a variant is a list of changes, [base.change(…), …], got {variant!r}")
    return [change for variant in variants for change in variant]


def _goes_by_length(change: Change) -> bool:
    """Whether a change needs all keys: scores may depend on their number, a pattern may attend to any of them."""
    return change.point.canonical_name.endswith(("hook_attn_scores", "hook_pattern"))

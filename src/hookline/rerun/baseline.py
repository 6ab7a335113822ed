"""Baselines: a run of a model on one text, of which variants are run without doing again what stays the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.engine.actions import Action
from hookline.engine.batch_index import drawn_once
from hookline.engine.halving import Fit
from hookline.engine.points import hook_action
from hookline.engine.runs import Run
from hookline.engine.signatures import parameters_of
from hookline.engine.snapshots import sharing
from hookline.engine.taps import active
from hookline.errors import HooklineError
from hookline.rerun.batching import Room, parts, room_for
from hookline.rerun.changes import BEFORE_LAYERS, Change, Entries, Entry, Placed, Variant, index_of, put_all
from hookline.rerun.image_inputs import ImageInputs, in_one_row
from hookline.rerun.joined import Put, PutPatches, joined_pass
from hookline.rerun.strategy import Way, is_alike, proved_way, stream_names
from hookline.transformer.architectures import depends_on_length
from hookline.transformer.contexts import GradMode
from hookline.transformer.verify.probe import outcome

if TYPE_CHECKING:
    from hookline.engine.hooked import HookList
    from hookline.transformer.wrapped import WrappedTransformer


_ways: WeakKeyDictionary[nn.Module, dict[frozenset[str], Way]] = WeakKeyDictionary()
"""What was found out about each model, by what goes into it beside tokens."""


class Baseline:
    """A run of a model on one text, of which variants can be run.

        base = model.baseline("When Mary and John went to the store, John gave a drink to")
        base.logits                                # [pos, d_vocab]
        z = base.change("blocks.3.attn.hook_z", torch.zeros(16), pos=-1, head=4)
        for numbers, logits in base.rerun([[z]]):
            logits.shape                           # [1, pos, d_vocab]: of each variant

    A variant starts at the layer where it differs and, in a causal model, at the position where it differs: keys and
    values before it are known. Variants go through the model together. Where that does not hold (hooks that stand, a
    model whose layers hand on more than the stream) they run from the beginning; `way` says which it is. `inputs` are
    keyword inputs beside the tokens: pictures, that is.
    """

    def __init__(
        self,
        model: WrappedTransformer,
        tokens: Tensor,
        *,
        inputs: Mapping[str, Any] | None = None,
        fwd_hooks: HookList = (),
        keep: Sequence[str] = (),
        way: Way | None = None,
    ) -> None:
        if tokens.ndim != 2 or tokens.shape[0] != 1:
            raise HooklineError(f"a baseline is of one text: tokens of shape [1, pos], not {list(tokens.shape)}")
        if model._points.anatomy.is_encoder_decoder:
            raise HooklineError(
                "baselines, and experiments made of them, are for models with one stack of layers, not for an encoder "
                "and a decoder: use run_with_hooks"
            )
        self.model, self.tokens = model, tokens
        self._points = model._points
        self.image_inputs = ImageInputs(self._points.root, inputs) if inputs else None
        self._hooks = list(fwd_hooks)
        self._entries = Entries(self._points)
        self._n_layers = len(self._points.anatomy.blocks)
        self.is_causal = self._points.anatomy.main.name != "encoder"
        self.way = way if way is not None else self._found_way()
        self._state = self._current_state()
        self._is_checked = False
        self._run(keep)

    @property
    def room(self) -> Room:
        """How much goes through the model at once."""
        return room_for(self._points.anatomy.blocks[0].module)

    def _found_way(self) -> Way:
        """How variants can be run. Found out, once for a model, by running some in every way."""
        if active.get() or self._points.standing.steps or not self._hooks_come_first():
            return Way.PLAIN
        found = _ways.setdefault(self.model.module, {})
        if self.image_inputs is None:
            key, tokens, inputs = frozenset[str](), self.model.example_tokens()[:1], None
        else:
            key, tokens, inputs = frozenset(self.image_inputs.inputs), self.tokens, self.image_inputs.inputs
        if key not in found:
            found[key] = proved_way(self.model, Baseline, tokens, inputs)
        return found[key]

    def _hooks_come_first(self) -> bool:
        """Whether the baseline's own hooks are before the first layer, so that what it kept has them in it."""
        points = [action.point for action in self.model._hook_actions(self._hooks, ())]
        return all(point.listed in ("hook_embed", "hook_pos_embed", "hook_tokens") for point in points)

    @GradMode(False)
    def _run(self, keep: Sequence[str]) -> None:
        names = stream_names(self._points) if self.way != Way.PLAIN else []
        past = _empty_past(self._points.root) if self.way == Way.RESUMED else None
        inputs = {"past_key_values": past, "use_cache": True} if past is not None else {}
        wanted = list(dict.fromkeys([*names, *keep]))
        cache: Mapping[str, Tensor] = {}
        given = (
            {"input": self.tokens}
            if self.image_inputs is None
            else {"input_ids": self.tokens, **self.image_inputs.inputs}
        )
        with self.image_inputs.noted() if self.image_inputs is not None else nullcontext():
            if wanted:
                run = {"names_filter": wanted, "fwd_hooks": self._hooks, **inputs}
                logits, cache = self.model.run_with_cache(**given, **run)
            else:
                logits = self.model.run_with_hooks(**given, fwd_hooks=self._hooks)
        self.logits: Float[Tensor, "pos vocab"] = logits[0]
        self.streams: list[Float[Tensor, "pos d_model"]] = [cache[name][0] for name in names]
        self.kept: dict[str, Tensor] = {name: in_one_row(cache[name], self._points.find(name))[0] for name in keep}
        self._check_positions()
        self._pairs = _pairs(past)

    def _current_state(self) -> tuple[object, ...]:
        """What must not have changed when a variant is run: hooks that act, and the weights."""
        weights = [
            (id(each), None if each.is_inference() else each._version) for each in self.model.module.parameters()
        ]
        return active.get(), tuple(self._points.standing.actions), tuple(weights)

    def _check_unchanged(self) -> None:
        before, now = self._state, self._current_state()
        if before != now:
            what = "its weights have changed" if before[2] != now[2] else "hooks have been added or removed"
            raise HooklineError(f"since this baseline was made, {what} in the model: make another, model.baseline(…)")

    def _check_positions(self) -> None:
        """Places are found by their position in the text: that must be their position at a point too."""
        for name, value in self.kept.items():
            if self._points.find(name).stream == "image":
                continue
            axes = zip(self._points.find(name).axes.split()[1:], value.shape, strict=False)
            size = next((size for letter, size in axes if letter in "pk" and size != self.tokens.shape[1]), None)
            if size is not None:
                raise HooklineError(
                    f"{name!r} has {size} positions where the text has {self.tokens.shape[1]}: this model adds some, "
                    f"so they cannot be told by number"
                )

    def change(self, name: str, value: Tensor, *, pos: int | None = None, **at: int | None) -> Change:
        """Another value at a point of this run, at a position (`pos`), a `head`, a `neuron`, or everywhere."""
        point = self._points.find(name)
        if not isinstance(value, Tensor):
            raise HooklineError(f"the value to put in at {name!r} is a tensor, not {value!r}")
        if point.stream == "image":
            return Change(point, index_of(point, pos=pos, **at), value)
        length = self.tokens.shape[1]
        if pos is not None and pos not in range(-length, length):
            raise HooklineError(f"position {pos}, but the text has {length} tokens")
        pos = pos % length if pos is not None else None
        change = Change(point, index_of(point, pos=pos, **at), value, first=pos or 0)
        self._check_length(change)
        return change

    def _check_length(self, change: Change) -> None:
        """A value for all positions must be one for the positions of this text."""
        letters = [letter for letter, at in zip(change.axes, change.where, strict=True) if isinstance(at, slice)]
        length = self.tokens.shape[1]
        for letter, size in zip(letters, change.value.shape, strict=False):
            if letter in ("p", "k") and size != length:
                raise HooklineError(
                    f"the value for {change.point.name!r} has the shape {list(change.value.shape)}, with {size} "
                    f"positions, but the text has {length} tokens: give one with {length}, or one position, pos=…"
                )

    def rerun(
        self,
        variants: Sequence[Variant],
        *,
        positions: Sequence[int] | None = None,
        most_rows: int | None = None,
        fit: Fit | None = None,
    ) -> Iterator[tuple[tuple[int, ...], Float[Tensor, "variant pos vocab"]]]:
        """Run variants; gives the numbers of some of them and their logits at `positions`, and then of others.

        Which come together, and in which order, is chosen so that little is computed twice. Where memory runs out,
        fewer go together; `fit` keeps how many, also for other baselines.
        """
        length = self.tokens.shape[1]
        asked = list(range(length)) if positions is None else _checked_positions(positions, length)
        where = sorted(set(asked))
        if most_rows is not None and most_rows < 1:
            raise HooklineError(f"most_rows is how many variants go through at once, from 1 on, not {most_rows!r}")
        _check_variants(variants)
        self._check_unchanged()
        fit = fit if fit is not None else Fit("variants of a run")
        entries = {number: self._entries.of(variant) for number, variant in enumerate(variants) if variant}
        way = self.way
        if any(entry.layer == BEFORE_LAYERS for entry in entries.values()):
            way = Way.PLAIN
        if any(change.point.stream == "image" for variant in variants for change in variant):
            most_rows = 1  # pictures of several texts may be one row
        can_be_cut = self.is_causal and way != Way.PLAIN and not depends_on_length(self._points.anatomy.config)
        can_be_cut = can_be_cut and (self.image_inputs is None or way == Way.RESUMED)  # each picture has its tokens
        can_be_cut = can_be_cut and not any(_goes_by_length(change) for variant in variants for change in variant)
        stop = where[-1] + 1 if can_be_cut else length
        # A pass that resumes at a position leaves those before it as they were, also where it may not be cut.
        reach = where[-1] + 1 if way == Way.RESUMED else stop
        same = [number for number in range(len(variants)) if number not in entries or entries[number].position >= reach]
        if same:
            yield tuple(same), self.logits[asked].expand(len(same), -1, -1)
        order = None if asked == where else [where.index(each) for each in asked]
        entries = {number: entry for number, entry in entries.items() if entry.position < reach}
        if entries and way == Way.PLAIN:
            self._check_hooks(min(2, most_rows or 2))
        for part in parts(entries, self._n_layers, stop, self.room, most_rows, from_any=way == Way.RESUMED):
            span = range(part.start, stop)

            def run(numbers: Sequence[int], span: range = span) -> Tensor:
                some = [variants[number] for number in numbers]
                if way == Way.PLAIN:
                    return self._plain(some, where)
                return self._joined(some, [entries[number] for number in numbers], span, where)

            for numbers, logits in fit.parts(part.numbers, run, weight=len(span)):
                yield tuple(numbers), logits if order is None else logits[:, order]

    @GradMode(False)
    def _plain(self, some: Sequence[Variant], where: list[int]) -> Tensor:
        """Every layer, for every variant."""
        placed: dict[str, list[Placed]] = {}
        for row, variant in enumerate(some):
            for change in variant:
                placed.setdefault(change.point.listed, []).append((row, change))
        text = range(self.tokens.shape[1])
        own = self.model._hook_actions(self._hooks, ())
        puts = [self._put(name, each, text) for name, each in placed.items()]
        more = {} if self.image_inputs is None else self.image_inputs.repeated(len(some))
        inputs = {"input_ids": self.tokens.expand(len(some), -1), **more}
        run = Run(self._points.root, [*own, *puts], is_one_pass=True)
        with run, sharing(self._points.root, inputs), drawn_once(len(some)):
            return outcome(self._points.root(**inputs))[:, where]

    def _put(self, name: str, changes: list[Placed], text: range) -> Action:
        point = self._points.find(name)
        return hook_action(point, PutPatches(changes) if point.stream == "image" else Put(changes, text), "fwd")

    def _check_hooks(self, count: int) -> None:
        """Variants are rows of a batch, run at different times: hooks must do the same to every row, every time."""
        has_hooks = bool(active.get() or self._points.standing.steps or self._hooks)
        if self._is_checked or not has_hooks or self.model.module.training or not bool(self.logits.isfinite().all()):
            return
        rows = self._plain([()] * count, list(range(self.tokens.shape[1])))
        if not is_alike(rows, self.logits.expand_as(rows)):
            raise HooklineError(
                "a hook that is active changes the same text differently from run to run, or from row to row of a "
                "batch: what a variant changes could not be told from that. Draw random numbers with noise(std, seed=…)"
                ", or remove the hook while the experiment runs"
            )
        self._is_checked = True

    @GradMode(False)
    def _joined(self, some: Sequence[Variant], entries: Sequence[Entry], span: range, where: list[int]) -> Tensor:
        """Each variant from its first layer on; all of them from the first position of the part on."""
        rows: dict[int, list[int]] = {}
        for row, entry in enumerate(entries):  # in the order of their layers
            rows.setdefault(entry.layer, []).append(row)
        joins: dict[int, Tensor] = {}
        placed: dict[str, list[Placed]] = {}
        for layer, members in rows.items():
            stream = self.streams[layer][span.start : span.stop]
            joins[layer] = stream.expand(len(members), -1, -1).clone()
            self._sort(layer, [some[row] for row in members], members[0], joins[layer], span, placed)
        inputs = self._inputs(span, where)
        read = [each - span.start for each in where if each in span]
        seen = self.image_inputs.skipped() if self.image_inputs is not None else {}
        logits = outcome(joined_pass(self._points, joins, placed, span, inputs, read=read, skipped=seen))
        if "logits_to_keep" not in inputs:
            logits = logits[:, read]
        before = [each for each in where if each < span.start]
        return torch.cat([self.logits[before].expand(len(some), -1, -1), logits], 1) if before else logits

    def _sort(
        self,
        layer: int,
        members: Sequence[Variant],
        first_row: int,
        stream: Tensor,
        span: range,
        placed: dict[str, list[Placed]],
    ) -> None:
        """Make changes of the stream that comes in; note the others for when their points come by."""
        values: list[Placed] = []
        sums: list[Placed] = []
        for number, variant in enumerate(members):
            for change in variant:
                if self._entries.layer(change) == layer and self._entries.is_stream(change):
                    values.append((number, change))
                elif self._entries.layer(change) == layer and self._entries.is_added(change):
                    sums.append((number, change))
                else:
                    placed.setdefault(change.point.listed, []).append((first_row + number, change))
        put_all(stream, sums, span, as_difference=True)
        put_all(stream, values, span)

    def _inputs(self, span: range, where: list[int]) -> dict[str, Any]:
        """What the model is called with, for these positions."""
        known = parameters_of(self._points.root)[0]
        inputs: dict[str, Any] = {"input_ids": self.tokens[:, span.start : span.stop]}
        positions = self.image_inputs.positions if self.image_inputs is not None else None
        if self.image_inputs is not None and self.way == Way.JOINED:
            inputs |= self.image_inputs.inputs
        elif positions is not None and "position_ids" in known:
            inputs["position_ids"] = positions[..., span.start : span.stop]
        if "use_cache" in known:
            inputs["use_cache"] = bool(span.start)
        if span.start:
            from hookline.rerun.prefix import prefix_cache

            assert self._pairs is not None
            inputs["past_key_values"] = prefix_cache(self._pairs, span.start)
            if "position_ids" in known and positions is None:
                inputs["position_ids"] = torch.arange(span.start, span.stop, device=self.tokens.device)[None]
        if "logits_to_keep" in known:
            kept = [each - span.start for each in where if each in span]
            inputs["logits_to_keep"] = torch.tensor(kept, device=self.tokens.device)
        return inputs


def _checked_positions(positions: Sequence[int], length: int) -> list[int]:
    if isinstance(positions, int) or not len(positions):
        raise HooklineError(f"positions are a list of at least one, as in [-1], not {positions!r}")
    for each in positions:
        if each not in range(-length, length):
            raise HooklineError(f"position {each}, but the text has {length} tokens")
    return [each % length for each in positions]


def _check_variants(variants: Sequence[Variant]) -> None:
    for variant in variants:
        if not isinstance(variant, Sequence) or not all(isinstance(each, Change) for each in variant):
            raise HooklineError(f"a variant is a list of changes, [base.change(…), …], not {variant!r}")


def _goes_by_length(change: Change) -> bool:
    """Scores may be shifted by how many keys there are, and a pattern may go to keys that would be cut off."""
    return change.point.listed.endswith(("hook_attn_scores", "hook_pattern"))


def _empty_past(root: nn.Module) -> Any:
    """Where a model keeps keys and values; None if it takes none."""
    if "past_key_values" not in parameters_of(root)[0]:
        return None
    from transformers.cache_utils import DynamicCache

    return DynamicCache()


def _pairs(past: Any) -> list[tuple[Tensor, Tensor]] | None:
    if past is None:
        return None
    from hookline.rerun.prefix import kept_pairs

    return kept_pairs(past)

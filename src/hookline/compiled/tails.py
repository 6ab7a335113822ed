"""Tails: the variants of a run from where they join it, as graphs.

A batch of variants in an experiment (`rerun/joined.py`) is a run from some layer and some position on, in which rows
join at layers. What differs between batches of one shape is in tensors of fixed address: the streams that join, the
new values at points and where they are, the keys and values before the first position, and the positions that are read.
Layers before the first are part of the model's forward, but nothing uses them, so they are not in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from hookline.compiled import entry
from hookline.compiled.classify import no_site
from hookline.compiled.fixed import fixed
from hookline.compiled.not_compiled import NotCompiled, check_no
from hookline.compiled.program import Features, Program
from hookline.compiled.proof import why_unproved
from hookline.compiled.variants import Variant
from hookline.engine import Kind, Site, Turn, lens_of
from hookline.rerun.changes import Change, RowChange, write_all
from hookline.rerun.joined import JoinedRun
from hookline.rerun.prefix import prefix_cache
from hookline.transformer.outputs import outcome

if TYPE_CHECKING:
    from hookline.compiled.executor import CompiledRuns

MOST = 2**30
"""The bytes of streams and new values for which a graph gets tensors; larger batches do not gain from graphs."""


class Join:
    """Rows that join at the input of a layer, or the output of the last; the first rows replace what was there."""

    def __init__(self, site: Site, rows: Tensor, *, is_first: bool) -> None:
        self.site, self.rows, self.is_first = site, fixed(torch.empty_like(rows)), is_first

    def __call__(self, x: Tensor) -> Tensor:
        """The rows from here on, inside the graph."""
        return self.rows if self.is_first else torch.cat([x, self.rows])

    def touched(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        return (self.rows,)


class Writes:
    """New values at a point, in some consecutive rows."""

    kind = "rows"
    """What `Variant` asks each slot for: not a traced function."""

    def __init__(self, site: Site, rows: range, width: int, features: Features, device: torch.device) -> None:
        self.site, self.rows = site, rows
        shape = (len(rows), width, *features.shape)
        self.values = fixed(torch.zeros(shape, dtype=features.dtype, device=device))
        self.where = fixed(torch.zeros(shape, dtype=torch.bool, device=device))
        self._places: list[Any] | None = None

    def set(self, placed: Sequence[RowChange], span: range) -> None:
        """Use these values."""
        moved = [(row - self.rows.start, change) for row, change in placed]
        write_all(self.values, moved, span)
        places = [(row, change.where) for row, change in moved]
        if places != self._places:
            self._places = None  # until it is written
            self.where.zero_()
            ones = [(row, Change(change.point, change.where, torch.ones_like(change.value))) for row, change in moved]
            write_all(self.where, ones, span)
            self._places = places

    def __call__(self, x: Tensor) -> Tensor:
        """The value with the changes, inside the graph."""
        new = torch.where(self.where, self.values, x[self.rows.start : self.rows.stop])
        return torch.cat([x[: self.rows.start], new, x[self.rows.stop :]])

    def touched(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        return self.values, self.where


class Narrow:
    """Keeps only the positions that are read, at the input of the last MLP."""

    def __init__(self, site: Site, read: Tensor) -> None:
        self.site, self.read = site, read

    def __call__(self, x: Tensor) -> Tensor:
        """Some positions of the value, inside the graph."""
        return x.index_select(1, self.read)

    def touched(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        return (self.read,)


class Widen(Narrow):
    """Restores all positions, with zeros where none was kept, at the output of the last MLP."""

    def __init__(self, site: Site, read: Tensor, width: int) -> None:
        super().__init__(site, read)
        self.width = width

    def __call__(self, x: Tensor) -> Tensor:
        """The value with all positions, inside the graph."""
        return x.new_zeros(x.shape[0], self.width, x.shape[2]).index_copy(1, self.read, x)


class TailState:
    """The tensors of batches of one shape, used by one batch at a time."""

    is_one_of_many = True

    def __init__(self, owner: CompiledRuns, joined: JoinedRun, features: dict[Site, Features]) -> None:
        self.owner, self.module, self.device = owner, joined.points.root, joined.inputs["input_ids"].device
        self.rows, self.length, self.key = sum(map(len, joined.joins.values())), len(joined.span), shape_of(joined)
        self.kind = f"from layer {joined.first}"
        self.variants: list[Variant] = []
        self.inputs = {name: _own(x) for name, x in joined.inputs.items()}
        if "past_key_values" in self.inputs:
            self.inputs["past_key_values"] = _own_prefix(joined)
        self.read = fixed(torch.tensor(joined.read, device=self.device))
        self.joins = {
            layer: Join(joined.site(layer), rows, is_first=layer == joined.first)
            for layer, rows in joined.joins.items()
        }
        self.writes = {}
        for name, placed in joined.changes.items():
            site = joined.points.find(name).site
            self.writes[name] = Writes(site, _rows(placed), self.length, features[site], self.device)

    def program(self, joined: JoinedRun) -> Program:
        """What the graph does at the model's modules."""
        others: list[tuple[Turn, Any]] = [
            (Turn.ENTER if join.site.kind is Kind.INPUT else Turn.LEAVE, join) for join in self.joins.values()
        ]
        if (mlp := joined.narrowed) is not None:
            others.append((Turn.SEND, Narrow(Site(mlp, Kind.INPUT, lens_of(mlp, Kind.INPUT)), self.read)))
            others.append((Turn.EFFECT, Widen(Site(mlp, Kind.OUTPUT), self.read, self.length)))
        return Program([*self.writes.values()], others=others)

    def passer(self, program: Program) -> Callable[[], Tensor]:
        """The function that runs the model, for a program."""

        def forward() -> Tensor:
            program.seen()
            output = self.module(**self.inputs)
            program.forget()
            return outcome(output)

        return forward

    def set(self, joined: JoinedRun) -> None:
        """Use the values of this batch."""
        for name, x in joined.inputs.items():
            if isinstance(x, Tensor):
                self.inputs[name].copy_(x)
        if "past_key_values" in joined.inputs:
            both = zip(self.inputs["past_key_values"].layers, joined.inputs["past_key_values"].layers, strict=True)
            for fixed_layer, batch_layer in list(both)[joined.first :]:
                fixed_layer.keys.copy_(batch_layer.keys)
                fixed_layer.values.copy_(batch_layer.values)
        self.read.copy_(torch.tensor(joined.read, device=self.device))
        for layer, rows in joined.joins.items():
            self.joins[layer].rows.copy_(rows)
        for name, placed in joined.changes.items():
            self.writes[name].set(placed, joined.span)

    def logits(self, joined: JoinedRun) -> Tensor:
        """The logits of this batch; NotCompiled if the graph is not used."""
        if not self.variants:
            made = Variant(self.program(joined), self.passer, self.owner.options, self.device)
            self.variants.append(made)
        variant = self.variants[0]
        self.owner.used(self, variant)
        check_no(variant.refusal)
        self.set(joined)
        if not variant.is_proved:
            return self._proved(variant, joined)
        try:
            with variant.program.attached():
                logits = variant.call().clone()
        except TorchDynamoException:  # before anything has run: it has to be compiled again
            return self._proved(variant, joined)
        variant.runs += 1
        return logits

    def _proved(self, variant: Variant, joined: JoinedRun) -> Tensor:
        """The logits of an uncompiled run, after comparing the graph's with them."""
        expected = outcome(joined.output())

        def again(way: Callable[[], Tensor]) -> dict[Any, Tensor]:
            with variant.program.attached():
                return {"logits": way().clone()}

        variant.settle(why_unproved(variant, {"logits": expected}, again))
        if variant.refusal is not None:
            self.owner.refused(variant.refusal)
        return expected


def _own(x: Any) -> Any:
    return fixed(x.clone()) if isinstance(x, Tensor) else x


def _own_prefix(joined: JoinedRun) -> Any:
    """A copy of the batch's key-value cache, in tensors of fixed address."""
    layers = joined.inputs["past_key_values"].layers
    past = prefix_cache([(layer.keys, layer.values) for layer in layers], joined.span.start)
    for layer in past.layers:
        layer.keys, layer.values = _own(layer.keys.contiguous()), _own(layer.values.contiguous())  # type: ignore[union-attr]
    return past


def _rows(placed: Sequence[RowChange]) -> range:
    rows = [row for row, _ in placed]
    return range(min(rows), max(rows) + 1)


def check_batch(joined: JoinedRun) -> None:
    """Raise NotCompiled if a batch of variants cannot be compiled."""
    points = joined.points
    entry.check_call(points)
    if joined.skipped:
        raise NotCompiled("the text has images")
    if entry.actions_of(points):
        raise NotCompiled("hooks are active")
    for point in map(points.find, joined.changes):
        if (why := no_site(point)) is not None:
            raise NotCompiled(f"{point.name!r} cannot be changed in a graph: {why}")


def shape_of(joined: JoinedRun) -> tuple[Any, ...]:
    """A key that is equal for batches that can use the same graph."""
    joins = tuple((layer, len(rows)) for layer, rows in joined.joins.items())
    changes = tuple((name, _rows(placed)) for name, placed in joined.changes.items())
    return joined.span, joins, changes, len(joined.read), joined.narrowed is None, tuple(joined.inputs)


def room_for(joined: JoinedRun, features: dict[Site, Features]) -> int:
    """How many bytes the streams and new values of a batch need."""
    size = sum(rows.nbytes for rows in joined.joins.values())
    for name, placed in joined.changes.items():
        point_features = features[joined.points.find(name).site]
        size += (
            len(_rows(placed))
            * len(joined.span)
            * torch.Size(point_features.shape).numel()
            * (point_features.dtype.itemsize + 1)
        )
    return size

"""Programs: what a graph does at the sites of a plan, with everything that may change in tensors of fixed address.

    edits as data     x * keep + add, and x + (clamp(x · unit) - x · unit + gain |x|) unit, where a gate is on
    functions         traced, where a gate is on
    reads             copied into a buffer

The gate of an edit has a column for every position of the text. Writing to a table or a gate compiles nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hookline.compiled.fixed import fixed
from hookline.compiled.traced_lenses import getter, putter
from hookline.engine import Edit, HookPoint, Kind, Record, Site, Turn, compiling, undo
from hookline.errors import HooklineError
from hookline.functions.callers import call_style
from hookline.hooks.scores import scores_of

_scores_of = inspect.unwrap(scores_of)  # without what tests wrap around it
SlotKind = Literal["affine", "along", "any", "function"]


@dataclass(frozen=True)
class Features:
    """The shape and dtype of the value at a site, for one position of one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SlotSpec:
    """A place for one edit at a site: which kinds it takes, and whether its values differ by row or position."""

    site: Site
    kind: SlotKind
    spread: int = 0
    """0: the same for all rows and positions; 1: by row; 2: by row and position."""
    code: Any = None
    """The code of a traced function."""
    constants: tuple[Any, ...] = ()
    """The values in that function which are not tensors."""

    def takes(self, other: SlotSpec) -> bool:
        """Whether an edit that needs `other` can use this slot."""
        is_kind = self.kind == other.kind or (self.kind == "any" and other.kind in ("affine", "along"))
        is_same = self.code is other.code and self.constants == other.constants
        return is_kind and is_same and self.site == other.site and self.spread >= other.spread


@dataclass
class Clock:
    """The columns of the text that a call of the graph covers: all, or the one that the tensor `column` has."""

    rows: int
    width: int
    device: torch.device
    column: Tensor | None = None
    token: Tensor | None = None
    vocab: int = 0


class Slot:
    """One edit in a graph."""

    def __init__(self, spec: SlotSpec, features: Features, clock: Clock) -> None:
        self.spec, self.clock, self.kind, self.features = spec, clock, spec.kind, features
        self.site = spec.site
        wide = torch.promote_types(features.dtype, torch.float32)
        lead = ((1, 1), (clock.rows, 1), (clock.rows, clock.width))[spec.spread]
        shape = (*lead, *features.shape)
        self.gate = fixed(torch.zeros(clock.rows, clock.width, dtype=torch.bool, device=clock.device))
        self.allowed = fixed(torch.ones(clock.vocab, dtype=torch.bool, device=clock.device))
        """At which tokens the edit acts, where the gate is open."""
        if self.kind in ("affine", "any"):
            self.keep = fixed(torch.ones(shape, dtype=wide, device=clock.device))
            self.add = fixed(torch.zeros(shape, dtype=wide, device=clock.device))
        if self.kind in ("along", "any"):
            self.unit = fixed(torch.zeros(shape, dtype=wide, device=clock.device))
            self.bounds = fixed(torch.zeros(2, dtype=wide, device=clock.device))
            self.gain = fixed(torch.zeros((), dtype=wide, device=clock.device))
            self.where = fixed(torch.ones(shape, dtype=torch.bool, device=clock.device))
        self.function: Any = None
        self.style = "alone"
        self.point: HookPoint | None = None

    def set_function(self, function: Any, point: HookPoint) -> None:
        """Give the slot a function, which is traced with this point."""
        self.function, self.style, self.point = function, call_style(function), point

    def off(self) -> None:
        """Disable the edit."""
        self.gate.zero_()

    def __call__(self, x: Tensor) -> Tensor:
        """The value after the edit, inside the graph."""
        if self.kind == "function":
            new = self._traced(x)
        else:
            new = x
            if self.kind != "along":
                new = torch.where(self.keep == 0, self.add, new * self.keep + self.add)
            if self.kind != "affine":
                new = self._along(new.to(self.unit.dtype))
            new = new.to(x.dtype)
        gate = self._is_on().view(x.shape[0], -1, *[1] * (x.ndim - 2))
        return torch.where(gate, new, x)

    def _along(self, x: Tensor) -> Tensor:
        """The value with another component along the unit vector."""
        before = (x * self.unit).sum(-1, keepdim=True)
        moved = before.clamp(self.bounds[0], self.bounds[1]) - before + self.gain * x.norm(dim=-1, keepdim=True)
        return torch.where(self.where, x + moved * self.unit, x)

    def touched(self) -> tuple[Tensor, ...]:
        """The tensors that a slot of this kind reads."""
        tables = () if self.kind == "function" else (self.keep, self.add) if self.kind != "along" else ()
        more = (self.unit, self.bounds, self.gain, self.where) if self.kind in ("along", "any") else ()
        return (self.gate, self.allowed, *tables, *more)

    def _is_on(self) -> Tensor:
        clock = self.clock
        if clock.column is None or clock.token is None:
            return self.gate
        return self.gate.index_select(1, clock.column) & self.allowed[clock.token]

    def _traced(self, x: Tensor) -> Tensor:
        argument = x.clone()
        if self.style == "keyword":
            result = self.function(argument, hook=self.point)
        elif self.style == "position":
            result = self.function(argument, self.point)
        else:
            result = self.function(argument)
        new = argument if result is None else result
        if new.shape != x.shape:
            raise HooklineError("it returns another shape")
        return new.to(x.dtype)


@dataclass(frozen=True)
class ReadSpec:
    """What is read at a site: the activation, or so many scores of it; `number` tells several alike apart."""

    site: Site
    scores: int = 0
    number: int = 0


class Read:
    """A point that is read in a graph: a buffer with a column for every position of the text."""

    def __init__(self, spec: ReadSpec, features: Features, clock: Clock) -> None:
        self.spec, self.site, self.clock = spec, spec.site, clock
        shape, dtype = features.shape, features.dtype
        if spec.scores:
            dtype = torch.promote_types(dtype, torch.float32)
            self.weight = fixed(torch.zeros(spec.scores, *shape, dtype=dtype, device=clock.device))
            self.bias = fixed(torch.zeros(spec.scores, dtype=dtype, device=clock.device))
            shape = (spec.scores,)
        self.buffer = fixed(torch.zeros(clock.rows, clock.width, *shape, dtype=dtype, device=clock.device))

    def touched(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        return (self.buffer, self.weight, self.bias) if self.spec.scores else (self.buffer,)

    def __call__(self, x: Tensor) -> None:
        """Keep the value, or its scores, inside the graph."""
        if self.spec.scores:
            x = _scores_of(x, self.weight, self.bias)
        if self.clock.column is None:
            self.buffer.copy_(x)
        else:
            self.buffer.index_copy_(1, self.clock.column, x)


class _Tracing(threading.local):
    def __init__(self) -> None:
        self.program: Program | None = None


_tracing = _Tracing()


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_program() -> int:
    """The program that this thread runs; looked up while tracing."""
    return id(_tracing.program)


@dataclass
class _Event:
    """What a program does at one event: a torch hook that acts only while its program is traced, in that thread."""

    program: int
    is_input: bool
    saved: list[Any]
    steps: list[Any]

    def __call__(self, _module: nn.Module, args: Any, *rest: Any) -> Any:
        """Called by torch with keyword arguments and output, or without the former if another thread detaches it."""
        if not torch.compiler.is_dynamo_compiling() or _traced_program() != self.program:
            return None
        value = (args, rest[0]) if self.is_input else rest[1]
        for get, put, slot in self.steps:
            if put is not None:
                value = put(value, slot(get(value, self.saved)), self.saved)
            elif isinstance(slot, int):
                self.saved[slot] = get(value, self.saved)
            else:
                slot(get(value, self.saved))
        return value


class Attached(undo.UndoBlock):
    """A block in which the hooks of a program are on their modules, and may be traced."""

    def __init__(self, program: Program, events: Mapping[tuple[nn.Module, Kind], _Event]) -> None:
        self._program, self._events, self._before = program, events, _tracing.program
        self._graphs = compiling.hooks_in_graph()

    def open(self) -> None:
        """Attach the hooks."""
        _tracing.program = self._program
        with compiling.tracing_lock():
            for (module, kind), event in self._events.items():
                add = module.register_forward_pre_hook if kind is Kind.INPUT else module.register_forward_hook
                add(event, with_kwargs=True)
        self._graphs.begin()

    def close(self) -> None:
        """Detach them."""
        self._graphs.end()
        if self.is_here:
            _tracing.program = self._before
        with compiling.tracing_lock():
            for (module, _), event in self._events.items():
                undo.remove_hook(module, event)


class Program:
    """The slots and reads of a graph, and the torch hooks through which the compiler sees them.

    `others` change values at a turn other than that of hooks.
    """

    def __init__(
        self, slots: Sequence[Any], reads: Sequence[Read] = (), others: Sequence[tuple[Turn, Any]] = ()
    ) -> None:
        self.slots, self.reads = list(slots), {read.spec: read for read in reads}
        needed = [site for slot_or_read in (*slots, *reads) for site in slot_or_read.site.needs]
        places = {site: place for place, site in enumerate(dict.fromkeys(needed))}
        self.saved: list[Any] = [None] * len(places)
        self._events = self._arranged(places, others)
        self._hooks = list(self._events.values())

    def _arranged(
        self, places: Mapping[Site, int], others: Sequence[tuple[Turn, Any]]
    ) -> dict[tuple[nn.Module, Kind], _Event]:
        """The steps at each event, in the order that `engine/order.py` states."""
        keyed_steps: dict[tuple[nn.Module, Kind], list[tuple[tuple[int, ...], Any]]] = defaultdict(list)
        for turn, slot in (*((Turn.AT_POINTS, edit_slot) for edit_slot in self.slots), *others):
            site = slot.site
            step = (getter(site.lens, places), putter(site.lens, places), slot)
            keyed_steps[site.module, site.kind].append(((turn, site.stage, Edit.phase), step))
        for read in self.reads.values():
            site = read.site
            key = (Turn.AT_POINTS, site.stage, Record.phase)
            keyed_steps[site.module, site.kind].append((key, (getter(site.lens, places), None, read)))
        for site, place in places.items():
            keyed_steps[site.module, site.kind].append(((Turn.KEEP, 0, 0), (getter(site.lens, places), None, place)))
        events = {}
        for (module, kind), pairs in keyed_steps.items():
            steps = [step for _, step in sorted(pairs, key=lambda pair: pair[0])]
            events[module, kind] = _Event(id(self), kind is Kind.INPUT, self.saved, steps)
        return events

    def attached(self) -> Attached:
        """A block for calling the graph: the hooks are on the modules, in case the compiler traces."""
        return Attached(self, self._events)

    def seen(self) -> None:
        """Touch everything that the hooks use; traced at the beginning of a call.

        So the compiler knows these objects as parts of the program, and not by the places of the hooks among others on
        their modules, where there may be more or fewer hooks in the next run.
        """
        for hook in self._hooks:
            for _get, _put, what in hook.steps:
                if not isinstance(what, int):
                    what.touched()
            hook.saved  # noqa: B018

    def forget(self) -> None:
        """Drop the values that were saved in one call of the graph; traced at its end."""
        for place in range(len(self.saved)):
            self.saved[place] = None

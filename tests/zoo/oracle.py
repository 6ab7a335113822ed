"""The oracle: what plain torch hooks, placed by hand with clones, read, edit and differentiate.

It imports torch alone, so that it shares no mistake with the library that it judges. Everything is said in events: the
input or the output of one call of a module, with the module's path.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Path: TypeAlias = tuple[Any, ...]
"""Keys that lead from a value to a tensor in it. For an input the value is `(args, kwargs)`."""


class Event(NamedTuple):
    """The input or the output of one call of a module, counted from 0."""

    module: str
    side: Literal["input", "output"]
    call: int


@dataclass(frozen=True)
class Edit:
    """A change of one tensor at an event: the first, or the one at a path. Without a `call`, at every call."""

    module: str
    side: Literal["input", "output"]
    change: Callable[[Tensor], Tensor]
    call: int | None = None
    path: Path | None = None

    def is_at(self, event: Event) -> bool:
        return (self.module, self.side) == event[:2] and self.call in (None, event.call)


def items(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a tuple, list, dict or dataclass, with their keys."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """All tensors in a value with their paths, depth first."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, part in items(value):
            yield from tensors(part, (*path, key))


def everything(value: Any, path: Path = (), depth: int = 8) -> Iterator[tuple[Path, Tensor]]:
    """All tensors in a value, those in attributes of its objects too, such as the layers of a key-value cache."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if depth == 0 or isinstance(value, str | bytes | int | float | type | nn.Module | None):
        return
    parts = list(items(value)) or list(getattr(value, "__dict__", {}).items())
    for key, part in parts:
        yield from everything(part, (*path, key), depth - 1)


def replaced(value: Any, path: Path, tensor: Any) -> Any:
    """A copy of the value with another tensor at a path; the value itself stays as it is."""
    if not path:
        return tensor
    key, *rest = path
    if isinstance(value, Mapping | tuple | list):
        part = replaced(value[key], tuple(rest), tensor)
    else:
        part = replaced(getattr(value, key), tuple(rest), tensor)
    if isinstance(value, tuple):
        parts = [part if place == key else other for place, other in enumerate(value)]
        return getattr(type(value), "_make", type(value))(parts)
    new = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # a dict whose items are attributes too
        new.__dict__ = new
    if isinstance(value, Mapping | list):
        new[key] = part
    else:
        object.__setattr__(new, key, part)
    return new


def swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """A copy of the value with a tensor wherever another was: a last hidden state is also one of all of them."""
    for path in [path for path, x in tensors(value) if x is old]:
        value = replaced(value, path, new)
    return value


def first_path(module: nn.Module, side: str, value: Any) -> Path | None:
    """The path of the first tensor; among arguments in the order of the parameters of the module's forward."""
    if side == "output":
        return next((path for path, _ in tensors(value)), None)
    args, kwargs = value
    for path, _ in tensors(args):
        return (0, *path)
    names = list(inspect.signature(module.forward).parameters)
    now = {name: name if name in names else f"{name}s" for name in kwargs}  # transformers takes hidden_state, too
    ordered = sorted(kwargs, key=lambda name: names.index(now[name]) if now[name] in names else len(names))
    return next(((1, *path) for path, _ in tensors({name: kwargs[name] for name in ordered})), None)


def at(value: Any, path: Path) -> Any:
    """What is at a path."""
    for key in path:
        value = value[key] if isinstance(value, Mapping | tuple | list) else getattr(value, key)
    return value


Visit: TypeAlias = Callable[[nn.Module, Event, Any], Any]
"""Gets the value at an event; what it returns goes on in its place, unless that is None."""


@contextmanager
def hooked(root: nn.Module, visit: Visit, only: set[str] | None = None, *, first: bool = True) -> Iterator[None]:
    """Visit every event of every module, or of some, while this is open.

    Hooks that were there get what the visit changes; with `first=False` the visit sees what those have changed. (Models
    of transformers have hooks of their own, which collect hidden states.)
    """
    calls: Counter[str] = Counter()
    running: dict[str, list[int]] = defaultdict(list)
    handles: list[Any] = []

    def attach(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            running[name].append(calls[name])
            calls[name] += 1
            return visit(module, Event(name, "input", running[name][-1]), (args, kwargs))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return visit(module, Event(name, "output", running[name].pop()), output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=first))
        handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=first))

    try:
        for name, module in root.named_modules():
            if not isinstance(module, torch.jit.ScriptModule) and (only is None or name in only):
                attach(name, module)
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Seen:
    """What left each event: clones of all tensors by path, and which of them is the first."""

    tensors: dict[Event, dict[Path, Tensor]]
    first: dict[Event, Path]
    passed_through: set[Event]
    """Outputs in the memory of an argument: those of an identity, of dropout in eval, of what works in place."""

    def calls(self, module: str, side: str) -> int:
        return sum(event[:2] == (module, side) for event in self.tensors)


@contextmanager
def watching(root: nn.Module) -> Iterator[Seen]:
    """Clone every tensor that passes any event, at that moment."""
    seen = Seen({}, {}, set())
    arguments: dict[str, list[set[int]]] = defaultdict(list)

    def visit(module: nn.Module, event: Event, value: Any) -> None:
        if event.side == "input":
            arguments[event.module].append({memory(x) for _, x in tensors(value)})
        elif {memory(x) for _, x in tensors(value)} & arguments[event.module].pop():
            seen.passed_through.add(event)
        path = first_path(module, event.side, value)
        if path is not None:
            seen.tensors[event] = {path: x.detach().clone() for path, x in tensors(value)}
            seen.first[event] = path

    with hooked(root, visit, first=False):
        yield seen


def laid_out_clone(x: Tensor) -> Tensor:
    """A clone with the strides of the tensor, also of one that is a part of another.

    Some kernels round otherwise where values are not beside each other in memory.
    """
    clone = x.clone()
    if x.layout != torch.strided or x.is_nested or clone.stride() == x.stride() or 0 in x.stride():
        return clone
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def memory(x: Tensor) -> int:
    """Where the tensor is; tensors without a place of their own are never in the same one."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(x)


def version(x: Tensor) -> int:
    """How often the tensor was written to in place; 0 where torch does not count."""
    return 0 if x.is_inference() else x._version


class Sent(NamedTuple):
    """A tensor that a module got instead of the caller's."""

    original: Tensor
    clone: Tensor
    version: int


def give_back(sent: Sent, output: Any) -> Any:
    """Let the caller see what the module itself wrote to its argument, as it would without hooks."""
    if version(sent.clone) == sent.version:
        return None
    sent.original.copy_(sent.clone)
    return swapped(output, sent.clone, sent.original)


@contextmanager
def editing(root: nn.Module, *edits: Edit, in_place: bool = False) -> Iterator[Counter[Edit]]:
    """Replace tensors by changed clones, and count how often; nobody else's tensor changes.

    With `in_place` outputs are written to as they are, also for a caller that ignores what the module returns.
    """
    fired: Counter[Edit] = Counter()
    sent: dict[tuple[str, int], list[Sent]] = defaultdict(list)

    def visit(module: nn.Module, event: Event, value: Any) -> Any:
        new = value
        for edit in edits:
            if not edit.is_at(event):
                continue
            path = first_path(module, event.side, new) if edit.path is None else edit.path
            if path is None:
                continue
            fired[edit] += 1
            x = at(new, path)
            changed = edit.change(laid_out_clone(x))
            if in_place and event.side == "output":
                x.copy_(changed)
                continue
            new = replaced(new, path, changed) if event.side == "input" or edit.path else swapped(new, x, changed)
            if event.side == "input":
                sent[event.module, event.call].append(Sent(x, changed, version(changed)))
        if event.side == "output":
            for replacement in reversed(sent.pop((event.module, event.call), [])):
                output = give_back(replacement, new)
                new = new if output is None else output
        return None if new is value else new

    with hooked(root, visit, {edit.module for edit in edits}):
        yield fired


@contextmanager
def differentiating(
    root: nn.Module, events: set[Event] | None, change: Callable[[Tensor], Tensor | None] | None = None
) -> Iterator[dict[Event, Tensor]]:
    """Keep the gradient at the first tensor of some events, and change it with `change`.

    What goes on is a clone with a tensor hook, so the gradient is that of what left the event and of nothing else.
    """
    gradients: dict[Event, Tensor] = {}
    sent: dict[tuple[str, int], Sent] = {}

    def hook(event: Event) -> Callable[[Tensor], Tensor | None]:
        def keep(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # from an autograd function that has none for this argument
                return None
            gradients[event] = gradient.detach().clone()
            return None if change is None else change(gradient.clone())

        return keep

    def visit(module: nn.Module, event: Event, value: Any) -> Any:
        new = value
        path = first_path(module, event.side, value)
        if path is not None and (events is None or event in events):
            x = at(value, path)
            if x.is_floating_point() or x.is_complex():
                clone = laid_out_clone(x if x.requires_grad else x.detach().requires_grad_())
                clone.register_hook(hook(event))
                new = replaced(value, path, clone) if event.side == "input" else swapped(value, x, clone)
                if event.side == "input":
                    sent[event.module, event.call] = Sent(x, clone, version(clone))
        if event.side == "output" and (event.module, event.call) in sent:
            output = give_back(sent.pop((event.module, event.call)), new)
            new = new if output is None else output
        return None if new is value else new

    with hooked(root, visit, None if events is None else {event.module for event in events}):
        yield gradients


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, NaN included."""
    if x.shape != y.shape or x.dtype != y.dtype or x.layout != y.layout or x.is_nested != y.is_nested:
        return False
    return all(map(torch.equal, _bytes(x), _bytes(y)))


def _bytes(x: Tensor) -> list[Tensor]:
    """What the tensor is made of, as bytes."""
    x = x.detach()
    if x.is_nested:
        return [part for each in x.unbind() for part in _bytes(each)]
    if x.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return _bytes(x.to_sparse_coo())
    if x.layout == torch.sparse_coo:
        return [*_bytes(x._indices()), *_bytes(x._values())]
    if x.is_quantized:
        return _bytes(x.int_repr())
    x = x.resolve_conj().resolve_neg()
    # A single element may have any stride, also after `contiguous`.
    x = x.new_empty(x.numel()).copy_(x.reshape(-1)) if x.numel() < 2 else x.contiguous().reshape(-1)
    return [x if x.numel() == 0 or x.dtype == torch.bool else x.view(_INTEGERS[x.element_size()])]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integers of as many bytes, or half as many."""


def distance(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite if shapes or NaNs differ."""
    if x.is_nested and y.is_nested:
        parts = list(zip(x.unbind(), y.unbind(), strict=False))
        return max((distance(*pair) for pair in parts), default=0.0) if x.size(0) == y.size(0) else float("inf")
    if x.shape != y.shape or x.dtype != y.dtype or x.layout != y.layout or x.layout != torch.strided:
        return float("inf")
    x, y = (z.detach().dequantize() if z.is_quantized else z.detach() for z in (x, y))
    if x.numel() == 0:
        return 0.0
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0 if torch.equal(x, y) else float("inf")
    x, y = (z.to(torch.complex128 if z.is_complex() else torch.float64) for z in (x, y))
    different = (x != y) & ~(x.isnan() & y.isnan())
    if not different.any():
        return 0.0
    gap = (x - y).abs()[different].max().item()
    finite = y.abs()[y.isfinite()]
    scale = finite.max().item() if finite.numel() else 1.0
    return float("inf") if gap != gap else gap / max(scale, 1e-30)

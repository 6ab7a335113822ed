"""Recorder: keeps the activations and gradients of a run for its cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.engine import passes
from hookline.engine._gradients.gradient_sources import OVERWRITTEN, GradientSource
from hookline.engine._memory.snapshots import inside_transform, snapshot
from hookline.engine._recording.deferred import Activations, Deferred, is_replayable
from hookline.engine.pass_state import pass_state
from hookline.errors import HooklineError, NeverFiredWarning, a_type
from hookline.values.casting import check_cache_device, check_cache_dtype, is_narrowed, overflow_problem, overflows
from hookline.values.structures import map_tensors

if TYPE_CHECKING:
    from hookline.engine.points import HookPoint


class StopForward(BaseException):
    """Ends the forward pass early. It is not an `Exception`, so that no `except` of the model swallows it."""


class Recorder:
    """Keeps activations, and the tensors whose gradients are computed afterwards."""

    def __init__(
        self,
        points: Sequence[HookPoint] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        positions: Any = None,
        *,
        skips_missing: bool = False,
        stops: bool = False,
        defers: bool = False,
    ) -> None:
        check_cache_dtype(dtype)
        check_cache_device(device)
        self.device, self.dtype, self.positions = device, dtype, positions
        self.skips_missing = skips_missing
        is_whole = device is None and dtype is None and positions is None
        self.defers = defers and is_whole and not is_replayable()
        """Whether activations that are not needed now are computed when they are read."""
        self.forward_pass: Any = None
        """The part of a text that the values are from."""
        self.is_padded = False
        """Whether it notes on its tensors which positions are padding."""
        # Positions are those of the text, and activations of images are kept whole, unless there are only those.
        self._picks_patches = all(point.stream == "image" for point in points)
        self._awaited = {point.name for point in points} if stops else set()
        self.log: list[tuple[Any, ...]] = []
        """What was kept, in order: a name and a tensor, or what computes it; or a recipe of `captures.py` and what it
        takes."""
        self._calls: dict[str, int] = {}
        """How many calls of each point were kept or missed, where gradients are kept too."""
        self._watched: list[tuple[HookPoint, int, GradientSource]] = []
        self._overflows: list[tuple[str, Tensor]] = []
        """Names of activations that are cast to a smaller range, and whether they overflow, read after the pass."""
        self._has_gaps = False

    def note_pass(self) -> None:
        """Another forward pass of a text has begun."""
        self.forward_pass = pass_state.forward_pass
        has_text = self.forward_pass is not None and self.positions is None
        self.is_padded = has_text and self.forward_pass.is_padded

    def keep(self, point: HookPoint, x: Tensor | Deferred) -> None:
        """Keep the current value of `x`."""
        if self.forward_pass is not pass_state.forward_pass:
            self.note_pass()
        kept = x if isinstance(x, Deferred) else self._kept(point, x.detach() if x.requires_grad else x)
        if self.is_padded:
            self._note_padding(point, kept)
        self.log.append((point.name, kept))
        self._calls[point.name] = self._calls.get(point.name, 0) + 1
        if self._awaited:
            self._awaited.discard(point.name)
            if not self._awaited:
                raise StopForward

    def miss(self, name: str) -> None:
        """Note a call without a tensor at a point: the numbers of later calls count it."""
        self.log.append((name, None))
        self._calls[name] = self._calls.get(name, 0) + 1
        self._has_gaps = True

    @property
    def stops(self) -> bool:
        """Whether it ends the pass once it has every point."""
        return bool(self._awaited)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While the pass goes on although every point was kept: the caller ends it."""
        awaited, self._awaited = self._awaited, set()
        try:
            yield
        finally:
            self._awaited = awaited

    def _note_padding(self, point: HookPoint, kept: Tensor | Deferred) -> None:
        span = self.forward_pass.span_at(point.stream)
        if span.mask is not None and isinstance(kept, Deferred):
            kept.note = partial(_note_padding, span=span, axes=point.axes)
        elif span.mask is not None and isinstance(kept, Tensor):
            _note_padding(kept, span, point.axes)

    def watch(self, point: HookPoint, source: GradientSource) -> None:
        """Remember where the gradient at a point is to be found."""
        self._watched.append((point, self._calls.get(point.name, 0), source))

    def backward(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the gradients of `loss` at the watched points. Parameters' `.grad` are not touched."""
        watched, self._watched = self._watched, []
        if not watched:
            raise HooklineError("incl_bwd=True, but none of the selected points has a gradient")
        for point in [point for point, _, source in watched if source.is_lost()]:
            warnings.warn(f"no gradient is cached at {point.name!r}: {OVERWRITTEN}", NeverFiredWarning, stacklevel=2)
        watched = [(point, call, source) for point, call, source in watched if not source.is_lost()]
        edges: Any = [source.compute_for() for _, _, source in watched]
        try:
            computed = torch.autograd.grad(loss, edges, allow_unused=True) if edges else ()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise HooklineError(
                "incl_bwd=True needs the gradient of a tensor that the model overwrites in place after using it, so "
                "torch cannot compute it: select other points with names_filter"
            ) from error
        gradients: dict[str, list[Tensor | None]] = {name: [None] * calls for name, calls in self._calls.items()}
        for (point, call, source), value in zip(watched, computed, strict=True):
            if (gradient := source.gradient(value)) is not None:
                gradients[point.name][call] = self._kept(point, gradient.detach())
        self._check_range()
        named = {f"{name}_grad": gradient for name, gradient in _numbered(gradients).items()}
        _check_apart(named, self.by_point())
        return named

    def values(self) -> MutableMapping[str, Tensor]:
        """Return the kept activations by name, in the order in which the points fired."""
        if self._overflows:
            self._check_range()
        log = self.log
        if not self.defers:
            tensors: dict[str, Tensor] = dict(log)
            is_simple = len(tensors) == len(log) and not self._has_gaps
            return tensors if is_simple else _numbered(_by_name(log))
        if len(set(map(itemgetter(0), log))) == len(log):  # every name once
            return Activations(lambda: _numbered(_by_name(log)))
        return Activations(_numbered(_by_name(log)))

    def clear(self) -> None:
        """Release the tensors: a run and its actions refer to each other, and wait for the garbage collector."""
        self.log, self._watched, self._overflows = [], [], []
        self._calls, self._has_gaps = {}, False
        self.forward_pass, self.is_padded = None, False

    def by_point(self) -> dict[str, list[Tensor]]:
        """Return the kept activations of each point, one tensor per call that has one."""
        self._check_range()
        by_call = _by_name(self.log)
        return {name: tensors for name, calls in by_call.items() if (tensors := [x for x in calls if x is not None])}

    def _kept(self, point: HookPoint, x: Tensor) -> Tensor:
        if self.positions is not None and (self._picks_patches or point.stream != "image"):
            x = passes.text().pick(x, point, self.positions)
        if self.device is None and self.dtype is None:
            return snapshot(x, is_for_reading=True)
        moved = x.to(device=self.device, dtype=self.dtype if x.is_floating_point() else None)
        if is_narrowed(x, self.dtype) and not moved.is_meta and inside_transform(x) is None:
            self._overflows.append((point.name, overflows(x, moved)))
        return snapshot(x, is_for_reading=True) if moved is x else moved

    def _check_range(self) -> None:
        """Raise if an activation overflowed the dtype of the cache."""
        kept, self._overflows = self._overflows, []
        for name, is_lost in kept:
            if bool(is_lost):
                assert self.dtype is not None
                raise HooklineError(f"{overflow_problem(name, self.dtype)}: pass dtype=torch.bfloat16")


def check_backward(incl_bwd: bool, loss_fn: Any) -> None:
    """Raise if there can be no gradients, or a loss without gradients."""
    if loss_fn is not None and not incl_bwd:
        raise HooklineError("loss_fn says what to differentiate: pass incl_bwd=True with it")
    if loss_fn is not None and not callable(loss_fn):
        raise HooklineError(f"loss_fn must be a function of the output, such as loss_fn=torch.sum, not {loss_fn!r}")
    if incl_bwd and not torch.is_grad_enabled():
        raise HooklineError(
            "incl_bwd=True needs gradients, but they are switched off: leave torch.no_grad() or inference_mode()"
        )


def loss_of(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the number to differentiate: `loss_fn(output)`, or the output or its `loss`."""
    loss: Any
    if loss_fn is not None:
        loss = loss_fn(map_tensors(output, snapshot))  # writing to its argument does not change what the run returns
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else a_type(loss)
        raise HooklineError(
            f"incl_bwd=True needs one number to differentiate, but has {what}: "
            f"pass loss_fn=lambda output: …, or let the model return its loss"
        )
    if not loss.requires_grad:
        raise HooklineError("incl_bwd=True found no gradient path from the loss back to any point")
    return loss.squeeze()


def _note_padding(x: Tensor, span: Any, axes: str) -> None:
    """Note on a tensor which of its rows and positions are padding, as `to_tokens` does on tokens."""
    names = axes.split() or (["b", "p", "d"] if x.ndim == 3 else [])
    place = next((names.index(name) for name in ("p", "k") if name in names), None)
    if names[:1] != ["b"] or place is None or x.ndim != len(names):
        return
    every = span.mask[:, : span.positions.stop]
    mask = every if x.shape[place] == every.shape[1] else every[:, span.positions.start :]
    if (x.shape[0], x.shape[place]) == tuple(mask.shape):
        x.padding_mask = mask  # type: ignore[attr-defined]


def _by_name(log: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for entry, *kept in log:
        if type(entry) is str:
            values.setdefault(entry, []).extend(kept)
        else:
            for name, x in entry(*kept):
                values.setdefault(name, []).append(x)
    return values


def _numbered(values: dict[str, list[Any]]) -> dict[str, Any]:
    """Give each tensor a name: `fc`, or `fc#0`, `fc#1`, … if a module ran several times; None is a call without one."""
    if all(len(calls) == 1 for calls in values.values()):
        return {name: calls[0] for name, calls in values.items() if calls[0] is not None}
    names: dict[str, Any] = {}
    for name, calls in values.items():
        numbered = {name: calls[0]} if len(calls) == 1 else {f"{name}#{call}": x for call, x in enumerate(calls)}
        new = {key: x for key, x in numbered.items() if x is not None}
        _check_apart(new, names)
        names |= new
    return names


def _check_apart(new: Iterable[str], others: Container[str]) -> None:
    for name in new:
        if name in others:
            raise HooklineError(f"two activations would be cached as {name!r}, the name of a module: use two runs")

"""Where the gradient of a point is found: it is that of a tensor of its own that the point sends on.

If the model's code may rely on the memory of the activation, a view of it is sent on, and its gradient is that of the
uses of the view. But once anybody writes to the memory, torch derives all that is read from it afterward from the base
of the view, and gradients bypass the view. The gradient of the point is then that of the base, as it was at the point:
what a tensor hook would get there, which includes the uses of the memory by other names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hookline.engine._memory.aliases import Alias, lead_through
from hookline.engine._memory.snapshots import has_overlaps, inside_transform, is_from_outside, snapshot

OnGradient: TypeAlias = Callable[[Tensor], Tensor | None]

OVERWRITTEN = (
    "the module takes or returns a tensor that the model then writes to in place, so that it has no gradient of its "
    "own; ask for the gradient at another point"
)


class WriteCount:
    """Tells whether anybody wrote to the memory of `x` since; it does not keep the memory alive."""

    def __init__(self, x: Tensor) -> None:
        self._counter = x.detach()  # shares the count of writes with `x`
        self._counter.data = x.new_empty(0)
        self._before = self._counter._version
        self._is_over = False

    def have_happened(self) -> bool:
        """Whether there was a write."""
        return not self._is_over and self._counter._version != self._before

    def stop(self) -> None:
        """Do not count later ones."""
        self._is_over = not self.have_happened()


class _Base(NamedTuple):
    """The tensor of which an activation is a view, or the activation itself, and where the activation is in it."""

    tensor: Tensor
    place: _Place | None


class _Place(NamedTuple):
    """The place of a view in its base."""

    base_size: torch.Size
    base_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def in_base(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return a copy of the gradient of the base, and the part of it that is the view's."""
        whole = grad.new_empty_strided(self.base_size, self.base_stride).copy_(grad)
        return whole, whole.as_strided(self.size, self.stride, self.offset)


class GradientSource(NamedTuple):
    """Where the gradient is found, after every hook, without holding the tensors.

    A backward pass leaves it in `at_base`, with what it computes for `edge`, if the memory was written to.
    """

    edge: Tensor | GradientEdge
    writes: WriteCount | None
    base_edge: Tensor | GradientEdge | None
    at_base: list[Tensor]

    def is_lost(self) -> bool:
        """Whether there is no gradient, because the memory was written to."""
        return self.is_at_base() and self.base_edge is None

    def is_at_base(self) -> bool:
        """Whether the gradient is to be found at the base."""
        return self.writes is not None and self.writes.have_happened()

    def compute_for(self) -> Tensor | GradientEdge:
        """What to compute the gradient of."""
        return self.base_edge if self.base_edge is not None and self.is_at_base() else self.edge

    def gradient(self, computed: Tensor | None) -> Tensor | None:
        """The gradient, from what was computed."""
        return self.at_base.pop() if computed is not None and self.is_at_base() else computed


class SentTensor:
    """A tensor that a point sends on: `out`, made from `mine`, whose gradient is that of the point after every hook."""

    def __init__(self, mine: Tensor, out: Tensor) -> None:
        self.mine, self.out = mine, out
        self.writes: WriteCount | None = None
        self._base: _Base | None = None
        self._hooks: list[OnGradient] = []
        self._at_base: list[Tensor] = []

    @classmethod
    def as_copy(cls, x: Tensor) -> SentTensor:
        """Send on a copy of `x`. The model may write to it; `mine` remains what left the point."""
        mine = snapshot(x)
        if not mine.requires_grad:
            mine.requires_grad_()
        return cls(mine, snapshot(mine))

    @classmethod
    def in_memory_of(cls, x: Tensor) -> SentTensor:
        """Send on a tensor in the memory of `x`."""
        if not x.requires_grad:
            mine = snapshot(x).detach().requires_grad_()
            return cls(mine, Alias.apply(mine, x))
        view = Tensor.view_as if x.is_nested else _same
        mine = view(x, x)
        sent = cls(mine, view(mine, mine))
        if type(x) is Tensor and x.layout is torch.strided and not x.is_nested and inside_transform(x) is None:
            sent.writes, sent._base = WriteCount(x), _base_of(x)
            sent.out._hookline_writes = sent.writes  # type: ignore[attr-defined]
        return sent

    def lead(self, x: Tensor) -> bool:
        """Let the gradient of the tensor object `x` flow through this one from now on, so that writes do not bypass it.

        Returns whether torch allows that.
        """
        if not lead_through(x, self.out):
            return False
        self.writes = self._base = None
        return True

    def register_hook(self, hook: OnGradient) -> None:
        """Call `hook` with the gradient, whenever it is computed, after those that were registered before."""
        self._hooks.append(hook)

    def attach(self) -> None:
        """Let torch call the hooks. What it keeps refers to none of the tensors: they would refer to themselves."""
        hooks, writes = self._hooks, self.writes
        if writes is None:
            if hooks:
                _register_first(self.out, partial(_through, hooks))
            return
        if hooks:
            self.out.register_hook(lambda grad: None if writes.have_happened() else _through(hooks, grad))
        if self._base is not None:
            _register_first(self._base.tensor, partial(_at_base, hooks, writes, self._base.place, self._at_base))

    def source(self) -> GradientSource:
        """Where to find its gradient."""
        base_edge = None if self._base is None else _edge(self._base.tensor)
        return GradientSource(_edge(self.mine), self.writes, base_edge, self._at_base)


def _at_base(
    hooks: list[OnGradient], writes: WriteCount, place: _Place | None, after: list[Tensor], grad: Tensor
) -> Tensor | None:
    """Call hooks with the gradient of a view, which is in that of its base because its memory was written to."""
    if not writes.have_happened():
        return None
    whole, part = (grad, grad) if place is None else place.in_base(grad)
    changed = _through(hooks, part)
    after[:] = [part if changed is None else changed]
    if place is None or changed is None:
        return changed
    part.copy_(changed)
    return whole


def _same(x: Tensor, _like: Tensor) -> Tensor:
    """A view with the strides of `x`: `view_as` makes other ones for axes of length 1, which choose other kernels."""
    alias: Tensor = torch.ops.aten.alias.default(x)
    return alias


def _edge(x: Tensor) -> Tensor | GradientEdge:
    return x if x.grad_fn is None else get_gradient_edge(x)


def _base_of(x: Tensor) -> _Base | None:
    """The base of `x`; None where its gradient does not have the one of `x` in it, or belongs to the caller's graph."""
    base = x if x._base is None else x._base
    if base.grad_fn is None or is_from_outside(x):
        return None
    if x.dtype != base.dtype or base.layout is not torch.strided or has_overlaps(x) or has_overlaps(base):
        return None
    if x is base or (x.shape, x.stride(), x.storage_offset()) == (base.shape, base.stride(), base.storage_offset()):
        return _Base(base, None)
    offset = int(x.storage_offset() - base.storage_offset())
    return _Base(base, _Place(base.shape, base.stride(), x.shape, x.stride(), offset))


def _register_first(x: Tensor, hook: OnGradient) -> None:
    """Call `hook` with the gradient of `x` as it is now, before those of earlier points, which it passes later."""
    node, hooks = getattr(x, "_hookline_hooks", (None, None))
    if hooks is None or node is not x.grad_fn:
        hooks = []
        x._hookline_hooks = x.grad_fn, hooks  # type: ignore[attr-defined]
        x.register_hook(partial(_through, hooks))
    hooks.insert(0, hook)


def _through(hooks: list[OnGradient], grad: Tensor) -> Tensor | None:
    """The gradient after all hooks; None if none of them changed it."""
    changed = None
    for hook in hooks:
        new = hook(grad if changed is None else changed)
        changed = changed if new is None else new
    return changed

"""Lenses that make one activation of the parts that the processes of a sharded model have.

The whole activation is the same in every process. Its gradient is too: reading takes this process's part of it, and
writing collects the parts, so that a metric or an edit that every process computes counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.engine import sharding
from hookline.errors import HooklineError, UnavailablePointError
from hookline.transformer.layout_lenses import Heads, HeadsFirst, Interleaved, Keys, Unflatten

TIMEOUT = timedelta(seconds=60)
"""How long a process waits for the others."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The processes that share an activation, and the sizes of their parts."""

    group: Any
    sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of this process among them."""
        return int(dist.get_rank(self.group))

    @property
    def span(self) -> range:
        """The indices of this process."""
        start = sum(self.sizes[: self.rank])
        return range(start, start + self.sizes[self.rank])

    def own(self, x: Tensor, dim: int) -> Tensor:
        """The part of this process."""
        return x.narrow(dim, self.span.start, len(self.span))

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all processes, one after the other. Called by all of them, in the same order."""
        if x.shape[dim] != self.sizes[self.rank]:
            raise HooklineError(
                f"this process has {x.shape[dim]} of {sum(self.sizes)} columns of an activation, but its plan says "
                f"{self.sizes[self.rank]}: the model is sharded in a way that hookline does not know"
            )
        most = max(self.sizes)
        first = x.movedim(dim, 0)
        if first.shape[0] < most:  # collectives need equal shapes
            first = torch.cat([first, first.new_zeros(most - first.shape[0], *first.shape[1:])])
        first = first.contiguous()
        parts = [torch.empty_like(first) for _ in self.sizes]
        try:
            dist.all_gather(parts, first, group=self.group, async_op=True).wait(TIMEOUT)
        except RuntimeError as error:
            raise HooklineError(
                f"the parts of an activation were not collected: another process has ended, or did not come to the "
                f"same point within {TIMEOUT.seconds} s. On a sharded model every process must do the same thing"
            ) from error
        whole = torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()

    def alone(self, x: Tensor, dim: int) -> Tensor:
        """The part of this process, with zeros in place of those of the others."""
        sizes = [*x.shape]
        parts = [x]
        for ranks in (slice(self.rank), slice(self.rank + 1, None)):
            sizes[dim] = sum(self.sizes[ranks])
            parts.append(x.new_zeros(sizes))
        return torch.cat([parts[1], x, parts[2]], dim)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, dim: int) -> Tensor:
        ctx.shards, ctx.dim = shards, dim
        return shards.whole(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.shards.own(grads[0], ctx.dim), None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, dim: int) -> Tensor:
        ctx.shards, ctx.dim = shards, dim
        # Not a view, as the model may write to it; and contiguous, as a layer's own output is.
        return shards.own(x, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.shards.whole(grads[0], ctx.dim), None, None


@dataclass(frozen=True, slots=True)
class Gathered:
    """An activation whose axis `dim` is split over processes; `blocks` of it are split one by one (packed layers)."""

    shards: Shards
    dim: int = -1
    blocks: int = 1

    def get(self, value: Tensor) -> Tensor:
        parts = value.chunk(self.blocks, self.dim)
        whole = [_Whole.apply(part, self.shards, self.dim) for part in parts]
        return whole[0] if self.blocks == 1 else torch.cat(whole, self.dim)

    def own_part(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[range, ...]]:
        """The lenses behind this one on the part that this process has, and the indices of its heads or columns."""
        width, span = sum(self.shards.sizes), self.shards.span
        first = rest[0] if rest else None
        if first is None or isinstance(first, Unflatten):
            return rest, tuple(range(span.start + at, span.stop + at) for at in range(0, width * self.blocks, width))
        if not isinstance(first, Heads | Interleaved) or self.blocks > 1:
            raise UnavailablePointError("a fused layer is split between processes without regard to heads")
        count = first.n if isinstance(first, Heads) else first.groups
        columns_per_head = width // count
        if span.start % columns_per_head or len(span) % columns_per_head or not span:
            raise UnavailablePointError(f"this process has {len(span)} of {width} columns, which are not whole heads")
        groups = range(span.start // columns_per_head, span.stop // columns_per_head)
        if isinstance(first, Heads):
            return (Heads(len(groups)), *rest[1:]), (groups,)
        per_group = first.heads // count
        heads = range(groups.start * per_group, groups.stop * per_group)
        return (replace(first, groups=len(groups), heads=len(heads)), *rest[1:]), (heads,)

    def stand_in(self, value: Tensor) -> Tensor:
        """What `put` of the next lens sees in place of the whole: only this process's part of its result is used."""
        return torch.cat([self.shards.alone(part, self.dim) for part in value.chunk(self.blocks, self.dim)], self.dim)

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        parts = [_Own.apply(part, self.shards, self.dim) for part in tensor.chunk(self.blocks, self.dim)]
        return parts[0] if self.blocks == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True, slots=True)
class GatheredHeads:
    """Queries, keys, scores or patterns of the heads that this process has, `b h p e`: those of all heads."""

    group: Any

    def get(self, value: Tensor) -> Tensor:
        return Gathered(self._shards(value), 1).get(value)

    def own_part(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[range, ...]]:
        """The lenses behind this one on the heads that this process has, and their indices."""
        first: HeadsFirst | Keys = rest[0]
        rank, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        if isinstance(first, HeadsFirst):
            head_count = first.n // count
            lens: Any = HeadsFirst(head_count)
        else:
            head_count = first.heads // count
            lens = Keys(head_count, tuple(sharding.own_site(site)[0] for site in first.keys))
        return (lens, *rest[1:]), (range(rank * head_count, rank * head_count + head_count),)

    def stand_in(self, value: Tensor) -> Tensor:
        return Gathered(self._shards(value), 1).stand_in(value)

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        return Gathered(self._shards(value), 1).put(value, tensor)

    def _shards(self, value: Tensor) -> Shards:
        if value.ndim != 4:
            raise HooklineError(f"attention of shape {list(value.shape)} on a sharded model is not supported")
        return Shards(self.group, (value.shape[1],) * dist.get_world_size(self.group))


def whole_parameter(parameter: Any) -> Tensor:
    """A parameter as a plain tensor; of a sharded one, the parts of all processes, which all must ask for."""
    full: Any = getattr(parameter, "full_tensor", None)
    if full is None:
        return parameter
    (place,) = parameter.placements
    if type(place).__name__ != "Shard":  # replicated, or in several blocks
        return full().detach()
    group = parameter.device_mesh.get_group()
    shards = Shards(group, part_sizes(parameter.shape[place.dim], dist.get_world_size(group)))
    return shards.whole(parameter.to_local().detach(), place.dim)


def part_sizes(width: int, count: int) -> tuple[int, ...]:
    """The widths of the parts of all processes; the last ones may be shorter, or empty."""
    sizes = [len(part) for part in torch.arange(width).chunk(count)]
    return (*sizes, *[0] * (count - len(sizes)))

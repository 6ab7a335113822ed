"""Lenses that make one activation of the parts that the processes of a sharded model have.

The whole activation is the same in every process. Its gradient is too: reading takes this process's part of it, and
writing collects the parts, so that a metric or an edit that every process computes counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.errors import HooklineError

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

    def own(self, x: Tensor, dim: int) -> Tensor:
        """The part of this process."""
        return x.narrow(dim, sum(self.sizes[: self.rank]), self.sizes[self.rank])

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
        dist.all_gather(parts, first, group=self.group, async_op=True).wait(TIMEOUT)
        whole = torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()


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

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        own = [_Own.apply(part, self.shards, self.dim) for part in tensor.chunk(self.blocks, self.dim)]
        return own[0] if self.blocks == 1 else torch.cat(own, self.dim)


@dataclass(frozen=True, slots=True)
class GatheredHeads:
    """Queries, keys, scores or patterns of the heads that this process has, `b h p e`: those of all heads."""

    group: Any

    def get(self, value: Tensor) -> Tensor:
        return Gathered(self._shards(value), 1).get(value)

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        return Gathered(self._shards(value), 1).put(value, tensor)

    def _shards(self, value: Tensor) -> Shards:
        if value.ndim != 4:
            raise HooklineError(f"attention of shape {list(value.shape)} on a sharded model is not supported")
        return Shards(self.group, (value.shape[1],) * dist.get_world_size(self.group))


def whole_parameter(parameter: Any) -> Tensor:
    """A parameter as a plain tensor; of a sharded one, the parts of all processes, which all must ask for."""
    full: Any = getattr(parameter, "full_tensor", None)
    return parameter if full is None else full().detach()

"""Workers: which of many processes that harvest together this one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import Any

from hookline.errors import HooklineError
from hookline.store.examples import PASS_TOKENS, BatchSize


@dataclass(frozen=True)
class HarvestWorker:
    """One of many processes that harvest into one store: `harvest(…, shard=HarvestWorker(rank, world, lease=300))`.

    `rank` and `world` say with which units of work it begins; it then does those that nobody else does. A unit has
    `unit` batches: by default a 64th of the data set, at most 32, and 32 if its length is unknown. A worker whose
    `lease` has not been renewed for that many seconds is taken for dead.
    """

    rank: int
    world: int
    unit: int | None = None
    lease: float = 60.0

    def __post_init__(self) -> None:
        numbers = [self.rank, self.world, 1 if self.unit is None else self.unit]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise HooklineError(f"shard=(rank, world) takes two integers, and unit is an integer, not {self}")
        is_time = isinstance(self.lease, int | float) and 0 < self.lease <= TIMEOUT_MAX
        if not 0 <= self.rank < self.world or numbers[2] < 1 or not is_time:
            raise HooklineError(
                f"shard=(rank, world) needs 0 <= rank < world, unit a positive number of batches, and lease a positive "
                f"number of seconds, not {self}"
            )

    def batches_per_unit(self, examples: int | None, batch_size: BatchSize) -> int:
        """How many batches a unit has, for a new store."""
        if self.unit is not None:
            return self.unit
        size = PASS_TOKENS // 128 if batch_size == "auto" else batch_size  # about as many texts of a paragraph
        return MOST if examples is None else min(MOST, max(1, examples // size // UNITS))


MOST, UNITS = 32, 64
"""A unit has this many batches at most, and a data set of known length about this many units at least."""


def worker_of(shard: Any, team: int = 1) -> HarvestWorker | None:
    """The worker that `shard` describes; without it, the one of the environment. None for (0, 1), the only one.

    `team` is the number of processes that run one sharded model together: these are one worker.
    """
    if isinstance(shard, HarvestWorker):
        return shard
    if shard is None:
        shard = environment(os.environ, team)
    try:
        rank, world = shard
    except (TypeError, ValueError):
        raise HooklineError(f"shard is (rank, world) or a hookline.store.HarvestWorker, not {shard!r}") from None
    worker = HarvestWorker(rank, world)
    return worker if world > 1 else None


def environment(variables: Mapping[str, str], team: int = 1) -> tuple[int, int]:
    """The rank and the number of workers by the variables of torchrun or Slurm, and of an array of such jobs."""

    def number(name: str) -> int:
        try:
            return int(variables.get(name, 0))
        except ValueError:
            raise HooklineError(
                f"the environment has {name}={variables[name]!r}, which is not an integer: pass shard=(rank, world)"
            ) from None

    launched = ("RANK", "WORLD_SIZE") if "WORLD_SIZE" in variables else ("SLURM_PROCID", "SLURM_NTASKS")
    world = max(1, number(launched[1]) // team)
    rank = number(launched[0]) // team % world
    jobs = max(1, number("SLURM_ARRAY_TASK_COUNT"))
    # The indices of an array may have gaps; two workers that begin with the same units are no harm.
    job = (number("SLURM_ARRAY_TASK_ID") - number("SLURM_ARRAY_TASK_MIN")) % jobs
    return job * world + rank, jobs * world

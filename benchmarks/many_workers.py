"""The speed of a harvest by several workers relative to one, and what leases and units cost a single worker.

    python benchmarks/many_workers.py                  # one and two processes, each with one thread
    python benchmarks/many_workers.py --workers 4
    python benchmarks/many_workers.py --smoke          # one quick round, to check that it runs

Each worker is a process of its own with one thread, which loads nothing during the measurement: all begin at the same
moment, and the time ends when the last one has returned a complete store. `plain` is a harvest without units. The
rounds alternate, because other work on the machine disturbs them. The time of cores, of all workers together, is not
disturbed as much: if it stays the same, two workers on two free cores are twice as fast as one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import multiprocessing

import hookline
from hookline.store import HarvestWorker, LocalStore


def harvest(model: hookline.HookedModel, tokens: torch.Tensor, folder: Path, shard: HarvestWorker | None) -> None:
    """Store two points of the residual stream."""
    points = ["blocks.0.hook_resid_post", f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
    options: dict[str, Any] = {"batch_size": 4, "dtype": torch.bfloat16, "progress": False}
    hookline.harvest(model, tokens, points, folder, shard=shard, **options)


def work(rank: int, smoke: bool, barrier: Any, orders: Any, answers: Any) -> None:
    """Be a worker: harvest whenever told to, and report the time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    size = {"n_layer": 2, "n_embd": 64, "n_head": 4} if smoke else {"n_layer": 4, "n_embd": 256, "n_head": 4}
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=1000, **size)).eval()
    model = hookline.hook(module)
    tokens = torch.randint(0, 1000, (16 if smoke else 128, 128))
    answers.put(rank)
    while (order := orders.get()) is not None:
        folder, world, is_plain = order
        barrier.wait()
        start, cpu = time.time(), time.process_time()
        if rank < world:
            harvest(model, tokens, Path(folder), None if is_plain else HarvestWorker(rank, world))
        answers.put((start, time.time(), time.process_time() - cpu) if rank < world else None)


def seconds(folder: Path, world: int, is_plain: bool, orders: Sequence[Any], answers: Any) -> tuple[float, float]:
    """Return the time of one harvest by so many workers, and the time of cores that all of them have used."""
    for each in orders:
        each.put((str(folder), world, is_plain))
    times = [found for found in (answers.get() for _ in orders) if found is not None]
    assert LocalStore(folder).is_complete
    shutil.rmtree(folder)
    return max(stop for _, stop, _ in times) - min(start for start, _, _ in times), sum(cpu for _, _, cpu in times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="one quick round with a tiny model")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(options.workers), context.SimpleQueue()
    orders = [context.SimpleQueue() for _ in range(options.workers)]
    arguments = [(rank, options.smoke, barrier, orders[rank], answers) for rank in range(options.workers)]
    processes = [context.Process(target=work, args=each) for each in arguments]
    for each in processes:
        each.start()
    for _ in processes:
        answers.get()
    kinds = {"plain": (1, True), "1 worker": (1, False), f"{options.workers} workers": (options.workers, False)}
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {name: seconds(Path(folder, "store"), *kind, orders, answers) for name, kind in kinds.items()}
            for _ in range(rounds)
        ]
    for order in orders:
        order.put(None)
    for name in kinds:
        ratio = sorted(row["1 worker"][0] / row[name][0] for row in rows)
        middle, cores = (statistics.median(row[name][which] for row in rows) for which in (0, 1))
        speed = f"{statistics.median(ratio):5.2f} × the speed of one worker ({ratio[0]:.2f} to {ratio[-1]:.2f})"
        print(f"{name:<12} {middle:6.2f} s   {speed}   {cores:6.2f} s of cores")


if __name__ == "__main__":
    main()

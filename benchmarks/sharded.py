"""The cost of hooks on a model that is sharded over two processes, relative to its forward pass without hooks.

    python benchmarks/sharded.py                # the table: about two minutes on two cores
    python benchmarks/sharded.py --smoke        # one quick round, to check that it runs

The processes are on this machine, and communicate by gloo. All rows are timed in turn, for several rounds, and the
table has medians. Needs accelerate: hookline[distributed].
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import hookline

SIZES = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def ways(model: hookline.HookedModel, tokens: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; the first is the forward pass itself."""
    z, stream = "blocks.4.attn.hook_z", "blocks.4.hook_resid_post"
    every = "blocks.*.attn.hook_z"
    return {
        "forward pass": lambda: model(tokens),
        "cache of one whole point (resid_post)": lambda: model.run_with_cache(tokens, names_filter=stream),
        "cache of one gathered point (z)": lambda: model.run_with_cache(tokens, names_filter=z),
        "the same, local=True": lambda: model.run_with_cache(tokens, names_filter=z, local=True),
        "cache of z of all 8 layers": lambda: model.run_with_cache(tokens, names_filter=every),
        "the same, local=True ": lambda: model.run_with_cache(tokens, names_filter=every, local=True),
        "edit of one whole point": lambda: model.run_with_hooks(tokens, fwd_hooks=[(stream, _half)]),
        "edit of one gathered point": lambda: model.run_with_hooks(tokens, fwd_hooks=[(z, _half)]),
        "full cache": lambda: model.run_with_cache(tokens),
        "full cache, local=True": lambda: model.run_with_cache(tokens, local=True),
    }


def _half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@torch.no_grad()
def work(rank: int, port: int, folder: str, rounds: int, length: int) -> None:
    """What each process does; the first one prints the table."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 0:
        LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(Path(folder))
    dist.barrier()
    config = DistributedConfig(tp_plan="auto", tp_size=2)
    model = hookline.hook(LlamaForCausalLM.from_pretrained(folder, distributed_config=config).eval())
    tokens = torch.randint(2000, (4, length), generator=torch.Generator().manual_seed(0))  # the same in both
    timed = ways(model, tokens)
    times: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, way in timed.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        bare = times["forward pass"]
        print(f"Llama, 8 layers, d_model 512, 8 heads; 4 × {length} tokens; two processes of one thread each\n")
        print(f"| | median, ms | relative to the forward pass, median of {rounds} rounds |\n|---|---|---|")
        for name, each in times.items():
            ratio = statistics.median(one / other for one, other in zip(each, bare, strict=True))
            print(f"| {name.strip()} | {1000 * statistics.median(each):.0f} | {ratio:.2f} |")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rounds, length = (1, 16) if given.smoke else (15, 128)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (port, folder, rounds, length), nprocs=2)


if __name__ == "__main__":
    main()

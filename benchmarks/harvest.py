"""The speed of a harvest relative to the forward pass on the same batches, and its memory.

    python benchmarks/harvest.py                                     # GPT-2 small's shape, on the CPU
    python benchmarks/harvest.py --device cuda --shape llama_1b      # a Llama shape with 1.2 B parameters, bf16
    python benchmarks/harvest.py --smoke                             # one quick round, to check that it runs

Four points of the residual stream are stored as bf16. The plain forward pass and the harvest alternate, for several
rounds. A harvest does not compute logits, so there is a second, stricter ratio: to the forward pass without the head.
With `batch_size="auto"` a harvest makes larger passes of short texts than the plain model is given here.
The first harvest of a process is reported separately, because on a GPU it pins memory. Deleting files is not timed.
What a harvest costs once (comparing the weights, writing the last shard) is reported too: the time for one batch.

The memory is the peak of the process relative to its memory after the model's first batch, for a dataset and for one
that is four times as long. It is also reported for the plain forward pass, because its activations are not a cost of
storing. (After a harvest on a GPU, torch keeps the pinned memory, so it is included in the plain pass too.)
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import transformers
from timing import seconds
from torch import Tensor

import hookline


def gpt2_small() -> transformers.PreTrainedConfig:
    """124 M parameters."""
    return transformers.GPT2Config()


def llama_1b() -> transformers.PreTrainedConfig:
    """1.2 B parameters: the shape of Llama 3.2 1B."""
    return transformers.LlamaConfig(
        **{"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
        tie_word_embeddings=True,
    )


def tiny() -> transformers.PreTrainedConfig:
    """For the smoke test."""
    return transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=1000)


SHAPES = {make.__name__: make for make in (gpt2_small, llama_1b, tiny)}


def points_of(model: hookline.HookedModel) -> list[str]:
    """Return the residual stream after each quarter of the layers."""
    layers = model.cfg.n_layers
    return [f"blocks.{layers * quarter // 4 - 1}.hook_resid_post" for quarter in (1, 2, 3, 4)]


@torch.no_grad()
def forward(module: Callable[[Tensor], object], batches: Iterable[Tensor], device: str) -> None:
    """Run the plain forward pass on every batch."""
    for batch in batches:
        module(batch.to(device))


def peak(work: Callable[[], object], base: int) -> int:
    """Return the peak memory of the process during `work`, in bytes above `base` (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    work()
    return _status("VmHWM") - base


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2_small")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batches", type=int, help="by default as many as make 65,536 tokens on a GPU, and 8 on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shard-mb", type=int, default=128)
    parser.add_argument("--store", help="the folder for stores; the system's temporary folder by default")
    parser.add_argument("--no-memory", action="store_true", help="measure only the speed")
    parser.add_argument("--smoke", action="store_true", help="one quick round with a tiny model")
    options = parser.parse_args()
    if options.batches is None:
        options.batches = max(8, 65536 // (options.batch * options.length)) if options.device == "cuda" else 8
    if options.smoke:
        options.shape, options.rounds, options.batches = "tiny", 1, 2
    with tempfile.TemporaryDirectory(dir=options.store) as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Load the model, and measure."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        module = transformers.AutoModelForCausalLM.from_config(SHAPES[options.shape](), dtype=dtype).eval()
    model = hookline.hook(module)
    points = points_of(model)
    tokens = torch.randint(0, 1000, (options.batches * options.batch, options.length))
    names = iter(range(10**6))

    def harvest(data: Tensor = tokens, batch_size: int | Literal["auto"] = options.batch) -> None:
        hookline.harvest(
            *(model, data, points, folder / str(next(names))),
            **{
                "dtype": torch.bfloat16,
                "batch_size": batch_size,
                "shard_bytes": options.shard_mb * 2**20,
                "progress": False,
            },
        )

    def bare(data: Tensor = tokens) -> None:
        forward(module, data.split(options.batch), options.device)

    def headless() -> None:
        forward(module.base_model, tokens.split(options.batch), options.device)

    def timed(work: Callable[[], object]) -> float:
        found = seconds(work)
        emptied(folder)
        return found

    bare(tokens[: options.batch])
    base = _status("VmRSS")
    works = {"bare": bare, "no head": headless, "harvest": harvest, "auto": partial(harvest, batch_size="auto")}
    first = {name: timed(work) for name, work in works.items()}
    times = [{name: timed(work) for name, work in works.items()} for _ in range(options.rounds)]
    harvested = statistics.median(each["harvest"] for each in times)
    stored = tokens.numel() * len(points) * model.cfg.d_model * torch.bfloat16.itemsize
    threads = f"{torch.get_num_threads()} threads" if options.device == "cpu" else torch.cuda.get_device_name()
    size = f"{options.batches} batches of {options.batch}×{options.length} tokens"
    print(f"{options.shape}, {size}, torch {torch.__version__}, {threads}; {len(points)} points as bf16")
    rates = f"{tokens.numel() / harvested:,.0f} tokens/s, {stored / harvested / 1e9:.2f} GB/s"
    print(f"harvest                        {rates}")
    ratios = [
        *(("bare", "harvest", "the plain forward pass"), ("no head", "harvest", "the forward pass without the head")),
        ("bare", "auto", "the first, with batch_size='auto'"),
    ]
    for name, over, what in ratios:
        found = sorted(each[name] / each[over] for each in times)
        print(f"relative to {what:<34} {statistics.median(found):5.2f}   (rounds: {found[0]:.2f} to {found[-1]:.2f})")
    once = statistics.median(timed(partial(harvest, tokens[: options.batch])) for _ in range(options.rounds))
    print(f"{'a harvest of one batch, which is mostly what a harvest costs once':<66} {1e3 * once:,.0f} ms")
    bare_time = statistics.median(each["bare"] for each in times)
    print(f"{'first harvest, rel. to the forward pass':<46} {bare_time / first['harvest']:5.2f}")
    if options.no_memory:
        return
    longer = torch.randint(0, 1000, (4 * len(tokens), options.length))
    for what, data in (("this data", tokens), ("four times the data", longer)):
        most = []
        for name, work in (("bare", bare), ("harvest", harvest)):
            most.append(f"{name} {peak(partial(work, data), base) / 1e6:,.0f} MB")
            emptied(folder)
        print(f"peak memory, {what:<20} {', '.join(most)}")


def emptied(folder: Path) -> None:
    """Delete the stores in a folder."""
    for store in folder.iterdir():
        shutil.rmtree(store)


if __name__ == "__main__":
    main()

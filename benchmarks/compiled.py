"""Compiled decoding with hooks on: tokens per second, beside the memory bandwidth and other ways to decode.

    python benchmarks/compiled.py --shape llama_8b --device cuda
    python benchmarks/compiled.py --shape tiny --device cpu --backend aot_eager

A model of that shape with random weights, one process, the ways in turn. Every residual stream is read, one vector is
added and one head is disabled. The limit is the weights that a token needs, over the measured bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from timing import seconds
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline.edits import add, zero

SHAPES: dict[str, dict[str, int]] = {
    "llama_8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama_1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
}
VOCAB = {"llama_8b": 128256, "llama_1b": 128256, "tiny": 512}


def build(shape: str, device: str) -> Any:
    """A model of that shape with random weights."""
    more = {"num_key_value_heads": 8, "vocab_size": VOCAB[shape], "max_position_embeddings": 8192}
    config = LlamaConfig(**SHAPES[shape], **more, dtype="bfloat16" if device == "cuda" else "float32")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None  # every way writes the same number of tokens
    model.generation_config.pad_token_id = 0
    return model


def bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(2**31 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * source.numel() / min(times)


class Bench:
    """The ways to decode, and their times."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.module = build(args.shape, args.device)
        self.model = hookline.hook(self.module)
        self.ids = torch.randint(3, VOCAB[args.shape], (1, args.prompt), device=args.device)
        layers = self.module.config.num_hidden_layers
        self.vector = torch.randn(self.module.config.hidden_size, device=args.device)
        self.places = f"blocks.{layers // 2}.hook_resid_post", f"blocks.{layers // 2 - 1}.attn.hook_z"

    def hooks(self, coefficient: float = 0.1, head: int = 3, vector: Any = None) -> list[Any]:
        """One vector added, one head off."""
        return [
            (self.places[0], add(self.vector if vector is None else vector, coefficient)),
            (self.places[1], zero(head=head)),
        ]

    def bare(self, new: int) -> None:
        """Without hooks."""
        self.model.generate(self.ids, max_new_tokens=new, do_sample=False)

    def hooked(self, new: int) -> None:
        """With the hooks, reading every residual stream."""
        with self.model.hooks(self.hooks()):
            self.model.generate_with_cache(
                self.ids, max_new_tokens=new, names_filter="blocks.*.hook_resid_post", do_sample=False
            )

    def run(self) -> None:
        """Print the table."""
        args, new = self.args, self.args.new
        embedding = self.module.get_input_embeddings().weight
        weights = sum(each.numel() * each.element_size() for each in self.module.parameters())
        weights -= embedding.numel() * embedding.element_size()  # of the embedding, a token needs one row
        limit = bandwidth(self.device) / weights
        print(f"{args.shape}, {args.prompt} + {new} tokens, {torch.__version__}, {self.device}")
        print(f"weights {weights / 1e9:.2f} GB, copy {limit * weights / 1e12:.2f} TB/s, limit {limit:.0f} tokens/s")
        few = min(new, args.eager)
        self.hooked(2)
        eager = statistics.median(self.rate(self.hooked, few) for _ in range(2))
        bare = statistics.median(self.rate(self.bare, few) for _ in range(2))
        options = {name: value for name in ("backend", "mode") if (value := getattr(args, name)) is not None}
        runs = self.model.compile(**options)
        first = seconds(lambda: self.bare(new)), seconds(lambda: self.hooked(new))
        rates: list[tuple[float, ...]] = []
        for _ in range(args.rounds):
            rates.append(tuple(self.rate(way, new) for way in (self.bare, self.hooked)))
            rates[-1] += tuple(self.rate(way, new, is_alone=True) for way in (self.bare, self.hooked))
        fast, steered, fast_alone, steered_alone = (statistics.median(each) for each in zip(*rates, strict=True))
        print(runs)
        print(f"{'way':44} tokens/s  of the limit")
        for name, rate in (
            (f"eager, no hooks ({few} new tokens)", bare),
            (f"eager, reads + add + head off ({few} new tokens)", eager),
            ("compiled, no hooks", fast),
            ("compiled, reads + add + head off", steered),
            ("compiled, no hooks, without the prompt", fast_alone),
            ("compiled, hooks as above, without the prompt", steered_alone),
        ):
            print(f"{name:44} {rate:8.1f}  {rate / limit:.2f}")
        print(f"hooks on / off, compiled: {steered / fast:.3f}; compiled / eager, hooked: {steered / eager:.1f} x")
        print(f"first call: {first[0]:.1f} s without hooks, {first[1]:.1f} s with them")
        self.changes(runs)
        self.batch(runs)

    def rate(self, way: Callable[[int], None], new: int, *, is_alone: bool = False) -> float:
        """New tokens per second, with the time of the prompt's pass; alone, of the new tokens that are run."""
        if not is_alone:
            return new / seconds(lambda: way(new))
        return (new - 1) / (seconds(lambda: way(new)) - seconds(lambda: way(1)))

    def changes(self, runs: Any) -> None:
        """200 changes of values."""
        before = runs.graphs
        for index in range(200):
            vector = torch.randn_like(self.vector)
            with self.model.hooks(self.hooks(index / 100, index % self.module.config.num_attention_heads, vector)):
                self.model.generate_with_cache(
                    self.ids, max_new_tokens=3, names_filter="blocks.*.hook_resid_post", do_sample=False
                )
        print(f"200 changes of vector, coefficient and head: {runs.graphs - before} compilations")

    def batch(self, runs: Any) -> None:
        """A batch, beside transformers' own compiled generate."""
        rows = self.args.batch
        if not rows:
            return
        ids = self.ids.repeat(rows, 1)
        vector = self.hooks()
        mask = torch.ones_like(ids)

        def ours() -> None:
            with self.model.hooks(vector):
                self.model.generate(ids, max_new_tokens=self.args.new, do_sample=False)

        def theirs() -> None:
            self.module.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=self.args.new,
                do_sample=False,
                cache_implementation="static",
            )

        ways = [("hookline, add + head off", ours), ("transformers' own, static cache", theirs)]
        for name, way in ways if self.args.theirs else ways[:1]:
            first = seconds(way)
            times = [seconds(way) for _ in range(self.args.rounds)]
            rate = rows * self.args.new / statistics.median(times)
            print(f"batch {rows}, {name}: {rate:.0f} tokens/s (first call {first:.1f} s)")
        gc.collect()
        print(runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--mode", default=None, help='of torch.compile, such as "max-autotune"')
    parser.add_argument("--theirs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--eager", type=int, default=48, help="new tokens of the eager ways")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    torch.set_num_threads(1)
    Bench(parser.parse_args()).run()

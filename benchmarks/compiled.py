"""Compiled decoding with hooks on: tokens per second, beside the memory bandwidth and other ways to decode.

    python benchmarks/compiled.py --shape llama_8b --device cuda
    python benchmarks/compiled.py --shape tiny --device cpu --backend aot_eager
    python benchmarks/compiled.py --shape llama_1b --device cuda --sweeps      # experiments and harvests instead
    python benchmarks/compiled.py --shape small --device cpu --sweeps --rounds 5

A model of that shape with random weights, one process, the ways in turn. Every residual stream is read, one vector is
added and one head is disabled. The limit is the weights that a token needs, over the measured bandwidth of a copy.

With `--sweeps`: patching sweeps, an ablation, a sweep of steering vectors, steered generations and a harvest,
uncompiled and compiled in turn on the same weights. A ratio above 1 means that compiled is faster.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import seconds
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline.edits import add, zero
from hookline.experiments import ablation, patching, steering

SHAPES: dict[str, dict[str, int]] = {
    "llama_8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama_1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "small": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
}
VOCAB = {"llama_8b": 128256, "llama_1b": 128256, "small": 32000, "tiny": 512}


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


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `model.compile`."""
    tuned = {"triton.cudagraphs": True, "combo_kernels": True} if args.tuned else None
    given = {"backend": args.backend, "mode": args.mode, "options": tuned}
    return {name: value for name, value in given.items() if value is not None}


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
        runs = self.model.compile(**compile_options(args))
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


class Experiments:
    """Sweeps, steering and harvests of one model, uncompiled and compiled."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.stores = args, folder, itertools.count()
        module = build(args.shape, args.device)
        self.models = hookline.hook(module), hookline.hook(module)
        self.runs = self.models[1].compile(**compile_options(args), patience=0)
        size = args.pairs, args.length
        self.clean, self.corrupted = (torch.randint(3, VOCAB[args.shape], size, device=args.device) for _ in range(2))
        self.data = torch.randint(3, VOCAB[args.shape], (args.batches * args.harvest_batch, args.harvest_length))
        layers, width = module.config.num_hidden_layers, module.config.hidden_size
        self.vectors = steering.Directions(torch.randn(layers, width, device=args.device), list(range(layers)))
        self.middle = f"blocks.{layers // 2}.hook_resid_post"
        self.quarters = [f"blocks.{layers * quarter // 4 - 1}.hook_resid_post" for quarter in (2, 3, 4)]

    def residual(self, model: Any) -> Any:
        """Layers × positions."""
        return patching.sweep(model, self.clean, self.corrupted, difference, progress=False).values

    def heads(self, model: Any) -> Any:
        """Layers × heads."""
        over = ("layer", "head")
        return patching.sweep(
            model, self.clean, self.corrupted, difference, points="z", over=over, progress=False
        ).values

    def ablated(self, model: Any) -> Any:
        """Each head ablated to zero."""
        return ablation.ablate(model, self.clean, difference, progress=False).values

    def steered(self, model: Any) -> Any:
        """Layers × coefficients."""
        return steering.sweep_layers(model, self.vectors, self.clean, difference, progress=False).values

    def written(self, model: Any) -> Any:
        """Generations with a vector, four coefficients."""
        found = []
        for coefficient in (0.0, 0.1, 0.2, 0.3):
            with model.hooks([(self.middle, add(self.vectors.vectors[0], coefficient))]):
                found.append(model.generate(self.clean[:1], max_new_tokens=self.args.new, do_sample=False))
        return torch.stack(found).float()

    def harvested(self, model: Any) -> Any:
        """Three points of the residual stream."""
        size = self.args.harvest_batch
        where = self.folder / str(next(self.stores))
        store = hookline.harvest(model, self.data, self.quarters, where, batch_size=size, progress=False)
        found = store[self.quarters[-1]][:64].float()
        shutil.rmtree(where)
        return found

    def run(self) -> None:
        """Print the table."""
        args = self.args
        print(f"{args.shape}, {torch.__version__}, {args.device}; {args.pairs} prompts of {args.length} tokens; "
              f"{args.batches} batches of {args.harvest_batch} x {args.harvest_length}")  # fmt: skip
        print(f"{'what':40} eager s  compiled s  ratio (rounds)       differ by  graphs  first s")
        for work in (self.residual, self.heads, self.ablated, self.steered, self.written, self.harvested):
            before = self.runs.graphs
            expected = work(self.models[0])
            first = seconds(lambda work=work: work(self.models[1]))  # type: ignore[misc]
            first += seconds(lambda work=work: work(self.models[1]))  # type: ignore[misc]
            found = work(self.models[1])
            apart = float((found - expected).norm() / expected.norm())
            times = [
                [seconds(lambda work=work, model=model: work(model)) for model in self.models]  # type: ignore[misc]
                for _ in range(args.rounds)
            ]
            ratios = sorted(eager / fast for eager, fast in times)
            eager, fast = (statistics.median(each) for each in zip(*times, strict=True))
            graphs = self.runs.graphs - before
            print(f"{(work.__doc__ or '').rstrip('.'):40} {eager:7.3f}  {fast:10.3f}  {statistics.median(ratios):5.2f} "
                  f"({ratios[0]:.2f} to {ratios[-1]:.2f})  {apart:9.1e}  {graphs:6}  {first:7.1f}")  # fmt: skip
        print(self.runs)


def difference(logits: torch.Tensor) -> torch.Tensor:
    """The difference of two logits at the last position."""
    return logits[:, -1, 5] - logits[:, -1, 6]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--mode", default=None, help='of torch.compile, such as "max-autotune"')
    parser.add_argument("--tuned", action="store_true", help="let inductor combine small kernels")
    parser.add_argument("--theirs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--eager", type=int, default=48, help="new tokens of the eager ways")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sweeps", action="store_true", help="experiments and harvests, instead of decoding")
    parser.add_argument("--pairs", type=int, default=8, help="prompts of a sweep")
    parser.add_argument("--length", type=int, default=16, help="tokens of such a prompt")
    parser.add_argument("--batches", type=int, default=12, help="of a harvest")
    parser.add_argument("--harvest-batch", type=int, default=8, help="texts in a batch of a harvest")
    parser.add_argument("--harvest-length", type=int, default=128, help="tokens of such a text")
    torch.set_num_threads(1)
    given = parser.parse_args()
    if given.sweeps:
        with tempfile.TemporaryDirectory() as folder:
            Experiments(given, Path(folder)).run()
    else:
        Bench(given).run()

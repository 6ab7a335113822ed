"""The cost of one cell of a sweep, relative to one forward pass of the plain transformers model in the same run.

    python benchmarks/sweeps.py                 # the table: about ten minutes on two cores
    python benchmarks/sweeps.py --smoke         # one quick round, to check that it runs
    python benchmarks/sweeps.py --device cuda --shapes llama_1b

If transformer-lens 3.5 is installed, its own functions are included in the table, and results are compared.
`floor` is a lower bound: the time of the multiply-adds that a cell needs, at the speed of matrix products.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from model_overhead import small_gpt2, small_llama, tiny_gpt2, tiny_llama
from timing import seconds
from torch import Tensor

import hookline
from hookline.experiments import attribution, patching


def llama_1b() -> transformers.PreTrainedModel:
    """A Llama of 1.2 billion parameters, 16 layers."""
    config = transformers.LlamaConfig(
        num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


SHAPES = {
    "tiny_gpt2": tiny_gpt2, "tiny_llama": tiny_llama, "small_gpt2": small_gpt2, "small_llama": small_llama,
    "llama_1b": llama_1b,
}  # fmt: skip


def metric(logits: Tensor) -> Tensor:
    """Return the logit difference of two tokens at the last position."""
    return (logits[:, -1, 5] - logits[:, -1, 6]).mean()


class Bench:
    """A model, a clean and a corrupted text that differ at every position, and the sweeps to time."""

    def __init__(self, module: transformers.PreTrainedModel, length: int, device: str) -> None:
        self.module, self.device = module.to(device), device
        self.model = hookline.hook(self.module)
        vocab = self.model.cfg.d_vocab
        self.clean, self.corrupted = (torch.randint(vocab, (1, length), device=device) for _ in range(2))
        names = ["blocks.*.hook_resid_pre", "blocks.*.attn.hook_z"]
        self.cache = self.model.run_with_cache(self.clean, names_filter=names)[1]

    def bare(self) -> object:
        """Run one forward pass."""
        with torch.no_grad():
            return self.module(self.corrupted)

    def residual(self) -> Tensor:
        """Sweep over the residual stream at each layer and position."""
        return patching.sweep(self.model, self.cache, self.corrupted, metric, progress=False).values

    def heads(self) -> Tensor:
        """Sweep over heads, at all positions together."""
        over = ("layer", "head")
        return patching.sweep(self.model, self.cache, self.corrupted, metric, points="z", over=over).values

    def attribution(self) -> Tensor:
        """Estimate the whole residual sweep by attribution patching."""
        return attribution.attribution_patching(self.model, self.clean, self.corrupted, metric, check=0).values

    def one_by_one(self, cells: int) -> Tensor:
        """Compute some cells of the residual sweep with a hook and a full forward pass each."""
        layers, length = self.model.cfg.n_layers, self.corrupted.shape[1]
        values = []
        for number in range(cells):
            layer, pos = number * 7 % layers, number * 5 % length
            module = self.model.point(f"blocks.{layer}.hook_resid_pre").site.module
            values.append(self._patched(module, self.cache["resid_pre", layer][0, pos], pos))
        return torch.stack(values)

    def _patched(self, module: torch.nn.Module, value: Tensor, pos: int) -> Tensor:
        def patch(_module: object, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> object:
            new = args[0].clone()
            new[:, pos] = value
            return (new, *args[1:]), kwargs

        handle = module.register_forward_pre_hook(patch, with_kwargs=True)
        try:
            with torch.no_grad():
                return metric(self.module(self.corrupted).logits)
        finally:
            handle.remove()

    def check(self) -> float:
        """Return the largest difference between the sweep and full runs, on some cells."""
        layers, length = self.model.cfg.n_layers, self.corrupted.shape[1]
        swept, cells = self.residual(), min(24, layers * length)
        some = torch.stack([swept[number * 7 % layers, number * 5 % length] for number in range(cells)])
        return float((some - self.one_by_one(cells).cpu().float()).abs().max())

    def floors(self, rate: float) -> dict[str, float]:
        """Return a lower bound of the time of a cell, in seconds, at a given rate of multiply-adds."""
        cfg, length = self.model.cfg, self.corrupted.shape[1]
        gated = f"{'blocks'}.0.mlp.hook_pre_linear" in self.model.hook_dict
        mlp = cfg.d_model * cfg.d_mlp * (3 if gated else 2)
        attn = cfg.d_model * cfg.d_head * (2 * cfg.n_heads + 2 * cfg.n_kv_heads)
        read = mlp + cfg.d_model * cfg.d_vocab
        by_layer = [(mlp + attn) * (cfg.n_layers - layer - 1) + attn for layer in range(cfg.n_layers)]
        depth, width = statistics.mean(by_layer), (length + 1) / 2
        return {"residual": (depth * width + read) / rate, "heads": (depth * length + read) / rate}


def matmul_rate(bench: Bench) -> float:
    """Measure multiply-adds per second, with matrices of the size used in a sweep."""
    cfg = bench.model.cfg
    a = torch.randn(2048, cfg.d_model, device=bench.device, dtype=cfg.dtype)
    b = torch.randn(cfg.d_model, cfg.d_mlp, device=bench.device, dtype=cfg.dtype)
    times = [seconds(lambda: a @ b) for _ in range(9)]
    return 2048 * cfg.d_model * cfg.d_mlp / min(times)


def table(name: str, length: int, device: str, rounds: int) -> None:
    """Print the rows of one shape and length."""
    bench = Bench(SHAPES[name](), length, device)
    layers, heads = bench.model.cfg.n_layers, bench.model.cfg.n_heads
    bare_at_a_time = 20 if name.startswith("tiny") else 3
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "residual, layers × positions": (bench.residual, layers * length),
        "heads, layers × heads": (bench.heads, layers * heads),
        "attribution, the whole grid": (bench.attribution, 1),
        "one by one, hooks by hand": (lambda: bench.one_by_one(8), 8),
    } | theirs(bench)
    apart = bench.check()
    for work, _ in ways.values():
        work()
    found: dict[str, list[float]] = {way: [] for way in ways}
    bares, rate = [], 0.0
    for _ in range(rounds):
        rate = max(rate, matmul_rate(bench))
        for way, (work, cells) in ways.items():
            bare = seconds(lambda: [bench.bare() for _ in range(bare_at_a_time)]) / bare_at_a_time
            bares.append(bare)
            found[way].append(seconds(work) / cells / bare)
    floors = {key: value / statistics.median(bares) for key, value in bench.floors(rate).items()}
    print(f"\n{name}, {length} tokens: one plain forward pass {statistics.median(bares) * 1e3:.1f} ms; "
          f"results agree within {apart:.1e}; {rate / 1e9:.0f} G multiply-adds/s")  # fmt: skip
    for way, values in found.items():
        floor = floors.get(way.partition(",")[0]) if "TransformerLens" not in way else None
        note = f"  floor {floor:.3f}" if floor is not None else ""
        print(f"  {way:<44} {statistics.median(values):7.3f}{note}")


def theirs(bench: Bench) -> dict[str, tuple[Callable[[], object], int]]:
    """Time TransformerLens's own functions on the same weights, if it is installed."""
    try:
        from transformer_lens import patching as their_patching
    except ImportError:
        return {}
    import pandas  # a dependency of TransformerLens

    peer = peer_of(bench.module)
    cache = peer.run_with_cache(bench.clean)[1]
    layers, length, heads = bench.model.cfg.n_layers, bench.corrupted.shape[1], bench.model.cfg.n_heads
    few = 4  # layers: a full sweep takes minutes
    ours = bench.residual()[:2, :2]
    found = [their_patching.get_act_patch_resid_pre, their_patching.get_act_patch_attn_head_out_all_pos]

    def swept(function: Callable[..., Tensor], rows: dict[str, list[int]]) -> Tensor:
        cells = list(itertools.product(*rows.values()))
        table = pandas.DataFrame(cells, columns=list(rows))
        with torch.no_grad():
            return function(peer, bench.corrupted, cache, metric, index_axis_names=None, index_df=table)

    at = list(range(min(few, layers)))
    residual = {"layer": at, "pos": list(range(0, length, max(1, length // 4)))}
    by_head = {"layer": at, "head": list(range(min(4, heads)))}
    apart = (swept(found[0], {"layer": [0, 1], "pos": [0, 1]}).flatten() - ours.flatten()).abs().max()
    print(f"TransformerLens's results differ from ours by {float(apart):.1e}")
    return {
        "TransformerLens residual": (lambda: swept(found[0], residual), len(at) * len(residual["pos"])),
        "TransformerLens heads": (lambda: swept(found[1], by_head), len(at) * len(by_head["head"])),
    }


def peer_of(module: transformers.PreTrainedModel) -> Any:
    """Return TransformerLens's model with these weights, without processing, by its own conversion."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights

    config, is_llama = module.config, module.config.model_type == "llama"
    heads = config.num_attention_heads
    fields = {
        "d_model": config.hidden_size, "d_head": config.hidden_size // heads, "n_heads": heads, "device": "cpu",
        "n_layers": config.num_hidden_layers, "n_ctx": 128, "d_vocab": config.vocab_size,
        "original_architecture": type(module).__name__,
    }  # fmt: skip
    if is_llama:
        fields |= {
            "act_fn": "silu", "eps": config.rms_norm_eps, "normalization_type": "RMS", "gated_mlp": True,
            "n_key_value_heads": config.num_key_value_heads, "positional_embedding_type": "rotary", "final_rms": True,
            "d_mlp": config.intermediate_size, "rotary_dim": fields["d_head"], "rotary_adjacent_pairs": False,
        }  # fmt: skip
    else:
        fields |= {"act_fn": "gelu_new", "eps": config.layer_norm_epsilon, "normalization_type": "LN", "n_ctx": 1024}
    cfg = HookedTransformerConfig(**fields)
    peer = HookedTransformer(cfg)
    convert = convert_llama_weights if is_llama else convert_gpt2_weights
    steps = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    peer.load_and_process_state_dict(convert(module, cfg), **dict.fromkeys(steps, False))
    return peer.eval()


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--smoke", action="store_true")
    options.add_argument("--device", default="cpu")
    options.add_argument("--shapes", nargs="*", default=["tiny_gpt2", "tiny_llama", "small_gpt2", "small_llama"])
    options.add_argument("--lengths", nargs="*", type=int, default=[16, 64])
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    torch.manual_seed(0)
    if given.smoke:
        table("tiny_gpt2", 6, given.device, 1)
        return
    for shape in given.shapes:
        for length in given.lengths:
            table(shape, length, given.device, given.rounds)


if __name__ == "__main__":
    main()

"""The cost of hooks and caches on a language model, relative to the plain transformers model in the same run.

    python benchmarks/model_overhead.py                  # the table
    python benchmarks/model_overhead.py --smoke          # one quick round, to check that it runs
    python benchmarks/model_overhead.py --device cuda    # a Llama of 1.2 B parameters in bf16, on a GPU

Python overhead matters most on small models, so there are two tiny ones in addition to two of realistic size.
The memory of a full cache is printed as it is after the run, and after every activation in it was read.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from timing import median, ratios
from torch import Tensor

import hookline

BY_HAND = {
    "cache of every resid_post": "every resid_post by hand",
    "one head zeroed": "one head zeroed by hand",
}
BY_HAND |= {f"{name}, compiled": by_hand for name, by_hand in BY_HAND.items()}
"""What is also compared with torch hooks written by hand, in each round."""


def tiny_gpt2() -> transformers.PreTrainedModel:
    """4 layers, d 128."""
    return _built(transformers.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000))


def tiny_llama() -> transformers.PreTrainedModel:
    """4 layers, d 128, grouped queries."""
    return _llama(layers=4, d=128, heads=4)


def small_gpt2() -> transformers.PreTrainedModel:
    """GPT-2 small's shape."""
    return _built(transformers.GPT2Config())


def small_llama() -> transformers.PreTrainedModel:
    """12 layers, d 768, grouped queries."""
    return _llama(layers=12, d=768, heads=12)


def _llama(layers: int, d: int, heads: int) -> transformers.PreTrainedModel:
    return _built(
        transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=d,
            intermediate_size=4 * d,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            vocab_size=1000,
        )
    )


def _built(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def llama_1b() -> transformers.PreTrainedModel:
    """16 layers, d 2048, grouped queries: 1.2 B parameters, in bf16 on the GPU."""
    config = transformers.LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def zero_head(z: Tensor) -> None:
    """Zero head 1 at every position."""
    z[:, :, 1] = 0


def works(module: transformers.PreTrainedModel, tokens: Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed without gradients."""
    model = hookline.hook(module)
    streams, hooks = "blocks.*.hook_resid_post", [("blocks.2.attn.hook_z", zero_head)]
    found: dict[str, Callable[[], object]] = {
        "bare": lambda: module(tokens),
        "unhooked": lambda: model(tokens),
        "every resid_post by hand": lambda: by_hand(module, tokens),
        "cache of every resid_post": lambda: model.run_with_cache(tokens, names_filter=streams),
        "one head zeroed by hand": lambda: zeroed_by_hand(module, tokens),
        "one head zeroed": lambda: model.run_with_hooks(tokens, fwd_hooks=hooks),
        f"cache of all {len(model.hook_dict)} points": lambda: model.run_with_cache(tokens),
    }
    if tokens.is_cuda and tokens.shape[0] == 1:
        compiled = hookline.hook(module)
        compiled.compile()
        found["cache of every resid_post, compiled"] = lambda: compiled.run_with_cache(tokens, names_filter=streams)
        found["one head zeroed, compiled"] = lambda: compiled.run_with_hooks(tokens, fwd_hooks=hooks)
        for name in BY_HAND:
            found[name]()  # compiles
    return found


def _layers(module: transformers.PreTrainedModel) -> torch.nn.ModuleList:
    return module.transformer.h if hasattr(module, "transformer") else module.model.layers


def by_hand(module: transformers.PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Run the model with a torch hook on every layer that keeps its output."""
    kept: list[Tensor] = []

    def keep(_module: torch.nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        kept.append((output if isinstance(output, Tensor) else output[0]).detach())

    handles = [layer.register_forward_hook(keep) for layer in _layers(module)]
    try:
        module(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def zeroed_by_hand(module: transformers.PreTrainedModel, tokens: Tensor) -> None:
    """Run the model with a torch hook that zeroes head 1 of layer 2."""
    layer = _layers(module)[2]
    projection = layer.attn.c_proj if hasattr(layer, "attn") else layer.self_attn.o_proj
    heads = module.config.num_attention_heads

    def zero(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z = args[0].clone()
        z.unflatten(-1, (heads, -1))[:, :, 1] = 0
        return (z, *args[1:])

    handle = projection.register_forward_pre_hook(zero)
    try:
        module(tokens)
    finally:
        handle.remove()


def memory(module: transformers.PreTrainedModel, tokens: Tensor) -> str:
    """Return the memory of a full cache, before and after its activations are read."""
    with torch.no_grad():
        _, cache = hookline.hook(module).run_with_cache(tokens)
    unread = cache.nbytes
    for _ in cache.values():
        pass
    return f"{unread / 1e6:.1f} MB, {cache.nbytes / 1e6:.1f} MB when all of it is read"


def with_gradients(module: transformers.PreTrainedModel, tokens: Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed with a backward pass."""
    model = hookline.hook(module)

    def bare() -> None:
        module(tokens).logits.sum().backward()
        module.zero_grad()

    return {
        "bare": bare,
        "gradients of every resid_post": lambda: model.run_with_cache(
            tokens, names_filter="blocks.*.hook_resid_post", incl_bwd=True, loss_fn=torch.sum
        ),
    }


def generating(module: transformers.PreTrainedModel, tokens: Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed in generation of 32 tokens."""
    model, steer = hookline.hook(module), torch.randn(module.config.hidden_size) * 0.01
    settings = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}

    def steered() -> None:
        with model.hooks(fwd_hooks=[("blocks.2.hook_resid_post", lambda h: h + steer)]):
            model.generate(tokens, **settings)

    mask = torch.ones_like(tokens)
    return {
        "bare": lambda: module.generate(tokens, attention_mask=mask, **settings),
        "32 tokens, one steering hook": steered,
    }


def wrap_seconds(module: transformers.PreTrainedModel) -> float:
    """Return the time of wrapping a model."""
    start = time.perf_counter()
    hookline.hook(module)
    return time.perf_counter() - start


def table(module: transformers.PreTrainedModel, tokens: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the ratios of one model on one batch."""
    with torch.no_grad():
        found = ratios(works(module, tokens), "bare", rounds)
    if tokens.is_cuda:
        return found
    found |= ratios(with_gradients(module, tokens), "bare", rounds)
    if tokens.shape[0] == 1:
        with torch.no_grad():
            found |= ratios(generating(module, tokens), "bare", max(1, rounds // 4))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one quick round, tiny models only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, one thread; ratio to the plain model\n")
    makers: tuple[Callable[[], transformers.PreTrainedModel], ...] = (tiny_gpt2, tiny_llama, small_gpt2, small_llama)
    shapes = ((1, 64), (8, 128))
    if options.smoke:
        makers, shapes = makers[:2], shapes[:1]
    elif options.device == "cuda":
        makers, shapes = (llama_1b,), ((1, 64), (8, 512))
    for make in makers:
        module = make()
        for shape in shapes:
            tokens = torch.randint(0, 1000, shape, device=options.device)
            rounds = 1 if options.smoke else max(5, options.rounds // (1 if shape[0] == 1 else 4))
            where = f"{make.__name__:12} {shape[0]}×{shape[1]:<4}"
            found = table(module, tokens, rounds)
            for name, values in found.items():
                by_hand = found.get(BY_HAND.get(name, ""))
                over = [] if by_hand is None else [one / other for one, other in zip(values, by_hand, strict=True)]
                more = f", {statistics.median(over):.3f} of that by hand" if over else ""
                if name != "bare":
                    print(f"{where} {name:36} {median(values)}{more}", flush=True)
            print(f"{where} {'memory of a full cache':36} {memory(module, tokens)}", flush=True)
        print(f"{make.__name__:12} {'':6} wrapping: {wrap_seconds(module):.3f} s\n")


if __name__ == "__main__":
    main()

"""Attribution graphs beside those of circuit-tracer: the difference of the edges, and the time.

    python benchmarks/graphs.py                 # needs circuit-tracer 0.5 and transformer-lens 3.5
    python benchmarks/graphs.py --shapes tiny_gpt2 --length 8

The same random weights, transcoders and tokens go into both. The features, errors, tokens and logits must be the same,
in the same order. circuit-tracer sets what the MLPs write at the first position to 0; hookline keeps it as an error, so
these columns are not compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import torch
import transformers
from circuit_tracer import attribute
from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
from circuit_tracer.transcoder.cross_layer_transcoder import load_clt
from circuit_tracer.transcoder.single_layer_transcoder import load_transcoder_set
from model_overhead import small_gpt2, small_llama, tiny_gpt2, tiny_llama
from timing import seconds
from transcoders import random_transcoders
from transformer_lens import HookedTransformerConfig
from transformer_lens.pretrained import weight_conversions

import hookline
from hookline.experiments import graphs

SHAPES = {"tiny_gpt2": tiny_gpt2, "tiny_llama": tiny_llama, "small_gpt2": small_gpt2, "small_llama": small_llama}
READS, WRITES = "mlp.hook_in", "hook_mlp_out"


class Tokens:
    """What circuit-tracer asks of a tokenizer; the token 0 begins every text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.all_special_ids, self.bos_token_id = vocab_size, [0], 0
        self.pad_token_id = self.eos_token_id = 0
        self.padding_side, self.name_or_path, self.special_tokens_map = "right", "none", {}

    def decode(self, ids: Any) -> str:
        """Return the ids as text."""
        return str(ids)


def peer(module: transformers.PreTrainedModel, given: Any) -> TransformerLensReplacementModel:
    """Return circuit-tracer's model with the same weights."""
    config = module.config
    is_llama = config.model_type == "llama"
    cfg = HookedTransformerConfig(
        n_layers=config.num_hidden_layers, d_model=config.hidden_size, n_ctx=256,
        d_head=config.hidden_size // config.num_attention_heads, n_heads=config.num_attention_heads,
        n_key_value_heads=config.num_key_value_heads if is_llama else None,
        d_mlp=config.intermediate_size if is_llama else 4 * config.hidden_size, d_vocab=config.vocab_size,
        act_fn="silu" if is_llama else "gelu_new", normalization_type="RMS" if is_llama else "LN",
        eps=config.rms_norm_eps if is_llama else config.layer_norm_epsilon, gated_mlp=is_llama, final_rms=is_llama,
        positional_embedding_type="rotary" if is_llama else "standard", model_name="none",
        rotary_dim=config.hidden_size // config.num_attention_heads if is_llama else None,
        rotary_adjacent_pairs=False, device="cpu", default_prepend_bos=False,
    )  # fmt: skip
    if is_llama:
        cfg.rotary_base = int(config.rope_parameters["rope_theta"])
    convert = weight_conversions.convert_llama_weights if is_llama else weight_conversions.convert_gpt2_weights
    model = TransformerLensReplacementModel(cfg)
    model.load_state_dict(convert(module, cfg), strict=False)
    model.tokenizer = Tokens(config.vocab_size)
    model._configure_replacement_model(given)
    return model


def compared(name: str, length: int, d_sae: int, active: float, rounds: int, *, cross_layer: bool) -> str:
    """Return a row of the table."""
    torch.manual_seed(0)
    module = SHAPES[name]()
    with torch.no_grad():
        for parameter in module.parameters():  # biases and gains that are not 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = hookline.hook(module)
    own = random_transcoders(model, d_sae, active, cross_layer=cross_layer)
    with tempfile.TemporaryDirectory() as folder:
        own.save(folder)
        if cross_layer:
            given = load_clt(folder, READS, WRITES, scan="none", dtype=torch.float32, lazy_decoder=False)
        else:
            paths = {layer: f"{folder}/layer_{layer}.safetensors" for layer in own.layers}
            given = load_transcoder_set(paths, "none", READS, WRITES, lazy_encoder=False, lazy_decoder=False)
        theirs = peer(module, given)
        tokens = torch.cat([torch.zeros(1, dtype=torch.long), torch.randint(1, model.cfg.d_vocab, (length - 1,))])
        with torch.no_grad():
            apart = float((theirs(tokens[None], prepend_bos=False) - model(tokens[None])).abs().max())

        def ours() -> graphs.AttributionGraph:
            return graphs.attribution_graph(model, tokens[None], own, errors_only=[0], progress=False)

        graph, other = ours(), attribute(tokens, theirs, batch_size=256)
        times = {
            way: [seconds(way) for _ in range(rounds)]
            for way in (ours, lambda: attribute(tokens, theirs, batch_size=256))
        }
    features = [(node.layer, node.pos, node.feature) for node in graph.of("feature")]
    assert features == [tuple(each) for each in other.active_features.tolist()], "other features are active"
    keep = torch.tensor([node.kind != "error" or node.pos > 0 for node in graph.nodes])
    edges, wanted = graph.edges[:, keep], other.adjacency_matrix[:, keep]
    spent, peers = (statistics.median(each) for each in times.values())
    kind, off = "cross-layer" if cross_layer else "per layer", float((edges - wanted).abs().max())
    return (
        f"{name:11} {kind:11} {len(features):6} {len(graph):6}   {apart:.1e}   {off:.1e}"
        f" of {float(wanted.abs().max()):5.2f}   {float(graph.check().values.max()):.1e}   {spent:7.2f}  {peers:7.2f}"
        f"  {peers / spent:5.2f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["tiny_gpt2", "tiny_llama", "small_gpt2"])
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--d-sae", type=int, default=2048)
    parser.add_argument("--active", type=float, default=0.005)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(
        "model       transcoders features nodes   logits    largest difference    check     hookline  peer (s)  ratio"
    )
    for name in options.shapes:
        for cross_layer in (False, True):
            args = (name, options.length, options.d_sae, options.active, options.rounds)
            print(compared(*args, cross_layer=cross_layer), flush=True)


if __name__ == "__main__":
    main()

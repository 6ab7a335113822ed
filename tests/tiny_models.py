"""Tiny random models of every architecture in transformers, from their configs alone: nothing is downloaded.

`causal_lm("llama")`, `encoder("bert")` and `seq2seq("t5")` build one; `CAUSAL`, `ENCODERS` and `SEQ2SEQ` list the kinds
that build and run, `NOT_BUILT` says why the others do not. Sizes are chosen so that a mistake in layout shows: queries,
keys, hidden state, feed-forward and vocabulary differ in width, and each kind of layer an architecture has occurs.
`python tests/tiny_models.py [kind ...]` prints a table of them.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any
from unittest import SkipTest

import torch
from devices import placed
from releases import PINNED, torch_is_before, transformers_is_before
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

LAYERS = 4

# Set wherever a config has the field, unless its row says otherwise.
SMALL: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "embedding_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner", "d_ff", "dff"), 80),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "hidden_dim", "feed_forward_size"), 80),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 20),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 20),
    "vocab_size": 64,
    # depths
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "depth"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels"), 24),
    **dict.fromkeys(("d_kv", "dim_head", "d_head", "attention_head_size"), 12),
    "rotary_dim": 4,
    "query_pre_attn_scalar": 16,
    # multi-latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 12),
    "qk_rope_head_dim": 8,
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    # linear attention and state spaces
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_head_dim": 12, "n_mamba_heads": 4},
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),  # heads × this = expand × hidden_size
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 4),
    **{"mamba_dt_rank": 2, "time_step_rank": 2},
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **{"first_k_dense_replace": 1, "num_dense_layers": 1, "mlp_only_layers": [0]},
    # positions
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "model_max_length"), 64),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"), 4),
    **{"use_sliding_window": True, "max_window_layers": 2},
    # scales
    **{"attention_multiplier": 0.25, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    # tokens
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    # images
    **{"image_size": 16, "patch_size": 8},
}

FULL_SLIDING = ["full_attention", "sliding_attention"] * 2
LINEAR_FULL = ["linear_attention", "full_attention"] * 2
DENSE_SPARSE = ["dense", "sparse", "sparse", "sparse"]
MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}  # no grouped queries; head_dim is the rotary part's
GEMMA4: dict[str, Any] = {"global_head_dim": 40, "num_kv_shared_layers": 2}
PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
QWEN4: dict[str, Any] = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 24, "indexer_budget": 4},
    **{"indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [3], "ple_embed_dim": 32},
    **{"heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8},
}

# No field of their config, but read from it: their heads can have any width.
FREE_HEAD_DIM = {
    *("apertus", "bamba", "cohere", "doge", "dots1", "emu3_text_model", "ernie4_5_moe", "exaone4", "exaone_moe"),
    *("falcon_h1", "flex_olmo", "glm4_moe", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "jamba", "lfm2", "lfm2_moe", "nanochat", "olmo", "olmo2", "olmo3"),
    *("olmo_hybrid", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe", "qwen3_moe", "smollm3"),
    "starcoder2",
}

# What an architecture needs besides, or instead of, SMALL.
ROWS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), MLA),
    **dict.fromkeys(("bailing_hybrid", "hy_v4", "kimi_linear", "minicpm3", "youtu"), MLA),
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        **{"encoder_hash_byte_group_size": [2, 3], "encoder_hash_byte_group_vocab": 50, "num_hidden_layers": 4},
        "patching_threshold": 3.9,  # near the entropies, so that patches differ in length
        **{f"{part}_config": {"hidden_size_global": 32, "head_dim": 8} for part in ("encoder", "decoder")},
        **{f"{part}_config": {"head_dim": 8} for part in ("patcher", "global")},
    },
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5, "mlp_layer_types": DENSE_SPARSE},
    "cohere_compass_text": {
        "layer_types": FULL_SLIDING,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in FULL_SLIDING},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        **{"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
        "layer_types": [f"{k}_attention" for k in ("sliding", "heavily_compressed", "compressed_sparse", "sliding")],
        **{"index_topk": 2, "o_groups": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": PER_LAYER
    | {"num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4": {"text_config": GEMMA4 | PER_LAYER},
    "gemma4_text": GEMMA4 | PER_LAYER,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "glm_moe_dsa": MLA | {"indexer_types": ["full", "shared"] * 2},
    "got_ocr2": {
        "vision_config": {"output_channels": 8, "mlp_dim": 80, "window_size": 2, "global_attn_indexes": [1, 3]}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": LINEAR_FULL},
    "helium": {"head_dim": 8},
    "hrm_text": {"num_hidden_layers": 2},
    "inkling_text": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 24, "sliding_window_size": 4},
        **{"d_rel": 4, "rel_extent": 16, "logits_mup_width_multiplier": 2.0},
        "mlp_layer_types": DENSE_SPARSE,
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "laguna": {"layer_types": FULL_SLIDING},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"layer_types": None, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48},
    "longcat_flash": MLA | {"zero_expert_num": 2},
    "mamba2": {"head_dim": 16},
    "mellum": {"layer_types": FULL_SLIDING, "mlp_layer_types": DENSE_SPARSE},
    "minimax_m3_vl_text": {
        **{"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "mlp_layer_types": DENSE_SPARSE},
        **{"index_block_size": 2, "index_topk_blocks": 2, "dense_intermediate_size": 48},
    },
    "ministral": {"layer_types": FULL_SLIDING},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "musicgen": {"decoder": {"num_codebooks": 2}},  # so the two rows of token ids are one batch's two codebooks
    "musicgen_melody": {"decoder": {"num_codebooks": 2}},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "phi4_multimodal": {
        "vision_config": {"crop_size": 16},
        "audio_config": {
            **{"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8},
            **{"num_blocks": 2, "bias_max_distance": 16},
        },
    },
    "phimoe": {"router_jitter_noise": 0.5},  # with less, one expert takes all and the router is constant
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {
        **{"attn_layers": ["local", "lsh"] * 2, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24]},
        **{"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 0},
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roc_bert": {
        **{"pronunciation_vocab_size": 64, "pronunciation_embed_dim": 16},
        **{"shape_vocab_size": 64, "shape_embed_dim": 16},
    },
    "xlnet": {"d_head": 8},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0, "ffn_round_up_to_multiple_of": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
    # encoders
    "canine": {"num_hash_buckets": 16, "local_transformer_stride": 4, "downsampling_rate": 2},
    "embedding_gemma2_text": GEMMA4 | PER_LAYER | {"num_kv_shared_layers": 0},
    "esmc": {"num_key_value_heads": 4, "head_dim": 8},
    "funnel": {"block_sizes": [2, 2], "block_repeats": [1, 1], "architectures": ["FunnelForMaskedLM", "FunnelModel"]},
    "lilt": {"hidden_size": 48},  # a multiple of six coordinates
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "markuplm": {"max_depth": 4, "xpath_unit_hidden_size": 8},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
    "neomme": {"head_dim": 32},
    # encoder-decoders
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "fsmt": {"src_vocab_size": 64, "tgt_vocab_size": 64, "use_cache": False},  # with a cache its decoder has no mask
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "longt5": {"local_radius": 2},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "pegasus_x": {"num_global_tokens": 2},
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 8, "output_dim": 32}},
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1},
}
ROWS["llama4"] = {"text_config": ROWS["llama4_text"]}
if transformers_is_before("5.17"):  # whose heads have no width of their own, though its config has the field
    ROWS["recurrent_gemma"] = {"head_dim": 8}

# Encoders of text without a masked-language-model head.
HEADLESS = [
    *("canine", "clip_text_model", "embedding_gemma2_text", "lilt", "markuplm", "openai_privacy_filter", "splinter"),
    "tipsv2_text_model",
]

NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "takes another model's keys, values and embeddings, not token ids",
    "gemma4_unified_assistant": "takes another model's keys, values and embeddings, not token ids",
    "granite_speech": "needs audio",
    "granite_speech_plus": "needs audio",
    "mra": "its attention is a CUDA kernel, and zero without it",
    "nemo_speechlm": "its audio encoders have sizes of their own, nested three deep",
    "perceiver": "its plain model takes features, not token ids",
    "vibevoice_asr": "the widths of its audio encoders double at each of seven stages",
    "voxtral_realtime": "needs audio",
}


def _layout(kinds: list[str], n: int, once: bool = False) -> list[str]:
    """`n` layers with each of the kinds: by turns, or with `once` the first kind once and then the others."""
    return [kinds[min(i, len(kinds) - 1) if once else i % len(kinds)] for i in range(n)]


def _settings(base: PreTrainedConfig, row: dict[str, Any]) -> dict[str, Any]:
    """What makes a tiny config of `base`'s class: its share of SMALL, its nested configs' shares, then the row."""
    own = base.to_dict()
    out = {k: v for k, v in SMALL.items() if k in own or k in base.attribute_map}
    if base.model_type in FREE_HEAD_DIM:
        out["head_dim"] = SMALL["head_dim"]
    for name, nested in vars(base).items():
        if isinstance(nested, PreTrainedConfig):
            out[name] = {"model_type": nested.model_type} | _settings(nested, row.get(name) or {})
    # A dict in the row is a nested config's, settled above, or a plain value.
    out |= {k: v for k, v in row.items() if k not in out or not isinstance(v, dict)}
    for name, once in (("layer_types", False), ("mlp_layer_types", True)):
        if name in own and name not in row:
            kinds = list(dict.fromkeys(own[name] or []))
            out[name] = _layout(kinds, out["num_hidden_layers"], once) if len(kinds) > 1 else None
    return out


_NOT_TINY_BEFORE = {
    "cohere_compass_text": "5.21",  # its rotation wants larger heads
    "encoder-decoder": "5.20",  # these configs have no defaults
    "musicgen": "5.20",
    "musicgen_melody": "5.20",
}


def _config_class(kind: str) -> Any:
    """The class of a config; a test of an architecture that is newer than this version of transformers is skipped."""
    if kind not in CONFIG_MAPPING and transformers_is_before(PINNED):
        raise SkipTest(f"transformers before {PINNED}: this one has no {kind}")
    if kind in _NOT_TINY_BEFORE and transformers_is_before(_NOT_TINY_BEFORE[kind]):
        raise SkipTest(f"transformers before {_NOT_TINY_BEFORE[kind]} cannot build a tiny {kind}")
    return CONFIG_MAPPING[kind]


def config(kind: str, **overrides: Any) -> PreTrainedConfig:
    """The tiny config of a kind (a key of transformers' CONFIG_MAPPING)."""
    cls = _config_class(kind)
    return cls(**_settings(cls(), ROWS.get(kind, {}) | overrides))


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give every parameter a value that matters: many start at zero or one, or too small to move the output."""
    for module in model.modules():
        conv = isinstance(module, nn.Conv1d | nn.Conv2d)
        for name, p in module.named_parameters(recurse=False):
            flat = p.numel() == max(p.shape, default=1)  # a norm, a bias, a gate, one value per head
            if flat or name == "A_log" or (p.min() == p.max() != 0):
                p.add_(torch.randn_like(p), alpha=0.1)
            else:
                p.copy_(torch.randn_like(p) * (0.4 if conv else 0.15))
        for name, b in module.named_buffers(recurse=False):
            if name.endswith(("bias", "biases", "layer_scalar")) and b.is_floating_point():  # an expert's, a layer's
                b.add_(torch.randn_like(b), alpha=0.1)
            elif name == "tid2eid":  # which experts a token goes to
                b.copy_(torch.rand(len(b), len(module.get_parameter("weight"))).argsort(-1)[:, : b.shape[1]])


def _build(auto: Any, kind: str, overrides: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        tiny, make = config(kind, **overrides), auto.from_config
        if kind.startswith("musicgen"):  # the language model is its decoder, and wants the decoder's config
            tiny, make = tiny.decoder, auto._model_mapping[type(tiny)]
        if getattr(tiny.get_text_config(), "attn_logit_softcapping", None):
            tiny._attn_implementation = "eager"  # before transformers 5.21, sdpa is chosen and leaves out the cap
        if torch_is_before("2.9"):  # transformers chooses a kernel for experts that it does not have on the CPU
            tiny._experts_implementation = "eager"
        model = make(tiny)
        randomise(model)
        return placed(model.eval())


def causal_lm(kind: str, **overrides: Any) -> PreTrainedModel:
    """A tiny decoder with a language-model head."""
    cls = _config_class(kind)
    decoder = {k: True for k in ("is_decoder", "causal") if hasattr(cls, k)}
    return _build(AutoModelForCausalLM, kind, decoder | overrides)


def encoder(kind: str, head: bool = False, **overrides: Any) -> PreTrainedModel:
    """A tiny encoder, with its masked-language-model head if asked."""
    return _build(AutoModelForMaskedLM if head else AutoModel, kind, overrides)


def seq2seq(kind: str, **overrides: Any) -> PreTrainedModel:
    """A tiny encoder-decoder with a language-model head."""
    return _build(AutoModelForSeq2SeqLM, kind, overrides)


CAUSAL = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in NOT_BUILT]
SEQ2SEQ = [kind for kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if kind not in NOT_BUILT]
ENCODERS = [kind for kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES if kind not in NOT_BUILT and kind not in SEQ2SEQ]
ENCODERS += [kind for kind in HEADLESS if kind in CONFIG_MAPPING]


def inputs(model: PreTrainedModel, seed: int = 0, batch: int = 2, length: int = 7) -> dict[str, Tensor]:
    """Random token ids for a model, an encoder-decoder's decoder's as well, and what else its parts need to be used."""
    generator = torch.Generator().manual_seed(seed)
    ids, others = torch.randint(3, 60, (2, batch, length), generator=generator)
    out = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        out["decoder_input_ids"] = others
    match model.config.model_type:
        case "mllama_text_model":  # without an image its cross-attention layers are passed over
            out["cross_attention_states"] = torch.randn(batch, 5, model.config.hidden_size, generator=generator)
        case "longformer" | "led":
            out["global_attention_mask"] = (torch.arange(length) == 0).long().expand(batch, -1)
        case "roc_bert":
            out |= {"input_shape_ids": others, "input_pronunciation_ids": others}
    return out


def main(kinds: list[str]) -> None:
    """Print the table, of the kinds given or of all."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    tables = (("causal", causal_lm, CAUSAL), ("encoder", encoder, ENCODERS), ("seq2seq", seq2seq, SEQ2SEQ))
    for what, build, known in tables:
        for kind in known if not kinds else [kind for kind in known if kind in kinds]:
            start = time.perf_counter()
            model = build(kind)
            with torch.no_grad():
                one, two = (model(**inputs(model, seed))[0] for seed in (0, 1))
            seconds = time.perf_counter() - start
            size = sum(p.numel() for p in model.parameters())
            layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", "?")
            note = ("finite" if one.isfinite().all() else "NOT FINITE") + (", constant" if one.allclose(two) else "")
            print(f"{what:8} {kind:26} {size:8,} {layers:>3} layers {seconds:5.2f} s  {note}", flush=True)
        print(f"{what}: {len(known)} kinds\n")


if __name__ == "__main__":
    main(sys.argv[1:])


def nudged(kind: str) -> PreTrainedModel:
    """A causal model in which no weight is 1 and no bias 0, so that each of them shows."""
    torch.manual_seed(0)
    module = causal_lm(kind)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module

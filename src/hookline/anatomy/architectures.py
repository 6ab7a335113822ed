"""Variants: what some architectures do in another way than most, as rows of data."""

from __future__ import annotations

from typing import Any

PARALLEL = frozenset({"gptj", "codegen", "phi", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text"})
"""Attention and MLP read the same stream and are added together; there is no stream in between."""

POST_NORM = frozenset(
    {
        *("bart", "blenderbot-small", "marian", "mvp", "plbart", "trocr", "openai-gpt", "speech_to_text_2"),
        *("distilbert", "mpnet", "gte", "nomic_bert", "jina_embeddings_v3"),
    }
)
"""The stream itself is normalised after each addition. (BERT's kind is seen by where its norms are.)"""

RESIDUAL_IN_ATTENTION = frozenset({"bloom"})
"""The attention module adds the stream itself: what it adds is the output of its projection."""

RESIDUAL_IN_MLP = frozenset({"bloom", "mpt"})
"""The MLP module adds the stream itself."""

SEVERAL_MLPS = frozenset({"granitemoeshared", "granitemoe_swa", "granitemoehybrid"})
"""What is added after the attention is the sum of several modules."""

ROWS_FLATTENED = frozenset({"opt", "llama4_text"})
"""The MLP works on batch and positions as one axis."""

SINKS = frozenset({"gpt_oss", "flint", "mimo_v2_flash", "deepseek_v4", "hy_v4"})
"""The softmax may have one more column than there are keys, for a learned sink."""

MIXES_OTHERWISE = frozenset(
    {
        *("afmoe", "beam", "bitnet", "laguna", "gemma4_unified_text", "gemma4_text", "inkling_text", "qwen3_next"),
        *(
            "qwen3_5",
            "qwen3_5_text",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "granite_swa",
            "granitemoe_swa",
            "mimo_v2_flash",
        ),
    }
)
"""A gate, a norm or a factor comes between the values, as the pattern mixes them, and the output projection."""

GATE_IN_QUERY = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
"""The query's projection gives a gate as well, beside the query of each head."""

FUSED_BY_HEAD = frozenset({"bloom", "gpt_neox", "gpt_neox_japanese", "persimmon", "falcon"})
"""The fused projection has query, key and value of one head side by side."""

TUPLES_FROM_LAYERS = frozenset(
    {
        *("bamba", "bloom", "codegen", "cpmant", "falcon", "falcon_h1", "gpt_neo", "gpt_neox_japanese", "gptj"),
        *("megatron-bert", "mpt", "musicgen_melody", "mvp", "openai-gpt", "prophetnet", "rembert", "roformer", "trocr"),
    }
)
"""A layer returns a tuple, with the stream as its first item."""

MORE_THAN_A_STREAM: frozenset[str] = frozenset(
    {
        *("glm_moe_dsa", "hy_v4", "zaya", "reformer", "rwkv", "gemma4_text", "gemma4_unified_text", "prophetnet"),
        *("cpmant", "musicgen_melody_decoder"),
    }
)
"""A layer gets more from the one before than the stream, so a run cannot start in the middle."""

SEES_FIRST = frozenset({"mllama_text_model"})
"""Pictures are looked at before the tokens are embedded; elsewhere it is the other way round."""

TILES_APART = frozenset({"mllama_text_model"})
"""What is attended to comes as one row for each tile of a picture."""

POOLED_NORM = frozenset({"clip_vision_model"})
"""The norm after the last layer is of the class token alone."""

ADDS_BETWEEN = frozenset({"qwen3_vl_text", "qwen3_vl_moe_text"})
"""What the vision tower saw in its earlier layers is added to the stream between the first layers."""

EMBEDDINGS_LATER = frozenset({"zamba", "zamba2"})
"""Some later layers look at the embeddings again."""


def is_parallel(config: Any) -> bool:
    """Whether attention and MLP are side by side."""
    if config.model_type == "falcon":
        return bool(config.parallel_attn or config.new_decoder_architecture)
    if config.model_type in ("gpt_neox", "stablelm"):
        return bool(config.use_parallel_residual)
    if config.model_type == "hookline_native":
        return bool(config.parallel_attn_mlp)
    return config.model_type in PARALLEL


def is_post_norm(config: Any) -> bool:
    """Whether the stream is normalised after each addition."""
    if config.model_type == "opt":
        return not config.do_layer_norm_before
    return config.model_type in POST_NORM


def chooses_keys(config: Any) -> bool:
    """Whether attention goes to the best of all keys, so that what a position sees depends on how many there are."""
    return getattr(config, "index_topk", None) is not None


def goes_by_length(config: Any) -> bool:
    """Whether positions are turned by angles that depend on how long the text is."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope.get("rope_type"), *(each.get("rope_type") for each in rope.values() if isinstance(each, dict))]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def residual_factor(config: Any) -> float:
    """What a block's additions are multiplied with before they are added."""
    if config.model_type == "minicpm3":
        return config.scale_depth / config.num_hidden_layers**0.5
    if config.model_type == "esmc":
        return (36 / config.num_hidden_layers) ** 0.5
    return getattr(config, "residual_multiplier", 1.0)


def embedding_factor(config: Any) -> float:
    """What the embeddings are multiplied with outside their module before they enter the stream."""
    if config.model_type == "ctrl":
        return config.n_embd**0.5
    if config.model_type == "recurrent_gemma":
        return config.hidden_size**0.5
    return getattr(config, "embedding_multiplier", None) or 1.0

"""Architectures that differ from the usual pre-norm transformer, one row each.

Most models need no row. If only module names differ, add them in `roles.py`; if the arithmetic differs, add a row here.
`python tools/make_models.py` then reports which points are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

Setting: TypeAlias = Any
"""A value, or a function of the config that returns it, which `architecture` calls."""


def _positions(config: Any) -> str:
    if getattr(config, "alibi", False):
        return "alibi"
    return "rotary" if getattr(config, "rope_parameters", None) or getattr(config, "rotary_dim", None) else "none"


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from the usual pre-norm transformer, which has the default values."""

    parallel: Setting = False
    """Attention and MLP read the same stream; there is no stream in between."""
    post_norm: Setting = False
    """The stream itself is normalized after each addition. (BERT is recognized by its module names.)"""
    residual_in_attention: bool = False
    """The attention module adds the residual itself: `hook_attn_out` is the output of its projection."""
    residual_in_mlp: bool = False
    """The MLP module adds the residual itself."""
    several_mlps: bool = False
    """The output added after attention is the sum of several modules."""
    flattened_rows: bool = False
    """The MLP flattens batch and positions into one axis."""
    attention_sinks: bool = False
    """The softmax may have an extra column for a learned sink."""
    gated_values: bool = False
    """A gate, a norm or a factor comes between the mixed values and the output projection."""
    gate_in_query: bool = False
    """The query projection also returns a gate for each head."""
    fused_by_head: bool = False
    """The fused projection is grouped by head: query, key, value of head 0, then of head 1 (without GQA)."""
    fused_groups: int | None = None
    """The fused projection has this many groups of heads, each with query, value, key."""
    kv_heads: Setting = None
    """The number of key/value heads, if it is neither in the modules nor `config.num_key_value_heads`."""
    returns_tuple: bool = False
    """A layer returns a tuple, with the stream as its first item."""
    more_than_stream: bool = False
    """Layers pass on more than the stream, so a run cannot start in the middle."""
    rereads_embeddings: bool = False
    """Some later layers read the embeddings again."""
    switches: str | None = None
    """An attribute of the model that a run on short texts changes for good."""
    vision_first: bool = False
    """The vision tower runs before the tokens are embedded; by default it runs after."""
    separate_tiles: bool = False
    """Keys and values of cross-attention have one batch row per image tile."""
    pooled_norm: bool = False
    """The final norm applies to the class token only."""
    pools_with_norm: bool = False
    """The final norm runs again, on the pooled token."""
    attends_apart: Setting = False
    """Attention runs on parts of the stream, as on the frames of a video, so its output has other axes. (Layers with
    windows say so.)"""
    adds_between_layers: bool = False
    """Vision features are added to the stream between the first layers (DeepStack)."""
    residual_factor: Setting = lambda config: getattr(config, "residual_multiplier", 1.0)
    """The factor of the outputs of attention and MLP before they are added to the stream."""
    embedding_factor: Setting = lambda config: getattr(config, "embedding_multiplier", None) or 1.0
    """The factor applied to the embeddings outside their module before they enter the stream."""
    positions: Setting = _positions
    """The kind of position encoding for `cfg.positions`, if it is not added to the stream."""


def _native_positions(config: Any) -> str:
    return "added to queries and keys" if config.positions == "shortformer" else config.positions


ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture(gated_values=True),
    "bamba": Architecture(returns_tuple=True),
    "bart": Architecture(post_norm=True),
    "beam": Architecture(gated_values=True),
    "big_bird": Architecture(switches="attention_type"),
    "bitnet": Architecture(gated_values=True),
    "blenderbot-small": Architecture(post_norm=True),
    "blip_2_vision_model": Architecture(pools_with_norm=True),
    "blip_vision_model": Architecture(pools_with_norm=True),
    "bloom": Architecture(
        residual_in_attention=True, residual_in_mlp=True, fused_by_head=True, returns_tuple=True, positions="alibi"
    ),
    "clip_vision_model": Architecture(pooled_norm=True),
    "codegen": Architecture(parallel=True, returns_tuple=True, fused_groups=4),
    "cohere": Architecture(parallel=True),
    "cohere2": Architecture(parallel=True),
    "cohere2_moe": Architecture(parallel=True),
    "cohere_compass_text": Architecture(parallel=True),
    "cpmant": Architecture(returns_tuple=True, more_than_stream=True),
    "ctrl": Architecture(embedding_factor=lambda config: config.n_embd**0.5),
    "deepseek_v4": Architecture(attention_sinks=True),
    "distilbert": Architecture(post_norm=True),
    "esmc": Architecture(residual_factor=lambda config: (36 / config.num_hidden_layers) ** 0.5),
    "falcon": Architecture(
        fused_by_head=True,
        returns_tuple=True,
        parallel=lambda config: config.parallel_attn or config.new_decoder_architecture,
        kv_heads=lambda config: config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1,
    ),
    "falcon_h1": Architecture(returns_tuple=True),
    "flint": Architecture(attention_sinks=True),
    "gemma4_text": Architecture(gated_values=True, more_than_stream=True),
    "gemma4_unified_text": Architecture(gated_values=True, more_than_stream=True),
    "glm_moe_dsa": Architecture(more_than_stream=True),
    "gpt_bigcode": Architecture(kv_heads=lambda config: 1 if config.multi_query else config.num_attention_heads),
    "gpt_neo": Architecture(returns_tuple=True),
    "gpt_neox": Architecture(fused_by_head=True, parallel=lambda config: config.use_parallel_residual),
    "gpt_neox_japanese": Architecture(fused_by_head=True, returns_tuple=True),
    "gpt_oss": Architecture(attention_sinks=True),
    "gptj": Architecture(parallel=True, returns_tuple=True),
    "granite_swa": Architecture(gated_values=True),
    "granitemoe_swa": Architecture(several_mlps=True, gated_values=True),
    "granitemoehybrid": Architecture(several_mlps=True),
    "granitemoeshared": Architecture(several_mlps=True),
    "gte": Architecture(post_norm=True),
    "hookline_native": Architecture(parallel=lambda config: config.parallel_attn_mlp, positions=_native_positions),
    "hy_v4": Architecture(attention_sinks=True, more_than_stream=True),
    "inkling_text": Architecture(gated_values=True),
    "instructblip_vision_model": Architecture(pools_with_norm=True),
    "jina_embeddings_v3": Architecture(post_norm=True),
    "laguna": Architecture(gated_values=True),
    "llama4_text": Architecture(flattened_rows=True),
    "marian": Architecture(post_norm=True),
    "megatron-bert": Architecture(returns_tuple=True),
    "mimo_v2_flash": Architecture(attention_sinks=True, gated_values=True),
    "minicpm3": Architecture(residual_factor=lambda config: config.scale_depth / config.num_hidden_layers**0.5),
    "mllama_text_model": Architecture(vision_first=True, separate_tiles=True),
    "mpnet": Architecture(post_norm=True),
    "mpt": Architecture(residual_in_mlp=True, returns_tuple=True, positions="alibi"),
    "musicgen_melody": Architecture(returns_tuple=True),
    "musicgen_melody_decoder": Architecture(more_than_stream=True),
    "mvp": Architecture(post_norm=True, returns_tuple=True),
    "nomic_bert": Architecture(post_norm=True),
    "openai-gpt": Architecture(post_norm=True, returns_tuple=True),
    "opt": Architecture(flattened_rows=True, post_norm=lambda config: not config.do_layer_norm_before),
    "persimmon": Architecture(fused_by_head=True),
    "phi": Architecture(parallel=True),
    "plbart": Architecture(post_norm=True),
    "prophetnet": Architecture(returns_tuple=True, more_than_stream=True),
    "qwen3_5": Architecture(gated_values=True, gate_in_query=True),
    "qwen3_5_moe": Architecture(gated_values=True, gate_in_query=True),
    "qwen3_5_moe_text": Architecture(gated_values=True, gate_in_query=True),
    "qwen3_5_text": Architecture(gated_values=True, gate_in_query=True),
    "qwen3_next": Architecture(gated_values=True, gate_in_query=True),
    "qwen3_vl_moe_text": Architecture(adds_between_layers=True),
    "qwen3_vl_text": Architecture(adds_between_layers=True),
    "recurrent_gemma": Architecture(embedding_factor=lambda config: config.hidden_size**0.5),
    "reformer": Architecture(more_than_stream=True),
    "rembert": Architecture(returns_tuple=True),
    "roformer": Architecture(returns_tuple=True),
    "rwkv": Architecture(more_than_stream=True),
    "speech_to_text_2": Architecture(post_norm=True),
    "stablelm": Architecture(parallel=lambda config: config.use_parallel_residual),
    "timesformer": Architecture(attends_apart=lambda config: config.attention_type == "divided_space_time"),
    "trocr": Architecture(post_norm=True, returns_tuple=True),
    "vitdet": Architecture(attends_apart=True),
    "zamba": Architecture(rereads_embeddings=True),
    "zamba2": Architecture(rereads_embeddings=True),
    "zaya": Architecture(more_than_stream=True),
}
"""By `config.model_type`."""

_USUAL = Architecture()


def architecture(config: Any, model_type: str | None = None) -> Architecture:
    """The row of an architecture for one model: functions of the config are replaced by their values.

    The row is that of `config.model_type`, or of `model_type` where the whole model has a config of its own.
    """
    row = ARCHITECTURES.get(str(model_type or getattr(config, "model_type", "")), _USUAL)
    settings = {field.name: getattr(row, field.name) for field in fields(row)}
    return replace(row, **{name: value(config) for name, value in settings.items() if callable(value)})


def chooses_keys(config: Any) -> bool:
    """Whether attention selects the top keys, so that what a position reads depends on the length of the text."""
    return any(getattr(config, name, None) is not None for name in ("index_topk", "index_topk_blocks"))


def depends_on_length(config: Any) -> bool:
    """Whether rotary angles depend on the length of the text."""
    return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in _rotary(config))


def rotary_change(config: Any) -> int | None:
    """The length of a text up to which one set of rotary angles is used, and another beyond it; None if there is one.

    At that length the generation of Phi-3 drops its cache and runs the text again.
    """
    longs = [rope for rope in _rotary(config) if rope.get("rope_type") == "longrope"]
    other = getattr(config, "original_max_position_embeddings", None)
    lengths = [rope.get("original_max_position_embeddings") or other for rope in longs]
    return min((length for length in lengths if length is not None), default=None)


def _rotary(config: Any) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings: one set, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(parameters for parameters in rope.values() if isinstance(parameters, dict))]

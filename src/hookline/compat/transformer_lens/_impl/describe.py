"""The HookedTransformerConfig of a pretrained model."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.cfg import Cfg, cfg_of
from hookline.transformer.norms import norm_of
from hookline.transformer.roles import MLP_IN, MLP_LINEAR, child
from hookline.weights.processing import processing_of

_POSITIONS = {"added to the stream": "standard", "rotary": "rotary", "alibi": "alibi"}

NO_BOS = frozenset({"bloom", "gpt_neox", "phi", "qwen", "qwen2", "qwen3"})
"""Architectures for which TransformerLens 3.5 does not prepend BOS by default."""

NO_BOS_IN_BRIDGE = frozenset(
    {
        *("bloom", "glm4_moe", "glm_moe_dsa", "gpt_neox", "granite", "granitemoe", "granitemoehybrid", "lfm2_moe"),
        *("mpt", "phi", "phimoe", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "smollm3"),
    }
)
"""The same for its TransformerBridge."""

_FINAL_RMS = frozenset(
    {"apertus", "gemma", "gemma2", "gemma3_text", "gpt_oss", "llama", "qwen", "qwen2", "qwen3"},
)
_FIXED: dict[str, dict[str, Any]] = {
    "bloom": {"act_fn": "gelu_fast", "n_ctx": 2048, "post_embedding_ln": True},
    "gptj": {"rotary_adjacent_pairs": True},
    "codegen": {"rotary_adjacent_pairs": True},
    "gpt_neo": {"use_attn_scale": False},
}
"""Fixed properties of architectures that are not in their configs."""


def described(module: nn.Module, anatomy: Anatomy, **extra_fields: Any) -> HookedTransformerConfig:
    """The config of a model; `extra_fields` are values that the model does not contain, such as the requested name."""
    cfg, config = cfg_of(module, anatomy), anatomy.config
    block = anatomy.blocks[0]
    same = ("n_layers", "d_model", "n_ctx", "d_head", "n_heads", "d_vocab", "model_name", "dtype", "device")
    fields: dict[str, Any] = {
        **{name: getattr(cfg, name) for name in same},
        "d_vocab_out": cfg.d_vocab,
        "n_key_value_heads": cfg.n_kv_heads if cfg.n_kv_heads != cfg.n_heads else None,
        "d_mlp": max(cfg.d_mlp) if isinstance(cfg.d_mlp, list) else cfg.d_mlp,
        "act_fn": cfg.act,
        "eps": float(_first(anatomy.main.ln_final, "eps", "variance_epsilon", "epsilon", "norm_eps") or 1e-5),
        "normalization_type": normalization(module, anatomy),
        "positional_embedding_type": _POSITIONS.get(cfg.positions, cfg.positions),
        **_rotary(cfg, config),
        **_windows(config, cfg.n_layers),
        **_experts(config),
        **_attention_scale(anatomy, cfg.d_head),
        "gated_mlp": _is_gated(anatomy),
        "final_rms": config.model_type in _FINAL_RMS,
        "use_qk_norm": isinstance(_first(block.attn, "q_norm", "q_layernorm", "query_norm"), nn.Module),
        "use_normalization_before_and_after": block.ln1 is not None and block.ln1_post is not None,
        "scale_attn_by_inverse_layer_idx": bool(_first(config, "scale_attn_by_inverse_layer_idx")),
        "parallel_attn_mlp": anatomy.main.architecture.parallel,
        "attn_scores_soft_cap": _first(config, "attn_logit_softcapping") or -1.0,
        "output_logits_soft_cap": _first(config, "final_logit_softcapping") or -1.0,
        "tie_word_embeddings": bool(_first(config, "tie_word_embeddings")),
        "original_architecture": type(module).__name__,
        "init_weights": False,
    }
    return HookedTransformerConfig(**(fields | _FIXED.get(config.model_type, {}) | extra_fields))


def _first(owner: Any, *names: str) -> Any:
    """The first of these attributes that is there and not None, or None."""
    return next((value for name in names if (value := getattr(owner, name, None)) is not None), None)


def normalization(module: nn.Module, anatomy: Anatomy) -> str | None:
    """`LN` or `RMS`, with `Pre` if the norms have no weights or these are folded; None without norms."""
    norm = norm_of(anatomy.main.ln_final, anatomy.width)
    if norm is None or isinstance(anatomy.main.ln_final, nn.Identity):
        return None
    done = processing_of(module)
    is_plain = isinstance(norm.gain, float) or (done is not None and done.fold_ln)
    return ("LN" if norm.subtracts_mean else "RMS") + ("Pre" if is_plain else "")


def _rotary(cfg: Cfg, config: Any) -> dict[str, Any]:
    """The rotated width, the base of the rotary frequencies, and that of layers with a window if it differs."""
    parameters = _first(config, "rope_parameters") or {}
    share = parameters.get("partial_rotary_factor", _first(config, "partial_rotary_factor") or 1.0)
    width = _first(config, "rotary_dim") or int(cfg.d_head * share)
    bases = {
        "rotary_base": parameters.get("full_attention", parameters).get("rope_theta"),
        "rotary_base_local": parameters.get("sliding_attention", {}).get("rope_theta"),
    }
    config_fields = {name: base for name, base in bases.items() if base is not None}
    return config_fields | {"rotary_dim": width if cfg.positions == "rotary" else None}


def _windows(config: Any, n_layers: int) -> dict[str, Any]:
    """The layers with sliding-window attention, and the window."""
    size, kinds = _first(config, "sliding_window", "window_size"), _first(config, "attention_layers", "layer_types")
    if kinds is None and size is not None and _first(config, "use_sliding_window") is not False:
        kinds = ["local"] * n_layers
    words = {"sliding_attention": "local", "full_attention": "global"}
    attn_types = [words.get(kind, kind) for kind in kinds or []][:n_layers]
    if size is None or "local" not in attn_types or not set(attn_types) <= {"local", "global"}:
        return {}
    return {"use_local_attn": True, "window_size": size, "attn_types": attn_types}


def _experts(config: Any) -> dict[str, int]:
    count, chosen = _first(config, "num_local_experts", "num_experts"), _first(config, "num_experts_per_tok")
    return {"num_experts": count, "experts_per_token": chosen} if count and chosen else {}


def _attention_scale(anatomy: Anatomy, d_head: int) -> dict[str, Any]:
    """The divisor of scores, if it is not sqrt(d_head)."""
    if getattr(anatomy.config, "scale_attn_weights", True) is False:
        return {"use_attn_scale": False}
    factor: Any = getattr(anatomy.blocks[0].attn, "scaling", None)
    is_other = isinstance(factor, float) and factor > 0 and not math.isclose(factor, d_head**-0.5, rel_tol=1e-6)
    return {"attn_scale": 1 / factor} if is_other else {}


def _is_gated(anatomy: Anatomy) -> bool:
    mlp = anatomy.blocks[0].mlp
    if mlp is None:
        return False
    linear = child(mlp, MLP_LINEAR)
    if linear is not None:
        return linear is not child(mlp, MLP_IN)
    # Otherwise one matrix holds both branches, or those of all experts.
    return any(hasattr(submodule, "gate_up_proj") for submodule in mlp.modules())

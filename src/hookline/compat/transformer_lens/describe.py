"""A HookedTransformerConfig that says of a pretrained model what TransformerLens would."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.anatomy.architectures import is_parallel
from hookline.anatomy.cfg import Cfg, cfg_of
from hookline.anatomy.norms import norm_of
from hookline.anatomy.roles import MLP_IN, MLP_LINEAR, Anatomy, child
from hookline.compat.transformer_lens.config import HookedTransformerConfig
from hookline.processing import processing_of

_POSITIONS = {"added to the stream": "standard", "rotary": "rotary", "alibi": "alibi"}


def described(module: nn.Module, anatomy: Anatomy, **known: Any) -> HookedTransformerConfig:
    """What can be read off the model; `known` is what cannot, such as the name it was asked for by."""
    cfg, config = cfg_of(module, anatomy), anatomy.config
    fields: dict[str, Any] = {
        "n_layers": cfg.n_layers,
        "d_model": cfg.d_model,
        "n_ctx": cfg.n_ctx,
        "d_head": cfg.d_head,
        "n_heads": cfg.n_heads,
        "n_key_value_heads": cfg.n_kv_heads if cfg.n_kv_heads != cfg.n_heads else None,
        "d_mlp": max(cfg.d_mlp) if isinstance(cfg.d_mlp, list) else cfg.d_mlp,
        "act_fn": cfg.act,
        "d_vocab": cfg.d_vocab,
        "d_vocab_out": cfg.d_vocab,
        "eps": _epsilon(anatomy),
        "normalization_type": normalization(module, anatomy),
        "positional_embedding_type": _POSITIONS.get(cfg.positions, cfg.positions),
        "rotary_dim": _rotary_dim(cfg, config),
        "gated_mlp": _is_gated(anatomy),
        "parallel_attn_mlp": is_parallel(config),
        "attn_scores_soft_cap": getattr(config, "attn_logit_softcapping", None) or -1.0,
        "output_logits_soft_cap": getattr(config, "final_logit_softcapping", None) or -1.0,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "original_architecture": type(module).__name__,
        "model_name": cfg.model_name,
        "dtype": cfg.dtype,
        "device": cfg.device,
        "init_weights": False,
    }
    return HookedTransformerConfig(**(fields | known))


def normalization(module: nn.Module, anatomy: Anatomy) -> str | None:
    """`LN` or `RMS`, with `Pre` if the norms have no weights, or these are folded elsewhere; None without norms."""
    norm = norm_of(anatomy.main.ln_final, anatomy.width)
    if norm is None or isinstance(anatomy.main.ln_final, nn.Identity):
        return None
    done = processing_of(module)
    is_plain = isinstance(norm.gain, float) or (done is not None and done.fold_ln)
    return ("LN" if norm.subtracts_mean else "RMS") + ("Pre" if is_plain else "")


def _epsilon(anatomy: Anatomy) -> float:
    norm = anatomy.main.ln_final
    own = (getattr(norm, name, None) for name in ("eps", "variance_epsilon", "epsilon", "norm_eps"))
    return next((float(each) for each in own if each is not None), 1e-5)


def _rotary_dim(cfg: Cfg, config: Any) -> int | None:
    if cfg.positions != "rotary":
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    return getattr(config, "rotary_dim", None) or int(cfg.d_head * share)


def _is_gated(anatomy: Anatomy) -> bool:
    mlp = anatomy.blocks[0].mlp
    if mlp is None:
        return False
    linear = child(mlp, MLP_LINEAR)
    return linear is not None and linear is not child(mlp, MLP_IN)

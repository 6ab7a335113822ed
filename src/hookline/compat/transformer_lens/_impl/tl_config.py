"""HookedTransformerConfig, and its conversion to the config of the native model."""

from __future__ import annotations

import math
import pprint
import random
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compat.transformer_lens._impl.native import NativeConfig


@dataclass(repr=False)
class HookedTransformerConfig:
    """The config of a HookedTransformer, with the names, order and defaults of TransformerLens; -1 means "derived".

        cfg = HookedTransformerConfig(n_layers=1, d_model=128, d_head=32, n_ctx=3, d_vocab=114, act_fn="relu")
        model = HookedTransformer(cfg)

    As in TransformerLens, creating a config with a seed seeds Python, NumPy and torch.
    """

    d_model: int
    d_head: int
    n_layers: int
    n_ctx: int
    n_heads: int = -1
    d_mlp: int | None = None
    d_vocab: int = -1
    device: str | torch.device | None = None
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    default_prepend_bos: bool = True
    positional_embedding_type: str = "standard"
    n_key_value_heads: int | None = None
    attn_only: bool = False
    gated_mlp: bool = False
    uses_rms_norm: bool = False
    eps: float = 1e-5
    layer_norm_folding: bool = False
    act_fn: str | None = "relu"
    normalization_type: str | None = "LN"
    num_experts: int | None = None
    experts_per_token: int | None = None
    final_rms: bool = False
    dtype: torch.dtype = torch.float32
    model_name: str = "custom"
    use_attn_scale: bool = True
    attn_scale: float = -1.0
    use_hook_mlp_in: bool = False
    use_attn_in: bool = False
    use_qk_norm: bool = False
    use_local_attn: bool = False
    ungroup_grouped_query_attention: bool = False
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    tokenizer_name: str | None = None
    window_size: int | None = None
    attn_types: list[str] | None = None
    init_mode: str = "gpt2"
    n_devices: int = 1
    attention_dir: str = "causal"
    seed: int | None = None
    initializer_range: float = -1.0
    init_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    d_vocab_out: int = -1
    parallel_attn_mlp: bool = False
    rotary_dim: int | None = None
    n_params: int | None = None
    use_hook_tokens: bool = False
    tokenizer_prepends_bos: bool | None = None
    post_embedding_ln: bool = False
    rotary_base: float = 10000
    rotary_base_local: float | None = None
    rotary_scaling_factor: float = 1.0
    trust_remote_code: bool = False
    rotary_adjacent_pairs: bool = False
    load_in_4bit: bool = False
    relative_attention_max_distance: int | None = None
    relative_attention_num_buckets: int | None = None
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_normalization_before_and_after: bool = False
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    use_NTK_by_parts_rope: bool = False  # noqa: N815
    NTK_by_parts_low_freq_factor: float = 1.0
    NTK_by_parts_high_freq_factor: float = 4.0
    NTK_by_parts_factor: float = 8.0
    NTK_original_ctx_len: int = 8192
    use_yarn_rope: bool = False
    yarn_factor: float = 1.0
    yarn_attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    norm_topk_prob: bool = False

    @property
    def n_kv_heads(self) -> int:
        """How many heads have keys and values of their own."""
        return self.n_key_value_heads or self.n_heads

    def __post_init__(self) -> None:
        if self.n_heads == -1:
            if self.d_model % self.d_head:
                raise HooklineError(f"d_model={self.d_model} is not a multiple of d_head={self.d_head}: pass n_heads")
            self.n_heads = self.d_model // self.d_head
        self._check()
        if self.seed is not None:
            self.set_seed_everywhere(self.seed)
        self.d_mlp = 4 * self.d_model if self.d_mlp is None else self.d_mlp
        self.d_vocab_out = self.d_vocab if self.d_vocab_out == -1 else self.d_vocab_out
        if self.initializer_range < 0:
            self.initializer_range = 0.8 / math.sqrt(self.d_model) if self.init_mode == "gpt2" else 1.0
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.use_attn_scale and self.attn_scale == -1.0:
            self.attn_scale = math.sqrt(self.d_head)
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.n_params = self._count()

    def _check(self) -> None:
        if self.use_local_attn and (self.window_size is None or self.attn_types is None):
            raise HooklineError("use_local_attn needs window_size, and attn_types: 'global' or 'local' for each layer")
        if not self.attn_only and self.act_fn is None:
            raise HooklineError("MLPs need act_fn: pass it, or attn_only=True")
        if (self.num_experts is None) != (self.experts_per_token is None):
            raise HooklineError("pass both num_experts and experts_per_token, or neither")

    def _count(self) -> int:
        """The number of weights in the layers, without biases, norms and embeddings."""
        assert self.d_mlp is not None  # filled in before
        of_mlp = 0 if self.attn_only else self.d_model * self.d_mlp * (2 + self.gated_mlp)
        if self.num_experts is not None:
            of_mlp = (of_mlp + self.d_model) * self.num_experts
        return self.n_layers * (4 * self.d_model * self.d_head * self.n_heads + of_mlp)

    @classmethod
    def unwrap(cls, config: Any) -> HookedTransformerConfig:
        """Convert a dictionary, or an object with `to_dict`, to a config; a config is returned unchanged."""
        if isinstance(config, cls):
            return config
        return cls.from_dict(config if isinstance(config, dict) else config.to_dict())

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> HookedTransformerConfig:
        """Create a config from a dictionary of its fields."""
        field_names = [field.name for field in fields(cls)]
        for name in config_dict:
            if name not in field_names:
                near = ", ".join(get_close_matches(name, field_names, n=3)) or "those of TransformerLens 3.5"
                raise HooklineError(f"HookedTransformerConfig has no field {name!r}; it has {near}")
        return cls(**config_dict)

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))

    def __repr__(self) -> str:
        return "HookedTransformerConfig:\n" + pprint.pformat(self.to_dict())

    def set_seed_everywhere(self, seed: int) -> None:
        """Seed Python's, NumPy's and torch's random numbers."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def is_layer_norm_activation(self) -> bool:
        """Whether a norm follows the activation function, as in `solu_ln`."""
        return self.act_fn is not None and self.act_fn.endswith("_ln")


TransformerLensConfig = HookedTransformerConfig
"""In TransformerLens, the base class."""


def to_native(cfg: HookedTransformerConfig) -> NativeConfig:
    """Convert to the config of the native model; options that it does not support raise.

    Flags for more hook points, such as `use_attn_result`, are ignored: these points always exist.
    """
    from hookline.compat.transformer_lens._impl.native import NativeConfig  # brings transformers

    _refuse(cfg)
    return NativeConfig(
        vocab_size=cfg.d_vocab,
        output_size=cfg.d_vocab_out,
        hidden_size=cfg.d_model,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_key_value_heads,
        head_dim=cfg.d_head,
        max_position_embeddings=cfg.n_ctx,
        attention_only=cfg.attn_only,
        intermediate_size=cfg.d_mlp,
        hidden_act=cfg.act_fn if cfg.act_fn is not None and not cfg.attn_only else "relu",
        gated_mlp=cfg.gated_mlp,
        parallel_attn_mlp=cfg.parallel_attn_mlp,
        normalization=cfg.normalization_type or "none",
        norm_eps=cfg.eps,
        final_rms=cfg.final_rms,
        norms_after=cfg.use_normalization_before_and_after,
        embedding_norm=cfg.post_embedding_ln,
        positions=cfg.positional_embedding_type,
        rotary_dim=cfg.rotary_dim,
        rotary_base=float(cfg.rotary_base),
        rotary_adjacent_pairs=cfg.rotary_adjacent_pairs,
        rotary_by_parts=_by_parts(cfg) if cfg.use_NTK_by_parts_rope else None,
        is_causal=cfg.attention_dir == "causal",
        layer_types=[_LAYER_TYPES[kind] for kind in _attn_types(cfg)],
        sliding_window=cfg.window_size if "local" in _attn_types(cfg) else None,
        attention_scale=float(cfg.attn_scale) if cfg.use_attn_scale else 1.0,
        scale_attn_by_inverse_layer_idx=cfg.scale_attn_by_inverse_layer_idx,
        qk_norm=cfg.use_qk_norm,
        attn_logit_softcapping=cfg.attn_scores_soft_cap if cfg.attn_scores_soft_cap > 0 else None,
        final_logit_softcapping=cfg.output_logits_soft_cap if cfg.output_logits_soft_cap > 0 else None,
        tie_word_embeddings=cfg.tie_word_embeddings,
        init_mode=cfg.init_mode if cfg.init_weights else None,
        initializer_range=float(cfg.initializer_range),
        seed=cfg.seed,
        dtype=cfg.dtype,
    )


_LAYER_TYPES = {"global": "full_attention", "local": "sliding_attention"}

_ROTARY = "its rotary positions have only rotary_dim, rotary_base, rotary_adjacent_pairs and NTK by parts"
_RELATIVE = "it has no relative positions"
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("num_experts", "experts_per_token", "norm_topk_prob"), "it has no mixture of experts"),
    "load_in_4bit": "its weights are not quantized",
    "n_devices": "it is on one device",
    **dict.fromkeys(("use_yarn_rope", "rotary_scaling_factor", "rotary_base_local"), _ROTARY),
    **dict.fromkeys(("relative_attention_max_distance", "relative_attention_num_buckets"), _RELATIVE),
    "decoder_start_token_id": "it has no encoder",
    "ungroup_grouped_query_attention": "it has n_key_value_heads keys and values: omit that instead",
    "uses_rms_norm": 'pass normalization_type="RMS" instead',
    "layer_norm_folding": 'pass normalization_type="LNPre" instead',
}
"""Fields that must have their default value, and why."""

_OWN_ARITHMETIC = ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM")
"""Architectures that TransformerLens computes differently from what the rest of the config says."""


def _by_parts(cfg: HookedTransformerConfig) -> list[float]:
    slowed, unchanged = cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor
    return [float(value) for value in (cfg.NTK_by_parts_factor, slowed, unchanged, cfg.NTK_original_ctx_len)]


def _attn_types(cfg: HookedTransformerConfig) -> list[str]:
    return (cfg.attn_types or [])[: cfg.n_layers] if cfg.use_local_attn else ["global"] * cfg.n_layers


def _refuse(cfg: HookedTransformerConfig) -> None:
    """Raise for the first option that the native model does not support."""
    from hookline.compat.transformer_lens._impl.native import native_config

    defaults = {field.name: field.default for field in fields(cfg)}
    for name, why in _REFUSED.items():
        if getattr(cfg, name) != defaults[name]:
            raise HooklineError(f"{name}={getattr(cfg, name)!r} is not supported by the native model: {why}")
    choices: dict[str, tuple[str | None, ...]] = {
        "positional_embedding_type": native_config.POSITIONS,
        "normalization_type": (None, *native_config.NORMALIZATIONS[1:]),
        "attention_dir": ("causal", "bidirectional"),
        "init_mode": native_config.INIT_MODES,
    } | ({} if cfg.attn_only else {"act_fn": native_config.ACTIVATIONS})
    native_config.check_choices(cfg, choices)
    reasons = {
        "d_vocab is not known: pass it, or a tokenizer": cfg.d_vocab < 1,
        f"original_architecture={cfg.original_architecture!r} has its own arithmetic: hook the model itself": (
            cfg.original_architecture in _OWN_ARITHMETIC
        ),
        "attn_types and window_size have no effect without use_local_attn=True": not cfg.use_local_attn
        and not (cfg.attn_types is None and cfg.window_size is None),
        "attn_types can be 'global' and 'local' only": any(kind not in _LAYER_TYPES for kind in _attn_types(cfg)),
        "attn_scale has no effect with use_attn_scale=False": not cfg.use_attn_scale and cfg.attn_scale not in (-1, 1),
    }
    for why, is_so in reasons.items():
        if is_so:
            raise HooklineError(why)

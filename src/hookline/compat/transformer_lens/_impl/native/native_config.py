"""The config of a native toy transformer, with validation."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from hookline.errors import HooklineError

NORMALIZATIONS = ("none", "LN", "LNPre", "RMS", "RMSPre")
POSITIONS = ("standard", "rotary", "shortformer", "alibi", "none")
ACTIVATIONS = (
    *("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "silu"),
    *("solu", "solu_ln"),
)
INIT_MODES = ("gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal")
LAYER_TYPES = ("full_attention", "sliding_attention")

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "normalization": NORMALIZATIONS,
    "positions": POSITIONS,
    "hidden_act": ACTIVATIONS,
    "init_mode": (*INIT_MODES, None),
}
_COUNTS = (
    *("vocab_size", "output_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
)
_POSITIVE = ("attn_logit_softcapping", "final_logit_softcapping", "attention_scale", "sliding_window")

_OF_TRANSFORMERS = frozenset(
    {
        *("model_type", "torch_dtype", "name_or_path", "output_attentions", "attn_implementation", "num_labels"),
        *("experts_implementation", "auto_map"),
    }
)
"""Settings that transformers stores in every config, in addition to the fields of the class."""


class NativeConfig(PreTrainedConfig):
    """Sizes and options of a `NativeTransformer`; inconsistent options raise.

    Args:
        output_size: The number of logits; by default the vocabulary size.
        num_key_value_heads: Fewer than heads if heads share keys and values.
        head_dim: By default hidden_size / num_attention_heads.
        hidden_act: A name of transformers, or `solu`, `x * softmax(x)`; `solu_ln` adds a LayerNorm.
        parallel_attn_mlp: Attention and MLP read the same stream.
        normalization: `none`, `LN` or `RMS`; `LNPre` and `RMSPre` are those without parameters.
        final_rms: The final norm is an RMSNorm, independent of the others.
        norms_after: The outputs of attention and MLP are normalized before they are added.
        positions: `standard`: learned, added to the stream; `shortformer`: learned, read by queries and keys only.
        rotary_adjacent_pairs: Rotary pairs are adjacent; otherwise each pair has one entry in either half.
        rotary_by_parts: Slower rotations for longer contexts, as in Llama 3.1: the factor, the numbers of turns in the
            old context up to which rotations are slowed down and from which they are not, and the old context.
        layer_types: `full_attention` or `sliding_attention` (the last `sliding_window` positions), one per layer.
        attention_scale: The divisor of scores; by default sqrt(head_dim).
        scale_attn_by_inverse_layer_idx: Scores are also divided by the layer number, counted from 1.
        init_mode: How weights are initialized (see `initial.py`); None keeps torch's initialization.
        initializer_range: The standard deviation for `gpt2`, a gain for the others.
        seed: The same seed gives the same weights on every device.
    """

    model_type: ClassVar[str] = "hookline_native"

    vocab_size: int = 64
    output_size: int | None = None
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 64

    attention_only: bool = False
    intermediate_size: int | None = None
    hidden_act: str = "relu"
    gated_mlp: bool = False
    parallel_attn_mlp: bool = False

    normalization: str = "LN"
    norm_eps: float = 1e-5
    final_rms: bool = False
    norms_after: bool = False
    embedding_norm: bool = False

    positions: str = "standard"
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    rotary_adjacent_pairs: bool = False
    rotary_by_parts: list[float] | None = None

    is_causal: bool = True
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    attention_scale: float | None = None
    scale_attn_by_inverse_layer_idx: bool = False
    qk_norm: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    tie_word_embeddings: bool = False
    init_mode: str | None = "gpt2"
    initializer_range: float | None = None
    seed: int | None = None

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        inherited_names = _OF_TRANSFORMERS | GenerationConfig._get_default_generation_params().keys()
        # transformers would store an unknown name as an attribute.
        if unknown := [name for name in kwargs if name not in inherited_names and not name.startswith("_")]:
            field_names = [name for name in NativeConfig.__annotations__ if name != "model_type"]
            raise HooklineError(f"NativeConfig has no {', '.join(unknown)}: its fields are {', '.join(field_names)}")
        self._check_counts()
        self._fill_in()
        self._check_counts()
        if self.attn_logit_softcapping is not None and kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = "eager"  # fused attention has no soft cap
        super().__post_init__(**kwargs)
        check_choices(self, _CHOICES)
        self._check_together()

    def _fill_in(self) -> None:
        """Fill in values that follow from others."""
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise HooklineError(
                f"{self.num_attention_heads} heads do not divide hidden_size={self.hidden_size}: pass head_dim"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        defaults = {
            "output_size": self.vocab_size,
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": head_dim,
            "intermediate_size": 4 * self.hidden_size,
            "attention_scale": head_dim**0.5,
            "rotary_dim": head_dim if self.positions == "rotary" else None,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "initializer_range": 0.8 / self.hidden_size**0.5 if self.init_mode == "gpt2" else 1.0,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _check_counts(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise HooklineError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in _POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise HooklineError(f"{name}={getattr(self, name)}: must be positive or None")

    def _check_together(self) -> None:
        heads, groups, rotary = self.num_attention_heads, self.num_key_value_heads or 1, self.rotary_dim
        kinds, head_dim = self.layer_types or [], self.head_dim or 0
        has_windows, has_norms = "sliding_attention" in kinds, self.normalization != "none"
        refused = {
            f"{heads} heads are not a multiple of {groups} key/value heads": heads % groups,
            f"rotary_dim={rotary} must be even and at most head_dim={head_dim}": rotary is not None
            and (rotary % 2 or not 0 < rotary <= head_dim),
            f"layer_types has {len(kinds)} for {self.num_hidden_layers} layers": len(kinds) != self.num_hidden_layers,
            f"layer_types are {' and '.join(map(repr, LAYER_TYPES))}, not {kinds}": not set(kinds) <= {*LAYER_TYPES},
            "rotary_dim is for positions='rotary'": rotary is not None and self.positions != "rotary",
            "sliding attention needs a sliding_window": has_windows and self.sliding_window is None,
            "sliding_window is for layers of type 'sliding_attention'": self.sliding_window and not has_windows,
            "sliding attention looks back: it needs is_causal=True": has_windows and not self.is_causal,
            "parallel_attn_mlp needs an MLP, and attention_only has none": self.attention_only
            and self.parallel_attn_mlp,
            "gated_mlp needs an MLP, and attention_only has none": self.attention_only and self.gated_mlp,
            "solu_ln norms one branch: it has no gate": self.gated_mlp and self.hidden_act == "solu_ln",
            "norms_after needs a normalization": self.norms_after and not has_norms,
            "final_rms needs a normalization": self.final_rms and not has_norms,
            "tied embeddings have as many logits as tokens": self.tie_word_embeddings
            and self.output_size != self.vocab_size,
        }
        for why, is_so in refused.items():
            if is_so:
                raise HooklineError(f"inconsistent config: {why}")


def check_choices(config: Any, choices: dict[str, tuple[str | None, ...]]) -> None:
    """Raise for the first field that has none of its possible values."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise HooklineError(f"{name}={getattr(config, name)!r}: must be one of {', '.join(map(repr, allowed))}")

"""The layers of a native transformer, and the modules they are made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from hookline.compat.transformer_lens.native.native_attention import NativeAttention
from hookline.compat.transformer_lens.native.native_config import NativeConfig


def make_norm(config: NativeConfig, kind: str, width: int | None = None) -> nn.Module:
    """A norm of this kind, by default of the width of the stream; `none` is the identity."""
    width = config.hidden_size if width is None else width
    if kind == "none":
        return nn.Identity()
    make = nn.LayerNorm if kind.startswith("LN") else nn.RMSNorm
    return make(width, config.norm_eps, elementwise_affine=not kind.endswith("Pre"))


class NormedEmbedding(nn.Embedding):
    """Embeddings followed by a LayerNorm."""

    def __init__(self, config: NativeConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.ln = make_norm(config, "LN")

    def forward(self, input: Tensor) -> Tensor:
        """The normalized embeddings of tokens."""
        return self.ln(super().forward(input))


class SoLU(nn.Module):
    """`x * softmax(x)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it over the neurons."""
        return x * x.softmax(-1)


class NativeMLP(nn.Module):
    """An MLP: linear, activation function, linear; optionally gated."""

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None  # set by the config
        width = config.intermediate_size
        self.is_gated = config.gated_mlp
        if self.is_gated:
            self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=not self.is_gated)
        self.act = SoLU() if config.hidden_act.startswith("solu") else ACT2FN[config.hidden_act]
        kind = "none" if config.hidden_act != "solu_ln" else "LN" if config.normalization == "LN" else "LNPre"
        self.ln = make_norm(config, kind, width)
        self.down_proj = nn.Linear(width, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The output of the MLP."""
        if self.is_gated:
            gate = self.act(self.gate_proj(hidden_states))
            return self.down_proj(gate * self.up_proj(hidden_states))
        return self.down_proj(self.ln(self.act(self.up_proj(hidden_states))))


class NativeBlock(GradientCheckpointingLayer):
    """One layer: attention and an optional MLP, each reading the normalized stream and adding to it."""

    def __init__(self, config: NativeConfig, layer: int) -> None:
        super().__init__()
        self.has_mlp, self.is_parallel, self.norms_after = (
            not config.attention_only,
            config.parallel_attn_mlp,
            config.norms_after,
        )
        after = config.normalization.removesuffix("Pre")
        self.ln1 = make_norm(config, config.normalization)
        self.attn = NativeAttention(config, layer)
        if self.norms_after:
            self.ln1_post = make_norm(config, after)
        if self.has_mlp:
            self.ln2 = make_norm(config, config.normalization)
            self.mlp = NativeMLP(config)
        if self.has_mlp and self.norms_after:
            self.ln2_post = make_norm(config, after)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """The stream after this layer; `options` go to attention."""
        attended, _ = self.attn(self.ln1(hidden_states), **options)
        attended = self.ln1_post(attended) if self.norms_after else attended
        if not self.has_mlp:
            return hidden_states + attended
        if self.is_parallel:
            return hidden_states + attended + self._of_mlp(hidden_states)
        middle = hidden_states + attended
        return middle + self._of_mlp(middle)

    def _of_mlp(self, stream: Tensor) -> Tensor:
        added = self.mlp(self.ln2(stream))
        return self.ln2_post(added) if self.norms_after else added

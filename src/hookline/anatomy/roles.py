"""Roles: the modules of a transformer by what they do, found by the names that models give them.

A new architecture that uses other names is a new name in a table here; one that computes something in another way is
a row in `variants.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

# Attention in name, but without a softmax: known by what they have.
LINEAR_ATTENTION = (
    "A_log",
    "slope_rate",
    "dt_bias",
    "conv1d",
    "g_norm",
    "decay",
    "in_proj_qkv",
    "f_a_proj",
    "time_decay",
)

ATTENTION = (
    "self_attn",
    "attn",
    "self_attention",
    "multi_head_attention",
    "attention.self",
    "attention",
    "self_att.self_attention",
    "norm_attn_norm.attn",
)
MIXER = (
    "mixer",
    "mamba",
    "linear_attn",
    "conv",
    "short_conv",
    "temporal_block",
    "attention",
)  # a layer without softmax
OUTPUT = (
    "o_proj",
    "out_proj",
    "c_proj",
    "dense",
    "Wo",
    "attention_out",
    "out_lin",
    "proj",
    "o",
    "linear_out",
    "output.dense",
)
QUERY = ("q_proj", "query", "Wq", "project_q", "q_lin", "q", "q_b_proj")
KEY = ("k_proj", "key", "Wk", "project_k", "k_lin", "k")
VALUE = ("v_proj", "value", "Wv", "project_v", "v_lin", "v")
FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv")

MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "ff", "channel_block", "ffn.ffn", "mlp_block")
MLP_IN = (
    "gate_proj",
    "c_fc",
    "dense_h_to_4h",
    "fc_in",
    "w1",
    "fc1",
    "up_proj",
    "lin1",
    "intermediate.dense",
    "0",
    "wi_0",
    "wi",
)
MLP_LINEAR = ("up_proj", "w3", "wi_1")
ROUTER = ("gate", "router")
EXPERTS = ("experts",)
MLP_OUT = ("down_proj", "c_proj", "dense_4h_to_h", "fc_out", "w2", "fc2", "lin2", "output.dense", "2", "wo", "w_out")

NORM_BEFORE_ATTENTION = (
    "input_layernorm", "ln_1", "norm_1", "attention_layernorm", "self_attn_layer_norm", "operator_norm", "attn_norm",
    "temporal_pre_norm", "norm", "layernorm1", "ln1", "self_att.layernorm_before_attention", "attention.ln", "norm1",
    "input_norm", "ln_attn", "pre_attention_layernorm", "norm_attn_norm.norm_1",
)  # fmt: skip
NORM_AFTER_ATTENTION = ("post_self_attn_layernorm", "post_norm1", "post_attention_norm")
NORM_BEFORE_MLP = (
    "pre_feedforward_layernorm", "pre_mlp_layernorm", "ln_2", "norm_2", "feedforward_layernorm", "ffn_norm", "mlp_norm",
    "channel_pre_norm", "layernorm2", "ln2", "ffn.layernorm_before_ffn", "ln", "pre_ff_layernorm", "norm2", "ln_mlp",
    "norm_attn_norm.norm_2", "post_attention_layernorm", "final_layer_norm",
)  # fmt: skip
NORM_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2")

FINAL_NORM = (
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm", "norm_f", "final_norm", "embedding_norm",
    "layernorm", "output_layernorm", "ln_final", "layer_norm_out",
)  # fmt: skip
POSITIONS = (
    "wpe",
    "embed_positions",
    "position_embeddings",
    "positions_embed",
    "position_embedding",
    "embeddings.position_embeddings",
)


def child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The first of these names that the module has, dotted ones included."""
    for name in names:
        found: Any = module
        for part in name.split("."):
            found = found._modules.get(part) if found is not None else None
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class Block:
    """One layer: its module, and those in it that play a role. None where there is no such module."""

    module: nn.Module
    attn: nn.Module | None
    mixer: nn.Module | None
    o: nn.Module | None
    mlp: nn.Module | None
    mlp_out: nn.Module | None
    ln1: nn.Module | None
    ln1_post: nn.Module | None
    ln2: nn.Module | None
    ln2_post: nn.Module | None
    post_norm: nn.Module | None
    """BERT's kind: the norm of the stream after the attention's addition, and after the MLP's."""
    post_norm_2: nn.Module | None
    adds_in_attention: bool
    """The module around the attention adds the stream itself."""


@dataclass(frozen=True)
class Anatomy:
    """A transformer's modules by role."""

    kind: str
    config: Any
    blocks: tuple[Block, ...]
    embed: nn.Module
    pos_embed: nn.Module | None
    ln_final: nn.Module | None
    unembed: nn.Module | None

    @property
    def width(self) -> int:
        """How many numbers the stream has at each position."""
        return self.config.hidden_size


def find_anatomy(model: nn.Module) -> Anatomy | None:
    """The anatomy of a Hugging Face model, or None if its layers are not where they usually are."""
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    layers = _layers(model, config)
    if layers is None:
        return None
    path, stack = layers
    parent = model.get_submodule(path.rpartition(".")[0])
    return Anatomy(
        kind=config.model_type,
        config=config,
        blocks=tuple(_block(layer) for layer in stack),
        embed=model.get_input_embeddings(),  # type: ignore[operator]
        pos_embed=child(parent, POSITIONS) or _position_embedding_beside(model, path),
        ln_final=child(parent, FINAL_NORM),
        unembed=model.get_output_embeddings(),  # type: ignore[operator]
    )


def _layers(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList] | None:
    """The stack of layers: as long as the configuration says, and nearest to the top."""
    stacks = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and _is_layer(module[0])
    ]
    right = [found for found in stacks if len(found[1]) == config.num_hidden_layers]
    if len({len(path.split(".")) for path, _ in right}) > 1 or len(right) == 1:
        return min(right, key=lambda found: found[0].count("."))
    return None


def _is_layer(module: nn.Module) -> bool:
    return child(module, ATTENTION) is not None or child(module, MIXER) is not None


def _position_embedding_beside(model: nn.Module, path: str) -> nn.Module | None:
    """BERT keeps its position embeddings in a module beside the encoder."""
    parent, _, _ = path.rpartition(".")
    while parent:
        parent = parent.rpartition(".")[0]
        found = child(model.get_submodule(parent), POSITIONS)
        if found is not None:
            return found
    return None


def _block(layer: nn.Module) -> Block:
    attn = child(layer, ATTENTION)
    linear = attn if attn is not None and any(hasattr(attn, name) for name in LINEAR_ATTENTION) else None
    attn = None if linear is not None else attn
    mlp = child(layer, MLP)
    norms = _norms(layer)
    return Block(
        module=layer,
        attn=attn,
        mixer=None if attn is not None else linear or child(layer, MIXER),
        o=(child(attn, OUTPUT) if attn is not None else None) or child(layer, ("attention.output.dense",)),
        mlp=mlp,
        mlp_out=child(mlp, MLP_OUT) if mlp is not None else child(layer, ("fc2", "output.dense")),
        ln1=norms[0],
        ln1_post=norms[1],
        ln2=norms[2],
        ln2_post=norms[3],
        post_norm=child(layer, ("attention.output.LayerNorm",)),
        post_norm_2=child(layer, ("output.LayerNorm",)),
        adds_in_attention=attn is not None and attn is child(layer, ("attention.self",)),
    )


def _norms(layer: nn.Module) -> tuple[nn.Module | None, ...]:
    """Before and after the attention, before and after the MLP.

    `post_attention_layernorm` is the norm before the MLP, unless there is another one for that, or the layer has no
    norm before the attention but one after the MLP: then it means what it says.
    """
    before_attention, before_mlp = child(layer, NORM_BEFORE_ATTENTION), child(layer, NORM_BEFORE_MLP)
    after_attention, after_mlp = child(layer, NORM_AFTER_ATTENTION), child(layer, NORM_AFTER_MLP)
    ambiguous = layer._modules.get("post_attention_layernorm")
    if ambiguous is not None and before_mlp is not ambiguous:
        after_attention = after_attention or ambiguous
    elif ambiguous is not None and before_attention is None and after_mlp is not None:
        after_attention, before_mlp = ambiguous, None
    return before_attention, after_attention, before_mlp, after_mlp

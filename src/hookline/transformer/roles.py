"""Roles: the names that models give to the modules of a transformer.

For a new architecture with other module names, add the names here; if its arithmetic differs, add a row to
`architectures.py`. Of the names in a table, the first one that a module has counts.
"""

from __future__ import annotations

from typing import Any

from torch import nn

ATTENTION = (
    "self_attn", "attn.attention", "attn", "self_attention", "attention.attn", "multi_head_attention",
    "attention.self", "attention", "self_att.self_attention", "norm_attn_norm.attn", "layer.0.SelfAttention",
)  # fmt: skip
CROSS_ATTENTION = ("encoder_attn", "cross_attention", "crossattention.self", "cross_attn", "layer.1.EncDecAttention")
MIXER = ("mixer", "mamba", "linear_attn", "conv", "short_conv", "temporal_block", "attention")
"""A layer without softmax attention has one of these instead."""
LINEAR_ATTENTION = (
    "A_log", "slope_rate", "dt_bias", "conv1d", "g_norm", "decay", "in_proj_qkv", "f_a_proj", "time_decay",
)  # fmt: skip
"""Attributes of modules that are called attention but have no softmax."""
ATTENTION_IN_PARTS = ("num_random_blocks", "ngram")
"""Attributes of attention modules that compute no pattern of all tokens: in blocks, or for several streams."""
QUERY = ("q_proj", "query", "Wq", "project_q", "q_lin", "q", "q_b_proj")
KEY = ("k_proj", "key", "Wk", "project_k", "k_lin", "k")
VALUE = ("v_proj", "value", "Wv", "project_v", "v_lin", "v")
FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv")
OUTPUT = (
    "o_proj", "out_proj", "c_proj", "dense", "Wo", "attention_out", "out_lin", "proj", "o", "linear_out",
    "output.dense", "projection_layer",
)  # fmt: skip

MLP = (
    "mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "ff", "channel_block", "ffn.ffn", "mlp_block",
    "layer.2.DenseReluDense", "layer.1.DenseReluDense", "layer.2.mlp", "layer.1.mlp",
)  # fmt: skip
MLP_IN = (
    "gate_proj", "c_fc", "dense_h_to_4h", "fc_in", "w1", "fc1", "up_proj", "lin1", "intermediate.dense", "0", "wi_0",
    "wi", "linear_fc1",
)  # fmt: skip
MLP_LINEAR = ("up_proj", "w3", "wi_1")
MLP_OUT = (
    "down_proj", "c_proj", "dense_4h_to_h", "fc_out", "w2", "fc2", "lin2", "output.dense", "2", "wo", "w_out",
    "linear_fc2",
)  # fmt: skip
ROUTER = ("gate", "router")
EXPERTS = ("experts",)

NORM_BEFORE_ATTENTION = (
    "input_layernorm", "ln_1", "norm_1", "attention_layernorm", "self_attn_layer_norm", "operator_norm", "attn_norm",
    "temporal_pre_norm", "norm", "layernorm1", "ln1", "self_att.layernorm_before_attention", "attention.ln", "norm1",
    "input_norm", "ln_attn", "pre_attention_layernorm", "norm_attn_norm.norm_1", "layer.0.layer_norm",
    "pre_self_attn_layernorm", "attention.LayerNorm", "attention_ln", "sa_layer_norm", "layer_norm1",
    "layernorm_before", "attention_norm",
)  # fmt: skip
NORM_AFTER_ATTENTION = ("post_self_attn_layernorm", "post_norm1", "post_attention_norm", "ln1_post", "layer_scale1")
NORM_OF_CROSS = (
    "encoder_attn_layer_norm", "cross_attention_layer_norm", "cross_attn_layer_norm", "pre_cross_attn_layernorm",
    "layer.1.layer_norm",
)  # fmt: skip
NORM_BEFORE_MLP = (
    "pre_feedforward_layernorm", "pre_mlp_layernorm", "ln_2", "norm_2", "feedforward_layernorm", "ffn_norm",
    "mlp_norm", "channel_pre_norm", "layernorm2", "ln2", "ffn.layernorm_before_ffn", "ln", "pre_ff_layernorm",
    "norm2", "ln_mlp", "norm_attn_norm.norm_2", "layer.2.layer_norm", "layer.1.layer_norm", "ff_layer_norm",
    "ffn_layer_norm", "feed_forward_layer_norm", "output_layer_norm", "post_attention_layernorm", "final_layer_norm",
    "layer_norm2", "layernorm_after",
)  # fmt: skip
NORM_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2", "ln2_post", "layer_scale2")
FINAL_NORM = (
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm", "norm_f", "final_norm", "embedding_norm",
    "layernorm", "output_layernorm", "ln_final", "layer_norm_out", "post_layernorm", "layernorm_post",
)  # fmt: skip

POSITIONS = (
    "wpe", "embed_positions", "position_embeddings", "positions_embed", "position_embedding", "pos_embed",
    "embeddings.position_embeddings", "embeddings.position_embedding",
)  # fmt: skip
EMBEDDING = ("embeddings.token_embedding", "embeddings.word_embeddings", "embed_tokens")
"""Of a model whose class does not say which module embeds its tokens."""
EMBEDDING_NORM = ("word_embeddings_layernorm",)
GAINS = (("lambda_1", "lambda_2"), ("gate_attn", "gate_ffn"), ("cross_attn_attn_gate", "cross_attn_mlp_gate"))
"""Parameters that multiply the outputs of attention and MLP before they are added."""

TOWER = ("visual", "vision_tower", "vision_model")
LANGUAGE = ("language_model", "text_model")
PATCHES = ("embeddings.patch_embedding", "embeddings.patch_embeddings", "patch_embed", "patch_embedding", "patch_conv")
PRE_NORM = ("pre_layrnorm", "ln_pre")
PROJECTOR = ("multi_modal_projector", "connector", "visual.merger")
EARLY_PROJECTORS = ("visual.deepstack_merger_list",)
"""Projectors that read earlier layers of the vision tower."""

_TABLES = (
    *(ATTENTION, CROSS_ATTENTION, MIXER, QUERY, KEY, VALUE, FUSED, OUTPUT),
    *(MLP, MLP_IN, MLP_LINEAR, MLP_OUT, ROUTER, EXPERTS),
    *(NORM_BEFORE_ATTENTION, NORM_AFTER_ATTENTION, NORM_BEFORE_MLP, NORM_AFTER_MLP, FINAL_NORM),
    *(POSITIONS, TOWER, LANGUAGE, PROJECTOR),
)


def is_same_role(name: str, other: str) -> bool:
    """Whether two names of modules are the same, or are those of one role in different models."""
    return name == other or any(name in names and other in names for names in _TABLES)


def child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The submodule with the first of these (dotted) names that exists; None if none does."""
    for name in names:
        submodule: Any = module
        for part in name.split("."):
            submodule = submodule._modules.get(part) if submodule is not None else None
        if submodule is not None:
            return submodule
    return None

"""Roles: the modules of a transformer by function, found by name.

For a new architecture with other module names, add the names to the tables here; if its arithmetic differs, add a row
to `architectures.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hookline.transformer.architectures import is_post_norm

# Modules called attention that have no softmax, recognized by their attributes.
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
    "attn.attention",
    "attn",
    "self_attention",
    "attention.attn",
    "multi_head_attention",
    "attention.self",
    "attention",
    "self_att.self_attention",
    "norm_attn_norm.attn",
    "layer.0.SelfAttention",
)
CROSS_ATTENTION = (
    "encoder_attn",
    "cross_attention",
    "crossattention.self",
    "cross_attn",
    "layer.1.EncDecAttention",
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
    "projection_layer",
)
QUERY = ("q_proj", "query", "Wq", "project_q", "q_lin", "q", "q_b_proj")
KEY = ("k_proj", "key", "Wk", "project_k", "k_lin", "k")
VALUE = ("v_proj", "value", "Wv", "project_v", "v_lin", "v")
FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv")

MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "ff", "channel_block", "ffn.ffn", "mlp_block",
       "layer.2.DenseReluDense", "layer.1.DenseReluDense", "layer.2.mlp", "layer.1.mlp")  # fmt: skip
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
    "linear_fc1",
)
MLP_LINEAR = ("up_proj", "w3", "wi_1")
ROUTER = ("gate", "router")
EXPERTS = ("experts",)
MLP_OUT = ("down_proj", "c_proj", "dense_4h_to_h", "fc_out", "w2", "fc2", "lin2", "output.dense", "2", "wo", "w_out",
           "linear_fc2")  # fmt: skip

NORM_BEFORE_ATTENTION = (
    "input_layernorm", "ln_1", "norm_1", "attention_layernorm", "self_attn_layer_norm", "operator_norm", "attn_norm",
    "temporal_pre_norm", "norm", "layernorm1", "ln1", "self_att.layernorm_before_attention", "attention.ln", "norm1",
    "input_norm", "ln_attn", "pre_attention_layernorm", "norm_attn_norm.norm_1", "layer.0.layer_norm",
    "pre_self_attn_layernorm", "attention.LayerNorm", "attention_ln", "sa_layer_norm", "layer_norm1",
    "layernorm_before", "attention_norm",
)  # fmt: skip
NORM_AFTER_ATTENTION = ("post_self_attn_layernorm", "post_norm1", "post_attention_norm", "ln1_post", "layer_scale1")
NORM_BEFORE_MLP = (
    "pre_feedforward_layernorm", "pre_mlp_layernorm", "ln_2", "norm_2", "feedforward_layernorm", "ffn_norm", "mlp_norm",
    "channel_pre_norm", "layernorm2", "ln2", "ffn.layernorm_before_ffn", "ln", "pre_ff_layernorm", "norm2", "ln_mlp",
    "norm_attn_norm.norm_2", "layer.2.layer_norm", "layer.1.layer_norm", "ff_layer_norm", "ffn_layer_norm",
    "feed_forward_layer_norm", "output_layer_norm", "post_attention_layernorm", "final_layer_norm", "layer_norm2",
    "layernorm_after",
)  # fmt: skip
NORM_OF_CROSS = (
    "encoder_attn_layer_norm", "cross_attention_layer_norm", "cross_attn_layer_norm", "pre_cross_attn_layernorm",
    "layer.1.layer_norm",
)  # fmt: skip
NORM_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2", "ln2_post", "layer_scale2")

FINAL_NORM = (
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm", "norm_f", "final_norm", "embedding_norm",
    "layernorm", "output_layernorm", "ln_final", "layer_norm_out", "post_layernorm", "layernorm_post",
)  # fmt: skip
POSITIONS = (
    "wpe",
    "embed_positions",
    "position_embeddings",
    "positions_embed",
    "position_embedding",
    "pos_embed",
    "embeddings.position_embeddings",
    "embeddings.position_embedding",
)
EMBEDDING_NORM = ("word_embeddings_layernorm",)
GAINS = (("lambda_1", "lambda_2"), ("gate_attn", "gate_ffn"), ("cross_attn_attn_gate", "cross_attn_mlp_gate"))
"""Names of parameters that multiply the outputs of attention and MLP before they are added."""


def child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The submodule with the first of these (dotted) names that exists; None if none does."""
    for name in names:
        found: Any = module
        for part in name.split("."):
            found = found._modules.get(part) if found is not None else None
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class Block:
    """One layer: its module, and its submodules by role; None for a role that it does not have."""

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
    """The norm of the stream after attention, as in BERT; `post_norm_2` is the one after the MLP."""
    post_norm_2: nn.Module | None
    adds_in_attention: bool
    """Whether the module around attention adds the residual itself."""
    cross: CrossAttention | None = None
    gains: tuple[str, str] | None = None
    """Names of the parameters that multiply the outputs of attention and MLP."""


@dataclass(frozen=True)
class CrossAttention:
    """The cross-attention of a decoder layer."""

    attn: nn.Module
    o: nn.Module | None
    norm: nn.Module | None
    """The norm before it; in a post-norm model, after it."""
    post_norm: nn.Module | None
    """The norm of its output, before that is added to the stream."""
    stream_norm: nn.Module | None
    """The norm of the stream after the addition, as in BERT."""


@dataclass(frozen=True)
class Stack:
    """A stack of layers, with its embeddings and final norm."""

    name: str
    """The prefix of its layers: "blocks", "encoder" or "decoder"."""
    config: Any
    blocks: tuple[Block, ...]
    embed: nn.Module
    pos_embed: nn.Module | None
    ln_final: nn.Module | None
    width: int
    """The width of the stream."""
    embed_norm: nn.Module | None = field(default=None, kw_only=True)
    """The norm of the token embeddings, before they enter the stream."""


@dataclass(frozen=True)
class Tower(Stack):
    """The layers of a vision tower."""

    ln_pre: nn.Module | None = None
    """The norm of the stream before the first layer."""
    is_packed: bool = False
    """Whether all images are packed into one row of patches, without a batch axis."""
    read: int | None = None
    """The number of layers that affect the model's output, if not all do."""


@dataclass(frozen=True)
class Projector:
    """The module that maps vision features to the language model's embedding space."""

    name: str
    module: nn.Module
    after: int | None = None
    """The layer of the tower that it reads, if not the last."""
    ordered_by: nn.Module | None = None
    """The module that restores the order of its tokens, if it returns them in another order."""


@dataclass(frozen=True)
class Anatomy:
    """A transformer's modules by role."""

    kind: str
    config: Any
    stacks: tuple[Stack, ...]
    unembed: nn.Module | None
    towers: tuple[Tower, ...] = ()
    """The vision towers of a vision-language model."""
    projectors: tuple[Projector, ...] = ()

    @property
    def main(self) -> Stack:
        """The stack that produces the output."""
        return self.stacks[-1]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The layers of the main stack."""
        return self.main.blocks

    @property
    def width(self) -> int:
        """The width of the stream."""
        return self.main.width

    @property
    def every_stack(self) -> tuple[Stack, ...]:
        """All stacks, including vision towers."""
        return (*self.towers, *self.stacks)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return len(self.stacks) > 1


def find_anatomy(model: nn.Module) -> Anatomy | None:
    """The anatomy of a Hugging Face model; None if its layers are not found."""
    from hookline.transformer.vision_towers import find_vlm  # it imports this module

    return find_vlm(model) or _find_lm(model)


def _find_lm(model: nn.Module) -> Anatomy | None:
    """The anatomy of a language model or a speech model."""
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if getattr(model.config, "is_encoder_decoder", False):
        encoder, decoder = model.get_encoder(), model.get_decoder()  # type: ignore[operator]
        stacks = (stack_in("encoder", encoder, None), stack_in("decoder", decoder, None))
        model_type = model.config.model_type  # type: ignore[union-attr]
        return Anatomy(model_type, config, stacks, head) if all(stacks) else None  # type: ignore[arg-type]
    stack = stack_in("blocks", model, config)
    if stack is None:
        return None
    return Anatomy(config.model_type, config, (named(stack, model),), head)


def unknown_anatomy(model: nn.Module) -> str:
    """The error message for a language model whose layers are not found."""
    lists = [
        f"{path} ({len(module)} × {type(module[0]).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    return (
        f"{type(model).__name__} has native points only: its stack of layers was not recognized among "
        f"{', '.join(lists[:4]) or 'its modules'}. The module names of known architectures are listed in "
        f"hookline/transformer/roles.py (docs/transformers.md: Unsupported architectures)."
    )


def stack_in(name: str, root: nn.Module, config: Any, *, cross_attends: bool = False) -> Stack | None:
    """The stack of layers in a module, of the length in the config if there is one.

    With `cross_attends`, its layers may have cross-attention, as in a decoder.
    """
    layers = _layers(root, config)
    config = config if config is not None else _config_of(root, name)
    if layers is None or not hasattr(config, "hidden_size"):
        return None
    path, stack = layers
    parent = root.get_submodule(path.rpartition(".")[0])
    return Stack(
        name,
        config,
        tuple(block_of(layer, config, has_encoder=cross_attends or name == "decoder") for layer in stack),
        root.get_input_embeddings(),  # type: ignore[operator]
        child(parent, POSITIONS) or _position_embedding_beside(root, path),
        child(parent, FINAL_NORM),
        config.hidden_size,
        embed_norm=child(parent, EMBEDDING_NORM),
    )


def _config_of(root: nn.Module, name: str) -> Any:
    """The config of an encoder or a decoder."""
    config: Any = getattr(root, "config", None)
    return config.get_text_config(decoder=name == "decoder") if config is not None else None


def named(stack: Stack, model: nn.Module) -> Stack:
    """The stack, renamed to "encoder" if its attention is bidirectional."""
    return stack if _is_causal(model, stack) else replace(stack, name="encoder")


def _is_causal(model: nn.Module, stack: Stack) -> bool:
    """Whether attention is causal."""
    if model.can_generate():  # type: ignore[operator]
        return True
    attn = next((block.attn for block in stack.blocks if block.attn is not None), None)
    own = getattr(attn, "is_causal", None)
    if isinstance(own, bool):
        return own
    return bool(getattr(model.config, "is_decoder", False)) or attn is None


def _layers(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList] | None:
    """The outermost stack of layers of the length in the config."""
    stacks = stacks_of_layers(model)
    right = [found for found in stacks if config is None or len(found[1]) == config.num_hidden_layers]
    if len({len(path.split(".")) for path, _ in right}) > 1 or len(right) == 1:
        return min(right, key=lambda found: found[0].count("."))
    return None


def stacks_of_layers(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Every list of layers in a model, with its path."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and _is_layer(module[0])
    ]


def _is_layer(module: nn.Module) -> bool:
    return child(module, ATTENTION) is not None or child(module, MIXER) is not None


def _position_embedding_beside(model: nn.Module, path: str) -> nn.Module | None:
    """The position embeddings in a module next to the encoder, as in BERT."""
    parent, _, _ = path.rpartition(".")
    while parent:
        parent = parent.rpartition(".")[0]
        found = child(model.get_submodule(parent), POSITIONS)
        if found is not None:
            return found
    return None


def block_of(layer: nn.Module, config: Any, *, has_encoder: bool) -> Block:
    """The roles of the submodules of one layer."""
    attn = child(layer, ATTENTION)
    linear = attn if attn is not None and any(hasattr(attn, name) for name in LINEAR_ATTENTION) else None
    attn = None if linear is not None else attn if attn is not None else _attention_among_mixers(layer)
    mlp = child(layer, MLP)
    if isinstance(mlp, nn.Linear):  # ALBERT: the first of two linear layers has this name
        mlp = None
    cross = _cross(layer, has_other=attn is not None) if has_encoder else None
    norms = _norms(layer)
    if is_post_norm(config):  # norms after attention and MLP normalize the stream itself
        before, after, before_mlp, after_mlp = norms
        norms = before or after, None, before_mlp or after_mlp or child(layer, ("output.LayerNorm",)), None
    return Block(
        module=layer,
        attn=attn,
        mixer=None if attn is not None else linear or child(layer, MIXER),
        o=(child(attn, OUTPUT) if attn is not None else None) or child(layer, ("attention.output.dense",)),
        mlp=mlp,
        mlp_out=child(mlp, MLP_OUT) if mlp is not None else child(layer, ("fc2", "output.dense", "ffn_output")),
        ln1=norms[0] if attn is not None or cross is None else None,
        ln1_post=norms[1],
        ln2=norms[2],
        ln2_post=norms[3],
        post_norm=child(layer, ("attention.output.LayerNorm",)),
        post_norm_2=child(layer, ("output.LayerNorm",)),
        adds_in_attention=attn is not None and attn is child(layer, ("attention.self",)),
        cross=cross,
        gains=next((names for names in GAINS if all(name in layer._parameters for name in names)), None),
    )


def _attention_among_mixers(layer: nn.Module) -> nn.Module | None:
    """The mixer of a hybrid layer, if it is softmax attention."""
    mixer = child(layer, MIXER)
    if mixer is None or any(hasattr(mixer, name) for name in LINEAR_ATTENTION):
        return None
    return mixer if all(child(mixer, names) is not None for names in (QUERY, KEY, VALUE, OUTPUT)) else None


def _cross(layer: nn.Module, *, has_other: bool) -> CrossAttention | None:
    """The cross-attention of a layer; without self-attention (`has_other`), it follows the first norm."""
    attn = child(layer, CROSS_ATTENTION)
    if attn is None:
        return None
    return CrossAttention(
        attn,
        child(attn, OUTPUT) or child(layer, ("crossattention.output.dense",)),
        child(layer, NORM_OF_CROSS) if has_other else child(layer, NORM_BEFORE_ATTENTION),
        child(layer, ("post_cross_attn_layernorm",)),
        child(layer, ("crossattention.output.LayerNorm",)),
    )


def _norms(layer: nn.Module) -> tuple[nn.Module | None, ...]:
    """The norms before and after attention, before and after the MLP.

    `post_attention_layernorm` is the norm before the MLP, unless the layer has another norm there, or has no norm
    before attention but one after the MLP: then it is the norm after attention.
    """
    before_attention, before_mlp = child(layer, NORM_BEFORE_ATTENTION), child(layer, NORM_BEFORE_MLP)
    after_attention, after_mlp = child(layer, NORM_AFTER_ATTENTION), child(layer, NORM_AFTER_MLP)
    ambiguous = layer._modules.get("post_attention_layernorm")
    if ambiguous is not None and before_mlp is not ambiguous:
        after_attention = after_attention or ambiguous
    elif ambiguous is not None and before_attention is None and after_mlp is not None:
        after_attention, before_mlp = ambiguous, None
    return before_attention, after_attention, before_mlp, after_mlp

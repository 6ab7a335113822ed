"""Cfg: the configuration of a model under uniform names (n_layers, d_model, …)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.transformer.anatomy import Anatomy
from hookline.transformer.sites import head_counts


@dataclass(frozen=True)
class Cfg:
    """The sizes and conventions of a transformer, under the names that TransformerLens uses."""

    model_name: str
    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int | None
    act: str
    norm: str
    positions: str
    dtype: torch.dtype
    device: torch.device
    attn_implementation: str


def cfg_of(model: nn.Module, anatomy: Anatomy) -> Cfg:
    """The Cfg of a model, from its Hugging Face config and its modules."""
    config = anatomy.config
    attn = next((block.attn for block in anatomy.blocks if block.attn is not None), None)
    heads = _first(config, "num_attention_heads", "n_head")
    if not isinstance(heads, int):  # only the modules have it, or there is one for each stage
        heads = head_counts(attn, anatomy.main.config)[0] if attn is not None else 1
    d_model = _first(config, "hidden_size", "d_model", "n_embd", default=anatomy.width)
    first, path = anatomy.blocks[0], getattr(getattr(model, "config", config), "_name_or_path", "")
    norms = (anatomy.main.ln_final, first.ln1, first.post_norm, first.ln1_post, first.ln2)
    kind = getattr(config, "model_type", anatomy.kind)
    return Cfg(
        model_name=(Path(path).name if Path(path).is_absolute() else path) or kind,
        architecture=kind,
        n_layers=len(anatomy.blocks),
        n_heads=heads,
        n_kv_heads=head_counts(attn, anatomy.main.config)[1] if attn is not None else heads,
        d_model=d_model,
        d_head=_first(config, "head_dim", "qk_head_dim", "d_kv", default=d_model // heads),
        d_mlp=_first(config, *_MLP_WIDTH, default=4 * d_model),
        d_vocab=_first(config, "vocab_size", default=0),
        n_ctx=_first(config, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", default=None),
        act=_first(config, *_ACTIVATION, default="unknown"),
        norm=next((type(norm).__name__ for norm in norms if not isinstance(norm, nn.Identity | None)), "none"),
        positions="added to the stream" if anatomy.main.pos_embed is not None else anatomy.architecture.positions,
        dtype=next(model.parameters()).dtype,
        device=device_of(model, anatomy),
        attn_implementation=config._attn_implementation,
    )


def device_of(model: nn.Module, anatomy: Anatomy) -> torch.device:
    """The device that the model takes tokens on, also if accelerate offloads the weights."""
    weight = getattr(anatomy.main.embed, "weight", None)
    device = (weight if isinstance(weight, Tensor) else next(model.parameters())).device
    if device.type != "meta":
        return device
    runs_on = getattr(getattr(anatomy.main.embed, "_hf_hook", None), "execution_device", None)
    return torch.device(runs_on if runs_on is not None else "cpu")


def n_ids(model: nn.Module, anatomy: Anatomy) -> int | None:
    """The number of token ids that the model can embed, which may exceed d_vocab: image tokens have their own ids.

    Reads the current embedding, which may have been resized after the model was wrapped.
    """
    try:
        embed: Any = model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:
        embed = anatomy.main.embed
    embed = getattr(embed, "base_layer", embed)
    return embed.num_embeddings if isinstance(embed, nn.Embedding) else None


_MLP_WIDTH = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim", "decoder_ffn_dim")
_ACTIVATION = (
    *("hidden_act", "activation_function", "hidden_activation", "activation", "dense_act_fn", "afn"),
    *("feed_forward_proj", "ffn_act"),
)


def _first(config: Any, *names: str, default: Any = None) -> Any:
    settings = {**vars(config), **{new: getattr(config, old) for new, old in config.attribute_map.items()}}
    return next((settings[name] for name in names if settings.get(name) is not None), default)

"""Weight initialization of a native transformer.

`gpt2` draws every matrix from a normal distribution with a fixed standard deviation; `xavier_*` and `kaiming_*` scale
it by the fan-in and fan-out of each matrix, with each head as a matrix of its own. Biases are 0, norms 1. Matrices are
drawn one after the other in the layout of TransformerLens, such as `[head, d_model, d_head]`, so that a seed gives the
same weights as there (except with ALiBi, where TransformerLens also draws position embeddings that it does not use).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hookline.compat.transformer_lens._impl.native.layers import NativeBlock
    from hookline.compat.transformer_lens._impl.native.native_config import NativeConfig
    from hookline.compat.transformer_lens._impl.native.transformer import NativeTransformer


@torch.no_grad()
def draw_weights(model: NativeTransformer) -> None:
    """Initialize all weights of the model, except loaded ones."""
    config = model.config
    if config.init_mode is None:
        return
    for module in model.modules():
        is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        for name, parameter in module.named_parameters(recurse=False):
            if not _was_loaded(parameter) and (is_norm or name == "bias"):
                parameter.fill_(1.0 if name == "weight" else 0.0)
    generator = None if config.seed is None else torch.Generator().manual_seed(config.seed)
    for owner, view in _matrices(model):
        if not _was_loaded(owner):
            view.copy_(_fill(torch.empty(view.shape, dtype=view.dtype, device="cpu"), config, generator))


def _was_loaded(parameter: Tensor) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)  # set by transformers


def _fill(x: Tensor, config: NativeConfig, generator: torch.Generator | None) -> Tensor:
    """Initialize `x`, in the classic layout, as the config says."""
    size, mode = config.initializer_range, config.init_mode
    assert size is not None  # set by the config
    assert mode is not None
    into, out = (x.shape[0], x.shape[1]) if x.ndim == 2 else (x.shape[1], x.shape[0] * x.shape[2])
    if mode.startswith("xavier"):
        size *= (2 / (into + out)) ** 0.5
    elif mode.startswith("kaiming"):
        size *= (2 / into) ** 0.5
    if mode.endswith("uniform"):
        return x.uniform_(-size * 3**0.5, size * 3**0.5, generator=generator)
    return x.normal_(0.0, size, generator=generator)


def _matrices(model: NativeTransformer) -> Iterator[tuple[Tensor, Tensor]]:
    """Every matrix, with a view of it in the classic layout."""
    yield model.embed.weight, model.embed.weight
    for positions in (model.pos_embed, model.qk_pos_embed):
        if positions is not None:
            yield positions.weight, positions.weight
    for block in model.blocks:
        yield from _of_block(block)  # type: ignore[arg-type]
    if not model.config.tie_word_embeddings:
        yield model.unembed.weight, model.unembed.weight.T


def _of_block(block: NativeBlock) -> Iterator[tuple[Tensor, Tensor]]:
    attn, size = block.attn, block.attn.head_dim
    yield attn.q_proj.weight, attn.q_proj.weight.unflatten(0, (-1, size)).mT
    yield attn.o_proj.weight, attn.o_proj.weight.T.unflatten(0, (-1, size))
    yield attn.k_proj.weight, attn.k_proj.weight.unflatten(0, (-1, size)).mT
    yield attn.v_proj.weight, attn.v_proj.weight.unflatten(0, (-1, size)).mT
    if block.has_mlp:
        mlp = block.mlp
        for linear in (mlp.up_proj, mlp.down_proj, *([mlp.gate_proj] if mlp.is_gated else [])):
            yield linear.weight, linear.weight.T

"""Anatomy: the modules of a transformer by role, as `find_anatomy.py` finds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from hookline.transformer.architectures import Architecture, architecture


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

    @property
    def has_mlp(self) -> bool:
        """Whether an MLP was found, as a module or by its output projection."""
        return self.mlp is not None or self.mlp_out is not None


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
    embed: Any
    """The module that embeds its tokens or patches; None if the class of an encoder does not say."""
    pos_embed: nn.Module | None
    ln_final: nn.Module | None
    width: int
    """The width of the stream."""
    embed_norm: nn.Module | None = field(default=None, kw_only=True)
    """The norm of the token embeddings, before they enter the stream."""

    @cached_property
    def architecture(self) -> Architecture:
        """The row of the config of this stack."""
        return architecture(self.config)

    @cached_property
    def is_post_norm(self) -> bool:
        """Whether the stream itself is normalized after each addition."""
        return self.architecture.post_norm or any(block.post_norm is not None for block in self.blocks)


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
        """The width of the main stream."""
        return self.main.width

    @cached_property
    def architecture(self) -> Architecture:
        """The row of the whole model, which may differ from that of its text config."""
        return architecture(self.config, self.kind)

    @property
    def every_stack(self) -> tuple[Stack, ...]:
        """All stacks, including vision towers."""
        return (*self.towers, *self.stacks)

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return len(self.stacks) > 1

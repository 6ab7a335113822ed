"""The bridge dialect's names of module inputs and outputs that have no classic name: `blocks.5.ln1.hook_out`.

Names of classic points in that dialect are in the point table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from hookline.engine.order import Kind
from hookline.transformer import roles
from hookline.transformer.anatomy import Anatomy, Block
from hookline.transformer.roles import child

_Find: TypeAlias = Callable[[Block], nn.Module | None]


def _in_attention(names: tuple[str, ...]) -> _Find:
    return lambda block: None if block.attn is None else child(block.attn, names)


def _in_mlp(*tables: tuple[str, ...]) -> _Find:
    """The first of these roles that an MLP has."""
    return lambda block: next((found for names in tables if block.mlp and (found := child(block.mlp, names))), None)


_MODULES: dict[str, _Find] = {
    "ln1": lambda block: block.post_norm or block.ln1,
    "ln1_post": lambda block: block.ln1_post,
    "ln2": lambda block: block.post_norm_2 or block.ln2,
    "ln2_post": lambda block: block.ln2_post,
    "attn.q": _in_attention((*roles.QUERY, *roles.FUSED)),
    "attn.k": _in_attention((*roles.KEY, *roles.FUSED)),
    "attn.v": _in_attention((*roles.VALUE, *roles.FUSED)),
    "attn.qkv": _in_attention(roles.FUSED),
    "attn.o": lambda block: block.o,
    "mlp.in": _in_mlp(roles.MLP_LINEAR, roles.MLP_IN),
    "mlp.gate": _in_mlp(roles.MLP_IN),
    "mlp.out": lambda block: block.mlp_out,
}
_NAME = re.compile(r"(?P<stack>\w+)\.(?P<layer>\d+)\.(?P<part>[a-z0-9_.]+)\.hook_(?P<side>in|out)")
_SIDES = {"in": Kind.INPUT, "out": Kind.OUTPUT}


def module_event(anatomy: Anatomy, name: str) -> tuple[nn.Module, Kind] | None:
    """The module, and its input or output, that a name in the bridge dialect means; None if it is not one."""
    if name == "pos_embed.hook_in" and isinstance(anatomy.main.pos_embed, nn.Module):
        return anatomy.main.pos_embed, Kind.INPUT
    match = _NAME.fullmatch(name)
    if match is None or match["part"] not in _MODULES:
        return None
    stacks = {stack.name: stack.blocks for stack in anatomy.stacks}
    blocks = stacks.get(match["stack"], anatomy.blocks if match["stack"] == "blocks" and len(stacks) == 1 else ())
    if int(match["layer"]) not in range(len(blocks)):
        return None
    module = _MODULES[match["part"]](blocks[int(match["layer"])])
    return None if module is None else (module, _SIDES[match["side"]])

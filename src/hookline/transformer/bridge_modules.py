"""Modules by the path of their points: `blocks.5.ln1`.

With `hook_in` or `hook_out` these are the names of the bridge dialect for inputs and outputs that have no classic name;
names of classic points in that dialect are in the point table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import nn

from hookline.engine import Kind
from hookline.transformer import roles
from hookline.transformer.anatomy import Anatomy, Block, Stack, Tower
from hookline.transformer.roles import child

_Find: TypeAlias = Callable[[Block], nn.Module | None]


def _in_attention(names: tuple[str, ...]) -> _Find:
    return lambda block: None if block.attn is None else child(block.attn, names)


def _in_mlp(*tables: tuple[str, ...]) -> _Find:
    """The first of these roles that an MLP has."""
    return lambda block: next((part for names in tables if block.mlp and (part := child(block.mlp, names))), None)


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
_WHOLE: dict[str, _Find] = {
    "": lambda block: block.module,
    "attn": lambda block: block.attn or block.mixer,
    "cross_attn": lambda block: None if block.cross is None else block.cross.attn,
    "mlp": lambda block: block.mlp,
}
"""Parts whose inputs and outputs have classic names."""

_IN_LAYER = re.compile(r"(?P<stack>[a-z_.]+)\.(?P<layer>\d+)(\.(?P<part>[a-z0-9_.]+))?")
_SIDES = {"in": Kind.INPUT, "out": Kind.OUTPUT}


def module_event(anatomy: Anatomy, name: str) -> tuple[nn.Module, Kind] | None:
    """The module, and its input or output, that a name in the bridge dialect means; None if it is not one."""
    if name == "pos_embed.hook_in" and isinstance(anatomy.main.pos_embed, nn.Module):
        return anatomy.main.pos_embed, Kind.INPUT
    path, _, side = name.rpartition(".hook_")
    module = _in_layer(anatomy.stacks, path, _MODULES) if side in _SIDES else None
    return None if module is None else (module, _SIDES[side])


def module_at(anatomy: Anatomy, path: str) -> nn.Module | None:
    """The module whose points have names that begin with this path; None if no module does what is there."""
    modules: dict[str, nn.Module | None] = {"unembed": anatomy.unembed}
    modules |= {projector.name: projector.module for projector in anatomy.projectors}
    for stack in anatomy.every_stack:
        if isinstance(stack, Tower):
            prefix = stack.name.removesuffix("blocks")
            modules[f"{prefix}ln_pre"] = stack.ln_pre
        else:
            prefix = f"{stack.name}." if anatomy.is_encoder_decoder else ""
        modules[f"{prefix}ln_final"] = stack.ln_final
    return modules[path] if path in modules else _in_layer(anatomy.every_stack, path, {**_WHOLE, **_MODULES})


def _in_layer(stacks: Sequence[Stack], path: str, parts: Mapping[str, _Find]) -> nn.Module | None:
    match = _IN_LAYER.fullmatch(path)
    if match is None or (match["part"] or "") not in parts:
        return None
    blocks = next((stack.blocks for stack in stacks if stack.name == match["stack"]), ())
    if not blocks and match["stack"] == "blocks" and len(stacks) == 1:
        blocks = stacks[0].blocks
    layer = int(match["layer"])
    return parts[match["part"] or ""](blocks[layer]) if layer < len(blocks) else None

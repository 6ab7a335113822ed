"""Dialects: the other ways in which people name the classic points.

("q", 5), "q5", ("resid_post", -1), ("scale", 2, "ln1")     shorthand for blocks.5.attn.hook_q and the like
blocks.5.attn.q.hook_out, blocks.5.hook_in, embed.hook_out  the bridge dialect: a module's name and a side of it
("lm.layer.pre", 5), lm.layer.5.pre                         the role dialect: a role and a layer
"""

from __future__ import annotations

import re

_IN_ATTENTION = frozenset({"q", "k", "v", "z", "rot_q", "rot_k", "attn_scores", "pattern", "result"})
_IN_MLP = frozenset({"pre", "post", "pre_linear", "router", "expert_weights", "expert_indices"})
_IN_NORM = frozenset({"scale", "normalized"})
_OF_MODEL = frozenset({"tokens", "embed", "pos_embed"})
_SYNONYMS = {"attn": "pattern", "attn_logits": "attn_scores", "key": "k", "query": "q", "value": "v", "mlp_pre": "pre",
             "mlp_mid": "post", "mlp_post": "post"}  # fmt: skip

_BRIDGE_BLOCK = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.hook_attn_scores": "attn.hook_attn_scores",
    "attn.hook_out": "hook_attn_out",
    "mlp.hook_out": "hook_mlp_out",
    "mlp.in.hook_out": "mlp.hook_pre",
    "mlp.gate.hook_out": "mlp.hook_pre",
    "mlp.out.hook_in": "mlp.hook_post",
}
_BRIDGE_MODEL = {"embed.hook_in": "hook_tokens", "embed.hook_out": "hook_embed", "pos_embed.hook_out": "hook_pos_embed"}

_ROLES = {
    "layer.pre": "hook_resid_pre",
    "layer.post": "hook_resid_post",
    "attn.out": "hook_attn_out",
    "attn.q": "attn.hook_q",
    "attn.k": "attn.hook_k",
    "attn.v": "attn.hook_v",
    "attn.z": "attn.hook_z",
    "attn.pattern": "attn.hook_pattern",
    "attn.scores": "attn.hook_attn_scores",
    "mlp.pre": "hook_mlp_in",
    "mlp.out": "hook_mlp_out",
}

_BLOCK = re.compile(r"blocks\.(-?\d+)\.(.+)")
_SHORT = re.compile(r"([a-z_]+?)_?(-?\d+)")
_ROLE = re.compile(r"lm\.(layer|attn|mlp)\.(?:(-?\d+)\.)?(\w+)")


def classic_name(asked: object, n_layers: int) -> str | None:
    """The classic name of what was asked for in another dialect; None if it is in none of them."""
    if isinstance(asked, tuple) and asked and isinstance(asked[0], str):
        return _from_tuple(asked, n_layers)
    if not isinstance(asked, str):
        return None
    if asked in _BRIDGE_MODEL:
        return _BRIDGE_MODEL[asked]
    if match := _BLOCK.fullmatch(asked):
        return _block_name(int(match[1]), _BRIDGE_BLOCK.get(match[2], match[2]), n_layers)
    if (match := _ROLE.fullmatch(asked)) and match[2] is not None:
        return _role(f"{match[1]}.{match[3]}", int(match[2]), n_layers)
    if match := _SHORT.fullmatch(asked):
        return _shorthand(match[1], int(match[2]), None, n_layers)
    return _shorthand(asked, None, None, n_layers)


def _from_tuple(asked: tuple[object, ...], n_layers: int) -> str | None:
    name, layer, kind = (*asked, None, None)[:3]
    if not isinstance(layer, int) and layer is not None:
        return None
    if isinstance(name, str) and name.startswith("lm.") and layer is not None:
        return _role(name.removeprefix("lm."), layer, n_layers)
    return _shorthand(str(name), layer, kind if isinstance(kind, str) else None, n_layers)


def _role(role: str, layer: int, n_layers: int) -> str | None:
    return _block_name(layer, _ROLES[role], n_layers) if role in _ROLES else None


def _shorthand(name: str, layer: int | None, norm: str | None, n_layers: int) -> str | None:
    name = _SYNONYMS.get(name, name)
    if layer is None:
        return f"hook_{name}" if name in _OF_MODEL else None
    if name in _IN_ATTENTION:
        return _block_name(layer, f"attn.hook_{name}", n_layers)
    if name in _IN_MLP:
        return _block_name(layer, f"mlp.hook_{name}", n_layers)
    if name in _IN_NORM and norm is not None:
        return _block_name(layer, f"{norm}.hook_{name}", n_layers)
    return _block_name(layer, f"hook_{name}", n_layers)


def _block_name(layer: int, rest: str, n_layers: int) -> str:
    return f"blocks.{layer + n_layers if layer < 0 else layer}.{rest}"

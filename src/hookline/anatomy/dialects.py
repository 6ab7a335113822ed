"""Dialects: the other ways in which people name the classic points.

("q", 5), "q5", ("resid_post", -1), ("scale", 2, "ln1"), "scale2ln1"   shorthand for blocks.5.attn.hook_q and the like
("q", 5, "decoder"), ("q", 5, "decoder", "cross_attn")      where there are several stacks
blocks.5.attn.q.hook_out, blocks.5.hook_in, embed.hook_out  the bridge dialect: a module's name and a side of it
("lm.layer.pre", 5), lm.layer.5.pre                         the role dialect: a role and a layer
("vision.attn.pattern", 3), vision.norm, projector.out      the same of what looks at pictures, and of what is between
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

Stacks: TypeAlias = Mapping[str, int]
"""The stacks of layers that a model has, and how many layers each has.

{"blocks": 12}, or {"encoder": 6, "decoder": 6}, or {"vision.blocks": 24, "blocks": 32}
"""

_IN_ATTENTION = frozenset({"q", "k", "v", "z", "rot_q", "rot_k", "attn_scores", "pattern", "result"})
_IN_MLP = frozenset({"pre", "post", "pre_linear", "router", "expert_weights", "expert_indices"})
_IN_NORM = frozenset({"scale", "normalized"})
_OF_MODEL = frozenset({"tokens", "embed", "pos_embed"})
_SYNONYMS = {"attn": "pattern", "attn_logits": "attn_scores", "key": "k", "query": "q", "value": "v", "mlp_pre": "pre",
             "mlp_mid": "post", "mlp_post": "post"}  # fmt: skip

_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": None, "block": None, "blocks": None}
"""What a shorthand may say of where in a layer a point is."""

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
    "cross_attn.q.hook_out": "cross_attn.hook_q",
    "cross_attn.k.hook_out": "cross_attn.hook_k",
    "cross_attn.v.hook_out": "cross_attn.hook_v",
    "cross_attn.hook_out": "hook_cross_attn_out",
}
_BRIDGE_MODEL = {"embed.hook_in": "hook_tokens", "embed.hook_out": "hook_embed", "pos_embed.hook_out": "hook_pos_embed"}

_ROLES = {
    "layer.pre": "hook_resid_pre",
    "layer.post": "hook_resid_post",
    "attn.pre": "attn.hook_in",
    "attn.out": "hook_attn_out",
    "attn.q": "attn.hook_q",
    "attn.k": "attn.hook_k",
    "attn.v": "attn.hook_v",
    "attn.z": "attn.hook_z",
    "attn.pattern": "attn.hook_pattern",
    "attn.scores": "attn.hook_attn_scores",
    "mlp.pre": "mlp.hook_in",
    "mlp.out": "hook_mlp_out",
}

_OF_MODEL_BY_ROLE = {
    "lm.norm": "ln_final.hook_out",
    "vision.norm": "vision.ln_final.hook_out",
    "projector.in": "projector.hook_in",
    "projector.out": "projector.hook_out",
}

_STACK = {"lm": "blocks", "vision": "vision.blocks"}
"""What the layers of a part are called."""

_BLOCK = re.compile(r"((?:vision\.)?(?:blocks|global_blocks)|encoder|decoder)\.(-?\d+)\.(.+)")
_SHORT = re.compile(r"([a-z_]+?)_?(-?\d+)(ln1|ln2|attn|mlp|a|m)?")
_ROLE = re.compile(r"(lm|vision)\.(layer|attn|mlp)\.(?:(-?\d+)\.)?(\w+)")


def classic_name(asked: object, stacks: Stacks) -> str | None:
    """The classic name of what was asked for in another dialect; None if it is in none of them."""
    if isinstance(asked, tuple) and asked and isinstance(asked[0], str):
        return _from_tuple(asked, stacks)
    if not isinstance(asked, str):
        return None
    if asked in _BRIDGE_MODEL:
        return _BRIDGE_MODEL[asked]
    if asked in _OF_MODEL_BY_ROLE:
        return _OF_MODEL_BY_ROLE[asked]
    if match := _BLOCK.fullmatch(asked):
        return _block_name(match[1], int(match[2]), _BRIDGE_BLOCK.get(match[3], match[3]), stacks)
    if (match := _ROLE.fullmatch(asked)) and match[3] is not None:
        return _role(match[1], f"{match[2]}.{match[4]}", int(match[3]), stacks)
    if match := _SHORT.fullmatch(asked):
        return _shorthand(match[1], int(match[2]), [match[3]] if match[3] else [], stacks)
    return _shorthand(asked, None, [], stacks)


def _from_tuple(asked: tuple[object, ...], stacks: Stacks) -> str | None:
    name, layer, *more = (*asked, None)[: max(2, len(asked))]
    if layer is not None and (layer := _number(layer)) is None:
        return None
    if isinstance(name, str) and (match := _ROLE.fullmatch(name)) and layer is not None:
        return _role(match[1], f"{match[2]}.{match[4]}", layer, stacks) if match[3] is None else None
    if layer is None and name in _OF_MODEL_BY_ROLE:
        return _OF_MODEL_BY_ROLE[str(name)]
    return _shorthand(str(name), layer, [each for each in more if isinstance(each, str)], stacks)


def _number(layer: object) -> int | None:
    """A layer as Python's int: loops over tensors and arrays give integers of torch and NumPy."""
    try:
        return operator.index(layer)  # type: ignore[arg-type]
    except TypeError:
        return None


def _role(part: str, role: str, layer: int, stacks: Stacks) -> str | None:
    return _block_name(_STACK[part], layer, _ROLES[role], stacks) if role in _ROLES else None


def _shorthand(name: str, layer: int | None, more: list[str], stacks: Stacks) -> str | None:
    """`more` may name a norm, and a stack where there are several."""
    if "." in name:
        return None
    name = _SYNONYMS.get(name, name)
    more = [_STACK.get(each, each) if _STACK.get(each) in stacks else each for each in more]
    stack = next((each for each in more if each in stacks), "blocks")
    part = next((_PARTS.get(each, each) for each in more if each not in stacks), None)
    if layer is None:
        if name in _IN_NORM:
            return f"ln_final.hook_{name}"
        return f"hook_{name}" if name in _OF_MODEL else None
    if name in _IN_ATTENTION:
        return _block_name(stack, layer, f"{part or 'attn'}.hook_{name}", stacks)
    if name in _IN_MLP:
        return _block_name(stack, layer, f"mlp.hook_{name}", stacks)
    if name in _IN_NORM and part is not None:
        return _block_name(stack, layer, f"{part}.hook_{name}", stacks)
    return _block_name(stack, layer, f"hook_{name}", stacks)


def _block_name(stack: str, layer: int, rest: str, stacks: Stacks) -> str:
    """With `blocks` for the layers of a model that has but one stack of them, whatever it is called."""
    if stack == "blocks":
        stack = _only(stacks) or stack
    n_layers = stacks.get(stack, 0)
    return f"{stack}.{layer + n_layers if layer < 0 else layer}.{rest}"


def _only(stacks: Stacks) -> str | None:
    """The one stack of layers; beside a vision tower, the one of language."""
    of_text = [name for name in stacks if not name.startswith("vision.")] or list(stacks)
    return of_text[0] if len(of_text) == 1 else None


def other_names(classic: str, stacks: Stacks) -> Iterator[str]:
    """The other names of a listed point, but for shorthand: those that a glob may mean."""
    match = _BLOCK.fullmatch(classic)
    if match is None:
        yield from (name for name, other in (_BRIDGE_MODEL | _OF_MODEL_BY_ROLE).items() if other == classic)
        return
    stack, layer, rest = match.groups()
    yield from (f"{stack}.{layer}.{name}" for name, other in _BRIDGE_BLOCK.items() if other == rest)
    if stack == _only(stacks) != "blocks":
        yield f"blocks.{layer}.{rest}"
    part = "vision" if stack == "vision.blocks" else "lm" if stack == _only(stacks) else None
    for role, other in _ROLES.items():
        if other == rest and part is not None:
            what, _, side = role.partition(".")
            yield f"{part}.{what}.{layer}.{side}"


def advice(asked: str, stacks: Stacks) -> str:
    """What is to be said of a name that would be one with another layer, or with a layer."""
    classic = classic_name(asked, stacks)
    match = _BLOCK.fullmatch(classic) if classic is not None else None
    if match is not None and match[1].startswith("vision.") and match[1] not in stacks:
        return "This model has no vision tower, or none whose layers are known: its modules have their native names."
    if match is not None and match[1] not in stacks:
        return f"There are several stacks of layers here: write {' or '.join(map(repr, stacks))} for blocks."
    if match is not None and not 0 <= int(match[2]) < stacks[match[1]]:
        return f"The layers are 0 to {stacks[match[1]] - 1}."
    part, _, role = asked.partition(".")
    if part in _STACK and role in _ROLES:
        what, _, side = role.partition(".")
        return f"It needs a layer: ({asked!r}, 3) or '{part}.{what}.3.{side}'."
    return ""

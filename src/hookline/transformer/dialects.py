"""Dialects: other ways to name the classic points.

("q", 5), "q5", ("resid_post", -1), ("scale", 2, "ln1"), "scale2ln1"   shorthand for blocks.5.attn.hook_q and the like
("q", 5, "decoder"), ("q", 5, "decoder", "cross_attn")      if there are several stacks
blocks.5.attn.q.hook_out, blocks.5.hook_in, embed.hook_out  the bridge dialect: a module's name and a side of it
("lm.layer.pre", 5), lm.layer.5.pre                         the role dialect: a role and a layer
("vision.attn.pattern", 3), vision.norm, projector.out      the same for the vision tower and the projector
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from hookline.transformer.point_table import POINTS
from hookline.transformer.roles import is_same_role

Stacks: TypeAlias = Mapping[str, int]
"""The stacks of layers that a model has, and how many layers each has.

{"blocks": 12}, or {"encoder": 6, "decoder": 6}, or {"vision.blocks": 24, "blocks": 32}
"""

_NORMS = ("scale", "normalized")
"""Points that every norm has; the norm is named separately."""

_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": None, "block": None, "blocks": None}
"""The parts of a layer that a shorthand may name."""

_OF_MODEL = ("hook_tokens", "hook_embed", "hook_pos_embed", "unembed.hook_out")
_ROLES_OF_MODEL = {
    "lm.norm": "ln_final.hook_out",
    "vision.norm": "vision.ln_final.hook_out",
    "projector.in": "projector.hook_in",
    "projector.out": "projector.hook_out",
}

_STACK = {"lm": "blocks", "vision": "vision.blocks"}
"""The stack of each part in the role dialect."""

_BLOCK = re.compile(r"((?:vision\.)?(?:blocks|global_blocks)|encoder|decoder)\.(-?\d+)\.(.+)")
_SHORT = re.compile(r"([a-z_]+?)_?(-?\d+)(ln1|ln2|attn|mlp|a|m)?")
_ROLE = re.compile(r"(lm|vision)\.(layer|attn|mlp)\.(?:(-?\d+)\.)?(\w+)")


def classic_name(requested: object, stacks: Stacks) -> str | None:
    """The classic name of a name in another dialect; None if it is not one."""
    if isinstance(requested, tuple) and requested and isinstance(requested[0], str):
        return _from_tuple(requested, stacks)
    if not isinstance(requested, str):
        return None
    if requested in _ROLES_OF_MODEL:
        return _ROLES_OF_MODEL[requested]
    if POINTS.by_bridge.get(requested) in _OF_MODEL:
        return POINTS.by_bridge[requested]
    if match := _BLOCK.fullmatch(requested):
        return _block_name(match[1], int(match[2]), POINTS.by_bridge.get(match[3], match[3]), stacks)
    if (match := _ROLE.fullmatch(requested)) and match[3] is not None:
        return _role(match, int(match[3]), stacks)
    if match := _SHORT.fullmatch(requested):
        return _shorthand(match[1], int(match[2]), [match[3]] if match[3] else [], stacks)
    return _shorthand(requested, None, [], stacks)


def _from_tuple(requested: tuple[Any, ...], stacks: Stacks) -> str | None:
    name, layer, *more = (*requested, None)[: max(2, len(requested))]
    if layer is None:
        return _ROLES_OF_MODEL.get(name) or _shorthand(name, None, more, stacks)
    try:
        layer = operator.index(layer)  # also an integer of torch or NumPy
    except TypeError:
        return None
    if match := _ROLE.fullmatch(name):
        return _role(match, layer, stacks) if match[3] is None else None
    return _shorthand(name, layer, [word for word in more if isinstance(word, str)], stacks)


def _role(match: re.Match[str], layer: int, stacks: Stacks) -> str | None:
    point_name = POINTS.by_role.get(f"{match[2]}.{match[4]}")
    return _block_name(_STACK[match[1]], layer, point_name, stacks) if point_name is not None else None


def _shorthand(name: str, layer: int | None, more: list[str], stacks: Stacks) -> str | None:
    """`more` may name a norm, and a stack if there are several."""
    if "." in name:
        return None
    if layer is None:
        whole = f"ln_final.hook_{name}" if name in _NORMS else f"hook_{name}"
        return whole if name in _NORMS or whole in _OF_MODEL else None
    more = [_STACK[word] if _STACK.get(word) in stacks else word for word in more]
    stack = next((word for word in more if word in stacks), "blocks")
    part = next((_PARTS.get(word, word) for word in more if word not in stacks), None)
    point_name = POINTS.by_shorthand.get(name, f"hook_{name}")
    if part is not None and (name in _NORMS or point_name.startswith("attn.")):
        point_name = f"{part}.{point_name.rpartition('.')[2]}"
    return _block_name(stack, layer, point_name, stacks)


def _block_name(stack: str, layer: int, rest: str, stacks: Stacks) -> str:
    """The name of a point in a layer; `blocks` also means the only stack of a model, whatever its name."""
    if stack == "blocks":
        stack = _only(stacks) or stack
    n_layers = stacks.get(stack, 0)
    return f"{stack}.{layer + n_layers if layer < 0 else layer}.{rest}"


def _only(stacks: Stacks) -> str | None:
    """The only stack of layers, not counting vision towers; None if there are several."""
    of_text = [name for name in stacks if not name.startswith("vision.")] or list(stacks)
    return of_text[0] if len(of_text) == 1 else None


def other_names(classic: str, stacks: Stacks) -> Iterator[str]:
    """The other names of a classic point that a glob can match: all but shorthand."""
    match = _BLOCK.fullmatch(classic)
    if match is None:
        yield from (name for name, other in (POINTS.by_bridge | _ROLES_OF_MODEL).items() if other == classic)
        return
    stack, layer, rest = match.groups()
    yield from (f"{stack}.{layer}.{name}" for name, other in POINTS.by_bridge.items() if other == rest)
    if stack == _only(stacks) != "blocks":
        yield f"blocks.{layer}.{rest}"
    part = "vision" if stack == "vision.blocks" else "lm" if stack == _only(stacks) else None
    for role, other in POINTS.by_role.items():
        if other == rest and part is not None:
            what, _, side = role.partition(".")
            yield f"{part}.{what}.{layer}.{side}"


def advice(requested: str, stacks: Stacks) -> str:
    """A hint for a name that would be valid with another layer, or with a layer."""
    classic = classic_name(requested, stacks)
    match = _BLOCK.fullmatch(classic) if classic is not None else None
    if match is not None and match[1].startswith("vision.") and match[1] not in stacks:
        return "This model has no vision tower, or one with unknown layers: use native module names."
    if match is not None and match[1] not in stacks:
        return f"This model has several stacks of layers: write {' or '.join(map(repr, stacks))} instead of 'blocks'."
    if match is not None and not 0 <= int(match[2]) < stacks[match[1]]:
        return f"Layers are 0 to {stacks[match[1]] - 1}."
    if (name := POINTS.by_shorthand.get(requested.removeprefix("hook_"))) is not None and _only(stacks):
        short = requested.removeprefix("hook_")
        return f"It needs a layer: ({short!r}, 0), or '{_only(stacks)}.*.{name}' for every layer."
    part, _, role = requested.partition(".")
    if part in _STACK and role in POINTS.by_role:
        what, _, side = role.partition(".")
        return f"It needs a layer: ({requested!r}, 3) or '{part}.{what}.3.{side}'."
    return ""


def with_same_roles(requested: str, names: Iterable[str]) -> list[str]:
    """The native names at the same layer with the same roles: `model.layers.5.mlp` for `transformer.h.5.mlp`."""
    layer, parts = _split_at_layer(requested)
    if layer is None or requested.startswith("blocks."):
        return []
    splits = {name: _split_at_layer(name) for name in names}
    return [
        name
        for name, (other_layer, other_parts) in splits.items()
        if other_layer == layer and len(other_parts) == len(parts) and all(map(is_same_role, parts, other_parts))
    ]


def _split_at_layer(name: str) -> tuple[str | None, list[str]]:
    """The first number in a native name, and the parts after it."""
    _, layer, rest = [*re.split(r"\.(\d+)(?:\.|$)", name, maxsplit=1), None, ""][:3]
    return layer, rest.split(".") if rest else []

"""All points of a model, in the order in which they fire: language, vision, and what is between them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from hookline.engine.derived import EachRow
from hookline.engine.lenses import FIRST, Chain, Flat, Item, OneRow, Patches
from hookline.engine.passes import Stream
from hookline.engine.points import Site
from hookline.engine.taps import Kind
from hookline.transformer.architectures import architecture
from hookline.transformer.roles import Anatomy, Projector, Stack, Tower
from hookline.transformer.sites import Spec, entry_points, final_points, input_of, layer_points, norm_points, output_of

UNPROVED = Path(__file__).with_name("unproved.json")
_ATTENDED_TO = ("cross_attn.hook_k", "cross_attn.hook_v", "cross_attn.hook_rot_k")
"""Points of a layer whose positions are those of what cross-attention reads."""
_IN_LAYER = re.compile(r"(?P<stack>[a-z_.]+)\.(?P<layer>\d+)\.(?P<point>.+)")


def classic_points(anatomy: Anatomy) -> Iterator[Spec]:
    """All points of the table, in the order in which they fire; those that are known not to hold, without a site."""
    known = unproved().get(anatomy.kind, {})
    for spec in _all_points(anatomy):
        kind = kind_of(spec.name)
        if spec.site is not None and kind in known:
            yield spec.missing(f"on this architecture it is not what its name says: {known[kind]}")
        else:
            yield spec


@cache
def unproved() -> dict[str, dict[str, str]]:
    """Points that are not what their names say, by architecture; written by `docs/make_models.py`."""
    content: dict[str, dict[str, str]] = json.loads(UNPROVED.read_text(encoding="utf-8"))
    return content


def kind_of(name: str) -> str:
    """A point's name without its layer: attn.hook_q, or decoder.attn.hook_q, or vision.blocks.attn.hook_q."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return name
    return match["point"] if match["stack"] == "blocks" else f"{match['stack']}.{match['point']}"


def _all_points(anatomy: Anatomy) -> Iterator[Spec]:
    if isinstance(anatomy.main, Tower):
        yield from _in_stream("image", _tower_points(anatomy.main))
        return
    if architecture(anatomy.config.model_type).vision_first:
        yield from _in_stream("image", _seeing_points(anatomy))
    for stack in anatomy.stacks:
        prefix = f"{stack.name}." if anatomy.is_encoder_decoder else ""
        own: Stream = "encoder" if stack.name == "encoder" else "text"
        other: Stream = "encoder" if anatomy.is_encoder_decoder else "image"
        yield from _in_stream(own, _prefixed(prefix, entry_points(stack, _nth_call(anatomy, stack))))
        if not architecture(anatomy.config.model_type).vision_first:
            yield from _in_stream("image", _seeing_points(anatomy))
        for spec in _prefixed(f"{stack.name}.", layer_points(stack)):
            yield from _in_stream(other if spec.name.endswith(_ATTENDED_TO) else own, (spec,))
        yield from _in_stream(own, _prefixed(prefix, final_points(stack)))
    if anatomy.unembed is not None:
        yield Spec.of("unembed.hook_in", input_of(anatomy.unembed))
        yield Spec.of("unembed.hook_out", output_of(anatomy.unembed))


def _nth_call(anatomy: Anatomy, stack: Stack) -> int | None:
    """Which call of the embedding is this stack's, if stacks share it."""
    if len({each.embed for each in anatomy.stacks}) == len(anatomy.stacks):
        return None
    return anatomy.stacks.index(stack)


def _seeing_points(anatomy: Anatomy) -> Iterator[Spec]:
    """The towers, and the projectors after them, or after one of their layers."""
    early = {each.after: each for each in anatomy.projectors if each.after is not None}
    for tower in anatomy.towers:
        yield from _tower_points(tower, early)
    for projector in anatomy.projectors:
        if projector.after is None:
            yield from _projector_points(projector)


def _projector_points(projector: Projector) -> Iterator[Spec]:
    into = Spec.of("projector.hook_in", input_of(projector.module))
    yield _as_batch(replace(into, name=f"{projector.name}.hook_in"))
    out = output_of(projector.module)
    if projector.ordered_by is not None:
        out = Site(projector.ordered_by, Kind.OUTPUT, Item(("pooler_output",)))
    yield _as_batch(replace(Spec.of("projector.hook_out", out), name=f"{projector.name}.hook_out"))


def _tower_points(tower: Tower, early: Mapping[int, Projector] = MappingProxyType({})) -> Iterator[Spec]:
    is_first = tower.name == "vision.blocks"
    entry = _prefixed("vision.", _entry_points(tower)) if is_first else ()
    layers = _prefixed(f"{tower.name}.", _layers_read(tower))
    end = _prefixed("vision.", _end_points(tower))
    for spec in (*entry, *layers, *end):
        yield _as_batch(spec) if tower.is_packed else spec
        match = _IN_LAYER.fullmatch(spec.name)
        if match is not None and match["point"] == "hook_resid_post" and (layer := int(match["layer"])) in early:
            yield from _projector_points(early[layer])


def _entry_points(tower: Tower) -> Iterator[Spec]:
    """The patches, where they are, and the norm before the first layer."""
    patches = output_of(tower.embed, Patches())
    yield Spec.of("hook_embed", patches)
    if tower.pos_embed is not None and not tower.is_packed:
        site = Site(tower.pos_embed, Kind.OUTPUT, EachRow(patches, FIRST), (patches,))
        yield Spec.of("hook_pos_embed", site)
    else:
        yield Spec.of("hook_pos_embed", why="no module gives the embeddings of positions as they are added")
    if tower.ln_pre is not None:
        yield from norm_points("ln_pre", tower.ln_pre, tower.width)


def _layers_read(tower: Tower) -> Iterator[Spec]:
    """The points of the layers; those after the last one that the model reads cannot do anything."""
    for spec in layer_points(tower):
        layer = int(spec.name.partition(".")[0])
        if tower.read is None or layer < tower.read:
            yield spec
        else:
            why = (
                f"the model reads what leaves layer {tower.read - 1} of its vision tower: this layer runs, but what "
                f"it gives is not used (its modules have their native names)"
            )
            yield spec.missing(why)


def _end_points(tower: Tower) -> Iterator[Spec]:
    """The norm after the last layer, where it is of the whole stream, and read."""
    why = ""
    if tower.read is not None:
        why = "the model reads the stream before this norm, so that what it gives is not used"
    elif architecture(tower.config.model_type).pooled_norm:
        why = "it is of the class token alone, for the pooled output"
    for spec in final_points(tower):
        yield spec.missing(f"{why} (its module has its native name)") if why else spec


def _as_batch(spec: Spec) -> Spec:
    """With one axis for the batch, where there is none, or several."""
    if spec.site is None:
        return spec
    more = (Flat(),) if spec.name.startswith("projector") else ()
    return replace(spec, site=replace(spec.site, lens=Chain((spec.site.lens, OneRow(len(spec.axes.split())), *more))))


def _in_stream(stream: Stream, specs: Iterable[Spec]) -> Iterator[Spec]:
    for spec in specs:
        yield spec if spec.site is None else replace(spec, site=replace(spec.site, stream=stream))


def _prefixed(prefix: str, specs: Iterator[Spec]) -> Iterator[Spec]:
    return (replace(spec, name=f"{prefix}{spec.name}") for spec in specs)

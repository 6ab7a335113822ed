"""All points of a model in firing order: language model, vision tower and projector."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from hookline.engine.derived import ExpandBatch
from hookline.engine.lenses import FIRST, Chain, Item
from hookline.engine.order import Kind
from hookline.engine.passes import Stream
from hookline.engine.points import Site
from hookline.transformer.architectures import architecture
from hookline.transformer.layout_lenses import AddBatchAxis, Flat, Patches
from hookline.transformer.roles import Anatomy, Projector, Stack, Tower
from hookline.transformer.sites import (
    PointSpec,
    entry_points,
    final_points,
    input_of,
    layer_points,
    norm_points,
    output_of,
)

UNPROVED = Path(__file__).with_name("unproved.json")
_ATTENDED_TO = ("cross_attn.hook_k", "cross_attn.hook_v", "cross_attn.hook_rot_k")
"""Points whose positions are those of the sequence that cross-attention attends to."""
_IN_LAYER = re.compile(r"(?P<stack>[a-z_.]+)\.(?P<layer>\d+)\.(?P<point>.+)")


def classic_points(anatomy: Anatomy) -> Iterator[PointSpec]:
    """All points in firing order; those that failed verification on this architecture have no site."""
    known = unproved().get(anatomy.kind, {})
    for spec in _all_points(anatomy):
        kind = kind_of(spec.name)
        if spec.site is not None and kind in known:
            yield spec.missing(f"it fails verification on this architecture: {known[kind]}")
        else:
            yield spec


@cache
def unproved() -> dict[str, dict[str, str]]:
    """Points that fail verification, by architecture; written by `docs/make_models.py`."""
    content: dict[str, dict[str, str]] = json.loads(UNPROVED.read_text(encoding="utf-8"))
    return content


def kind_of(name: str) -> str:
    """The name of a point without its layer: attn.hook_q, decoder.attn.hook_q, vision.blocks.attn.hook_q."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return name
    return match["point"] if match["stack"] == "blocks" else f"{match['stack']}.{match['point']}"


def _all_points(anatomy: Anatomy) -> Iterator[PointSpec]:
    if isinstance(anatomy.main, Tower):
        yield from _in_stream("image", _tower_points(anatomy.main))
        return
    if architecture(anatomy.config.model_type).vision_first:
        yield from _in_stream("image", _vision_points(anatomy))
    for stack in anatomy.stacks:
        prefix = f"{stack.name}." if anatomy.is_encoder_decoder else ""
        own: Stream = "encoder" if stack.name == "encoder" else "text"
        other: Stream = "encoder" if anatomy.is_encoder_decoder else "image"
        yield from _in_stream(own, _prefixed(prefix, entry_points(stack, _nth_call(anatomy, stack))))
        if not architecture(anatomy.config.model_type).vision_first:
            yield from _in_stream("image", _vision_points(anatomy))
        for spec in _prefixed(f"{stack.name}.", layer_points(stack)):
            yield from _in_stream(other if spec.name.endswith(_ATTENDED_TO) else own, (spec,))
        yield from _in_stream(own, _prefixed(prefix, final_points(stack)))
    if anatomy.unembed is not None:
        yield PointSpec.of("unembed.hook_in", input_of(anatomy.unembed))
        yield PointSpec.of("unembed.hook_out", output_of(anatomy.unembed))


def _nth_call(anatomy: Anatomy, stack: Stack) -> int | None:
    """Which call of the embedding belongs to this stack, if stacks share it; else None."""
    if len({each.embed for each in anatomy.stacks}) == len(anatomy.stacks):
        return None
    return anatomy.stacks.index(stack)


def _vision_points(anatomy: Anatomy) -> Iterator[PointSpec]:
    """The points of vision towers, and of the projectors after them or after one of their layers."""
    early = {each.after: each for each in anatomy.projectors if each.after is not None}
    for tower in anatomy.towers:
        yield from _tower_points(tower, early)
    for projector in anatomy.projectors:
        if projector.after is None:
            yield from _projector_points(projector)


def _projector_points(projector: Projector) -> Iterator[PointSpec]:
    into = PointSpec.of("projector.hook_in", input_of(projector.module))
    yield _as_batch(replace(into, name=f"{projector.name}.hook_in"))
    out = output_of(projector.module)
    if projector.ordered_by is not None:
        out = Site(projector.ordered_by, Kind.OUTPUT, Item(("pooler_output",)))
    yield _as_batch(replace(PointSpec.of("projector.hook_out", out), name=f"{projector.name}.hook_out"))


def _tower_points(tower: Tower, early: Mapping[int, Projector] = MappingProxyType({})) -> Iterator[PointSpec]:
    is_first = tower.name == "vision.blocks"
    entry = _prefixed("vision.", _entry_points(tower)) if is_first else ()
    layers = _prefixed(f"{tower.name}.", _layers_read(tower))
    end = _prefixed("vision.", _end_points(tower))
    for spec in (*entry, *layers, *end):
        yield _as_batch(spec) if tower.is_packed else spec
        match = _IN_LAYER.fullmatch(spec.name)
        if match is not None and match["point"] == "hook_resid_post" and (layer := int(match["layer"])) in early:
            yield from _projector_points(early[layer])


def _entry_points(tower: Tower) -> Iterator[PointSpec]:
    """Patch embeddings, position embeddings, and the norm before the first layer."""
    patches = output_of(tower.embed, Patches())
    yield PointSpec.of("hook_embed", patches)
    if tower.pos_embed is not None and not tower.is_packed:
        site = Site(tower.pos_embed, Kind.OUTPUT, ExpandBatch(patches, FIRST), (patches,))
        yield PointSpec.of("hook_pos_embed", site)
    else:
        yield PointSpec.of("hook_pos_embed", why="no module returns the position embeddings as they are added")
    if tower.ln_pre is not None:
        yield from norm_points("ln_pre", tower.ln_pre, tower.width)


def _layers_read(tower: Tower) -> Iterator[PointSpec]:
    """The points of layers; layers after the last one that the model reads have no sites."""
    for spec in layer_points(tower):
        layer = int(spec.name.partition(".")[0])
        if tower.read is None or layer < tower.read:
            yield spec
        else:
            why = (
                f"the model reads the output of layer {tower.read - 1} of its vision tower: this layer runs, but its "
                f"output is not used (its modules have native names)"
            )
            yield spec.missing(why)


def _end_points(tower: Tower) -> Iterator[PointSpec]:
    """The final norm; without a site if its output is not used or covers only the class token."""
    why = ""
    if tower.read is not None:
        why = "the model reads the stream before this norm, so its output is not used"
    elif architecture(tower.config.model_type).pooled_norm:
        why = "it is applied to the class token only, for the pooled output"
    for spec in final_points(tower):
        yield spec.missing(f"{why} (its module has a native name)") if why else spec


def _as_batch(spec: PointSpec) -> PointSpec:
    """The point with exactly one batch axis, where the model has none or several."""
    if spec.site is None:
        return spec
    more = (Flat(),) if spec.name.startswith("projector") else ()
    return replace(
        spec, site=replace(spec.site, lens=Chain((spec.site.lens, AddBatchAxis(len(spec.axes.split())), *more)))
    )


def _in_stream(stream: Stream, specs: Iterable[PointSpec]) -> Iterator[PointSpec]:
    for spec in specs:
        yield spec if spec.site is None else replace(spec, site=replace(spec.site, stream=stream))


def _prefixed(prefix: str, specs: Iterator[PointSpec]) -> Iterator[PointSpec]:
    return (replace(spec, name=f"{prefix}{spec.name}") for spec in specs)

"""All points of a model in firing order: language model, vision tower and projector."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from torch import nn

from hookline.engine import Kind, Site, chained, lens_of
from hookline.transformer.anatomy import Anatomy, Projector, Tower
from hookline.transformer.layout_lenses import AddBatchAxis, Flat, Patches
from hookline.transformer.sites import (
    PointSpec,
    entry_points,
    final_points,
    input_of,
    layer_points,
    norm_points,
    output_of,
    position_site,
)
from hookline.types import Stream

UNPROVED = Path(__file__).with_name("unproved.json")
_ATTENDED_TO = ("cross_attn.hook_k", "cross_attn.hook_v", "cross_attn.hook_rot_k")
"""Points whose positions are those of the sequence that cross-attention attends to."""
_IN_LAYER = re.compile(r"(?P<stack>[a-z_.]+)\.(?P<layer>\d+)\.(?P<point>.+)")


def classic_points(anatomy: Anatomy) -> list[PointSpec]:
    """All points in firing order; those that failed verification on this architecture have no site."""
    failures = unproved().get(anatomy.kind, {})
    specs = [_verified(spec, failures) for spec in _all_points(anatomy)]
    if any(spec.site is not None and kind_of(spec.name) != "hook_tokens" for spec in specs):
        return specs
    # The tokens alone say nothing of a model: it has native points instead.
    why = "no other point passes verification on this architecture"
    return [spec if spec.site is None else spec.missing(why) for spec in specs]


def _verified(spec: PointSpec, failures: Mapping[str, str]) -> PointSpec:
    kind = kind_of(spec.name)
    if spec.site is None or kind not in failures:
        return spec
    return spec.missing(f"it fails verification on this architecture: {failures[kind]}")


@cache
def unproved() -> dict[str, dict[str, str]]:
    """Points that fail verification, by architecture; written by `tools/make_models.py`."""
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
        yield from _placed("", "image", _tower_points(anatomy.main))
        return
    is_vision_first = anatomy.main.architecture.vision_first
    if is_vision_first:
        yield from _placed("", "image", _vision_points(anatomy))
    shares_embedding = len({stack.embed for stack in anatomy.stacks}) < len(anatomy.stacks)
    for number, stack in enumerate(anatomy.stacks):
        prefix = f"{stack.name}." if anatomy.is_encoder_decoder else ""
        stream: Stream = "encoder" if stack.name == "encoder" else "text"
        other: Stream = "encoder" if anatomy.is_encoder_decoder else "image"
        yield from _placed(prefix, stream, entry_points(stack, number if shares_embedding else None))
        if not is_vision_first:
            yield from _placed("", "image", _vision_points(anatomy))
        for spec in layer_points(stack):
            yield from _placed(f"{stack.name}.", other if spec.name.endswith(_ATTENDED_TO) else stream, [spec])
        yield from _placed(prefix, stream, final_points(stack))
    if not isinstance(anatomy.unembed, nn.ModuleList | None):
        yield PointSpec.of("unembed.hook_in", input_of(anatomy.unembed))
        yield PointSpec.of("unembed.hook_out", output_of(anatomy.unembed))


def _placed(prefix: str, stream: Stream | None, specs: Iterable[PointSpec]) -> Iterator[PointSpec]:
    """The points with a prefix to their names, in a stream."""
    for spec in specs:
        site = replace(spec.site, stream=stream) if spec.site is not None and stream is not None else spec.site
        yield replace(spec, name=f"{prefix}{spec.name}", site=site)


def _vision_points(anatomy: Anatomy) -> Iterator[PointSpec]:
    """The points of vision towers, and of the projectors after them or after one of their layers."""
    early = {projector.after: projector for projector in anatomy.projectors if projector.after is not None}
    for tower in anatomy.towers:
        yield from _tower_points(tower, early)
    for projector in anatomy.projectors:
        if projector.after is None:
            yield from _projector_points(projector)


def _projector_points(projector: Projector) -> Iterator[PointSpec]:
    out = output_of(projector.module)
    if projector.ordered_by is not None:
        out = Site(projector.ordered_by, Kind.OUTPUT, lens_of(projector.ordered_by, Kind.OUTPUT, ("pooler_output",)))
    for point, site in (("hook_in", input_of(projector.module)), ("hook_out", out)):
        yield _as_batch(replace(PointSpec.of(f"projector.{point}", site), name=f"{projector.name}.{point}"))


def _tower_points(tower: Tower, early: Mapping[int, Projector] = MappingProxyType({})) -> Iterator[PointSpec]:
    entry = _tower_entry(tower) if tower.name == "vision.blocks" else ()
    for spec in (
        *_placed("vision.", None, entry),
        *_placed(f"{tower.name}.", None, _tower_layers(tower)),
        *_placed("vision.", None, _tower_end(tower)),
    ):
        yield _as_batch(spec) if tower.is_packed else spec
        match = _IN_LAYER.fullmatch(spec.name)
        if match is not None and match["point"] == "hook_resid_post" and (layer := int(match["layer"])) in early:
            yield from _projector_points(early[layer])


def _tower_entry(tower: Tower) -> Iterator[PointSpec]:
    """Patch embeddings, position embeddings, and the norm before the first layer."""
    patches = output_of(tower.embed, Patches())
    yield PointSpec.of("hook_embed", patches)
    added: Site | str = "no module returns the position embeddings as they are added"
    if tower.pos_embed is not None and not tower.is_packed:
        added = position_site(tower.pos_embed, patches)
    yield PointSpec.of("hook_pos_embed", added)
    if tower.ln_pre is not None:
        yield from norm_points("ln_pre", tower.ln_pre, tower.width)


def _tower_layers(tower: Tower) -> Iterator[PointSpec]:
    """The points of layers; layers after the last one that the model reads have no sites."""
    for spec in layer_points(tower):
        if tower.read is not None and int(spec.name.partition(".")[0]) >= tower.read:
            spec = spec.missing(
                f"the model reads the output of layer {tower.read - 1} of its vision tower: this layer runs, but its "
                f"output is not used (its modules have native names)"
            )
        yield spec


def _tower_end(tower: Tower) -> Iterator[PointSpec]:
    """The final norm; without a site if its output is not used or covers only the class token."""
    why = "it is applied to the class token only, for the pooled output" if tower.architecture.pooled_norm else ""
    if tower.read is not None:
        why = "the model reads the stream before this norm, so its output is not used"
    for spec in final_points(tower):
        yield spec.missing(f"{why} (its module has a native name)") if why else spec


def _as_batch(spec: PointSpec) -> PointSpec:
    """The point with exactly one batch axis, where the model has none or several."""
    if spec.site is None:
        return spec
    more = (Flat(),) if spec.name.startswith("projector") else ()
    lens = chained(spec.site.lens, AddBatchAxis(len(spec.axes.split())), *more)
    return replace(spec, site=replace(spec.site, lens=lens))

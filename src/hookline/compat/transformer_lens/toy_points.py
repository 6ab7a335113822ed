"""Points that only toy models have: inside the norm of `solu_ln`, and the positions of a shortformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from hookline.transformer.anatomy import Anatomy, Block
from hookline.transformer.norms import norm_of, norm_sites
from hookline.transformer.point_table import PointRow
from hookline.transformer.sites import PointSpec, output_of, position_site

MID = PointRow("mlp.hook_mid", "b p m", ("mid",))
_IN_NORM = (PointRow("mlp.ln.hook_scale", "b p 1"), PointRow("mlp.ln.hook_normalized", "b p m"))


def with_toy_points(root: nn.Module, anatomy: Anatomy, specs: dict[str, PointSpec]) -> dict[str, PointSpec]:
    """The points of a model, and those of a toy model beside them, in the order in which they fire."""
    if not hasattr(root, "qk_pos_embed"):
        return specs
    found: dict[str, PointSpec] = {}
    for name, spec in specs.items():
        found[name] = spec
        if name.endswith(".mlp.hook_pre"):
            layer = name.removesuffix(".mlp.hook_pre")
            of_layer = _in_mlp(anatomy.blocks[int(layer.rpartition(".")[2])])
            found |= {f"{layer}.{each.name}": replace(each, name=f"{layer}.{each.name}") for each in of_layer}
    if root.qk_pos_embed is not None:
        site = position_site(root.qk_pos_embed, output_of(anatomy.main.embed))  # type: ignore[arg-type]
        found["hook_pos_embed"] = replace(specs["hook_pos_embed"], site=site)
    return found


def _in_mlp(block: Block) -> Iterator[PointSpec]:
    """The points between the activation function of an MLP and the norm after it."""
    norm = getattr(block.mlp, "ln", None)
    if isinstance(norm, nn.Identity | None) or block.mlp is None:
        return
    yield PointSpec(MID.name, MID, output_of(block.mlp.act))  # type: ignore[arg-type]
    formula = norm_of(norm, block.mlp.down_proj.in_features)  # type: ignore[arg-type,union-attr]
    for row in _IN_NORM if formula is not None else ():
        yield PointSpec(row.name, row, norm_sites(formula)[row.name.rpartition(".")[2]])  # type: ignore[arg-type]

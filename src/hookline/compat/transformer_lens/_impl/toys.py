"""What only toy models have: a norm after the activation function (`solu_ln`), and the positions of a shortformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hookline.transformer.anatomy import Anatomy
from hookline.transformer.norms import Norm, norm_of, norm_sites
from hookline.transformer.point_table import PointRow
from hookline.transformer.sites import PointSpec, output_of, position_site
from hookline.weights.processing.folding import fold_into_linear, make_neutral
from hookline.weights.processing.swaps import Swaps

MID = PointRow("mlp.hook_mid", "b p m", ("mid",))
_IN_NORM = (PointRow("mlp.ln.hook_scale", "b p 1"), PointRow("mlp.ln.hook_normalized", "b p m"))


def with_toy_points(root: nn.Module, anatomy: Anatomy, specs: dict[str, PointSpec]) -> dict[str, PointSpec]:
    """The points of a model, and those of a toy model beside them, in the order in which they fire."""
    if not hasattr(root, "qk_pos_embed"):
        return specs
    point_specs: dict[str, PointSpec] = {}
    for name, spec in specs.items():
        point_specs[name] = spec
        if name.endswith(".mlp.hook_pre"):
            layer = name.removesuffix(".mlp.hook_pre")
            of_layer = _in_mlp(anatomy.blocks[int(layer.rpartition(".")[2])].mlp)
            point_specs |= {
                f"{layer}.{toy_spec.name}": replace(toy_spec, name=f"{layer}.{toy_spec.name}") for toy_spec in of_layer
            }
    if root.qk_pos_embed is not None:
        site = position_site(root.qk_pos_embed, output_of(anatomy.main.embed))  # type: ignore[arg-type]
        point_specs["hook_pos_embed"] = replace(specs["hook_pos_embed"], site=site)
    return point_specs


def _in_mlp(mlp: Any) -> Iterator[PointSpec]:
    """The points between the activation function of an MLP and the norm after it."""
    if (norm := _norm_of(mlp)) is not None:
        yield PointSpec(MID.name, MID, output_of(mlp.act))
        yield from (PointSpec(row.name, row, norm_sites(norm)[row.name.rpartition(".")[2]]) for row in _IN_NORM)


def _norm_of(mlp: Any) -> Norm | None:
    """The norm after the activation function, if there is one."""
    norm = getattr(mlp, "ln", None)
    return None if isinstance(norm, nn.Identity | None) else norm_of(norm, mlp.down_proj.in_features)


def fold_norms_of_mlps(root: Any, swaps: Swaps) -> None:
    """Fold the weight and bias of the norm of `solu_ln` into what reads it."""
    for block in root.blocks if hasattr(root, "qk_pos_embed") else ():
        norm = _norm_of(getattr(block, "mlp", None))
        if norm is not None and norm.module._parameters["weight"] is not None:
            fold_into_linear(root, block.mlp.down_proj, norm, swaps)
            make_neutral(norm, swaps)

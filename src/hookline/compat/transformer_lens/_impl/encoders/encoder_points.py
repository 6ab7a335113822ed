"""The points of BERT and T5 under the names that TransformerLens has for them.

TransformerLens has points before the norms of BERT (`blocks.0.hook_resid_mid`, `hook_resid_post`), where hookline's
names mean the stream after them. hookline's own names, `encoder.0.hook_resid_post`, work too and keep their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hookline.engine import HookPoint, Site
from hookline.transformer.index import ModelPoints
from hookline.transformer.point_table import PointRow
from hookline.transformer.sites import PointSpec, input_of, norm_points, output_of


class LensEncoderPoints(ModelPoints):
    """The points of an encoder, or of an encoder and a decoder; `hook_dict` has the names of TransformerLens."""

    def refresh(self) -> None:
        """Find the points again, at once: their names are made of the model's own."""
        super().refresh()
        self.hook_dict  # noqa: B018

    def _list(self) -> dict[str, HookPoint]:
        self._own_names = super()._list()
        renamed = _of_bert if not self.anatomy.is_encoder_decoder else _of_t5
        specs = {spec.name: spec for spec in renamed(self)}
        self._table = {**self._specs, **specs}
        self._stacks = {"blocks" if len(self._stacks) == 1 else name: count for name, count in self._stacks.items()}
        return {
            name: HookPoint.at_site(name, spec.site, self.permanent, spec.axes, spec.only)
            for name, spec in specs.items()
            if spec.site is not None
        }

    def _translate(self, name: str) -> HookPoint | None:
        base, _, call = name.partition("#")
        if base not in self.hook_dict and base in self._own_names:
            return self._own_names[base].alias(name, int(call) if call else self._own_names[base].only)
        return super()._translate(name)


def _point(name: str, site: Site, axes: str = "b p d", *, on_request: bool = False) -> PointSpec:
    """A point that is not in the table."""
    return PointSpec(name, PointRow(name, axes, on_request=on_request), site)


def _of_bert(points: LensEncoderPoints) -> Iterator[PointSpec]:
    blocks, width = points.anatomy.blocks, points.anatomy.width
    root: Any = points.root
    for spec in points.specs.values():
        name = re.sub(r"^encoder\.", "blocks.", spec.name)
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        if name in ("hook_embed", "hook_pos_embed"):
            yield replace(spec, name=f"embed.{name}")
            if name == "hook_pos_embed":
                yield from _after_embedding(root, width)
        elif name.endswith(".hook_resid_mid") and (norm := blocks[layer].post_norm) is not None:
            yield _point(name.replace("resid_mid", "mlp_in"), input_of(norm), on_request=True)
            yield replace(spec, name=name, site=input_of(norm))
        elif name.endswith(".hook_resid_post") and (norm := blocks[layer].post_norm_2) is not None:
            yield replace(spec, name=name, site=input_of(norm))
            yield replace(spec, name=name.replace("hook_resid_post", "hook_normalized_resid_post"))
        elif not name.endswith(".hook_mlp_in"):
            yield replace(spec, name=name)
    yield from _heads(root, width)


def _after_embedding(root: Any, width: int) -> Iterator[PointSpec]:
    embeddings = root.base_model.embeddings
    yield _point("embed.hook_token_type_embed", output_of(embeddings.token_type_embeddings))
    yield from _of_norm("embed.ln", embeddings.LayerNorm, width)
    yield _point("hook_full_embed", output_of(embeddings))


def _heads(root: Any, width: int) -> Iterator[PointSpec]:
    """The points of the pooler and of both heads, as far as the model has them."""
    head = getattr(root, "cls", None)
    if getattr(root.base_model, "pooler", None) is not None:
        yield _point("pooler.hook_pooler_out", output_of(root.base_model.pooler), "b d")
    if (predictions := getattr(head, "predictions", None)) is not None:
        yield from _of_norm("mlm_head.ln", predictions.transform.LayerNorm, width)
    if (sentences := getattr(head, "seq_relationship", None)) is not None:
        yield _point("nsp_head.hook_nsp_out", output_of(sentences), "b 2")


def _of_norm(name: str, module: nn.Module, width: int) -> Iterator[PointSpec]:
    for spec in norm_points("ln1", module, width):
        yield replace(spec, name=spec.name.replace("ln1", name))


def _of_t5(points: LensEncoderPoints) -> Iterator[PointSpec]:
    for spec in points.specs.values():
        name = re.sub(r"^(encoder|decoder)\.ln_final\.", r"\1_final_ln.", spec.name)
        name = re.sub(r"^(decoder\.\d+)\.ln2\.", r"\1.ln3.", name)
        name = re.sub(r"^(decoder\.\d+)\.ln_cross\.", r"\1.ln2.", name)
        yield replace(spec, name="hook_embed" if name == "encoder.hook_embed" else name)

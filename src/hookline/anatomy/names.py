"""The points of a transformer by all their names: classic ones are listed, all others found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hookline.anatomy import variants
from hookline.anatomy.classic import Spec, classic_points
from hookline.anatomy.dialects import classic_name
from hookline.anatomy.roles import Anatomy, Block, find_anatomy
from hookline.errors import UnavailablePointError, UnknownPointError, no_match, unknown_point
from hookline.names import Filter, Points
from hookline.points import HookPoint, Site
from hookline.standing import Standing


def _same(x: Any) -> Any:
    return x


class ModelPoints(Points):
    """The points of one transformer."""

    def __init__(self, root: nn.Module, standing: Standing, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        super().__init__(root, standing)

    def refresh(self) -> None:
        """Look at the model's modules anew."""
        self.anatomy = find_anatomy(self.root) or self.anatomy
        super().refresh()
        self._native = self.hook_dict
        self._specs: dict[str, Spec] = {spec.name: spec for spec in classic_points(self.anatomy)}
        self.hook_dict = {
            name: HookPoint.found(name, spec.site, self.standing, spec.axes)
            for name, spec in self._specs.items()
            if spec.site is not None
        }
        self._classic_at: dict[Site, str] = {point.site: name for name, point in self.hook_dict.items()}

    def _all(self) -> list[HookPoint]:
        """Without those that are worked out only when asked for."""
        return [point for name, point in self.hook_dict.items() if not self._specs[name].is_on_request]

    @property
    def specs(self) -> dict[str, Spec]:
        """All points of the table, also those that are not to be had here."""
        return self._specs

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has softmax attention."""
        return self.anatomy.blocks[layer].attn is not None

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP."""
        block = self.anatomy.blocks[layer]
        return block.mlp is not None or block.mlp_out is not None

    def block(self, layer: int) -> Block:
        """The modules of a layer by role."""
        return self.anatomy.blocks[layer]

    def at(self, name: str, site: Site) -> HookPoint:
        """A point at a site that has no name of its own."""
        return HookPoint.found(name, site, self.standing)

    def mixes_otherwise(self) -> bool:
        """Whether something comes between the values, as the pattern mixes them, and the output projection."""
        return self.anatomy.kind in variants.MIXES_OTHERWISE

    def stream_norms(self, layer: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The norms that the stream goes through after the attention's and after the MLP's addition."""
        block = self.anatomy.blocks[layer]
        if block.post_norm is not None:
            return block.post_norm, block.post_norm_2 or _same
        if variants.is_post_norm(self.anatomy.config):
            return block.ln1 or _same, block.ln2 or _same
        return _same, _same

    def _parse(self, name: str) -> HookPoint:
        base, _, call = name.partition("#")
        classic = base if base in self._specs else classic_name(base, len(self.anatomy.blocks))
        if classic in self.hook_dict:
            return self.hook_dict[classic].asked_as(name, int(call) if call else None)
        if classic in self._specs:
            raise UnavailablePointError(f"{name!r} is not to be had in this model: {self._specs[classic].why}")
        try:
            return super()._parse(name)
        except UnavailablePointError:
            raise
        except UnknownPointError:
            raise unknown_point(name, [*self.hook_dict, *self._native]) from None

    def _select(self, names: Filter | tuple[Any, ...] | int) -> list[HookPoint]:
        if isinstance(names, int):
            return [self.find(f"blocks.{names}.hook_resid_post").asked_as(str(names))]
        if isinstance(names, tuple) and (classic := classic_name(names, len(self.anatomy.blocks))) is not None:
            return [self.find(classic)]
        return super()._select(names)

    def _matching(self, asked: object, predicate: Callable[[str], Any]) -> list[HookPoint]:
        """Classic names first; if none matches a glob or regex, native ones."""
        chosen = [point for name, point in self.hook_dict.items() if predicate(name)]
        if not chosen and not callable(asked):
            chosen = [point for name, point in self._native.items() if predicate(name)]
        if not chosen:
            raise no_match(asked, self.hook_dict)
        return chosen

    def of_copy(self, root: nn.Module) -> Points:
        """The points of a copy of the model."""
        return ModelPoints(root, Standing(), find_anatomy(root) or self.anatomy)

    def spelled(self, name: object) -> str:
        """Also by a shorthand, `("q", 5)`."""
        if isinstance(name, tuple) and (classic := classic_name(name, len(self.anatomy.blocks))) is not None:
            return classic
        return super().spelled(name)

    def canonical(self, name: str) -> str:
        """The one spelling for all names of a point: the classic one, if it has one."""
        point = self.find(name)
        classic = self._classic_at.get(point.site)
        return (
            (f"{classic}#{point.only}" if point.only is not None else classic) if classic else super().canonical(name)
        )

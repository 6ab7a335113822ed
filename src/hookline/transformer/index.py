"""ModelPoints: the points of a transformer, by their names in all dialects."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from hookline.engine.lenses import Lens
from hookline.engine.names import Filter, Points
from hookline.engine.order import Kind
from hookline.engine.permanent import PermanentHooks
from hookline.engine.points import HookPoint, Site
from hookline.errors import (
    HooklineWarning,
    UnavailablePointError,
    UnknownPointError,
    no_match,
    unknown_point,
    users_level,
)
from hookline.transformer.dialects import advice, classic_name, other_names
from hookline.transformer.listing import classic_points
from hookline.transformer.roles import Anatomy, find_anatomy
from hookline.transformer.sites import PointSpec
from hookline.transformer.vision_towers import image_modules


class ModelPoints(Points):
    """The points of one transformer."""

    def __init__(self, root: nn.Module, standing: PermanentHooks, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._left_out: list[str] = []
        super().__init__(root, standing)

    def refresh(self) -> None:
        """Find the points again after the model's modules changed."""
        self.anatomy = find_anatomy(self.root) or self.anatomy
        self._of_images = image_modules(self.root, self.anatomy)
        super().refresh()
        self._native = self.hook_dict
        self._specs: dict[str, PointSpec] = {spec.name: spec for spec in classic_points(self.anatomy)}
        self.hook_dict = {}
        for name, spec in self._specs.items():
            if spec.site is not None:
                self.hook_dict[name] = HookPoint.at_site(name, spec.site, self.permanent, spec.axes, spec.only)
        self._classic_at = {(point.site, point.only): name for name, point in self.hook_dict.items()}
        self._stacks = {stack.name: len(stack.blocks) for stack in self.anatomy.every_stack}

    def _site(self, module: nn.Module, kind: Kind, lens: Lens) -> Site:
        """A site whose stream is that of its module."""
        return Site(module, kind, lens, stream="image" if module in self._of_images else "text")

    def _all(self) -> list[HookPoint]:
        """All points except those on request."""
        return [point for name, point in self.hook_dict.items() if not self._specs[name].is_on_request]

    @property
    def specs(self) -> dict[str, PointSpec]:
        """All points of the table, including unavailable ones."""
        return self._specs

    def at(self, name: str, site: Site) -> HookPoint:
        """A point at a site without a classic name."""
        return HookPoint.at_site(name, site, self.permanent)

    def layer(self, index: int) -> str:
        """The name of a layer of the main stack: `blocks.5`."""
        return f"{self.anatomy.main.name}.{index}"

    def _parse(self, name: str) -> HookPoint:
        base, _, call = name.partition("#")
        if re.fullmatch(r"-?\d+", base) and base not in self._native:
            base = f"{self.layer(int(base))}.hook_resid_post"
        classic = base if base in self._specs else classic_name(base, self._stacks)
        if classic in self.hook_dict:
            point = self.hook_dict[classic]
            return point.alias(name, int(call) if call else point.only)
        if classic in self._specs:
            raise UnavailablePointError(f"{name!r} is not available on this model: {self._specs[classic].why}")
        try:
            return super()._parse(name)
        except UnavailablePointError:
            raise
        except UnknownPointError:
            known = [*self.hook_dict, *self._native]
            raise unknown_point(name, known, hint=advice(base, self._stacks)) from None

    def select(self, names: Filter) -> list[HookPoint]:
        """See `Points.select`. Warns if a regex or predicate matched points on request, and nothing names them."""
        self._left_out = []
        chosen = super().select(names)
        if self._left_out:
            self._warn_of_left_out({point.canonical_name for point in chosen})
        return chosen

    def _warn_of_left_out(self, chosen: set[str]) -> None:
        left_out = [name for name in self._left_out if name not in chosen]
        globs = [*dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in left_out)]
        if left_out:
            shown = ", ".join(map(repr, left_out if len(left_out) <= 4 else globs))
            warnings.warn(
                f"this filter also matches points that are computed only on request, and they were left out: {shown}. "
                f"To include them, name them beside it, in a list: [your_filter, {shown}]",
                HooklineWarning,
                stacklevel=users_level(),
            )

    def _select(self, names: Filter | tuple[Any, ...] | int) -> list[HookPoint]:
        if isinstance(names, int):
            return [self.find(f"{self.layer(names)}.hook_resid_post").alias(str(names))]
        if isinstance(names, tuple) and (classic := classic_name(names, self._stacks)) is not None:
            return [self.find(classic)]
        return super()._select(names)

    def _matching(self, asked: object, predicate: Callable[[str], Any]) -> list[HookPoint]:
        """Points with a matching classic name; if there are none, points with a matching native name.

        Points on request match only a filter that spells out their last part: see `_names`.
        """
        found = {name: name for name in self.hook_dict if predicate(name)}
        if not found and isinstance(asked, str):
            others = {name: other_names(name, self._stacks) for name in self.hook_dict}
            matches = {name: next(filter(predicate, names), None) for name, names in others.items()}
            found = {name: match for name, match in matches.items() if match is not None}
        if not found and not callable(asked):
            chosen = [point for name, point in self._native.items() if predicate(name)]
            if chosen:
                return chosen
        if not found:
            raise no_match(asked, self.hook_dict)
        meant = [name for name, match in found.items() if not self._specs[name].is_on_request or _names(asked, match)]
        if not meant:  # nothing but points on request: these are meant
            return [self.hook_dict[name] for name in found]
        if not isinstance(asked, str):
            self._left_out += [name for name in found if name not in meant]
        return [self.hook_dict[name] for name in meant]

    def blocks(self) -> list[nn.Module]:
        """The modules of the layers of the main stack."""
        return [block.module for block in self.anatomy.blocks]

    def targets(self) -> str:
        """The valid values of `hook_point` of a hook object on this model, as a sentence."""
        stacks = {stack.name: len(stack.blocks) for stack in self.anatomy.every_stack}
        names = [name for name, spec in self.specs.items() if spec.site is not None]
        roles = dict.fromkeys(
            re.sub(r"\.\d+\.", ".", other)
            for name in names
            for other in other_names(name, stacks)
            if other.startswith(("lm.", "vision.", "projector.")) and ".blocks." not in other
        )
        if not roles:
            return f"several stacks of layers: declare a full point name, such as {names[-1]!r}, without a layer"
        depth = ", ".join(f"0 to {n - 1}" + (f" ({name})" if len(stacks) > 1 else "") for name, n in stacks.items())
        return f"{', '.join(map(repr, roles))}, with a layer from {depth}, and every point by its full name"

    def is_on_request(self, name: str) -> bool:
        """Whether a point is recorded only if requested by name."""
        spec = self._specs.get(self.canonical_name(name))
        return spec is not None and spec.is_on_request

    def known(self) -> list[HookPoint]:
        """Every point that exists as an object: all classic points, and native points that were requested."""
        return [*self.hook_dict.values(), *super().known()]

    def of_copy(self, root: nn.Module) -> Points:
        """The points of a copy of the model."""
        return ModelPoints(root, PermanentHooks(), find_anatomy(root) or self.anatomy)

    def name_of(self, name: object) -> str:
        """The name of a point given as a name, a shorthand tuple `("q", 5)`, or the index of a block."""
        if isinstance(name, int):
            return str(name)
        if isinstance(name, tuple) and (classic := classic_name(name, self._stacks)) is not None:
            return classic
        return super().name_of(name)

    def canonical_name(self, name: str) -> str:
        """The canonical name of a point: the classic name if it has one."""
        point = self.find(name)
        classic = self._classic_at.get((point.site, point.only))
        if classic is None and point.only is not None:
            every = self._classic_at.get((point.site, None))
            classic = f"{every}#{point.only}" if every is not None else None
        return classic if classic is not None else super().canonical_name(name)


def _names(asked: object, name: str) -> bool:
    """Whether a glob or regex spells out the last part of a name, as "blocks.*.attn.hook_result" does.

    In a regex it may be without "hook_", as a word of its own: `hook_(z|result)$`.
    """
    last = name.rpartition(".")[2]
    if isinstance(asked, re.Pattern):
        word = re.escape(last.removeprefix("hook_"))
        return last in asked.pattern or re.search(rf"(?<![a-z_]){word}(?![a-z_])", asked.pattern) is not None
    return isinstance(asked, str) and re.split(r"[*?.]", asked)[-1] == last

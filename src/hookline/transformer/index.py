"""ModelPoints: the points of a transformer, by their names in all dialects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from hookline.engine import HookPoint, PermanentHooks, Points, Site
from hookline.errors import UnavailablePointError, no_match, warn
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.bridge_modules import module_event
from hookline.transformer.dialects import advice, classic_name, other_names, with_same_roles
from hookline.transformer.find_anatomy import find_anatomy, image_modules
from hookline.transformer.listing import classic_points
from hookline.transformer.sites import PointSpec
from hookline.types import Filter, Stream


class ModelPoints(Points):
    """The points of one transformer."""

    def __init__(self, root: nn.Module, standing: PermanentHooks, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._is_found = True
        """Whether the anatomy is that of the modules as they are."""
        self._left_out: list[str] = []
        super().__init__(root, standing)

    def refresh(self) -> None:
        """Find the points again after the model's modules changed."""
        self.anatomy = self.anatomy if self._is_found else self._find()
        self._is_found = False
        self._of_images = image_modules(self.root, self.anatomy)
        self._table: dict[str, PointSpec] | None = None  # made when it is needed
        self._stacks = {stack.name: len(stack.blocks) for stack in self.anatomy.every_stack}
        super().refresh()

    @property
    def _specs(self) -> dict[str, PointSpec]:
        if self._table is None:
            self._table = {spec.name: spec for spec in classic_points(self.anatomy)}
        return self._table

    def _find(self) -> Anatomy:
        """The modules by role, as they are now."""
        return find_anatomy(self.root) or self.anatomy

    def _list(self) -> dict[str, HookPoint]:
        """The points with classic names; the modules' own if there is none."""
        return {
            name: HookPoint.at_site(name, spec.site, self.permanent, spec.axes, spec.only)
            for name, spec in self._specs.items()
            if spec.site is not None
        } or super()._list()

    def _stream_of(self, module: nn.Module) -> Stream:
        return "image" if module in self._of_images else "text"

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

    def _translate(self, name: str) -> HookPoint | None:
        base, call = self._without_call(name)
        classic = self._classic_of(base)
        if classic in self.hook_dict:
            point = self.hook_dict[classic]
            return point.alias(name, int(call) if call else point.only)
        if classic in self._specs:
            raise UnavailablePointError(f"{name!r} is not available on this model: {self._specs[classic].why}")
        event = module_event(self.anatomy, base)
        return None if event is None else self._point(*event).alias(name, int(call) if call else None)

    def _classic_of(self, name: str) -> str | None:
        """The classic name of a name in any dialect; None if it is in none."""
        classic = name if name in self._specs else classic_name(name, self._stacks)
        linear = self._specs.get(f"{classic}_linear") if name.endswith(".mlp.in.hook_out") else None
        return linear.name if linear is not None and linear.site is not None else classic  # of a gated MLP

    def _shorthand(self, asked: object) -> str | None:
        """The name of a point given as a tuple, `("q", 5)`, or as the index of a block."""
        return str(asked) if isinstance(asked, int) else classic_name(asked, self._stacks)

    def _advice(self, name: str) -> str:
        return advice(self._without_call(name)[0], self._stacks)

    def meant_by(self, name: str) -> list[str]:
        """The points that a name which is not there may mean: also the modules that have its roles in this model."""
        return [*super().meant_by(name), *with_same_roles(self._without_call(name)[0], self._native)]

    def _without_call(self, name: str) -> tuple[str, str]:
        """A name and the number of its call, with the output of the block for the index of a block."""
        base, _, call = name.partition("#")
        if re.fullmatch(r"-?\d+", base) and base not in self._native:
            base = f"{self.layer(int(base))}.hook_resid_post"
        return base, call

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
            warn(
                f"this filter also matches points that are computed only on request, and they were left out: {shown}. "
                f"To include them, name them beside it, in a list: [your_filter, {shown}]",
            )

    def _matching(self, asked: object, predicate: Callable[[str], Any]) -> list[HookPoint]:
        """Points with a matching classic name; if there are none, points with a matching native name.

        Points on request match only a filter that spells out their last part: see `_names`.
        """
        matching = {name: name for name in self.hook_dict if predicate(name)}
        if not matching and isinstance(asked, str):
            others = {name: other_names(name, self._stacks) for name in self.hook_dict}
            matches = {name: next(filter(predicate, names), None) for name, names in others.items()}
            matching = {name: match for name, match in matches.items() if match is not None}
        if not matching and not callable(asked):
            chosen = [point for name, point in self._native.items() if predicate(name)]
            if chosen:
                return chosen
        if not matching:
            raise no_match(asked, self.hook_dict)
        meant = [name for name, match in matching.items() if not self.is_on_request(name) or _names(asked, match)]
        if not meant:  # nothing but points on request: these are meant
            return [self.hook_dict[name] for name in matching]
        if not isinstance(asked, str):
            self._left_out += [name for name in matching if name not in meant]
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
        spec = self._specs.get(name if name in self._specs else self.canonical_name(name))
        return spec is not None and spec.is_on_request

    def of_copy(self, root: nn.Module) -> Points:
        """The points of a copy of the model."""
        return ModelPoints(root, PermanentHooks(), find_anatomy(root) or self.anatomy)


def _names(names_filter: object, name: str) -> bool:
    """Whether a glob or regex spells out the last part of a name, as "blocks.*.attn.hook_result" does.

    In a regex it may be without "hook_", as a word of its own: `hook_(z|result)$`.
    """
    last = name.rpartition(".")[2]
    if isinstance(names_filter, re.Pattern):
        word = re.escape(last.removeprefix("hook_"))
        return (
            last in names_filter.pattern or re.search(rf"(?<![a-z_]){word}(?![a-z_])", names_filter.pattern) is not None
        )
    return isinstance(names_filter, str) and re.split(r"[*?.]", names_filter)[-1] == last

"""The registry of points of a TransformerBridge, which SAELens's subclass of it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from torch import nn

from hookline.engine import HookPoint
from hookline.transformer.dialects import other_names

if TYPE_CHECKING:
    from hookline.compat.transformer_lens._impl.attaching import LensPoints
    from hookline.compat.transformer_lens.model_bridge import TransformerBridge


class BridgePoints(MutableMapping[str, nn.Module]):
    """The points of a bridge by their Bridge names, and the modules attached in their places.

    To assign a module attaches it. To delete one removes it. Points inside an attached module are listed too.
    """

    def __init__(self, model: TransformerBridge) -> None:
        self._model = model

    def __getitem__(self, name: str) -> nn.Module:
        if (module := self._model._attached.get(name)) is not None:
            return module
        point = self._listed().get(name)
        if point is None:
            raise KeyError(name)
        return point

    def __setitem__(self, name: str, value: nn.Module) -> None:
        if self._model._attached.get(name) is not value and self._listed().get(name) is not value:
            self._model._attached.put(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self._model._attached.modules:
            self._model._attached.remove(name)

    def __iter__(self) -> Iterator[str]:
        attached = [path for path in self._model._attached.modules if path in self._model.index.replaced]
        yield from dict.fromkeys([*self._listed(), *attached])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _listed(self) -> dict[str, HookPoint]:
        self._model.index.keep_up()
        points = self._model.index
        return {bridge_name(points, name): point for name, point in points.hook_dict.items()}


def bridge_name(points: LensPoints, name: str) -> str:
    """The Bridge name of a point: `blocks.0.hook_in` for `blocks.0.hook_resid_pre`. Many have only one name."""
    others = (other for other in other_names(name, points._stacks) if other.rpartition(".")[2].startswith("hook_"))
    return next((other for other in others if points._classic_of(other) == name), name)


def bridge_names(points: LensPoints) -> dict[str, str]:
    """The Bridge names of points, by their usual names; without points that have only one name."""
    names = {name: bridge_name(points, name) for name in points.own}
    return {name: other for name, other in names.items() if name != other}

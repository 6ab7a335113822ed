"""Values kept from one event for a later one in the same forward pass.

Some points are no value that any module passes on: the residual stream in the middle of a block is what came in plus
what the attention adds. Such a point sits at the later event, and its lens looks up what an earlier one let pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hookline.engine.actions import Action, PointAction
from hookline.engine.aliases import give_back, note_sent
from hookline.engine.lenses import Chain, Lens
from hookline.engine.taps import Kind, Tap, Turn, now, tap_on

if TYPE_CHECKING:
    from hookline.engine.points import Site


class Keep(Action):
    """Keeps what leaves a site, after all edits there."""

    turn = Turn.KEEP

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.module, self.tap = site, site.module, site.tap

    def __call__(self, value: Any) -> Any:
        """The value, unchanged."""
        self.fired = True
        now.kept[self.site] = self.site.lens.get(value)
        now.worked_out[self.site] = {}
        return value


@dataclass(frozen=True)
class Added:
    """The sum of a kept tensor and the one that `lens` sees; putting one in changes the latter."""

    base: Site
    lens: Lens

    def get(self, value: Any) -> Tensor:
        """The sum."""
        return now.kept[self.base] + self.lens.get(value)

    def put(self, value: Any, tensor: Tensor) -> Any:
        """What must be added to give `tensor`."""
        return self.lens.put(value, tensor - now.kept[self.base])


@dataclass(frozen=True)
class Difference:
    """The tensor that `lens` sees less a kept one: what was added to the one to give the other."""

    base: Site
    lens: Lens

    def get(self, value: Any) -> Tensor:
        """The difference."""
        return self.lens.get(value) - now.kept[self.base]

    def put(self, value: Any, tensor: Tensor) -> Any:
        """The sum with `tensor` added instead."""
        return self.lens.put(value, now.kept[self.base] + tensor)


@dataclass(frozen=True)
class Rows:
    """A tensor with batch and positions as one axis, `(b p) d`, seen as `b p d`; `like` tells how many of each."""

    like: Site

    def get(self, value: Tensor) -> Tensor:
        """Two axes for one."""
        return value if value.ndim == 3 else value.unflatten(0, now.kept[self.like].shape[:2])

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """One for two."""
        return tensor if value.ndim == 3 else tensor.flatten(0, 1)


@dataclass(frozen=True)
class MergeTiles:
    """A tensor with several rows for each row of the batch, `(b n) p …`, seen as one: `b (n p) …`."""

    like: Site

    def get(self, value: Tensor) -> Tensor:
        """As many rows as `like` has."""
        return value.reshape(now.kept[self.like].shape[0], -1, *value.shape[2:])

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """As it was."""
        return tensor.reshape(value.shape)


@dataclass(frozen=True)
class ExpandBatch:
    """A tensor that is the same for every row, `1 p d` or `p d`, seen as `b p d`; `like` tells how many there are."""

    like: Site
    lens: Lens

    def get(self, value: Any) -> Tensor:
        """As often as there are rows."""
        x, like = self.lens.get(value), now.kept.get(self.like)
        x = x[None] if x.ndim == 2 else x
        return x if like is None or x.shape[0] != 1 else x.expand(like.shape[0], *x.shape[1:])

    def put(self, value: Any, tensor: Tensor) -> Any:
        """A row for each."""
        return self.lens.put(value, tensor)


@dataclass(frozen=True)
class Keys:
    """Scores or weights over the keys, `b h p k` or `(b h) p k`, seen as `b h p k`.

    Where there may be more columns than keys, for a sink, `keys` tells how many of them are keys.
    """

    heads: int
    keys: Site | None = None

    def get(self, value: Tensor) -> Tensor:
        """Over the keys alone."""
        by_head = value if value.ndim == 4 else value.unflatten(0, (-1, self.heads))
        return by_head[..., : self._count(value)]

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """With the other columns as they were."""
        by_head = tensor if value.ndim == 4 else tensor.flatten(0, 1)
        rest = value[..., self._count(value) :]
        return torch.cat([by_head, rest], -1) if rest.shape[-1] else by_head

    def _count(self, value: Tensor) -> int:
        return value.shape[-1] if self.keys is None else now.kept[self.keys].shape[1]


class Consequence(Protocol):
    """What an edit made at one event changes at a later one."""

    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    def __call__(self, output: Any) -> Any: ...  # noqa: D102


class Effect(Action):
    """Lets an edit show at the output where it takes effect."""

    turn = Turn.EFFECT

    def __init__(self, consequence: Consequence) -> None:
        super().__init__()
        self.module, self.consequence = consequence.module, consequence
        self.tap = tap_on(self.module, Kind.OUTPUT)
        self.fired = True  # whether it does is the concern of the edit

    def __call__(self, value: Any) -> Any:
        """The value after the edit, if there was one."""
        return self.consequence(value)


class Derived:
    """A lens on a tensor that the model does not compute itself, but that can be worked out from what it does.

    An edit of it is remembered for as long as what it was worked out from flows, so that the next one sees it.
    """

    def source(self, value: Any) -> Tensor:
        """What it is worked out from."""
        raise NotImplementedError

    def worked_out(self, value: Any) -> Tensor:
        """The tensor, as it is without an edit."""
        raise NotImplementedError

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:
        """The value at the event after an edit of the tensor."""
        raise NotImplementedError

    def get(self, value: Any) -> Tensor:
        """The tensor, after the edits so far."""
        edited = self.edited(self.source(value))
        return self.worked_out(value) if edited is None else edited

    def put(self, value: Any, tensor: Tensor) -> Any:
        """The value at the event after an edit."""
        new = self.changed(value, self.get(value), tensor)
        now.kept[self] = self.source(value), tensor
        return new

    def edited(self, source: Tensor) -> Tensor | None:
        """What the tensor was made to be, if it was."""
        origin, tensor = now.kept.get(self, (None, None))
        return tensor if origin is source else None


class Forget(Action):
    """Forgets what was made of a tensor when it comes by again: in another pass, or when a checkpoint recomputes."""

    turn = Turn.BEGIN

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.module, self.tap = site, site.module, site.tap
        self.fired = True  # whether it does is nobody's concern

    def __call__(self, value: Any) -> Any:
        """The value, unchanged."""
        source = self.site.lens.get(value)
        for lens in [key for key in now.kept if isinstance(key, Derived) and key.edited(source) is not None]:
            del now.kept[lens]
        return value


class Send(Action):
    """Notes which arguments of a call were replaced, after all edits at the module's input."""

    turn = Turn.SEND

    def __init__(self, module: nn.Module, tap: Tap) -> None:
        super().__init__()
        self.module, self.tap = module, tap
        self.fired = True  # whether it does is nobody's concern

    def __call__(self, value: Any) -> Any:
        """The value, unchanged."""
        if value is not now.arguments:
            note_sent(now.arguments, value)
        return value


class GiveBack(Action):
    """Lets the caller of a module see what the module wrote in place to the arguments that were replaced."""

    turn = Turn.CALLERS_TENSORS

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.tap = module, tap_on(module, Kind.OUTPUT)
        self.fired = True  # whether it does is nobody's concern

    def __call__(self, value: Any) -> Any:
        """The value, with the caller's own tensors where the module returns its arguments."""
        return give_back(value) if now.sent else value


def _is_derived(lens: Lens) -> bool:
    return isinstance(lens.lenses[0] if isinstance(lens, Chain) else lens, Derived)


def with_needs(actions: Iterable[Action]) -> list[Action]:
    """The actions, and those that keep what their points need and bring about what their edits do."""
    every = list(actions)
    needed: dict[Site, None] = {}
    effects: dict[Consequence, None] = {}
    sources: dict[Site, None] = {}
    replaced: dict[tuple[nn.Module, Tap], None] = {}
    for action in every:
        if not isinstance(action, PointAction):
            continue
        if action.needs:
            needed.update(dict.fromkeys(action.needs))
        if not action.only_reads:
            effects.update(dict.fromkeys(action.point.site.effects))
            if action.needs and _is_derived(action.lens):
                sources.update(dict.fromkeys(action.needs))
            if action.tap.kind is Kind.INPUT:
                replaced[action.module, action.tap] = None
    if not (needed or effects or replaced):
        return every
    sends = [Send(module, tap) for module, tap in replaced]
    returns = [GiveBack(module) for module in dict.fromkeys(module for module, _ in replaced)]
    return [*every, *map(Keep, needed), *map(Effect, effects), *map(Forget, sources), *sends, *returns]

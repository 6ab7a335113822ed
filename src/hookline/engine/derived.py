"""Derived points: activations that no module takes or returns, computed from those of earlier events.

For example, the residual stream in the middle of a block is the block's input plus the output of attention. Such a
point is at the later event, and its lens looks up what was saved at the earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hookline.engine._memory.aliases import copy_of, give_back, noted_sent
from hookline.engine._memory.snapshots import is_same_memory
from hookline.engine._memory.structures import NoTensorError, map_tensors, tensors_in
from hookline.engine._recording.deferred import Deferred, kept
from hookline.engine._torch import compiled_calls
from hookline.engine._torch.hooks_on_modules import hooks_after, hooks_before
from hookline.engine.actions import Action, PointAction
from hookline.engine.lenses import Chain, Lens, deferred
from hookline.engine.order import Kind, Phase, Turn
from hookline.engine.pass_state import pass_state
from hookline.engine.taps import Tap, tap_on

if TYPE_CHECKING:
    from hookline.engine._gradients.gradient_sources import WriteCount
    from hookline.engine.points import Site


class Stash(Action):
    """Saves the activation that leaves a site, after all edits there.

    If only later events need it, it is what leaves the hooks of others there, too: a norm gets what they return.
    """

    turn = Turn.KEEP
    only_reads = True

    def __init__(self, site: Site, *, is_for_later: bool) -> None:
        super().__init__()
        self.site, self.module = site, site.module
        self.tap = site.last_tap() if is_for_later else site.tap

    def __call__(self, value: Any) -> Any:
        """Return the value unchanged."""
        pass_state.saved[self.site] = self.site.lens.get(value)
        pass_state.memo[self.site] = {}
        return value


def kept_at(site: Site) -> Tensor | None:
    """Return a snapshot of what was saved at a site; None if it cannot be shared."""
    found = pass_state.memo[site]
    if "kept" not in found:
        found["kept"] = kept(pass_state.saved[site])
    return found["kept"]


class Formula(NamedTuple):
    """How a derived tensor is computed from others."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    """Sites, for what was saved there; lenses, for what they see in the value; functions that return a number now; and
    numbers."""

    def later(self, value: Any) -> Deferred | None:
        """Defer it; None if one of the tensors cannot be shared."""
        found = [_argument(each, value) for each in self.arguments]
        return None if any(each is None for each in found) else Deferred(self.function, *found)


def _argument(given: Any, value: Any) -> Any:
    if isinstance(given, Lens):
        return deferred(given, value)
    if callable(given):
        return given()
    return given if isinstance(given, int | float) else kept_at(given)


def _sum(base: Tensor, added: Tensor) -> Tensor:
    if base.shape != added.shape:
        raise NoTensorError(f"shape {list(added.shape)} cannot be what is added to shape {list(base.shape)}")
    return base + added


@dataclass(frozen=True)
class Added:
    """The sum of a saved tensor and the one that `lens` sees; `put` changes the latter."""

    base: Site
    lens: Lens

    def get(self, value: Any) -> Tensor:
        """The sum."""
        return _sum(pass_state.saved[self.base], self.lens.get(value))

    @property
    def formula(self) -> Formula:
        """The sum."""
        return Formula(_sum, (self.base, self.lens))

    def later(self, value: Any) -> Deferred | None:
        """Defer the sum."""
        return self.formula.later(value)

    def put(self, value: Any, tensor: Tensor) -> Any:
        """Put in what must be added to get `tensor`."""
        return self.lens.put(value, tensor - pass_state.saved[self.base])


@dataclass(frozen=True)
class Difference:
    """The tensor that `lens` sees minus a saved one: what was added in between."""

    base: Site
    lens: Lens

    def get(self, value: Any) -> Tensor:
        """The difference."""
        return self.lens.get(value) - pass_state.saved[self.base]

    @property
    def formula(self) -> Formula:
        """The difference."""
        return Formula(torch.sub, (self.lens, self.base))

    def later(self, value: Any) -> Deferred | None:
        """Defer the difference."""
        return self.formula.later(value)

    def put(self, value: Any, tensor: Tensor) -> Any:
        """Put in the saved tensor plus `tensor`."""
        return self.lens.put(value, pass_state.saved[self.base] + tensor)


@dataclass(frozen=True)
class Unflatten:
    """A tensor with batch and positions as one axis, `(b p) d`, seen as `b p d`; `like` has the sizes."""

    like: Site

    def get(self, value: Tensor) -> Tensor:
        """Split the first axis."""
        return value if value.ndim == 3 else value.unflatten(0, pass_state.saved[self.like].shape[:2])

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Merge the first two axes."""
        return tensor if value.ndim == 3 else tensor.flatten(0, 1)


@dataclass(frozen=True)
class MergeTiles:
    """A tensor with several rows (tiles) per example, `(b n) p …`, seen as `b (n p) …`; `like` has the batch size."""

    like: Site

    def get(self, value: Tensor) -> Tensor:
        """Merge the tiles of each example."""
        return value.reshape(pass_state.saved[self.like].shape[0], -1, *value.shape[2:])

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Split into tiles again."""
        return tensor.reshape(value.shape)


@dataclass(frozen=True)
class ExpandBatch:
    """A tensor that all rows share, `1 p d` or `p d`, seen as `b p d`; `like` has the batch size."""

    like: Site
    lens: Lens

    def get(self, value: Any) -> Tensor:
        """Expand to the batch."""
        x, like = self.lens.get(value), pass_state.saved.get(self.like)
        x = x[None] if x.ndim == 2 else x
        return x if like is None or x.shape[0] != 1 else x.expand(like.shape[0], *x.shape[1:])

    def put(self, value: Any, tensor: Tensor) -> Any:
        """Put in one row per example."""
        return self.lens.put(value, tensor)


@dataclass(frozen=True)
class Keys:
    """Scores or weights over the keys, `b h p k` or `(b h) p k`, seen as `b h p k`.

    With an attention sink there are more columns than keys; `keys` has their number.
    """

    heads: int
    keys: Site | None = None

    @property
    def is_pure(self) -> bool:
        """Whether nothing but the value is needed."""
        return self.keys is None

    def get(self, value: Tensor) -> Tensor:
        """Return the columns of the keys."""
        by_head = value if value.ndim == 4 else value.unflatten(0, (-1, self.heads))
        return by_head[..., : self._count(value)]

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Put in the columns of the keys; other columns stay."""
        by_head = tensor if value.ndim == 4 else tensor.flatten(0, 1)
        rest = value[..., self._count(value) :]
        return torch.cat([by_head, rest], -1) if rest.shape[-1] else by_head

    def _count(self, value: Tensor) -> int:
        return value.shape[-1] if self.keys is None else pass_state.saved[self.keys].shape[1]


class Consequence(Protocol):
    """The effect at a later event of an edit made at an earlier one."""

    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    def __call__(self, output: Any) -> Any: ...  # noqa: D102


class Effect(Action):
    """Applies the effect of an edit at the output where it shows."""

    turn = Turn.EFFECT

    def __init__(self, consequence: Consequence) -> None:
        super().__init__()
        self.module, self.consequence = consequence.module, consequence
        self.tap = tap_on(self.module, Kind.OUTPUT)

    def __call__(self, value: Any) -> Any:
        """Return the value after the edit, if there was one."""
        return self.consequence(value)


class Derived:
    """A lens on a tensor that the model does not compute, but that can be computed from one that it does (the source).

    An edit is remembered as long as the same source passes, so that the next hook sees it.
    """

    def source(self, value: Any) -> Tensor:
        """The tensor that it is computed from."""
        raise NotImplementedError

    def computed(self, value: Any) -> Tensor:
        """Compute the tensor, without edits."""
        raise NotImplementedError

    def changed(self, value: Any, before: Tensor, after: Tensor) -> Any:
        """Return the value at the event after an edit of the tensor."""
        raise NotImplementedError

    def get(self, value: Any) -> Tensor:
        """Return the tensor after the edits so far."""
        edited = self.edited(self.source(value))
        return self.computed(value) if edited is None else edited

    def put(self, value: Any, tensor: Tensor) -> Any:
        """Return the value at the event after an edit, which is remembered."""
        new = self.changed(value, self.get(value), tensor)
        pass_state.saved[self], pass_state.has_edits = (self.source(value), tensor), True
        return new

    def edited(self, source: Tensor) -> Tensor | None:
        """The tensor after an edit; None if there was none for this source."""
        if not pass_state.has_edits:
            return None
        origin, tensor = pass_state.saved.get(self, (None, None))
        return tensor if origin is source else None


class Forget(Action):
    """Drops the edits of derived tensors when their source passes again, in another pass or a recomputation."""

    turn = Turn.BEGIN

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.module, self.tap = site, site.module, site.tap

    def __call__(self, value: Any) -> Any:
        """Return the value unchanged."""
        source = self.site.lens.get(value)
        for lens in [key for key in pass_state.saved if isinstance(key, Derived) and key.edited(source) is not None]:
            del pass_state.saved[lens]
        return value


class Send(Action):
    """Notes which arguments of a call were replaced, after all edits at the module's input.

    A module that works in place gets a copy if its output is edited: autograd may need the output that it computed, and
    the edit is written to the caller's own tensor.
    """

    turn = Turn.SEND

    def __init__(self, module: nn.Module, tap: Tap, *, copies: bool) -> None:
        super().__init__()
        self.module, self.tap, self.copies = module, tap, copies

    def __call__(self, value: Any) -> Any:
        """Return the arguments to call the module with."""
        if self.copies:
            value = map_tensors(value, lambda x: copy_of(x, x))
        return value if value is pass_state.arguments else noted_sent(self.module, pass_state.arguments, value)


class EndWrites(Action):
    """At the output of a module: what was sent to it is not written to anymore, as far as its gradient is concerned.

    Not if the module returns it: then the caller may still write to it.
    """

    turn = Turn.CALLERS_TENSORS

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.tap = module, tap_on(module, Kind.OUTPUT)

    def __call__(self, value: Any) -> Any:
        """Return the value unchanged."""
        for argument in tensors_in(pass_state.arguments):
            writes: WriteCount | None = getattr(argument, "_hookline_writes", None)
            if writes is not None and not any(is_same_memory(argument, output) for output in tensors_in(value)):
                writes.stop()
        return value


class ReturnOriginals(Action):
    """Lets the caller of a module see what the module wrote to the tensors, lists and dicts that were replaced."""

    turn = Turn.CALLERS_TENSORS

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.tap = module, tap_on(module, Kind.OUTPUT)

    def __call__(self, value: Any) -> Any:
        """Return the value, with the caller's own tensors where the module returns its arguments."""
        return give_back(self.module, value) if pass_state.sent or pass_state.copies else value


def _is_derived(lens: Lens) -> bool:
    return isinstance(lens.lenses[0] if isinstance(lens, Chain) else lens, Derived)


_READS_INPUT = {
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LSTM, nn.GRU, nn.RNN),
}


def only_reads_input(module: nn.Module) -> bool:
    """Whether a module certainly neither writes to its input nor returns it: nobody has hooked or wrapped it."""
    own = module.__dict__
    return type(module) in _READS_INPUT and not (
        hooks_before(module) or hooks_after(module) or "forward" in own or own.get(compiled_calls.ATTRIBUTE)
    )


def with_needs(actions: Iterable[Action], *, is_one_pass: bool = False) -> list[Action]:
    """The actions, and those that save what their points need and bring about the effects of their edits.

    In a single pass nobody hooks a module meanwhile, so that one that only reads its input does so until the end.
    """
    every = list(actions)
    needed: dict[Site, bool] = {}
    effects: dict[Consequence, None] = {}
    sources: dict[Site, None] = {}
    replaced: dict[tuple[nn.Module, Tap], bool] = {}
    ends: dict[nn.Module, None] = {}
    for action in every:
        if not isinstance(action, PointAction):
            continue
        if action.phase is Phase.GRADIENT and action.tap.kind is Kind.INPUT:
            ends[action.module] = None
        if action.needs:
            for site in action.needs:
                is_later = (site.module, site.kind) != (action.point.site.module, action.point.site.kind)
                needed[site] = needed.get(site, True) and is_later
        if not action.only_reads:
            effects.update(dict.fromkeys(action.point.site.effects))
            if action.needs and _is_derived(action.lens):
                sources.update(dict.fromkeys(action.needs))
            if action.tap.kind is Kind.INPUT and not (is_one_pass and only_reads_input(action.module)):
                replaced.setdefault((action.module, action.tap), False)
            elif action.is_inplace and action.tap.kind is Kind.OUTPUT:
                replaced[action.module, tap_on(action.module, Kind.INPUT, late=True)] = True
    if not (needed or effects or replaced or ends):
        return every
    sends = [Send(module, tap, copies=copies) for (module, tap), copies in replaced.items()]
    returns = [ReturnOriginals(module) for module in dict.fromkeys(module for module, _ in replaced)]
    return [
        *every,
        *[Stash(site, is_for_later=is_for_later) for site, is_for_later in needed.items()],
        *map(Effect, effects),
        *map(Forget, sources),
        *sends,
        *map(EndWrites, ends),
        *returns,
    ]

"""Hook points: named places through which an activation flows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from hookline.engine import taps
from hookline.engine.actions import UNKNOWN
from hookline.engine.callbacks import HookObject
from hookline.engine.calls import running
from hookline.engine.casting import Choices
from hookline.engine.gradients import BackwardHook
from hookline.engine.hook_actions import Edit, HookAction
from hookline.engine.lenses import FIRST, Lens
from hookline.engine.order import Kind
from hookline.engine.passes import Stream, current
from hookline.engine.permanent import PermanentHooks, keep
from hookline.engine.schedule import active
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.engine.derived import Consequence

Direction = Literal["fwd", "bwd"]


@dataclass(frozen=True)
class Site:
    """Where a point is: an event of a module, and the lens that finds the tensor in it.

    `needs` are the sites whose values the lens looks up, and `effects` where an edit shows; `stage` orders the points
    of one event along the way of the data.
    """

    module: nn.Module
    kind: Kind
    lens: Lens = FIRST
    needs: tuple[Site, ...] = ()
    effects: tuple[Consequence, ...] = ()
    stage: int = 0
    stream: Stream = field(default="text", compare=False)
    """What the positions of its value are of."""
    choices: Choices | None = field(default=None, compare=False)
    """Of a value that has indices: what they choose from."""
    tap_type: type[taps.Tap] = field(default=taps.Tap, compare=False)
    """What listens there: something of its own for events inside a module."""

    def __hash__(self) -> int:
        return id(self.module) ^ self.stage

    @cached_property
    def tap(self) -> taps.Tap:
        """The tap on that event."""
        return taps.tap_on(self.module, self.kind, make=self.tap_type)


class HookPoint(nn.Module):
    """A named place through which an activation flows. It costs nothing until it is hooked.

    Placed in a model of one's own it passes its input through:

        self.hook_mid = HookPoint()
        ...
        x = self.hook_mid(x)

    `hookline.hook(model)` finds all others: the input and output of every module.
    """

    name: str
    ctx: dict[Any, Any]

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.axes = ""
        self.ctx = {}
        self.only: int | None = None
        self._canonical_name = ""
        self._site: Site | None = None
        self._permanent = PermanentHooks()

    @classmethod
    def at_site(cls, name: str, site: Site, standing: PermanentHooks, axes: str = "", only: int | None = None) -> Self:
        """A point at a module of somebody else's model, perhaps for one call of it only."""
        point = cls()
        point.name, point._site, point._permanent, point.axes, point.only = name, site, standing, axes, only
        point._canonical_name = name
        return point

    def alias(self, name: str, only: int | None = None) -> HookPoint:
        """The same point under the name it was asked for, perhaps for one call of its module only."""
        if (name, only) == (self.name, self.only):
            return self
        view = HookPoint.at_site(name, self.site, self._permanent, self.axes, only)
        view.ctx, view._canonical_name = self.ctx, self._canonical_name
        return view

    def join(self, name: str, standing: PermanentHooks) -> HookPoint:
        """Become part of a model under this name, with the hooks added so far; the first model keeps the point."""
        if self._permanent is standing or self._permanent.root() is None:
            self.name = name
            self._permanent.move_to(standing)
            self._permanent = standing
        return self.alias(name)

    @property
    def site(self) -> Site:
        """The module event and the lens. A placed point is its own module."""
        return self._site or Site(self, Kind.OUTPUT)

    @property
    def permanent(self) -> PermanentHooks:
        """The standing hooks that this point's belong to: its model's, or its own before it has one."""
        return self._permanent

    @property
    def call(self) -> int | None:
        """Which call of its module in this forward pass a running hook sees, counted from 0.

        None for a hook that was added to stay, when its module is called by itself, outside a forward pass.
        """
        if running.call == UNKNOWN:
            raise HooklineError(
                f"{self.name!r} was called several times, and cannot be told which call this is when a checkpointed "
                f"region recomputes; switch gradient checkpointing off"
            )
        return running.call

    @property
    def canonical_name(self) -> str:
        """The name under which it is listed, however it was asked for."""
        return self._canonical_name or self.name

    @property
    def stream(self) -> Stream:
        """What the positions of its value are of: "text", "encoder" (beside a decoder), or "image" (patches)."""
        return self.site.stream

    @property
    def step(self) -> int:
        """Which pass of a generation a running hook sees: 0 is the prompt, 1 the first new token, and so on."""
        return self._passing().known_step()

    @property
    def positions(self) -> range:
        """Which positions of the text a running hook sees: the whole prompt, or just the newest one."""
        if self.stream == "image":
            raise HooklineError(f"{self.name!r} is about pictures: its positions are patches, none of the text")
        passing = self._passing()
        passing.check("positions")
        return passing.span_at(self.stream).positions

    def _passing(self) -> Any:
        passing = current.at_hook if running.hooks else current.forward_pass
        if passing is None:
            raise HooklineError(f"the step and positions of {self.name!r} are known while a language model runs")
        return passing

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        return x

    def layer(self) -> int:
        """The number of the layer in the name: 5 for `blocks.5.attn.hook_q`."""
        numbers = [part for part in self.canonical_name.split(".") if part.isdigit()]
        if not numbers:
            raise HooklineError(f"the point {self.name!r} is in no numbered layer")
        return int(numbers[0])

    def add_hook(
        self,
        hook: Callable[..., Any],
        dir: Direction = "fwd",
        *,
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> Callable[[], None]:
        """Keep a hook here until it is removed or reset; a permanent one survives a reset.

        Returns the function that removes it.
        """
        action = hook_action(self, hook, dir, prepend=prepend)
        action.registration.is_permanent = is_permanent
        return keep([(self, action)])

    def add_perma_hook(self, hook: Callable[..., Any], dir: Direction = "fwd") -> Callable[[], None]:
        """`add_hook` with `is_permanent=True`."""
        return self.add_hook(hook, dir, is_permanent=True)

    def remove_hooks(self, dir: Literal["fwd", "bwd", "both"] = "fwd", *, including_permanent: bool = False) -> None:
        """Remove the hooks added here."""
        check_direction(dir, "fwd", "bwd", "both")

        def is_meant(action: HookAction) -> bool:
            is_here = action.point.site == self.site and dir in (action.dir, "both")
            return is_here and (including_permanent or not action.registration.is_permanent)

        self._permanent.remove(is_meant)
        remove_from_contexts(is_meant)

    @property
    def fwd_hooks(self) -> list[Callable[..., Any]]:
        """The forward hooks here now, those of contexts open in this thread included, in the order they fire."""
        return self._hooks("fwd")

    @property
    def bwd_hooks(self) -> list[Callable[..., Any]]:
        """The backward hooks here now, those of contexts open in this thread included, in the order they fire."""
        return self._hooks("bwd")

    def _hooks(self, dir: Direction) -> list[Callable[..., Any]]:
        of_contexts = [each for run in active.get() if run.is_open for each in run.actions]
        found = [each for each in (*self._permanent.hooks(), *of_contexts) if isinstance(each, HookAction)]
        here = [each for each in found if each.dir == dir and each.point.site == self.site]
        return [each.hook for each in sorted(here, key=lambda each: each.order)]

    def has_hooks(self) -> bool:
        """Whether there is any hook here now."""
        return bool(self.fwd_hooks or self.bwd_hooks)

    def clear_context(self) -> None:
        """Empty `ctx`."""
        self.ctx.clear()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a point of its own: it belongs to no model yet. (Hooks in place refuse to be copied: see Tap.)
        return {**self.__dict__, "_site": None, "_permanent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._permanent = PermanentHooks()

    def extra_repr(self) -> str:
        """What `repr` shows between the brackets."""
        return repr(self.name) if self.name else ""


def check_direction(given: str, *allowed: str) -> None:
    """A direction that does not exist would select nothing, in silence."""
    if given not in allowed:
        raise HooklineError(f"the direction must be {' or '.join(map(repr, allowed))}, not {given!r}")


def remove_from_contexts(unwanted: Callable[[HookAction], bool]) -> None:
    """Remove hooks of the contexts open in this thread, where these are of a kind that allows it (`level`)."""
    for run in active.get():
        gone = {
            each for each in run.actions if isinstance(each, HookAction) and each.registration.level and unwanted(each)
        }
        if gone:
            run.set([each for each in run.actions if each not in gone])


def hook_action(point: HookPoint, hook: Callable[..., Any], dir: str, *, prepend: bool = False) -> HookAction:
    """The action that calls `hook` at `point`; every mistake that can be seen now is raised now."""
    check_direction(dir, "fwd", "bwd")
    if isinstance(hook, HookObject):
        return hook.action(point, dir, prepend=prepend)
    return (Edit if dir == "fwd" else BackwardHook)(point, hook, prepend=prepend)

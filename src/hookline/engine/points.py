"""Hook points: named places through which an activation flows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from hookline.engine import taps
from hookline.engine._compiler.untraced import outside_compiler
from hookline.engine._gradients.gradients import BackwardHook
from hookline.engine._inner.attention_steps import AttentionTap, is_expected
from hookline.engine._inner.plain_attention import PlainAttentionTap
from hookline.engine._inner.router import RouterTap
from hookline.engine._staying.permanent import AddedHooks, PermanentHooks
from hookline.engine.actions import UNKNOWN
from hookline.engine.callbacks import HookObject
from hookline.engine.formulas import Formula
from hookline.engine.hook_actions import Edit, HookAction
from hookline.engine.lenses import FIRST, Lens, parts_of
from hookline.engine.order import Kind
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import active
from hookline.errors import HooklineError
from hookline.types import Direction, Stream
from hookline.values.casting import Choices

if TYPE_CHECKING:
    from hookline.engine.derived import Consequence


@dataclass(frozen=True)
class Site:
    """Where a point is: an event of a module, and the lens that finds the tensor in its value.

    `effects` are where an edit takes effect, if not there. `stage` orders the points of one event along the data flow:
    0 is the value itself, below 0 what it is made of, above 0 what is made of it.
    """

    module: nn.Module
    kind: Kind
    lens: Lens = FIRST
    effects: tuple[Consequence, ...] = ()
    stage: int = 0
    stream: Stream = field(default="text", compare=False)
    """What the positions of its value belong to."""
    choices: Choices | None = field(default=None, compare=False)
    """The valid indices, if its value has indices."""

    def __hash__(self) -> int:
        return id(self.module) ^ self.stage

    @cached_property
    def needs(self) -> tuple[Site, ...]:
        """The sites whose values its lens is computed from, each after those that it needs itself."""
        formulas = [part for part in parts_of(self.lens) if isinstance(part, Formula)]
        sources = [need for formula in formulas for need in formula.needs if isinstance(need, Site)]
        return tuple(dict.fromkeys(site for source in sources for site in (*source.needs, source)))

    @cached_property
    def tap(self) -> taps.Tap:
        """The tap on that event."""
        return taps.tap_on(self.module, self.kind, make=_tap_type(self.module, self.kind))

    def last_tap(self) -> taps.Tap:
        """The tap behind other people's torch hooks on that event, if there are any now."""
        is_last = taps.has_foreign_hooks(self.module, self.kind)
        return taps.tap_on(self.module, self.kind, late=True) if is_last else self.tap


def _tap_type(module: nn.Module, kind: Kind) -> type[taps.Tap]:
    """The class of the taps at an event: those inside a module know what to look for there."""
    if not kind.is_inner:
        return taps.Tap
    if kind is Kind.ROUTER:
        return RouterTap
    return AttentionTap if is_expected(module) else PlainAttentionTap


@dataclass(frozen=True)
class HookHandle:
    """A hook at a point, as `fwd_hooks` and `bwd_hooks` list them."""

    user_hook: Callable[..., Any]
    is_permanent: bool
    context_level: int | None
    _action: HookAction = field(repr=False)

    @property
    def hook(self) -> Self:
        """The handle itself: `handle.hook.remove()` is how TransformerLens spells `handle.remove()`."""
        return self

    @outside_compiler
    def remove(self) -> None:
        """Remove the hook, also from an open context that allows it."""
        self._action.point.permanent.remove(lambda other: other is self._action)
        remove_from_contexts(lambda other: other is self._action)


_NEW_MODULE = {key: type(value) if isinstance(value, dict | set) else value for key, value in vars(nn.Module()).items()}
"""The attributes of a new module, and the classes of those that each module has for itself."""


class HookPoint(nn.Module):
    """A named place through which an activation flows. It costs nothing until it is hooked.

    Placed in your own model, it passes its input through:

        self.hook_mid = HookPoint()
        ...
        x = self.hook_mid(x)

    `hookline.hook(model)` finds all others: the input and output of every module.
    """

    name: str
    axes: str
    ctx: dict[Any, Any]
    only: int | None
    is_renamed: bool = False
    """Whether its name is one that only its user knows."""
    _canonical_name: str
    _site: Site | None
    _permanent: PermanentHooks

    def __init__(self) -> None:
        super().__init__()
        self._become("", None, PermanentHooks())

    @classmethod
    def at_site(cls, name: str, site: Site, standing: PermanentHooks, axes: str = "", only: int | None = None) -> Self:
        """Return a point at a site, with `only` for that call of its module only."""
        point = cls.__new__(cls)
        # As `nn.Module.__init__`, which sets each attribute in its own way, and would take most of `hookline.hook`.
        vars(point).update({key: value() if callable(value) else value for key, value in _NEW_MODULE.items()})
        point._become(name, site, standing, axes, only)
        return point

    def _become(
        self, name: str, site: Site | None, standing: PermanentHooks, axes: str = "", only: int | None = None
    ) -> None:
        """Set the attributes as one: a module's own way of setting each makes up half the time of `hookline.hook`."""
        vars(self).update(
            name=name, axes=axes, ctx={}, only=only, _canonical_name=name, _site=site, _permanent=standing
        )

    def alias(self, name: str, only: int | None = None) -> HookPoint:
        """Return this point under another name, with `only` for that call of its module only."""
        if (name, only) == (self.name, self.only):
            return self
        view = HookPoint.at_site(name, self.site, self._permanent, self.axes, only)
        view.ctx, view._canonical_name = self.ctx, self._canonical_name
        return view

    def renamed(self, name: str) -> HookPoint:
        """Return this point under a name of the user's, which is its name in caches and stores."""
        view = self.alias(name, self.only)
        if view is not self:
            vars(view)["is_renamed"] = True
        return view

    def join(self, name: str, standing: PermanentHooks) -> HookPoint:
        """Become part of a model under this name, with the hooks added so far; the first model owns the point."""
        if self._permanent is standing or self._permanent.root() is None:
            self.name = name
            self._permanent.move_to(standing)
            self._permanent = standing
        return self.alias(name)

    @property
    def site(self) -> Site:
        """Its module event and lens. A placed point is its own module."""
        return self._site or Site(self, Kind.OUTPUT)

    @property
    def is_placed(self) -> bool:
        """Whether it is a module that somebody has put into a model."""
        return isinstance(self.site.module, HookPoint)

    @property
    def permanent(self) -> PermanentHooks:
        """The added hooks of its model; its own, before it is in a model."""
        return self._permanent

    @property
    def call(self) -> int | None:
        """The call of its module in this forward pass that a running hook is for, counted from 0.

        None for an added hook when its module is called by itself, outside a forward pass.
        """
        if pass_state.call == UNKNOWN:
            raise HooklineError(
                f"the module of {self.name!r} was called several times, and its calls cannot be distinguished while a "
                f"checkpointed region recomputes; switch gradient checkpointing off"
            )
        return pass_state.call

    @property
    def canonical_name(self) -> str:
        """The name in `hook_dict`, whichever name was used to find the point."""
        return self._canonical_name or self.name

    @property
    def stream(self) -> Stream:
        """What the positions of its value belong to: "text", "encoder" (beside a decoder), or "image" (patches)."""
        return self.site.stream

    @property
    def step(self) -> int:
        """The step of a generation that a running hook is in: 0 for the prompt, 1 for the first new token, …"""
        return self._passing().known_step()

    @property
    def padding(self) -> Tensor | None:
        """Which positions that a running hook gets are padding: a mask [batch, position], or None if none is known.

        While generating it has one position, that of the newest token; at points of images there is none.
        """
        passing = pass_state.at_hook
        if passing is None or self.stream == "image":
            return None
        passing.check("padding")
        mask: Tensor | None = passing.span_at(self.stream).padding()
        return mask

    @property
    def positions(self) -> range:
        """The positions of the text that a running hook gets: the whole prompt, or only the newest one."""
        if self.stream == "image":
            raise HooklineError(f"{self.name!r} is a point of images: its positions are patches, not of the text")
        passing = self._passing()
        passing.check("positions")
        return passing.span_at(self.stream).positions

    def _passing(self) -> Any:
        passing = pass_state.at_hook if pass_state.hooks else pass_state.forward_pass
        if passing is None:
            raise HooklineError(f"the step and positions of {self.name!r} are known only while a language model runs")
        return passing

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x

    def layer(self) -> int:
        """Return the index of its layer: 5 for `blocks.5.attn.hook_q`."""
        numbers = [part for part in self.canonical_name.split(".") if part.isdigit()]
        if not numbers:
            raise HooklineError(f"the point {self.name!r} is in no numbered layer")
        return int(numbers[0])

    def action(self, hook: Callable[..., Any], dir: str = "fwd", *, prepend: bool = False) -> HookAction:
        """Return the action that calls `hook` here; mistakes are raised here, not during the run."""
        check_direction(dir, "fwd", "bwd")
        if isinstance(hook, HookObject):
            return hook.action(self, dir, prepend=prepend)
        return (Edit if dir == "fwd" else BackwardHook)(self, hook, prepend=prepend)

    def backward_action(self, hook: Callable[..., Any], *, prepend: bool = False) -> HookAction:
        """Return the action that calls `hook` with the gradient here, also if it is an object."""
        return BackwardHook(self, hook, prepend=prepend)

    @outside_compiler
    def add_hook(
        self,
        hook: Callable[..., Any],
        dir: Direction = "fwd",
        *,
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        allow_shape: bool = False,
    ) -> AddedHooks:
        """Add a hook here until it is removed or reset; a permanent one survives a reset.

        `level` is the depth of nested contexts that the hook belongs to, for `remove_hooks` and `has_hooks`. With
        `allow_shape` it may return another shape.

        Returns a handle: call it, call its `remove()`, or use it in a `with` statement to remove the hook.
        """
        action = self.action(hook, dir, prepend=prepend)
        if allow_shape:
            check_allows_shape(dir == "fwd", "a hook")
            action.allow_shape()
        action.registration.is_permanent = is_permanent
        if level is not None:
            action.registration.level = level
        return AddedHooks([(self, action)])

    @outside_compiler
    def add_perma_hook(self, hook: Callable[..., Any], dir: Direction = "fwd") -> AddedHooks:
        """`add_hook` with `is_permanent=True`."""
        return self.add_hook(hook, dir, is_permanent=True)

    @outside_compiler
    def remove_hooks(
        self,
        dir: Literal["fwd", "bwd", "both"] = "fwd",
        *,
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove the hooks that were added here; with `level`, those of that level."""
        check_direction(dir, "fwd", "bwd", "both")

        def is_meant(action: HookAction) -> bool:
            return action.point.site == self.site and is_chosen(action, dir, including_permanent, level)

        self._permanent.remove(is_meant)
        remove_from_contexts(is_meant)

    @property
    def fwd_hooks(self) -> list[HookHandle]:
        """The current forward hooks, including those of contexts open in this thread, in the order they fire."""
        return self._hooks("fwd")

    @property
    def bwd_hooks(self) -> list[HookHandle]:
        """The current backward hooks, including those of contexts open in this thread, in the order they fire."""
        return self._hooks("bwd")

    def _hooks(self, dir: Direction) -> list[HookHandle]:
        return [
            HookHandle(each.hook, each.registration.is_permanent, each.registration.level, each)
            for each in self._hook_actions(dir)
        ]

    def _hook_actions(self, dir: Direction) -> list[HookAction]:
        of_contexts = [each for run in active.get() if run.is_open for each in run.actions]
        found = [each for each in (*self._permanent.hooks(), *of_contexts) if isinstance(each, HookAction)]
        here = [each for each in found if each.dir == dir and each.point.site == self.site]
        return sorted(here, key=lambda each: each.order)

    def has_hooks(
        self,
        dir: Literal["fwd", "bwd", "both"] = "both",
        *,
        including_permanent: bool = True,
        level: int | None = None,
    ) -> bool:
        """Whether there is any hook here, in that direction and of that level."""
        check_direction(dir, "fwd", "bwd", "both")
        found = [*self._hook_actions("fwd"), *self._hook_actions("bwd")]
        return any(is_chosen(action, dir, including_permanent, level) for action in found)

    @outside_compiler
    def clear_context(self) -> None:
        """Empty `ctx`."""
        self.ctx.clear()

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no model yet. (A point with hooks cannot be copied: see Tap.)
        return {**self.__dict__, "_site": None, "_permanent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._permanent = PermanentHooks()

    def extra_repr(self) -> str:
        """What `repr` shows between the brackets."""
        counts = [(len(self._hook_actions("fwd")), "fwd"), (len(self._hook_actions("bwd")), "bwd")]
        return ", ".join([*([repr(self.name)] if self.name else []), *(f"{n} {kind}" for n, kind in counts if n)])


def is_chosen(action: HookAction, dir: str, including_permanent: bool, level: int | None) -> bool:
    """Whether a hook is of that direction and level, and not a permanent one if those are excluded."""
    registration = action.registration
    is_right = dir in (action.dir, "both") and level in (None, registration.level)
    return is_right and (including_permanent or not registration.is_permanent)


def check_direction(given: str, *allowed: str) -> None:
    """Raise if a direction is not one of those allowed."""
    if given not in allowed:
        raise HooklineError(f"the direction must be {' or '.join(map(repr, allowed))}, not {given!r}")


def check_allows_shape(is_forward: bool, what: str) -> None:
    """Raise if `allow_shape=True` would have no effect."""
    if not is_forward:
        raise HooklineError(
            f"allow_shape=True is for forward hooks: a gradient has the shape of its activation ({what})"
        )


def remove_from_contexts(unwanted: Callable[[HookAction], bool]) -> None:
    """Remove hooks of the contexts open in this thread, if they allow it (those with a `level`)."""
    for run in active.get():
        hooks = [each for each in run.actions if isinstance(each, HookAction)]
        gone = {each for each in hooks if each.registration.level and unwanted(each)}
        if gone:
            run.set([each for each in run.actions if each not in gone])

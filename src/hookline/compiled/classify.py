"""How each hook of a plan would run: as a table, traced into the graph, or not in a graph, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal

from hookline.compiled.traceable import why_not
from hookline.compiled.traced_lenses import can_trace
from hookline.engine import Action, Edit, HookAction, HookPoint, PointAction, Record
from hookline.hooks.data_edits import Add, Cap, DataEdit, EditAction, Freeze, Mean, ProjectOut, Replace, Scale, Zero
from hookline.hooks.scores import Score
from hookline.text.at_positions import PositionHook
from hookline.text.score_positions import Crossed

How = Literal["table", "traced", "read", "eager"]

AFFINE = (Zero, Scale, Add, Replace, Mean, Freeze)
"""Edits of the form `x * keep + add`; if norms are matched, of the other form."""
ALONG = (ProjectOut, Cap)
"""Edits that only change the component along a direction."""


@dataclass(frozen=True)
class Placement:
    """How one action runs, and for an action that is not in a graph, why."""

    action: Action
    how: How
    why: str = ""

    def __str__(self) -> str:
        return f"eager: {self.why}" if self.how == "eager" else self.how


def placed(action: Action) -> Placement:
    """How an action of a run would run in a compiled run."""
    if action.is_helper:
        return Placement(action, "read")
    if not isinstance(action, PointAction):
        return Placement(action, "eager", f"{type(action).__name__} changes how the model runs")
    if action.dir == "bwd":
        return Placement(action, "eager", "a gradient needs a run with gradients")
    why = no_site(action.point)
    if why is not None:
        return Placement(action, "eager", why)
    if type(action) in (Record, Score):
        return Placement(action, "read")
    if not isinstance(action, HookAction):
        return Placement(action, "eager", "it records gradients")
    return _hook(action)


def no_site(point: HookPoint) -> str | None:
    """Why a point cannot be read or edited in a graph; None if it can."""
    site, axes = point.site, point.axes.split()
    if site.kind.is_inner:
        return "the point is inside its module"
    if point.only is not None:
        return "the point is for one call of its module"
    if point.stream != "text":
        return f"the point is of the {point.stream}"
    if axes and (axes[:2] != ["b", "p"] or len(axes) < 3):
        return f"the axes of the point are {point.axes!r}, not batch, position and features"
    if site.effects or not can_trace(site.lens):
        return "the point is derived from others"
    return None


def _hook(action: HookAction) -> Placement:
    if action.on_error == "skip":
        return Placement(action, "eager", 'on_error="skip" needs Python')
    if action.choices is not None:
        return Placement(action, "eager", "the point has indices, which are checked")
    hook: Any = action.hook
    if isinstance(action, EditAction):
        return _data_edit(action, hook)
    if type(action) is not Edit:
        return Placement(action, "eager", "a hook object is called in Python")
    why = why_not(hook.func if isinstance(hook, PositionHook) else hook)
    return Placement(action, "traced") if why is None else Placement(action, "eager", why)


def _data_edit(action: EditAction, edit: DataEdit) -> Placement:
    if type(edit) in (*AFFINE, *ALONG):
        return Placement(action, "table")
    return Placement(action, "eager", f"{edit.kind} has no table")


def function_of(action: HookAction) -> Any:
    """The user's function of a traced hook."""
    return action.hook.func if isinstance(action.hook, PositionHook) else action.hook


def code_of(function: Any) -> Any:
    """A key that is equal for functions that differ only in the values they refer to."""
    while isinstance(function, partial):
        function = function.func
    return function.__code__ if isinstance(function, FunctionType) else function


def positions_of(action: HookAction) -> Any:
    """The positions that a hook is limited to; None for all."""
    return action.hook.pos if isinstance(action.hook, DataEdit) else getattr(action.hook, "where", None)


def condition_of(action: HookAction) -> Crossed | None:
    """The bound of a monitor from whose crossing on a hook acts; None if it needs none."""
    on, positions = getattr(action.hook, "on", None), positions_of(action)
    return positions if isinstance(positions, Crossed) else on if isinstance(on, Crossed) else None


def refusal(placements: Iterable[Placement]) -> str | None:
    """Why a run cannot be compiled, from the first of its hooks that cannot; None if all can."""
    for placement in placements:
        if placement.how == "eager":
            point = getattr(placement.action, "point", None)
            return f"the hook at {point.name!r} cannot: {placement.why}" if point is not None else placement.why
    return None

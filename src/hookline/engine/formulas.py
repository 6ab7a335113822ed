"""Formulas: lenses that compute the tensor they show, as data that every way of running interprets.

A formula says how a tensor is computed from the one that passes: heads are split off, a stream is added, a range is cut
out. It has two pure functions, `compute` and its inverse `restore`, and lists in `needs` what these take beside the
value: what passed at other sites, and numbers, which a module may change from call to call. A formula looks nothing up
by itself, so each way of running gets what is needed where, and when, it has it:

    as it runs       now, from what this pass saved                    `Formula.get`, `Formula.put`
    deferred         when it is read, from snapshots                   `deferred`
    recorded         the same, with the snapshots of a planned run     `_recording/captures.py`
    compiled         in the graph, from what the graph saved           `compiled/traced_lenses.py`, if `can_trace`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from hookline.engine._recording.deferred import Deferred, kept
from hookline.engine.lenses import Lens, is_root, parts_of
from hookline.engine.pass_state import Saved, pass_state
from hookline.errors import UnavailablePointError
from hookline.values.structures import NoTensorError

if TYPE_CHECKING:
    from hookline.engine.points import Site

Need: TypeAlias = "Site | Callable[[], float] | float"
"""A site, for what passed there; a function, for the number that it returns now; or a number."""


class Formula:
    """A lens on a tensor that is computed from the one that passes, and from what `needs` names.

    Those of language models are in `transformer/layout_lenses.py`. A subclass that is a dataclass has its needs as a
    field without a default: `needs: tuple[Site] = field()`.
    """

    needs: tuple[Need, ...] = ()
    needs_all: ClassVar[bool] = True
    """Whether it cannot do without one of them."""
    ignores_value: ClassVar[bool] = False
    """Whether the tensor depends on what it needs only, not on what passes."""
    can_wait: ClassVar[bool] = True
    """Whether it may be computed after the pass: if `compute` uses nothing but its arguments."""

    def compute(self, x: Any, *needed: Any) -> Tensor:
        """Return the tensor. Nothing is written to.

        A deferred activation in a cache holds this function. If the formula refers to a site, and so to a module, it is
        a static method: a bound one would hold the module, too.
        """
        raise NotImplementedError

    def restore(self, x: Any, tensor: Tensor, *needed: Any) -> Any:  # noqa: ARG002 (those that can be edited use them)
        """Return `x` as it has to be for `compute` to return `tensor`."""
        raise UnavailablePointError(f"{type(self).__name__} can be read, but not edited: it has no restore")

    def get(self, value: Any) -> Tensor:
        """Return the tensor, from what this pass has saved."""
        return self.compute(value, *needed_by(self)) if self.needs else self.compute(value)

    def put(self, value: Any, tensor: Tensor) -> Any:
        """Return the value with another tensor."""
        return self.restore(value, tensor, *needed_by(self)) if self.needs else self.restore(value, tensor)

    def is_as_computed(self, value: Any) -> bool:  # noqa: ARG002 (for those with edits that are remembered)
        """Whether `get` returns what `compute` does now."""
        return True


def saved_at(site: Site) -> Saved:
    """What passed at a site in this pass."""
    try:
        return pass_state.saved[site]
    except KeyError:
        raise NoTensorError(
            f"it is computed from the {site.kind.value} of a {type(site.module).__name__}, which has not run"
        ) from None


def current(need: Need) -> Any:
    """What a formula needs, as it is now."""
    return need() if callable(need) else need if isinstance(need, int | float) else saved_at(need).x


def lasting(need: Need) -> Any:
    """What a formula needs, such that nothing changes it; None if it cannot be shared."""
    if callable(need) or isinstance(need, int | float):
        return current(need)
    saved = saved_at(need)
    if saved.snapshot is None:
        saved.snapshot = kept(saved.x)
    return saved.snapshot


def needed_by(formula: Formula, read: Callable[[Need], Any] = current) -> list[Any]:
    """What a formula needs of this pass."""
    return [read(need) for need in formula.needs if formula.needs_all or need in pass_state.saved]


def deferred(lens: Lens, value: Any) -> Deferred | None:
    """Return what computes the tensor that a lens sees, from snapshots; None if it has to be computed now."""
    parts = parts_of(lens)
    formulas = [part for part in parts if isinstance(part, Formula) and part.can_wait and part.is_as_computed(value)]
    if not formulas or len(formulas) < len(parts) - is_root(parts[0]):
        return None
    x: Any = None
    if not formulas[0].ignores_value:
        x = value if type(value) is Deferred else kept(parts[0].get(value) if is_root(parts[0]) else value)
        if x is None:
            return None
    for formula in formulas:
        arguments = needed_by(formula, lasting) if formula.needs else []
        if any(argument is None for argument in arguments):
            return None
        x = Deferred(formula.compute, x, *arguments)
    return x

"""Actions that call a user's hook. `events.py` has the algorithm; the parts that depend on the hook are here."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookline.engine import passes
from hookline.engine._memory.aliases import copy_of, is_passed_through, write_through
from hookline.engine._memory.results import fit
from hookline.engine._memory.snapshots import Loan, has_own_memory, is_as_lent, lend
from hookline.engine._reports.failures import hook_error
from hookline.engine._sharding.split_values import completing, processes
from hookline.engine._staying.registration import Registration
from hookline.engine._torch.hooks_on_modules import hooks_on_gradients
from hookline.engine.actions import PointAction
from hookline.engine.events import call_hook, composed
from hookline.engine.lenses import is_root, parts_of
from hookline.engine.order import Kind, Phase
from hookline.engine.schedule import Step
from hookline.errors import HookError, HooklineError, InvalidHookError, NeverFiredWarning, describe
from hookline.functions.callers import Caller, called_in_style, caller
from hookline.functions.signatures import code_of
from hookline.types import OnError
from hookline.values.casting import Choices

if TYPE_CHECKING:
    from hookline.engine.points import HookPoint


def choices_at(point: Any) -> Choices | None:
    """Return the valid indices at a point of chosen experts or token ids; None for other points."""
    if point.site.choices is not None:
        return point.site.choices
    if point.site.kind is not Kind.INPUT:
        return None
    embed = getattr(point.site.module, "base_layer", point.site.module)
    return Choices("token", embed.num_embeddings) if isinstance(embed, nn.Embedding) else None


class PositionScope:
    """The positions that a hook is for, and those that it has not reached yet."""

    def __init__(self, partial: Any) -> None:
        self._partial = partial
        self._unreached = passes.text().unreached(partial.where)

    def has_acted(self) -> bool:
        """Whether the hook acted when it was last called."""
        return bool(self._partial.acted)

    def why_not(self) -> str:
        """The reason for a hook that never fired."""
        return f"none of the positions that ran is {self._partial.where!r}"

    def covered(self) -> Any:
        """The positions at which the hook acted when it was last called, `[row, position]`."""
        return self._partial.mask

    def clear(self) -> None:
        """Begin a run: no position has been missed yet."""
        if self._unreached is not None:
            self._unreached.clear()

    def note(self, point: HookPoint) -> None:
        """Note which positions of the current forward pass the hook reached."""
        if self._unreached is not None:
            self._unreached.note(point)

    def message(self) -> str | None:
        """Which positions were never reached; None if all were."""
        return None if self._unreached is None else self._unreached.message()


_CALLS_HOOK = code_of(call_hook)


class HookAction(PointAction):
    """Calls a user's hook at a point."""

    on_error: OnError | None = None
    reach: PositionScope | None = None
    """Of a hook for some positions only."""
    allows_shape = False
    """Whether the hook may return another shape."""
    entries: torch.Tensor | None = None
    """Of an edit of some entries only: a mask that broadcasts to the activation."""
    tally: passes.Tally | None = None
    """Counts where the hook acts, in a context."""
    keeps_masked = False
    """Whether entries that the model masked stay masked: those of scores."""

    def __init__(self, point: HookPoint, hook: Any, *, prepend: bool = False) -> None:
        super().__init__(point, prepend=prepend)
        self.hook = hook
        self.registration = Registration()
        self.choices = choices_at(point)
        self.is_part = bool(processes) and bool(completing(self.module, self.tap.kind))
        self.may_write = self.is_inplace or not type(self.module).__module__.startswith("torch.nn.")
        self.invoke = self.caller()
        self.errors: list[HookError] = []
        """Skipped errors; all actions of a run share its list."""

    def caller(self) -> Caller:
        """How to call the hook."""
        return caller(self.hook)

    fit = fit
    """Check what a hook returned, and make it what continues: `action.fit(result, like)`."""
    is_passed_through = staticmethod(is_passed_through)
    """Whether a tensor at the output of a module is an argument of that call, or a view of one."""

    def note_acted(self, x: Any) -> None:
        """Note that the hook has acted on the value of its point."""
        if self.tally is not None and (self.reach is None or self.reach.has_acted()):
            self.tally.note(x, None if self.reach is None else self.reach.covered())

    def error(self, what: str, original: BaseException | None = None) -> HookError:
        """The error that names this hook and its point."""
        return hook_error(what, self, original)

    @staticmethod
    def is_called_in(frame: FrameType) -> bool:
        """Whether a frame calls a hook."""
        return frame.f_code is _CALLS_HOOK

    def nothing_there(self, error: LookupError) -> HookError:
        """The error for a point without a tensor."""
        return self.error(f"has nothing to work on: {error}", error)

    def only_at(self, partial: Any) -> None:
        """Note that the hook is for some positions only: `partial` is what `positions.at` returned."""
        self.reach = PositionScope(partial)

    def skip_on_error(self) -> None:
        """From now on, drop the effect of the hook when it fails, and continue."""
        self.on_error = "skip"

    def may_change_shape(self) -> bool:
        """Whether a hook here can be allowed to return another shape: at the input or output of a module, as it is."""
        site = self.point.site
        is_plain = all(map(is_root, parts_of(site.lens))) and not (self.is_derived or site.effects)
        return is_plain and self.dir == "fwd" and not self.is_part

    def allow_shape(self) -> None:
        """From now on, take what the hook returns in any shape."""
        if self.dir == "bwd":
            return
        if not self.may_change_shape():
            raise InvalidHookError(
                f"allow_shape=True is for the inputs and outputs of modules, and {self.point.name!r} is computed from "
                f"them: hook a module there by its path, or leave allow_shape out"
            )
        self.allows_shape = True

    def uncounted(self) -> HooklineError:
        """The error for a point of one call where calls are not counted, as an error of this hook."""
        return hook_error(str(super().uncounted()), self)


def _no_hook(_activation: Any, _point: Any) -> None:
    """In place of a hook, after its run."""


class Edit(HookAction):
    """A forward hook: reads the activation, changes it in place, or returns another one."""

    phase = Phase.EDIT
    fitted_result = fit  # as a method: (result, x, given)
    lend = staticmethod(lend)
    is_loan_unchanged = staticmethod(is_as_lent)
    """Whether a hook certainly did not write to what it was lent: `is_loan_unchanged(*loan)`."""
    _has_warned = False

    def __init__(self, point: HookPoint, hook: Callable[..., Any], *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self.view: Any = self.lens
        self.keeps_masked = point.site.kind is Kind.SCORES
        if point.permanent.raises_own and type(self).lend is Edit.lend:
            self.lend = self._lend_again
        self.has_edited = self.has_passed_on = False
        if hasattr(hook, "where"):
            self.only_at(hook)

    def renew(self, hook: Callable[..., Any] | None, style: str = "") -> None:
        """Act for another function with that `call_style`, as if made for it: see `_recording/ready.py`."""
        self.hook, self.invoke = hook, _no_hook if hook is None else called_in_style(hook, style)
        self.has_edited = self.has_passed_on = self._has_warned = False
        self.times = 0

    def _lend_again(self, x: Any) -> Loan:
        """A snapshot for the hook, and what `is_as_lent` needs to detect writes to it.

        If an earlier hook of this event keeps its snapshot in the graph, a TransformerLens model gets the same one: its
        hooks expect one tensor, through which the gradients of all uses pass.
        """
        before = getattr(x, "_hookline_given", None)
        if before is not None and (given := before()) is not None and is_as_lent(given, x):
            return given, x
        return lend(x)

    def extend(self, steps: list[Step], *, is_replay: bool = False) -> None:
        """Append the step of this edit."""
        steps.append(composed(self, is_replay=is_replay))

    def fitted_loan(self, given: Any, x: Any, *, is_kept: bool) -> Any:
        """What the hook wrote to, as `x` is to be replaced by it: itself, if nobody else has it.

        Not if the hook asked for its gradient: torch lets nobody write to such a leaf.
        """
        is_free = not is_kept and has_own_memory(given) and not (given.requires_grad and given.is_leaf)
        return fit(self, given, x, is_free=is_free)

    def is_as_lent(self, given: Any, kept: Any, x: Any) -> bool:
        """Whether the hook left what it was given unchanged."""
        return is_as_lent(given, kept) and given.requires_grad == (x.requires_grad and torch.is_grad_enabled())

    def wants_gradient(self, given: Any, x: Any) -> bool | None:
        """Whether what the hook was given must be in the graph: it may have asked for its gradient.

        None: if the hook kept it, perhaps for later.
        """
        if not given.requires_grad:
            return False
        if self.tap.kind.is_inner:  # a checkpoint counts what is saved to compute it
            self.keep_for_second_run()
        elif self.is_derived:
            return True  # it costs no bit: what is put back is a difference of zero
        if self.is_part:
            # Where each process has a part, all must put it back or none: gradients are collected there. Only one of
            # them may have kept what it was given.
            return True
        if given.retains_grad or hooks_on_gradients(given):
            return True
        # Passing it on must not separate the model's tensors from each other, except at a placed point, which is for
        # this and always returns its argument.
        has_own_output = self.point.is_placed or self.tap.kind is not Kind.OUTPUT or not is_passed_through(x)
        return None if has_own_output else False

    def passed_on(self, value: Any, x: Any, given: Any) -> Any:
        """The value with the tensor that the hook saw. A checkpoint counts saved tensors, so this is replayed."""
        self.has_passed_on = True
        if self.is_derived:
            self.keep_for_second_run()
        return self.view.put(value, copy_of(x, given))

    def written_back(self, value: Any, new: Any) -> Any:
        """Return `value` with the edit written to the caller's own tensors: the caller ignores what is returned."""
        if write_through(value, new):
            return value
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"hook {describe(self.hook)} at point {self.point.name!r} has no effect: what calls "
                f"{type(self.module).__name__} discards its return value",
                NeverFiredWarning,
                stacklevel=2,
            )
        return new


def count_positions(actions: Sequence[HookAction]) -> None:
    """Count from now on where the edits among these actions act."""
    edits = [action for action in actions if isinstance(action, Edit) and not action.only_reads]
    tallies = passes.text().tallies([(action.point, action.entries) for action in edits])
    for action, tally in zip(edits, tallies, strict=False):
        action.tally = tally


def acted_by(actions: Sequence[HookAction]) -> dict[str, Counter[int | None]]:
    """At how many rows these edits acted, by point and position of the text."""
    counts: dict[str, Counter[int | None]] = {}
    for action in actions:
        if action.tally is not None:
            counts.setdefault(action.point.name, Counter()).update(action.tally.counts())
    return counts

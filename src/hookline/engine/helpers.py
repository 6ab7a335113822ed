"""What the actions of a run need beside them: saved values, effects of edits, and care for replaced arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.engine._memory.aliases import copy_of, give_back, noted_sent
from hookline.engine._memory.snapshots import is_same_memory
from hookline.engine._torch import compiled_calls
from hookline.engine._torch.hooks_on_modules import hooks_after, hooks_before
from hookline.engine.actions import Action, PointAction
from hookline.engine.derived import Consequence, Derived, Effect, Forget, Stash
from hookline.engine.lenses import Lens, parts_of
from hookline.engine.order import Kind, Phase, Turn
from hookline.engine.pass_state import pass_state
from hookline.engine.taps import Tap, tap_on
from hookline.values.structures import map_tensors, tensors_in

if TYPE_CHECKING:
    from hookline.engine._gradients.gradient_sources import WriteCount
    from hookline.engine.points import Site


class Send(Action):
    """Notes which arguments of a call were replaced, after all edits at the module's input.

    A module that works in place gets a copy if its output is edited: autograd may need the output that it computed, and
    the edit is written to the caller's own tensor.
    """

    turn = Turn.SEND
    is_helper = True

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
        for argument in tensors_in((pass_state.arguments, *pass_state.originals)):
            writes: WriteCount | None = getattr(argument, "_hookline_writes", None)
            if writes is not None and not any(is_same_memory(argument, output) for output in tensors_in(value)):
                writes.stop()
        return value


class ReturnOriginals(Action):
    """Lets the caller of a module see what the module wrote to the tensors, lists and dicts that were replaced."""

    turn = Turn.CALLERS_TENSORS
    is_helper = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.tap = module, tap_on(module, Kind.OUTPUT)

    def __call__(self, value: Any) -> Any:
        """Return the value, with the caller's own tensors where the module returns its arguments."""
        return give_back(self.module, value) if pass_state.sent or pass_state.copies else value


def _is_derived(lens: Lens) -> bool:
    return isinstance(parts_of(lens)[0], Derived)


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

"""Gates: at which positions of a text an edit acts, as `positions.py` and the steps of a generation mean it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookline.compiled.classify import positions_of
from hookline.compiled.program import Slot
from hookline.engine import HookAction, pass_state
from hookline.errors import HooklineError
from hookline.text.forward_pass import ForwardPass, Span
from hookline.text.generate_calls import Generation
from hookline.text.score_positions import Crossed
from hookline.text.token_positions import TokenMeaning, mask_of
from hookline.text.turn_positions import TextMeaning, TurnMeaning, tokenizer_of, written_ids


@dataclass(frozen=True)
class Continuation:
    """The new positions of a text: from the end of the prompt to the last token that may be run."""

    root: nn.Module
    prompt: Tensor
    mask: Tensor
    stop: int

    def as_pass(self, tokens: Tensor | None = None) -> ForwardPass:
        """One forward pass that covers all new positions, and treats each as if it ran in a pass of its own."""
        rows, start = self.prompt.shape
        mask = torch.nn.functional.pad(self.mask.cpu(), (0, max(0, self.stop - start)), value=1)
        generation = Generation(start, self.prompt, self.mask, True, ref(self.root))
        first = 0 if tokens is not None else start
        span = Span(range(first, self.stop), rows, tokens, mask, earlier=((0, self.prompt),))
        return ForwardPass(None, span, None, ref(self.root), False, prompt=start, generation=generation, number=1)

    def open_gate(self, slot: Slot, action: HookAction) -> None:
        """Write the gate of an edit for the new positions."""
        positions, start = positions_of(action), self.prompt.shape[1]
        slot.gate.zero_()
        slot.allowed.fill_(True)
        if self.stop <= start:
            return
        gate = slot.gate[:, start : self.stop]
        if isinstance(positions, Tensor) and positions.dtype == torch.bool:
            raise HooklineError("a mask is for the columns of one pass")
        if positions is None or isinstance(positions, Crossed):
            gate.fill_(True)
        elif isinstance(positions, TokenMeaning):
            if positions.nth != -1:
                raise HooklineError(f"{positions!r} counts the tokens before it")
            gate.fill_(True)  # a token is its own last occurrence when it is new
            slot.allowed.fill_(False)
            slot.allowed[positions.token_id(self.as_pass())] = True
        elif isinstance(positions, TurnMeaning):
            tokenizer = tokenizer_of(self.as_pass(), positions)
            gate.copy_(torch.tensor(positions.is_being_written(self.as_pass()))[:, None].expand(gate.shape))
            slot.allowed.copy_(torch.tensor(written_ids(tokenizer, len(slot.allowed))))
        elif isinstance(positions, TextMeaning):
            raise HooklineError(f"{positions!r} depends on the tokens before it")
        else:
            with in_pass(self.as_pass()):
                gate.copy_(mask_of(positions, action.point, *gate.shape))


@contextmanager
def in_pass(passing: Any) -> Iterator[None]:
    """A context in which positions are resolved as in this pass, which is not running."""
    before, pass_state.forward_pass = pass_state.forward_pass, passing
    try:
        yield
    finally:
        pass_state.forward_pass = before

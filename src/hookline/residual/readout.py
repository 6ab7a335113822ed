"""Readout: what each part of the stream adds to a logit, and the logits that a stream would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine.batch_index import Rows
from hookline.errors import HooklineError
from hookline.residual.stream import StreamCache, is_rounding
from hookline.text.token_positions import Positions

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "logit_cap")


class Readout(StreamCache):
    """From the stream to the logits, where that is linear but for the final norm's scale."""

    def logit_attrs(
        self,
        residual_stack: Float[Tensor, "*part d_model"],
        tokens: str | int | Sequence[str] | Tensor,
        incorrect_tokens: str | int | Sequence[str] | Tensor | None = None,
        *,
        pos_slice: Positions = None,
        batch_slice: Rows | None = None,
        has_batch_dim: bool = True,
    ) -> Float[Tensor, "*part"]:
        """What each part adds to the logit of a token, or to its lead over another.

        A token is text or an id, the same everywhere; or one for each row; or one for each row and position, as a
        tensor of that shape. Over all parts of the stream it sums to the logit, less what the norm's and the
        unembedding's biases give (`logit_bias`).
        """
        before, after = self._factors()
        scaled = StreamCache.apply_ln_to_stack(  # not a subclass's, which may mean other rows by `batch_slice`
            self, residual_stack, pos_slice=pos_slice, batch_slice=batch_slice, has_batch_dim=has_batch_dim
        )
        places = self._scale(None, False, pos_slice, batch_slice, has_batch_dim).shape[:-1]
        direction = self._direction(tokens, places)
        if incorrect_tokens is not None:
            direction = direction - self._direction(incorrect_tokens, places)
        norm = self._norm(self._model.anatomy.main.ln_final)
        gain = norm.gain if norm is not None else 1.0
        return (scaled * gain * direction.to(scaled)).sum(-1) * (before * after)

    def logit_bias(
        self,
        tokens: str | int | Sequence[str] | Tensor,
        incorrect_tokens: str | int | Sequence[str] | Tensor | None = None,
    ) -> Tensor:
        """The part of a logit that no part of the stream gives: from the final norm's and the unembedding's biases."""
        norm = self._norm(self._model.anatomy.main.ln_final)
        (before, after), weights = self._factors(), self._weights
        of_norm = (weights.tokens_to_residual_directions(tokens) * (norm.bias if norm is not None else 0.0)).sum(-1)
        found = (of_norm * before + weights.b_U[weights.token_ids(tokens)]) * after
        return found if incorrect_tokens is None else found - self.logit_bias(incorrect_tokens)

    def logit_lens(self, layer: int | None = None, *, pos_slice: Positions = None, return_labels: bool = False) -> Any:
        """The logits if the stream were read out as it enters each layer, as the model reads it out at the end."""
        stack, labels = self.accumulated_resid(layer, pos_slice=pos_slice, return_labels=True)  # type: ignore[attr-defined]
        normed = self.apply_ln_to_stack(stack, recompute_ln=True)
        finish = self._finish()
        logits = finish(self._weights._head().forward(normed * self._factor_before()))
        return (logits, labels) if return_labels else logits

    def _direction(self, tokens: Any, places: torch.Size) -> Float[Tensor, "*place d_model"]:
        """The unembedding of each token, laid beside the stack's rows and positions."""
        found = self._weights.tokens_to_residual_directions(tokens)
        shape = found.shape[:-1]
        if not shape:
            return found
        if len(shape) > len(places) or any(n not in (1, size) for n, size in zip(shape, places, strict=False)):
            raise HooklineError(
                f"tokens of shape {list(shape)} for a stack of the rows and positions {list(places)}: give one token, "
                f"or one for each of those, or one for each row"
            )
        return found.reshape(*shape, *[1] * (len(places) - len(shape)), found.shape[-1])

    def _factors(self) -> tuple[float, float]:
        """What is multiplied before and after the unembedding, on the way to the logits; most often 1 and 1."""
        _, out, logits = self._unembedding()
        before, after = self._factor_before(), _factor(out, logits)
        if after is None:
            raise HooklineError(
                f"the logits of {self._model.anatomy.kind} are not linear in the stream (a soft cap?): nothing adds up"
            )
        return before, after

    def _factor_before(self) -> float:
        into, _, _ = self._unembedding()
        read = self.apply_ln_to_stack(self._stream(self.n_layers), recompute_ln=True)
        factor = _factor(read, into)
        if factor is None:
            raise HooklineError(
                f"{self._model.anatomy.kind} does something between the final norm and the unembedding: nothing adds up"
            )
        return factor

    def _finish(self) -> Callable[[Tensor], Tensor]:
        """What the model makes of what its unembedding gives: a factor, or a soft cap, as this run's logits show."""
        _, out, logits = self._unembedding()
        factor = _factor(out, logits)
        if factor is not None:
            return lambda x: x if factor == 1.0 else x * factor
        config = self._model.anatomy.config
        for cap in (getattr(config, name, None) for name in _CAPS):
            if cap and is_rounding(cap * (out.float() / cap).tanh() - logits.float(), logits):
                return lambda x: cap * (x / cap).tanh()
        raise HooklineError(f"how {config.model_type} makes its logits of what its unembedding gives is not known")

    def _unembedding(self) -> tuple[Tensor, Tensor, Tensor]:
        """What goes into it, what comes out, and the logits."""
        if self.logits is None:
            raise HooklineError("the readout cannot be checked without the logits: use run_with_cache")
        logits = self.logits if self.has_batch_dim else self.logits[0]
        return self["unembed.hook_in"], self["unembed.hook_out"], logits.to(self["unembed.hook_out"].device)


def _factor(x: Tensor, y: Tensor) -> float | None:
    """The number that `y` is `x` times, if it is; 1 if they are the same but for rounding."""
    if x.shape != y.shape:
        return None
    wide, other = x.double(), y.double()
    if is_rounding(other - wide, y):
        return 1.0
    factor = float((wide * other).sum() / (wide * wide).sum())
    return factor if is_rounding(other - factor * wide, y) else None

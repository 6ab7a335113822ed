"""Monitors: the score of a probe at every token while a model writes."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.probes.attention_pool import RunningPool
from hookline.experiments.probes.linear_probes import Probes
from hookline.hooks.scores import Score, scores_of
from hookline.model import HookedModel
from hookline.text.score_positions import Crossed


class Monitor:
    """Scores every token of a generation with a probe: `monitors=[monitor]` of `generate_with_cache` and `stream`.

        monitor = probes.Monitor(probe, layer=2)
        text, cache = model.generate_with_cache(prompt, names_filter="ln_final.hook_scale", monitors=[monitor])
        monitor.scores                                      # [row, position]
        edits.add(vector, 4.0, on=monitor.above(2.0))       # from the token on after the score was above 2

    The score of a probe of two classes is that of the second minus that of the first, `x · w + b`, without a sigmoid;
    of several classes, that of `label`. A probe that pools over positions scores at each token the text up to it, as if
    the text ended there. Without `layer`, it is the probe with the highest held-out accuracy. A generation ends for a
    row once its score is above `stop_above` or below `stop_below`, with the token that was chosen there.

    Only scores are kept, and in a compiled generation they are computed in its graph. The scores are those of the last
    generation. Scores of the prompt count for bounds too, and edits begin with the first new token.
    """

    def __init__(
        self,
        probe: Probes,
        layer: int | None = None,
        *,
        label: Label | None = None,
        stop_above: float | None = None,
        stop_below: float | None = None,
    ) -> None:
        if not isinstance(probe, Probes):
            raise HooklineError(f"Monitor takes the result of probes.fit, not a {type(probe).__name__}")
        self.layer = probe.layers[int(probe.values.argmax())] if layer is None else layer
        self.point, self._weight, self._bias = probe.functional(self.layer, label)
        for name, bound in (("stop_above", stop_above), ("stop_below", stop_below)):
            if bound is not None:
                _checked_bound(name, bound)
        self._bounds = [(stop_above, True), (stop_below, False)]
        self._score: Score | None = None
        self._query, self._pool, self._pooled = probe.query(self.layer), RunningPool(), list[Tensor]()
        self._is_watching = False
        self._mask: Tensor | None = None
        self._crossed: dict[tuple[float, bool], tuple[int, int, Tensor]] = {}
        self._width: int | None = None

    def watch(self, model: HookedModel, ids: Tensor, mask: Tensor | None) -> Score:
        """Begin a generation: what keeps the scores of this model on these prompts."""
        point = model.point(self.point)
        if self._weight.shape[-1] != model.cfg.d_model and point.axes == "b p d":
            raise HooklineError(
                f"the probe reads {self._weight.shape[-1]} dimensions, but {self.point!r} of this model has "
                f"{model.cfg.d_model}: it was fitted on another model"
            )
        self._mask = None if mask is None else mask.bool()
        self._crossed, self._width = {}, None
        self._pool, self._pooled = RunningPool(), []
        self._is_watching = True
        self._rows = ids.shape[0]
        can_end = any(bound is not None for bound, _ in self._bounds)
        self._score = Score(point, *self._functionals(), self._ended if can_end else _nothing)
        return self._score

    def end(self) -> None:
        """Stop watching: the scores stay, but bounds no longer mean tokens."""
        self._is_watching = False

    def settle(self, width: int) -> None:
        """End a generation whose text has so many columns that were run; an error if they were not run once each."""
        self._width = width
        columns = sum(piece.shape[1] for piece in self._pieces())
        if columns < width or any(piece.shape[0] != self._rows for piece in self._pieces()):
            raise HooklineError(
                f"{self!r} has {columns} scores for a text of {width} positions: monitors are for generations that "
                f"run each position once, with a cache and without beams"
            )

    @property
    def scores(self) -> Float[Tensor, "row position"]:
        """The score of every token that was run, aligned on the right; NaN at padding."""
        pieces = self._token_scores()
        if not pieces:
            return torch.zeros(self._rows, 0)
        values = torch.cat(pieces, 1)[:, : self._width]
        return values.masked_fill(~self._is_text(0, values.shape[1]).to(values.device), torch.nan)

    def read(
        self, x: Float[Tensor, "row position d"], mask: Bool[Tensor, "row position"] | None = None
    ) -> Float[Tensor, "row position"]:
        """The scores of activations of texts at its point, as they are in a generation; `mask` is False at padding."""
        if x.shape[-1] != self._weight.shape[-1]:
            raise HooklineError(
                f"the probe reads {self._weight.shape[-1]} dimensions at {self.point!r}, but the activation has "
                f"{x.shape[-1]}: it was fitted on another model"
            )
        weight, bias = self._functionals()
        values = scores_of(x.float(), weight.to(x.device), bias.to(x.device))
        if self._query is None:
            return values[..., 0]
        return RunningPool().scores(values, torch.ones_like(values[..., 0]).bool() if mask is None else mask.bool())

    def above(self, bound: float) -> Crossed:
        """The new tokens after the one whose score was above a bound: `on=` of an edit."""
        return Crossed(self, _checked_bound("above", bound), True)

    def below(self, bound: float) -> Crossed:
        """The new tokens after the one whose score was below a bound."""
        return Crossed(self, _checked_bound("below", bound), False)

    def crossed(self, bound: float, is_above: bool, column: int) -> Tensor:
        """Which rows had a score beyond the bound in a column before this one."""
        if not self._is_watching:
            raise HooklineError(
                f"{self!r} does not watch this run, so there is no score for on=: use generate_with_cache(…, "
                f"monitors=[monitor]) or stream(…, monitors=[monitor])"
            )
        pieces = self._token_scores()
        used, start, rows = self._crossed.get((bound, is_above), (0, 0, None))
        if rows is None:
            rows = torch.zeros(self._rows, dtype=torch.bool, device=pieces[0].device if pieces else None)
        for piece in pieces[used:]:
            stop = start + piece.shape[1]
            if stop > column:
                break
            is_beyond = piece > bound if is_above else piece < bound
            rows = rows.to(piece.device) | (is_beyond & self._is_text(start, stop).to(piece.device)).any(1)
            used, start = used + 1, stop
        self._crossed[bound, is_above] = used, start, rows
        return rows

    def _ended(self) -> Tensor | None:
        rows = [self.crossed(bound, is_above, 2**62) for bound, is_above in self._bounds if bound is not None]
        return torch.stack(rows).any(0) if rows else None

    def _functionals(self) -> tuple[Float[Tensor, "score d"], Float[Tensor, " score"]]:
        """What is computed of each token: its score and, if the probe pools, the logit of its weight."""
        if self._query is None:
            return self._weight[None], self._bias[None]
        return torch.stack([self._weight, self._query]), torch.stack([self._bias, torch.zeros_like(self._bias)])

    def _token_scores(self) -> list[Tensor]:
        """The scores, `[row, column]`, in the order of the columns; if the probe pools, of the text up to each."""
        pieces = self._pieces()
        if self._query is None:
            return [piece[..., 0] for piece in pieces]
        start = sum(piece.shape[1] for piece in self._pooled)
        for piece in pieces[len(self._pooled) :]:
            self._pooled.append(self._pool.scores(piece, self._is_text(start, start + piece.shape[1])))
            start += piece.shape[1]
        return self._pooled

    def _pieces(self) -> list[Tensor]:
        if self._score is None:
            raise HooklineError(
                f"{self!r} has not watched a generation: use generate_with_cache(…, monitors=[monitor]) or stream(…, "
                f"monitors=[monitor])"
            )
        return self._score.pieces

    def _is_text(self, start: int, stop: int) -> Tensor:
        """Which of these columns are text; new tokens are."""
        is_text = torch.ones(self._rows, stop - start, dtype=torch.bool)
        if self._mask is not None:
            known = self._mask[:, start:stop]
            is_text = is_text.to(known.device)
            is_text[:, : known.shape[1]] = known
        return is_text

    def __repr__(self) -> str:
        return f"Monitor({self.point!r})"


def _nothing() -> None:
    """What ends no row."""


def _checked_bound(name: str, bound: Any) -> float:
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not isfinite(bound):
        raise HooklineError(f"{name}: a bound of a score is a finite number, got {bound!r}")
    return float(bound)

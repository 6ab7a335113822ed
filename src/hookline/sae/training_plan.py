"""The hyperparameters of a training run, and the metrics that it records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hookline.errors import HooklineError
from hookline.sae.sae_config import check_count, is_count, is_number

L1, L0, K = 2.0, 1.0, 16
_Check: TypeAlias = tuple[Callable[[Any], bool], str]
_LAST_RESAMPLING = 0.75
"""The fraction of the steps after which no feature is resampled, so that the last ones can converge."""
_NUMBER: _Check = (lambda x: is_number(x) and math.isfinite(x) and x >= 0, "a nonnegative number")
_FRACTION: _Check = (lambda x: is_number(x) and 0 <= x <= 1, "a fraction of the steps, from 0 to 1")
_VALID: dict[str, _Check] = {
    "resample_every": (lambda x: x == 0 or is_count(x), "a number of steps, or 0 for never"),
    "seed": (lambda x: isinstance(x, int), "an integer"),
    **dict.fromkeys(("l1", "l0", "lr"), _NUMBER),
    **dict.fromkeys(("warm_up", "decay", "l1_warm_up"), _FRACTION),
}


def checked_levels(levels: Any) -> Sequence[int]:
    """The levels of a matryoshka, if they are a list."""
    if not isinstance(levels, Sequence) or isinstance(levels, str) or not levels:
        raise HooklineError(f"levels must be a list of numbers of features, such as [64, 256], not {levels!r}")
    return levels


@dataclass(frozen=True)
class Metrics:
    """The metrics on the batches since the previous record."""

    step: int
    loss: float
    l0: float
    """The mean number of active features."""
    explained_variance: float
    """The fraction of the activations' variance that the reconstruction explains."""
    dead: float
    """The fraction of dead features."""


@dataclass(frozen=True)
class TrainingPlan:
    """The hyperparameters of a training run."""

    kind: str
    d_sae: int
    l1: float
    k: int
    steps: int
    lr: float
    warm_up: float
    decay: float
    l1_warm_up: float
    resample_every: int
    log_every: int
    seed: int
    l0: float = L0
    levels: tuple[int, ...] = ()
    """For "matryoshka": the numbers of features that reconstruct by themselves, ending with all."""

    def __post_init__(self) -> None:
        for name in ("d_sae", "k", "steps", "log_every"):
            check_count(name, getattr(self, name))
        for name, (is_valid, expected) in _VALID.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise HooklineError(f"{name} must be {expected}, not {value!r}")
        are_counts = all(map(is_count, self.levels))
        rising = are_counts and all(one < two for one, two in zip(self.levels, self.levels[1:], strict=False))
        if self.levels and not (rising and self.levels[-1] == self.d_sae):
            raise HooklineError(
                f"levels must be rising numbers of features that end with d_sae={self.d_sae}, not {list(self.levels)}"
            )

    def rate(self, step: int) -> float:
        """The learning rate at a step: linear warm-up, constant, linear decay."""
        rising = (step + 1) / max(1.0, self.warm_up * self.steps)
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, rising, falling)

    def warmed_up(self, step: int) -> float:
        """The fraction of the penalty that applies at a step."""
        return min(1.0, (step + 1) / max(1.0, self.l1_warm_up * self.steps))

    def l1_coefficient(self, step: int) -> float:
        """The L1 coefficient at a step, with its warm-up."""
        return 0.0 if self.kind == "topk" else self.l1 * self.warmed_up(step)

    def resamples(self, step: int) -> bool:
        """Whether dead features are resampled after a step."""
        every = self.resample_every
        return bool(every) and (step + 1) % every == 0 and step + 1 <= _LAST_RESAMPLING * self.steps

    @property
    def patience(self) -> int:
        """The number of inactive steps after which a feature counts as dead."""
        return self.resample_every or max(1, self.steps // 8)

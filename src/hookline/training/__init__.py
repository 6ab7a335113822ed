"""Hooks in training: statistics of a training, the first NaN, gradients that are changed, statistics over a data set.

See docs/hooks-in-training.md.
"""

from hookline.errors import NonFiniteError
from hookline.training.collecting import collect
from hookline.training.gradient_edits import clip, edit_gradients
from hookline.training.loss_terms import distill, l1, l2, penalty
from hookline.training.nonfinite import find_nonfinite
from hookline.training.streaming import absolute_max, covariance, mean, second_moment
from hookline.training.watching import watch

__all__ = [
    "watch",
    "find_nonfinite",
    "clip",
    "edit_gradients",
    "penalty",
    "l1",
    "l2",
    "distill",
    "collect",
    "covariance",
    "second_moment",
    "mean",
    "absolute_max",
    "NonFiniteError",
]


def __dir__() -> list[str]:
    return sorted(__all__)

"""Probes: linear classifiers of activations, fitted at every layer in one pass, and judged on prompts held out."""

from hookline.experiments.probes.linear_probes import Probes, fit
from hookline.experiments.probes.monitors import Monitor

__all__ = ["Monitor", "Probes", "fit"]


def __dir__() -> list[str]:
    return __all__

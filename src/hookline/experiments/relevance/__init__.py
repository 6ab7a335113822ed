"""Relevance patching: attribution patching with the rules of layer-wise relevance propagation in place of gradients."""

from hookline.experiments.relevance.relevance_patching import relevance

__all__ = ["relevance"]


def __dir__() -> list[str]:
    return __all__

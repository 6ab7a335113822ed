"""The residual stream in a cache: its components, and the contribution of each to a logit."""

from hookline.residual.model_cache import ModelCache

__all__ = ["ModelCache"]

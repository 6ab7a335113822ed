"""The Jacobian lens: the stream after each layer, mapped to the final one by the mean Jacobian of many texts."""

from hookline.experiments.jacobian.jacobian_lens import JacobianLens, fit

__all__ = ["JacobianLens", "fit"]


def __dir__() -> list[str]:
    return __all__

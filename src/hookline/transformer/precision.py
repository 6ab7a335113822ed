"""The precision of what is computed from activations and weights: at least float32."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it has that dtype."""
    return x if x.dtype == torch.float64 else x.float()

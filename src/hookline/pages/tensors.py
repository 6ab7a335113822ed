"""Tensors as JSON: the page has the library's own numbers, as float32."""

from __future__ import annotations

import base64
from typing import Any

from torch import Tensor, float32

from hookline.errors import HooklineError

MOST_CELLS = 4_000_000
"""Numbers in one view."""


def packed_tensor(x: Tensor) -> dict[str, Any]:
    """A tensor as its shape and the base64 of its float32 values, in little-endian order."""
    if x.numel() > MOST_CELLS:
        raise HooklineError(f"this view has {x.numel():,} numbers; the page shows up to {MOST_CELLS:,}: use less text")
    values = x.detach().to("cpu", float32).contiguous().numpy().astype("<f4")
    return {"shape": list(x.shape), "f32": base64.b64encode(values.tobytes()).decode()}

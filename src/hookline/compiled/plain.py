"""The modes of torch in which compiled runs work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hookline.engine.modes import GradMode


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Without gradients, and without inference mode: its tensors could not be used again outside it."""
    with torch.inference_mode(False), GradMode(False):
        yield

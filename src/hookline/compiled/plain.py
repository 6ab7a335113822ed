"""The modes of torch in which compiled runs work."""

from __future__ import annotations

from typing import Any

import torch

from hookline.engine import undo


class PlainTensors(undo.UndoBlock):
    """A block without gradients and without inference mode, whose tensors could not be used again outside it."""

    _guard: Any = None

    def __init__(self) -> None:
        self._before = torch.is_grad_enabled()

    def open(self) -> None:
        """Disable gradients and inference mode."""
        self._guard = torch._C._InferenceMode(False)  # from here on, until its exit or its end
        torch._C._set_grad_enabled(False)

    def close(self) -> None:
        """Restore both. The second time, the guard does nothing."""
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._before)

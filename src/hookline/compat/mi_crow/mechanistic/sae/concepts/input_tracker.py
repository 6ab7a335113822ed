"""InputTracker: the texts and tokens of the current inference, for hooks that need them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class InputTracker:
    """The texts that a language model is run on, while it is enabled."""

    def __init__(self) -> None:
        self.enabled = False
        self.encodings: dict[str, Tensor] = {}
        self._texts: list[str] = []

    def enable(self) -> None:
        """Keep texts from now on."""
        self.enabled = True

    def disable(self) -> None:
        """Keep no texts from now on."""
        self.enabled = False

    def set_current_texts(self, texts: Sequence[str], encodings: dict[str, Tensor] | None = None) -> None:
        """Note the texts of an inference, and their token ids and attention mask."""
        if self.enabled:
            self._texts, self.encodings = list(texts), encodings or {}

    def get_current_texts(self) -> list[str]:
        """The texts of the current or last inference."""
        return list(self._texts)

    def reset(self) -> None:
        """Forget the texts."""
        self._texts, self.encodings = [], {}

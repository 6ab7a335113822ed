"""Ragged batches: texts of different lengths, and where each of them ends."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.errors import HooklineError, warn

warned: set[str] = set()
"""Warnings that were issued, and are issued once per process."""


def warn_of_ragged(mask: Tensor, *, is_causal: bool) -> None:
    """Warn once if the last column of the logits is not at the last token of every text."""
    if "ragged" in warned or not is_causal or bool(mask[:, -1].all()):
        return
    warned.add("ragged")
    warn(
        "texts of different lengths are padded on the right, so logits[:, -1] is not at the last token of the shorter "
        "texts: use model.last_logits(texts). Pass padding_side= to silence this warning; it is issued once",
    )


def last_columns(mask: Tensor | None, logits: Tensor) -> Tensor:
    """The column of each row's last token in its logits."""
    n = logits.shape[1]
    if mask is None:
        return torch.full((len(logits),), n - 1, device=logits.device)
    if mask.ndim != 2:
        raise HooklineError(f"last_logits needs a mask over the tokens, [batch, pos], not {list(mask.shape)}")
    real = mask[:, -n:].to(logits.device).bool()  # with a key-value cache, the mask also covers earlier tokens
    if not bool(real.any(1).all()):
        raise HooklineError("last_logits: a row of the batch has no tokens, only padding")
    return (real * torch.arange(n, device=logits.device)).amax(1)

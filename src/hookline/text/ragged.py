"""Ragged batches: texts of different lengths, and where each of them ends."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hookline.errors import HooklineError, HooklineWarning, users_level


class _Told:
    """What is said once in a process."""

    ragged = False


told = _Told()


def warn_of_ragged(mask: Tensor, *, is_causal: bool) -> None:
    """Say once that the last column of the logits is not at the last token of every text."""
    if told.ragged or not is_causal or bool(mask[:, -1].all()):
        return
    told.ragged = True
    warnings.warn(
        "texts of different lengths are padded on the right here, so logits[:, -1] is not at the last token of the "
        "shorter ones: model.last_logits(texts) is. With padding_side= there is no such warning; it is given once",
        HooklineWarning,
        stacklevel=users_level(),
    )


def last_columns(mask: Tensor | None, logits: Tensor) -> Tensor:
    """Where each row's last token is in its logits."""
    n = logits.shape[1]
    if mask is None:
        return torch.full((len(logits),), n - 1, device=logits.device)
    if mask.ndim != 2:
        raise HooklineError(f"last_logits needs a mask over the tokens, [batch, pos], not {list(mask.shape)}")
    real = mask[:, -n:].to(logits.device).bool()  # of a run that goes on, the mask is also of what came before
    if not bool(real.any(1).all()):
        raise HooklineError("a row without any token has no last one")
    return (real * torch.arange(n, device=logits.device)).amax(1)

"""Texts in batches, and the activations at their tokens as rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.sae_config import is_count
from hookline.sae.splice import flattened


@dataclass(frozen=True)
class Batch:
    """Some texts as tokens, with the mask of those that are no padding."""

    numbers: Int[Tensor, " batch"]
    """Which texts they are."""
    ids: Int[Tensor, "batch pos"]
    mask: Int[Tensor, "batch pos"]


def batches_of(model: HookedModel, texts: Iterable[str], batch_size: int) -> Iterator[Batch]:
    """The texts in batches, padded on the right. As in a harvest, an empty text has no tokens, but a number."""
    if isinstance(texts, str):
        raise HooklineError("texts is a list of texts, not one text")
    if not is_count(batch_size):
        raise HooklineError(f"batch_size is a whole number from 1 on, not {batch_size!r}")
    numbered = ((number, text) for number, text in enumerate(texts) if text != "")
    while some := list(islice(numbered, batch_size)):
        ids, mask = model.text.encode([text for _, text in some], padding_side="right")
        numbers = torch.tensor([number for number, _ in some])
        yield Batch(numbers, ids.to(model._device), mask.to(model._device))


def rows_of(model: HookedModel, sae: SparseAutoencoder, point: str, batch: Batch) -> Float[Tensor, "row d_in"]:
    """What passes at a point at every token that is no padding, as the autoencoder takes it."""
    cache = model.cache(batch.ids, attention_mask=batch.mask, names_filter=point)
    if len(cache) != 1:
        raise HooklineError(f"{point!r} stands for {len(cache)} points, not one: {list(cache)[:4]}")
    (x,) = cache.values()
    return flattened(sae, x, model.point(point))[batch.mask.bool()]

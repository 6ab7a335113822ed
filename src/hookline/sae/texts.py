"""Batches of texts, and their activations as rows."""

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
    """Texts as tokens, with the attention mask."""

    numbers: Int[Tensor, " batch"]
    """The numbers of the texts."""
    ids: Int[Tensor, "batch pos"]
    mask: Int[Tensor, "batch pos"]


def batches_of(model: HookedModel, texts: Iterable[str], batch_size: int) -> Iterator[Batch]:
    """Yield the texts in batches, padded on the right. Empty texts are numbered, but skipped, as in a harvest."""
    if isinstance(texts, str):
        raise HooklineError("texts must be a list of texts, not a single text")
    if not is_count(batch_size):
        raise HooklineError(f"batch_size must be a positive integer, not {batch_size!r}")
    numbered = ((number, text) for number, text in enumerate(texts) if text != "")
    while some := list(islice(numbered, batch_size)):
        ids, mask = model.text.encode([text for _, text in some], padding_side="right")
        numbers = torch.tensor([number for number, _ in some])
        yield Batch(numbers, ids.to(model._device), mask.to(model._device))


def rows_of(model: HookedModel, sae: SparseAutoencoder, point: str, batch: Batch) -> Float[Tensor, "row d_in"]:
    """The activations at a point for all tokens except padding, in the shape that the autoencoder takes."""
    cache = model.cache(batch.ids, attention_mask=batch.mask, names_filter=point)
    if len(cache) != 1:
        raise HooklineError(f"{point!r} matches {len(cache)} points, expected exactly one: {list(cache)[:4]}")
    (x,) = cache.values()
    return flattened(sae, x, model.point(point))[batch.mask.bool()]

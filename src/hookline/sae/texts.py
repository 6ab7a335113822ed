"""Activations at a point for texts, batch by batch, in the form in which a store returns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from jaxtyping import Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.sae_config import check_count
from hookline.store import Rows


def point_of(sae: SparseAutoencoder, point: str | None) -> str:
    """The point, by default where the autoencoder was trained."""
    name = point if point is not None else sae.cfg.hook_name
    if name is None:
        raise HooklineError("the autoencoder has no hook_name: pass the point")
    return name


def text_batches(
    sae: SparseAutoencoder, model: HookedModel, texts: Iterable[str], point: str, batch_size: int
) -> Iterator[tuple[Rows, Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]]:
    """Yield the activations of a batch of texts as rows, one per token, with the token ids and the attention mask.

    The rows have the shape that the autoencoder takes. Texts are padded on the right, and padding has no rows. Empty
    texts are numbered, but skipped, as in a harvest.
    """
    texts = model.text.prompts(texts)
    if isinstance(texts, str):
        raise HooklineError("texts must be a list of texts, not a single text")
    check_count("batch_size", batch_size)
    numbered = ((number, text) for number, text in enumerate(texts) if text != "")
    while batch := list(islice(numbered, batch_size)):
        ids, mask = model.text.encode([text for _, text in batch], padding_side="right")
        ids, mask = ids.to(model.device), mask.to(model.device)
        cache = model.cache(ids, attention_mask=mask, names_filter=point)
        if len(cache) != 1:
            raise HooklineError(f"{point!r} matches {len(cache)} points, expected exactly one: {list(cache)[:4]}")
        (x,) = cache.values()
        x, real = sae.flattened(x, model.point(point))[mask.bool()], mask.bool().cpu()
        row, position = real.nonzero(as_tuple=True)
        example = torch.tensor([number for number, _ in batch])[row]
        yield Rows(example, position, ids.cpu()[real], {point: x}), ids, mask

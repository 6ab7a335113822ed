"""An autoencoder of tinyworld that is made without training: each feature is a country."""

from functools import cache

import torch
from stores import tinyworld

from hookline.sae import SAEConfig, SparseAutoencoder

POINT = "blocks.1.hook_resid_post"
COUNTRIES = ["France", "Italy", "Germany", "Japan", "Russia", "Spain"]
ITALY, JAPAN = 1, 3
CAPITAL = "The capital of Italy is"
TEXTS = [
    sentence.format(country)
    for sentence in ("The capital city of {} is", "In {}, the capital is", "People in {} speak")
    for country in COUNTRIES
]


@cache
@torch.no_grad()
def countries() -> SparseAutoencoder:
    """Features 0 to 5 are the countries: what their tokens have that the others' have not. The rest are random."""
    model = tinyworld()
    rows = torch.stack(
        [model.cache(f"The capital of {each} is", names_filter=POINT)[POINT][0, 3] for each in COUNTRIES]
    )
    mean = rows.mean(0)
    sae = SparseAutoencoder(SAEConfig("topk", d_in=len(mean), d_sae=32, k=2, hook_name=POINT), seed=1)
    sae.W_dec[: len(rows)] = (rows - mean) / (rows - mean).norm(dim=1, keepdim=True)
    sae.W_enc.copy_(sae.W_dec.T)
    sae.b_dec.copy_(mean)
    return sae

"""Small sparse autoencoders that several test files use."""

import torch

from hookline.sae import SAEConfig, SparseAutoencoder

KINDS = ("standard", "gated", "topk", "jumprelu")


def random_sae(kind, dtype="float64", **options) -> SparseAutoencoder:
    """Six inputs, twenty features, every parameter random."""
    if kind == "topk":
        options.setdefault("k", 3)
    sae = SparseAutoencoder(SAEConfig(kind, d_in=6, d_sae=20, dtype=dtype, **options))
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return sae


def sae_for(d_in, kind="standard", dtype="float32", d_sae=48, **options) -> SparseAutoencoder:
    """Initialized as for training, for activations of this width."""
    if kind == "topk":
        options.setdefault("k", 5)
    sae = SparseAutoencoder(SAEConfig(kind, d_in, d_sae, dtype=dtype, **options), seed=3)
    with torch.no_grad():
        sae.b_dec.normal_(std=0.1)
    return sae

"""Activations that are made of known directions."""

import pytest
import torch


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    """Directions that activations are made of: [feature, d_in]."""
    random = torch.Generator().manual_seed(1)
    return torch.nn.functional.normalize(torch.randn(24, 16, generator=random), dim=1)


@pytest.fixture(scope="module")
def activations(truth) -> torch.Tensor:
    """Sums of two directions or so, at some distance from 0."""
    random = torch.Generator().manual_seed(2)
    active = torch.rand(4000, 24, generator=random) < 0.08
    return (active * (1 + torch.rand(4000, 24, generator=random))) @ truth * 7 + 3

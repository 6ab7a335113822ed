"""Equivariant layers and networks of e3nn."""

from collections.abc import Iterator
from typing import Any

import torch
from e3nn import nn as enn
from e3nn import o3
from torch import nn
from zoo.network import Built, Network, runs

IRREPS = "4x0e + 2x1o + 1x2e"


class TwoLayers(nn.Module):
    """A tensor product with spherical harmonics between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = o3.Linear(IRREPS, IRREPS)
        self.harmonics = o3.SphericalHarmonics([0, 1, 2], normalize=True)
        self.product = o3.FullyConnectedTensorProduct(IRREPS, "1x0e + 1x1o + 1x2e", IRREPS)
        self.norm = enn.BatchNorm(IRREPS)
        self.after = o3.Linear(IRREPS, "1x0e")

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        return self.after(self.norm(self.product(h, self.harmonics(position)) + h))


def width() -> int:
    return o3.Irreps(IRREPS).dim


ROWS: dict[str, Any] = {
    "Linear": lambda: o3.Linear(IRREPS, IRREPS),
    "FullyConnectedTensorProduct": lambda: o3.FullyConnectedTensorProduct(IRREPS, IRREPS, IRREPS),
    "FullTensorProduct": lambda: o3.FullTensorProduct("2x0e + 1x1o", "1x0e + 1x1o"),
    "ElementwiseTensorProduct": lambda: o3.ElementwiseTensorProduct(IRREPS, IRREPS),
    "TensorSquare": lambda: o3.TensorSquare(IRREPS),
    "Norm": lambda: o3.Norm(IRREPS),
    "SphericalHarmonics": lambda: o3.SphericalHarmonics([0, 1, 2], normalize=True),
    "BatchNorm": lambda: enn.BatchNorm(IRREPS),
    "Gate": lambda: enn.Gate("4x0e", [torch.tanh], "3x0e", [torch.sigmoid], "2x1o + 1x2e"),
    "NormActivation": lambda: enn.NormActivation(IRREPS, torch.sigmoid),
    "Activation": lambda: enn.Activation("8x0e", [torch.tanh]),
    "Dropout": lambda: enn.Dropout(IRREPS, 0.5),
    "S2Activation": lambda: enn.S2Activation("1x0e + 1x1o + 1x2e", torch.tanh, 10),
    "FullyConnectedNet": lambda: enn.FullyConnectedNet([8, 16, 4], torch.tanh),
    "Identity": lambda: enn.Identity(IRREPS, IRREPS),
    "Extract": lambda: enn.ExtractIr(IRREPS, "1o"),
    "TwoLayers": TwoLayers,
}


def build(name: str) -> Built:
    """The layer on a few rows of what it takes."""
    module = ROWS[name]()
    x = torch.randn(5, width())
    small, other = torch.randn(5, 5), torch.randn(5, 4)
    inputs = (
        (x,),
        (x, x),
        (x, torch.randn(5, 3)),
        (torch.randn(5, 3),),
        (torch.randn(5, 8),),
        (small, other),
        (torch.randn(5, 9),),
        (torch.randn(5, 18),),
    )
    return runs(module, *((args, {}) for args in inputs))


def networks() -> Iterator[Network]:
    """One row per kind."""
    for name in ROWS:
        yield Network(name, lambda name=name: build(name))

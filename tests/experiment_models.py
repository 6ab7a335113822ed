"""Models, tokens and a metric that several test files of experiments use."""

import tiny_models
import torch
from torch import Tensor

import hookline
from hookline import HookedModel


def wrapped(kind: str) -> HookedModel:
    """A tiny model of this kind with its head."""
    return hookline.hook(tiny_models.encoder(kind, head=True) if kind == "bert" else tiny_models.causal_lm(kind))


class Models(dict[str, HookedModel]):
    """Tiny models by their kinds, each made when it is first used."""

    def __missing__(self, kind: str) -> HookedModel:
        self[kind] = wrapped(kind)
        return self[kind]


def tokens(seed: int, rows: int = 1, length: int = 7) -> Tensor:
    """Random tokens that are not special."""
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def lead(logits: Tensor) -> Tensor:
    """The logit difference of two tokens, written as a function."""
    return logits[:, -1, 5] - logits[:, -1, 7]

"""Paired tests: whether the mean of differences over examples is 0. NaN is a cell without that example."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.results import student_t
from hookline.experiments.results.intervals import Cells, Examples, counts, finite, sem

PairedTest: TypeAlias = Literal["t", "sign-flip"]

FEW = 12
"""With at most as many examples, all flips of signs are tried: 2 ** 11 of them, up to the sign of all."""
_ROOM = 2**23


def test_for(n: int, test: str) -> PairedTest:
    """The test for `n` examples: by "auto" that of all sign flips for few, and otherwise the t test."""
    if test not in ("auto", "t", "sign-flip"):
        raise HooklineError(f'test is "auto", "t" or "sign-flip", got {test!r}')
    if test == "sign-flip" and n > FEW:
        raise HooklineError(f'test="sign-flip" tries all signs of at most {FEW} examples, not of {n}: use test="t"')
    return "sign-flip" if test == "sign-flip" or (test == "auto" and n <= FEW) else "t"


def paired_differences(ours: Examples, theirs: Tensor) -> Examples:
    """The difference of each example; infinite, not missing, where both values are the same infinity."""
    differences = ours - theirs
    is_undefined = differences.isnan() & ~ours.isnan() & ~theirs.isnan()
    return differences.masked_fill(is_undefined, torch.inf)


def p_values(differences: Examples, test: PairedTest) -> Cells:
    """The two-sided p of each cell; NaN with fewer than two examples, or with an infinite one."""
    differences = finite(differences)
    p = _of_t(differences) if test == "t" else _of_flips(differences)
    return torch.where(counts(differences) > 1, p, torch.nan)


def _of_t(differences: Examples) -> Cells:
    mean, error = differences.nanmean(-1), sem(differences)
    is_flat = error == 0  # all differences are equal: certain, unless they are 0
    p = student_t.two_sided(mean / torch.where(is_flat, 1.0, error), counts(differences) - 1)
    return torch.where(is_flat, (mean == 0).double(), p)


def _of_flips(differences: Examples) -> Cells:
    """The share of all ways to flip the signs of the differences in which their sum is as far from 0."""
    flat = differences.reshape(-1, differences.shape[-1]).nan_to_num(0.0)
    signs = _signs(flat.shape[-1])
    parts = []
    for part in flat.split(max(1, _ROOM // len(signs))):
        far = part.sum(1).abs()[:, None]
        rounding = 1e-9 * part.abs().sum(1)[:, None]
        parts.append(((part @ signs.T).abs() >= far - rounding).double().mean(1))
    return torch.cat(parts).reshape(differences.shape[:-1])


def _signs(n: int) -> Float[Tensor, "flip example"]:
    """All signs of `n` numbers whose first is positive."""
    codes = torch.arange(2 ** (n - 1))
    bits = (codes[:, None] >> torch.arange(n - 1)) & 1
    return torch.cat([torch.ones(len(codes), 1), 1.0 - 2.0 * bits], 1).double()

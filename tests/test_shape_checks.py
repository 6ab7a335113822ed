"""Shapes in signatures are checked while tests run: a wrong one is an error, unless the function refuses it itself."""

from __future__ import annotations

import pytest
import shape_checks
import torch
from jaxtyping import Float
from torch import Tensor

from hookline import HooklineError
from hookline.text.loss import lm_loss


def scores(x: Float[Tensor, "batch width"], weight: Float[Tensor, "width out"]) -> Float[Tensor, "batch out"]:
    if x.shape[0] == 0:
        raise HooklineError("an empty batch")
    return x.sum() if weight.shape[1] == 7 else (x @ weight)


checked = shape_checks._checked(scores)


def test_shapes_that_fit() -> None:
    assert checked(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    ("x", "weight", "what"),
    [((2, 3, 1), (3, 4), "x is"), ((2, 3), (2, 4), "weight is"), ((2, 3), (3, 7), "return is")],
)
def test_a_wrong_shape_is_an_error(x, weight, what) -> None:
    with pytest.raises(shape_checks.ShapeError, match=what):
        checked(torch.ones(x), torch.ones(weight))


def test_a_function_may_refuse_by_itself() -> None:
    with pytest.raises(HooklineError):
        checked(torch.ones(0, 3, 1), torch.ones(3, 4))


def test_functions_of_the_package_are_checked() -> None:
    with pytest.raises(shape_checks.ShapeError, match="tokens is"):
        lm_loss(torch.zeros(1, 3, 5), torch.zeros(1, 4, dtype=torch.long))

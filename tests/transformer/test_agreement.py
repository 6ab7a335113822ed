"""What the processes of a sharded model compare: tensors that differ have sketches that differ."""

import pytest
import torch
from torch import Tensor

from hookline.transformer.agreement import AMPLIFIED, SAME, _difference, _weights, explanation, sketch

LOWEST = torch.finfo(torch.float32).min


def apart(x: Tensor, y: Tensor) -> float:
    """How much the sketches of two tensors differ."""
    return _difference(sketch(x).tolist(), sketch(y).tolist())


@pytest.mark.parametrize("width", [1, 2, 16, 32, 100])
def test_nothing_cancels_for_any_number_of_rows(width) -> None:
    """A vector, a constant, alternating signs, one entry: the sketches differ by about as much as the tensors."""
    generator = torch.Generator().manual_seed(width)
    for n in range(1, 301):
        x, vector = torch.randn(n, width, generator=generator), torch.randn(width, generator=generator)
        alternating = 1 - 2.0 * (torch.arange(n) % 2)
        one = torch.zeros(n, width)
        one[n // 2, width // 2] = 1
        for change in (vector, torch.ones(()), alternating[:, None], alternating[:, None] * vector, one, -2 * x):
            for size in (1, 1e-2):
                y = x + size * change
                true = float((x - y).norm() / max(x.norm(), y.norm()))
                assert true / 10 < apart(x, y) < true * 10, (n, change)


def test_rows_and_columns_that_change_places_do_not_cancel() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for y in (x.T, x.flip(0), x.flip(1), x.roll(16, 1), x.roll(16, 0)):
        assert apart(x, y) > 0.3


def test_rounding_does_not_count() -> None:
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    assert apart(x, (x.double() * (1 + 1e-7)).float()) < SAME


@pytest.mark.parametrize("mask", [LOWEST, -torch.inf, torch.nan])
def test_masked_scores_do_not_hide_the_others(mask) -> None:
    """The lowest number of a dtype is larger than all sums; a sum of such numbers has no room for the others."""
    scores = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))
    is_masked = torch.ones(9, 9).triu(1).bool()
    masked = scores.masked_fill(is_masked, mask)
    assert apart(masked, masked) == 0
    assert apart(masked, (1.001 * scores).masked_fill(is_masked, mask)) > 10 * SAME
    assert apart(masked, scores.masked_fill(is_masked, 0.0)) > 0.1


def test_what_is_not_finite_differs_from_each_other() -> None:
    numbers = [torch.full((3, 4), number) for number in (0.0, torch.inf, -torch.inf, LOWEST, torch.nan)]
    for at, x in enumerate(numbers):
        assert apart(x, x) == 0
        for y in numbers[:at]:
            assert apart(x, y) > 0.1
    half = torch.tensor([1.0, torch.finfo(torch.float16).min], dtype=torch.float16)
    assert apart(half, half * torch.tensor([1.01, 1], dtype=torch.float16)) > 1e-3


def test_labels_are_compared_one_by_one() -> None:
    """One of 100,000 large integers: its size does not count, but that it is another."""
    ids = torch.randint(128_000, (100_000,), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[77] += 1
    assert apart(ids, other) > AMPLIFIED * SAME
    assert apart(torch.tensor([True, False]), torch.tensor([False, True])) > 0.1
    assert apart(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])) > 0.1


def test_settings_of_torch_do_not_matter() -> None:
    x = torch.randn(33, 32, generator=torch.Generator().manual_seed(0))
    expected = sketch(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sketch(x), expected)


def test_made_first_under_other_settings() -> None:
    """The weights of a length are kept, with whatever settings they are needed first."""
    x = torch.ones(700, 5)
    _weights.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            first = sketch(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(sketch(x), first)
    assert first.dtype == torch.float32


def test_errors_of_sharded_models_are_explained() -> None:
    view = RuntimeError("Output 0 of _ToTorchTensor is a view and is being modified inplace. This view was created …")
    assert "torch.no_grad()" in explanation(view)
    assert "another process has ended" in explanation(RuntimeError("[gloo/transport] Connection closed by peer"))
    assert explanation(RuntimeError("shapes do not match")) is explanation(KeyError("gloo")) is None


def test_shapes_without_rows_or_columns() -> None:
    assert sketch(torch.zeros(3, 0)).tolist() == sketch(torch.zeros(0, 3)).tolist() == [0] * 16
    assert apart(torch.tensor(2.0), torch.tensor(3.0)) > 0.1

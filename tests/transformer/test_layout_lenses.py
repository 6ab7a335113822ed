"""The laws of the lenses for transformers' layouts, on many values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lens_laws import check_laws, numbers
from torch import nn

from hookline.engine.lenses import Chain, Item
from hookline.transformer.layout_lenses import (
    AddBatchAxis,
    Flat,
    Heads,
    HeadsFirst,
    Interleaved,
    Patches,
    Slice,
    Times,
    TimesParameter,
)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_heads(n: int, each: int, positions: int) -> None:
    check_laws(Heads(n), numbers(2, positions, n * each))


@given(st.integers(0, 6), st.integers(1, 6))
def test_part(start: int, length: int) -> None:
    check_laws(Slice(start, start + length), numbers(2, 12)[:, : start + length + 2])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(2, 3), st.integers(1, 4))
def test_interleaved(groups: int, per_group: int, parts: int, each: int) -> None:
    value = numbers(2, 3, groups * parts * per_group * each)
    for index in range(parts):
        check_laws(Interleaved(groups, parts, index, groups * per_group), value)


@given(st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_heads_first(n: int, repeats: int, flat: bool) -> None:
    """Heads before positions, each repeated for its group; or batch and heads as one axis."""
    each = numbers(2, n, 5, 4)
    check_laws(HeadsFirst(n), each.flatten(0, 1) if flat else each.repeat_interleave(repeats, 1))


@pytest.mark.parametrize("factor", [0.5, 2.0, -4.0])  # powers of two, so that the laws hold to the last bit
def test_scaled(factor) -> None:
    check_laws(Times(factor), numbers(2, 3))


@pytest.mark.parametrize(
    ("lens", "value", "shape"),
    [
        (AddBatchAxis(3), numbers(6, 4), (1, 6, 4)),
        (AddBatchAxis(3), numbers(2, 6, 4), (2, 6, 4)),
        (Patches(), numbers(2, 8, 3, 5), (2, 15, 8)),
        (Patches(), numbers(2, 15, 8), (2, 15, 8)),
        (Flat(), numbers(2, 1, 4, 5, 8), (8, 5, 8)),
        (Flat(), numbers(2, 5, 8), (2, 5, 8)),
    ],
)
def test_layouts_of_images(lens, value, shape) -> None:
    assert lens.get(value).shape == shape
    check_laws(lens, value)


def test_patches_are_read_row_by_row() -> None:
    image = numbers(1, 8, 3, 5)
    assert torch.equal(Patches().get(image)[0, 7], image[0, :, 1, 2])


@pytest.mark.parametrize("name", ["lambda_1", "gate_attn"])
def test_gained(name) -> None:
    layer = nn.Module()
    gain = torch.tensor([0.5, 2.0, -4.0])  # powers of two, so that the laws hold to the last bit
    layer.register_parameter(name, nn.Parameter(gain if name == "lambda_1" else gain[:1], requires_grad=False))
    value = numbers(2, 3)
    factor = gain if name == "lambda_1" else torch.tanh(gain[:1])
    assert torch.equal(TimesParameter(layer, name).get(value), value * factor)
    if name == "lambda_1":
        check_laws(TimesParameter(layer, name), value)


def test_chain() -> None:
    for start in (0, 8, 16):
        check_laws(Chain((Item((1, "b")), Slice(start, start + 8), Heads(4))), (3, {"b": numbers(2, 3, 24)}))

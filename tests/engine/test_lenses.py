"""The laws of every lens, on many values."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from hookline.engine.derived import Added, Difference, Keys, MergeTiles, Unflatten, stashed
from hookline.engine.lenses import (
    FIRST,
    AddBatchAxis,
    Argument,
    Chain,
    Flat,
    Heads,
    HeadsFirst,
    Interleaved,
    Item,
    Patches,
    Slice,
    Times,
    TimesParameter,
)
from hookline.engine.order import Kind
from hookline.engine.points import Site
from hookline.engine.structures import NoTensorError, children, tensors_in


@dataclass(frozen=True)
class Frozen:
    label: str
    hidden: Tensor


Pair = namedtuple("Pair", "left right")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    parts_a, parts_b = list(children(a)), list(children(b))
    if not parts_a:
        return type(a) is type(b) and a == b
    return (
        type(a) is type(b)
        and [k for k, _ in parts_a] == [k for k, _ in parts_b]
        and all(same(x, y) for (_, x), (_, y) in zip(parts_a, parts_b, strict=True))
    )


def check_laws(lens, value) -> None:
    before = [t.clone() for t in tensors_in(value)]
    seen = lens.get(value)
    a, b = torch.randn(seen.shape), torch.randn(seen.shape)
    assert torch.equal(lens.get(lens.put(value, a)), a)
    assert same(lens.put(value, seen), value)
    assert same(lens.put(lens.put(value, a), b), lens.put(value, b))
    assert all(torch.equal(t, old) for t, old in zip(tensors_in(value), before, strict=True)), "value was changed"


def wrap(draw, tensor: Tensor, depth: int):
    """A random structure around a tensor, and the path to it."""
    value, path = tensor, ()
    for _ in range(depth):
        kind = draw(st.sampled_from(["tuple", "list", "dict", "ordered", "frozen", "pair", "model_output"]))
        filler = draw(st.sampled_from([None, 3, "text"]))
        if kind == "tuple":
            value, path = (filler, value), (1, *path)
        elif kind == "list":
            value, path = [value, filler], (0, *path)
        elif kind == "dict":
            value, path = {"a": filler, "b": value}, ("b", *path)
        elif kind == "ordered":
            value, path = OrderedDict(a=value), ("a", *path)
        elif kind == "frozen":
            value, path = Frozen("x", value), ("hidden", *path)
        elif kind == "pair":
            value, path = Pair(filler, value), (1, *path)
        else:
            value, path = BaseModelOutput(hidden_states=value), ("hidden_states", *path)
    return value, path


@given(st.data())
def test_structures(data) -> None:
    value, path = wrap(data.draw, numbers(2, 3), data.draw(st.integers(0, 4)))
    check_laws(FIRST, value)
    check_laws(Item(path), value)


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


def kept(tensor: Tensor) -> Site:
    """A site whose tensor was kept from an earlier event."""
    site = Site(nn.Identity(), Kind.OUTPUT)
    stashed.saved[site] = tensor
    return site


@given(st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_keys(heads: int, sinks: int, flat: bool) -> None:
    """Scores over the keys, perhaps with more columns than keys."""
    value = numbers(2, heads, 4, 5 + sinks)
    lens = Keys(heads, kept(numbers(2, 5, heads, 3)))
    assert lens.get(value).shape == (2, heads, 4, 5)
    check_laws(lens, value.flatten(0, 1) if flat else value)


def test_sums_and_differences() -> None:
    """On whole numbers, where addition loses nothing."""
    base, value = (torch.randint(-9, 9, (2, 3)).float() for _ in range(2))
    for lens in (Added(kept(base), FIRST), Difference(kept(base), FIRST)):
        new = torch.randint(-9, 9, (2, 3)).float()
        assert torch.equal(lens.get(lens.put(value, new)), new)
        assert torch.equal(lens.put(value, lens.get(value)), value)
    assert torch.equal(Added(kept(base), FIRST).get(value), base + value)
    assert torch.equal(Difference(kept(base), FIRST).get(value), value - base)


def test_rows() -> None:
    lens = Unflatten(kept(numbers(2, 3, 8)))
    check_laws(lens, numbers(6, 4))
    check_laws(lens, numbers(2, 3, 4))


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


def test_tiles_joined() -> None:
    lens, value = MergeTiles(kept(numbers(2, 3, 8))), numbers(8, 5, 4, 6)
    assert lens.get(value).shape == (2, 20, 4, 6)
    check_laws(lens, value)


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


@given(st.data())
def test_chain(data) -> None:
    value, path = wrap(data.draw, numbers(2, 3, 24), data.draw(st.integers(0, 3)))
    start = 8 * data.draw(st.integers(0, 2))
    check_laws(Chain((Item(path), Slice(start, start + 8), Heads(4))), value)


def test_the_first_argument_by_a_name_it_had() -> None:
    hidden = numbers(2, 3)
    lens = Argument(("hidden_states", "mask"))
    call = ((), {"hidden_state": hidden, "mask": numbers(1)})
    assert lens.get(call) is hidden
    check_laws(lens, call)


@pytest.mark.parametrize("key", [None, 0, "hidden"])
@pytest.mark.parametrize("by_position", [True, False])
def test_argument_by_position_or_keyword(key, by_position) -> None:
    hidden = numbers(2, 3)
    call = ((hidden,), {"mask": None}) if by_position else ((), {"mask": numbers(1), "hidden": hidden})
    lens = Argument(("hidden", "mask"), key)
    assert lens.get(call) is hidden  # not the mask, though the caller wrote it first
    check_laws(lens, call)


def test_argument_inside() -> None:
    check_laws(Argument(("x", "rotary"), "rotary", (1,)), ((numbers(2),), {"rotary": (numbers(2), numbers(3))}))


def test_a_named_part_of_a_named_tuple() -> None:
    check_laws(Item(("right",)), Pair(1, numbers(2)))


@pytest.mark.parametrize(
    ("lens", "value", "message"),
    [
        (FIRST, None, "NoneType"),
        (FIRST, (1, {"a": "b"}), "tuple"),
        (Item((2,)), (numbers(1),), r"\[2\].*tuple.*\[0\]"),
        (Item(("b",)), {"a": numbers(1)}, r"\[b\].*dict.*\[a\]"),
        (Item((0,)), numbers(2), r"\[0\].*Tensor"),
        (Item(("a",)), {"a": 3}, " int"),
        (Argument(("x",), "y"), ((numbers(1),), {"z": 1}), r"\[y\].*\[0\], \[z\]"),
    ],
)
def test_what_is_not_there(lens, value, message) -> None:
    with pytest.raises(NoTensorError, match=message):
        lens.get(value)


def test_put_makes_a_new_structure() -> None:
    inner = {"h": numbers(2)}
    value = (inner, 1)
    new = FIRST.put(value, torch.zeros(2))
    assert inner["h"].any()
    assert not new[0]["h"].any()
    output = BaseModelOutput(last_hidden_state=numbers(2))
    new_output = FIRST.put(output, torch.zeros(2))
    assert type(new_output) is BaseModelOutput
    assert new_output[0] is new_output.last_hidden_state
    assert output.last_hidden_state.any()

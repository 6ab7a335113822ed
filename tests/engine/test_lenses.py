"""The laws of every lens, on many values."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lens_laws import check_laws, numbers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from hookline import HookedModule
from hookline.engine.lenses import FIRST, Argument, Chain, Item
from hookline.engine.order import Kind
from hookline.engine.pass_state import Saved, pass_state
from hookline.engine.points import Site
from hookline.errors import HooklineError
from hookline.transformer.layout_lenses import Added, Difference, Keys, MergeTiles, Unflatten
from hookline.values.structures import NoTensorError


@dataclass(frozen=True)
class Frozen:
    label: str
    hidden: Tensor


Pair = namedtuple("Pair", "left right")


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


def kept(tensor: Tensor) -> tuple[Site]:
    """A site whose tensor was kept from an earlier event."""
    site = Site(nn.Identity(), Kind.OUTPUT)
    pass_state.saved[site] = Saved(tensor)
    return (site,)


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
    for lens in (Added(kept(base)), Difference(kept(base))):
        new = torch.randint(-9, 9, (2, 3)).float()
        assert torch.equal(lens.get(lens.put(value, new)), new)
        assert torch.equal(lens.put(value, lens.get(value)), value)
    assert torch.equal(Added(kept(base)).get(value), base + value)
    assert torch.equal(Difference(kept(base)).get(value), value - base)


def test_rows() -> None:
    lens = Unflatten(kept(numbers(2, 3, 8)))
    check_laws(lens, numbers(6, 4))
    check_laws(lens, numbers(2, 3, 4))


def test_tiles_joined() -> None:
    lens, value = MergeTiles(kept(numbers(2, 3, 8))), numbers(8, 5, 4, 6)
    assert lens.get(value).shape == (2, 20, 4, 6)
    check_laws(lens, value)


@given(st.data())
def test_chain(data) -> None:
    value, path = wrap(data.draw, numbers(2, 3, 24), data.draw(st.integers(0, 3)))
    check_laws(Chain((Item(path), Unflatten(kept(numbers(1, 2, 24))))), value)


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


class AttrDict(dict):
    """Items are attributes too."""

    def __init__(self, *items) -> None:
        super().__init__(*items)
        self.__dict__ = self


class ReadOnly(Mapping):
    """Has its items in another dict."""

    def __init__(self, items) -> None:
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Bag(ReadOnly, MutableMapping):
    def __setitem__(self, key, value) -> None:
        self._items[key] = value

    def __delitem__(self, key) -> None:
        del self._items[key]


class AnyCase(Bag):
    """Has its items under other keys."""

    def __init__(self, items) -> None:
        self._items = {key.lower(): (key, value) for key, value in items.items()}

    def __getitem__(self, key):
        return self._items[key.lower()][1]

    def __setitem__(self, key, value) -> None:
        self._items[key.lower()] = (key, value)


class Slotted(MutableMapping):
    """`copy.copy` shares what holds its items, where it is not seen."""

    __slots__ = ("_items",)

    __init__, __getitem__, __setitem__ = ReadOnly.__init__, ReadOnly.__getitem__, Bag.__setitem__
    __iter__, __len__, __delitem__ = ReadOnly.__iter__, ReadOnly.__len__, Bag.__delitem__


class Scaled(tuple):
    """A tuple with an attribute, which `__new__` takes."""

    def __new__(cls, items, *, scale):
        new = super().__new__(cls, items)
        new.scale = scale
        return new


class ScaledPair(Pair):
    scale = 1


def scaled_pair(h: Tensor) -> ScaledPair:
    pair = ScaledPair(None, h)
    pair.scale = 5
    return pair


class Uncopied(Bag):
    def __copy__(self):
        raise TypeError("cannot be copied")


class Derived(ReadOnly):
    """Computes its items."""

    def __getitem__(self, key):
        return self._items[key][0]


UNUSUAL = {
    **{kind.__name__: lambda h, kind=kind: kind({"h": h}) for kind in (AttrDict, ReadOnly, Bag, AnyCase, UserDict)},
    "proxy": lambda h: MappingProxyType({"h": h}),
    "tuple with an attribute": lambda h: Scaled((h, 1), scale=5),
    "named tuple with an attribute": scaled_pair,
    "torch's own": lambda h: h.max(0),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_containers(make) -> None:
    value = make(numbers(2, 3))
    check_laws(FIRST, value)
    before = FIRST.get(value)
    new = FIRST.put(value, torch.zeros_like(before))
    assert FIRST.get(value) is before
    assert type(new) is type(value)
    assert getattr(new, "scale", None) == getattr(value, "scale", None)
    if isinstance(value, AttrDict):
        assert new.h is new["h"]
        assert value.h is before


@pytest.mark.parametrize("kind", [Slotted, Uncopied])
def test_a_container_that_cannot_be_copied_is_refused(kind) -> None:
    h = numbers(2)
    value = kind({"h": h})
    with pytest.raises(HooklineError, match=kind.__name__):
        FIRST.put(value, torch.zeros(2))
    assert value["h"] is h


def test_items_that_are_computed_are_refused() -> None:
    h = numbers(2)
    value = Derived({"h": (h,)})
    with pytest.raises(HooklineError, match="Derived"):
        FIRST.put(value, torch.zeros(2))
    assert value["h"] is h


class _Pyramid(nn.Module):
    """Returns feature maps by numbers that are text, as torchvision's detectors do."""

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        return OrderedDict([("1", x * 2), ("0", x * 3)])


class _Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = _Pyramid()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.backbone(x)
        return maps["0"] + maps["1"]


def test_a_number_finds_a_key_that_is_its_text() -> None:
    net, x = HookedModule(_Detector()), torch.ones(2)
    _, cache = net.run_with_cache(x, names_filter=["backbone[1]", "backbone[0]"])
    assert torch.equal(cache["backbone[1]"], x * 2)
    assert torch.equal(cache["backbone[0]"], x * 3)
    assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("backbone[1]", lambda x: x * 10)]), x * 23)

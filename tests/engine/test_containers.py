"""A module that fills, empties or returns a list, dict or dataclass of its caller does so as without hooks."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.engine.pass_state import pass_state
from hookline.errors import HooklineError, NeverFiredWarning


class Work(nn.Module):
    def __init__(self, change: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.fc, self.change = nn.Linear(4, 4), change

    def forward(self, bank: Any) -> Any:
        return self.change(self.fc, bank)


class Net(nn.Module):
    """Its module works on a container, from which the network then computes its output."""

    def __init__(self, make: Callable[[Tensor], Any], change: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.work, self.make = Work(change), make

    def forward(self, x: Tensor) -> Any:
        bank = self.make(x * 2)
        result = self.work(bank)
        return bank, result is bank, result


@dataclass
class State:
    h: Tensor
    count: int = 0


class Held(MutableMapping):
    def __init__(self, items: dict[str, Any]) -> None:
        self.held = items

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def fill_list(fc, bank):
    bank.append(fc(bank[-1]))


def insert_and_return(fc, bank):
    bank.insert(0, fc(bank[-1]))
    return bank


def swap_ends(fc, bank):
    bank.append(bank.pop(0))
    bank[0] = fc(bank[0])
    return (bank, fc(bank[-1]))


def take_out(fc, bank):
    return fc(bank.pop())


def keep_twice(fc, bank):
    bank.append(bank[-1])
    return {"bank": bank, "h": fc(bank[0])}


def write_and_fill(fc, bank):
    bank[0].mul_(3)
    bank.append(fc(bank[0]))


def fill_dict(fc, bank):
    bank["k"] = fc(bank["h"])
    bank["h"] = bank["k"] * 2
    return bank


def rename(fc, bank):
    bank["first"] = bank.pop("h")
    bank["v"] = fc(bank["first"])


def move_to_end(fc, bank):
    bank["h"] = bank.pop("h")
    return fc(bank["h"])


def empty(fc, bank):
    h = bank["h"]
    bank.clear()
    return fc(h)


def fill_nested(fc, bank):
    bank["layers"].append(fc(bank["layers"][0]))
    bank["again"] = bank["layers"]
    return bank["layers"]


def fill_state(fc, bank):
    bank.h, bank.count = fc(bank.h), bank.count + 1
    return bank


CASES = {
    **{f.__name__: (lambda h: [h, h + 1], f) for f in (fill_list, insert_and_return, swap_ends, take_out, keep_twice)},
    "write_and_fill": (lambda h: [h], write_and_fill),
    **{f.__name__: (lambda h: {"h": h, "other": h + 1}, f) for f in (fill_dict, rename, move_to_end, empty)},
    "ordered": (lambda h: OrderedDict(h=h, other=h + 1), rename),
    "default": (lambda h: defaultdict(list, h=h), fill_dict),
    "held": (lambda h: Held({"h": h, "other": h + 1}), rename),
    "nested": (lambda h: {"layers": [h], "other": 1}, fill_nested),
    "state": (State, fill_state),
}
WAYS = {
    "edit": {"fwd_hooks": [("work.input", lambda z: z * 1)]},
    "gradient": {"bwd_hooks": [("work.input", lambda g: None)]},
    "both": {"fwd_hooks": [("work.input", lambda z: z * 1)], "bwd_hooks": [("work.input", lambda g: None)]},
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict | Held):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if isinstance(one, State) else one == other


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # there are no gradients without a graph
def test_a_container_ends_as_without_hooks(case, way, mode) -> None:
    net, x = Net(*CASES[case]), torch.randn(2, 4)
    with mode():
        expected, hooked = net(x), hookline.hook(net).run_with_hooks(x, **WAYS[way])
    assert same(hooked, expected)
    assert hooked[0] is hooked[2] or not hooked[1]


def test_a_dict_of_the_user_is_filled() -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (Work(lambda fc, cache: cache.update({f"k{len(cache)}": fc(cache["h"])})) for _ in "ab")

        def forward(self, cache: dict[str, Tensor]) -> Tensor:
            self.a(cache)
            self.b(cache)
            return cache["k2"]

    net, h = Filling(), torch.randn(2, 4)
    expected, cache = {"h": h}, {"h": h}
    net(expected)
    points = [(f"{name}input", lambda z: z * 1) for name in ("", "a.", "b.")]
    hookline.hook(net).run_with_hooks(cache, fwd_hooks=points)
    assert same(cache, expected)
    assert cache["h"] is h


def test_an_edit_reaches_what_the_module_makes_and_not_what_its_caller_has() -> None:
    net, x = Net(lambda h: {"h": h}, lambda fc, bank: bank.update(k=fc(bank["h"]))), torch.randn(2, 4)
    bank, _, _ = hookline.hook(net).run_with_hooks(x, fwd_hooks=[("work.input", torch.zeros_like)])
    assert torch.equal(bank["h"], x * 2)
    assert torch.equal(bank["k"], net.work.fc(torch.zeros(2, 4)))


def test_an_edit_of_a_container_that_passes_through_warns() -> None:
    net = Net(lambda h: {"h": h}, lambda fc, bank: bank)
    with pytest.warns(NeverFiredWarning, match="output"):
        bank, is_own, _ = hookline.hook(net).run_with_hooks(torch.ones(2), fwd_hooks=[("work.input", lambda z: z * 0)])
    assert is_own
    assert bank["h"].all()


@pytest.mark.parametrize("ends_inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_region_that_runs_again(reentrant, ends_inside) -> None:
    """The list is filled again when the region recomputes, and nothing is left of it if that ends in the middle."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.work = Work(fill_list)

        def body(self, x: Tensor) -> Tensor:
            bank = [x.sin()]
            self.work(bank)
            return bank[-1] if ends_inside else sum(bank).tanh()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x * 2, use_reentrant=reentrant)

    net = Region()
    gradients = []
    for hooks in ([], [("work.input", lambda z: z * 1)]):
        x = torch.ones(2, 4, requires_grad=True)
        hookline.hook(net).run_with_hooks(x, fwd_hooks=hooks).sum().backward()
        gradients.append((x.grad, net.work.fc.weight.grad))
        net.zero_grad()
    assert same(*gradients)
    assert not pass_state.copies


def test_a_container_that_changes_by_another_name_is_refused() -> None:
    net = Net(lambda h: [h], None)
    bank = []
    net.make = lambda h: (bank.append(h), bank)[1]
    net.work.change = lambda fc, given: bank.append(fc(given[0]))
    with pytest.raises(HooklineError, match="another name"):
        hookline.hook(net).run_with_hooks(torch.ones(2, 4), fwd_hooks=[("work.input", lambda z: z * 2)])

"""Modules that are called several times in a forward pass, under two names, or never."""

import pytest
import torch
from networks import Lazy, Twice, fill, zero
from torch import Tensor, nn

import hookline
from hookline import NeverFiredWarning
from hookline.errors import UnavailablePointError


def test_a_module_called_several_times(x) -> None:
    net = hookline.hook(Twice())
    cell = net.module.cell
    _, cache = net.run_with_cache(x)
    assert [name for name in cache if "cell" in name] == [
        *(f"cell.input#{i}" for i in range(3)),
        *(f"cell#{i}" for i in range(3)),
    ]
    assert torch.equal(cache["cell#1"], cell(cell(x)))
    assert torch.equal(cache["cell.output#1"], cache["cell#1"])
    assert len(cache.calls("cell")) == 3
    with pytest.raises(UnavailablePointError, match="'cell#0' to 'cell#2'"):
        cache["cell"]
    calls = []
    for _ in range(2):
        net.run_with_hooks(x, fwd_hooks=[("cell", lambda h, hook: calls.append(hook.call))])
    assert calls == [0, 1, 2, 0, 1, 2]
    out = net.run_with_hooks(x, fwd_hooks=[("cell#1", fill(0))])
    assert torch.equal(out, cell(torch.zeros_like(x)))
    assert "×3" in str(net.plan("cell", input=x))


def test_calls_are_counted_per_forward_inside_a_context(x) -> None:
    net, calls = hookline.hook(Twice()), []
    with net.hooks(fwd_hooks=[("cell", lambda h, hook: calls.append(hook.call)), ("input", lambda h: None)]):
        net(x)
        net.module(x)
    assert calls == [0, 1, 2, 0, 1, 2]


def test_a_hook_may_run_the_model(x) -> None:
    """A run inside a hook has its own hooks and its own counting."""
    net, calls, inside = hookline.hook(Twice()), [], []

    def look(h, hook):
        if inside:
            return
        calls.append(("outer", hook.call))
        if hook.call == 1:
            inside.append(True)
            net.run_with_hooks(x, fwd_hooks=[("cell", lambda h, hook: calls.append(("inner", hook.call)))])
            inside.clear()
            calls.append(("outer again", hook.call))

    net.run_with_hooks(x, fwd_hooks=[("cell", look)])
    inner = [("inner", call) for call in range(3)]
    assert calls == [("outer", 0), ("outer", 1), *inner, ("outer again", 1), ("outer", 2)]


@pytest.mark.parametrize("inside", ["part", "model"])
def test_calls_that_a_hook_makes_are_neither_counted_nor_cached(x, inside) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net, seen, gradients, looking = hookline.hook(module), [], [], []
    x = x.clone().requires_grad_()

    def look(_h, hook) -> None:
        if not looking:
            looking.append(True)
            (module[2] if inside == "part" else module)(x.detach() * 3)
            looking.clear()

    def negative(h):
        seen.append(h)
        return -h

    hooks = [("0", look), ("2#0", negative)]
    _, cache = net.run_with_cache(x, fwd_hooks=hooks, incl_bwd=True, loss_fn=torch.sum)
    own = seen[-1]
    assert torch.equal(own, module(x))
    assert torch.equal(cache["2"], -own)
    assert torch.equal(cache["2#0"], -own)
    assert cache["2_grad"].eq(1).all()
    net.run_with_hooks(x, fwd_hooks=[("0", look)], bwd_hooks=[("2#0", gradients.append)]).sum().backward()
    assert len(gradients) == 1
    _, only = net.run_with_cache(x, names_filter=["2#0"], fwd_hooks=[("0", look)])
    assert torch.equal(only["2#0"], own)


def test_a_module_under_two_names(x) -> None:
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(4, 4))
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    net = hookline.hook(Shared())
    assert "a" in net.hook_dict
    assert "b" not in net.hook_dict, "one module, one point"
    _, cache = net.run_with_cache(x, names_filter=["b", "b.0"])
    assert list(cache) == ["b.0#0", "b.0#1", "b#0", "b#1"]
    assert torch.equal(cache["a#0"], cache["b#0"])
    seen = []
    net.run_with_hooks(x, fwd_hooks=[("b.0", lambda h, hook: seen.append((hook.name, hook.call)))])
    assert seen == [("b.0", 0), ("b.0", 1)]


def test_a_hook_that_never_fires_is_reported(x) -> None:
    net = hookline.hook(Lazy())
    with pytest.warns(NeverFiredWarning, match=r"zero \(networks.py:\d+\).*'unused'.*Linear"):
        net.run_with_hooks(x, fwd_hooks=[("unused", zero)])
    with pytest.warns(NeverFiredWarning, match="'unused'"):
        net.run_with_cache(x, names_filter=["used", "unused"])
    with pytest.warns(NeverFiredWarning, match="2 hooks"):
        net.run_with_hooks(x, fwd_hooks=[("unused", zero)], bwd_hooks=[("unused.input", zero)])
    with pytest.warns(NeverFiredWarning, match="3"):
        net.run_with_hooks(x, fwd_hooks=[("used#2", zero)])
    with (
        pytest.warns(NeverFiredWarning, match="forward pass"),
        net.hooks(fwd_hooks=[("used", zero)]),
    ):
        pass
    net.run_with_cache(x)  # of all points, those that do not fire are just not there


def test_the_warning_points_at_the_users_line(x) -> None:
    net = hookline.hook(Lazy())
    with pytest.warns(NeverFiredWarning) as caught:
        net.run_with_hooks(x, fwd_hooks=[("unused", zero)])
    assert caught[0].filename == __file__


def test_a_model_inside_a_model_counts_for_itself(x) -> None:
    inner = hookline.hook(Twice())

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner.module

        def forward(self, x):
            return self.inner(self.inner(x))

    outer, calls = hookline.hook(Outer()), []
    inner.add_hook("cell", lambda h, hook: calls.append(("inner", hook.call)))
    outer.run_with_hooks(x, fwd_hooks=[("inner.cell", lambda h, hook: calls.append(("outer", hook.call)))])
    inner.reset_hooks()
    assert [call for who, call in calls if who == "outer"] == [0, 1, 2, 3, 4, 5]
    assert [call for who, call in calls if who == "inner"] == [0, 1, 2, 0, 1, 2]


def test_a_module_called_by_itself(x) -> None:
    """Without a forward pass of the whole model there is nothing to count in, except in a context."""
    net, calls = hookline.hook(Twice()), []
    net.add_hook("cell", lambda h, hook: calls.append(hook.call))
    for _ in range(2):
        net.cell(x)
    net(x)
    net.cell(x)
    assert calls == [None, None, 0, 1, 2, None]
    net.reset_hooks()
    net.add_hook("cell#0", fill(1))
    with pytest.raises(hookline.HookError, match="forward pass"):
        net.cell(x)
    net.reset_hooks()
    with net.hooks(fwd_hooks=[("cell#1", fill(1))]):
        assert not net.cell(x).eq(1).all()
        assert net.cell(x).eq(1).all()


def test_a_model_that_calls_itself(x) -> None:
    class Recursive(nn.Module):
        def forward(self, x, depth=2):
            return self(x + 1, depth - 1) if depth else x

    net = hookline.hook(Recursive())
    _, cache = net.run_with_cache(x, names_filter="input")
    assert list(cache) == ["input#0", "input#1", "input#2"]
    assert list(net.run_with_cache(x, names_filter="input#0")[1]) == ["input#0"]
    assert net.run_with_hooks(x, fwd_hooks=[("input#1", fill(0))]).eq(1).all()


def test_counting_goes_on_after_an_error(x) -> None:
    class Fails(Twice):
        def forward(self, x):
            out = super().forward(x)
            if x.sum() > 1e6:
                raise OverflowError
            return out

    net, calls = hookline.hook(Fails()), []
    with net.hooks(fwd_hooks=[("cell", lambda h, hook: calls.append(hook.call))]):
        with pytest.raises(OverflowError):
            net(x + 1e9)
        net(x)
    assert calls == [0, 1, 2, 0, 1, 2]


def test_a_hook_added_by_a_running_hook_is_not_reported(net, x) -> None:
    net.add_hook("fc2", lambda h: net.add_hook("fc1", zero) and None)
    net(x)
    net.reset_hooks()


class Gaps(nn.Module):
    """Calls a cell four times: the second call returns no tensor, and the third is not in the graph."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor, *, is_empty: bool = False) -> Tensor | None:
            return None if is_empty else self.fc(x)

    def __init__(self) -> None:
        super().__init__()
        self.cell = self.Cell()

    def forward(self, x: Tensor) -> Tensor:
        first, _, third = self.cell(x), self.cell(x, is_empty=True), self.cell(x * 2).detach()
        return (first + third + self.cell(x * 3) * 5).sum()


@pytest.mark.parametrize("names", [None, ["cell", "cell.fc"]])
def test_the_number_of_a_call_counts_those_without_a_tensor_or_a_gradient(names) -> None:
    net, x = hookline.hook(Gaps()), torch.randn(2, 3)
    expected = {call: net.run_with_cache(x, names_filter=f"cell#{call}")[1][f"cell#{call}"] for call in (0, 2, 3)}
    if names is None:  # by name, a point without a tensor is an error
        _, cache = net.run_with_cache(x)
        assert [name for name in cache if name.startswith("cell#")] == ["cell#0", "cell#2", "cell#3"]
        assert all(torch.equal(cache[f"cell#{call}"], value) for call, value in expected.items())
    _, cache = net.run_with_cache(x, names_filter=None if names is None else "cell.fc", incl_bwd=True)
    gradients = {
        name: cache[name].unique().tolist() for name in cache if name.startswith("cell.fc#") and "grad" in name
    }
    assert gradients == {"cell.fc#0_grad": [1.0], "cell.fc#2_grad": [5.0]}

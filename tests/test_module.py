"""The verbs, on any network."""

import asyncio
import copy
import pickle
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch
from networks import MLP, has_taps
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

import hookline
from hookline import HookError, HooklineError, InvalidHookError, NeverFiredWarning, UnavailablePointError


@pytest.fixture
def net(mlp):
    return hookline.hook(mlp)


def zero(h: Tensor, hook) -> Tensor:
    return torch.zeros_like(h)


def fill(value: float):
    def edit(h: Tensor) -> Tensor:
        return torch.full_like(h, value)

    return edit


def hook_count(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules())


# Unhooked


def test_unhooked_is_the_bare_module(net, x) -> None:
    assert net.module.forward.__func__ is MLP.forward
    assert hook_count(net.module) == 0
    assert torch.equal(net(x), net.module(x))
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        assert hook_count(net.module) == 2, "the point's module, and the root's input where calls are counted"
        net(x)
    assert hook_count(net.module) == 0


def test_what_is_not_ours_is_the_modules(net) -> None:
    assert net.fc1 is net.module.fc1
    assert list(net.state_dict()) == list(net.module.state_dict())
    assert net.eval() is net
    assert not net.module.training
    assert net.to(torch.float64) is net
    assert net.module.fc1.weight.dtype == torch.float64
    assert "fc1" in dir(net)
    assert "MLP" in repr(net)
    with pytest.raises(AttributeError, match="nonsense"):
        net.nonsense
    assert hookline.hook(net) is net


def test_only_modules_can_be_hooked() -> None:
    with pytest.raises(HooklineError, match=r"takes an nn\.Module, not function"):
        hookline.hook(zero)


# Reading and editing


def test_cache_is_what_flowed(net, x) -> None:
    out, cache = net.run_with_cache(x)
    assert torch.equal(out, net.module(x))
    assert torch.equal(cache["fc1"], net.module.fc1(x))
    assert torch.equal(cache["act"], cache["fc2.input"])
    assert cache["fc1"].requires_grad is False
    assert len(cache) == 8
    assert "fc1.output" in cache
    assert "fc9" not in cache


@pytest.mark.parametrize("point", ["input", "fc1.input", "fc1", "act.input", "act", "fc2.input", "fc2", "output"])
@pytest.mark.parametrize("grad", [True, False, "inference"])
def test_every_edit_takes_effect(net, x, point, grad) -> None:
    def in_place(h):
        h[:, 0] = 5.0

    def through_data(h):
        h.data[:, 0] = 5.0

    def returned(h):
        h = h.clone()
        h[:, 0] = 5.0
        return h

    with torch.inference_mode() if grad == "inference" else torch.set_grad_enabled(grad):
        bare = net(x)
        outs = [net.run_with_hooks(x, fwd_hooks=[(point, edit)]) for edit in (in_place, through_data, returned)]
        same = net.run_with_hooks(x, fwd_hooks=[(point, lambda h: h.clone())])
        read = net.run_with_hooks(x, fwd_hooks=[(point, lambda h: None)])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], bare)
    assert torch.equal(same, bare)
    assert torch.equal(read, bare)


def test_an_edit_of_an_input_is_seen_by_that_module_alone(x) -> None:
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Linear(4, 4)

        def forward(self, x):
            return x + self.mlp(x)

    module = Residual()
    before = x.clone()

    def wipe(h):
        h.zero_()

    out = hookline.hook(module).run_with_hooks(x, fwd_hooks=[("mlp.input", wipe)])
    assert torch.equal(out, x + module.mlp(torch.zeros_like(x)))
    assert torch.equal(x, before), "the caller's tensor was written to"


def test_order_prepend_and_nesting(net, x) -> None:
    seen = []

    def note(tag):
        return lambda h: seen.append(tag)

    net.add_hook("fc1", note("added first"))
    with net.hooks(fwd_hooks=[("fc1", note("outer a")), ("fc1", note("outer b"))]):
        net.add_hook("fc1", note("added inside"))
        net.point("fc1").add_hook(note("prepended"), prepend=True)
        with net.hooks(fwd_hooks=[("fc1", note("inner"))]):
            net(x)
    assert seen == ["prepended", "added first", "outer a", "outer b", "added inside", "inner"]
    net.reset_hooks()


def test_edits_chain_in_order(net, x) -> None:
    hooks = [("act", lambda h: h + 1), ("act", lambda h: h * 2), ("act", lambda h: h - 3)]
    out = net.run_with_hooks(x, fwd_hooks=hooks)
    module = net.module
    assert torch.equal(out, module.fc2((module.act(module.fc1(x)) + 1) * 2 - 3))


def test_contexts_left_out_of_order(net, x) -> None:
    first, second = net.hooks(fwd_hooks=[("fc2", fill(1))]), net.hooks(fwd_hooks=[("fc2", fill(2))])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None) if net(x).eq(2).all() else pytest.fail("inner edit is last")
    assert net(x).eq(2).all()
    second.__exit__(None, None, None)
    assert torch.equal(net(x), net.module(x))


def test_the_result_is_cast(net, x) -> None:
    out = net.run_with_hooks(x, fwd_hooks=[("output", lambda h: h.double() * 0 + 1)])
    assert out.dtype == torch.float32
    assert out.eq(1).all()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2, 2), r"at point 'fc1' returned a tensor of shape \(2, 2\), but the shape there is \(5, 8\)"),
        (True, r"at point 'fc1' returned a bool; it must return None, or a tensor of shape \(5, 8\)"),
        ((torch.zeros(5, 8),), "returned a tuple"),
    ],
)
def test_a_result_that_does_not_fit(net, x, result, message) -> None:
    def bad_hook(h):
        return result

    with pytest.raises(HookError, match=message) as error:
        net.run_with_hooks(x, fwd_hooks=[("fc1", bad_hook)])
    assert "bad_hook (test_module.py:" in str(error.value)
    assert error.value.hook is bad_hook
    assert error.value.point.name == "fc1"


def test_a_shape_changed_in_place_does_not_fit(net, x) -> None:
    with pytest.raises(HookError, match=r"shape \(5, 8, 1\), but the shape there is \(5, 8\)"):
        net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: h.unsqueeze_(-1).mul_(2))])


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([("fc1", 3)], "not callable"),
        ([("fc1",)], r"\(name, hook\) pairs"),
        ("fc1", r"must be a list of \(name, hook\) pairs, not 'fc1'"),
        ({"fc1": zero}, r"\(name, hook\) pairs"),
        ([("fc1", zero, 1)], r"\(name, hook\) pairs"),
        (3, r"\(name, hook\) pairs"),
    ],
)
def test_bad_hooks(net, x, hooks, message) -> None:
    with pytest.raises(InvalidHookError, match=message):
        net.run_with_hooks(x, fwd_hooks=hooks)


# Structures


@dataclass
class Result:
    hidden: Tensor
    score: Tensor


class Structured(nn.Module):
    """Passes its input on in some structure."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, *, hidden, mask=None):
        return self.make(hidden * 1, hidden.sum(-1))


class Outer(nn.Module):
    def __init__(self, make, read) -> None:
        super().__init__()
        self.inner, self.read = Structured(make), read

    def forward(self, x):
        return self.read(self.inner(mask=torch.ones(2), hidden=x))


STRUCTURES = {
    "tuple": (lambda h, s: (h, s), lambda out: out[0].sum() + out[1].sum(), "[1]"),
    "list": (lambda h, s: [h, s], lambda out: out[0].sum() + out[1].sum(), "[1]"),
    "nested": (lambda h, s: (None, {"a": (h, s)}), lambda out: sum(t.sum() for t in out[1]["a"]), "[1][a][1]"),
    "dict": (lambda h, s: {"h": h, "s": s}, lambda out: out["h"].sum() + out["s"].sum(), "[s]"),
    "dataclass": (Result, lambda out: out.hidden.sum() + out.score.sum(), "[score]"),
    "model output": (
        lambda h, s: BaseModelOutput(last_hidden_state=h, hidden_states=(s,)),
        lambda out: out.last_hidden_state.sum() + out[1][0].sum(),
        "[hidden_states][0]",
    ),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_and_keyword_inputs(x, kind) -> None:
    make, read, second = STRUCTURES[kind]
    net = hookline.hook(Outer(make, read))
    _, cache = net.run_with_cache(x, names_filter=["inner.input", "inner.input[mask]", "inner", f"inner{second}"])
    assert torch.equal(cache["inner.input"], x), "the first parameter, though the caller passed the mask first"
    assert torch.equal(cache["inner.input[mask]"], torch.ones(2))
    assert torch.equal(cache["inner"], x)
    assert torch.equal(cache[f"inner{second}"], x.sum(-1))
    assert net.run_with_hooks(x, fwd_hooks=[("inner.input", fill(2))]) == 2 * x.numel() * 2
    wiped = net.run_with_hooks(x, fwd_hooks=[("inner", fill(0))])
    assert torch.isclose(wiped, x.sum())
    both = net.run_with_hooks(x, fwd_hooks=[("inner", fill(0)), (f"inner{second}", fill(0))])
    assert both == 0


class Silent(nn.Module):
    def forward(self, x):
        return None


class WithSilent(nn.Module):
    def __init__(self):
        super().__init__()
        self.silent, self.fc = Silent(), nn.Linear(4, 2)

    def forward(self, x):
        self.silent("no tensor")
        return self.fc(x)


def test_a_module_that_passes_no_tensor(x) -> None:
    net = hookline.hook(WithSilent())
    _, cache = net.run_with_cache(x)
    assert "silent" not in cache
    for name in ("silent", "silent.input"):
        with pytest.raises(UnavailablePointError, match=f"nothing can be cached at '{name}'.*with no tensor in it"):
            net.run_with_cache(x, names_filter=name)
        for hooks in ({"fwd_hooks": [(name, zero)]}, {"bwd_hooks": [(name, zero)]}):
            with pytest.raises(HookError, match=f"at point '{name}' has nothing to work on"):
                net.run_with_hooks(x, **hooks)


# Called several times, under two names, or never


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.cell(x)
        return x


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
    with pytest.raises(UnavailablePointError, match="fired 3 times in this run: ask for 'cell#0' to 'cell#2'"):
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
    net, calls = hookline.hook(Twice()), []
    other = hookline.hook(net.module)

    def look(h, hook):
        calls.append(("outer", hook.call))
        if hook.call == 1 and len(calls) < 10:
            inner = torch.zeros(1, 4)
            other.module.cell.register_forward_hook(lambda *_: None).remove()
            taps_off = hookline.taps.active.set(())
            try:
                other.run_with_hooks(inner, fwd_hooks=[("cell", lambda h, hook: calls.append(("inner", hook.call)))])
            finally:
                hookline.taps.active.reset(taps_off)
            calls.append(("outer again", hook.call))

    net.run_with_hooks(x, fwd_hooks=[("cell", look)])
    assert calls == [
        ("outer", 0),
        ("outer", 1),
        *(("inner", i) for i in range(3)),
        ("outer again", 1),
        ("outer", 2),
    ]


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


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def test_a_hook_that_never_fires_is_reported(x) -> None:
    net = hookline.hook(Lazy())
    with pytest.warns(
        NeverFiredWarning, match=r"zero \(test_module.py:\d+\) at 'unused': its module \(Linear\) was not"
    ):
        net.run_with_hooks(x, fwd_hooks=[("unused", zero)])
    with pytest.warns(NeverFiredWarning, match="the cache at 'unused'"):
        net.run_with_cache(x, names_filter=["used", "unused"])
    with pytest.warns(NeverFiredWarning, match="2 hooks never fired"):
        net.run_with_hooks(x, fwd_hooks=[("unused", zero)], bwd_hooks=[("unused.input", zero)])
    with pytest.warns(NeverFiredWarning, match="was not called for the 3. time"):
        net.run_with_hooks(x, fwd_hooks=[("used#2", zero)])
    with (
        pytest.warns(NeverFiredWarning, match="no forward pass of the model ran"),
        net.hooks(fwd_hooks=[("used", zero)]),
    ):
        pass
    net.run_with_cache(x)  # of all points, those that do not fire are just not there


def test_the_warning_points_at_the_users_line(x) -> None:
    net = hookline.hook(Lazy())
    with pytest.warns(NeverFiredWarning) as caught:
        net.run_with_hooks(x, fwd_hooks=[("unused", zero)])
    assert caught[0].filename == __file__


def test_a_standing_hook_that_never_fires_is_reported_once(x) -> None:
    net = hookline.hook(Lazy())
    net.add_hook("unused", zero)
    with pytest.warns(NeverFiredWarning, match="at 'unused'"):
        net(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x)
    net.reset_hooks()


# Standing hooks


def test_standing_and_permanent_hooks(net, x) -> None:
    undo = net.add_hook("output", fill(1))
    assert net(x).eq(1).all()
    assert net.module(x).eq(1).all(), "also when the module is called directly"
    net.add_hook("output", fill(2), is_permanent=True)
    assert net(x).eq(2).all()
    net.reset_hooks()
    assert net(x).eq(2).all(), "a permanent hook survives a reset"
    undo()  # already gone: nothing to undo
    net.remove_all_hook_fns()
    assert net(x).eq(2).all()
    net.remove_all_hook_fns(including_permanent=True)
    assert hook_count(net.module) == 0


def test_undo_removes_just_that_hook(net, x) -> None:
    undo = net.add_hook("fc?", lambda h: h + 1)
    net.add_hook("output", lambda h: h * 0)
    undo()
    assert net(x).eq(0).all()
    assert net.hook_dict["fc1"].fwd_hooks == []
    assert len(net.hook_dict["output"].fwd_hooks) == 1
    net.reset_hooks()


def test_a_context_does_not_remove_standing_hooks(net, x) -> None:
    with net.hooks(fwd_hooks=[("output", fill(1))], reset_hooks_end=False):
        assert net(x).eq(1).all()
    assert net(x).eq(1).all()
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        net(x)
    assert net(x).eq(1).all()
    net.reset_hooks()
    assert hook_count(net.module) == 0


def test_directions_are_removed_apart(net, x) -> None:
    net.add_hook("fc1", zero)
    net.add_hook("fc1", zero, dir="bwd")
    net.reset_hooks(direction="fwd")
    assert net.hook_dict["fc1"].fwd_hooks == []
    assert net.hook_dict["fc1"].bwd_hooks == [zero]
    net.hook_dict["fc1"].remove_hooks("bwd")
    assert not net.hook_dict["fc1"].has_hooks()
    with pytest.raises(
        HooklineError, match='dir must be "fwd" or "bwd", not "sideways"'.replace('"sideways"', "'sideways'")
    ):
        net.add_hook("fc1", zero, dir="sideways")


def test_ctx_lasts_until_cleared(net, x) -> None:
    def remember(h, hook):
        hook.ctx["mean"] = h.mean()

    net.run_with_hooks(x, fwd_hooks=[("fc1", remember)])
    assert "mean" in net.hook_dict["fc1"].ctx
    net.reset_hooks()
    assert net.hook_dict["fc1"].ctx == {}
    net.run_with_hooks(x, fwd_hooks=[("fc1.output", remember)], clear_contexts=True)
    assert net.hook_dict["fc1"].ctx == {}


def test_two_wrappers_of_one_module_share_its_hooks(net, x) -> None:
    net.add_hook("output", fill(1))
    again = hookline.hook(net.module)
    assert again(x).eq(1).all()
    again.reset_hooks()
    assert not net(x).eq(1).all()


# A cached tensor never changes


class InPlace(nn.Module):
    """Writes to its own activations in every way models do."""

    def __init__(self):
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(5, 4))

    def forward(self, x):
        h = self.fc1(x)
        F.relu_(h)
        y = self.fc2(h)
        y.add_(h)
        self.state.copy_(y.detach())
        z = self.relu(y) + 0
        z[:, 0] = 7.0
        return z


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_of_the_model(x, mode) -> None:
    module = InPlace()
    net = hookline.hook(module)
    with mode():
        out, cache = net.run_with_cache(x)
        assert torch.equal(cache["fc1"], module.fc1(x))
        assert cache["fc1"].lt(0).any()
        assert torch.equal(cache["fc2.input"], module.fc1(x).relu())
        assert torch.equal(cache["fc2"], module.fc2(cache["fc2.input"]))
        assert torch.equal(cache["relu.input"], cache["fc2"] + cache["fc2.input"])
        assert torch.equal(cache["relu"], cache["relu.input"].relu())
        kept = {name: tensor.clone() for name, tensor in cache.items()}
        out.zero_()  # the caller's own writes, and those of a later run
        net(x + 1)
        x.zero_()
        assert all(torch.equal(cache[name], tensor) for name, tensor in kept.items())


def test_writes_of_hooks(net, x) -> None:
    def double(h):
        h.mul_(2)

    stored = []
    hooks = [("fc1", stored.append), ("fc1", double), ("fc1", stored.append), ("act.input", double)]
    with net.hooks(fwd_hooks=hooks):
        _, cache = net.run_with_cache(x)
    plain = net.module.fc1(x)
    assert torch.equal(stored[0], plain), "what a hook was given does not change under it either"
    assert torch.equal(stored[1], 2 * plain)
    assert torch.equal(cache["fc1"], 2 * plain)
    assert torch.equal(cache["act.input"], 4 * plain)


def test_a_cache_holds_what_flowed_out_though_edited_by_a_later_hook(net, x) -> None:
    """The order of registration does not matter to a cache: it records what leaves the point."""
    net.add_hook("fc1", lambda h: h * 0, prepend=False)
    _, cache = net.run_with_cache(x)
    assert cache["fc1"].eq(0).all()
    assert cache["act.input"].eq(0).all()
    net.reset_hooks()


def allocated(work) -> int:
    """Bytes that torch allocates during `work`."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return sum(
        max(event.self_device_memory_usage, 0) + max(event.self_cpu_memory_usage, 0) for event in profile.events()
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # the profiler's own
def test_tensors_nobody_writes_to_are_not_copied() -> None:
    net, x = hookline.hook(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])), torch.randn(512, 256)
    with torch.no_grad():
        kept = []
        bare = allocated(lambda: kept.append(net(x)))
        cached = allocated(lambda: kept.append(net.run_with_cache(x)))
        hooked = allocated(lambda: kept.append(net.run_with_hooks(x, fwd_hooks=[("*", lambda h: None)])))
    one = x.nbytes
    assert bare >= 4 * one
    assert cached - bare < one, "a copy of any activation would show"
    assert hooked - bare < one
    cache = kept[1][1]
    assert cache.nbytes == 5 * one, "the input and four outputs, though ten points name them"


# Backward


def test_gradients_of_inputs_and_outputs(net, x) -> None:
    seen = {}

    def keep(grad, hook):
        seen[hook.name] = grad

    loss = net.run_with_hooks(x, bwd_hooks=[("*", keep)]).pow(2).sum()
    assert seen == {}
    loss.backward()
    h = net.module.fc1(x).detach().requires_grad_()
    a = net.module.act(h)
    a.retain_grad()
    y = net.module.fc2(a)
    y.retain_grad()
    y.pow(2).sum().backward()
    assert torch.allclose(seen["fc1"], h.grad)
    assert torch.allclose(seen["act.input"], h.grad)
    assert torch.allclose(seen["act"], a.grad)
    assert torch.allclose(seen["fc2.input"], a.grad)
    assert torch.allclose(seen["output"], y.grad)
    assert torch.allclose(seen["fc1.input"], h.grad @ net.module.fc1.weight)
    assert seen["input"].shape == x.shape
    assert not x.requires_grad


def replace_with_ones(grad):
    return torch.ones_like(grad)


def write_ones(grad):
    grad.fill_(1.0)


def ones_in_a_tuple(grad):
    return (torch.ones_like(grad),)


@pytest.mark.parametrize("edit", [replace_with_ones, write_ones, ones_in_a_tuple])
@pytest.mark.parametrize("point", ["fc1", "act.input", "act", "fc2.input"])
def test_a_gradient_can_be_replaced(net, x, edit, point) -> None:
    net.run_with_hooks(x, bwd_hooks=[(point, edit)]).sum().backward()
    bias = net.module.fc1.bias
    h = net.module.fc1(x).detach().requires_grad_()
    if point in ("fc1", "act.input"):
        expected = torch.full((8,), 5.0)
    else:
        net.module.act(h).sum().backward()
        expected = h.grad.sum(0)
    assert torch.allclose(bias.grad, expected)


def test_backward_hooks_fire_in_order_and_chain(net, x) -> None:
    seen = []

    def note(tag):
        def hook(grad):
            seen.append((tag, grad[0, 0].item()))
            return grad * 2

        return hook

    net.add_hook("output", note("a"), dir="bwd")
    with net.hooks(bwd_hooks=[("output", note("b"))]):
        net.run_with_hooks(x, bwd_hooks=[("output", note("c"))]).sum().backward()
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 4.0)]
    net.reset_hooks()


@pytest.mark.parametrize("order", ["in_place first", "returned first", "backward only"])
@pytest.mark.parametrize("point", ["fc1", "act", "fc2.input", "input"])
def test_forward_and_backward_hooks_on_one_point(net, x, order, point) -> None:
    seen = []

    def in_place(h):
        h.mul_(2)

    def returned(h):
        return h + 1

    forward = {"in_place first": [in_place, returned], "returned first": [returned, in_place], "backward only": []}
    fwd_hooks = [(point, hook) for hook in forward[order]]
    out = net.run_with_hooks(x, fwd_hooks=fwd_hooks, bwd_hooks=[(point, seen.append)])
    out.sum().backward()

    value = net.run_with_cache(x)[1][point]
    if order == "in_place first":
        value = value * 2 + 1
    elif order == "returned first":
        value = (value + 1) * 2
    value.requires_grad_()
    rest = {
        "fc1": lambda v: net.module.fc2(net.module.act(v)),
        "act": net.module.fc2,
        "fc2.input": net.module.fc2,
        "input": net.module,
    }
    expected_out = rest[point](value)
    expected_out.sum().backward()
    assert torch.allclose(out, expected_out)
    assert torch.allclose(seen[0], value.grad), "the gradient of what flowed out, after the edits"


def test_a_gradient_before_an_in_place_op_of_the_model(x) -> None:
    module, seen = InPlace(), []
    hookline.hook(module).run_with_hooks(x, bwd_hooks=[("fc1", seen.append)]).sum().backward()
    h = module.fc1(x).detach().requires_grad_()
    g = h.clone().relu_()
    z = (module.fc2(g) + g).relu()
    z[:, 1:].sum().backward()
    assert torch.allclose(seen[0], h.grad)


def test_incl_bwd(net, x) -> None:
    out, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=lambda out: out.pow(2).sum())
    assert torch.allclose(cache["output_grad"], 2 * out)
    assert torch.allclose(cache["fc2.input_grad"], 2 * out @ net.module.fc2.weight)
    assert torch.equal(cache["fc1.output_grad"], cache["fc1_grad"])
    assert all(parameter.grad is None for parameter in net.parameters())
    _, cache = net.run_with_cache(x, names_filter="fc1")
    with pytest.raises(UnavailablePointError, match="no gradient was cached for 'fc1': ask with incl_bwd=True"):
        cache["fc1_grad"]


def test_incl_bwd_of_frozen_parameters_and_repeated_modules(x) -> None:
    net = hookline.hook(Twice())
    net.requires_grad_(False)
    _, cache = net.run_with_cache(x, names_filter="cell", incl_bwd=True, loss_fn=torch.sum)
    weight = net.module.cell.weight
    assert list(cache) == ["cell#0", "cell#1", "cell#2", "cell#0_grad", "cell#1_grad", "cell#2_grad"]
    assert cache["cell#2_grad"].eq(1).all()
    assert torch.allclose(cache["cell#0_grad"], torch.ones(5, 4) @ weight @ weight)


@dataclass
class WithLoss:
    loss: Tensor


def test_incl_bwd_takes_the_models_own_loss(x) -> None:
    class Losing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return WithLoss(self.fc(x).sum())

    _, cache = hookline.hook(Losing()).run_with_cache(x, incl_bwd=True)
    assert cache["fc_grad"].eq(1).all()


def test_incl_bwd_says_what_it_lacks(net, x) -> None:
    with pytest.raises(HooklineError, match=r"needs one number to differentiate, but has a tensor of shape \(5, 3\)"):
        net.run_with_cache(x, incl_bwd=True)
    with pytest.raises(HooklineError, match="gradients, but they are switched off"), torch.no_grad():
        net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    with pytest.raises(HooklineError, match="no gradient path"):
        net.run_with_cache(x, incl_bwd=True, loss_fn=lambda out: out.sum().detach())


def test_a_backward_hook_that_cannot_fire_is_reported(net, x) -> None:
    with torch.no_grad(), pytest.warns(NeverFiredWarning, match="at 'fc1': gradients are switched off"):
        net.run_with_hooks(x, bwd_hooks=[("fc1", zero)])
    embedding = hookline.hook(nn.Embedding(3, 2))
    with pytest.warns(NeverFiredWarning, match=r"its dtype torch.int64 has no gradient"):
        embedding.run_with_hooks(torch.tensor([1]), bwd_hooks=[("input", zero)])


def test_a_forward_inside_a_backward_is_hooked_like_any_other(net, x) -> None:
    outs = []
    loss = net(x).sum()
    handle = loss.register_hook(lambda grad: outs.append(net(x)))
    with net.hooks(fwd_hooks=[("output", fill(1))]):
        loss.backward()
    handle.remove()
    assert outs[0].eq(1).all()


def test_a_backward_inside_a_forward_hook(x) -> None:
    net, calls = hookline.hook(Twice()), []

    def differentiate(h, hook):
        torch.autograd.grad(h.sum(), net.module.cell.weight, retain_graph=True)
        calls.append(hook.call)

    net.run_with_hooks(x, fwd_hooks=[("cell", differentiate)], bwd_hooks=[("cell", lambda grad: None)])
    assert calls == [0, 1, 2]


def test_a_bad_gradient(net, x) -> None:
    loss = net.run_with_hooks(x, bwd_hooks=[("fc1", lambda grad: grad[:1])]).sum()
    with pytest.raises(HookError, match=r"returned a tensor of shape \(1, 8\), but the shape there is \(5, 8\)"):
        loss.backward()


# Whatever is raised


class Boom(nn.Module):
    def forward(self, x):
        raise OSError("in the model")


def raise_in_hook(h):
    raise ZeroDivisionError("in the hook")


def interrupt(h):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("hook", "expected"), [(raise_in_hook, HookError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("verb", ["run_with_hooks", "contexts", "backward"])
def test_nothing_is_left_after_an_error(net, x, hook, expected, verb) -> None:
    hooks = [("fc1", lambda h: h), ("act", hook)]
    bare = net(x)

    def nested():
        with net.hooks(fwd_hooks=hooks[:1]), net.hooks(fwd_hooks=hooks[1:]):
            net.run_with_cache(x)

    works = {
        "run_with_hooks": lambda: net.run_with_hooks(x, fwd_hooks=hooks),
        "contexts": nested,
        "backward": lambda: net.run_with_hooks(x, bwd_hooks=hooks).sum().backward(),
    }
    with pytest.raises(expected):
        works[verb]()
    assert hook_count(net.module) == 0
    assert torch.equal(net(x), bare)
    assert torch.equal(net.run_with_cache(x)[0], bare)


def test_an_error_of_a_hook_names_it(net, x) -> None:
    with pytest.raises(
        HookError, match=r"raise_in_hook .* at point 'fc1' raised ZeroDivisionError: in the hook"
    ) as error:
        net.run_with_hooks(x, fwd_hooks=[("fc1", raise_in_hook)])
    assert isinstance(error.value.original_error, ZeroDivisionError)
    assert error.value.__cause__ is error.value.original_error


def test_an_error_of_the_model_passes_as_it_is(x) -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), Boom()))
    with pytest.raises(OSError, match="in the model"):
        net.run_with_cache(x)
    assert hook_count(net.module) == 0


def test_a_bad_name_in_the_middle_attaches_nothing(net, x) -> None:
    with pytest.raises(KeyError):
        net.run_with_hooks(x, fwd_hooks=[("fc1", zero), ("nope", zero), ("fc2", zero)])
    with pytest.raises(KeyError):
        net.add_hook(["fc1", "nope"], zero)
    with pytest.raises(InvalidHookError):
        net.add_hook(["fc1", "fc2"], 3)
    assert hook_count(net.module) == 0


def test_an_error_while_attaching_attaches_nothing(net, x, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(net.module.fc2, "register_forward_hook", refuse)
    with pytest.raises(MemoryError):
        net.run_with_cache(x)
    assert hook_count(net.module) == 0


# Threads and tasks


def test_threads_do_not_see_each_other(x) -> None:
    module = MLP()
    net = hookline.hook(module)
    with torch.no_grad():
        inner = module.act(module.fc1(x))
        expected = [module.fc2(inner + tag) for tag in range(8)]
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(tag: int) -> None:
        start.wait()
        with torch.no_grad():
            for turn in range(200):
                with net.hooks(fwd_hooks=[("act", lambda h: h + tag)]):
                    out, cache = net.run_with_cache(x, names_filter=["act", "fc1"] if turn % 2 else None)
                if not (torch.equal(out, expected[tag]) and torch.equal(cache["act"], inner + tag)):
                    failures.append(f"thread {tag}, turn {turn}")

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hook_count(module) == 0


def test_a_bare_run_beside_a_hooked_one(net, x) -> None:
    bare, results = net(x), []
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        thread = threading.Thread(target=lambda: results.append(net(x)))
        thread.start()
        thread.join()
        assert not torch.equal(net(x), bare)
    assert torch.equal(results[0], bare)


def test_tasks_do_not_see_each_other(net, x) -> None:
    async def work(value: float) -> bool:
        with net.hooks(fwd_hooks=[("output", fill(value))]):
            await asyncio.sleep(0)
            good = net(x).eq(value).all()
            await asyncio.sleep(0)
            return bool(good and net(x).eq(value).all())

    async def main() -> list[bool]:
        return await asyncio.gather(*(work(i) for i in range(20)))

    assert all(asyncio.run(main()))


# Modes, copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(x, dtype) -> None:
    net = hookline.hook(MLP().to(dtype))
    out, cache = net.run_with_cache(x.to(dtype))
    assert torch.equal(out, net.module(x.to(dtype)))
    assert {tensor.dtype for tensor in cache.values()} == {dtype}
    _, half = net.run_with_cache(x.to(dtype), dtype=torch.float32)
    assert {tensor.dtype for tensor in half.values()} == {torch.float32}


def test_autocast(net, x) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, cache = net.run_with_cache(x)
        edited = net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: torch.ones_like(h, dtype=torch.float32))])
    assert out.dtype == cache["fc1"].dtype == edited.dtype == torch.bfloat16


def test_training_mode_and_requires_grad_are_left_alone(net, x) -> None:
    net.train()
    net.module.fc1.weight.requires_grad_(False)
    net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    assert net.module.training
    assert not net.module.fc1.weight.requires_grad
    assert net.module.fc2.weight.requires_grad


def test_copies_and_pickles(net, x) -> None:
    net.run_with_cache(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.copy(net)):
        assert torch.equal(other(x), net(x))
        assert torch.equal(other.run_with_hooks(x, fwd_hooks=[("output", fill(1))]), torch.ones(5, 3))
        assert hook_count(other.module) == 0
    deep = copy.deepcopy(net)
    assert deep.module is not net.module
    deep.add_hook("output", fill(1))
    assert not net(x).eq(1).all()
    deep.reset_hooks()


def test_a_model_with_hooks_refuses_to_be_copied(net, x) -> None:
    net.add_hook("fc1", zero)
    for act in (lambda: copy.deepcopy(net), lambda: pickle.dumps(net), lambda: copy.deepcopy(net.module)):
        with pytest.raises(HooklineError, match="cannot be copied or pickled while hooks are on it"):
            act()
    net.reset_hooks()


# Other people's hooks


def test_other_peoples_hooks_stay_and_see_what_they_should(net, x) -> None:
    module, seen = net.module, []
    handles = [
        module.fc1.register_forward_hook(lambda m, i, o: seen.append(("first", o.clone()))),
        module.fc1.register_forward_hook(lambda m, i, o: seen.append(("second", o.clone()))),
        module.act.register_forward_pre_hook(lambda m, i: seen.append(("pre", i[0].clone()))),
    ]
    order = list(module.fc1._forward_hooks)
    net.run_with_hooks(x, fwd_hooks=[("fc1", fill(3)), ("act.input", lambda h: h + 1)])
    assert [tag for tag, _ in seen] == ["first", "second", "pre"]
    assert seen[0][1].eq(3).all()
    assert seen[1][1].eq(3).all()
    assert seen[2][1].eq(4).all()
    assert list(module.fc1._forward_hooks) == order
    for handle in handles:
        handle.remove()


def test_a_cache_holds_what_other_peoples_hooks_changed(net, x) -> None:
    module = net.module
    handles = [
        module.fc1.register_forward_hook(lambda m, i, o: o * 2),
        module.act.register_forward_pre_hook(lambda m, i: (i[0] + 1,)),
    ]
    out, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    assert torch.equal(cache["act.input"], cache["fc1"] + 1)
    assert torch.equal(out, module.fc2(cache["act"]))
    assert torch.allclose(cache["fc1_grad"], cache["act.input_grad"])
    for handle in handles:
        handle.remove()
    assert torch.equal(cache["fc1"], 2 * module.fc1(x))


def test_other_peoples_backward_hooks(net, x) -> None:
    seen, ours = [], []
    handle = net.module.fc2.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0].clone(), go[0].clone())))
    hooks = [("fc2.input", ours.append), ("fc2", ours.append)]
    net.run_with_hooks(x, bwd_hooks=hooks, fwd_hooks=[("fc2", lambda h: h * 3)]).sum().backward()
    handle.remove()
    assert torch.equal(ours[0], torch.ones(5, 3)), "ours: the gradient of what flows out of the point"
    assert torch.allclose(ours[1], seen[0][0])


# The cache, the plan, stopping early


def test_cache_options(net) -> None:
    x = torch.randn(1, 4)
    _, cache = net.run_with_cache(x, remove_batch_dim=True)
    assert cache["fc1"].shape == (8,)
    assert not cache.has_batch_dim
    assert cache.remove_batch_dim() is cache
    _, wide = net.run_with_cache(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"needs a batch of one, but 'input' has shape \(2, 4\)"):
        wide.remove_batch_dim()
    assert wide.to(torch.float64)["fc1"].dtype == torch.float64
    text = repr(wide)
    assert "ActivationCache: 8 activations, " in text
    assert "fc1        [2, 8] float32" in text


def test_cache_errors(net, x) -> None:
    _, cache = net.run_with_cache(x, names_filter="fc1")
    with pytest.raises(hookline.UnknownPointError, match="Did you mean 'fc1'"):
        cache["fc12"]
    with pytest.raises(UnavailablePointError, match="'act' is a point of this model but is not in this cache"):
        cache["act"]


def test_stop_early(net, x) -> None:
    ran = []
    handle = net.module.fc2.register_forward_hook(lambda *_: ran.append(1))
    assert list(net.cache(x, names_filter=["fc1", "fc1.input"], stop_early=True)) == ["fc1.input", "fc1"]
    assert ran == []
    assert list(net.cache(x, names_filter="fc1")) == ["fc1"]
    assert ran == [1]
    handle.remove()


def test_plan(net, x) -> None:
    plan = net.plan(names_filter=["fc1", "act"], fwd_hooks=[("fc2", zero)], input=x)
    assert [(row.name, row.use, row.shape) for row in plan] == [
        ("fc2", "hook", (5, 3)),
        ("fc1", "cache", (5, 8)),
        ("act", "cache", (5, 8)),
    ]
    assert plan.nbytes == 2 * 5 * 8 * 4
    assert "fc1" in str(plan)
    assert net.plan("fc1")[0].shape is None
    assert len(net.points()) == 8
    assert hookline.hook(Lazy()).plan("unused", input=x)[0].calls == 0
    with pytest.raises(KeyError):
        net.plan("nope")


def test_a_plan_changes_nothing() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    net, x = hookline.hook(module), torch.randn(5, 4)
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert net.plan(input=x)[0].shape == (5, 4)
    assert net.plan(input=(x,))[0].shape == (5, 4)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_no_module_is_kept_alive(x) -> None:
    import gc
    import weakref

    module = MLP()
    alive = weakref.ref(module)
    net = hookline.hook(module)
    net.run_with_cache(x)
    net.add_hook("fc1", zero)
    del module, net
    gc.collect()
    assert alive() is None
    assert not any(has_taps(m) for m in hookline.taps._taps)

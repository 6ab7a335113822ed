"""Reading and editing at every kind of point, and a new kind of action."""

from dataclasses import dataclass

import pytest
import torch
from networks import MLP, fill, zero
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import hookline
from hookline import HookError, HooklineError
from hookline.engine import HookPoint, PointAction, Record, Run
from hookline.errors import InvalidHookError, UnavailablePointError


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


def test_hooks_and_cache_in_one_run(net, x) -> None:
    out, cache = net.run_with_cache(
        x, names_filter="act", fwd_hooks=[("fc1", lambda h: 2 * h)], bwd_hooks=[("act", zero)]
    )
    assert torch.equal(cache["act"], net.module.act(2 * net.module.fc1(x)))
    out.sum().backward()
    assert net.module.fc1.bias.grad.eq(0).all()


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
        (torch.zeros(2, 2), r"\(2, 2\).*\(5, 8\)"),
        (True, r"bool.*\(5, 8\)"),
        ((torch.zeros(5, 8),), "tuple"),
    ],
)
def test_a_result_that_does_not_fit(net, x, result, message) -> None:
    def bad_hook(h):
        return result

    with pytest.raises(HookError, match=message) as error:
        net.run_with_hooks(x, fwd_hooks=[("fc1", bad_hook)])
    assert "bad_hook (test_actions.py:" in str(error.value)
    assert error.value.hook is bad_hook
    assert error.value.point.name == "fc1"


def test_a_shape_changed_in_place_does_not_fit(net, x) -> None:
    with pytest.raises(HookError, match=r"\(5, 8, 1\).*\(5, 8\)"):
        net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: h.unsqueeze_(-1).mul_(2))])


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([("fc1", 3)], "not callable"),
        ([("fc1",)], r"\(name, hook\) pairs"),
        ("fc1", r"\(name, hook\) pairs.*'fc1'"),
        ({"fc1": zero}, r"\(name, hook\) pairs"),
        ([("fc1", zero, 1)], r"\(name, hook\) pairs"),
        (3, r"\(name, hook\) pairs"),
    ],
)
def test_bad_hooks(net, x, hooks, message) -> None:
    with pytest.raises(InvalidHookError, match=message):
        net.run_with_hooks(x, fwd_hooks=hooks)


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
        with pytest.raises(UnavailablePointError, match=f"'{name}'.*tensor"):
            net.run_with_cache(x, names_filter=name)
        for hooks in ({"fwd_hooks": [(name, zero)]}, {"bwd_hooks": [(name, zero)]}):
            with pytest.raises(HookError, match=f"'{name}'"):
                net.run_with_hooks(x, **hooks)


def test_the_model_does_not_swallow_a_hooks_error(x) -> None:
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.fc(x)
            except Exception:
                return x

    def fail(h):
        raise ZeroDivisionError

    net = hookline.hook(Careless())
    with pytest.raises(HookError, match="ZeroDivisionError"):
        net.run_with_hooks(x, fwd_hooks=[("fc", fail)])
    plain = hookline.hook(MLP())
    with plain.hooks(fwd_hooks=[("fc1", fail)]), pytest.raises(HookError):
        plain(x)  # caught by the user, inside the context: no more to be said


@pytest.mark.parametrize("grad", [True, False])
def test_changes_of_shape_in_place_do_not_go_unnoticed(x, grad) -> None:
    net = hookline.hook(nn.Linear(4, 5))
    with torch.set_grad_enabled(grad):
        with pytest.raises(HookError, match=r"shape \(1, 5, 5\)"):
            net.run_with_hooks(x, fwd_hooks=[("output", lambda h: h.unsqueeze_(0))])
        transposed = net.run_with_hooks(x, fwd_hooks=[("output", lambda h: h.t_())])
        assert torch.equal(transposed, net(x).T)
    detached = net.run_with_hooks(x, fwd_hooks=[("output", lambda h: h.detach_())])
    assert not detached.requires_grad


def test_a_keyword_only_argument_behind_varargs() -> None:
    class Inner(nn.Module):
        def forward(self, q, *rest, mask=None):
            return q * mask + sum(rest)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, q, a, b, m):
            return self.inner(q, a, b, mask=m)

    q, a, b, m = (torch.full((2,), float(i)) for i in range(4))
    net = hookline.hook(Outer())
    _, cache = net.run_with_cache(q, a, b, m, names_filter=["inner.input[mask]", "inner.input[1]", "inner.input[2]"])
    assert [tensor[0].item() for tensor in cache.values()] == [3, 1, 2]
    out = net.run_with_hooks(q + 1, a, b, m, fwd_hooks=[("inner.input[mask]", fill(10))])
    assert out.eq(13).all()


def test_structures_of_torch_keep_their_type(x) -> None:
    class Max(nn.Module):
        def forward(self, x):
            return x.max(1)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.max = Max()

        def forward(self, x):
            return self.max(x).values

    assert hookline.hook(Reader()).run_with_hooks(x, fwd_hooks=[("max", fill(7))]).eq(7).all()


def test_parts_of_a_model_output_by_number(x) -> None:
    class Model(nn.Module):
        def forward(self, x):
            return BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))

    out = hookline.hook(Model()).run_with_hooks(x, fwd_hooks=[("output[0]", fill(7)), ("output[1][1]", fill(8))])
    assert out.last_hidden_state.eq(7).all()
    assert out[0] is out.last_hidden_state
    assert out.hidden_states[1].eq(8).all()
    assert torch.equal(out.hidden_states[0], x)


def test_a_misspelt_option_does_not_reach_a_model_that_takes_anything(x) -> None:
    class Anything(nn.Module):
        def forward(self, x, **kwargs):
            return x

    net = hookline.hook(Anything())
    with pytest.raises(HooklineError, match=r"'fwd_hook'.*'fwd_hooks'"):
        net.run_with_hooks(x, fwd_hook=[])
    with pytest.raises(HooklineError, match="'names_filter'"):
        net.run_with_cache(x, names_filters="input")
    with pytest.raises(HooklineError, match="'incl_bwd'"):
        net.cache(x, incl_bwd=True)
    assert torch.equal(net.run_with_hooks(x, labels=3), x)


class CountCalls(PointAction):
    """Counts how often the model computes the value of its point."""

    only_reads, is_replayed, phase = True, False, Record.phase

    def __init__(self, point: HookPoint) -> None:
        super().__init__(point)
        self.calls = 0

    def act(self, value):
        self.calls += 1
        return value


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(lambda h: self.fc(self.fc(h)), x, use_reentrant=False)


def test_a_new_kind_of_action_counts_calls_by_the_model(x) -> None:
    """Not those of one call only, those by hooks, and those of a region that recomputes."""
    module = Repeating()
    model = hookline.hook(module)
    counters = [CountCalls(model.point(name)) for name in ("fc", "fc#1", "output", "fc.input")]

    def calls_the_model(h):
        module.fc(h)
        return h * 2

    x = x.clone().requires_grad_()
    with model.hooks([("output", calls_the_model)]), Run(module, counters):
        model(x).sum().backward()
    assert [counter.calls for counter in counters] == [2, 1, 1, 2]


def test_an_action_that_never_fired_is_named(x) -> None:
    model = hookline.hook(nn.Sequential(nn.Linear(4, 4)))
    with (
        pytest.warns(hookline.NeverFiredWarning, match="CountCalls at '0'"),
        Run(model.module, [CountCalls(model.point("0"))]),
    ):
        pass

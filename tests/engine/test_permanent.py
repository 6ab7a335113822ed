"""Hooks that stay from run to run."""

import gc
import random
import sys
import warnings
import weakref

import pytest
import tiny_models
import torch
from networks import Lazy, fill, hook_count, zero
from torch import nn

import hookline
from hookline import HooklineError, NeverFiredWarning
from hookline.engine.calls import Count
from hookline.hooks import LayerActivationDetector


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


def test_a_hook_that_is_removed_while_torch_calls_it(net, x, monkeypatch) -> None:
    """As another thread may do at any moment."""
    expected, undo = net(x), net.add_hook("fc1", zero)
    monkeypatch.setattr(Count, "next", lambda *_: undo())
    assert torch.equal(net(x), expected)


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
    assert [each.user_hook for each in net.hook_dict["fc1"].bwd_hooks] == [zero]
    net.hook_dict["fc1"].remove_hooks("bwd")
    assert not net.hook_dict["fc1"].has_hooks()
    with pytest.raises(HooklineError, match="'sideways'"):
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


def test_a_standing_hook_that_never_fires_is_reported_once(x) -> None:
    net = hookline.hook(Lazy())
    net.add_hook("unused", zero)
    with pytest.warns(NeverFiredWarning, match="'unused'"):
        net(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x)
    net.reset_hooks()


def test_a_hook_on_a_module_that_was_replaced_is_reported(net, x) -> None:
    net.add_hook("fc1", zero)
    net(x)
    net.module.fc1 = nn.Linear(4, 8)
    with pytest.warns(NeverFiredWarning, match=r"'fc1'.*Linear"):
        net(x)
    net.reset_hooks()


class Swallows(nn.Module):
    """Goes on when its layer fails."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        try:
            return self.a(x)
        except Exception:
            return x


def test_the_error_of_a_standing_hook_that_the_model_catches_is_raised() -> None:
    net = hookline.hook(Swallows())
    fail = [True]

    def hook(_h):
        if fail[0]:
            raise ValueError("no")

    net.add_hook("a", hook)
    for call in (net, net.module):
        with pytest.raises(hookline.HookError, match="raised ValueError: no"):
            call(torch.ones(4))
    fail[0] = False
    net(torch.ones(4))


def test_a_standing_hook_that_runs_another_model_leaves_the_pass_as_it_is() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Identity()

        def forward(self, x):
            self.c(x * 1)
            return x.mul_(2)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.q = nn.Linear(4, 4), Doubles()

        def forward(self, x):
            h = self.a(x)
            self.q(h)
            return h + 0

    net, other, x = hookline.hook(Whole()), hookline.hook(nn.Linear(4, 4)), torch.randn(3, 4)

    def run_another(_h) -> None:
        other.run_with_cache(x)

    net.add_hook("q.input", lambda h: h * 0 + 5)
    net.add_hook("q.c", run_another)
    with torch.no_grad():
        assert torch.equal(net(x), torch.full((3, 4), 10.0))


def test_an_interrupted_pass_keeps_no_model_alive() -> None:
    class Interrupted(nn.Module):
        def forward(self, _x):
            raise KeyboardInterrupt

    module = nn.Sequential(nn.Linear(4, 4), Interrupted())
    net, found = hookline.hook(module), weakref.ref(module)
    undo = net.add_hook("0", lambda h: h * 2)
    with pytest.raises(KeyboardInterrupt):
        module(torch.ones(4))
    undo()
    del module, net, undo
    gc.collect()
    assert found() is None


def test_the_cost_of_adding_a_hook_does_not_depend_on_how_many_there_are() -> None:
    net = hookline.hook(nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)]))
    counts = []
    for number in range(60):
        calls = []
        sys.setprofile(lambda _frame, event, _argument, calls=calls: calls.append(event))
        try:
            net.add_hook(f"{number}", lambda h: None)
        finally:
            sys.setprofile(None)
        counts.append(len(calls))
    assert sum(counts[-10:]) < 1.5 * sum(counts[10:20])


@pytest.mark.parametrize("names", [["{}"], ["{}.input", "{}.input", "{}"]])
def test_the_cost_of_removing_a_hook_or_of_another_at_its_module_does_not_depend_on_how_many_there_are(names) -> None:
    net = hookline.hook(nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)]))

    def cost(act):
        calls = []
        sys.setprofile(lambda _frame, event, _argument: calls.append(event))
        try:
            act()
        finally:
            sys.setprofile(None)
        return len(calls)

    undo: list = []
    places = [name.format(number) for number in range(60) for name in names]
    added = [cost(lambda place=place: undo.append(net.add_hook(place, lambda h: None))) for place in places]
    assert sum(added[-10:]) < 1.5 * sum(added[10:20])
    removed = [cost(each) for each in undo[:-5]]
    assert sum(removed[10:20]) < 1.5 * sum(removed[-10:])


def test_hooks_that_are_added_and_removed_leave_what_the_others_need() -> None:
    """Each with what it needs: a copy before a module that works in place, the input for a norm's scale, and so on."""
    whole, gone = (hookline.hook(tiny_models.causal_lm("gpt2")) for _ in range(2))
    gone.module.load_state_dict(whole.module.state_dict())
    per_head = ("attn_in", "mlp_in", "q_input", "k_input", "v_input")  # not in a layer whose norm is edited too
    names = [
        name for name in whole.hook_dict if name.startswith(("blocks.0", "blocks.1.attn", "blocks.1.hook", "ln_final"))
    ]
    names = [name for name in names if not (name.startswith("blocks.0") and name.endswith(per_head))]
    names += ["transformer.h.0.mlp.act", "transformer.h.0.mlp.act.input", "transformer.h.0.input"]
    chance, ids = random.Random(0), torch.tensor([[3, 4, 5]])
    added: list = []
    for _ in range(400):
        if added and chance.random() < 0.48:
            added.pop(chance.randrange(len(added)))[2]()
        else:
            name, factor = chance.choice(names), chance.choice([0.9, 1.1])
            added.append((name, factor, gone.add_hook(name, lambda x, factor=factor: x * factor)))
        if chance.random() < 0.1:
            hooks = [(name, lambda x, factor=factor: x * factor) for name, factor, _ in added]
            with torch.no_grad():
                assert torch.equal(gone(ids), whole.run_with_hooks(ids, fwd_hooks=hooks))
            steps = gone.index.permanent.steps
            assert steps.keys() == gone.index.permanent.actions_at.keys() == gone.index.permanent._tapped.keys()
            count = len(gone.index.permanent.actions)
            gone.index.permanent.refresh()  # settles all of them
            assert len(gone.index.permanent.actions) == count
    for *_, remove in added:
        remove()
    assert not gone.index.permanent.actions


def test_a_disabled_hook_that_is_left_keeps_nothing_on_the_modules() -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    detector = LayerActivationDetector("0")
    net.registry.register_hook("0", detector)
    remove = net.add_hook("1", lambda h: h * 2)
    detector.disable()
    remove()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in net.module.modules())


def test_hooks_added_one_by_one_act_like_those_of_one_run() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act, self.out = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.fc(x)
            self.act(h)
            return self.out(h) + h

    net, x = hookline.hook(Writes()), torch.randn(3, 4)
    hooks = [("fc", torch.neg), ("act", lambda h: h + 1), ("act.input", lambda h: h * 2), ("out.input", torch.neg)]
    hooks += [("act", lambda h: h * 3), ("fc", torch.exp)]
    expected = net.run_with_hooks(x, fwd_hooks=hooks)
    for name, hook in hooks:
        net.add_hook(name, hook)
    assert torch.equal(net(x), expected)
    net.reset_hooks()
    plain = net(x)
    added = [net.add_hook(name, hook) for name, hook in hooks]
    for remove in added:
        remove()
    assert torch.equal(net(x), plain)

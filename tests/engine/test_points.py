"""Points placed in one's own model, and the model class for them."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hookline
from hookline import HookedRootModule, HookPoint
from hookline.errors import UnavailablePointError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.hook_out = HookPoint()

    def forward(self, x):
        return self.hook_out(self.fc(x))


class Plain(nn.Module):
    """Somebody's own model with points in it."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_in = HookPoint()
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x):
        x = self.hook_in(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Root(HookedRootModule):
    def __init__(self) -> None:
        super().__init__()
        self.hook_in = HookPoint()
        self.blocks = nn.ModuleList([Inner(), Inner()])
        self.setup()

    forward = Plain.forward


PLACED = ["hook_in", "blocks.0.hook_out", "blocks.1.hook_out"]


@pytest.fixture(params=["hook(model)", "HookedRootModule"])
def model(request):
    return hookline.hook(Plain()) if request.param == "hook(model)" else Root()


def test_a_lone_point_passes_its_input_on_and_takes_hooks(x) -> None:
    point = HookPoint()
    assert point(x) is x
    undo = point.add_hook(lambda h, hook: h * 2)
    assert torch.equal(point(x), x * 2)
    undo()
    assert point(x) is x
    assert "HookPoint()" in repr(point)


def test_placed_points_are_named_by_their_path(model) -> None:
    module = model.module
    assert module.hook_in.name == "hook_in"
    assert module.blocks[1].hook_out.name == "blocks.1.hook_out"
    assert module.blocks[1].hook_out.layer() == 1
    assert model.hook_dict["blocks.1.hook_out"] is module.blocks[1].hook_out
    assert "blocks.1.hook_out" in repr(module.blocks[1].hook_out)
    assert [name for name in model.hook_dict if "hook_" in name] == PLACED


def test_root_module_lists_what_was_placed(x) -> None:
    model = Root()
    assert list(model.hook_dict) == PLACED
    assert list(model.run_with_cache(x)[1]) == PLACED
    assert model.hook_points() == list(model.hook_dict.values())
    assert model.mod_dict["blocks.0.fc"] is model.blocks[0].fc


def test_every_verb_takes_placed_and_found_points_alike(model, x) -> None:
    names = ["blocks.0.hook_out", "blocks.0.fc", "blocks.1.fc.input"]
    bare = model(x)
    out, cache = model.run_with_cache(x, names_filter=names)
    assert torch.equal(out, bare)
    assert torch.equal(cache["blocks.0.fc"], cache["blocks.0.hook_out"])
    for name in names:
        assert not torch.equal(model.run_with_hooks(x, fwd_hooks=[(name, torch.zeros_like)]), bare)
        model.add_hook(name, torch.zeros_like)
        assert not torch.equal(model(x), bare)
        model.reset_hooks()
        assert torch.equal(model(x), bare)
        seen = []
        model.run_with_hooks(x, bwd_hooks=[(name, seen.append)]).sum().backward()
        assert len(seen) == 1
    assert len(model.run_with_cache(x, names_filter="*hook_out", incl_bwd=True, loss_fn=torch.sum)[1]) == 4


def test_hooks_on_the_point_itself(model, x) -> None:
    point = model.module.blocks[0].hook_out
    bare = model(x)
    point.add_hook(torch.zeros_like, dir="fwd")
    point.add_hook(lambda h: h + 1, dir="fwd", is_permanent=True)
    assert torch.equal(
        model.run_with_cache(x, names_filter="blocks.0.hook_out")[1]["blocks.0.hook_out"], torch.ones(5, 4)
    )
    model.remove_all_hook_fns()
    assert point.fwd_hooks != []
    assert not torch.equal(model(x), bare)
    model.remove_all_hook_fns(including_permanent=True)
    assert torch.equal(model(x), bare)
    assert not point.has_hooks()


def test_a_gradient_at_a_placed_point_is_its_own(x) -> None:
    """The point hands on its very input, which is used elsewhere too; that other path does not count."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.hook_a = HookPoint()

        def forward(self, x):
            return 2 * self.hook_a(x) + 5 * x

    x = x.requires_grad_()
    seen = []
    hookline.hook(Branches()).run_with_hooks(x, bwd_hooks=[("hook_a", seen.append)]).sum().backward()
    assert seen[0].eq(2).all()
    assert x.grad.eq(7).all()


def test_an_edit_at_a_placed_point_reaches_only_what_follows(x) -> None:
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.hook_a = HookPoint()

        def forward(self, x):
            return self.hook_a(x), x

    def wipe(h):
        h.zero_()

    edited, kept = hookline.hook(Branches()).run_with_hooks(x, fwd_hooks=[("hook_a", wipe)])
    assert edited.eq(0).all()
    assert kept.ne(0).all()


def test_hooks_added_before_setup_stay(x) -> None:
    module = Plain()
    module.hook_in.add_hook(torch.zeros_like)
    net = hookline.hook(module)
    assert [each.user_hook for each in net.hook_dict["hook_in"].fwd_hooks] == [torch.zeros_like]
    zeroed = net(torch.zeros_like(x))
    assert torch.equal(net(x), zeroed)
    net.reset_hooks()
    assert not torch.equal(net(x), zeroed)


def test_a_model_inside_a_model(x) -> None:
    """The inner model keeps its names; the outer one has its own for the same points."""
    inner = Root()
    outer = hookline.hook(nn.Sequential(inner, nn.Linear(4, 4)))
    assert inner.hook_in.name == "hook_in"
    assert "0.hook_in" in outer.hook_dict
    seen = []
    inner.add_hook("hook_in", lambda h, hook: seen.append(hook.name))
    outer.run_with_hooks(x, fwd_hooks=[("0.hook_in", lambda h, hook: seen.append(hook.name))])
    assert seen == ["hook_in", "0.hook_in"]
    outer.reset_hooks()
    outer(x)
    assert len(seen) == 2, "resetting the outer model resets the points inside it"


def test_the_input_of_a_placed_point_is_the_point(model) -> None:
    with pytest.raises(UnavailablePointError, match="'hook_in'"):
        model.point("hook_in.input")


def test_setup_is_done_when_needed_and_may_be_repeated(x) -> None:
    class Late(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.hook_a = HookPoint()

        def forward(self, x):
            return self.hook_b(self.hook_a(x)) if hasattr(self, "hook_b") else self.hook_a(x)

    model = Late()
    assert list(model.hook_dict) == ["hook_a"], "setup() was forgotten"
    model.hook_b = HookPoint()
    model.setup()
    assert list(model.run_with_cache(x)[1]) == ["hook_a", "hook_b"]


def test_copies(model, x) -> None:
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        other.module.hook_in.add_hook(torch.zeros_like)
        assert not torch.equal(other(x), model(x))
        other.reset_hooks()
        assert torch.equal(other(x), model(x))
        assert other.module.blocks[0].hook_out.name == "blocks.0.hook_out"


def test_a_root_module_is_a_module(x) -> None:
    model = Root()
    assert sum(p.numel() for p in model.parameters()) == 40
    assert model.module is model
    assert hookline.hook(model) is model
    assert model.double()(x.double()).dtype == torch.float64


def test_a_module_named_like_a_verb() -> None:
    class Clash(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.cache = nn.Linear(1, 1)
            self.setup()

    with pytest.raises(hookline.HooklineError, match=r"\['cache'\]"):
        Clash()

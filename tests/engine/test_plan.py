"""What a plan tells, and that it changes nothing."""

import copy

import pytest
import torch
from networks import Lazy, zero
from torch import nn

import hookline


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


def test_a_plan_that_cannot_be_made_says_so(x) -> None:
    class Asks(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    net = hookline.hook(Asks())
    with pytest.raises(hookline.HooklineError, match="model") as error:
        net.plan(input=x)
    assert len(str(error.value).splitlines()) == 1
    assert len(net.plan()) == 2


def test_a_plan_with_arguments_and_keywords(x) -> None:
    class Masked(nn.Module):
        def forward(self, x, *, mask):
            return x * mask

    assert hookline.hook(Masked()).plan(input=((x,), {"mask": torch.ones(4)}))[-1].shape == (5, 4)

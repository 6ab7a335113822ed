"""Hooks that may return another shape, what they get to know of padding, and the handle of `add_hook`."""

import pytest
import torch
from networks import MLP
from torch import nn

import hookline
from hookline import HookError, HooklineError


class Pooled(nn.Module):
    """Positions go through a layer, and are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu()).mean(1)


def half(x: torch.Tensor) -> torch.Tensor:
    return x[:, ::2]


@pytest.fixture
def pooled():
    return hookline.hook(Pooled())


@pytest.fixture
def model():
    return hookline.load("tinyworld")


@pytest.mark.parametrize("point", ["fc1", "fc2.input"])
def test_a_hook_may_remove_positions(pooled, point) -> None:
    x = torch.randn(3, 8, 4)
    with pytest.raises(HookError) as refused:
        pooled.run_with_hooks(x, fwd_hooks=[(point, half)])
    assert "allow_shape=True" in str(refused.value)
    expected = pooled(half(x))
    assert torch.equal(pooled.run_with_hooks(x, fwd_hooks=[(point, half)], allow_shape=True), expected)
    with pooled.hooks([(point, half)], allow_shape=True):
        output, cache = pooled.run_with_cache(x)
    assert torch.equal(output, expected)
    assert cache["fc2"].shape == (3, 4, 2)
    with pooled.add_hook(point, half, allow_shape=True):
        assert torch.equal(pooled(x), expected)
    with pooled.hook_dict[point].add_hook(half, allow_shape=True):
        assert torch.equal(pooled(x), expected)
    with pytest.raises(HookError):
        pooled.run_with_hooks(x, fwd_hooks=[(point, half)])


def test_gradients_flow_through_another_shape(pooled) -> None:
    x = torch.randn(3, 8, 4)
    seen = []
    pooled.run_with_hooks(
        x, fwd_hooks=[("fc1", half)], bwd_hooks=[("fc1", lambda grad: seen.append(grad.shape))], allow_shape=True
    ).sum().backward()
    grads = [parameter.grad.clone() for parameter in pooled.parameters()]
    pooled.zero_grad()
    pooled(half(x)).sum().backward()
    assert seen == [(3, 4, 6)]
    for before, parameter in zip(grads, pooled.parameters(), strict=True):
        torch.testing.assert_close(before, parameter.grad)


def test_where_another_shape_is_refused(pooled, model) -> None:
    with pytest.raises(HooklineError):
        model.run_with_hooks("Mary", fwd_hooks=[("blocks.0.attn.hook_z", half)], allow_shape=True)
    with pytest.raises(HooklineError):
        model.add_hook("blocks.0.attn.hook_pattern", half, allow_shape=True)
    with pytest.raises(HooklineError):
        pooled.add_hook("fc1", half, dir="bwd", allow_shape=True)
    with pytest.raises(HooklineError):
        pooled.hooks(bwd_hooks=[("fc1", half)], allow_shape=True)


def test_positions_are_unknown_after_a_hook_added_some(model) -> None:
    """Three vectors before the text: only what does not count positions goes on."""

    def with_prompt(x):
        return torch.cat([torch.zeros_like(x[:, :1]).repeat(1, 3, 1), x], 1)

    raised, padded = [], []

    def look(_x, hook):
        for name in ("positions", "padding"):
            with pytest.raises(HooklineError) as error:
                getattr(hook, name)
            raised.append(error.value)

    hooks = [("lm_head.input", with_prompt), ("lm_head", look)]
    with model.hooks([("transformer.wte", lambda _x, hook: padded.append(hook.padding)), *hooks], allow_shape=True):
        assert model(["Mary went", "John"], padding_side="left").shape[1] == 5
        assert len(raised) == 2
        with pytest.raises(HooklineError):
            model.last_logits(["Mary went", "John"])
        with pytest.raises(HooklineError):
            model.run_with_cache("Mary went", names_filter="lm_head", pos_slice=hookline.last)
    at_last = ("lm_head", hookline.at(hookline.last, torch.zeros_like))
    with model.hooks([*hooks[:1], at_last], allow_shape=True), pytest.raises(HookError):
        model("Mary went")
    assert padded[0].tolist() == [[False, False], [True, False]]


def test_padding_has_the_positions_of_the_activation(model) -> None:
    seen = []

    def look(_x, hook):
        seen.append(None if hook.padding is None else hook.padding.tolist())

    texts = ["Mary went", "John"]
    model.run_with_hooks(texts, fwd_hooks=[("blocks.0.hook_resid_post", look)], padding_side="right")
    model.run_with_hooks("Mary went", fwd_hooks=[("blocks.0.hook_resid_post", look)])
    assert seen == [[[False, False], [False, True]], None]
    seen.clear()
    with model.hooks([("blocks.0.hook_resid_post", look)]):
        model.generate(texts, max_new_tokens=3, do_sample=False)
    assert seen == [[[False, False], [True, False]], [[False], [False]], [[False], [False]]]
    hookline.hook(MLP()).run_with_hooks(torch.ones(1, 4), fwd_hooks=[("fc1", look)])
    assert seen[-1] is None


@pytest.mark.parametrize("end", [lambda handle: handle(), lambda handle: handle.remove(), lambda handle: None])
def test_the_handle_of_added_hooks(net, x, end) -> None:
    plain = net(x)
    with net.add_hook("fc*", torch.zeros_like) as handle:
        assert callable(handle)
        assert not torch.equal(net(x), plain)
        end(handle)
    handle.remove()
    assert torch.equal(net(x), plain)
    assert not net.index.permanent.hooks()


def test_a_handle_ends_with_its_block(net) -> None:
    handle = net.add_hook("fc1", torch.zeros_like)
    assert "'fc1'" in repr(handle)
    with pytest.raises(KeyError), handle:
        raise KeyError
    assert not net.index.permanent.hooks()
    handle = net.add_hook("fc1", torch.zeros_like)
    handle.__enter__()
    net.detach_all()
    assert not net.index.permanent.hooks()


class Stop(BaseException):
    """Ends a pass."""


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_is_no_exception_passes_unchanged(net, x, on_error) -> None:
    stop = Stop("far enough")

    def end(_x):
        raise stop

    with pytest.raises(Stop) as raised:
        net.run_with_hooks(x, fwd_hooks=[("fc1", end)], on_error=on_error)
    assert raised.value is stop
    output = net.run_with_hooks(x, bwd_hooks=[("fc1", end)], on_error=on_error)
    with pytest.raises(Stop):
        output.sum().backward()
    with net.add_hook("fc1", end), pytest.raises(Stop):
        net(x)
    assert torch.equal(net(x), net.module(x))

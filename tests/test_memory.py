"""A cached tensor never changes, and none is copied without need."""

import pytest
import torch
from networks import InPlace
from torch import nn

import hookline


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

"""Runs that only record: captures at the taps, and runs that are used again."""

import gc
import threading
from weakref import ref

import pytest
import tiny_models
import torch
from networks import MLP
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline


@pytest.fixture
def net():
    return hookline.hook(MLP())


@pytest.fixture
def x():
    return torch.randn(2, 4)


def ready(net):
    return [run for _, run in net.index.ready_runs._runs]


@pytest.mark.parametrize("names", [None, "fc*", ["fc1", "fc2"]])
def test_a_run_is_used_again(net, x, names) -> None:
    first = net.run_with_cache(x, names_filter=names)[1]
    runs = ready(net)
    second = net.run_with_cache(x + 1, names_filter=names)[1]
    assert ready(net) == runs
    assert len(runs) == 1
    assert list(first) == list(second)
    fresh = hookline.hook(net.module).run_with_cache(x + 1, names_filter=names)[1]
    assert all(torch.equal(second[name], fresh[name]) for name in fresh)
    assert not any(torch.equal(first[name], second[name]) for name in first)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.module.modules())


def test_a_run_that_can_be_used_again_keeps_no_activation(net, x) -> None:
    for names in (None, "fc1"):
        cache = net.run_with_cache(x, names_filter=names)[1]
        kept = ref(cache["fc1"])
        del cache
        gc.collect()
        assert kept() is None


def test_a_replaced_module_is_recorded(net, x) -> None:
    net.run_with_cache(x)
    net.module.fc1 = nn.Linear(4, 8)
    cache = net.run_with_cache(x)[1]
    assert torch.equal(cache["fc1"], net.module.fc1(x))
    assert len(ready(net)) == 1


def test_a_call_that_is_replaced_between_two_caches(net, x, monkeypatch) -> None:
    expected = list(net.run_with_cache(x)[1])
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", lambda self, *args, **kwargs: self._call_impl(*args, **kwargs))
        assert list(net.run_with_cache(x)[1]) == expected
    assert list(net.run_with_cache(x)[1]) == expected


def test_hooks_between_two_caches_count(net, x) -> None:
    plain = net.run_with_cache(x)[1]
    remove = net.add_hook("fc1", torch.zeros_like)
    assert not net.run_with_cache(x)[1]["fc1"].any()
    remove()
    handle = net.module.fc1.register_forward_hook(lambda *_: torch.ones_like(plain["fc1"]))
    assert net.run_with_cache(x)[1]["fc1"].eq(1).all()
    handle.remove()
    with net.hooks(fwd_hooks=[("fc1", torch.zeros_like)]):
        assert not net.run_with_cache(x)[1]["fc1"].any()
    pre = nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] * 0,))
    try:
        assert not net.run_with_cache(x)[1]["fc1.input"].any()
    finally:
        pre.remove()
    assert torch.equal(net.run_with_cache(x)[1]["fc1"], plain["fc1"])


def test_a_run_that_failed_is_not_used_again(net, x) -> None:
    net.run_with_cache(x)
    with pytest.raises(RuntimeError):
        net.run_with_cache(torch.randn(2, 5))
    assert len(net.run_with_cache(x)[1]) == len(hookline.hook(net.module).run_with_cache(x)[1])


def test_a_module_that_is_hooked_by_another_thread_meanwhile() -> None:
    """Its taps are on the module then, and see the run of this thread too: each activation is recorded once."""

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.meanwhile = lambda: None

        def forward(self, x):
            x = self.first(x)
            self.meanwhile()
            return self.second(x)

    module, x = Waits(), torch.randn(2, 4)
    net = hookline.hook(module)
    plain = net.run_with_cache(x)[1]
    started, done = threading.Event(), threading.Event()

    def other() -> None:
        with hookline.hook(module).hooks(fwd_hooks=[("second", torch.zeros_like)]):
            started.set()
            done.wait(10)
            assert not module.second(x).any()

    thread = threading.Thread(target=other)

    def meanwhile() -> None:
        thread.start()
        started.wait(10)

    module.meanwhile = meanwhile
    try:
        cache = net.run_with_cache(x)[1]
    finally:
        done.set()
        thread.join()
    assert list(cache) == list(plain)
    assert all(torch.equal(cache[name], plain[name]) for name in plain)


def test_modules_with_a_call_of_their_own_are_recorded() -> None:
    class Around(nn.Linear):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    class Past(nn.Linear):
        def __call__(self, *args, **kwargs):
            return self._call_impl(*args, **kwargs)

    class Below(Past):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    for make in (Around, Past, Below):
        cache = hookline.hook(nn.Sequential(make(4, 4))).run_with_cache(torch.ones(1, 4))[1]
        assert "0" in cache
        assert "0.input" in cache


def test_views_of_inputs_and_buffers_are_copied() -> None:
    """Others may write to them without torch knowing: what is cached must not share their memory."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(4))
            self.same, self.part, self.own = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.same(x) + self.part(x[:1]) + self.own(self.table)

    module, x = Gives(), torch.randn(2, 4)
    cache = hookline.hook(module).run_with_cache(x, names_filter=["same", "part", "own"])[1]
    for name, source in (("same", x), ("part", x), ("own", module.table)):
        assert not torch._C._is_cow_tensor(cache[name]), name
        assert not torch._C._is_cow_tensor(source), name


@pytest.mark.parametrize("names", [None, "*.linear1", "*.self_attn"])
def test_a_layer_that_looks_for_hooks_calls_its_children(names) -> None:
    """In eval mode without gradients, torch's layer is one fused call unless a module in it has torch hooks."""
    module = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    net, x = hookline.hook(module), torch.randn(2, 3, 8)
    with torch.no_grad():
        cache = net.run_with_cache(x, names_filter=names)[1]
        expected = net.run_with_cache(x, names_filter=names, fwd_hooks=[("0.linear1", lambda x: None)])[1]
    assert len(expected) >= 1
    assert list(cache) == list(expected)
    assert all(torch.equal(cache[name], expected[name]) for name in expected)


class Calls(nn.Module):
    """Calls a function in the middle of its forward."""

    def __init__(self, meanwhile, child=None) -> None:
        super().__init__()
        self.fc, self.meanwhile = child or nn.Linear(4, 4), meanwhile

    def forward(self, x):
        self.meanwhile(self, x)
        return self.fc(x)


def in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_global_hooks_that_a_forward_adds(x) -> None:
    handles = []

    def add(*_) -> None:
        handles.append(nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] * 0,)))

    try:
        assert not hookline.hook(Calls(add)).run_with_cache(x)[1]["fc.input"].any()
    finally:
        handles[0].remove()


def test_a_replica_has_its_own_weights(x) -> None:
    """`nn.DataParallel` calls shallow copies of modules in other threads."""
    seen = []

    def replicate(module, x) -> None:
        replica = module.fc._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.zeros(4, 4), torch.ones(4)
        in_thread(lambda: seen.append(replica(x)))

    with pytest.warns(hookline.NeverFiredWarning, match="thread"):
        hookline.hook(Calls(replicate)).run_with_cache(x)
    assert seen[0].eq(1).all()


@pytest.mark.parametrize("part", ["attn", "mlp", "ln_1"])
def test_a_part_of_a_layer_that_is_hooked_meanwhile_finds_what_was_saved_before(part) -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    tokens, layers, handles = model.example_tokens(), model.module.transformer.h, []
    expected = dict(model.run_with_cache(tokens)[1])
    function = layers[0].mlp.act.forward

    def hooks_the_next_layer(x):
        handles.append(layers[1].get_submodule(part).register_forward_hook(lambda *_: None))
        return function(x)

    layers[0].mlp.act.forward = hooks_the_next_layer
    found = dict(model.run_with_cache(tokens)[1])
    assert handles
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("error")
def test_another_thread_trains_the_model_meanwhile(x, reentrant) -> None:
    """Its own passes, and what a checkpoint recomputes for it, are no calls that the run misses."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.waits = True

        def forward(self, x):
            if self.waits:
                self.waits = False
                in_thread(lambda: self(x).sum().backward())
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    module = Checkpointed()
    assert "second" in hookline.hook(module).run_with_cache(x)[1]
    assert module.second.weight.grad is not None

"""A wrapped module: the same as before, in every mode, copied or not."""

import copy
import gc
import pickle
import weakref

import devices
import pytest
import torch
from networks import MLP, fill, has_taps, hook_count, zero
from tiny_models import nudged

import hookline
from hookline import HooklineError


def test_unhooked_is_the_bare_module(net, x) -> None:
    assert net.module.forward.__func__ is MLP.forward
    assert hook_count(net.module) == 0
    assert torch.equal(net(x), net.module(x))
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        assert hook_count(net.module) == 3, "at the point, and where the forward pass begins and ends, to count calls"
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
    with pytest.raises(HooklineError, match=r"nn\.Module.*function"):
        hookline.hook(zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(x, dtype) -> None:
    net = hookline.hook(MLP().to(dtype))
    out, cache = net.run_with_cache(x.to(dtype))
    assert torch.equal(out, net.module(x.to(dtype)))
    assert {tensor.dtype for tensor in cache.values()} == {dtype}
    _, half = net.run_with_cache(x.to(dtype), dtype=torch.float32)
    assert {tensor.dtype for tensor in half.values()} == {torch.float32}


def test_autocast(net, x) -> None:
    with torch.autocast(devices.DEVICE.type, dtype=torch.bfloat16):
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
        with pytest.raises(HooklineError, match="hooks"):
            act()
    net.reset_hooks()


def test_no_module_is_kept_alive(x) -> None:
    module = MLP()
    alive = weakref.ref(module)
    net = hookline.hook(module)
    net.run_with_cache(x)
    net.add_hook("fc1", zero)
    del module, net
    gc.collect()
    assert alive() is None
    assert not any(has_taps(m) for m in hookline.engine.taps._taps)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def use_nothing(_net, _x):
    pass


def use_points(net, _x):
    assert net.hook_dict["fc1.output"].name == "fc1.output"


def use_hooks(net, x):
    net.run_with_hooks(x, fwd_hooks=[("fc1", torch.relu)], bwd_hooks=[("act", torch.relu)])
    with net.hooks(fwd_hooks=[("fc1", torch.relu)]):
        net(x)


def use_cache(net, x):
    net.run_with_cache(x)


def use_registry(net, x):
    hook_id = net.registry.register_hook("fc1", torch.relu)
    net(x)
    net.registry.unregister_hook(hook_id)


@pytest.mark.parametrize("use", [use_nothing, use_points, use_hooks, use_cache, use_registry])
@pytest.mark.usefixtures("no_collector")
def test_a_model_is_freed_with_its_wrapper_by_reference_count(x, use) -> None:
    module = MLP()
    net, alive = hookline.hook(module), weakref.ref(module)
    use(net, x)
    del net, module
    assert alive() is None


@pytest.mark.parametrize("use", [use_nothing, lambda model, _: model.blocks[0].attn.hook_z, use_cache])
@pytest.mark.usefixtures("no_collector")
def test_a_language_model_is_freed_with_its_wrapper_by_reference_count(use) -> None:
    module = nudged("gpt2")
    model, alive = hookline.hook(module), weakref.ref(module)
    use(model, model.example_tokens())
    del model, module
    assert alive() is None

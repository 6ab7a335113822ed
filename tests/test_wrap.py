"""What `hookline.hook` makes of a model inside somebody else's wrapper, and of one that is sharded over processes."""

import copy
import gc

import pytest
import tiny_models
import torch
import torch.distributed as dist
from backends import cannot_compile, needs_compiler
from networks import MLP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hookline
from hookline import HookedModel, HooklineError, UnknownPointError
from hookline.engine._gradients.replicas import ddp_of

IDS = torch.tensor([[5, 17, 42, 7, 3, 9, 22]])


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def llama():
    return tiny_models.causal_lm("llama")


def compiled(module: nn.Module) -> nn.Module:
    if cannot_compile:
        pytest.skip(needs_compiler.kwargs["reason"])
    return torch.compile(module, backend="eager")


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "compiled": compiled,
    "compiled DistributedDataParallel": lambda module: compiled(DistributedDataParallel(module)),
    "DistributedDataParallel of a compiled model": lambda module: DistributedDataParallel(compiled(module)),
    "DistributedDataParallel of a HookedModel": lambda module: DistributedDataParallel(hookline.hook(module)),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through(wrapper, llama) -> None:
    with torch.no_grad():
        own = llama(IDS).logits
        model = hookline.hook(wrapper(llama))
        assert isinstance(model, HookedModel)
        assert set(model.hook_dict) == set(hookline.hook(llama).hook_dict)
        names = ["blocks.1.hook_resid_post", "model.layers.1"]
        logits, cache = model.run_with_cache(IDS, names_filter=names)
        assert torch.equal(logits, own)
        assert torch.equal(cache[names[0]], cache[names[1]])
        edited, after = model.run_with_cache(IDS, fwd_hooks=[("blocks.1.attn.hook_v", torch.zeros_like)])
        assert after["z", 1].eq(0).all()
        assert not torch.equal(edited, own)
        assert model.generate(IDS, max_new_tokens=2).shape == (1, 9)
    assert list(model.state_dict()) == list(model.module.state_dict())


@pytest.mark.usefixtures("group")
def test_calls_go_through_the_wrapper(llama) -> None:
    outer, calls = DistributedDataParallel(llama), []
    outer.register_forward_hook(lambda *_: calls.append("outer"))
    model = hookline.hook(outer)
    model(IDS, return_type="loss").backward()
    assert calls == ["outer"]
    assert model.module is llama
    assert llama.lm_head.weight.grad is not None


@pytest.mark.usefixtures("group")
def test_the_ddp_of_a_parameter(llama) -> None:
    weight, optimizer = llama.lm_head.weight, torch.optim.SGD(llama.parameters())
    assert ddp_of(weight) is None
    outer = DistributedDataParallel(llama)
    assert ddp_of(weight) is outer
    assert ddp_of(nn.Parameter(torch.ones(1))) is None
    del outer
    gc.collect()
    assert ddp_of(weight) is None
    assert optimizer.param_groups


class Unknown(nn.Module):
    """A wrapper that nobody knows."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids):
        return self.lm(ids).logits


def test_an_unknown_wrapper_has_a_hint(llama) -> None:
    net = hookline.hook(Unknown(llama))
    assert not isinstance(net, HookedModel)
    hint = r"hookline\.hook\(module\.lm, tokenizer\)"
    with pytest.raises(UnknownPointError, match=hint):
        net.run_with_cache(IDS, names_filter="blocks.0.hook_resid_pre")
    with pytest.raises(HooklineError, match=hint):
        hookline.hook(Unknown(llama), object())
    inner = hookline.hook(net.lm)
    with inner.hooks(fwd_hooks=[("unembed.hook_out", torch.zeros_like)]):
        assert net(IDS).eq(0).all(), "as the hint says"


def test_tensor_parallelism_of_older_versions_is_refused(llama) -> None:
    """Before 5.19, transformers has no manager of meshes, which knows the processes."""
    llama._tp_size = 2
    with pytest.raises(HooklineError, match=r"\(tp_size=2\).*version 5\.19"):
        hookline.hook(llama)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [MLP, lambda: tiny_models.causal_lm("llama")], ids=["mlp", "llama"])
def test_parameters_that_torch_has_split_are_refused(make) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    module, mesh = make(), init_device_mesh("cpu", (1,))
    linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
    parallelize_module(linear, mesh, ColwiseParallel())
    with pytest.raises(HooklineError, match="DTensor"):
        hookline.hook(module)
    with pytest.raises(HooklineError, match="sharded"):
        hookline.hook(Unknown(module))


@pytest.mark.usefixtures("group")
@pytest.mark.on_cpu(reason="its group of processes is one of CPUs")
def test_fsdp_is_no_such_split(llama) -> None:
    """Each parameter is put together before it is used, so what flows through a layer is whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded, mesh = copy.deepcopy(llama), init_device_mesh("cpu", (1,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    with torch.no_grad():
        _, own = hookline.hook(llama).run_with_cache(IDS)
        _, cache = hookline.hook(fully_shard(sharded, mesh=mesh)).run_with_cache(IDS)
    assert all(torch.equal(cache[name], own[name]) for name in own)

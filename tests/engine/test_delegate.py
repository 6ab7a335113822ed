"""A wrapper handed on to what takes an nn.Module: it has the wrapped module's parameters, under the same names."""

import copy
import gc
import importlib.util
import inspect
import weakref

import devices
import pytest
import tiny_models
import torch
from networks import MLP, hook_count, zero
from torch import nn

import hookline
from hookline import HookedModel, HooklineError

IDS = torch.tensor([[5, 17, 42, 7, 3, 9, 22], [6, 7, 8, 9, 10, 11, 12]])


def needs(package: str):
    """A test that needs a package that `make test` does not install."""
    missing = importlib.util.find_spec(package) is None
    skip = pytest.mark.skipif(missing, reason=f"needs {package}, which `make test-all` installs")
    return lambda test: pytest.mark.slow(skip(test))


class Parent(nn.Module):
    """Has a wrapper as its submodule."""

    def __init__(self, net) -> None:
        super().__init__()
        self.lm, self.head = net, nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.lm(x))


def test_the_modules_own_state(net, x) -> None:
    module = net.module
    assert isinstance(net, nn.Module)
    for view in ("named_parameters", "named_buffers", "named_children"):
        assert dict(getattr(net, view)()) == dict(getattr(module, view)())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in module.named_modules()]
    assert {*net.modules()} == {net, module.fc1, module.act, module.fc2}
    assert net.requires_grad_(False) is net
    assert not module.fc1.weight.requires_grad
    net.requires_grad_(True)
    net(x).sum().backward()
    net.zero_grad()
    assert module.fc1.weight.grad is None
    net.training = False
    assert not module.training
    assert net.get_submodule("fc1") is module.fc1


def test_state_dicts_have_no_prefix(net) -> None:
    other = MLP()
    assert not net.load_state_dict(other.state_dict()).missing_keys
    assert torch.equal(net.module.fc1.weight, other.fc1.weight)
    other.load_state_dict(net.state_dict())


def test_an_optimizer_trains_it(net, x) -> None:
    optimizer, before = torch.optim.SGD(net.parameters(), lr=0.1), net.module.fc1.weight.clone()
    net(x).sum().backward()
    optimizer.step()
    assert not torch.equal(net.module.fc1.weight, before)


def test_a_new_submodule_is_the_modules(net) -> None:
    net.extra = nn.Linear(2, 2)
    assert "extra.weight" in net.state_dict()
    assert net.module.extra is net.extra
    del net.extra
    assert not hasattr(net.module, "extra")


def test_functional_call(net, x) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    assert torch.func.functional_call(net, zeros, (x,)).eq(0).all()


def test_forward_is_the_modules_with_hooks(net, x) -> None:
    assert inspect.signature(net.forward) == inspect.signature(net.module.forward)
    with net.hooks(fwd_hooks=[("output", zero)]):
        assert net.forward(x).eq(0).all()


def test_a_replaced_forward_is_called(net, x) -> None:
    """As accelerate does for mixed precision."""
    own = net.forward
    net.forward = lambda *args: own(*args) + 1
    assert torch.equal(net(x), net.module(x) + 1)
    del net.forward
    assert torch.equal(net(x), net.module(x))


def test_as_a_submodule(net, x) -> None:
    parent = Parent(net)
    assert [name for name, _ in parent.named_parameters()][:2] == ["lm.fc1.weight", "lm.fc1.bias"]
    assert list(parent.state_dict()) == [name for name, _ in parent.named_parameters()]
    other = Parent(hookline.hook(MLP()))
    other.load_state_dict(parent.state_dict())
    assert torch.equal(other(x), parent(x))
    assert torch.equal(copy.deepcopy(parent)(x), parent(x))
    parent.eval().double()
    assert not net.module.training
    assert net.module.fc1.weight.dtype == torch.float64


def test_points_of_a_parent_are_those_inside(net, x) -> None:
    parent = Parent(net)
    whole = hookline.hook(parent)
    _, cache = whole.run_with_cache(x)
    assert torch.equal(cache["lm"], net(x))
    assert torch.equal(cache["lm.fc1"], net.module.fc1(x))
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        assert whole.run_with_cache(x)[1]["lm.fc1"].eq(0).all()
    assert whole.index.select(net) == whole.index.select("lm")
    assert hook_count(parent) == 0


def test_data_parallel(net, x) -> None:
    if torch.cuda.is_available():  # it then runs on the GPUs, and wants the module on the first
        net, x = net.to("cuda:0"), x.to("cuda:0")
    parallel = nn.DataParallel(net, device_ids=[0] if torch.cuda.is_available() else None)
    assert len(list(parallel.parameters())) == 4
    assert torch.equal(parallel(x), net(x))
    with pytest.raises(HooklineError, match="device"):
        net._replicate_for_data_parallel()


def test_torch_hooks_are_the_modules(net, x) -> None:
    handle = net.register_forward_hook(lambda _module, _args, output: output * 0)
    assert net(x).eq(0).all()
    assert net.module(x).eq(0).all()
    handle.remove()
    assert not net(x).eq(0).all()


def use_nothing(net) -> None:
    pass


def use_points(net) -> None:
    assert net.hook_dict
    assert net.registry.hooks() == []


@pytest.mark.parametrize("make", [MLP, lambda: tiny_models.causal_lm("llama")], ids=["mlp", "llama"])
@pytest.mark.parametrize("use", [use_nothing, use_points])
def test_a_wrapped_model_is_freed_at_once(make, use) -> None:
    module = make()
    alive, net = weakref.ref(module), hookline.hook(module)
    use(net)
    gc.collect()
    gc.disable()
    try:
        del module, net
        assert alive() is None, "by its reference count alone"
    finally:
        gc.enable()


def test_a_temporary_wrapper_gives_a_whole_hook_dict(mlp) -> None:
    assert hookline.hook(mlp).hook_dict["fc1.output"].site.module is mlp.fc1


@pytest.fixture
def lm() -> HookedModel:
    return hookline.hook(tiny_models.causal_lm("llama"))


def test_labels_give_the_models_own_output(lm) -> None:
    labels = IDS.clone()
    labels[:, :3] = -100
    own = lm.module(input_ids=IDS, labels=labels)
    output = lm(input_ids=IDS, labels=labels)
    assert torch.equal(output.loss, own.loss)
    assert torch.equal(lm(IDS, "loss", labels=labels), own.loss)
    logits, loss = lm(IDS, "both", labels=labels)
    assert torch.equal(logits, own.logits)
    assert torch.equal(loss, own.loss)
    _, cache = lm.run_with_cache(IDS, labels=labels, incl_bwd=True, names_filter="blocks.0.hook_resid_post")
    assert "blocks.0.hook_resid_post_grad" in cache
    with pytest.raises(HooklineError, match="loss_per_token"):
        lm(IDS, "loss", loss_per_token=True, labels=labels)


def test_a_wrong_name_suggests_one(lm) -> None:
    with pytest.raises(AttributeError) as caught:
        lm.run_with_cach
    assert caught.value.name == "run_with_cach"
    assert caught.value.obj is lm  # Python looks for similar names there


@needs("accelerate")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(lm, precision) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=devices.DEVICE.type == "cpu", mixed_precision=precision)
    before = lm(IDS)
    prepared, optimizer = accelerator.prepare(lm, torch.optim.SGD(lm.parameters(), lr=0.1))
    assert accelerator._models == [lm]
    assert torch.equal(prepared(IDS), before) == (precision == "no"), "mixed precision takes effect"
    accelerator.backward(prepared(IDS, labels=IDS).loss)
    weight = lm.module.lm_head.weight.clone()
    optimizer.step()
    assert not torch.equal(lm.module.lm_head.weight, weight)
    AcceleratorState._reset_state(reset_partial_state=True)


@needs("peft")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_peft(lm) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(lm, config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)
    wrapped = hookline.hook(model)
    _, cache = wrapped.run_with_cache(IDS)
    own = []
    handle = lm.module.model.layers[1].self_attn.q_proj.register_forward_hook(lambda _m, _a, out: own.append(out))
    lm(IDS)
    handle.remove()
    assert torch.equal(cache["q", 1].flatten(2), own[0])


@needs("accelerate")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainer(lm, tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    before = lm.module.lm_head.weight.clone()
    data = [{"input_ids": row, "labels": row} for row in IDS]
    is_on_cpu = devices.DEVICE.type == "cpu"
    options = TrainingArguments(
        str(tmp_path),
        num_train_epochs=1,
        use_cpu=is_on_cpu,
        dataloader_pin_memory=is_on_cpu,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=lm, args=options, train_dataset=data, eval_dataset=data)
    trainer._set_signature_columns_if_needed()
    assert {"input_ids", "position_ids", "labels"} <= {*trainer._signature_columns}
    trainer.train()
    assert not torch.equal(lm.module.lm_head.weight, before)
    with torch.no_grad():
        own = lm.module.eval()(input_ids=IDS, labels=IDS).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(own), rel=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()

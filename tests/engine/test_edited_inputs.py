"""An edit at a module's input changes what that module gets, and nothing else, unless the module writes there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline
from hookline.values.structures import tensors_in

IMAGE, TEXT = (2, 4, 6, 6), (3, 5, 4)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def written_through_numpy(x: Tensor) -> Tensor:
    x.detach().numpy()[...] *= 2
    return x + 1


def written_through_data(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x + 1


def sparse_product(x: Tensor) -> Tensor:
    return torch.sparse.mm(x.flatten(1).t().to_sparse(), x.flatten(1))


def jagged_attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


READERS = {
    "1×1 convolution": (lambda: nn.Conv2d(4, 4, 1), IMAGE),
    "3×3 convolution": (lambda: nn.Conv2d(4, 4, 3), IMAGE),
    "convolution of a sequence": (lambda: nn.Conv1d(4, 4, 1), IMAGE[:3]),
    "LSTM": (lambda: nn.LSTM(4, 4), TEXT),
    "GRU": (lambda: nn.GRU(4, 4, batch_first=True), TEXT),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), TEXT),
    "sequential": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)), IMAGE),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGE),
    "dropout": (lambda: nn.Dropout().eval(), IMAGE),
    "product": (lambda: Function(lambda x: x @ x.mT), TEXT),
    "attention": (lambda: Function(lambda x: F.scaled_dot_product_attention(x, x, x)), TEXT),
    "numpy": (lambda: Function(through_numpy), TEXT),
    "sparse": (lambda: Function(sparse_product), TEXT),
}
WRITERS = {  # and what becomes of the edited input
    "in place": (lambda: nn.ReLU(inplace=True), torch.relu),
    "returned": (lambda: Function(lambda x: x.mul_(2)), lambda x: x * 2),
    "not returned": (lambda: Function(lambda x: x.mul_(2) + 1), lambda x: x * 2),
    "in part": (lambda: Function(lambda x: x[0].zero_() + x), lambda x: x * torch.tensor([0.0, 1, 1])[:, None, None]),
    "numpy": (lambda: Function(written_through_numpy), lambda x: x * 2),
    "data": (lambda: Function(written_through_data), lambda x: x * 2),
}


class Residual(nn.Module):
    """Returns what the module makes of a tensor, and the tensor."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[object, Tensor]:
        h = x.relu()
        return self.module(h), h * 1


def halve_in_place(x: Tensor) -> None:
    x.mul_(0.5)


NUMPY = pytest.param("numpy", marks=pytest.mark.on_cpu)


def kinds(table: dict[str, Any]) -> list[Any]:
    return [NUMPY if kind == "numpy" else kind for kind in table]


EDITS = {"returned": lambda x: x * 0.5, "in place": halve_in_place}
MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


def with_halved_input(module: Residual, x: Tensor) -> list[Tensor]:
    handle = module.module.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5, *args[1:]))
    try:
        return tensors_in(module(x))
    finally:
        handle.remove()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", kinds(READERS))
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of:UserWarning")  # on a GPU, after `.to(dtype)`
def test_a_module_that_only_reads_leaves_its_callers_tensor(kind, dtype, edit, mode) -> None:
    if dtype is torch.bfloat16 and kind in ("numpy", "sparse"):
        pytest.skip("numpy has no bfloat16, and the sparse product no kernel for it")
    make, shape = READERS[kind]
    module = Residual(make()).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    given, expected = x.clone(), with_halved_input(module, x)
    net = hookline.hook(module)
    for point in ("module.input", "module.input#0"):
        values = tensors_in(net.run_with_hooks(x, fwd_hooks=[(point, EDITS[edit])]))
        assert all(map(torch.equal, values, expected))
        assert torch.equal(x, given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # torch's own
@pytest.mark.parametrize("edit", EDITS)
def test_jagged_tensors(edit) -> None:
    def run(call: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        x = torch.nested.nested_tensor_from_jagged(values.clone(), offsets=torch.tensor([0, 5, 8]))
        return [out.values() for out in call(x)] + [x.values()]

    module, values = Residual(Function(jagged_attention)), torch.randn(8, 4)
    net = hookline.hook(module)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            hooked = run(lambda x: tensors_in(net.run_with_hooks(x, fwd_hooks=[("module.input", EDITS[edit])])))
            assert all(map(torch.equal, hooked, run(lambda x: with_halved_input(module, x))))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", kinds(WRITERS))
def test_a_module_that_writes_writes_to_its_callers_tensor(kind, edit, mode) -> None:
    make, written = WRITERS[kind]
    if mode == "inference" and kind == "numpy":
        pytest.skip("numpy refuses to write to an inference tensor's array")
    module, x = Residual(make()), torch.randn(TEXT)
    _, h = hookline.hook(module).run_with_hooks(x, fwd_hooks=[("module.input", EDITS[edit])])
    assert torch.equal(h, written(x.relu() * 0.5))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("point", ["input", "0.input"])
def test_the_users_input_is_not_written_to(point, edit, mode) -> None:
    x = torch.randn(IMAGE)
    given, net = x.clone(), hookline.hook(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
    net.run_with_hooks(x, fwd_hooks=[(point, EDITS[edit])])
    assert torch.equal(x, given)


class OwnTensors(nn.Module):
    """Sends a parameter and a buffer through modules whose kernels ask for a pointer to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.conv = nn.Parameter(torch.randn(1, 4, 3, 3)), nn.Conv2d(4, 4, 1)
        self.lstm = nn.LSTM(3, 3)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.register_buffer("state", torch.randn(4, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.weight).mean() + self.norm(self.lstm(self.state)[0]).mean() * x


@pytest.mark.parametrize("edit", EDITS)
def test_parameters_and_buffers_are_not_written_to(edit, mode) -> None:
    module, x = OwnTensors(), torch.randn(2)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    net = hookline.hook(module)
    for point in net.hook_dict:
        if point != "norm.parametrizations.weight.input":  # called without arguments
            for _ in range(2):
                net.run_with_hooks(x, fwd_hooks=[(point, EDITS[edit])])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.same(x)
        x.add_(0.25)
        return x * 1


@pytest.mark.parametrize("points", [["input"], ["input", "same.input"]])
def test_what_the_model_writes_after_an_edit_inside_it_reaches_its_caller(points, mode) -> None:
    x = torch.zeros(2)
    hookline.hook(WritesToItsInput()).run_with_hooks(x, fwd_hooks=[(point, lambda x: x * 0.5 + 1) for point in points])
    assert x.eq(1.25).all()


@pytest.mark.parametrize("read", [lambda x: None, lambda x: x, lambda x: x * 1])
def test_a_hook_inside_does_not_end_what_the_model_writes_to_its_edited_input(read, mode) -> None:
    x = torch.zeros(2)
    hooks = [("input", lambda x: x * 0.5 + 1), ("same.input", read)]
    hookline.hook(WritesToItsInput()).run_with_hooks(x, fwd_hooks=hooks)
    assert x.eq(1.25).all()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def test_what_a_module_writes_to_an_edited_input_whose_gradient_is_read_behind_a_hook_of_others() -> None:
    module, x = nn.Sequential(Halves()), torch.zeros(2)
    net = hookline.hook(module)
    handle = module[0].register_forward_pre_hook(lambda module, args: None)
    net.run_with_hooks(x, fwd_hooks=[("0.input", lambda x: x + 1)], bwd_hooks=[("0.input", lambda grad: None)])
    handle.remove()
    assert x.eq(0.5).all()

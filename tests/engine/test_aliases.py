"""Modules whose output is their input, that write to their arguments, or whose return value nobody reads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

import hookline
from hookline.errors import NeverFiredWarning


class Ignored(nn.Module):
    """Calls `part` on what `fc` made, ignores what it returns, and reads the tensor that it gave."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.fc, self.part, self.head = nn.Linear(4, 4), part, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.part(h)
        return self.head(h)


class Late(Ignored):
    """Uses what `part` returns, after a write to the tensor that it gave."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        y = self.part(h)
        h.add_(1)
        return self.head(y)


PARTS = {"relu": lambda: nn.ReLU(inplace=True), "dropout": lambda: nn.Dropout().eval(), "identity": nn.Identity}


@pytest.mark.parametrize("kind", [Ignored, Late])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("point", ["part", "part.input"])
@pytest.mark.parametrize("grad", [True, False])
def test_reading_changes_nothing(x, kind, part, point, grad) -> None:
    module, kept = kind(PARTS[part]()), []
    net = hookline.hook(module)
    with torch.set_grad_enabled(grad):
        expected = module(x)
        for read in (lambda h: None, kept.append, lambda h: h, lambda h: h.detach().cpu().numpy().sum() and None):
            assert torch.equal(net.run_with_hooks(x, fwd_hooks=[(point, read)]), expected)
        assert torch.equal(net.run_with_cache(x)[0], expected)


@pytest.mark.parametrize("part", PARTS)
def test_gradients_of_what_is_read_in_place(x, part) -> None:
    module = Ignored(PARTS[part]())
    expected = module(x)
    out, cache = hookline.hook(module).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    assert torch.equal(out, expected)
    gradient = module.head.weight.sum(0).expand(5, 4)
    assert torch.allclose(cache["part_grad"], gradient)
    if part == "relu":
        assert torch.allclose(cache["part.input_grad"], gradient * (cache["part.input"] > 0))


@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # a gradient that cannot be told is left out
@pytest.mark.parametrize("part", PARTS)
def test_caching_gradients_changes_nothing(x, part) -> None:
    module = Late(PARTS[part]())
    assert torch.equal(hookline.hook(module).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)[0], module(x))


def test_the_gradient_of_a_branch_is_its_own(x) -> None:
    """Dropout returns its input; the gradient of what it returns does not include the other uses of that."""

    class Branch(Ignored):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h + 2 * self.part(h)

    _, cache = hookline.hook(Branch(nn.Identity())).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    assert cache["part_grad"].eq(2).all()
    assert cache["part.input_grad"].eq(2).all()
    assert cache["fc_grad"].eq(3).all()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("grad", [True, False])
def test_an_edit_of_what_is_read_in_place_takes_effect(x, part, grad) -> None:
    module = Ignored(PARTS[part]())
    net = hookline.hook(module)

    def double(h):
        h.mul_(2)

    with torch.set_grad_enabled(grad):
        h = module.fc(x).relu() if part == "relu" else module.fc(x)
        for edit in (lambda h: h * 2, double):
            assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("part", edit)]), module.head(h * 2))


@pytest.mark.parametrize("grad", [True, False])
def test_an_edit_of_the_input_of_a_module_that_works_in_place(x, grad) -> None:
    module = Ignored(nn.ReLU(inplace=True))
    with torch.set_grad_enabled(grad):
        expected = module.head((module.fc(x) - 0.5).relu())
        out = hookline.hook(module).run_with_hooks(x, fwd_hooks=[("part.input", lambda h: h - 0.5)])
        assert torch.equal(out, expected)
        if grad:
            wanted = torch.autograd.grad(expected.sum(), module.fc.weight)
            assert torch.equal(*torch.autograd.grad(out.sum(), module.fc.weight), *wanted)


def test_an_edit_that_nobody_reads_is_told(x) -> None:
    net = hookline.hook(Ignored(nn.Linear(4, 4)))
    with pytest.warns(NeverFiredWarning, match="'part'.*Linear"):
        net.run_with_hooks(x, fwd_hooks=[("part", lambda h: h * 2)])


def test_the_callers_input_is_written_to_as_without_hooks() -> None:
    """A model that writes to its input does so whether or not somebody reads there."""
    net, x = hookline.hook(nn.Sequential(nn.ReLU(inplace=True))), torch.tensor([-1.0, 2.0])
    net.run_with_hooks(x, fwd_hooks=[("input", lambda h: None), ("0", lambda h: None)])
    assert x.tolist() == [0, 2]


class Calls(nn.Module):
    """A network whose forward is a function of the module and its input."""

    def __init__(self, forward, **modules: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(self, x)


class Turn(nn.Module):
    def forward(self, x):
        return x.T


class Detach(nn.Module):
    def forward(self, x):
        return x.detach()


@pytest.mark.parametrize("reader", [lambda kept, h: kept.append(h), lambda _, h: h], ids=["keeps", "returns"])
@pytest.mark.parametrize(
    "module", [Turn(), nn.Flatten(0), Detach(), nn.Identity()], ids=lambda each: type(each).__name__
)
def test_reading_the_input_of_a_view_that_is_written_to_changes_nothing(module, reader) -> None:
    def forward(self, x):
        h = self.a(x)
        y = self.view(h)
        y.mul_(0.5)
        return h * 2 + y.reshape(h.shape)

    network = Calls(forward, a=nn.Linear(4, 4), view=module)
    net, x, kept = hookline.hook(network), torch.randn(4, 4), []
    expected = network(x)
    expected.sum().backward()
    gradient, network.a.weight.grad = network.a.weight.grad, None
    output = net.run_with_hooks(x, fwd_hooks=[("view.input", lambda h: reader(kept, h))])
    output.sum().backward()
    assert torch.equal(output, expected)
    assert torch.allclose(network.a.weight.grad, gradient)


@pytest.mark.parametrize("point", ["same.input", "same", "input"])
def test_reading_an_input_that_is_not_a_leaf_changes_nothing(point) -> None:
    def forward(self, x):
        y = self.same(x)
        y.add_(1)
        return x + y

    network = Calls(forward, same=nn.Identity())
    net, w, kept = hookline.hook(network), torch.ones(4, requires_grad=True), []
    expected = network(w * 2)
    assert torch.equal(net.run_with_hooks(w * 2, fwd_hooks=[(point, kept.append)]), expected)
    assert torch.equal(net.run_with_hooks(w * 2, fwd_hooks=[(point, lambda h: h)]), expected)


def test_reading_a_module_called_by_itself_changes_nothing() -> None:
    network = nn.Sequential(nn.Identity())
    kept: list = []
    with hookline.hook(network).hooks(fwd_hooks=[("0.input", kept.append)]):
        network(torch.ones(4))
        h = torch.ones(4, requires_grad=True) * 2
        network[0](h).add_(1)
    assert torch.equal(h, torch.full((4,), 3.0))


def test_an_edit_before_an_in_place_module_that_gets_the_input_has_a_gradient() -> None:
    network = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    net, v, x = hookline.hook(network), torch.ones(4, requires_grad=True), torch.randn(4, 4)
    given = x.clone()
    output = net.run_with_hooks(given, fwd_hooks=[("0.input", lambda h: h + v)])
    expected = network[1](torch.relu(x + v))
    assert torch.allclose(output, expected)
    assert not given.requires_grad
    assert torch.equal(given, torch.relu(x + v))
    (found,), (wanted,) = torch.autograd.grad(output.sum(), v), torch.autograd.grad(expected.sum(), v)
    assert torch.allclose(found, wanted)


def test_an_edit_before_an_in_place_module_that_gets_a_buffer_has_a_gradient() -> None:
    def forward(self, x):
        self.buffer.copy_(self.a(x))
        return self.act(self.buffer)

    network = Calls(forward, a=nn.Linear(4, 4), act=nn.ReLU(inplace=True))
    network.register_buffer("buffer", torch.zeros(4, 4))
    net, x = hookline.hook(network), torch.randn(4, 4)
    output = net.run_with_hooks(x, fwd_hooks=[("act.input", lambda h: h * 0.5 + 1)])
    expected = torch.relu(network.a(x) * 0.5 + 1)
    assert torch.allclose(output, expected)
    weight = network.a.weight
    (found,), (wanted,) = torch.autograd.grad(output.sum(), weight), torch.autograd.grad(expected.sum(), weight)
    assert torch.allclose(found, wanted)


class Indirect(nn.Module):
    """Ignores what an in-place module returns, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.fc, self.relu, self.way = nn.Linear(4, 4), nn.ReLU(inplace=True), way
        self.row = nn.Sequential(nn.Identity(), self.relu)

    def helper(self, h: torch.Tensor) -> torch.Tensor:
        return self.relu(h)

    def in_a_row(self, h: torch.Tensor) -> None:
        self.row(h)

    def in_a_helper(self, h: torch.Tensor) -> None:
        self.helper(h)

    def in_a_lambda(self, h: torch.Tensor) -> None:
        (lambda: self.relu(h))()

    def in_a_variable(self, h: torch.Tensor) -> None:
        unused = self.relu(h)  # noqa: F841

    def in_a_with(self, h: torch.Tensor) -> None:
        self.inside_a_with(h)

    def inside_a_with(self, h: torch.Tensor) -> torch.Tensor:
        with record_function("relu"):
            return self.relu(h)

    def in_a_comprehension(self, h: torch.Tensor) -> None:
        [self.relu(x) for x in (h,)]

    def in_an_underscore(self, h: torch.Tensor) -> torch.Tensor:
        _ = self.relu(h)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        getattr(self, self.way)(h)
        return h + 0


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", [name for name in vars(Indirect) if name.startswith("in_")])
def test_an_edit_takes_effect_if_its_module_is_ignored_indirectly(x, way, grad) -> None:
    torch.manual_seed(0)
    module = Indirect(way)
    with torch.set_grad_enabled(grad):
        out = hookline.hook(module).run_with_hooks(x, fwd_hooks=[("relu", lambda h: h * 0.5 + 7)])
        expected = torch.relu(module.fc(x)) * 0.5 + 7
    assert torch.equal(out, expected)
    if grad:
        found = torch.autograd.grad(out.square().sum(), module.fc.weight)[0]
        assert torch.allclose(found, torch.autograd.grad(expected.square().sum(), module.fc.weight)[0])


def extended(self, h):
    out: list[Tensor] = []
    out.extend(map(self.part, [h]))
    return out[0] + 10 * h


def unpacked(self, h):
    _, second = map(self.part, (h, h * 2))
    return second + 10 * h


def extended_by_a_function(self, h):
    out: list[Tensor] = []
    out.extend(map(lambda x: self.part(x), [h]))  # noqa: C417
    return out[0] + 10 * h


@pytest.mark.parametrize("body", [extended, unpacked, extended_by_a_function])
def test_an_edit_leaves_the_argument_alone_if_a_function_in_c_takes_the_result(x, body) -> None:
    expected = 10 * x
    out = hookline.hook(Calls(body, part=nn.Identity())).run_with_hooks(x, fwd_hooks=[("part", lambda h: h * 0)])
    assert torch.equal(out, expected)


def test_what_a_torch_hook_returns_is_not_what_its_module_returns(x) -> None:
    """A pre-hook calls a module for the arguments of another one, whose result is ignored."""
    seen: list[Tensor] = []

    def forward(self, x):
        h = x + 0
        self.other(h)
        return h

    module = Calls(forward, part=nn.Identity(), other=nn.Identity())
    module.other.register_forward_pre_hook(lambda _, given: module.part(given[0]))
    module.other.register_forward_hook(lambda _, given, out: seen.append(out))
    assert torch.equal(hookline.hook(module).run_with_hooks(x, fwd_hooks=[("part", lambda h: h * 0)]), x)
    assert torch.equal(seen[0], x * 0)


class Gate(nn.Module):
    """Works in place on a view whose rows are not side by side in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(4, 8), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, -1)
        return self.act(value) * gate


@pytest.mark.parametrize("point", ["act", "act.input", "up"])
def test_reading_a_view_that_is_written_to_changes_no_bit(point) -> None:
    net, x = hookline.hook(Gate()), torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        assert torch.equal(net.run_with_hooks(x, fwd_hooks=[(point, lambda value: None)]), net.module(x))


class LastTwice(nn.Module):
    """Returns its hidden state, and again as the last one of a list, like the backbones of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        first = self.fc(x)
        last = self.fc(first)
        return last, {"states": [first, last]}


class UsesTheSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = LastTwice(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x)[1]["states"][-1])


def test_a_tensor_that_an_output_has_twice_is_edited_in_both_places() -> None:
    net, x = hookline.hook(UsesTheSecond()), torch.randn(3, 4)
    expected = net.module.head(torch.zeros(3, 4))
    for hook in (torch.zeros_like, lambda h: h.mul_(0)):
        assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("backbone", hook)]), expected)
    gradients: list[Tensor] = []
    _, cache = net.run_with_cache(
        x, incl_bwd=True, names_filter="backbone", bwd_hooks=[("backbone", gradients.append)], loss_fn=torch.sum
    )
    by_hand = net.module.head.weight.sum(0).expand(3, 4)
    torch.testing.assert_close(cache["backbone_grad"], by_hand)
    torch.testing.assert_close(gradients, [by_hand])

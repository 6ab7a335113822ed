"""The gradient at a point whose memory the model writes to later: that of what left the point."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hookline


def added(net: nn.Module, x: Tensor) -> Tensor:
    h = net.act(net.fc(x))
    h += x
    return net.head(h)


def used_before(net: nn.Module, x: Tensor) -> Tensor:
    h = net.act(net.fc(x))
    before = h * 2
    h.mul_(3)
    return net.head(h) + before


def written_in_part(net: nn.Module, x: Tensor) -> Tensor:
    h = net.act(net.fc(x))
    h[:, :2] *= 3
    return net.head(h)


def in_place_function(net: nn.Module, x: Tensor) -> Tensor:
    return net.head(torch.relu_(net.act(net.fc(x))))


def view(net: nn.Module, x: Tensor) -> Tensor:
    h = net.act(net.fc(x).view(-1, 2, 2))
    h += 1
    return net.head(h.mul_(2).flatten(1))


def transposed(net: nn.Module, x: Tensor) -> Tensor:
    h = net.act(net.fc(x).t())
    h *= 2
    return net.head(h.t())


def twice(net: nn.Module, x: Tensor) -> Tensor:
    h = net.act(net.fc(x))
    h += x
    h = net.act(h)
    h *= 2
    return net.head(h)


class Net(nn.Module):
    def __init__(self, act: nn.Module, run) -> None:
        super().__init__()
        self.fc, self.act, self.head, self.run = nn.Linear(4, 4), act, nn.Linear(4, 4), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


ACTS = {
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout().eval(),
    "sequential": lambda: nn.Sequential(nn.Identity()),
}
WAYS = [added, used_before, written_in_part, in_place_function, view, transposed, twice]


def loss(y: Tensor) -> Tensor:
    return y.square().sum()


def gradients(net: nn.Module) -> list[Tensor]:
    values = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return values


def by_hand(net: Net, x: Tensor, point: str, scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of clones that torch hooks put at a point, which are scaled there, and those of the parameters."""
    seen = []

    def cloned(value: Tensor) -> Tensor:
        value = value.clone()
        value.register_hook(lambda grad: (seen.append(grad), grad * scale)[1])
        return value

    if point.endswith(".input"):
        handle = net.act.register_forward_pre_hook(lambda _module, args: (cloned(args[0]),))
    else:
        handle = net.act.register_forward_hook(lambda _module, _args, output: cloned(output))
    loss(net(x)).backward()
    handle.remove()
    return seen, gradients(net)


def all_close(values: list[Tensor], expected: list[Tensor]) -> bool:
    return len(values) == len(expected) and all(map(torch.allclose, values, expected))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("point", ["act", "act.input"])
def test_the_gradient_of_what_the_model_writes_to_later(way, act, point) -> None:
    net, x, seen = Net(ACTS[act](), way), torch.randn(3, 4), []
    hooked = hookline.hook(net)
    for scale in (1.0, 2.0):
        expected, of_parameters = by_hand(net, x, point, scale)
        with hooked.hooks(bwd_hooks=[(point, lambda grad, scale=scale: (seen.append(grad.clone()), grad * scale)[1])]):
            loss(hooked(x)).backward()
        assert all_close(seen, expected)
        assert all_close(gradients(net), of_parameters)
        seen.clear()
    expected, _ = by_hand(net, x, point, 1.0)
    _, cache = hooked.run_with_cache(x, incl_bwd=True, loss_fn=loss)
    keys = [f"{point}_grad"] if len(expected) == 1 else [f"{point}#1_grad", f"{point}#0_grad"]
    assert all_close([cache[key] for key in keys], expected)


def test_gradients_of_points_on_one_tensor_pass_the_later_point_first() -> None:
    net, x, order = Net(nn.Identity(), added), torch.randn(3, 4), []
    hooked = hookline.hook(net)
    hooks = [(name, lambda grad, hook: (order.append(hook.name), grad * 2)[1]) for name in ("fc", "act.input", "act")]
    loss(net(x)).backward()
    plain = gradients(net)
    with hooked.hooks(bwd_hooks=hooks):
        loss(hooked(x)).backward()
    assert order == ["act", "act.input", "fc"]
    assert torch.equal(gradients(net)[0], plain[0] * 8)


def test_a_write_after_the_module_has_used_its_input_does_not_change_whose_gradient_it_is() -> None:
    """The caller's tensor has uses of its own, which are not the module's."""

    def residual(net: nn.Module, x: Tensor) -> Tensor:
        h = net.fc(x) * 1
        h += torch.tanh(net.head(h))
        return h

    net, x, seen = Net(nn.Identity(), residual), torch.randn(3, 4), []
    net.head.register_forward_pre_hook(lambda _module, args: (args[0].clone(),))
    handle = net.head.register_forward_pre_hook(lambda _module, args: args[0].register_hook(seen.append) and None)
    loss(net(x)).backward()
    handle.remove()
    hooked = hookline.hook(net)
    for module in (net.head, nn.Sequential(net.head)):
        net.head = module
        _, cache = hooked.run_with_cache(x, incl_bwd=True, loss_fn=loss)
        assert torch.allclose(cache["head.input_grad"], seen[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.last = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.relu(self.norm(self.conv(x))))
        h += x
        return self.relu(h)


def test_a_backward_hook_that_only_reads_changes_no_bit_of_the_gradients() -> None:
    """Zeros in another layout, added to a gradient, made convolutions choose other kernels."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Block(), Block()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    loss(net(x)).backward()
    plain, hooked = gradients(net), hookline.hook(net)
    for point in hooked.hook_dict:
        with hooked.hooks(bwd_hooks=[(point, lambda grad: None)]):
            loss(hooked(x)).backward()
        assert all(map(torch.equal, gradients(net), plain)), point


IN_PLACE = (
    *(nn.CELU, nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.RReLU),
    *(nn.SELU, nn.SiLU, partial(nn.Threshold, 0.1, 0.0), nn.Dropout),
)


@pytest.mark.parametrize("activation", IN_PLACE, ids=lambda each: getattr(each, "func", each).__name__)
def test_a_backward_hook_that_only_reads_keeps_the_strides_of_gradients_at_in_place_activations(activation) -> None:
    """Gradients of what is written to a view have the strides of its base, and convolutions chose other kernels."""
    block = [nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8), activation(inplace=True)]
    net = nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)).eval()
    net.to(memory_format=torch.channels_last)
    x = torch.randn(4, 16, 12, 12).to(memory_format=torch.channels_last)
    loss(net(x)).backward()
    plain, hooked, seen = gradients(net), hookline.hook(net), []
    for point in hooked.hook_dict:
        with hooked.hooks(bwd_hooks=[(point, seen.append)]):
            loss(hooked(x)).backward()
        assert all(map(torch.equal, gradients(net), plain)), point
    assert len(seen) == len(hooked.hook_dict)


def test_the_gradient_at_an_activation_in_place_is_that_of_its_uses_from_there_on() -> None:
    class UsedBefore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.Hardswish(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            before = h * 2
            self.act(h)
            return before + h * 3

    net, x, seen = UsedBefore(), torch.randn(5, 4), []
    value = net.fc(x).detach().requires_grad_()
    expected = torch.autograd.grad(loss(value.detach() * 2 + nn.functional.hardswish(value) * 3), value)[0]
    with hookline.hook(net).hooks(bwd_hooks=[("act.input", lambda grad: seen.append(grad.clone()))]):
        loss(net(x)).backward()
    torch.testing.assert_close(seen, [expected])


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_at_dropout_in_place_in_eval_mode(frozen) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(inplace=True), nn.Linear(4, 4)).eval().requires_grad_(not frozen)
    _, cache = hookline.hook(net).run_with_cache(torch.randn(3, 4), incl_bwd=True, loss_fn=loss)
    assert all(torch.equal(cache[f"{point}_grad"], cache["2.input_grad"]) for point in ("0", "1.input", "1"))


def test_gradients_of_sparse_activations() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.same, self.head = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.same(self.fc(x).to_sparse()).to_dense())

    _, cache = hookline.hook(Sparse()).run_with_cache(torch.randn(3, 4), incl_bwd=True, loss_fn=loss)
    for point in ("same.input", "same"):
        assert torch.allclose(cache[f"{point}_grad"].to_dense(), cache["head.input_grad"])


def test_a_gradient_leaves_the_strides_of_an_axis_of_length_one() -> None:
    class LastToFirst(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 3, 1, 2)

    net = nn.Sequential(nn.LayerNorm(32), LastToFirst(), nn.Conv2d(32, 32, 3, padding=1, groups=32))
    x, hooked = torch.randn(1, 3, 32, 32), hookline.hook(net)
    for point in hooked.hook_dict:
        assert torch.equal(hooked.run_with_hooks(x, bwd_hooks=[(point, lambda grad: None)]), net(x)), point


def test_gradients_of_parts_of_one_output_are_those_after_every_hook() -> None:
    """The hook at one part and the record of it are apart, with the record of another part between them."""
    net = hookline.hook(nn.Sequential(nn.LSTM(4, 4), nn.Identity()))
    net.module[1].forward = lambda outputs: outputs[0].sum() + outputs[1][0].sum() * 3
    names, x = ["0[0]", "0[1][0]"], torch.randn(3, 2, 4)
    for point in names:
        _, plain = net.run_with_cache(x, names_filter=names, incl_bwd=True)
        _, cache = net.run_with_cache(x, names_filter=names, incl_bwd=True, bwd_hooks=[(point, lambda grad: grad * 2)])
        assert torch.equal(cache[f"{point}_grad"], plain[f"{point}_grad"] * 2)


class UsedBefore(nn.Module):
    """An activation that is used, and then overwritten; it is a view of what a linear layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.SiLU(inplace=True)

    def forward(self, x):
        h = self.fc(x)
        before = h.tanh()
        self.act(h)
        return before + h


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4)])
def test_the_gradient_at_the_input_of_an_in_place_activation_is_not_that_of_earlier_uses(shape) -> None:
    module, x, seen = UsedBefore(), torch.randn(shape), []
    h = module.fc(x).detach().requires_grad_()
    torch.nn.functional.silu(h).sum().backward()
    net = hookline.hook(module)
    net.run_with_hooks(x, bwd_hooks=[("act.input", seen.append)]).sum().backward()
    assert torch.allclose(seen[0], h.grad)

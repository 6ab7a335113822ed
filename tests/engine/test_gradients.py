"""Backward hooks and gradients in the cache."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import tiny_models
import torch
from networks import InPlace, Twice, fill, nodes, zero
from torch import Tensor, nn

import hookline
from hookline import HookError, HooklineError, NeverFiredWarning
from hookline.errors import UnavailablePointError


def test_gradients_of_inputs_and_outputs(net, x) -> None:
    seen = {}

    def keep(grad, hook):
        seen[hook.name] = grad

    loss = net.run_with_hooks(x, bwd_hooks=[("*", keep)]).pow(2).sum()
    assert seen == {}
    loss.backward()
    h = net.module.fc1(x).detach().requires_grad_()
    a = net.module.act(h)
    a.retain_grad()
    y = net.module.fc2(a)
    y.retain_grad()
    y.pow(2).sum().backward()
    assert torch.allclose(seen["fc1"], h.grad)
    assert torch.allclose(seen["act.input"], h.grad)
    assert torch.allclose(seen["act"], a.grad)
    assert torch.allclose(seen["fc2.input"], a.grad)
    assert torch.allclose(seen["output"], y.grad)
    assert torch.allclose(seen["fc1.input"], h.grad @ net.module.fc1.weight)
    assert seen["input"].shape == x.shape
    assert not x.requires_grad


def replace_with_ones(grad):
    return torch.ones_like(grad)


def write_ones(grad):
    grad.fill_(1.0)


def ones_in_a_tuple(grad):
    return (torch.ones_like(grad),)


@pytest.mark.parametrize("edit", [replace_with_ones, write_ones, ones_in_a_tuple])
@pytest.mark.parametrize("point", ["fc1", "act.input", "act", "fc2.input"])
def test_a_gradient_can_be_replaced(net, x, edit, point) -> None:
    net.run_with_hooks(x, bwd_hooks=[(point, edit)]).sum().backward()
    bias = net.module.fc1.bias
    h = net.module.fc1(x).detach().requires_grad_()
    if point in ("fc1", "act.input"):
        expected = torch.full((8,), 5.0)
    else:
        net.module.act(h).sum().backward()
        expected = h.grad.sum(0)
    assert torch.allclose(bias.grad, expected)


def test_backward_hooks_fire_in_order_and_chain(net, x) -> None:
    seen = []

    def note(tag):
        def hook(grad):
            seen.append((tag, grad[0, 0].item()))
            return grad * 2

        return hook

    net.add_hook("output", note("a"), dir="bwd")
    with net.hooks(bwd_hooks=[("output", note("b"))]):
        net.run_with_hooks(x, bwd_hooks=[("output", note("c"))]).sum().backward()
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 4.0)]
    net.reset_hooks()


@pytest.mark.parametrize("order", ["in_place first", "returned first", "backward only"])
@pytest.mark.parametrize("point", ["fc1", "act", "fc2.input", "input"])
def test_forward_and_backward_hooks_on_one_point(net, x, order, point) -> None:
    seen = []

    def in_place(h):
        h.mul_(2)

    def returned(h):
        return h + 1

    forward = {"in_place first": [in_place, returned], "returned first": [returned, in_place], "backward only": []}
    fwd_hooks = [(point, hook) for hook in forward[order]]
    out = net.run_with_hooks(x, fwd_hooks=fwd_hooks, bwd_hooks=[(point, seen.append)])
    out.sum().backward()

    value = net.run_with_cache(x)[1][point]
    if order == "in_place first":
        value = value * 2 + 1
    elif order == "returned first":
        value = (value + 1) * 2
    value.requires_grad_()
    rest = {
        "fc1": lambda v: net.module.fc2(net.module.act(v)),
        "act": net.module.fc2,
        "fc2.input": net.module.fc2,
        "input": net.module,
    }
    expected_out = rest[point](value)
    expected_out.sum().backward()
    assert torch.allclose(out, expected_out)
    assert torch.allclose(seen[0], value.grad), "the gradient of what flowed out, after the edits"


def test_a_gradient_before_an_in_place_op_of_the_model(x) -> None:
    module, seen = InPlace(), []
    hookline.hook(module).run_with_hooks(x, bwd_hooks=[("fc1", seen.append)]).sum().backward()
    h = module.fc1(x).detach().requires_grad_()
    g = h.clone().relu_()
    z = (module.fc2(g) + g).relu()
    z[:, 1:].sum().backward()
    assert torch.allclose(seen[0], h.grad)


def test_incl_bwd(net, x) -> None:
    out, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=lambda out: out.pow(2).sum())
    assert torch.allclose(cache["output_grad"], 2 * out)
    assert torch.allclose(cache["fc2.input_grad"], 2 * out @ net.module.fc2.weight)
    assert torch.equal(cache["fc1.output_grad"], cache["fc1_grad"])
    assert all(parameter.grad is None for parameter in net.parameters())
    _, cache = net.run_with_cache(x, names_filter="fc1")
    with pytest.raises(UnavailablePointError, match=r"'fc1'.*incl_bwd=True"):
        cache["fc1_grad"]


def test_incl_bwd_of_frozen_parameters_and_repeated_modules(x) -> None:
    net = hookline.hook(Twice())
    net.requires_grad_(False)
    _, cache = net.run_with_cache(x, names_filter="cell", incl_bwd=True, loss_fn=torch.sum)
    weight = net.module.cell.weight
    assert list(cache) == ["cell#0", "cell#1", "cell#2", "cell#0_grad", "cell#1_grad", "cell#2_grad"]
    assert cache["cell#2_grad"].eq(1).all()
    assert torch.allclose(cache["cell#0_grad"], torch.ones(5, 4) @ weight @ weight)


@dataclass
class WithLoss:
    loss: Tensor


def test_incl_bwd_takes_the_models_own_loss(x) -> None:
    class Losing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return WithLoss(self.fc(x).sum())

    _, cache = hookline.hook(Losing()).run_with_cache(x, incl_bwd=True)
    assert cache["fc_grad"].eq(1).all()


def test_incl_bwd_says_what_it_lacks(net, x) -> None:
    with pytest.raises(HooklineError, match=r"\(5, 3\)"):
        net.run_with_cache(x, incl_bwd=True)
    with pytest.raises(HooklineError, match="gradients"), torch.no_grad():
        net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    with pytest.raises(HooklineError, match="gradient path"):
        net.run_with_cache(x, incl_bwd=True, loss_fn=lambda out: out.sum().detach())


def test_a_backward_hook_that_cannot_fire_is_reported(net, x) -> None:
    with torch.no_grad(), pytest.warns(NeverFiredWarning, match="'fc1'.*gradients"):
        net.run_with_hooks(x, bwd_hooks=[("fc1", zero)])
    embedding = hookline.hook(nn.Embedding(3, 2))
    with pytest.warns(NeverFiredWarning, match=r"torch\.int64"):
        embedding.run_with_hooks(torch.tensor([1]), bwd_hooks=[("input", zero)])


@pytest.mark.on_cpu(reason="elsewhere torch runs the backward pass in a thread of its own, where no hooks are on")
def test_a_forward_inside_a_backward_is_hooked_like_any_other(net, x) -> None:
    outs = []
    loss = net(x).sum()
    handle = loss.register_hook(lambda grad: outs.append(net(x)))
    with net.hooks(fwd_hooks=[("output", fill(1))]):
        loss.backward()
    handle.remove()
    assert outs[0].eq(1).all()


def test_a_backward_inside_a_forward_hook(x) -> None:
    net, calls = hookline.hook(Twice()), []

    def differentiate(h, hook):
        torch.autograd.grad(h.sum(), net.module.cell.weight, retain_graph=True)
        calls.append(hook.call)

    net.run_with_hooks(x, fwd_hooks=[("cell", differentiate)], bwd_hooks=[("cell", lambda grad: None)])
    assert calls == [0, 1, 2]


def test_a_backward_hook_that_fired_once_is_not_reported(net, x) -> None:
    """Training with gradients, then validating without: nothing to complain of."""
    net.add_hook("fc1", lambda grad: None, dir="bwd")
    net(x).sum().backward()
    with torch.no_grad():
        net(x)
    net.reset_hooks()


def test_a_bad_gradient(net, x) -> None:
    loss = net.run_with_hooks(x, bwd_hooks=[("fc1", lambda grad: grad[:1])]).sum()
    with pytest.raises(HookError, match=r"\(1, 8\).*\(5, 8\)"):
        loss.backward()


class WritesAfter(nn.Module):
    """Writes to what its modules return, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.f(x).relu_()
        h = self.g(h).mul_(3)
        h[:, 0] = 0
        return self.relu(h)


def test_incl_bwd_where_the_model_writes_in_place(x) -> None:
    """The gradient of what left the point, not of what the model made of that memory afterwards."""
    net, seen = hookline.hook(WritesAfter()), {}

    def keep(grad, hook):
        seen[hook.name] = grad

    net.run_with_hooks(x, bwd_hooks=[("*", keep)]).sum().backward()
    _, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    assert all(torch.allclose(cache[f"{name}_grad"], grad) for name, grad in seen.items())
    assert torch.equal(cache["f_grad"], cache["f_grad"] * (cache["f"] > 0))
    assert cache["g_grad"][:, 0].eq(0).all()
    assert torch.allclose(cache["relu.input_grad"][:, 1:], cache["g_grad"][:, 1:] / 3)


def test_a_cached_gradient_is_what_flows_back_after_every_hook(net, x) -> None:
    _, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum, bwd_hooks=[("output", lambda grad: grad * 5)])
    assert cache["output_grad"].eq(5).all()


def test_a_hook_may_ask_autograd_itself(net, x) -> None:
    """The tensor that a hook is given is on the way to the output, whether or not the hook changes it."""
    kept = []

    def ask(h):
        h.retain_grad()
        h.register_hook(lambda grad: grad * 0)
        kept.append(h)

    out = net.run_with_hooks(x, fwd_hooks=[("act", ask)])
    assert torch.equal(out, net(x))
    (gradient,) = torch.autograd.grad(out.sum(), kept[0], retain_graph=True)
    assert gradient.eq(0).all()
    out.sum().backward()
    assert kept[0].grad.eq(0).all()
    assert net.module.fc1.weight.grad.eq(0).all()


def test_what_a_hook_keeps_is_in_the_graph_and_what_it_only_reads_is_not(net, x) -> None:
    """Whether it keeps the tensor is known from the number of references, which each version of Python counts anew."""
    kept, plain = [], nodes(net(x))
    assert nodes(net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: None)])) == plain
    assert nodes(net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: kept.append(h.detach().mean()))])) == plain
    assert nodes(net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: kept.append(h))])) > plain


def test_incl_bwd_without_a_point_that_has_gradients() -> None:
    net = hookline.hook(nn.Embedding(3, 2))
    with pytest.raises(HooklineError, match="gradient"):
        net.run_with_cache(torch.tensor([1]), names_filter="input", incl_bwd=True, loss_fn=torch.sum)
    with pytest.raises(HooklineError, match="incl_bwd=True"):
        net.run_with_cache(torch.tensor([1]), loss_fn=torch.sum)


def test_a_loss_function_that_writes_to_the_output_changes_nothing_else():
    net, x = hookline.hook(nn.Linear(3, 2)), torch.randn(4, 3)

    def halved(out):
        out /= 2
        return out.pow(2).sum()

    out, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=halved)
    assert torch.equal(out, net(x))
    torch.testing.assert_close(cache["output_grad"], out / 2)


def test_a_context_lets_go_of_each_pass_that_a_backward_hook_saw() -> None:
    handed = []

    class Noting(nn.Tanh):
        def forward(self, x):
            handed.append(weakref.ref(x))
            return super().forward(x)

    module = nn.Sequential(nn.Linear(4, 4), Noting(), nn.Linear(4, 4))
    net, x = hookline.hook(module), torch.randn(2, 4)
    with net.hooks(bwd_hooks=[("0", lambda grad: grad * 2)]):
        for call in (net, net.module, module[:2]):  # the last is no pass of the whole model
            for _ in range(2):
                call(x).sum().backward()
        assert [each() is None for each in handed[:-1]] == [True] * 5
    assert handed[-1]() is None


def test_a_failed_run_lets_go_of_what_a_backward_hook_saw() -> None:
    handed = []

    class Failing(nn.Module):
        def forward(self, x):
            handed.append(weakref.ref(x))
            raise RuntimeError("no")

    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), Failing()))
    with pytest.raises(RuntimeError, match="no"):
        net.run_with_hooks(torch.randn(2, 4), bwd_hooks=[("0", lambda grad: grad * 2)])
    gc.collect()
    assert handed[0]() is None


class PartInPlace(nn.Module):
    """An in-place module works on a part of a tensor that is used as a whole afterward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.fc(x)
        return self.act(h[:, :2]), h


def test_a_backward_hook_at_an_in_place_module_on_a_part_leaves_the_gradient_of_the_whole() -> None:
    module, x = PartInPlace(), torch.randn(3, 4)
    sum(out.sum() for out in module(x)).backward()
    expected = module.fc.weight.grad.clone()
    module.zero_grad()
    outputs = hookline.hook(module).run_with_hooks(x, bwd_hooks=[("act", lambda grad: None)])
    sum(out.sum() for out in outputs).backward()
    assert torch.equal(module.fc.weight.grad, expected)


@pytest.mark.parametrize("order", [("z", "input"), ("input", "z"), ("z", "input", "z"), ("input", "z", "input")])
def test_backward_hooks_at_a_tensor_and_at_a_view_of_it_run_in_the_order_in_which_they_were_added(order) -> None:
    model = tiny_models.causal_lm("llama")
    names = {"z": "blocks.0.attn.hook_z", "input": "model.layers.0.self_attn.o_proj.input"}
    seen = []

    def hook(name):
        def double(grad):
            seen.append((name, grad.norm().item()))
            return grad * 2

        return double

    net, ids = hookline.hook(model), torch.tensor([[1, 2, 3]])
    net.run_with_hooks(ids, bwd_hooks=[(names[name], hook(name)) for name in order]).sum().backward()
    grouped = sorted(order, key=order.index)  # hooks of one view get its gradient together
    assert [name for name, _ in seen] == grouped
    assert [size for _, size in seen] == pytest.approx([seen[0][1] * 2**index for index in range(len(order))])

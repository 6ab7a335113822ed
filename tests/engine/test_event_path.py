"""Corners of the event path: checkpoints that recompute, hooks that run models, hooks that remove themselves."""

import pytest
import tiny_models
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import HookError, HooklineError
from hookline.hooks import Controller


class Net(nn.Module):
    """Runs one of its methods, perhaps under a checkpoint."""

    def __init__(self, body: str, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.body, self.reentrant = body, reentrant

    def once(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.fc(x)))

    def twice(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc(x))) ** 2

    def ignored(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.relu(h)
        return self.out(h * h)

    def named(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        relu = self.relu(h)  # noqa: F841 (the name of an attribute that is read)
        return self.out(h * h)

    def forward(self, x: Tensor) -> Tensor:
        body = getattr(self, self.body)
        return body(x) if self.reentrant is None else checkpoint(body, x, use_reentrant=self.reentrant)


MID = "blocks.0.hook_resid_mid"
X = torch.tensor([[-1.0, 2, -3, 1], [1, -2, 3, -1]])


def triple(h: Tensor) -> Tensor:
    return h * 3 + 1


def gradient(body: str, reentrant: bool | None, run) -> Tensor:
    x = X.clone().requires_grad_()
    run(hookline.hook(Net(body, reentrant=reentrant)), x).sum().backward()
    assert x.grad is not None
    return x.grad


def edit(net, x):
    return net.run_with_hooks(x, fwd_hooks=[("relu", triple)])


def edit_gradient(net, x):
    return net.run_with_hooks(x, bwd_hooks=[("relu", lambda grad: grad * 5)])


def edit_by_another_model(net, x):
    other = hookline.hook(Net("once"))

    def with_a_run(h: Tensor) -> Tensor:
        with torch.no_grad():
            other.run_with_cache(X)
        return h * 3

    return net.run_with_hooks(x, fwd_hooks=[("fc", with_a_run)])


def two_contexts(net, x):
    double = [("fc", lambda grad: grad * 2)]
    with net.hooks(bwd_hooks=double), net.hooks(bwd_hooks=double):
        return net(x)


def add_a_hook_later(net, x):
    out = net(x)
    net.add_hook("fc", triple)
    net(X.clone().requires_grad_())
    return out


def disable_an_object_later(net, x):
    class Triple(Controller):
        def modify_activations(self, module, inputs, output):
            return output * 3

    hook = Triple()
    with net.hooks(fwd_hooks=[("fc", hook)]):
        out = net(x)
    hook.disable()
    return out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("body", "run"),
    [
        ("ignored", edit),
        ("named", edit),
        ("ignored", edit_gradient),
        ("once", edit_by_another_model),
        ("once", two_contexts),
        ("once", add_a_hook_later),
        ("once", disable_an_object_later),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_gradients_are_those_without_a_checkpoint(body, run, reentrant) -> None:
    expected = gradient(body, None, run)
    assert torch.allclose(gradient(body, reentrant, run), expected)
    plain = gradient(body, None, lambda net, x: net(x))
    assert torch.allclose(expected, plain) == (run is add_a_hook_later)


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_call_in_a_region_that_recomputes_is_refused(reentrant) -> None:
    with pytest.raises(HookError, match="fc#0"):
        gradient("twice", reentrant, lambda net, x: net.run_with_hooks(x, fwd_hooks=[("fc#0", triple)]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_hook_that_is_removed_before_the_backward_pass_is_noticed(reentrant) -> None:
    def remove(net, x):
        net.add_hook("fc", triple)
        out = net(x)
        net.reset_hooks()
        return out

    with pytest.raises(HooklineError, match="'fc'"):
        gradient("once", reentrant, remove)


def test_a_hook_that_runs_the_model_leaves_derived_points_alone() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    ids, others = torch.tensor([[1, 2, 3]]), torch.tensor([[7, 8, 9]])

    def run(x: Tensor) -> None:
        if not running:
            running.append(1)
            model.run_with_cache(others, names_filter=MID)
            running.clear()

    running: list[int] = []
    with torch.no_grad():
        _, expected = model.run_with_cache(ids, names_filter=MID)
        with model.hooks(fwd_hooks=[("blocks.0.hook_attn_out", run)]):
            _, found = model.run_with_cache(ids, names_filter=MID)
    assert torch.equal(found[MID], expected[MID])


def test_a_permanent_hook_that_removes_itself_leaves_the_model_as_it_is() -> None:
    module = Net("ignored")
    net = hookline.hook(module)
    with torch.no_grad():
        expected = module(X)
        remove = net.add_hook("relu.input", lambda h: remove())
        assert torch.equal(net(X), expected)
        assert torch.equal(net(X), expected)


def test_an_edit_in_a_module_that_is_called_by_itself_takes_effect() -> None:
    inner = Net("ignored")
    net = hookline.hook(nn.Sequential(inner))
    with torch.no_grad(), net.hooks(fwd_hooks=[("0.relu", triple)]):
        found = inner(X)
        expected = inner.out(triple(torch.relu(inner.fc(X))) ** 2)
    assert torch.allclose(found, expected)


def test_a_cache_has_what_a_hook_of_others_made_that_was_added_in_a_context() -> None:
    net, x = hookline.hook(nn.Sequential(nn.ReLU(inplace=True))), torch.randn(2, 4)
    with net.hooks([("0", lambda x: None)]):
        handle = net.module[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        _, cache = net.run_with_cache(x.clone())
        handle.remove()
    assert torch.equal(cache["0.input"], x + 1)


def test_an_error_that_the_user_caught_is_not_raised_again(net, x) -> None:
    def fail(x):
        raise ZeroDivisionError

    for point in ("fc1", "output", "output#0"):
        with net.hooks([(point, fail)]), pytest.raises(HookError):
            net(x)


def test_an_error_that_a_model_without_an_output_swallows_is_raised() -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> None:
            try:
                self.fc(x)
            except RuntimeError:
                pass
            except Exception:
                return

    def fail(h: Tensor) -> None:
        raise ValueError

    net = hookline.hook(Swallows())
    with pytest.raises(HookError), net.hooks(fwd_hooks=[("fc", fail)]):
        net(X)
    try:
        raise KeyError
    except KeyError:  # what the caller handles is not an error of the model
        with pytest.raises(HookError), net.hooks(fwd_hooks=[("fc", fail)]):
            net(X)

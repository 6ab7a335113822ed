"""Hooks on compiled networks are honoured, whenever they are added, and compile nothing anew."""

import subprocess
import sys
import threading

import pytest
import torch
from backends import Counting, needs_compiler
from networks import MLP
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler's own imports
]


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def ways(module: nn.Module, backend) -> dict:
    """The ways in which people compile: each gives what is called, and what is hooked."""
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    function = torch.compile(lambda x: module(x), backend=backend, fullgraph=True)
    return {
        "wrapped after compiling": (hookline.hook(compiled), hookline.hook(compiled)),
        "compiled after wrapping": (compiled, hookline.hook(module)),
        "a function around it": (function, hookline.hook(module)),
    }


@pytest.mark.parametrize("way", ["wrapped after compiling", "compiled after wrapping", "a function around it"])
def test_hooks_added_after_the_first_call_are_honoured(backend, x, way) -> None:
    module = MLP()
    bare = module(x)
    call, net = ways(module, backend)[way]
    assert torch.allclose(call(x), bare)
    assert backend.graphs == 1
    doubled, wiped = module.fc2(2 * module.act(module.fc1(x))), module.fc2(torch.zeros(5, 8))
    for _ in range(10):
        with net.hooks(fwd_hooks=[("act", lambda h: 2 * h)]):
            assert torch.allclose(call(x), doubled)
        with net.hooks(fwd_hooks=[("act", torch.zeros_like)]):
            assert torch.allclose(call(x), wiped)
        assert torch.allclose(call(x), bare)
    undo = net.add_hook("act", torch.zeros_like)
    assert torch.allclose(call(x), wiped)
    undo()
    assert torch.allclose(call(x), bare)
    assert backend.graphs == 1, "switching between sets of hooks recompiles nothing"


@pytest.mark.parametrize("way", ["wrapped after compiling", "compiled after wrapping", "a function around it"])
def test_hooks_there_before_the_first_call_are_gone_after(backend, x, way) -> None:
    module = MLP()
    bare = module(x)
    call, net = ways(module, backend)[way]
    with net.hooks(fwd_hooks=[("fc2", torch.zeros_like)]):
        assert call(x).eq(0).all()
    assert torch.allclose(call(x), bare)
    assert torch.allclose(call(x), bare)
    assert backend.graphs == 1


def test_names_are_those_of_the_original(backend, x) -> None:
    module = nn.Sequential(torch.compile(MLP(), backend=backend, fullgraph=True), nn.Linear(3, 2))
    net = hookline.hook(torch.compile(module, backend=backend))
    net(x)
    _, cache = net.run_with_cache(x)
    assert list(cache)[:3] == ["input", "0.input", "0.fc1.input"]
    assert not any("_orig_mod" in name for name in cache)
    assert torch.equal(cache["0.fc1"], module[0].fc1(x))
    assert torch.equal(cache["0"], cache["1.input"])


def test_compiled_in_place(backend, x) -> None:
    module = MLP()
    bare = module(x)
    module.fc1.register_forward_hook(lambda *_: None).remove()
    module.compile(backend=backend)
    net = hookline.hook(module)
    net(x)
    assert net.run_with_hooks(x, fwd_hooks=[("fc2", torch.zeros_like)]).eq(0).all()
    assert torch.allclose(net(x), bare)


def test_gradients_of_a_compiled_network(backend, x) -> None:
    module = MLP()
    net = hookline.hook(torch.compile(module, backend=backend, fullgraph=True))
    net(x)
    _, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    _, expected = hookline.hook(module).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    assert list(cache) == list(expected)
    assert all(torch.allclose(cache[name], expected[name]) for name in cache)


def test_a_stance_of_the_users_own_is_restored(backend, x) -> None:
    net = hookline.hook(MLP())
    with torch.compiler.set_stance("fail_on_recompile"):
        net.run_with_cache(x)
        assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
    assert torch._dynamo.eval_frame._stance.stance == "default"


FRESH = """
import torch, hookline
from torch import nn
module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
net, x = hookline.hook(module), torch.randn(3, 4)
bare = module(x)
with net.hooks(fwd_hooks=[("0", torch.zeros_like)]):
    compiled = torch.compile(lambda x: module(x), backend="eager")
    inside = compiled(x)
assert torch.allclose(inside, module[2](torch.zeros(3, 4))), "honoured"
assert torch.allclose(compiled(x), bare), "and gone"
net.add_hook("2", torch.zeros_like)
assert compiled(x).eq(0).all(), "honoured, though added later"
net.reset_hooks()
assert torch.allclose(compiled(x), bare)
"""


@pytest.mark.slow  # importing the compiler takes most of it; the tests around it do the same after its import
def test_the_compiler_arrives_while_hooks_are_attached() -> None:
    """In a fresh process the compiler is imported by the first `torch.compile`, here inside a context."""
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=120)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_compiled_module_in_a_checkpointed_region(backend, x, use_reentrant) -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = MLP()

        def forward(self, x):
            return checkpoint(self.a, x, use_reentrant=use_reentrant)

    x.requires_grad_()
    plain, compiled = MLP(), Net()
    compiled.a.load_state_dict(plain.state_dict())
    compiled.a.compile(backend=backend)
    compiled(x)
    hookline.hook(plain).run_with_hooks(x, fwd_hooks=[("fc1", lambda h: h * 2)]).sum().backward()
    hookline.hook(compiled).run_with_hooks(x, fwd_hooks=[("a.fc1", lambda h: h * 2)]).sum().backward()
    gradients = zip(plain.parameters(), compiled.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad) for a, b in gradients)


def test_a_stance_set_inside_a_context_is_left_alone(backend, x) -> None:
    net = hookline.hook(MLP())
    with net.hooks(fwd_hooks=[("fc1", lambda h: None)]):
        net(x)
        torch.compiler.set_stance("eager_on_recompile")
    assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("is_same_model", [True, False])
def test_compiling_in_one_thread_while_another_hooks(backend, x, is_same_model) -> None:
    """Hooks come and go while graphs are traced and while `fullgraph=True` asks whether anything was compiled."""
    module = MLP()
    bare, net, is_over, failed = module(x), hookline.hook(module if is_same_model else MLP()), threading.Event(), []

    def hook() -> None:
        try:
            while not is_over.is_set():
                with net.hooks(fwd_hooks=[("act", torch.zeros_like)]):
                    net(x)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=hook)
    thread.start()
    try:
        for _ in range(6 if is_same_model else 25):
            call = torch.compile(module, backend=backend, fullgraph=True)
            assert torch.allclose(call(x), bare)
            torch._dynamo.reset()
    finally:
        is_over.set()
        thread.join()
    assert failed == []
    assert torch.allclose(torch.compile(module, backend=backend, fullgraph=True)(x), bare)
    assert backend.graphs


def test_calls_that_began_without_the_compiler_end_so(backend, x) -> None:
    """A run of another thread that ends in the middle of one does not count as a failure to compile."""
    net, inside, goes_on = hookline.hook(MLP()), threading.Event(), threading.Event()
    ready = threading.Event()

    def wait(x):
        inside.set()
        goes_on.wait(10)
        return x + 1

    def hook() -> None:
        with net.hooks(fwd_hooks=[("act", torch.zeros_like)]):
            ready.set()
            inside.wait(10)
            net(x)
        goes_on.set()

    thread = threading.Thread(target=hook)
    thread.start()
    ready.wait(10)
    assert torch.equal(torch.compile(wait, backend=backend, fullgraph=True)(x), x + 1)
    thread.join()
    assert backend.graphs == 0
    assert torch.equal(torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(x), x + 1)
    assert backend.graphs == 1

"""Our verbs in code that is being compiled: they are never traced, and leave nothing behind in the process."""

import threading
from contextlib import ExitStack

import pytest
import torch
from backends import Counting, needs_compiler
from networks import MLP, nodes
from releases import torch_is_before
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

import hookline
from hookline.hooks import Controller

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch's compiler's own
]


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def double(h: Tensor) -> Tensor:
    return h * 2


HOOKS = [("fc1", double)]


class Doubling(Controller):
    def __init__(self) -> None:
        super().__init__(layer_signature="fc1")

    def modify_activations(self, module, inputs, output):
        return output * 2


DOUBLING = Doubling()


def in_a_context(net, x, run):
    with net.hooks(fwd_hooks=HOOKS):
        return run(x)


def in_a_stack(net, x):
    with ExitStack() as stack:
        stack.enter_context(net.hooks(fwd_hooks=HOOKS))
        return net.module(x)


def with_hooks_that_stay(net, x):
    with net.hooks(fwd_hooks=HOOKS, reset_hooks_end=False):
        pass
    output = net.module(x)
    net.reset_hooks()
    return output


def with_an_added_hook(net, x):
    net.add_hook("fc1", double)
    output = net.module(x)
    net.reset_hooks()
    return output


def with_a_hook_at_a_point(net, x):
    undo = net.point("fc1").add_hook(double)
    output = net.module(x)
    undo()
    return output


def with_a_registered_hook(net, x):
    net.registry.register_hook("fc1", DOUBLING)
    output = net.module(x)
    net.registry.unregister_all()
    return output


def with_gradients(net, x):
    _, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum, fwd_hooks=HOOKS)
    return cache["fc1_grad"]


CALLS = {
    "call": lambda net, x: net(x),
    "run_with_hooks": lambda net, x: net.run_with_hooks(x, fwd_hooks=HOOKS),
    "run_with_cache": lambda net, x: net.run_with_cache(x)[1]["fc1"],
    "with hooks": lambda net, x: net.run_with_cache(x, names_filter="act", fwd_hooks=HOOKS)[1]["act"],
    "cache": lambda net, x: net.cache(x, names_filter="fc1", stop_early=True)["fc1"],
    "gradients": with_gradients,
    "hooks, called": lambda net, x: in_a_context(net, x, net),
    "hooks, the module": lambda net, x: in_a_context(net, x, net.module),
    "hooks, a stack": in_a_stack,
    "hooks that stay": with_hooks_that_stay,
    "add_hook": with_an_added_hook,
    "point.add_hook": with_a_hook_at_a_point,
    "registry": with_a_registered_hook,
    "hook": lambda net, x: hookline.hook(net.module).run_with_hooks(x, fwd_hooks=HOOKS),
    "plan": lambda net, x: x * len(str(net.plan(fwd_hooks=HOOKS))),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_verb_can_be_called_from_code_that_is_being_compiled(backend, net, x, name) -> None:
    class Calling(nn.Module):
        def forward(self, x):
            return (CALLS[name](net, x * 2) + 1).relu()

    module, clean = Calling(), net(x)
    expected = module(x)
    compiled = torch.compile(module, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected, atol=0, rtol=0)
        assert get_eval_frame_callback() is None
        assert torch.equal(net(x), clean)
    before = backend.graphs
    assert before, "what is around it is compiled"
    torch.compile(lambda x: x * 3, backend=backend)(x)
    assert backend.graphs == before + 1, "and so is what comes later"


def test_a_context_from_outside_is_entered_in_compiled_code(backend, net, x) -> None:
    context, expected = net.hooks(fwd_hooks=HOOKS), net.run_with_hooks(x, fwd_hooks=HOOKS)

    def inside(x):
        with context:
            return net.module(x) + 0

    compiled, module = torch.compile(inside, backend=backend), torch.compile(net.module, backend=backend)
    clean = module(x)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
        assert torch.equal(module(x), clean)


def test_an_error_inside_compiled_code_is_ours_and_nothing_stays(backend, net, x) -> None:
    def fail(h):
        raise ZeroDivisionError

    compiled = torch.compile(lambda x: net.run_with_hooks(x, fwd_hooks=[("fc1", fail)]) * 2, backend=backend)
    with pytest.raises(hookline.HookError, match="fc1"):
        compiled(x)
    assert get_eval_frame_callback() is None


def test_code_that_must_be_one_graph_is_refused_with_the_reason(backend, net, x) -> None:
    compiled = torch.compile(lambda x: net.run_with_hooks(x, fwd_hooks=HOOKS), backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without fullgraph=True"):
        compiled(x)


def test_a_wrapper_that_is_called_is_one_graph(backend, net, x) -> None:
    compiled = torch.compile(lambda x: net(x) * 2, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), net(x) * 2)
    assert backend.graphs == 1


@pytest.fixture(params=["never", "before", "here", "elsewhere"])
def compiler(request, backend):
    """Whether compiled code runs: then Python holds more references to the arguments of calls, in all threads."""
    if request.param == "before":
        net = hookline.hook(MLP())
        for name in ("run_with_hooks", "run_with_cache", "hooks, the module"):
            torch.compile(lambda x: CALLS[name](net, x) * 2, backend=backend)(torch.randn(5, 4))  # noqa: B023
    begun, over = threading.Event(), threading.Event()

    def run_compiled_code() -> None:
        before = set_eval_frame(False)
        begun.set()
        over.wait()
        set_eval_frame(before)

    thread = threading.Thread(target=run_compiled_code)
    if request.param == "elsewhere":
        thread.start()
        begun.wait()
    before = set_eval_frame(False) if request.param == "here" else None
    try:
        yield
    finally:
        set_eval_frame(before)
        over.set()
        if thread.ident is not None:
            thread.join()


def test_what_is_in_the_graph_does_not_depend_on_the_compiler(compiler, net, x) -> None:
    kept, plain = [], nodes(net(x))

    def reads(hook) -> int:
        return nodes(net.run_with_hooks(x, fwd_hooks=[("fc1", hook)])) - plain

    assert reads(lambda h: None) == 0
    assert reads(lambda h: kept.append(h.detach().mean())) == 0
    assert reads(lambda h: kept.append(h)) == reads(lambda h: h.retain_grad()) == 3
    writes = reads(lambda h: h.mul_(2))
    assert reads(lambda h: kept.append(h.mul_(2))) == writes + 1


@pytest.mark.on_cpu
@pytest.mark.skipif(torch_is_before("2.10"), reason="its counts do not tell whether memory has another owner")
def test_what_flows_on_itself_does_not_depend_on_the_compiler(compiler, net, x) -> None:
    """What a hook wrote to, unless it kept the tensor, a view of it or its memory."""
    kept: list = []
    keeps = {
        "nothing": (lambda h: None, True),
        "the tensor": (kept.append, False),
        "a view": (lambda h: kept.append(h.view(-1)), False),
        "the memory": (lambda h: kept.append(h.untyped_storage()), False),
        "an array": (lambda h: kept.append(h.numpy()), False),
    }
    for what, (keep, flows_on) in keeps.items():
        addresses = []

        def write(h: Tensor, keep=keep, addresses=addresses) -> None:
            h.add_(1)
            keep(h)
            addresses.append(h.data_ptr())

        handle = net.module.act.register_forward_pre_hook(lambda _, args, to=addresses: to.append(args[0].data_ptr()))
        with torch.no_grad():
            net.run_with_hooks(x, fwd_hooks=[("fc1", write)])
        handle.remove()
        assert (addresses[0] == addresses[1]) == flows_on, what


@pytest.mark.on_cpu
def test_what_is_recorded_does_not_depend_on_the_compiler(compiler, net, x) -> None:
    """An output that the module has kept, to which somebody may have a bare pointer, is copied."""

    class Keeping(nn.Module):
        def forward(self, x):
            self.kept = x * 2
            self.array = self.kept.numpy()
            return self.kept

    keeping = Keeping()
    model = hookline.hook(nn.Sequential(nn.Identity(), keeping))
    with torch.no_grad():
        for names in (None, "1"):
            _, cache = model.run_with_cache(x, names_filter=names)
            keeping.array[:] = 0
            assert torch.equal(cache["1"], x * 2)

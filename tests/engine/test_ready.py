"""Runs that are used again: every run is as if it had been planned anew."""

import gc
import warnings
import weakref

import pytest
import torch
from backends import needs_compiler
from releases import torch_is_before
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import HookError, NeverFiredWarning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.relu, self.out = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        if self.relu.inplace:
            self.relu(h)
            return self.out(h)
        return self.out(self.relu(h))


X = torch.linspace(-2, 2, 8).view(2, 4)


@pytest.fixture
def net():
    return hookline.hook(Net().eval())


def last_run(net):
    """The run that would be used again."""
    return net.index.ready_runs._runs[0][1]


def test_another_function_takes_the_place(net):
    factors = [2.0, 3.0, 5.0]
    found = [net.run_with_hooks(X, fwd_hooks=[("out", lambda h, by=by: h * by)]) for by in factors]
    first = last_run(net)
    assert net.run_with_hooks(X, fwd_hooks=[("out", lambda h: h * 7)]) is not None
    assert last_run(net) is first
    for by, output in zip(factors, found, strict=True):
        assert torch.equal(output, net(X) * by)


def test_functions_that_take_the_point_too(net):
    names = []
    net.run_with_hooks(X, fwd_hooks=[("fc", lambda h: None)])
    net.run_with_hooks(X, fwd_hooks=[("fc", lambda h, hook: names.append(hook.name))])
    net.run_with_hooks(X, fwd_hooks=[("fc", lambda h: None)])
    assert names == ["fc"]


def test_a_function_at_several_points(net):
    seen: list[str] = []
    hooks = [("fc*", lambda h, hook: seen.append(hook.name)), ("out", lambda h, hook: seen.append("last"))]
    for _ in range(3):
        net.run_with_hooks(X, fwd_hooks=hooks)
    assert seen == ["fc.input", "fc", "last"] * 3


def test_the_functions_are_not_kept(net):
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    net.run_with_hooks(X, fwd_hooks=[("fc", lambda h, held=held: None)])
    del held
    gc.collect()
    assert gone() is None


def test_hooks_added_since_come_first(net):
    def run() -> Tensor:
        return net.run_with_hooks(X, fwd_hooks=[("out", lambda h: h + 1)])

    plain = run()
    net.add_hook("out", lambda h: h * 2)
    both = run()
    net.reset_hooks()
    assert torch.equal(both, net(X) * 2 + 1)
    assert torch.equal(run(), plain)


def test_a_module_that_works_in_place_since(net):
    def run() -> Tensor:
        return net.run_with_hooks(X, fwd_hooks=[("relu", lambda h: h * 3)])

    before = run()
    net.relu.inplace = True
    assert torch.equal(run(), before)


def test_a_module_replaced_since(net):
    net.run_with_hooks(X, fwd_hooks=[("out", torch.zeros_like)])
    net.run_with_hooks(X, fwd_hooks=[("out", lambda h: h * 0)])
    net.out = nn.Linear(4, 4)
    assert not net.run_with_hooks(X, fwd_hooks=[("out", lambda h: h * 0)]).any()


@pytest.mark.parametrize("use", ["hooks", "cache"])
def test_a_module_in_two_places_replaced_in_one_since(use):
    net = Net()
    net.first, net.second = nn.Sequential(net.fc), nn.Sequential(net.fc)
    net.forward = lambda x: net.second(net.first(x))
    net = hookline.hook(net.eval())

    def run() -> Tensor:
        if use == "hooks":
            return net.run_with_hooks(X, fwd_hooks=[("second.0", lambda h: h * 0)])
        return net.run_with_cache(X, names_filter="second.0")[1].calls("second.0")[-1]

    run()
    net.module.second[0] = nn.Linear(4, 4)
    assert torch.equal(run(), net(X) * 0 if use == "hooks" else net(X))


@pytest.mark.parametrize("use", ["hooks", "cache"])
@pytest.mark.parametrize("name", ["part.output", "output"])
def test_a_child_that_takes_a_name_over_since(name, use):
    net = hookline.hook(nn.Sequential())
    net.module.part = nn.Sequential(nn.Linear(4, 4))

    def run() -> Tensor:
        if use == "hooks":
            return net.run_with_hooks(X, fwd_hooks=[(name, lambda h: h * 0)])
        return net.run_with_cache(X, names_filter=name)[1][name]

    before = run()
    parent = net.module.part if name == "part.output" else net.module
    parent.output, parent.last = nn.Tanh(), nn.Softmax(-1)
    assert torch.equal(run(), torch.full((2, 4), 0.25) if use == "hooks" else before.tanh())


def test_calls_are_counted_from_0(net):
    calls = []
    for _ in range(3):
        net.run_with_hooks(X, fwd_hooks=[("fc", lambda h, hook: calls.append(hook.call))])
    assert calls == [0, 0, 0]


def test_warnings_come_every_time():
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.aside = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.aside(x)
            return self.fc(x)

    net = hookline.hook(Ignores())
    for _ in range(3):
        with pytest.warns(NeverFiredWarning, match="discards"):
            net.run_with_hooks(X, fwd_hooks=[("aside", lambda h: h * 2)])


def test_after_an_error(net):
    def fails(h: Tensor) -> Tensor:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(HookError, match="no"):
            net.run_with_hooks(X, fwd_hooks=[("fc", fails)])
        assert torch.equal(net.run_with_hooks(X, fwd_hooks=[("fc", lambda h: None)]), net(X))


def test_a_hook_that_runs_the_same_hooks(net):
    def calls(pair: type) -> int:
        depths: list[int] = []

        def hook(h: Tensor) -> Tensor:
            depths.append(len(depths))
            if len(depths) < 4:
                net.run_with_hooks(X, fwd_hooks=[pair(("fc", hook))])
            return h * 2

        expected = net.run_with_hooks(X, fwd_hooks=[("fc", lambda h: h * 2)])
        assert torch.equal(net.run_with_hooks(X, fwd_hooks=[pair(("fc", hook))]), expected)
        return len(depths)

    assert calls(tuple) == calls(list)  # a list is planned anew


def test_a_checkpoint_keeps_its_run():
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def gradient(net: nn.Module, *factors: float) -> Tensor:
        model, x = hookline.hook(net), X.clone().requires_grad_()
        outputs = [model.run_with_hooks(x, fwd_hooks=[("fc", lambda h, by=by: h * by)]) for by in factors]
        outputs[0].sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.allclose(gradient(Checkpointed(), 3.0, 5.0), gradient(Net(), 3.0))


class Returns(nn.Module):
    """Returns a buffer, perhaps in a tuple."""

    def __init__(self, *, is_wrapped: bool) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(4))
        self.is_wrapped = is_wrapped

    def forward(self, x: Tensor) -> object:
        return (self.held, x) if self.is_wrapped else self.held


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_buffer_that_is_returned_is_copied(is_wrapped):
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Returns(is_wrapped=is_wrapped)

        def forward(self, x: Tensor) -> Tensor:
            part = self.part(x)
            return x + (part[0] if is_wrapped else part)

    module = Adds()
    net, pointer = hookline.hook(module), module.part.held.data_ptr()
    for _ in range(3):
        _, cache = net.run_with_cache(X, names_filter=["part"])
        assert not torch._C._is_cow_tensor(module.part.held)
    module.part.held.zero_()
    assert module.part.held.data_ptr() == pointer
    assert torch.equal(cache["part"], torch.ones(4))


def test_a_module_that_is_called_without_its_call():
    class Direct(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.fc._call_impl(x))

    net = hookline.hook(Direct())
    for names in (None, ["fc"]):
        _, cache = net.run_with_cache(X, names_filter=names)
        assert torch.equal(cache["fc"], net.fc(X))


@needs_compiler
def test_a_module_that_is_compiled_during_the_run():
    class Compiles(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.fc.compile(backend="eager")
            return self.out(self.fc(x))

    module = Compiles()
    net = hookline.hook(module)
    _, cache = net.run_with_cache(X)
    assert torch.equal(cache["fc"], net.fc(X))
    module.eval()
    _, cache = net.run_with_cache(X)
    assert torch.equal(cache["fc"], net.fc(X))


def test_no_warnings_in_quiet_runs(net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            net.run_with_hooks(X, fwd_hooks=[("fc", lambda h: h * 2)])
            net.run_with_cache(X)


def test_a_replaced_module_is_hooked(net):
    def zero(h: Tensor) -> None:
        h.zero_()

    for place in ("fc", "out"):
        net.run_with_hooks(X, fwd_hooks=[("out.input", zero)])
        setattr(net.module, place, nn.Linear(4, 4))
        assert torch.equal(net.run_with_hooks(X, fwd_hooks=[("out.input", zero)]), net.module.out(torch.zeros(2, 4)))


def test_a_glob_matches_what_was_added_anywhere(net):
    net.module.out = nn.Sequential(nn.Linear(4, 4))
    seen = []
    for expected in (["out.0"], ["out.0", "out.1.0"]):
        for _ in range(2):
            seen.clear()
            net.run_with_hooks(X, fwd_hooks=[("out.*0", lambda h, hook: seen.append(hook.name))])
            assert seen == expected
            assert list(net.run_with_cache(X, names_filter="out.*0")[1]) == expected
        net.module.out.append(nn.Sequential(nn.Linear(4, 4)))
    net.module.out[1].append(nn.Sequential(nn.Identity()))  # of which only the parent knows
    net.run_with_hooks(X, fwd_hooks=[("*1.0", lambda h: None)])
    net.module.out[1][1].append(nn.Sequential(nn.Linear(4, 4)))
    assert "out.1.1.1.0" in net.run_with_cache(X, names_filter="*1.0")[1]


def test_what_a_hook_wrote_to_and_kept_is_its_own(net):
    net.module.relu.inplace = True
    negative = -net.module.fc(X).detach()
    kept, expected = [], [negative, negative[0], negative, negative, negative]
    with torch.no_grad():
        for keep in (
            lambda h: kept.append(h.mul_(-1)),
            lambda h: kept.append(h.mul_(-1)[0]),
            lambda h: kept.append(h.mul_(-1).detach()),
            lambda h: kept.append(h.mul_(-1).untyped_storage()),
            lambda h: kept.append(h.mul_(-1).numpy() if h.is_cpu else h.mul_(-1)),
        ):
            output = net.run_with_hooks(X, fwd_hooks=[("fc", keep)])
            assert torch.equal(output, net.module.out(negative.relu()))
    for i, each in enumerate(kept):  # the model's own relu_ did not write to it
        each = torch.empty(0).set_(each, 0, negative.shape) if isinstance(each, torch.UntypedStorage) else each
        assert torch.equal(torch.as_tensor(each), expected[i])


def test_what_a_hook_gave_to_another_process_is_its_own(net):
    if not X.is_cpu:
        pytest.skip("files are shared with other processes on the CPU only")
    net.module.relu.inplace = True
    theirs = []

    def send(h: Tensor) -> None:
        file = h.mul_(-1).share_memory_().untyped_storage()._share_filename_cpu_()
        theirs.append(torch.UntypedStorage._new_shared_filename_cpu(*file))  # as a process that receives it does

    with torch.no_grad():
        net.run_with_hooks(X, fwd_hooks=[("fc", send)])
    assert torch.equal(torch.empty(0).set_(theirs[0], 0, (2, 4)), -net.module.fc(X))


@pytest.mark.skipif(
    torch_is_before("2.10"), reason="its counts do not tell whether memory has another owner, so it is always copied"
)
def test_what_a_hook_wrote_to_flows_on_itself_if_nobody_else_has_it(net):
    with torch.no_grad():
        seen = []

        def write(h: Tensor) -> None:
            h.add_(1)
            seen.append(h.data_ptr())

        handle = net.module.relu.register_forward_pre_hook(lambda _, args: seen.append(args[0].data_ptr()))
        net.run_with_hooks(X, fwd_hooks=[("fc", write)])
        handle.remove()
    assert seen[0] == seen[1]


def test_a_leaf_that_a_hook_made_is_not_written_to(net):
    net.module.relu.inplace = True
    net.module.requires_grad_(False)

    def write(h: Tensor) -> None:
        h.mul_(-1).requires_grad_()

    output = net.run_with_hooks(X, fwd_hooks=[("fc", write)])
    assert torch.equal(output, net.module.out((-net.module.fc(X)).relu()))

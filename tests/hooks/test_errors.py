"""What happens when a hook fails: the run stops, or goes on without it."""

import weakref

import pytest
import torch
from networks import fill, hook_count
from tiny_models import causal_lm

import hookline
from hookline import HookedRootModule, HookError, HooklineError, HookPoint
from hookline.edits import replace, zero
from hookline.errors import SkippedHookWarning
from hookline.hooks import Controller, Detector, FunctionController, Hook


def spoils(h):
    h.zero_()
    raise ValueError("oh")


class Spoils(Hook):
    def _hook_fn(self, module, input, output):
        spoils(output if output is not None else input[0])


class BadShape(Controller):
    def modify_activations(self, module, inputs, output):
        return (inputs if output is None else output)[:1]


class BadDetector(Detector):
    def process_activations(self, module, input, output):
        raise KeyError("nothing")


FAILING = {
    "function": lambda: spoils,
    "shape of a function": lambda: lambda h: h[:1],
    "kind of a function": lambda: lambda h: "text",
    "object": Spoils,
    "object before": lambda: Spoils(hook_type="pre_forward"),
    "shape of a controller": BadShape,
    "shape before": lambda: BadShape(hook_type="pre_forward"),
    "detector": BadDetector,
    "function controller": lambda: FunctionController(None, spoils),
    "edit": lambda: replace(torch.ones(7)),
    "edit of heads": lambda: hookline.edits.freeze(torch.ones(2)),
}


@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING)
def test_every_kind_fails_alike(net, x, make) -> None:
    hook, bare = make(), net(x)
    with pytest.raises(HookError, match="at point 'fc1") as caught:
        net.run_with_hooks(x, fwd_hooks=[("fc1", hook)])
    assert caught.value.hook is hook
    assert caught.value.hook_id == getattr(hook, "id", None)
    assert caught.value.point.name in ("fc1", "fc1.input")
    assert hook_count(net.module) == 0
    with pytest.warns(SkippedHookWarning, match="dropped"):
        assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("fc1", hook)], on_error="skip"), bare)
    (error,) = net.last_errors
    assert error.hook is hook
    assert error.times == 1
    assert hook_count(net.module) == 0
    with pytest.warns(SkippedHookWarning):
        out, cache = net.run_with_cache(x, names_filter="fc1", fwd_hooks=[("fc1", hook)], on_error="skip")
    assert torch.equal(out, bare)
    assert torch.equal(cache["fc1"], net.module.fc1(x))


def test_the_others_go_on(net, x) -> None:
    hooks = [("fc2", fill(2)), ("fc2", spoils), ("fc2", Spoils()), ("fc2", lambda h: h + 1)]
    run = net.hooks(hooks, on_error="skip")
    with pytest.warns(SkippedHookWarning) as warned, run:
        assert all(net(x).eq(3).all() for _ in range(3))
    assert [error.times for error in run.errors] == [3, 3]
    assert len(warned) == 2, "one warning for each hook"
    assert "3 times" in str(warned[0].message)
    assert warned[0].filename == __file__


def test_an_object_may_say_for_itself(net, x) -> None:
    strict, mild = Spoils(on_error="raise"), Spoils(on_error="skip")
    with pytest.raises(HookError):
        net.run_with_hooks(x, fwd_hooks=[("fc1", strict)], on_error="skip")
    with pytest.warns(SkippedHookWarning):
        net.run_with_hooks(x, fwd_hooks=[("fc1", mild)])
    assert [error.hook for error in net.last_errors] == [mild]
    undo = net.add_hook("fc1", mild)
    with pytest.warns(SkippedHookWarning):
        net(x)
    undo()
    net.run_with_hooks(x, fwd_hooks=[("fc1", zero())], on_error="skip")
    assert net.last_errors == []


def test_gradients(net, x) -> None:
    clean = torch.autograd.grad(net(x).sum(), net.module.fc1.weight)[0]
    for bad in (spoils, lambda grad: grad[:1], lambda grad: "text"):
        out = net.run_with_hooks(x, bwd_hooks=[("fc1", bad)], on_error="skip")
        with pytest.warns(SkippedHookWarning):  # the run is over: the gradient comes later
            grad = torch.autograd.grad(out.sum(), net.module.fc1.weight)[0]
        assert torch.equal(grad, clean)
        assert [error.hook for error in net.last_errors] == [bad]
        with pytest.raises(HookError):
            net.run_with_hooks(x, bwd_hooks=[("fc1", bad)]).sum().backward()
    good = net.run_with_hooks(x, bwd_hooks=[("fc1", lambda g: g * 2)], on_error="skip")
    assert torch.allclose(torch.autograd.grad(good.sum(), net.module.fc1.weight)[0], clean * 2)
    in_place = net.run_with_hooks(x, bwd_hooks=[("fc1", lambda g: [g.mul_(2)].clear())], on_error="skip")
    assert torch.allclose(torch.autograd.grad(in_place.sum(), net.module.fc1.weight)[0], clean * 2)


def test_forward_gradients_are_those_of_the_bare_run(net, x) -> None:
    clean = torch.autograd.grad(net(x).sum(), net.module.fc1.weight)[0]
    with pytest.warns(SkippedHookWarning):
        out = net.run_with_hooks(x, fwd_hooks=[("fc1", Spoils()), ("act", spoils)], on_error="skip")
    assert torch.equal(torch.autograd.grad(out.sum(), net.module.fc1.weight)[0], clean)


def test_nested_contexts(net, x) -> None:
    outer, inner = net.hooks([("fc2", spoils)], on_error="skip"), net.hooks([("fc2", lambda h: 1 / 0)])
    with pytest.warns(SkippedHookWarning), outer:
        _fails(net, inner, x)
    assert [error.times for error in outer.errors] == [2]
    assert inner.errors == []


def _fails(net, inner, x) -> None:
    with pytest.raises(HookError, match="ZeroDivisionError"), inner:
        net(x)
    net(x)


def test_hooks_that_stay_after_the_context(net, x) -> None:
    bare = net(x)
    with (
        net.hooks([("fc2", spoils)], on_error="skip", reset_hooks_end=False) as stays,
        pytest.warns(SkippedHookWarning),
    ):
        net(x)
    with pytest.warns(SkippedHookWarning):
        assert torch.equal(net(x), bare)
    assert [error.times for error in stays.errors] == [2]
    net.reset_hooks()


def test_a_context_used_twice_begins_anew(net, x) -> None:
    context = net.hooks([("fc2", spoils)], on_error="skip")
    every = []
    for _ in range(2):
        with pytest.warns(SkippedHookWarning), context as run:
            net(x)
        every.append(run.errors)
    assert every[0] is not every[1]
    assert [[error.times for error in errors] for errors in every] == [[1], [1]]


def test_at_a_placed_point_and_where_there_is_no_tensor(x) -> None:
    class Net(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.hook_mid, self.hook_none = HookPoint(), HookPoint()
            self.setup()

        def forward(self, x):
            self.hook_none(None)
            return self.hook_mid(x)

    net = Net()
    with pytest.warns(SkippedHookWarning) as warned:
        out = net.run_with_hooks(
            x, fwd_hooks=[("hook_mid", spoils), ("hook_none", Spoils()), ("hook_none", spoils)], on_error="skip"
        )
    assert torch.equal(out, x)
    assert sum("nothing to work on" in str(each.message) for each in warned) == 2


def test_in_a_language_model_and_in_generation() -> None:
    model = hookline.hook(causal_lm("llama"))
    tokens = torch.arange(6)[None] + 3
    bare = model.generate(tokens, 3, do_sample=False)
    hooks = [(("pattern", 1), spoils), ("blocks.2.hook_mlp_out", Spoils()), ("blocks.0.attn.hook_z", zero(head=9))]
    with pytest.warns(SkippedHookWarning), model.hooks(hooks, on_error="skip") as run:
        assert torch.equal(model.generate(tokens, 3, do_sample=False), bare)
    assert len(run.errors) == 3
    assert "head=9" in "".join(map(str, run.errors))
    assert hook_count(model.module) == 0


def test_another_word_is_refused(net, x) -> None:
    for call in (net.hooks, lambda **k: net.run_with_hooks(x, **k), lambda **k: net.run_with_cache(x, **k)):
        with pytest.raises(HooklineError, match="on_error"):
            call(on_error="ignore")
    with pytest.raises(HooklineError, match="on_error"):
        Spoils(on_error="ignore")
    with pytest.raises(HooklineError, match="'on_error'"):
        net.cache(x, on_error="skip")


def test_a_model_that_swallows_errors_does_not_hide_a_skipped_one(x) -> None:
    class Careless(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.fc(x)
            except Exception:
                return x

    net = hookline.hook(Careless())
    with pytest.warns(SkippedHookWarning):
        out = net.run_with_hooks(x, fwd_hooks=[("fc", spoils)], on_error="skip")
    assert torch.equal(out, net.module.fc(x)), "the hook's failure never reached the model"


def test_the_last_errors_are_those_of_the_last_run(net, x) -> None:
    with pytest.warns(SkippedHookWarning):
        net.run_with_hooks(x, fwd_hooks=[("fc1", spoils)], on_error="skip")
    assert len(net.last_errors) == 1
    net.run_with_hooks(x, fwd_hooks=[("fc1", torch.relu)])
    assert net.last_errors == []
    with pytest.warns(SkippedHookWarning):
        net.run_with_hooks(x, fwd_hooks=[("fc1", spoils)], on_error="skip")
    net.run_with_cache(x, names_filter="fc1")
    assert net.last_errors == []

    def runs(h):
        if len(h) == 5:
            net.run_with_hooks(x[:2], fwd_hooks=[("fc1", fill(1))])

    with pytest.warns(SkippedHookWarning):
        net.run_with_hooks(x, fwd_hooks=[("fc1", spoils), ("fc2", runs)], on_error="skip")
    assert [error.hook for error in net.last_errors] == [spoils], "not those of the run inside"


def test_a_registered_hook_warns_once_a_generation() -> None:
    model = hookline.hook(causal_lm("llama"))
    model.registry.register_hook(1, Spoils(on_error="skip"))
    tokens = torch.arange(6)[None] + 3
    for _ in range(2):
        with pytest.warns(SkippedHookWarning) as warned:
            model.generate(tokens, 4, do_sample=False)
        assert len(warned) == 1
    assert [error.times for error in model.registry.errors()] == [8]
    with pytest.warns(SkippedHookWarning) as warned:
        model(tokens)
    assert len(warned) == 1
    model.registry.unregister_all()


def test_what_an_error_says_of_its_hook(net, x) -> None:
    for hook, kind in ((Spoils(), "forward"), (Spoils(hook_type="pre_forward"), "pre_forward"), (spoils, "forward")):
        with pytest.raises(HookError) as caught:
            net.run_with_hooks(x, fwd_hooks=[("fc1", hook)])
        assert caught.value.hook_type == kind


def test_a_tensor_without_data_is_an_error_of_the_hook(net, x) -> None:
    for hook in (lambda h: h.to("meta"), FunctionController(None, lambda h: h.to("meta"))):
        with pytest.raises(HookError, match="without data"):
            net.run_with_hooks(x, fwd_hooks=[("fc1", hook)])


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_errors_that_are_kept_hold_no_activation(net, x, direction) -> None:
    """A traceback holds its frames, and they every tensor of the pass."""
    seen = []

    def fails(h):
        seen.append(weakref.ref(h))
        raise ValueError("oh")

    hooks = {f"{direction}_hooks": [("act", fails)]}
    with pytest.warns(SkippedHookWarning):
        net.run_with_hooks(x, **hooks, on_error="skip").sum().backward()
    (error,) = net.last_errors
    assert [ref() for ref in seen] == [None]
    assert error.__traceback__ is None
    assert isinstance(error.original_error, ValueError)
    assert 'raise ValueError("oh")' in "".join(error.__notes__)

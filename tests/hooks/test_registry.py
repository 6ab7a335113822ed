"""The registry: hooks that stay, under their ids."""

import threading

import pytest
import torch
from networks import MLP, fill, hook_count
from tiny_models import causal_lm
from torch import nn

import hookline
from hookline import HookError, HooklineError, NeverFiredWarning
from hookline.edits import zero
from hookline.errors import SkippedHookWarning
from hookline.hooks import FunctionController, Hook, HookType, LayerActivationDetector

TOKENS = torch.arange(12).view(2, 6) + 3


class Zero(Hook):
    def _hook_fn(self, module, input, output):
        return torch.zeros_like(output)


def test_ids(net, x) -> None:
    detector = LayerActivationDetector(hook_id="mine")
    assert net.registry.register_hook("fc1", detector) == "mine" == detector.id
    other = net.registry.register_hook("fc1", LayerActivationDetector())
    assert len(other) == 36
    assert net.registry.ids() == ["mine", other]
    assert net.registry.get("mine") is detector
    assert "mine" in net.registry
    assert detector in net.registry
    assert "else" not in net.registry
    assert detector.layer_signature == "fc1"
    for again in (detector, LayerActivationDetector(hook_id="mine")):
        with pytest.raises(HooklineError, match="'mine'"):
            net.registry.register_hook("fc2", again)
    assert net.registry.unregister_hook("mine")
    for gone in ("mine", detector):
        with pytest.raises(HooklineError, match="registered"):
            net.registry.unregister_hook(gone)
    net.registry.register_hook("fc2", detector)
    net(x)
    assert detector.get_captured().shape == (5, 3)
    net.registry.unregister_all()
    assert hook_count(net.module) == 0


def test_functions_and_edits_are_registered_too(net, x) -> None:
    a = net.registry.register_hook("fc2", fill(3))
    b = net.registry.register_hook("fc2", hookline.edits.scale(2), hook_id="twice")
    assert net(x).eq(6).all()
    assert net.registry.hooks() == [net.registry.get(a), hookline.edits.scale(2)]
    assert b == "twice"
    net.registry.unregister_hook(a)
    net.registry.unregister_hook(b)
    with pytest.raises(HooklineError, match="hook_type"):
        net.registry.register_hook("fc2", fill(3), HookType.PRE_FORWARD)
    with pytest.raises(HooklineError, match="layer"):
        net.registry.register_hook(None, fill(3))
    with pytest.raises(HooklineError, match="hook_id"):
        net.registry.register_hook("fc1", Zero(), hook_id="late")


def test_layers_by_every_name() -> None:
    model = hookline.hook(causal_lm("gpt2"))
    names = model.registry.list_layers()
    assert "transformer.h.0.attn.c_attn" in names
    assert "transformer.h" not in names
    expected = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_post", zero())])
    for signature in (
        "transformer.h.1",
        1,
        "1",
        -3,
        "blocks.1.hook_resid_post",
        ("resid_post", 1),
        model.module.transformer.h[1],
    ):
        hook = Zero()
        model.registry.register_hook(signature, hook)
        assert torch.equal(model(TOKENS), expected), signature
        assert model.registry.hooks("transformer.h.1") == [hook]
        assert model.registry.hooks("transformer.h.2") == []
        model.registry.unregister_hook(hook)
    for name in names:
        model.registry.unregister_hook(model.registry.register_hook(name, LayerActivationDetector()))
    with pytest.raises(hookline.UnknownPointError, match=r"transformer\.h\.0\.attn"):
        model.registry.register_hook("transformer.h.0.atn", Zero())
    with pytest.raises(HooklineError, match="matches 4 points"):
        model.registry.register_hook("blocks.*.hook_resid_post", Zero())

    class Declared(Zero):
        hook_point, layer = "lm.layer.post", 1

    model.registry.register_hook(None, Declared())
    assert torch.equal(model(TOKENS), expected)
    model.registry.unregister_all()


def test_before_a_layer(net, x) -> None:
    hook = FunctionController(None, torch.zeros_like)
    net.registry.register_hook("fc2", hook, HookType.PRE_FORWARD)
    assert torch.equal(net(x), net.module.fc2.bias.expand(5, 3))
    assert net.registry.hooks("fc2") == [hook]
    net.registry.unregister_hook(hook)


def test_any_number_may_share_a_layer(net, x) -> None:
    before, after, last = (LayerActivationDetector() for _ in range(3))
    for hook in (
        before,
        FunctionController(None, lambda h: h * 0),
        after,
        FunctionController(None, lambda h: h + 1),
        last,
    ):
        net.registry.register_hook("fc1", hook)
    net(x)
    assert torch.allclose(before.get_captured(), x @ net.module.fc1.weight.T + net.module.fc1.bias)
    assert after.get_captured().eq(0).all()
    assert last.get_captured().eq(1).all()
    net.registry.unregister_all()


def test_switched_off_it_is_off_the_model(net, x) -> None:
    bare, hook = net(x), Zero()
    net.registry.register_hook("fc2", hook)
    assert hook.is_enabled()
    assert net(x).eq(0).all()
    hook.disable()
    assert not hook.is_enabled()
    assert not hook.enabled
    assert hook_count(net.module) == 0, "disabled, it costs nothing"
    assert torch.equal(net(x), bare)
    assert net.registry.hooks() == [hook], "but it is still registered"
    hook.enable()
    assert net(x).eq(0).all()
    hook.disable()
    net.registry.unregister_hook(hook)
    hook.enable()
    assert hook_count(net.module) == 0


def test_switched_off_and_on_in_an_open_context(net, x) -> None:
    bare, hook = net(x), Zero()
    with net.hooks([("fc2", hook)]):
        for _ in range(2):
            hook.disable()
            assert torch.equal(net(x), bare)
            hook.enable()
            assert net(x).eq(0).all()


def test_it_stays_registered_while_off_though_the_wrapper_is_gone(x) -> None:
    module, hook = MLP(), Zero()
    hookline.hook(module).registry.register_hook("fc2", hook)
    hook.disable()
    hook.enable()
    assert module(x).eq(0).all()
    net = hookline.hook(module)
    assert net.registry.hooks() == [hook]
    net.registry.unregister_hook(hook)


def test_a_reset_leaves_registered_hooks(net, x) -> None:
    hook = Zero()
    net.registry.register_hook("fc2", hook)
    net.add_hook("fc2", fill(3))
    net.reset_hooks()
    assert net(x).eq(0).all()
    assert net.registry.hooks() == [hook]
    net.reset_hooks(including_permanent=True)
    assert net.registry.hooks() == []
    assert hook_count(net.module) == 0


def test_two_wrappers_see_one_registry(net, x) -> None:
    hook = Zero()
    net.registry.register_hook("fc2", hook)
    again = hookline.hook(net.module)
    assert again.registry.hooks() == [hook]
    again.registry.unregister_hook(hook.id)
    assert net.registry.hooks() == []


def test_context(net) -> None:
    hook, other = Zero(), LayerActivationDetector()
    net.registry.store = object()
    net.registry.register_hook("fc1", hook)
    net.registry.register_hook("fc2", other)
    assert hook.context.model is net
    assert hook.context.registry.ids() == net.registry.ids() == [hook.id, other.id]
    assert hook.context.store is net.registry.store
    assert hook.context.hooks == [hook, other]
    assert "fc2" in repr(net.registry)
    assert other.id in repr(net.registry)
    net.registry.unregister_all()


def test_a_failing_registered_hook(net, x) -> None:
    class Fails(Hook):
        def _hook_fn(self, module, input, output):
            output.zero_()
            raise ValueError("oh")

    bare, hook = net(x), Fails(hook_id="bad")
    net.registry.register_hook("fc1", hook)
    with pytest.raises(HookError, match="'bad' at point 'fc1'") as caught:
        net(x)
    assert (caught.value.hook_id, caught.value.hook, caught.value.point.name) == ("bad", hook, "fc1")
    assert isinstance(caught.value.original_error, ValueError)
    net.registry.unregister_hook("bad")
    net.registry.register_hook("fc1", Fails(hook_id="bad", on_error="skip"))
    with pytest.warns(SkippedHookWarning, match="Fails 'bad'"):
        assert torch.equal(net(x), bare)
    with pytest.warns(SkippedHookWarning) as warned:
        assert torch.equal(net(x), bare)
    assert len(warned) == 1, "one for each run"
    (error,) = net.registry.errors()
    assert error.times == 2
    net.registry.unregister_all()
    assert net.registry.errors() == [error], "also when the hook is gone"
    net.registry.clear_errors()
    assert net.registry.errors() == []


def test_switching_while_another_thread_runs(net, x) -> None:
    hook, bare, odd = Zero(), net(x), []
    net.registry.register_hook("fc2", hook)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            out = net(x)
            if not (out.eq(0).all() or torch.equal(out, bare)):
                odd.append(out)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(200):
        hook.disable()
        hook.enable()
    stop.set()
    thread.join()
    assert odd == []
    net.registry.unregister_all()


def test_layers_of_the_module_itself() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    )
    net = hookline.hook(encoder)
    assert net.layers is encoder.layers
    assert not hasattr(hookline.hook(causal_lm("gpt2")), "layers")
    net.layers = nn.ModuleList(encoder.layers[:2])
    assert len(encoder.layers) == 2


def test_what_is_held_of_an_earlier_run_is_told() -> None:
    """A registered detector that a run does not come to must not pass for one that it did."""
    model = hookline.hook(causal_lm("gpt2"))
    detector = LayerActivationDetector(hook_id="late")
    model.registry.register_hook(3, detector)
    early = "blocks.0.hook_resid_post"
    model.cache(TOKENS, names_filter=early)  # it holds nothing yet
    model(TOKENS)
    for run in (lambda: model(TOKENS, stop_at_layer=1), lambda: model.cache(TOKENS, names_filter=early)):
        for _ in range(2):
            with pytest.warns(NeverFiredWarning, match="'late' at '3'"):
                run()
    model(TOKENS)
    detector.clear_captured()
    model(TOKENS, stop_at_layer=1)
    model(TOKENS)
    detector.disable()
    model(TOKENS, stop_at_layer=1)
    model.registry.unregister_all()


def test_held_by_a_module_that_is_not_always_called(x) -> None:
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, is_on=True):
            return self.fc(x) if is_on else x

    net = hookline.hook(Sometimes())
    net.registry.register_hook("fc", LayerActivationDetector())
    net(x)
    with pytest.warns(NeverFiredWarning, match="earlier"):
        net(x, is_on=False)
    net.registry.unregister_all()
    net.registry.register_hook("fc", torch.relu)
    net(x)
    net(x, is_on=False)  # a function holds nothing
    net.registry.unregister_all()


def test_a_hook_that_goes_while_the_model_runs_is_not_missed(net, x) -> None:
    late = FunctionController("fc2", torch.relu)

    class Unregisters(Hook):
        def _hook_fn(self, module, input, output):
            net.registry.unregister_hook(late)

    net.registry.register_hook("fc2", late)
    net.registry.register_hook("fc1", Unregisters())
    net(x)
    net.registry.unregister_all()
    net.registry.register_hook("fc2", late)
    late.disable()
    net.module.fc2 = nn.Linear(8, 3)
    late.enable()
    with pytest.warns(NeverFiredWarning, match=r"longer.*model"):
        net(x)
    net.registry.unregister_all()


@pytest.mark.parametrize("hook", [hookline.edits.zero(head=1), lambda z: z * 0, "controller"])
def test_whatever_is_registered_can_be_switched_off(hook) -> None:
    model = hookline.load("tinyworld")
    tokens = torch.tensor([[5, 17, 42, 7]])
    if hook == "controller":
        hook = hookline.hooks.FunctionController("blocks.1.attn.hook_z", lambda z: z * 0)
    bare = model(tokens)
    known = model.registry.register_hook("blocks.1.attn.hook_z", hook)
    changed = model(tokens)
    assert not torch.equal(changed, bare)
    assert model.registry.is_enabled(known)
    model.registry.disable(known)
    assert not model.registry.is_enabled(hook)
    assert torch.equal(model(tokens), bare)
    assert model.registry.hooks() == [hook]
    model.registry.enable(hook)
    assert torch.equal(model(tokens), changed)
    model.registry.unregister_all()


def test_a_hook_that_is_refused_stays_as_it_was(net, x) -> None:
    bare, hook = net(x), Zero()
    taken = net.registry.register_hook("act", torch.relu, hook_id="taken")
    for layer, kind in [("nope", "pre_forward"), (["fc1", "fc2"], "pre_forward"), ("fc1", "sideways")]:
        with pytest.raises(HooklineError):
            net.registry.register_hook(layer, hook, kind)
        assert hook.hook_type is HookType.FORWARD
        assert hook.layer_signature is None
    with pytest.raises(HooklineError, match="hook_id"):
        net.registry.register_hook("fc1", hook, "pre_forward", hook_id="another")
    assert hook.hook_type is HookType.FORWARD
    net.registry.unregister_hook(taken)
    net.registry.register_hook("fc1", hook)
    assert not torch.equal(net(x), bare)
    net.registry.unregister_all()


def test_a_registered_hook_keeps_its_type(net, x) -> None:
    """Where it is registered already it is called as what it was registered as."""
    hook, other = Zero(), hookline.hook(MLP())
    net.registry.register_hook("fc1", hook)
    for each in (net, other):
        with pytest.raises(HooklineError, match="registered as 'forward'"):
            each.registry.register_hook("fc2", hook, "pre_forward")
    net(x)
    net.registry.unregister_all()


def test_a_hook_is_added_at_all_points_or_at_none(net) -> None:
    class Picky(Zero):
        def action(self, point, dir, *, prepend=False):
            if point.name == "fc2":
                raise HooklineError("not there")
            return super().action(point, dir, prepend=prepend)

    with pytest.raises(HooklineError, match="not there"):
        net.add_hook(["fc1", "fc2"], Picky())
    assert not any(point.has_hooks() for point in net.hook_points())

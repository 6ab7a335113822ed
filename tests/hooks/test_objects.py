"""Hook objects: what they are given, what they may return, and their place among all other hooks."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from networks import MLP, Twice, hook_count
from tiny_models import causal_lm, seq2seq
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import HookedRootModule, HookError, HooklineError, HookPoint, UnknownPointError
from hookline.edits import zero
from hookline.engine.pass_state import pass_state
from hookline.errors import InvalidHookError
from hookline.hooks import (
    Controller,
    Detector,
    FunctionController,
    Hook,
    HookType,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
)


class Seen(Hook):
    """Keeps what it is called with."""

    def __call__(self, module, args, kwargs, output):
        self.call = (module, args, kwargs, output)


class Plus(Hook):
    """Adds a number, the torch way."""

    def __init__(self, number=1.0, **kwargs):
        super().__init__(**kwargs)
        self.number = number

    def _hook_fn(self, module, input, output):
        return output + self.number


class InPlacePlus(Controller):
    def modify_activations(self, module, inputs, output):
        (inputs if self.is_pre else output).add_(1)


@pytest.fixture(scope="module")
def gpt2():
    return hookline.hook(causal_lm("gpt2"))


@pytest.fixture(scope="module")
def llama():
    return hookline.hook(causal_lm("llama"))


TOKENS = torch.arange(12).view(2, 6) + 3


def test_an_object_is_a_hook_wherever_a_function_is(net, x) -> None:
    expected = net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: h + 1)])
    hook = Plus(layer_signature="fc1")
    assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("fc1", hook)]), expected)
    assert torch.equal(net.run_with_hooks(x, fwd_hooks=[hook]), expected)
    assert torch.equal(net.run_with_cache(x, fwd_hooks=[hook])[0], expected)
    with net.hooks([hook]):
        assert torch.equal(net(x), expected)
        assert torch.equal(net.module(x), expected)
    for add in (lambda: net.add_hook("fc1", hook), lambda: net.hook_dict["fc1"].add_hook(hook)):
        undo = add()
        assert torch.equal(net(x), expected)
        undo()
    net.registry.register_hook("fc1", hook)
    assert torch.equal(net(x), expected)
    net.registry.unregister_hook(hook)
    assert hook_count(net.module) == 0
    assert net.plan(fwd_hooks=[hook])[0].name == "fc1"


def test_it_is_given_what_torch_would_give(net, x) -> None:
    hook = Seen()
    net.run_with_hooks(x, fwd_hooks=[("fc2", hook)])
    module, args, kwargs, output = hook.call
    hidden = net.module.act(net.module.fc1(x))
    assert module is net.module.fc2
    assert torch.equal(args[0], hidden)
    assert kwargs == {}
    assert torch.equal(output, net.module(x))


def test_a_modules_own_output_is_given_whole_and_other_points_as_their_tensor(llama) -> None:
    whole, tensor = Seen(), Seen()
    native = "model.layers.1.self_attn"
    llama.run_with_hooks(TOKENS, fwd_hooks=[(native, whole), ("blocks.1.hook_attn_out", tensor)])
    assert isinstance(whole.call[3], tuple)
    assert whole.call[0] is llama.module.get_submodule(native)
    assert "hidden_states" in whole.call[2]
    assert tensor.call[3].shape == (2, 6, llama.cfg.d_model)
    query = Seen()
    llama.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_q", query)])
    assert query.call[3].shape == (2, 6, llama.cfg.n_heads, llama.cfg.d_head)
    pattern = Seen()
    llama.run_with_hooks(TOKENS, fwd_hooks=[(("pattern", 1), pattern)])
    assert pattern.call[1:3] == ((), {}), "inside a module its arguments are not known"


@pytest.mark.parametrize("name", ["model.layers.1.self_attn", "model.layers.1", "blocks.1.attn.hook_z", 1, "output"])
def test_identity_changes_no_bit(llama, name) -> None:
    class Same(Hook):
        def _hook_fn(self, module, input, output):
            return output

    bare = llama(TOKENS)
    assert torch.equal(llama.run_with_hooks(TOKENS, fwd_hooks=[(name, Same())]), bare)
    assert torch.equal(llama.run_with_hooks(TOKENS, fwd_hooks=[(name, Seen())]), bare)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "bloom", "mixtral", "gpt_neox"])
def test_the_same_as_a_function_at_every_point(kind) -> None:
    """Whatever a point is made of, an object does there what a function does."""

    class Half(Controller):
        def modify_activations(self, module, inputs, output):
            return output / 2

    model = hookline.hook(causal_lm(kind))
    tokens = 2 * torch.arange(6)[None] + 4  # even, so that half of each is a token too
    with torch.no_grad():
        for name in model.hook_dict:
            if name.startswith(("blocks.1", "hook", "ln_final", "unembed")) and "indices" not in name:
                by_function = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda h: h / 2)])
                assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(name, Half())]), by_function), name
        for role, point in {"layer": "hook_resid_pre", "attn": "attn.hook_in", "mlp": "mlp.hook_in"}.items():
            early = FunctionController(None, lambda h: h / 2, hook_type="pre_forward")
            early.hook_point, early.layer = f"lm.{role}.pre", 2
            by_function = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.2.{point}", lambda h: h / 2)])
            assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[early]), by_function), role


def test_one_controller_at_many_points(gpt2) -> None:
    expected = gpt2.run_with_hooks(TOKENS, fwd_hooks=[("blocks.*.hook_mlp_out", lambda h: h + 1)])
    assert torch.equal(gpt2.run_with_hooks(TOKENS, fwd_hooks=[("blocks.*.hook_mlp_out", Plus())]), expected)


def test_nothing_is_kept_after_a_pass(gpt2) -> None:
    """Not the arguments of a module with a registered hook either: there are keys and values among them."""
    undo = [gpt2.add_hook("transformer.h.1.attn", Seen()), gpt2.add_hook("transformer.h.1.attn", lambda h: h)]
    gpt2(TOKENS)
    assert not [site for site in pass_state.saved if isinstance(pass_state.saved[site], tuple)]
    for each in undo:
        each()


def test_what_may_be_returned_for_a_tuple(llama) -> None:
    """The whole tuple, or the tensor that stands for its first; nothing else."""
    name = "model.layers.1.self_attn"
    expected = llama.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_attn_out", zero())])

    class Returns(Hook):
        def __init__(self, make):
            self.make = make  # without Hook.__init__, as many do

        def _hook_fn(self, module, input, output):
            return self.make(output)

    for make in (lambda o: (o[0] * 0, *o[1:]), lambda o: o[0] * 0, lambda o: [o[0].zero_()].clear()):
        assert torch.equal(llama.run_with_hooks(TOKENS, fwd_hooks=[(name, Returns(make))]), expected)
    for make in (lambda o: o[0][:1], lambda o: (o[0][:, :1], *o[1:]), lambda o: (o[0], o[0]), lambda o: 3):
        with pytest.raises(HookError, match="returned"):
            llama.run_with_hooks(TOKENS, fwd_hooks=[(name, Returns(make))])


def test_before_a_module(llama, net, x) -> None:
    class HalveInput(Hook):
        def _hook_fn(self, module, input, output):
            assert output is None
            return (input[0] / 2, *input[1:])

    class HalveTensor(HalveInput):
        def _hook_fn(self, module, input, output):
            return input[0] / 2

    class HalveCall(Hook):
        def __call__(self, module, args, kwargs, output):
            return (), {**kwargs, "hidden_states": kwargs["hidden_states"] / 2}

    name = "model.layers.1.self_attn"  # called by keyword
    expected = llama.run_with_hooks(TOKENS, fwd_hooks=[(f"{name}.input", lambda h: h / 2)])
    assert not torch.equal(expected, llama(TOKENS))
    for kind in (HalveInput, HalveTensor, HalveCall):
        for where in (name, f"{name}.input"):
            hook = kind(hook_type=HookType.PRE_FORWARD)
            assert torch.equal(llama.run_with_hooks(TOKENS, fwd_hooks=[(where, hook)]), expected)
    half = FunctionController("fc2", lambda h: h / 2, hook_type="pre_forward")
    assert torch.equal(
        net.run_with_hooks(x, fwd_hooks=[half]), net.run_with_hooks(x, fwd_hooks=[("act", lambda h: h / 2)])
    )


def test_options_changed_before_a_module_take_effect() -> None:
    class Flagged(nn.Module):
        def forward(self, x, *, double=False):
            return x * 2 if double else x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Flagged()

        def forward(self, x):
            return self.inner(x, double=False)

    class Set(Hook):
        hook_point = "inner.input"

        def __call__(self, module, args, kwargs, output):
            kwargs["double"] = True  # in place, and nothing returned

    net = hookline.hook(Outer())
    assert net.run_with_hooks(torch.ones(2), fwd_hooks=[Set()]).eq(2).all()


def test_before_what_is_no_module(llama) -> None:
    early = Plus(hook_type="pre_forward")
    with pytest.raises(InvalidHookError, match="PRE_FORWARD"):
        llama.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_q", early)])
    with pytest.raises(InvalidHookError, match="hook_type"):
        Plus(hook_type="sideways")
    with pytest.raises(InvalidHookError, match="hook_type="):
        Detector(HookType.FORWARD)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_declared_target(model, request) -> None:
    model = request.getfixturevalue(model)

    class NoMLP(Hook):
        hook_point = "lm.mlp.out"
        layer = 2

        def __call__(self, module, args, kwargs, output):
            return torch.zeros_like(output)

    class LayerPre(Hook):
        hook_point = "lm.layer.pre"

        def __init__(self, layer):
            self.layer = layer

        def __call__(self, module, args, kwargs, output):
            assert output is None
            self.args, self.kwargs = args, kwargs
            return (args[0] * 0, *args[1:]), kwargs

    expected = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.2.hook_mlp_out", zero())])
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[NoMLP()]), expected)
    expected = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", zero())])
    hook = LayerPre(1)
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[hook]), expected)
    assert hook.args[0].shape == (2, 6, model.cfg.d_model)


def test_a_declared_target_that_does_not_exist(gpt2, net, x) -> None:
    before = hook_count(gpt2.module)  # another test may have left transformers' own

    class Bad(Hook):
        hook_point, layer = "lm.nose.out", 1

        def __call__(self, module, args, kwargs, output):
            return None

    with pytest.raises(ValueError, match=r"'lm\.layer\.pre'.*'lm\.mlp\.out'.*0 to 3") as caught:
        gpt2.run_with_hooks(TOKENS, fwd_hooks=[Bad()])
    assert isinstance(caught.value, UnknownPointError)
    Bad.hook_point, Bad.layer = "lm.mlp.out", 4
    with pytest.raises(ValueError, match=r"layer=4.*0 to 3"):
        gpt2.hooks([Bad()])
    with pytest.raises(ValueError, match=r"lm\.mlp\.out"):
        net.run_with_hooks(x, fwd_hooks=[Bad()])
    several = hookline.hook(seq2seq("t5"))
    with pytest.raises(ValueError, match="stacks"):
        several.hooks([Bad()])
    with pytest.raises(InvalidHookError, match=r"\(name, hook\)"):
        net.run_with_hooks(x, fwd_hooks=[Plus()])
    assert hook_count(gpt2.module) == before


def test_order_among_objects_functions_and_edits(net, x) -> None:
    """They fire as registered, whatever they are and however they were added; a detector sees what came before."""
    detectors = [LayerActivationDetector() for _ in range(4)]
    net.registry.register_hook("fc2", FunctionController("fc2", torch.zeros_like))
    net.registry.register_hook("fc2", detectors[0])
    net.add_hook("fc2", lambda h: h + 1)
    hooks = [("fc2", detectors[1]), ("fc2", hookline.edits.scale(5)), ("fc2", detectors[2])]
    with net.hooks(hooks):
        net.point("fc2").add_hook(Plus(2))
        net.registry.register_hook("fc2", detectors[3])
        assert net(x).eq(7).all()
        net.registry.register_hook("fc2", Plus(-1), prepend=True)
        net(x)
    seen = [detector.get_captured().unique().tolist() for detector in detectors]
    assert seen == [[0], [1], [5], [7]], "what is first now is undone by the zeros"
    net.reset_hooks(including_permanent=True)
    assert net.registry.hooks() == []


def test_at_a_placed_point() -> None:
    class Net(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.fc, self.hook_mid = nn.Linear(4, 4), HookPoint()
            self.setup()

        def forward(self, x):
            return self.hook_mid(self.fc(x))

    net, x = Net(), torch.ones(2, 4)
    detector = LayerActivationDetector()
    out = net.run_with_hooks(x, fwd_hooks=[("hook_mid", Plus()), ("hook_mid", detector)])
    assert torch.equal(detector.get_captured(), out)
    net.hook_mid.add_hook(Plus())
    assert torch.equal(net(x), out)
    assert detector.context.model is net
    assert detector.context.registry.hooks() == []
    net.reset_hooks()


def test_captures_never_change(net, x) -> None:
    before, inside = LayerActivationDetector("fc1"), LayerActivationDetector("fc1")

    def spoil(h):
        h.zero_()

    class Scribbles(LayerActivationDetector):
        def process_activations(self, module, input, output):
            super().process_activations(module, input, output)
            output.fill_(9)

    scribbles = Scribbles("fc1")
    bare = net(x)
    hidden = net.module.fc1(x)
    assert torch.equal(net.run_with_hooks(x, fwd_hooks=[scribbles]), bare), "what it is given is its own"
    net.run_with_hooks(x, fwd_hooks=[before, ("fc1", spoil), inside])
    assert torch.equal(before.get_captured(), hidden)
    assert torch.equal(scribbles.get_captured(), hidden)
    assert inside.get_captured().eq(0).all()
    assert not before.get_captured().requires_grad
    with pytest.raises(HookError, match="Detector"):
        net.run_with_hooks(x, fwd_hooks=[("fc1", type("D", (Detector,), {"_hook_fn": lambda *a: a[-1]})())])


def test_detectors_of_several_calls_and_places(x) -> None:
    net = hookline.hook(Twice())
    last, every = LayerActivationDetector("cell"), LayerActivationDetector("cell", keep_all=True)
    out, cache = net.run_with_cache(x, fwd_hooks=[last, every])
    assert torch.equal(last.get_captured(), out)
    assert all(torch.equal(a, b) for a, b in zip(every.get_captured(), cache.calls("cell"), strict=True))
    every.clear_captured()
    assert every.get_captured() == []
    assert every.metadata == {}
    only = LayerActivationDetector("cell#1")
    net.run_with_hooks(x, fwd_hooks=[only])
    assert torch.equal(only.get_captured(), cache["cell#1"])
    for hooks in ([("*", last)], [("cell", last), ("output", last)]):
        with pytest.raises(InvalidHookError, match="another detector"):
            net.run_with_hooks(x, fwd_hooks=hooks)
    with pytest.raises(InvalidHookError, match="another detector"):
        net.add_hook("*", last)


def test_the_models_inputs_and_outputs(gpt2, net, x) -> None:
    inputs, outputs = ModelInputDetector(save_attention_mask=True, special_token_ids=[3]), ModelOutputDetector()
    mask = torch.ones_like(TOKENS)
    mask[1, 4:] = 0
    logits = gpt2.run_with_hooks(TOKENS, attention_mask=mask, fwd_hooks=[inputs, outputs])
    assert torch.equal(inputs.get_captured_input_ids(), TOKENS)
    assert torch.equal(inputs.get_captured_attention_mask(), mask.bool() & (TOKENS != 3))
    assert torch.equal(outputs.get_captured(), logits)
    plain = ModelInputDetector()
    net.run_with_hooks(x, fwd_hooks=[plain])
    assert torch.equal(plain.get_captured(), x)
    hidden = ModelOutputDetector(save_output_logits=False, save_output_hidden_state=True)
    with pytest.raises(HookError, match="output_hidden_states=True"):
        gpt2.run_with_hooks(TOKENS, fwd_hooks=[hidden])
    _, cache = gpt2.run_with_cache(TOKENS, "output", output_hidden_states=True, fwd_hooks=[hidden])
    assert torch.equal(hidden.get_captured(), cache["ln_final.hook_out"])


def test_one_that_reads_and_changes(net, x) -> None:
    hidden = net.module.fc1(x)
    for bases in ((Detector, Controller), (Controller, Detector)):
        kind = type("Both", bases, {"modify_activations": lambda self, module, inputs, output: output * 0})
        both = kind("fc1")
        out = net.run_with_hooks(x, fwd_hooks=[both])
        assert torch.equal(both.get_captured(), hidden)
        assert torch.equal(out, net.run_with_hooks(x, fwd_hooks=[("fc1", zero())]))


def test_in_place_controllers(net, x) -> None:
    after = net.run_with_hooks(x, fwd_hooks=[("act", lambda h: h + 1)])
    assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("act", InPlacePlus())]), after)
    assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("fc2", InPlacePlus(hook_type="pre_forward"))]), after)


def test_hooks_that_do_nothing_are_refused(net) -> None:
    for hook in (Hook(), Controller()):
        with pytest.raises(InvalidHookError, match="does nothing"):
            net.hooks([("fc1", hook)])
    with pytest.raises(InvalidHookError, match="forward pass"):
        net.hooks(bwd_hooks=[("fc1", Plus())])
    with pytest.raises(InvalidHookError, match="callable"):
        FunctionController("fc1", 3)
    with pytest.raises(InvalidHookError, match="hook_id"):
        Hook(hook_id=7)


def test_a_hook_that_was_never_called_is_reported(x) -> None:
    from networks import Lazy

    net = hookline.hook(Lazy())
    hook = Plus(hook_id="mine")
    with pytest.warns(hookline.NeverFiredWarning, match="Plus 'mine' at 'unused'"):
        net.run_with_hooks(x, fwd_hooks=[("unused", hook)])
    hook.disable()
    net.run_with_hooks(x, fwd_hooks=[("unused", hook)])


def test_gradients_flow_through(net, x) -> None:
    class Keep(Hook):
        def _hook_fn(self, module, input, output):
            self.kept = output

    keep, plus = Keep(), Plus(2.0)
    net.run_with_hooks(x, fwd_hooks=[("fc1", plus), ("fc1", keep)]).sum().backward()
    expected = [p.grad.clone() for p in net.module.parameters()]
    net.module.zero_grad()
    net.run_with_hooks(x, fwd_hooks=[("fc1", lambda h: h + 2)]).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, net.module.parameters(), strict=True))
    out = net.run_with_hooks(x, fwd_hooks=[("fc1", keep)])
    (grad,) = torch.autograd.grad(out.sum(), keep.kept)
    _, cache = net.run_with_cache(x, names_filter="fc1", incl_bwd=True, loss_fn=lambda o: o.sum())
    assert torch.allclose(grad, cache["fc1_grad"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpointed_region(reentrant) -> None:
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.fc2(torch.tanh(self.fc1(x)))

    class Outer(nn.Module):
        def __init__(self, keeps):
            super().__init__()
            self.region, self.keeps = Region(), keeps

        def forward(self, x):
            return self.region(x) if self.keeps else checkpoint(self.region, x, use_reentrant=reentrant)

    calls = []

    class Count(Detector):
        def process_activations(self, module, input, output):
            calls.append(module)

    plain, outer = Outer(True), Outer(False)
    outer.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, requires_grad=True)
    grads = []
    for module in (plain, outer):
        net = hookline.hook(module)
        net.run_with_hooks(x, fwd_hooks=[("region.fc1", Plus(3.0)), ("region.fc1", Count())]).sum().backward()
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert len(calls) == 2, "reading once is enough"


def test_in_generation(gpt2) -> None:
    every = LayerActivationDetector("blocks.1.hook_resid_post", keep_all=True)
    with gpt2.hooks([every, ("blocks.1.hook_resid_post", FunctionController(None, torch.zeros_like))]):
        a = gpt2.generate(TOKENS[:1], 4, do_sample=False)
    with gpt2.hooks([("blocks.1.hook_resid_post", zero())]):
        b = gpt2.generate(TOKENS[:1], 4, do_sample=False)
    assert torch.equal(a, b)
    assert [tuple(x.shape[:2]) for x in every.get_captured()] == [(1, 6), (1, 1), (1, 1), (1, 1)]


def test_two_threads_with_their_own_objects(gpt2) -> None:
    results = {}

    def work(number: float) -> None:
        hook, detector = Plus(number), LayerActivationDetector()
        with gpt2.hooks([("transformer.h.0.mlp", hook), ("transformer.h.0.mlp", detector)]):
            for _ in range(10):
                results[number] = gpt2(TOKENS), detector.get_captured()

    threads = [threading.Thread(target=work, args=(number,)) for number in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (logits, seen) in results.items():
        expected, cache = gpt2.run_with_cache(
            TOKENS,
            names_filter="transformer.h.0.mlp",
            fwd_hooks=[("transformer.h.0.mlp", lambda h, n=number: h + n)],
        )
        assert torch.equal(logits, expected)
        assert torch.equal(seen, cache["transformer.h.0.mlp"])


def test_a_hook_knows_its_point_and_context(gpt2) -> None:
    class Curious(Detector):
        def process_activations(self, module, input, output):
            self.metadata["where"] = self.point.name, self.point.layer()
            self.metadata["model"] = self.context.model

    hook = Curious()
    assert hook.context is None
    with pytest.raises(HooklineError, match="being called"):
        hook.point
    gpt2.run_with_hooks(TOKENS, fwd_hooks=[("lm.mlp.2.out", hook)])
    assert hook.metadata["where"] == ("lm.mlp.2.out", 2)
    assert hook.metadata["model"] is gpt2
    assert hook.context.language_model is gpt2


def test_a_hook_keeps_no_model_alive(x) -> None:
    import gc
    from weakref import ref

    net = hookline.hook(MLP())
    module, detector = ref(net.module), LayerActivationDetector("fc1")
    net.run_with_hooks(x, fwd_hooks=[detector])
    context = detector.context
    del net
    gc.collect()
    assert module() is None
    with pytest.raises(HooklineError, match="garbage-collected"):
        context.model


def test_other_peoples_hooks_are_seen(net, x) -> None:
    """The arguments are those the module ran with, whoever changed them."""
    handle = net.module.fc2.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    seen = Seen()
    net.run_with_hooks(x, fwd_hooks=[("fc2", seen), ("fc2.input", lambda h: h + 1)])
    handle.remove()
    hidden = net.module.act(net.module.fc1(x))
    assert torch.equal(seen.call[1][0], (hidden + 1) * 2)


def test_contexts_nest(net, x) -> None:
    outer, inner = LayerActivationDetector("fc2"), LayerActivationDetector("fc2")
    with net.hooks([("fc2", Plus(1)), outer]):
        bare = net(x)
        with net.hooks([("fc2", Plus(2)), inner]):
            assert torch.equal(net(x), bare + 2)
        inner.clear_captured()
        with pytest.raises(TypeError), net.hooks([("fc2", Plus(2))]):
            net()
        assert torch.equal(net(x), bare)
    assert torch.equal(outer.get_captured(), bare)
    assert inner.get_captured() is None
    assert hook_count(net.module) == 0


def test_what_a_subclass_declares_counts(net, x) -> None:
    class Early(Hook):
        layer_signature, hook_type, on_error = "fc2", "pre_forward", "skip"

        def _hook_fn(self, module, input, output):
            assert output is None
            return input[0] * 0

    assert net.run_with_hooks(x, fwd_hooks=[Early()]).eq(net.module.fc2.bias).all()
    assert Early().on_error == "skip"
    Early.hook_type = "sideways"
    with pytest.raises(InvalidHookError, match="hook_type"):
        net.hooks([Early()])


def test_a_hook_that_runs_the_model(net, x) -> None:
    """The next hook is given the arguments of its own call, not of the one inside."""

    class Nested(Hook):
        def _hook_fn(self, module, input, output):
            if input[0].shape[0] == 5:
                net.module(x[:2])

    seen = Seen()
    net.run_with_hooks(x, fwd_hooks=[("fc1", Nested()), ("fc1", seen)])
    assert torch.equal(seen.call[1][0], x)


def test_hooks_can_be_pickled(net, x) -> None:
    detector = LayerActivationDetector("fc1", hook_id="a")
    net.registry.register_hook("fc1", detector)
    net(x)
    again = pickle.loads(pickle.dumps(detector))
    assert (again.id, again.context) == ("a", None)
    assert torch.equal(again.get_captured(), detector.get_captured())
    again.disable()
    assert detector.is_enabled()
    net.registry.unregister_all()


def test_models_can_be_copied_and_pickled_afterwards(net, x) -> None:
    net.registry.register_hook("fc1", Plus(hook_id="a"))
    with pytest.raises(HooklineError, match="copied"):
        copy.deepcopy(net.module)
    net.registry.unregister_all()
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(again(x), net(x))
    assert again.registry.hooks() == []


def test_copies_are_hooks_of_their_own(net, x) -> None:
    for make in (copy.copy, copy.deepcopy):
        first = LayerActivationDetector(hook_id="first", keep_all=True)
        net.run_with_hooks(x, fwd_hooks=[("fc1", first)])
        second = make(first)
        assert second.id != "first"
        assert torch.equal(second.get_captured()[0], first.get_captured()[0])
        net.run_with_hooks(x, fwd_hooks=[("fc1", first), ("fc2", second)])
        assert [each.shape for each in first.get_captured()] == [(5, 8), (5, 8)]
        assert [each.shape for each in second.get_captured()] == [(5, 8), (5, 3)]
        assert first.metadata["activations_shape"] == (5, 8)


def test_a_detector_that_keeps_in_its_own_way(net, x) -> None:
    class Norms(Detector):
        def __init__(self):
            self.norms = []

        def process_activations(self, module, input, output):
            self.norms.append(output.norm().item())

    norms = Norms()
    net.registry.register_hook("fc1", norms)
    net(x)
    net(x)
    assert len(norms.norms) == len(copy.deepcopy(norms).norms) == 2
    net.registry.unregister_all()


def test_a_detector_is_at_one_place_whoever_asks(net, x) -> None:
    detector, other = LayerActivationDetector(), hookline.hook(MLP())
    elsewhere = {
        "a run": lambda: net.run_with_hooks(x, fwd_hooks=[("fc2", detector)]),
        "a cache": lambda: net.run_with_cache(x, fwd_hooks=[("fc1", detector)]),
        "a context": lambda: net.hooks([("fc2", detector)]),
        "add_hook": lambda: net.add_hook("fc2", detector),
        "a point": lambda: net.hook_dict["fc2"].add_hook(detector),
        "another model": lambda: other.registry.register_hook("fc1", detector),
        "a run of another model": lambda: other.run_with_hooks(x, fwd_hooks=[("fc1", detector)]),
    }
    net.registry.register_hook("fc1", detector)
    for ask in elsewhere.values():
        with pytest.raises(InvalidHookError, match="registered at 'fc1'"):
            ask()
    net(x)
    assert detector.get_captured().shape == (5, 8)
    net.registry.unregister_all()
    one, two = net.hooks([("fc1", detector)]), net.hooks([("fc2", detector)])
    with pytest.raises(InvalidHookError, match="context at 'fc1'"), one, two:
        pass
    assert hook_count(net.module) == 0
    for place in ("fc1", "fc2"):
        with net.hooks([(place, detector)]):
            net(x)
    assert detector.get_captured().shape == (5, 3)


def test_the_context_is_that_of_the_calling_model(net, x) -> None:
    class Curious(Controller):
        def modify_activations(self, module, inputs, output):
            self.model = self.context.model

    other, hook = hookline.hook(MLP()), Curious()
    net.registry.register_hook("fc1", hook)
    other.registry.register_hook("fc1", hook)
    for model in (net, other, net):
        model(x)
        assert hook.model is model
    other.registry.unregister_all()
    assert hook.context.model is net
    other.hook_dict["fc2"].add_hook(hook)
    net(x)
    assert hook.model is net
    other.reset_hooks()
    net.registry.unregister_all()
    mine = object()
    hook.set_context(mine)
    assert hook.context is mine


def test_a_target_is_said_once(gpt2) -> None:
    class NoMLP(Hook):
        hook_point, layer = "lm.mlp.out", 2

        def __call__(self, module, args, kwargs, output):
            return torch.zeros_like(output)

    expected = gpt2.run_with_hooks(TOKENS, fwd_hooks=[("blocks.2.hook_mlp_out", zero())])
    for hooks in ([NoMLP()], [("transformer.h.2.mlp", NoMLP())], [NoMLP("blocks.2.hook_mlp_out")]):
        assert torch.equal(gpt2.run_with_hooks(TOKENS, fwd_hooks=hooks), expected)
    other = FunctionController("transformer.h.0", torch.relu)
    for ask in (
        lambda: gpt2.registry.register_hook(0, NoMLP()),
        lambda: gpt2.run_with_hooks(TOKENS, fwd_hooks=[(0, NoMLP())]),
        lambda: gpt2.run_with_hooks(TOKENS, fwd_hooks=[NoMLP("transformer.h.0")]),
        lambda: gpt2.add_hook(0, NoMLP()),
        lambda: gpt2.hook_dict["blocks.0.hook_resid_post"].add_hook(NoMLP()),
        lambda: gpt2.hooks([(1, other)]),
        lambda: gpt2.registry.register_hook(1, other),
    ):
        with pytest.raises(InvalidHookError, match="declares"):
            ask()
    assert not any(point.has_hooks() for point in gpt2.hook_points())
    for place in (0, "transformer.h.0"):  # the same place by another name
        gpt2.registry.register_hook(place, other)
        gpt2.registry.unregister_hook(other)
    free = FunctionController(None, torch.relu)
    for place in (0, 1):
        gpt2.registry.register_hook(place, free)
        gpt2.registry.unregister_hook(free)
    gpt2.registry.register_hook("transformer.h.0.mlp", everything := ModelOutputDetector())  # its own is but a default
    gpt2(TOKENS)
    assert everything.get_captured().shape == (2, 6, gpt2.cfg.d_model)
    gpt2.registry.unregister_all()


def test_a_layer_alone_is_its_output(gpt2) -> None:
    class Patch(Hook):
        def __init__(self, layer, **options):
            super().__init__(**options)
            self.layer = layer

        def __call__(self, module, args, kwargs, output):
            return torch.zeros_like(output) if output is not None else ((args[0] * 0, *args[1:]), kwargs)

    after = gpt2.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_post", zero())])
    assert torch.equal(gpt2.run_with_hooks(TOKENS, fwd_hooks=[Patch(1)]), after)
    before = gpt2.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", zero())])
    assert torch.equal(gpt2.run_with_hooks(TOKENS, fwd_hooks=[Patch(1, hook_type="pre_forward")]), before)
    with pytest.raises(InvalidHookError, match=r"Patch\.layer"):
        gpt2.hooks([Patch("1")])
    with pytest.raises(ValueError, match=r"'lm\.layer\.post' and layer=9"):
        gpt2.hooks([Patch(9)])


def test_before_is_for_modules_and_inputs(gpt2) -> None:
    for name in ("blocks.1.hook_resid_post", "hook_embed", "blocks.1.mlp.hook_pre", "blocks.1.hook_resid_mid"):
        with pytest.raises(InvalidHookError, match="PRE_FORWARD"):
            gpt2.hooks([LayerActivationDetector(name, hook_type="pre_forward")])
    _, cache = gpt2.run_with_cache(TOKENS)
    for name in (1, "transformer.h.1", "transformer.h.1.input", "blocks.1.hook_resid_pre"):
        detector = LayerActivationDetector(name, hook_type="pre_forward")
        gpt2.run_with_hooks(TOKENS, fwd_hooks=[detector])
        assert torch.equal(detector.get_captured(), cache["blocks.1.hook_resid_pre"])


def test_a_type_is_no_layer() -> None:
    for word in (HookType.PRE_FORWARD, "pre_forward", "forward"):
        with pytest.raises(InvalidHookError, match="hook_type="):
            Plus(layer_signature=word)
    assert Plus(hook_type="pre_forward").is_pre


def test_classes_and_swapped_arguments_are_refused_at_once(net, x) -> None:
    for kind, name in ((LayerActivationDetector, "LayerActivationDetector"), (zero, "zero"), (nn.ReLU, "ReLU")):
        for give in (
            lambda kind=kind: net.registry.register_hook("fc1", kind),
            lambda kind=kind: net.run_with_hooks(x, fwd_hooks=[("fc1", kind)]),
            lambda kind=kind: net.hooks([kind]),
            lambda kind=kind: net.add_hook("fc1", kind),
            lambda kind=kind: FunctionController("fc1", kind),
        ):
            with pytest.raises(InvalidHookError, match=rf"{name}.*class"):
                give()
    for hook in (LayerActivationDetector(), torch.relu):
        with pytest.raises(InvalidHookError, match="register_hook"):
            net.registry.register_hook(hook, "fc1")
        with pytest.raises(InvalidHookError, match=r"\(name, hook\)"):
            net.run_with_hooks(x, fwd_hooks=[(hook, 0)])
    with pytest.raises(HooklineError, match="'fc1'"):
        net.registry.register_hook(0, torch.relu)
    assert hook_count(net.module) == 0


def test_the_decoders_input_is_kept_too() -> None:
    model, inputs = hookline.hook(seq2seq("t5")), ModelInputDetector()
    model.run_with_hooks(TOKENS, decoder_input=TOKENS[:, :3] + 1, fwd_hooks=[inputs])
    assert torch.equal(inputs.get_captured(), TOKENS)
    assert torch.equal(inputs.get_captured("decoder_input_ids"), TOKENS[:, :3] + 1)


def test_it_prints_short_where_it_is_given_a_module(net) -> None:
    detector = LayerActivationDetector()
    net.registry.register_hook(net.module.fc1, detector)
    assert f"<LayerActivationDetector {detector.id!r} at Linear>" in repr(net.registry)
    net.registry.unregister_all()


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("verb", ["register", "add"])
def test_a_detector_lets_go_of_a_model_that_nobody_has(verb, has_run, x) -> None:
    detector, old = LayerActivationDetector(), hookline.hook(MLP())
    module = weakref.ref(old.module)
    old.registry.register_hook("fc1", detector) if verb == "register" else old.add_hook("fc1", detector)
    if has_run:
        old(x)
    del old
    net = hookline.hook(MLP())
    net.registry.register_hook("fc1", detector)
    assert module() is None
    net(x)
    assert net.registry.hooks() == [detector]
    assert detector.get_captured() is not None
    other = hookline.hook(MLP())
    with pytest.raises(InvalidHookError, match=r"'fc1'.*another model"):
        other.registry.register_hook("fc1", detector)
    net.registry.unregister_all()


def test_a_disabled_hook_comes_back_though_its_wrapper_is_gone(x) -> None:
    module, detector = MLP(), LayerActivationDetector()
    hookline.hook(module).registry.register_hook("fc1", detector)
    detector.disable()
    gc.collect()
    detector.enable()
    module(x)
    assert detector.get_captured() is not None
    hookline.hook(module).registry.unregister_all()


def test_arguments_that_are_no_tuple() -> None:
    class Halved(hookline.hooks.Hook):
        hook_point, layer = "lm.layer.pre", 1

        def __call__(self, module, args, kwargs, output):
            return args[0] / 2, kwargs

    model = hookline.load("tinyworld")
    with pytest.raises(hookline.HookError, match="tuple"):
        model.run_with_hooks("Mary", fwd_hooks=[Halved()])

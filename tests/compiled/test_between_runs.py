"""What changes between runs and between tokens, and is no hook of ours: compiled runs follow it."""

import warnings

import pytest
import torch
from backends import Counting, needs_graphs
from stateful import negate, tiny_llama
from torch import nn
from torch.compiler import set_stance
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

import hookline
from hookline.compiled.model_code import ModelCode
from hookline.edits import scale
from hookline.errors import HooklineWarning

pytestmark = [
    needs_graphs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler's own imports
]


@pytest.fixture(scope="module")
def model() -> hookline.HookedModel:
    return tiny_llama()


@pytest.fixture(autouse=True)
def without_graphs():
    torch._dynamo.reset()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 5))


def doubled(call):
    def forward(*args, **kwargs):
        output = call(*args, **kwargs)
        if type(output) is tuple:
            return (output[0] * 2, *output[1:])
        return output * 2 if isinstance(output, torch.Tensor) else output

    return forward


METHODS = {
    "mlp": (modeling_llama.LlamaMLP, "forward"),
    "norm": (modeling_llama.LlamaRMSNorm, "forward"),
    "linear": (nn.Linear, "forward"),
    "call": (modeling_llama.LlamaDecoderLayer, "__call__"),
    "every": (nn.Module, "__call__"),
    "base": (nn.Module, "_call_impl"),
    "function": (modeling_llama, "apply_rotary_pos_emb"),
    "silu": (F, "silu"),
    "attention": (F, "scaled_dot_product_attention"),
}


@pytest.mark.quick_for("call")
@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_replaced_on_a_class(name, model, ids, monkeypatch) -> None:
    owner, method = METHODS[name]
    options = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), model.compiled(backend=Counting()) as runs:
        before = [(model(ids), model.generate(ids, **options)) for _ in range(2)][1]
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", HooklineWarning)  # a graph that could be wrong is not used, and says so
            call = getattr(owner, method)
            if name == "function":
                patch.setattr(owner, method, lambda q, k, *_, **__: (q, k))
            else:
                patch.setattr(owner, method, doubled(call))
            found = [(model(ids), model.generate(ids, **options)) for _ in range(2)]
            vars(model)["_compiled_runs"] = None
            expected = model(ids), model.generate(ids, **options)
            vars(model)["_compiled_runs"] = runs
        after = model(ids), model.generate(ids, **options)
    assert not torch.equal(before[0], expected[0])
    for logits, tokens in found:
        torch.testing.assert_close(logits, expected[0])
        assert torch.equal(tokens, expected[1])
    torch.testing.assert_close(after[0], before[0])
    assert torch.equal(after[1], before[1])


def test_a_replaced_method_is_compiled(model, ids, monkeypatch) -> None:
    with torch.no_grad(), model.compiled(backend=Counting()) as runs:
        model(ids)
        model(ids)
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", doubled(modeling_llama.LlamaMLP.forward))
        model(ids)
        model(ids)
        assert runs.graphs == 2
        assert not runs.reasons


@pytest.mark.parametrize("kind", ["function", "decorated", "property"])
def test_code_that_is_assigned_to_a_method(kind, model, ids, monkeypatch) -> None:
    """As IPython's autoreload does with methods whose source has changed."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def changed(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 3

    mlp = modeling_llama.LlamaMLP
    if kind == "function":
        monkeypatch.setattr(mlp, "forward", forward)
    elif kind == "decorated":
        monkeypatch.setattr(mlp, "forward", lambda self, x: forward(self, x))
    else:
        monkeypatch.setattr(mlp, "forward", property(lambda self: lambda x: forward(self, x)))
    with torch.no_grad(), model.compiled(backend=Counting()) as runs:
        model(ids)
        before = model(ids)
        assert runs.graphs == 1
        with monkeypatch.context() as patch:
            patch.setattr(forward, "__code__", changed.__code__)
            found = [model(ids), model(ids)]
            vars(model)["_compiled_runs"] = None
            expected = model(ids)
            vars(model)["_compiled_runs"] = runs
        after = model(ids)
    assert not torch.allclose(before, expected)
    for logits in found:
        torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(after, before)


def test_what_no_call_runs_may_be_replaced(model, monkeypatch) -> None:
    """The compiler itself replaces `__init__`, when it is first used."""
    code = ModelCode(model.module)
    monkeypatch.setattr(nn.Module, "__init__", doubled(nn.Module.__init__))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "note", "no method", raising=False)
    assert code.is_of(model.module)
    assert code.is_current()
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "helper", doubled, raising=False)
        assert not code.is_current()
    assert code.is_current()


def changes(model):
    """What happens before the tokens of a stream: (token, what to do)."""
    layer, norm = model.module.model.layers[0], model.module.model.norm
    handles, autocast = [], torch.autocast("cpu", dtype=torch.bfloat16)
    return {
        "hook": {2: lambda: handles.append(norm.register_forward_hook(negate)), 5: lambda: handles.pop().remove()},
        "pre": {2: lambda: handles.append(norm.register_forward_pre_hook(negate)), 5: lambda: handles.pop().remove()},
        "first": {1: lambda: handles.append(norm.register_forward_hook(negate)), 8: lambda: handles.pop().remove()},
        "ours": {
            1: lambda: handles.append(model.add_hook("model.norm", scale(-2.0))),
            4: lambda: (handles.pop()(), handles.append(norm.register_forward_hook(negate))),
            7: lambda: handles.pop().remove(),
        },
        "call": {
            2: lambda: setattr(layer.mlp, "forward", lambda x: x * 3),
            6: lambda: delattr(layer.mlp, "forward"),
        },
        "class": {
            2: lambda: setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x * 3),
            6: lambda: setattr(modeling_llama.LlamaMLP, "forward", MLP),
        },
        "stance": {3: lambda: set_stance("force_eager"), 6: lambda: set_stance("default")},
        "training": {3: lambda: layer.train(), 6: lambda: layer.eval()},
        "autocast": {3: lambda: autocast.__enter__(), 6: lambda: autocast.__exit__(None, None, None)},
    }


MLP = modeling_llama.LlamaMLP.forward


@pytest.mark.quick_for("hook", "first")
@pytest.mark.parametrize("name", ["hook", "pre", "first", "ours", "call", "class", "stance", "training", "autocast"])
def test_a_stream_follows_what_others_do_between_tokens(name, model, ids) -> None:
    def streamed():
        happens, columns = changes(model)[name], []
        for number, column in enumerate(model.stream(ids, max_new_tokens=10, do_sample=False), 1):
            columns.append(column)
            happens.get(number, lambda: None)()
        return torch.stack(columns, 1)

    free = model.generate(ids, max_new_tokens=10, do_sample=False)[:, 5:]
    expected = streamed()
    assert torch.equal(expected, free) == (name in ("stance", "training", "autocast"))
    with model.compiled(backend=Counting()), warnings.catch_warnings():
        warnings.simplefilter("ignore", HooklineWarning)  # from then on it is uncompiled
        assert torch.equal(streamed(), expected)
        assert torch.equal(streamed(), expected)


@pytest.mark.quick_for("force_eager")
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile"])
def test_stances_of_the_compiler(stance, model, ids) -> None:
    hooks = [("blocks.0.hook_resid_post", scale(-2.0))]
    options = {"max_new_tokens": 4, "do_sample": False, "names_filter": "blocks.*.hook_resid_post"}

    def run():
        with model.hooks(hooks):
            tokens, cache = model.generate_with_cache(ids, **options)
            logits, values = model.run_with_cache(ids, names_filter="blocks.0.hook_resid_post")
        return [tokens, *cache.values(), logits, *values.values()]

    with torch.no_grad():
        expected = run()
        with model.compiled(backend=Counting()) as runs:
            for is_set in (True, False, True):
                with set_stance(stance if is_set else "default"), warnings.catch_warnings():
                    warnings.simplefilter("ignore" if is_set else "error", HooklineWarning)
                    for _ in range(2):
                        for x, right in zip(run(), expected, strict=True):
                            torch.testing.assert_close(x, right)
            assert [*runs.reasons] == [f'torch.compiler.set_stance("{stance}") is on']
            assert runs.graphs == 2
            with pytest.warns(HooklineWarning, match="force_backend"), set_stance(force_backend="eager"):
                torch.testing.assert_close(run()[0], expected[0])

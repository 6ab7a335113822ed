"""Compiled forward passes: logits and activations are those of the engine's hooks."""

import pytest
import torch
from backends import Counting, needs_graphs
from tiny_models import causal_lm
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline.edits import add, cap, freeze, project_out, replace, zero
from hookline.errors import HookError, HooklineWarning, NeverFiredWarning
from hookline.positions import at, last, new_tokens

pytestmark = [
    needs_graphs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler's own imports
]


@pytest.fixture(scope="module")
def model():
    torch._dynamo.reset()
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    yield hookline.hook(LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64)).eval())
    torch._dynamo.reset()


def test_logits_and_activations_are_those_of_the_hooks(model) -> None:
    ids = torch.randint(3, 60, (2, 7))
    vector, source = torch.randn(32), model.run_with_cache(ids)[1]["blocks.0.hook_resid_post"]
    plans = [
        [],
        [("blocks.0.hook_resid_post", add(vector, 2.0, pos=-2)), ("blocks.1.attn.hook_z", zero(head=1))],
        [("blocks.0.hook_resid_post", add(-vector, pos=last)), ("blocks.1.attn.hook_z", zero(head=[0, 2], pos=[1, 3]))],
        [("blocks.0.hook_resid_mid", project_out(vector))],
        [("blocks.0.hook_resid_mid", cap(vector, low=-0.1, high=0.2))],
        [("blocks.0.hook_resid_mid", add(vector, 0.5, match_norm=True, pos=[0, 2]))],
        [("blocks.1.hook_resid_post", replace(2 * source))],
        [("blocks.0.hook_resid_post", freeze(source.flip(1)))],
        [("blocks.1.hook_mlp_out", at(last, lambda x, hook: x * 2 + hook.layer()))],
    ]

    def results():
        names = ["blocks.*.hook_resid_post", "blocks.1.hook_resid_mid"]
        return [model.run_with_cache(ids, fwd_hooks=plan, names_filter=names) for plan in plans]

    with torch.no_grad():
        expected = results()
        with model.compiled(backend=Counting()) as runs:
            first, graphs, second = results(), runs.graphs, results()
            assert runs.graphs == graphs == len(plans) - 3, (
                "the third plan has the tables of the second, two have the fourth's"
            )
            shorter = model.run_with_hooks(ids[:, :5], fwd_hooks=plans[1], return_type="loss")
            assert runs.graphs == graphs, "shorter texts are padded"
            assert not runs.reasons
        assert torch.allclose(shorter, model.run_with_hooks(ids[:, :5], fwd_hooks=plans[1], return_type="loss"))
    for found in (first, second):
        for (logits, cache), (right, eager) in zip(found, expected, strict=True):
            torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-5)
            assert cache.keys() == eager.keys()
            for name in cache:
                torch.testing.assert_close(cache[name], eager[name], rtol=1e-4, atol=1e-5)


def test_what_was_read_does_not_change_later(model) -> None:
    ids = torch.randint(3, 60, (1, 6))
    with torch.no_grad(), model.compiled(backend=Counting()):
        for _ in range(2):  # the first call is the proof's
            logits, cache = model.run_with_cache(ids, names_filter="blocks.1.hook_resid_post")
        kept = logits.clone(), cache["blocks.1.hook_resid_post"].clone()
        model.run_with_cache(ids + 1, names_filter="blocks.1.hook_resid_post")
        assert torch.equal(logits, kept[0])
        assert torch.equal(cache["blocks.1.hook_resid_post"], kept[1])


def test_padding_and_errors(model) -> None:
    ids = torch.randint(3, 60, (2, 6))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {
        "attention_mask": mask,
        "position_ids": positions,
        "fwd_hooks": [("blocks.0.hook_resid_post", zero(pos=0))],
    }
    with torch.no_grad():
        expected = model.run_with_hooks(ids, **given)
        with model.compiled(backend=Counting()) as runs:
            for _ in range(2):
                torch.testing.assert_close(model.run_with_hooks(ids, **given), expected, rtol=1e-4, atol=1e-5)
            assert not runs.reasons
            with (
                pytest.warns(HooklineWarning, match="no position 20"),
                pytest.raises(HookError, match="no position 20"),
            ):
                model.run_with_hooks(ids, fwd_hooks=[("blocks.0.hook_resid_post", zero(pos=20))])


def test_with_gradients_it_runs_uncompiled(model) -> None:
    ids = torch.randint(3, 60, (1, 6))
    with model.compiled(backend=Counting()) as runs:
        with pytest.warns(HooklineWarning, match="gradients are"):
            logits = model(ids)
        assert logits.requires_grad
        assert runs.graphs == 0


def zero_last(h):
    h[:, -1] = 0


@torch.no_grad()
@pytest.mark.quick_for("zero_last")
@pytest.mark.parametrize("function", [zero_last, lambda h: h - h.mean(1, keepdim=True), lambda h: h / h.norm()])
def test_a_function_does_not_see_padding(model, function) -> None:
    hooks = [("blocks.0.hook_resid_post", function)]
    texts = [torch.randint(3, 60, (1, length)) for length in (16, 11, 13, 16)]
    expected = [model.run_with_hooks(text, fwd_hooks=hooks) for text in texts]
    with model.compiled(backend=Counting()) as runs:
        for text, right in zip(texts, expected, strict=True):
            torch.testing.assert_close(model.run_with_hooks(text, fwd_hooks=hooks), right, rtol=1e-4, atol=1e-5)
        assert not runs.reasons
        assert runs.graphs == 3


@torch.no_grad()
def test_a_function_at_many_lengths_runs_uncompiled(model) -> None:
    hooks = [("blocks.0.hook_resid_post", zero_last)]
    texts = [torch.randint(3, 60, (1, length)) for length in (5, 6, 7)]
    expected = [model.run_with_hooks(text, fwd_hooks=hooks) for text in texts]
    with model.compiled(backend=Counting(), limit=2) as runs:
        for text in texts[:2]:
            model.run_with_hooks(text, fwd_hooks=hooks)
        with pytest.warns(HooklineWarning, match="2 values"):
            assert torch.equal(model.run_with_hooks(texts[2], fwd_hooks=hooks), expected[2])
        assert runs.graphs == 2


@torch.no_grad()
def test_a_cache_has_the_order_of_the_pass(model) -> None:
    ids, wanted = torch.randint(3, 60, (1, 9)), ["blocks.*.hook_resid_post", "blocks.0.attn.hook_z", "q1"]
    before = list(model.run_with_cache(ids, names_filter=wanted)[1])
    with model.compiled(backend=Counting()):
        for _ in range(2):
            assert list(model.run_with_cache(ids, names_filter=wanted)[1]) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": "zz"}, "no point is named 'zz'"),
        ({"points": "blocks.*.attn.hook_pattern"}, "'blocks.0.attn.hook_pattern' cannot be edited in a graph"),
        ({"options": {"nonsense": 1}}, "options: Unexpected optimization option nonsense$"),
        ({"backend": "nope"}, "there is no backend 'nope': torch has .*inductor"),
        ({"backend": 3}, "a backend is a name or a function"),
        ({"backend": "eager", "mode": "reduce-overhead"}, "mode and options are for the backend"),
        ({"mode": "fast"}, "there is no mode 'fast': torch has .*reduce-overhead"),
        ({"limit": 0}, "limit is how many graphs are kept: .* not 0"),
        ({"limit": "x"}, "not 'x'"),
        ({"patience": -3}, "patience is a number of seconds, not -3"),
        ({"level": 3}, "compile has no option 'level'"),
    ],
)
def test_wrong_options_raise_at_once(model, options, message) -> None:
    with pytest.raises(hookline.HooklineError, match=message):
        model.compile(**options)
    assert model._graphs is None


def test_positions_that_restart_run_uncompiled(model) -> None:
    ids = torch.randint(3, 60, (1, 12))
    one, two = torch.arange(12)[None], torch.cat([torch.arange(7), torch.arange(5)])[None]
    with torch.no_grad():
        expected = model(ids, position_ids=two)
        with model.compiled(backend=Counting()) as runs:
            model(ids, position_ids=one)
            assert runs.graphs == 1
            with pytest.warns(HooklineWarning, match="not consecutive"):
                assert torch.equal(model(ids, position_ids=two), expected)
            mask = torch.ones_like(ids)
            for _ in range(2):
                torch.testing.assert_close(model(ids, position_ids=two, attention_mask=mask), expected)
            assert runs.graphs == 2


def test_padding_is_not_compared() -> None:
    """Attention over nothing is uniform over all columns in eager attention, and a graph has more of them."""
    torch._dynamo.reset()
    model = hookline.hook(causal_lm("gptj").eval())
    ids = torch.randint(3, 60, (2, 13))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)
        with model.compiled(backend=Counting()) as runs:
            for _ in range(2):
                found = model(ids, attention_mask=mask)
                torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
            assert not runs.reasons


def test_a_hook_that_never_fires_has_the_same_reason(model) -> None:
    ids = torch.randint(3, 60, (1, 6))
    hook = ("blocks.0.hook_resid_post", add(torch.ones(32), pos=new_tokens))
    with torch.no_grad(), model.compiled(backend=Counting()):
        for _ in range(3):
            with pytest.warns(NeverFiredWarning, match="new_tokens"):
                model.run_with_hooks(ids, fwd_hooks=[hook])
            with (
                pytest.warns(NeverFiredWarning, match="new_tokens"),
                model.hooks([hook]),
            ):
                model(ids)


def test_a_function_that_cannot_be_compiled_is_named(model) -> None:
    ids = torch.randint(3, 60, (1, 6))
    hooks = [("blocks.1.hook_mlp_out", lambda x: x * 2 if x.sum() > 0 else x)]
    with torch.no_grad():
        expected = model.run_with_hooks(ids, fwd_hooks=hooks)
    said = pytest.warns(HooklineWarning, match=r"'blocks.1.hook_mlp_out' \(Unsupported")
    with torch.no_grad(), model.compiled(backend=Counting()), said:
        found = model.run_with_hooks(ids, fwd_hooks=hooks)
    torch.testing.assert_close(found, expected)

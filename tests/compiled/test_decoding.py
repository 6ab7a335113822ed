"""Compiled generations: the tokens, activations and reports are those of the engine's hooks, from few graphs."""

import random
import threading
from contextlib import nullcontext

import pytest
import torch
from backends import Counting, needs_graphs
from releases import transformers_is_before
from tiny_models import causal_lm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Phi3Config,
    Phi3ForCausalLM,
)

import hookline
from hookline.edits import add, cap, mean, noise, project_out, replace, scale, zero
from hookline.errors import HookError, HooklineError, HooklineWarning, NeverFiredWarning
from hookline.positions import at, last, new_tokens, step, token

pytestmark = [
    needs_graphs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler's own imports
]

READS = ["blocks.*.hook_resid_post", "blocks.1.attn.hook_z"]


def built(kind: str | None = None) -> hookline.HookedModel:
    """A tiny model; by default one of two layers, because a graph takes seconds."""
    torch.manual_seed(0)
    if kind is not None:
        return hookline.hook(causal_lm(kind).eval())
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, head_dim=24, vocab_size=64, pad_token_id=0, eos_token_id=None)
    return hookline.hook(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def model() -> hookline.HookedModel:
    return built()


@pytest.fixture(scope="module")
def runs(model):
    """One set of graphs for the tests that share this model: a graph takes seconds."""
    torch._dynamo.reset()
    made = model.compile(backend=Counting())
    vars(model)["_compiled_runs"] = None
    yield made
    made.close()
    torch._dynamo.reset()


def both(model, runs, ids, hooks=(), **options):
    """A generation with the engine's hooks, and compiled: tokens and caches."""
    found = []
    for graphs in (None, runs):
        vars(model)["_compiled_runs"] = graphs
        try:
            with model.hooks(hooks):
                found.append(model.generate_with_cache(ids, names_filter=READS, **{"do_sample": False, **options}))
        finally:
            vars(model)["_compiled_runs"] = None
    return found


def check(model, runs, ids, hooks=(), **options) -> torch.Tensor:
    (expected, eager), (tokens, cache) = both(model, runs, ids, hooks, **options)
    assert torch.equal(tokens, expected)
    assert list(cache) == list(eager)
    for name in cache:
        assert cache[name].shape == eager[name].shape
        assert cache[name].shape[1] == tokens.shape[1] - 1
        torch.testing.assert_close(cache[name], eager[name], rtol=1e-4, atol=1e-5)
    assert all(not each._forward_hooks and not each._forward_pre_hooks for each in model.module.modules())
    return tokens


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 5))


def test_edits_change_nothing_but_tables(model, runs, ids) -> None:
    """One graph for every value, head, position and step at two points."""
    vector = torch.randn(32)
    bare = check(model, runs, ids, [], max_new_tokens=12)
    before = None
    for edit, other in (
        (add(vector, 3.0), zero(head=1)),
        (add(vector, -1.0, pos=last), scale(0.5, head=[0, 3])),
        (replace(vector, pos=step(2)), scale(3.0, pos=7)),
        (zero(pos=new_tokens), zero(head=2, pos=slice(3, 8))),
        (scale(2.0, pos=-1), replace(1.5, neuron=[1, 4])),
        (mean(torch.randn(4, 6, 32), outliers="include"), zero(mask=torch.rand(4, 24) > 0.5)),
        (add(vector, pos=torch.tensor([6, 8])), scale(-1.0)),
    ):
        check(
            model, runs, ids, [("blocks.1.hook_resid_post", edit), ("blocks.0.attn.hook_z", other)], max_new_tokens=12
        )
        before = before or runs.graphs
        assert runs.graphs == before
    check(model, runs, ids, [("blocks.0.attn.hook_z", zero(head=1))], max_new_tokens=12)  # one of the two is off
    after = check(model, runs, ids, [], max_new_tokens=12)
    assert torch.equal(after, bare)
    assert runs.graphs == before
    assert not runs.reasons


def test_caps_and_matched_norms_change_nothing_but_tables(model, runs, ids) -> None:
    """One graph for every bound, direction, coefficient, head, position and step at two points."""
    vector, of_head = torch.randn(32), torch.randn(24)
    before = None
    for edit, other in (
        (cap(vector, high=-0.5), cap(of_head, low=0.1, head=1)),
        (cap(-vector, low=-0.2, high=0.1, pos=new_tokens), add(of_head, 0.5, match_norm=True, head=[0, 3])),
        (add(vector, -1.5, match_norm=True), cap(of_head, high=0.0, mask=torch.rand(4, 1) > 0.5)),
        (add(1.0, 0.25, match_norm=True, pos=-1), project_out(of_head, head=2)),
        (project_out(vector, pos=step(3)), add(torch.randn(4, 24)[None, None], 0.3, match_norm=True)),
    ):
        check(
            model, runs, ids, [("blocks.1.hook_resid_post", edit), ("blocks.0.attn.hook_z", other)], max_new_tokens=12
        )
        before = before or runs.graphs
        assert runs.graphs == before
    assert not runs.reasons


@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # the other row does not have the token
def test_a_token_is_found_as_it_is_written(model, runs, ids) -> None:
    bare = check(model, runs, ids, [], max_new_tokens=12)
    written = int(bare[0, 7])
    hooks = [("blocks.1.hook_resid_post", zero(pos=token(written)))]
    assert not torch.equal(check(model, runs, ids, hooks, max_new_tokens=12), bare)


def test_a_batch_with_padding_and_stop_tokens(model, runs) -> None:
    ids = torch.randint(3, 60, (2, 6))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    bare = check(model, runs, ids, [], max_new_tokens=12, attention_mask=mask)
    stop = [int(bare[0, 9]), int(bare[1, 11])]
    ended = check(model, runs, ids, [], max_new_tokens=12, attention_mask=mask, eos_token_id=stop)
    assert ended.shape[1] < bare.shape[1]
    hooks = [("blocks.1.hook_resid_post", add(torch.randn(32), 2.0, pos=slice(2, 6)))]
    check(model, runs, ids, hooks, max_new_tokens=12, attention_mask=mask)


def test_sampling_is_that_of_generate(model, runs, ids) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 10}
    tokens = check(model, runs, ids, [], **options, seed=3)
    again, other = (check(model, runs, ids, [], **options, seed=seed) for seed in (3, 4))
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    state = torch.get_rng_state()
    model.generate(ids, **options, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    columns = [torch.stack([*model.stream(ids, **options, seed=3)], 1)]
    vars(model)["_compiled_runs"] = runs
    columns.append(torch.stack([*model.stream(ids, **options, seed=3)], 1))
    vars(model)["_compiled_runs"] = None
    assert all(torch.equal(each, tokens[:, 5:]) for each in columns)


def test_a_hook_that_comes_later_acts_and_its_removal_restores(model, runs, ids) -> None:
    vars(model)["_compiled_runs"] = runs
    bare = model.generate(ids, max_new_tokens=8, do_sample=False)
    remove = model.add_hook("blocks.1.hook_mlp_out", zero())
    hook_id = model.registry.register_hook("blocks.0.hook_attn_out", scale(4.0))
    changed = model.generate(ids, max_new_tokens=8, do_sample=False)
    vars(model)["_compiled_runs"] = None
    assert torch.equal(changed, model.generate(ids, max_new_tokens=8, do_sample=False))
    vars(model)["_compiled_runs"] = runs
    model.registry.disable(hook_id)
    remove()
    assert torch.equal(bare, model.generate(ids, max_new_tokens=8, do_sample=False))
    model.registry.unregister_hook(hook_id)
    vars(model)["_compiled_runs"] = None
    assert not torch.equal(bare, changed)


def test_a_function_is_traced_with_its_values(model, runs, ids) -> None:
    shift = torch.randn(32)

    def hooks(vector):
        def push(x, hook):
            x += vector * hook.layer()

        return [("blocks.1.hook_mlp_out", push), ("blocks.1.hook_resid_post", at(new_tokens, lambda x: x * 1.5))]

    first = check(model, runs, ids, hooks(shift), max_new_tokens=8)
    before = runs.graphs
    second = check(model, runs, ids, hooks(-5 * shift), max_new_tokens=8)
    assert runs.graphs == before, "another tensor in the same function compiles nothing"
    assert not torch.equal(first, second)
    check(model, runs, ids, [("blocks.1.hook_mlp_out", torch.zeros_like)], max_new_tokens=8)


def test_what_cannot_be_compiled_runs_uncompiled_and_says_so(model, ids) -> None:
    seen = []
    vector = torch.randn(32)
    ids[:, 0] = 5
    with model.compiled(backend=Counting()) as runs:
        for hook, why in (
            (("blocks.0.hook_resid_post", lambda x: seen.append(x.shape)), "'seen' is a list"),
            (("blocks.0.hook_resid_post", lambda x: x * x.max().item()), "host"),
            (("blocks.0.hook_resid_post", noise(0.1)), "noise"),
            (("blocks.0.attn.hook_pattern", zero(head=0)), "inside its module"),
            (("blocks.0.ln1.hook_scale", scale(2.0)), "derived"),
            (("blocks.0.hook_resid_post", add(vector, pos=token(5, nth=0))), "not a table here"),
        ):
            with pytest.warns(HooklineWarning, match=why), model.hooks([hook]):
                compiled = model.generate(ids, max_new_tokens=4, do_sample=False)
            vars(model)["_compiled_runs"], graphs = None, runs
            with model.hooks([hook]):
                assert torch.equal(compiled, model.generate(ids, max_new_tokens=4, do_sample=False))
            vars(model)["_compiled_runs"] = graphs
        with model.hooks([("blocks.0.hook_resid_post", noise(0.1))]):
            model.generate(ids, max_new_tokens=4, do_sample=False)  # a reason is told once
        with pytest.warns(HooklineWarning, match="beam_search"):
            model.generate(ids, max_new_tokens=4, num_beams=2)
        handle = model.module.model.norm.register_forward_hook(lambda *_: None)
        with pytest.warns(HooklineWarning, match="somebody else"):
            model.generate(ids, max_new_tokens=4)
        handle.remove()
        assert "uncompiled, 2 runs" in repr(runs)
    assert seen
    assert model.generate(ids, max_new_tokens=2).shape == (2, 7)


def test_models_that_cannot_be_compiled_say_so(ids) -> None:
    model = built("mamba")
    with model.compiled(backend=Counting()) as runs, pytest.warns(HooklineWarning, match=r"cannot be|kind|static"):
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, 9)
    assert runs.graphs == 0


def test_errors_and_reports_are_those_of_the_engine(model, runs, ids) -> None:
    vars(model)["_compiled_runs"] = runs
    try:
        with pytest.raises(HookError, match="head=9"), model.hooks([("blocks.0.attn.hook_z", zero(head=9))]):
            model.generate(ids, max_new_tokens=4)
        with (
            pytest.warns(NeverFiredWarning, match="position 30"),
            model.hooks([("blocks.1.hook_resid_post", zero(pos=[1, 30]))]),
        ):
            model.generate(ids, max_new_tokens=4)
        with model.hooks([("blocks.1.hook_resid_post", zero(pos=step(2)))]):
            model.generate(ids, max_new_tokens=4)  # fires in the graph only
    finally:
        vars(model)["_compiled_runs"] = None


def test_a_graph_that_differs_is_not_used(ids, monkeypatch) -> None:
    model = built()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)

    def wrong(graph, _inputs):
        return lambda *args: [x + 1 if x.is_floating_point() else x for x in graph.forward(*args)]

    with (
        model.compiled(backend=wrong) as runs,
        pytest.warns(HooklineWarning, match="traced"),
    ):
        found = [model.generate(ids, max_new_tokens=4, do_sample=False) for _ in range(2)]
    assert all(torch.equal(each, expected) for each in found)
    assert runs.graphs == 1


def test_two_models_and_two_threads_do_not_share_graphs(ids) -> None:
    torch._dynamo.reset()
    one, two = built(), built()
    with torch.no_grad():
        for weight in two.module.parameters():
            weight.mul_(1.5)
    expected = [each.generate(ids, max_new_tokens=6, do_sample=False) for each in (one, two)]
    hooks = [("blocks.1.hook_resid_post", zero(neuron=[*range(16)]))]
    with one.hooks(hooks):
        expected.append(one.generate(ids, max_new_tokens=6, do_sample=False))
    found = {}

    def hooked() -> None:
        with one.hooks(hooks):
            found["thread"] = one.generate(ids, max_new_tokens=6, do_sample=False)

    with one.compiled(backend=Counting()) as first, two.compiled(backend=Counting()) as second:
        thread = threading.Thread(target=hooked)
        thread.start()
        found["one"] = one.generate(ids, max_new_tokens=6, do_sample=False)
        found["two"] = two.generate(ids, max_new_tokens=6, do_sample=False)
        thread.join()
        assert (first.graphs, second.graphs) == (2, 1)
    for name, tokens in zip(("one", "two", "thread"), expected, strict=True):
        assert torch.equal(found[name], tokens)


def test_hooks_act_while_another_thread_compiles(ids) -> None:
    """Torch says that every thread is compiling while one is."""
    model, other = built(), built()
    expected = []
    for hooks in ([], [("blocks.1.hook_resid_post", zero())]):
        with model.hooks(hooks):
            expected.append(model(ids))
    is_compiling, is_done = threading.Event(), threading.Event()

    def backend(graph, _inputs):
        is_compiling.set()
        is_done.wait(20)
        return graph.forward

    with other.compiled(backend=backend), model.hooks(hooks):
        thread = threading.Thread(target=lambda: other.generate(ids, max_new_tokens=3))
        thread.start()
        is_compiling.wait(60)
        found = model(ids)
        is_done.set()
        thread.join()
    assert torch.equal(found, expected[1])
    assert not torch.equal(*expected)


def test_values_in_a_function_need_graphs_and_are_bounded(ids) -> None:
    model = built()

    def scaled(factor):
        return [("blocks.1.hook_mlp_out", lambda x: x * factor)]

    factors = [0.5, 2.0, 0.5, -3.0]
    expected = []
    for factor in factors:
        with model.hooks(scaled(factor)):
            expected.append(model.generate(ids, max_new_tokens=4, do_sample=False))
    with model.compiled(backend=Counting(), limit=2) as runs:
        for factor, right in zip(factors[:3], expected, strict=False):
            with model.hooks(scaled(factor)):
                assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), right)
        assert runs.graphs == 2
        with pytest.warns(HooklineWarning, match="2 values"), model.hooks(scaled(factors[3])):
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected[3])
        model.generate(ids, max_new_tokens=4, do_sample=False)
        assert runs.graphs == 3
        assert len(runs._variants) == 2, "the oldest is dropped"


def test_the_weights_and_the_dtype_may_change(ids) -> None:
    model = built()
    with model.compiled(backend=Counting()) as runs:
        before = model.generate(ids, max_new_tokens=6, do_sample=False)
        with torch.no_grad():
            model.module.model.layers[0].mlp.down_proj.weight.mul_(-4.0)
        changed = model.generate(ids, max_new_tokens=6, do_sample=False)
        assert runs.graphs == 1
        model.double()
        double = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert not torch.equal(before, changed)
    assert torch.equal(double, model.generate(ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(changed, model.float().generate(ids, max_new_tokens=6, do_sample=False))


def test_a_stream_follows_hooks_and_can_be_left(model, runs, ids) -> None:
    hooks = [("blocks.1.hook_resid_post", zero())]
    found = []
    for graphs in (None, runs, runs):  # the second time its graphs are there
        vars(model)["_compiled_runs"] = graphs
        stream = model.stream(ids, max_new_tokens=8, do_sample=False)
        columns = [next(stream) for _ in range(3)]
        with model.hooks(hooks):
            columns += [next(stream) for _ in range(2)]
        columns.append(next(stream))
        stream.close()
        found.append(torch.stack(columns, 1))
    vars(model)["_compiled_runs"] = None
    assert all(torch.equal(found[0], each) for each in found[1:])
    assert all(not each._forward_hooks for each in model.module.modules())
    with pytest.raises(HooklineError, match="beam_search"):
        model.stream(ids, num_beams=2)
    with pytest.raises(HooklineError, match="one text"):
        model.stream(["a", "b"])


def test_a_cache_of_patterns_grows_with_the_text(model, ids) -> None:
    names = ["blocks.*.attn.hook_pattern", "blocks.*.attn.hook_rot_k"]
    tokens, cache = model.generate_with_cache(ids, max_new_tokens=4, do_sample=False, names_filter=names)
    whole = model.run_with_cache(tokens[:, :-1], names_filter=names)[1]
    for name in cache:
        torch.testing.assert_close(cache[name], whole[name], rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.forward_pass.span.tokens, tokens[:, :-1])


def test_a_module_that_is_called_between_the_passes_is_named(model, ids) -> None:
    """A logits processor may call the head itself: in no pass, so what flows there has no position."""

    class Calling(LogitsProcessor):
        def __call__(self, input_ids, scores):
            model.module.lm_head(torch.zeros(len(input_ids), 1, 32))
            return scores

    with pytest.raises(HooklineError, match=r"'unembed\.hook_in'.*shape"):
        model.generate_with_cache(
            ids, 4, names_filter="unembed.hook_in", logits_processor=LogitsProcessorList([Calling()]), do_sample=False
        )


def test_options(model) -> None:
    with pytest.raises(HooklineError, match="no option 'fullgraph'"):
        model.compile(fullgraph=True)
    with model.compiled(backend=Counting()):
        plan = model.plan(
            ["blocks.0.hook_resid_post"],
            [("blocks.1.attn.hook_z", zero(head=1)), ("blocks.1.attn.hook_pattern", zero())],
        )
    assert [row.compiled.split(":")[0] for row in plan] == ["table", "eager", "read"]
    assert "table" in str(plan)


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_position_biases_of_padded_prompts(kind) -> None:
    torch._dynamo.reset()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    more = {"alibi": True, "multi_query": False} if kind == "falcon" else {}
    config = AutoConfig.for_model(kind, **sizes, **more, pad_token_id=0, eos_token_id=None)
    model = hookline.hook(AutoModelForCausalLM.from_config(config).eval())
    runs = model.compile(backend=Counting())
    vars(model)["_compiled_runs"] = None
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    (expected, kept), (found, read) = both(model, runs, ids, attention_mask=mask, max_new_tokens=7)
    assert torch.equal(expected, found)
    is_text = torch.nn.functional.pad(mask, (0, 6), value=1).bool()
    for name in kept:
        torch.testing.assert_close(read[name][is_text], kept[name][is_text])
    assert not runs.reasons
    runs.close()


def test_stop_tokens_of_a_generation_after_one_without() -> None:
    torch._dynamo.reset()
    model = built()
    ids = torch.randint(3, 60, (4, 5))
    options = {"max_new_tokens": 12, "do_sample": False}
    free = model.generate(ids, **options)
    stops = [int(free[0, 6]), int(free[1, 8])]  # in the middle of two texts
    expected = model.generate(ids, **options, eos_token_id=stops)
    assert not torch.equal(expected, free[:, : expected.shape[1]]), "rows that have ended are padded"
    with model.compiled(backend=Counting()) as runs:
        assert torch.equal(model.generate(ids, **options), free)
        assert torch.equal(model.generate(ids, **options, eos_token_id=stops), expected)
        assert torch.equal(model.generate(ids, **options), free)
        assert runs.graphs == 1


def test_inference_mode_first() -> None:
    torch._dynamo.reset()
    model = built()
    ids = torch.randint(3, 60, (1, 5))
    expected, logits = model.generate(ids, max_new_tokens=6, do_sample=False), model(ids)
    with torch.inference_mode():
        assert [int(each) for each in model.stream(ids, max_new_tokens=6, do_sample=False)] == expected[0, 5:].tolist()
    with model.compiled(backend=Counting()) as runs:
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
                assert [int(each) for each in model.stream(ids, max_new_tokens=6)] == expected[0, 5:].tolist()
                torch.testing.assert_close(model.run_with_cache(ids, names_filter="hook_embed")[0], logits)
        assert not runs.reasons


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 20}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}


def says_that_it_is_untraced():
    """Before 5.21, transformers compares the length with that in Python: no graph can, and runs are uncompiled."""
    is_untraced = transformers_is_before("5.21")
    return pytest.warns(HooklineWarning, match="Data-dependent branching") if is_untraced else nullcontext()


def long_model() -> hookline.HookedModel:
    """A model whose rotary angles change at 20 tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": None, "max_position_embeddings": 80}
    config = Phi3Config(
        **sizes, **more, initializer_range=0.2, original_max_position_embeddings=20, rope_parameters=LONG
    )
    return hookline.hook(Phi3ForCausalLM(config).eval())


def test_a_generation_in_which_rotary_angles_change_runs_uncompiled() -> None:
    torch._dynamo.reset()
    model = long_model()
    ids = torch.randint(3, 60, (1, 15))
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    with model.compiled(backend=Counting()) as runs:
        with pytest.warns(HooklineWarning, match="20 tokens"):
            assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
        with says_that_it_is_untraced():
            assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected[:, :20])
        assert runs.graphs == (0 if transformers_is_before("5.21") else 1)


def test_a_pass_shorter_than_where_rotary_angles_change() -> None:
    torch._dynamo.reset()
    model = long_model()
    ids = torch.randint(3, 60, (1, 22))
    with torch.no_grad():
        expected = [model(ids[:, :length]) for length in (22, 19)]  # both would be padded to 24
        with model.compiled(backend=Counting()) as runs, says_that_it_is_untraced():
            for _ in range(2):
                for length, logits in zip((22, 19), expected, strict=True):
                    torch.testing.assert_close(model(ids[:, :length]), logits)
            assert bool(runs.reasons) == transformers_is_before("5.21")


@pytest.mark.skipif(transformers_is_before("5.21"), reason="there is no graph to prove: see says_that_it_is_untraced")
def test_the_first_padded_pass_is_proved_too(monkeypatch) -> None:
    monkeypatch.setattr("hookline.compiled.entry.depends_on_length", lambda _: False)
    torch._dynamo.reset()
    model = long_model()
    ids = torch.randint(3, 60, (1, 24))
    with torch.no_grad():
        expected = [model(ids[:, :length]) for length in (24, 19)]
        with model.compiled(backend=Counting()):
            for _ in range(2):
                torch.testing.assert_close(model(ids), expected[0])  # as long as its graph
            with pytest.warns(HooklineWarning, match="hooks give"):
                assert torch.equal(model(ids[:, :19]), expected[1])
            assert torch.equal(model(ids[:, :19]), expected[1])


@pytest.mark.quick_for("deepseek_v32")
@pytest.mark.parametrize("kind", ["deepseek_v32", "minimax_m3_vl_text"])
def test_models_that_choose_keys_have_a_graph_for_each_length(kind) -> None:
    torch._dynamo.reset()
    model = hookline.hook(causal_lm(kind).eval())
    ids = torch.randint(3, 60, (2, 16))
    masks = [torch.ones_like(ids) for _ in range(2)]
    masks[1][0, :4] = 0
    calls = [(length, mask[:, :length]) for length in (16, 13) for mask in masks]
    with torch.no_grad():
        expected = [model(ids[:, :length], attention_mask=mask) for length, mask in calls]
        with model.compiled(backend=Counting()) as runs:
            for _ in range(2):
                for (length, mask), logits in zip(calls, expected, strict=True):
                    found = model(ids[:, :length], attention_mask=mask)
                    torch.testing.assert_close(found[mask.bool()], logits[mask.bool()])
            assert not runs.reasons


def test_the_first_masked_texts_are_proved_too(monkeypatch) -> None:
    model = built()
    ids, options = torch.randint(3, 60, (2, 8)), {"max_new_tokens": 4, "do_sample": False}
    masked = torch.ones_like(ids)
    masked[0, :3] = 0
    expected = model.generate(ids, attention_mask=masked, **options)
    with torch.no_grad():
        logits = model(ids, attention_mask=masked)
    with model.compiled(backend=Counting()):
        model.generate(ids, **options)
        with torch.no_grad():
            model(ids, attention_mask=torch.ones_like(ids))
        monkeypatch.setattr("hookline.compiled.proof.difference", lambda *_: "it is refused here")
        with pytest.warns(HooklineWarning, match="refused"):
            assert torch.equal(model.generate(ids, attention_mask=masked, **options), expected)
        with torch.no_grad():
            assert torch.equal(model(ids, attention_mask=masked), logits)


def test_training_mode_runs_uncompiled() -> None:
    model = hookline.hook(causal_lm("gpt2"))
    model.module.train()
    ids = torch.randint(3, 60, (1, 5))
    torch.manual_seed(1)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    torch.manual_seed(1)
    with model.compiled(backend=Counting()), pytest.warns(HooklineWarning, match="training mode"):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


SIX = ["llama", "gpt2", "gemma3_text", "mistral", "gpt_neox", "qwen3"]
"""Two of them, and half of the layers of a third, have sliding windows."""


def random_edit(features: int, heads: int | None):
    where = {
        "pos": random.choice(
            [None, None, last, new_tokens, step(random.randrange(6)), random.randrange(20), slice(3, 9)]
        )
    }
    if heads is not None and random.random() < 0.5:
        where["head"] = random.randrange(heads)
    elif random.random() < 0.3:
        where["neuron"] = random.sample(range(features), 3)
    vector = torch.randn(features)
    return random.choice(
        [
            lambda: zero(**where),
            lambda: scale(random.uniform(-2, 2), **where),
            lambda: add(vector, random.uniform(-3, 3), **where),
            lambda: replace(vector, **where),
            lambda: mean(torch.randn(3, features).mean(0), **where),
            lambda: project_out(vector, **where),
            lambda: cap(vector, low=-0.3, high=random.uniform(0, 1), **where),
            lambda: add(vector, random.uniform(-1, 1), match_norm=True, **where),
        ]
    )()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # a position that a text does not have
@pytest.mark.parametrize("kind", SIX)
def test_random_edits_need_three_graphs(kind) -> None:
    torch._dynamo.reset()
    random.seed(0)
    model = built(kind)
    ids = torch.randint(3, 60, (2, 6))
    backend = Counting()
    runs = model.compile(backend=backend)
    vars(model)["_compiled_runs"] = None
    points = [
        "hook_resid_pre",
        "hook_resid_post",
        "hook_attn_out",
        "hook_mlp_out",
        "mlp.hook_post",
        "attn.hook_z",
        "attn.hook_q",
    ]
    shapes = {name: x.shape for name, x in model.run_with_cache(ids)[1].items()}
    known = [name for name in shapes if name.split(".", 2)[-1] in points]
    for trial in range(200):
        chosen = random.sample(known, random.choice([1, 2]))
        hooks = [
            (name, random_edit(shapes[name][-1], shapes[name][2] if len(shapes[name]) == 4 else None))
            for name in chosen
        ]
        if trial % 20 == 0:  # an uncompiled generation takes long
            check(model, runs, ids, hooks, max_new_tokens=64 - 6)
            continue
        vars(model)["_compiled_runs"] = runs
        with model.hooks(hooks):
            model.generate_with_cache(ids, names_filter=READS, max_new_tokens=4, do_sample=False)
        vars(model)["_compiled_runs"] = None
    assert backend.graphs <= 3
    assert not runs.reasons
    runs.close()


def test_what_is_printed_tells_samplings_apart() -> None:
    torch._dynamo.reset()
    model = built()
    ids = torch.randint(3, 60, (1, 5))
    with model.compiled(backend=Counting(), limit=2) as runs:
        for options in ({"do_sample": False}, {"top_k": 0, "seed": 1}, {"top_k": 5, "top_p": 0.9, "seed": 1}):
            model.generate(ids, max_new_tokens=4, **{"do_sample": True, **options})
        lines = repr(runs).splitlines()
    assert [line.partition(":")[0].strip() for line in lines[1:3]] == [
        "1 × 64 sampled",
        "1 × 64 sampled with top-k and top-p",
    ]
    assert lines[3].startswith("  1 graph dropped")

"""How often a compiled run does what an uncompiled one does: calls of functions, steps and random draws."""

import warnings

import pytest
import torch
from backends import Counting, needs_graphs
from stateful import State, stopping, tiny_llama
from torch.nn import functional as F

import hookline
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


@pytest.mark.quick_for("adds", "of_class", "data")
@pytest.mark.parametrize("name", State().functions())
def test_functions_with_state_act_as_often_as_uncompiled(name, model, ids) -> None:
    options = stopping(model, ids)

    def run():
        state = State()
        with torch.no_grad(), model.hooks([("blocks.0.hook_mlp_out", state.functions()[name])]):
            results = [model.generate(ids, **options), *(model(ids) for _ in range(2))]
            results += model.stream(ids, max_new_tokens=6, do_sample=False)
        return [*results, *state.seen()]

    expected = run()
    with model.compiled(backend=Counting()) as runs:
        with pytest.warns(HooklineWarning, match="blocks.0.hook_mlp_out"):
            found = run()
        assert runs.graphs == 0
    for x, right in zip(found, expected, strict=True):
        torch.testing.assert_close(x, right)


def test_functions_that_write_to_the_activation_only_are_compiled(model, ids) -> None:
    scale, rows = torch.tensor(1.5), torch.ones(3, 32)

    def push(x):
        x *= scale
        x[:, -1] += rows[0]
        other = rows.clone()
        other[1] = x[0, -1]
        return x + other[1].sum()

    options = stopping(model, ids)
    with torch.no_grad(), model.hooks([("blocks.0.hook_mlp_out", push)]):
        expected = model.generate(ids, **options)
        with model.compiled(backend=Counting()) as runs:
            assert torch.equal(model.generate(ids, **options), expected)
            assert not runs.reasons
            assert runs.graphs == 1


@pytest.mark.parametrize("backend", ["refusing", "wrong"])
def test_a_generation_whose_graph_is_refused_and_that_stops(backend, model, ids) -> None:
    """Nothing runs after the stop token, or a cache would have more positions than the text."""

    def wrong(graph, _inputs):
        if backend == "refusing":
            raise ValueError("not this one")
        return lambda *args: [x + 1 if x.is_floating_point() else x for x in graph.forward(*args)]

    options = {**stopping(model, ids), "names_filter": "blocks.*.hook_resid_post"}
    with model.hooks([("blocks.0.hook_resid_post", lambda x: x * 1.5)]):
        expected, cache = model.generate_with_cache(ids, **options)
        with model.compiled(backend=wrong), pytest.warns(HooklineWarning, match="uncompiled"):
            tokens, values = model.generate_with_cache(ids, **options)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(dict(values), dict(cache))


def test_a_function_that_cannot_be_traced_and_a_stop_token(model, ids) -> None:
    def branches(x):
        return x * 2 if x.sum() > 0 else x

    options = {**stopping(model, ids), "names_filter": "blocks.*.hook_resid_post"}
    with model.hooks([("blocks.0.hook_mlp_out", branches)]):
        expected, cache = model.generate_with_cache(ids, **options)
        with model.compiled(backend=Counting()), pytest.warns(HooklineWarning, match="be compiled"):
            tokens, values = model.generate_with_cache(ids, **options)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(dict(values), dict(cache))


def test_the_random_numbers_after_a_generation_that_stops(model, ids) -> None:
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.3}
    torch.manual_seed(5)
    free = model.generate(ids, **options)
    options |= {"eos_token_id": [int(row[9]) for row in free]}

    def run():
        torch.manual_seed(5)
        first = model.generate(ids, **options)
        with model.hooks([("blocks.0.hook_resid_post", scale(2.0))]):
            hooked = model.generate(ids, **options)
        return [first, hooked, model.generate(ids, **options), torch.rand(3)]

    expected = run()
    assert expected[0].shape[1] < 29
    with model.compiled(backend=Counting()) as runs:
        for _ in range(2):
            for x, right in zip(run(), expected, strict=True):
                assert torch.equal(x, right)
        assert not runs.reasons


RANDOM = {
    "leaky": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: x + torch.poisson(torch.ones_like(x)),
    "small": lambda x: x + 1e-6 * F.alpha_dropout(x, 0.5, training=True),
    "not compiled": lambda x: x + torch.empty_like(x).random_(3),
}


@pytest.mark.quick_for("small", "not compiled")
@pytest.mark.parametrize("name", RANDOM)
def test_functions_that_draw_random_numbers_draw_as_uncompiled(name, model, ids) -> None:
    """Whatever they are called: the graph is not used, and the numbers after its proof are those that come next."""
    options = {"max_new_tokens": 6, "do_sample": True}

    def run():
        torch.manual_seed(3)
        with torch.no_grad(), model.hooks([("blocks.0.hook_mlp_out", RANDOM[name])]):
            results = [model.generate(ids, **options), model(ids)]
            results += model.stream(ids, **options)
        return [*results, torch.rand(3)]

    expected = run()
    torch.manual_seed(3)
    with model.hooks([("blocks.0.hook_mlp_out", RANDOM[name])]):
        assert torch.equal(torch.stack([*model.stream(ids, **options)], 1), expected[0][:, 5:])
    with model.compiled(backend=Counting()) as runs:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HooklineWarning)  # it runs uncompiled
                found = run()
            for x, right in zip(found, expected, strict=True):
                torch.testing.assert_close(x, right)
        assert runs.reasons


def test_a_prompt_with_pad_tokens_and_without_a_mask_is_compiled(model, ids) -> None:
    ids[0, :2], ids[1, 3] = 0, 0
    options = {"max_new_tokens": 8, "do_sample": False}
    masked = model.generate(ids, attention_mask=(ids != 0).long(), **options)
    for more in ({}, {"eos_token_id": 0}, {"pad_token_id": 61}, {"pad_token_id": 61, "eos_token_id": 0}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            expected, cache = model.generate_with_cache(ids, **options, **more)
            streamed = torch.stack([*model.stream(ids, **options, **more)], 1)
        assert more or torch.equal(expected, masked)
        with model.compiled(backend=Counting()) as runs:
            tokens, values = model.generate_with_cache(ids, names_filter="blocks.*.hook_resid_post", **options, **more)
            assert not runs.reasons
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(streamed, tokens[:, 5:])
        for name in values:
            torch.testing.assert_close(values[name], cache[name])


def test_a_prompt_that_ends_in_a_pad_token_and_has_no_mask(model, ids) -> None:
    """transformers takes it for padding on the right, and counts the positions of new tokens on from it."""
    ids[1, -1] = 0
    name, options = "blocks.0.hook_resid_post", {"max_new_tokens": 6, "do_sample": False}

    def streamed():
        rows = []
        with model.hooks([(name, lambda x: rows.append(x[:, -1]))]):
            tokens = [*model.stream(ids, **options)]
        return torch.stack(tokens, 1), torch.stack(rows, 1)

    with torch.no_grad():
        expected, cache = model.generate_with_cache(ids, names_filter=name, **options)
        tokens, rows = streamed()
        with model.compiled(backend=Counting()) as runs:
            found, values = model.generate_with_cache(ids, names_filter=name, **options)
            assert not runs.reasons
    assert torch.equal(found, expected)
    assert torch.equal(tokens, expected[:, 5:])
    torch.testing.assert_close(values[name], cache[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows, cache[name][:, 4:], rtol=1e-5, atol=1e-6)

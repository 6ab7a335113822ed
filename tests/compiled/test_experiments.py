"""Compiled experiments, steering and harvests: the results are those of uncompiled runs, from few graphs."""

import threading
from functools import partial

import pytest
import torch
from backends import Counting, needs_graphs
from interrupts import Signals
from tiny_models import causal_lm
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline.compiled import executor, tails
from hookline.compiled.repeats import Repeats
from hookline.edits import add
from hookline.engine._undo.modes import GradMode
from hookline.errors import HooklineWarning, StoreError
from hookline.experiments import ablation, attribution, patching, steering

pytestmark = [
    needs_graphs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler's own imports
]


@pytest.fixture(scope="module")
def model():
    """Three layers, of which the first and the last have a neighbor."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, pad_token_id=0, eos_token_id=None)
    yield hookline.hook(LlamaForCausalLM(config).eval())
    torch._dynamo.reset()


def difference(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1, 5] - logits[:, -1, 6]


def pair(rows: int, length: int = 8, same: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Clean and corrupted tokens that are equal up to a position."""
    clean, corrupted = torch.randint(3, 60, (2, rows, length))
    corrupted[:, :same] = clean[:, :same]
    return clean, corrupted


KINDS = [
    {},
    {"points": "z", "over": ("layer", "head")},
    pytest.param({"points": "resid_mid", "over": ("layer", "pos")}, marks=pytest.mark.slow),
    pytest.param({"points": ["mlp_out", "attn_out"], "over": ("layer",)}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_sweep_of_many_prompts_has_the_values_of_uncompiled_runs_and_few_graphs(model, options) -> None:
    sweep = partial(patching.sweep, model, metric=difference, progress=False, per_example=True, **options)
    clean, corrupted = pair(5)
    expected = sweep(clean=clean, corrupted=corrupted).values
    with model.compiled(backend=Counting()) as runs:
        found = sweep(clean=clean, corrupted=corrupted).values
        graphs = runs.graphs
        assert 0 < graphs <= 3, "a graph for each batch of a prompt"
        again = sweep(clean=corrupted, corrupted=clean, metric=lambda logits: -difference(logits)).values
        assert runs.graphs == graphs, "other values, cells and metrics compile nothing"
        assert sum(variant.runs for _, variant in runs._variants) > 5
        assert {*runs.reasons} == {"it is a baseline", "its shape has come once so far"}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(again, -sweep(clean=corrupted, corrupted=clean).values, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "gemma2", "mistral", "qwen3"])
def test_other_architectures(kind) -> None:
    torch._dynamo.reset()
    model = hookline.hook(causal_lm(kind).eval())
    clean, corrupted = pair(4)
    for points, over in (("resid_pre", ("layer", "pos")), ("z", ("layer", "head")), ("mlp_out", ("layer", "pos"))):
        sweep = partial(patching.sweep, model, clean, corrupted, difference, points=points, over=over, progress=False)
        expected = sweep().values
        with model.compiled(backend=Counting()) as runs:
            torch.testing.assert_close(sweep().values, expected, rtol=1e-4, atol=1e-6)
            assert 0 < runs.graphs <= 4
            assert {*runs.reasons} == {"it is a baseline", "its shape has come once so far"}
    torch._dynamo.reset()


def test_layers_before_the_first_are_not_in_the_graph(model) -> None:
    sizes = []

    def noting(graph, _inputs):
        sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    ids = torch.randint(3, 60, (1, 8))
    with model.compiled(backend=noting):
        base = model.baseline(ids)
        for layer in (0, 2, 3):
            change = base.change(base.model.point(stream_name(layer)), torch.randn(32), pos=4)
            for _ in range(3):
                list(base.rerun([[change]], positions=[-1]))
    assert len(sizes) == 3
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]


def stream_name(layer: int) -> str:
    return f"blocks.{layer}.hook_resid_pre" if layer < 3 else "blocks.2.hook_resid_post"


def test_a_hook_that_comes_later_acts_and_its_removal_restores(model) -> None:
    clean, corrupted = pair(4)
    sweep = partial(patching.sweep, model, clean, corrupted, difference, progress=False)
    expected, vector = sweep().values, torch.randn(32)

    def hooked():
        with model.hooks([("blocks.1.hook_resid_post", add(vector, 3.0))]):
            return sweep().values

    expected_hooked = hooked()
    assert not torch.allclose(expected_hooked, expected)
    with model.compiled(backend=Counting()) as runs:
        sweep()
        graphs = runs.graphs
        with pytest.warns(HooklineWarning, match="full runs"):
            torch.testing.assert_close(hooked(), expected_hooked, rtol=1e-4, atol=1e-6)
        remove = model.add_hook("blocks.1.hook_resid_post", add(vector, 3.0))
        torch.testing.assert_close(sweep().values, expected_hooked, rtol=1e-4, atol=1e-6)
        remove()
        torch.testing.assert_close(sweep().values, expected, rtol=1e-4, atol=1e-6)
        assert runs.graphs == graphs


def test_what_is_not_compiled_says_so(model) -> None:
    clean, corrupted = pair(3)
    with model.compiled(backend=Counting()) as runs:
        with pytest.warns(HooklineWarning, match="hook_pattern'"):
            patching.sweep(
                model, clean, corrupted, difference, points="pattern", over=("layer", "head"), progress=False
            )
        assert runs.graphs == 0
        attribution.attribution_patching(model, clean, corrupted, difference, check=0)
        assert "gradients are needed" in runs.reasons
        assert "gradients are needed" in repr(runs)


def test_a_graph_that_differs_is_not_used(model, monkeypatch) -> None:
    clean, corrupted = pair(4)
    expected = patching.sweep(model, clean, corrupted, difference, progress=False).values
    monkeypatch.setattr(tails.Join, "__call__", lambda self, x: self.rows * 1.01 if self.is_first else x)
    with model.compiled(backend=Counting()), pytest.warns(HooklineWarning, match="hooks give"):
        found = patching.sweep(model, clean, corrupted, difference, progress=False).values
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_large_batches_run_uncompiled(model, monkeypatch) -> None:
    clean, corrupted = pair(3)
    monkeypatch.setattr(executor.tails, "MOST", 1000)
    with model.compiled(backend=Counting()) as runs, pytest.warns(HooklineWarning, match="too large"):
        patching.sweep(model, clean, corrupted, difference, progress=False)
    assert runs.graphs == 0


def test_ablation_and_steering(model) -> None:
    clean, _ = pair(4)
    vectors = steering.Directions(torch.randn(3, 32), [0, 1, 2])
    works = [
        lambda: ablation.ablate(model, clean, difference, progress=False).values,
        lambda: steering.sweep_layers(model, vectors, clean, difference, progress=False).values,
    ]
    expected = [work() for work in works]
    with model.compiled(backend=Counting()) as runs:
        for work, right in zip(works, expected, strict=True):
            torch.testing.assert_close(work(), right, rtol=1e-4, atol=1e-6)
        assert {*runs.reasons} == {"it is a baseline", "its shape has come once so far"}
        assert 0 < runs.graphs <= 4


def test_steered_texts_need_one_graph() -> None:
    model = hookline.load("tinyworld")
    vector = torch.randn(model.cfg.d_model)
    texts = ["The capital of", "A dog"]
    changes = [(vector, 3.0, "all"), (-vector, 2.0, "new"), (vector.flip(0), 1.0, -1)]

    def written():
        return [
            steering.generate(model, texts, vector, 1, coefficient, pos=pos, max_new_tokens=5)
            for vector, coefficient, pos in changes
        ]

    expected = written()
    with model.compiled(backend=Counting()) as runs:
        assert written() == expected
        assert runs.graphs == 1
        assert not runs.reasons


def test_a_harvest_has_the_rows_of_an_uncompiled_one(model, tmp_path) -> None:
    names = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]
    texts = [torch.randint(3, 60, (length,)).tolist() for length in [9, 12, 16, 5] * 6 + [7]]
    harvest = partial(hookline.harvest, model, texts, names, batch_size=4, progress=False)
    eager = harvest(tmp_path / "eager")
    with model.compiled(backend=Counting()) as runs:
        store = harvest(tmp_path / "compiled")
        assert runs.graphs == 1
        assert {*runs.reasons} == {"its shape has come once so far"}, "and the last batch, which is smaller"
        assert runs.reasons.popitem()[1] == 2
        assert runs._variants[0][1].runs == 4
    for name in names:
        torch.testing.assert_close(store[name][:], eager[name][:], rtol=1e-4, atol=1e-5)


def test_a_compiled_harvest_does_not_continue_an_uncompiled_one(model, tmp_path) -> None:
    texts = torch.randint(3, 60, (8, 6))

    def interrupted():
        yield from texts[:4].tolist()
        raise KeyboardInterrupt

    harvest = partial(hookline.harvest, model, points="blocks.0.hook_resid_post", batch_size=2, progress=False)
    with pytest.raises(KeyboardInterrupt):
        harvest(interrupted(), store=tmp_path / "store")
    with model.compiled(backend="eager"), pytest.raises(StoreError, match=r"'eager'.*None"):
        harvest(texts, store=tmp_path / "store")
    assert harvest(texts, store=tmp_path / "store")["blocks.0.hook_resid_post"].shape == (48, 32)


def test_a_pass_that_stops_early_has_no_hooks_and_reads_after_its_end(model) -> None:
    ids, vector = torch.randint(3, 60, (2, 7)), torch.randn(32)
    hooks = [("blocks.0.hook_resid_post", add(vector)), ("blocks.2.hook_resid_post", add(vector))]

    def work():
        with model.hooks(hooks) as run, torch.no_grad():
            cache = model.cache(ids, names_filter="blocks.1.hook_resid_pre")
            fired = [action.fired for action in run.actions if hasattr(action, "hook")]
            model(ids)
        return cache["blocks.1.hook_resid_pre"], fired

    expected = work()
    assert expected[1] == [True, False]
    with model.compiled(backend=Counting()) as runs:
        for _ in range(3):
            found = work()
            torch.testing.assert_close(found[0], expected[0])
            assert found[1] == expected[1]
        assert any(state.stops and variant.runs == 1 for state, variant in runs._variants if hasattr(state, "stops"))


def test_stop_at_layer(model) -> None:
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        expected = [model(ids, stop_at_layer=layer) for layer in (1, 3)]
        _, eager = model.run_with_cache(ids, stop_at_layer=2, names_filter="blocks.0.hook_resid_post")
        with model.compiled(backend=Counting()) as runs:
            for _ in range(3):
                for layer, right in zip((1, 3), expected, strict=True):
                    torch.testing.assert_close(model(ids, stop_at_layer=layer), right)
                _, cache = model.run_with_cache(ids, stop_at_layer=2, names_filter="blocks.0.hook_resid_post")
                torch.testing.assert_close(cache["blocks.0.hook_resid_post"], eager["blocks.0.hook_resid_post"])
            assert runs.graphs == 3
    assert model(ids, stop_at_layer=1).requires_grad


@pytest.mark.filterwarnings("ignore:this runs uncompiled. another thread")
def test_threads(model) -> None:
    clean, corrupted = pair(4)
    expected = patching.sweep(model, clean, corrupted, difference, progress=False).values
    found = {}

    def work(number: int) -> None:
        found[number] = patching.sweep(model, clean, corrupted, difference, progress=False).values

    with model.compiled(backend=Counting()):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    for values in found.values():
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
    assert len(found) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that arrives as torch frees a key
def test_interrupts_leave_nothing(model) -> None:
    clean, corrupted = pair(1)
    ids = torch.randint(3, 60, (2, 7))

    def cached():
        with GradMode(False):  # not `torch.no_grad`, whose exit an interrupt may skip
            return model.cache(ids, names_filter="blocks.1.hook_resid_post")["blocks.1.hook_resid_post"]

    def swept():
        return patching.sweep(model, clean, corrupted, difference, progress=False).values

    right, expected = cached(), swept()
    with model.compiled(backend=Counting()) as runs:
        for _ in range(3):
            cached(), swept()
        signals = Signals(model.module, lambda: model.module(ids).logits)
        signals.send("a cache", cached, 25)
        signals.send("a sweep", swept, 25)
        assert signals.received > 10
        assert not signals.left
        torch.testing.assert_close(cached(), right)
        torch.testing.assert_close(swept(), expected, rtol=1e-4, atol=1e-6)
        assert set(runs.reasons) <= {"it is a baseline", "its shape has come once so far"}


def test_places_are_for_shapes_that_come_again() -> None:
    repeats = Repeats(2, patience=0)
    assert "come once" in repeats.why_not("a")
    assert repeats.why_not("a") is None
    assert "come once" in repeats.why_not("b")
    assert repeats.why_not("b") is None
    for shape in "cdcd":
        why = repeats.why_not(shape)
    assert "2 other shapes are in use" in why, "shapes in turn do not take places from each other"
    for _ in range(9):
        assert repeats.why_not("b") is None
    assert repeats.why_not("c") is None, "the place of a shape that has not come for long"
    assert "in use" in repeats.why_not("d")


def test_a_shape_is_compiled_when_it_has_taken_as_long_as_a_graph(monkeypatch) -> None:
    clock = iter([0.0, 3.0, 4.0, 5.0, 11.0, 12.0, 100.0, 101.0])
    monkeypatch.setattr("hookline.compiled.repeats.time.perf_counter", lambda: next(clock))
    repeats = Repeats(places=4, patience=7.0)
    assert "come once" in repeats.why_not("a")
    assert "has not taken 7 s" in repeats.why_not("a"), "3 s"
    assert "come once" in repeats.why_not("b"), "a: 4 s"
    assert "has not taken 7 s" in repeats.why_not("b"), "1 s"
    assert "has not taken 7 s" in repeats.why_not("a"), "b: 1 + 5 s, as a long pause counts no more"
    assert "has not taken 7 s" in repeats.why_not("a"), "5 s"
    assert repeats.why_not("a") is None, "10 s"
    assert "has not taken 7 s" in repeats.why_not("b"), "still 6 s: a is compiled now"

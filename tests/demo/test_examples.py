"""The examples on tinyworld: each runs, and what it says is so."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = ("transformerlens", "mi_crow", "vlm_spectra")
FILES = [path for folder in FOLDERS for path in sorted((EXAMPLES / folder).glob("*.py"))]
SCRIPTS = {path.stem: path for path in FILES}


def run(name: str) -> Any:
    """What an example's `main` returns."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", SCRIPTS[name])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


def test_every_example_is_tested_and_in_the_index() -> None:
    assert len(SCRIPTS) == len(FILES), "no two of the same name"
    tested = {name.removeprefix("test_") for name in globals()}
    assert [name for name in SCRIPTS if name not in tested] == []
    index = (EXAMPLES / "README.md").read_text()
    links = set(re.findall(r"\]\(([^)]+)\)", index))
    assert [link for link in links if not (EXAMPLES / link).exists()] == []
    assert [path for path in SCRIPTS.values() if str(path.relative_to(EXAMPLES)) not in links] == []


# TransformerLens


def test_cache_everything() -> None:
    caches = run("cache_everything")
    everything, stream, one = caches.values()
    assert everything["blocks.0.attn.hook_q"].shape == (1, 3, 8, 16)
    assert list(stream) == [f"blocks.{layer}.hook_resid_post" for layer in range(4)]
    assert list(one) == ["blocks.1.hook_resid_post"]
    assert all(stream[name].equal(everything[name]) for name in stream)
    assert one["resid_post", 1].equal(everything["resid_post", 1])
    assert one.nbytes < stream.nbytes < everything.nbytes


def test_names() -> None:
    found = run("names")
    classic = found.pop("classic")
    assert len({tuple(each.shape) for each in classic}) == 2
    for same in found.values():
        assert len(same) >= 2
        assert all(any(each is other for other in classic) for each in same)


def test_list_the_points() -> None:
    names = run("list_the_points")
    block = ["hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_pattern", "attn.hook_z",
             "hook_attn_out", "hook_resid_mid", "mlp.hook_pre", "mlp.hook_post", "hook_resid_post"]  # fmt: skip
    expected = ["hook_embed", "hook_pos_embed"] + [f"blocks.{layer}.{name}" for layer in range(4) for name in block]
    assert [name for name in names if name in expected] == expected, "all there, in the order in which they fire"


def test_hook_many_points() -> None:
    assert run("hook_many_points") == {f"blocks.{layer}.attn.hook_pattern": (1, 8, 3, 3) for layer in range(4)}


def test_store_with_a_hook() -> None:
    stored, cache = run("store_with_a_hook")
    assert set(stored) == set(cache) == {"blocks.3.hook_resid_post", "blocks.3.attn.hook_pattern"}
    assert all(stored[name].equal(cache[name]) for name in stored)


def test_what_a_hook_may_return() -> None:
    moved, error = run("what_a_hook_may_return")
    assert moved.pop("returns_none") == 0
    assert len(set(moved.values())) == 1
    assert moved["writes_in_place"] > 1
    assert "(1, 3, 16)" in str(error)
    assert "(1, 3, 8, 16)" in str(error)


def test_ablate_a_head() -> None:
    results = run("ablate_a_head")
    assert results["all heads"][" Mary"] > 0.95
    assert results["without 2.4"][" Mary"] > 0.95
    assert results["without 3.4"][" Mary"] < 0.3 < 0.7 < results["without 3.4"][" John"]


def test_is_the_head_necessary() -> None:
    cost = run("is_the_head_necessary")
    others = [value for head, value in cost.items() if head != (3, 4)]
    assert len(others) == 31
    assert cost[3, 4] > 2 * max(others)


def test_hooks_that_stay() -> None:
    assert list(run("hooks_that_stay").values()) == [
        ["first", "temporary", "permanent"],
        ["temporary", "permanent"],
        ["temporary", "permanent", "context"],
        ["temporary", "permanent"],
        ["permanent"],
        [],
    ]


def test_activation_patching() -> None:
    assert list(run("activation_patching").values()) == [" Paris", " Berlin", " Paris", " Paris", " Berlin"]


def test_causal_trace() -> None:
    tokens, recovery = run("causal_trace")
    country, end = tokens.index(" France"), len(tokens) - 1
    assert recovery.shape == (4, 5)
    assert (recovery[:3, country] > 0.9).all(), "the answer is at the country until the last layer"
    assert recovery[3, end] > 0.99
    others = torch.ones_like(recovery, dtype=torch.bool)
    others[:3, country], others[3, end] = False, False
    assert (recovery[others].abs() < 0.1).all()


def test_gradients() -> None:
    grad, plain, scaled = run("gradients")
    assert grad.shape == (1, 7, 128)
    assert grad[0, -1].eq(0).all(), "what comes after the last token is not in the loss"
    assert grad[0, 0].norm() > 0
    torch.testing.assert_close(scaled, 0.1 * plain)


def test_rank_heads_by_ablation() -> None:
    whole, ranking = run("rank_heads_by_ablation")
    assert whole < 0.05
    assert len(ranking) == 32
    assert list(ranking.values()) == sorted(ranking.values(), reverse=True)
    assert next(iter(ranking)) == (3, 4)
    assert ranking[3, 4] > 1
    by_layer = [sum(more for (layer, _), more in ranking.items() if layer == each) for each in range(4)]
    assert by_layer[3] > 10 * max(by_layer[:3])


def test_patch_the_stream_layer_by_layer() -> None:
    found = run("patch_the_stream_layer_by_layer")
    assert min(found["all positions"]) > 0.95
    assert min(found["the landmark"][:3]) > 0.95
    assert found["the landmark"][3] < 0.01
    assert max(found["the last word"][:3]) < 0.01
    assert found["the last word"][3] > 0.95


def test_direct_logit_attribution() -> None:
    shares, lead, heads = run("direct_logit_attribution")
    assert sum(shares.values()) == pytest.approx(lead, abs=1e-3)
    assert heads.argmax() == 3 * 8 + 4
    attention = shares["blocks.3.hook_attn_out"]
    assert heads[3].sum().item() == pytest.approx(attention, abs=0.2), "all but the projection's bias"


def test_induction_heads() -> None:
    scores, whole, without = run("induction_heads")
    assert scores.max() > 0.8
    assert scores[3, 3] > 0.5
    assert scores[:3].max() < 0.2
    assert whole < 0.2
    assert without > 5


def test_a_point_of_your_own() -> None:
    openness, shut, rest = run("a_point_of_your_own")
    assert ((openness > 0) & (openness < 1)).all()
    assert shut.eq(0).all()
    assert rest.eq(0).all()


def test_sycophancy() -> None:
    found = run("sycophancy")
    assert found["guilty"] == [(3, 7), (3, 3)]
    assert found["suspects"][:2] == found["guilty"]
    effects = found["effects"]
    assert any(effects[head] < 0.2 for head in found["suspects"]), "not all that differs matters"
    whole, one, both = found["truthful"].values()
    assert whole == [0, 1]
    assert one[0] >= 0.6
    assert both[0] >= 0.8
    assert both[1] == one[1] == 1


# mi-crow


def test_before_and_after_a_layer() -> None:
    results = run("before_and_after_a_layer")
    assert results["input"].shape == (1, 4, 128)
    assert results["output"].shape == (1, 4, 384)
    assert results["output doubled"].equal(2 * results["output"])
    layer = hookline.load("tinyworld").module.transformer.h[0].attn.c_attn
    torch.testing.assert_close(results["input doubled"], 2 * results["output"] - layer.bias)


def test_life_of_a_hook() -> None:
    assert run("life_of_a_hook") == [0, 1, 1, 2, 2]


def test_layer_signatures() -> None:
    layers, seen = run("layer_signatures")
    assert "transformer.h.0.attn.c_attn" in layers
    assert set(seen) == {"name", "number", "module"}
    assert seen["name"].equal(seen["number"])
    assert seen["name"].equal(seen["module"])


def test_what_a_hook_knows() -> None:
    notes = run("what_a_hook_knows")
    assert [layer for layer, *_ in notes] == [0, 0, 0, 3, 3, 3]
    assert [(step, positions) for _, step, positions, _ in notes[:3]] == [
        (0, range(5)),
        (1, range(5, 6)),
        (2, range(6, 7)),
    ]


def test_when_a_hook_fails() -> None:
    error, same = run("when_a_hook_fails")
    assert same
    assert error.point.name == "transformer.h.0.attn.c_attn"
    assert isinstance(error.original_error, RuntimeError)
    assert "broken" in str(error)


def test_collect_activations() -> None:
    cache = run("collect_activations")
    assert {name: tuple(x.shape) for name, x in cache.items()} == {"transformer.h.0.attn.c_attn": (2, 7, 384)}


def test_several_hooks() -> None:
    seen, answers = run("several_hooks")
    assert list(seen) == ["layer 0", "layer 3, before", "layer 3, after"]
    assert seen["layer 3, before"][1].norm() > 0
    assert seen["layer 3, after"][1].eq(0).all()
    assert seen["layer 3, after"][0].equal(seen["layer 3, before"][0])
    assert answers[0] == " Paris"
    assert answers[1] != " Berlin"


def test_steer_generation() -> None:
    ends = {
        old: [text.removesuffix(".").split()[-1] for text in texts] for old, texts in run("steer_generation").items()
    }
    assert ends == {"France": ["Paris", "Berlin"], "Italy": ["Rome", "Tokyo"], "Spain": ["Madrid", "Cairo"]}


@pytest.mark.slow  # tests/sae trains on directions that are known, tests/experiments/test_steering.py steers
def test_harvest_train_name_steer() -> None:
    story = run("harvest_train_name_steer")
    assert story.training.last.explained_variance > 0.95
    assert story.quality.explained_variance > 0.9
    assert story.quality.loss_recovered > 0.98
    assert len(story.features) >= 7
    capitals = {old: alone for (old, _), (alone, _) in story.answers.items()}
    assert len(set(capitals.values())) == len(story.features)
    steered = [changed == capitals[new] for (_, new), (_, changed) in story.answers.items()]
    assert sum(steered) >= 0.7 * len(steered)


# vlm-spectra


def test_hook_points() -> None:
    shapes = run("hook_points")
    stream = {"lm.layer.pre", "lm.layer.post", "lm.mlp.out", "lm.attn.out", "lm.attn.pre"}
    assert {name for name, shape in shapes.items() if shape == (1, 3, 128)} == stream
    assert shapes["lm.attn.z"] == (1, 3, 8, 16)
    assert shapes["lm.attn.pattern"] == (1, 8, 3, 3)


def test_patch_residual_head_mlp() -> None:
    stream, head, mlp, both = run("patch_residual_head_mlp").values()
    assert stream > 0.95
    assert 0.2 < head < both
    assert 0.2 < mlp < both
    assert both > 0.95


def test_one_interface() -> None:
    ran, as_before, message = run("one_interface")
    assert ran == {"lm.layer.2.pre": 4, "lm.attn.2.out": 4, "lm.layer.2.post": 4}
    assert as_before
    assert "lm.mlp.9.out" in message

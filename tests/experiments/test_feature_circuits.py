"""Feature circuits: sums of scores and edges, masked runs against splices, both ends of the curve."""

import autoencoders
import devices
import pytest
import torch
from dictionaries import ITALY, JAPAN, POINT, countries
from experiment_models import tokens

from hookline import HooklineError, edits
from hookline.experiments import attribution, circuits, feature_circuits, metrics
from hookline.experiments.circuits.feature_runs import ERROR, FeatureNode, FeatureRuns, dictionaries, without_features
from hookline.experiments.core.prompts import Prompts, prompts_of

METRIC = metrics.logit_diff(5, 7)
POINTS = ("blocks.0.hook_resid_post", "blocks.1.attn.hook_z", "blocks.2.hook_mlp_out")
CAPITALS = "The capital of Italy is", "The capital of Japan is", metrics.logit_diff(" Rome", " Tokyo")


def three_saes(model, kind="standard", **options):
    """Autoencoders of the stream, of all heads of a layer and of an MLP."""
    torch.manual_seed(0)
    heads = {"reshape_activations": "hook_z", "d_in": model.cfg.n_heads * model.cfg.d_head}
    return {
        name: autoencoders.sae_for(
            kind=kind, hook_name=name, **{"d_in": 32, **(heads if "hook_z" in name else {}), **options}
        )
        for name in POINTS
    }


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("steps", [None, 3])
def test_scores_at_a_point_sum_to_attribution_patching(models, kind, steps) -> None:
    given = models[kind], tokens(0, rows=2), tokens(1, rows=2), METRIC
    scores = feature_circuits.feature_scores(*given, three_saes(models[kind]), steps=steps, check=0)
    for name, point in zip(POINTS, ("resid_post", "z", "mlp_out"), strict=True):
        layer = int(name.split(".")[1])
        whole = attribution.attribution_patching(
            *given, points=point, over="layer", layers=[layer], steps=steps, check=0
        )
        own = [x for label, x in zip(scores.coords["node"], scores.values, strict=True) if label.startswith(name)]
        assert float(sum(own)) == pytest.approx((whole - whole.info["corrupted"]).item(), abs=1e-4)
    placed = feature_circuits.feature_scores(*given, three_saes(models[kind]), steps=steps, by_position=True, check=0)
    assert float(placed.values.sum()) == pytest.approx(float(scores.values.sum()), abs=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_edges_from_a_node_sum_to_its_score(models, kind) -> None:
    given = models[kind], tokens(0, rows=2, length=3), tokens(1, rows=2, length=3), METRIC
    for by_position in (False, True):
        scores = feature_circuits.feature_scores(*given, three_saes(models[kind]), by_position=by_position, check=0)
        edges = feature_circuits.feature_edges(*given, scores, three_saes(models[kind]), most=10_000)
        for label in (*scores.coords["node"][:3], *scores.coords["node"][-3:]):
            assert float(edges.of(label).values.sum()) == pytest.approx(scores.sel(node=label).item(), abs=1e-5)


@pytest.mark.parametrize("sae_kind", ["standard", "topk"])
@pytest.mark.parametrize("normalize", ["none", "layer_norm"])
def test_the_curve_goes_from_the_corrupted_to_the_clean_run(models, sae_kind, normalize) -> None:
    saes = three_saes(models["llama"], sae_kind, normalize_activations=normalize)
    given = models["llama"], tokens(0), tokens(1), METRIC
    scores = feature_circuits.feature_scores(*given, saes, check=0)
    by_module = {"model.layers.0" if name == POINTS[0] else name: sae for name, sae in saes.items()}
    assert feature_circuits.feature_scores(*given, by_module, check=0).coords == scores.coords
    curve = circuits.faithfulness(*given, scores, [0, 0.5, 1], saes=saes)
    assert curve.values[0].item() == pytest.approx(0, abs=1e-6)  # exactly, except for a GPU's rounding
    assert curve.values[-1].item() == pytest.approx(1, abs=devices.rounding())
    assert curve.info["counts"] == [0, round(scores.shape[0] / 2), scores.shape[0]]


def test_masked_runs_are_those_of_splices(models) -> None:
    """With the errors of the run, a mask is an edit of features; otherwise an added difference."""
    model, saes, (clean, corrupted) = models["llama"], three_saes(models["llama"]), (tokens(0), tokens(1))
    known, draw = dictionaries(model, saes), torch.Generator().manual_seed(0)
    _, far = model.run_with_cache(corrupted, names_filter=list(POINTS))
    units = [(name, feature) for name in POINTS for feature in (*range(48), ERROR)]
    runs = FeatureRuns(model, known, units, *(Prompts.of_rows([each[0]]) for each in (clean, corrupted)))
    for with_errors in (True, False):
        mask = torch.rand(len(units), 7, generator=draw) < 0.5
        mask[[at for at, (_, feature) in enumerate(units) if feature == ERROR]] = with_errors

        def mixed(features, name, mask=mask):
            there = saes[name].encode(saes[name].flattened(far[name]))
            kept = mask[[at for at, (point, feature) in enumerate(units) if point == name and feature != ERROR]].T
            return torch.where(kept, features, there)

        def replaced(x, hook):
            name, sae = hook.canonical_name, saes[hook.canonical_name]
            there = sae.flattened(far[name])
            error = there - sae(there)
            return (sae.decode(mixed(sae.encode(sae.flattened(x)), name)) + error).view(x.shape)

        splices = [saes[name].spliced(edits=[lambda x, n=name: mixed(x, n)]) for name in POINTS]
        expected = model.run_with_hooks(clean, fwd_hooks=splices if with_errors else [(x, replaced) for x in POINTS])
        ((_, found),) = runs.logits([mask], range(7))
        torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)


def test_a_planted_feature_comes_first(tinyworld) -> None:
    """An autoencoder made by hand has a feature for each country: these two explain the answer."""
    scores = feature_circuits.feature_scores(tinyworld, *CAPITALS, countries(), steps=5)
    named = {f"{POINT}/{feature}" for feature in (ITALY, JAPAN)}
    assert {cell.labels["node"] for cell in scores.top(2)} == named
    assert scores.info["top_correlation"] > 0.9
    assert 0 < scores.info["errors"] < 0.5
    curve = circuits.faithfulness(tinyworld, *CAPITALS, scores, [0, 3 / scores.shape[0], 1], saes=countries())
    assert curve.values[1].item() == pytest.approx(1, abs=0.1)
    found = circuits.circuit(feature_circuits.feature_edges(tinyworld, *CAPITALS, scores, countries()), 1)
    assert {*named, "logits"} <= set(found.nodes)
    assert {text.get_text() for text in found.plot().texts} >= {"1", "3", "error", "logits"}


def test_several_prompts_and_lengths(tinyworld) -> None:
    clean = [CAPITALS[0], "In Italy, the capital is"]
    corrupted = [CAPITALS[1], "In Japan, the capital is"]
    for by_position in (False, True):
        scores = feature_circuits.feature_scores(
            tinyworld, clean, corrupted, CAPITALS[2], countries(), by_position=by_position, check=4
        )
        both = circuits.faithfulness(
            tinyworld, clean, corrupted, CAPITALS[2], scores, [0, 0.5, 1], saes=countries(), per_example=True
        )
        torch.testing.assert_close(both.values[[0, 2]], torch.tensor([[0.0, 0.0], [1.0, 1.0]]), atol=1e-5, rtol=0)


def test_files_and_labels(models, tmp_path) -> None:
    given = models["gpt2"], tokens(0), tokens(1), METRIC
    scores = feature_circuits.feature_scores(*given, three_saes(models["gpt2"]), by_position=True, check=0)
    edges = feature_circuits.feature_edges(*given, scores, three_saes(models["gpt2"]), most=12)
    path = circuits.save(circuits.circuit(edges, 0.5), tmp_path / "circuit.json", models["gpt2"])
    again = circuits.load(path, models["gpt2"])
    assert list(again.scores.senders) == list(edges.senders)
    assert list(again.scores.receivers) == list(edges.receivers)
    torch.testing.assert_close(again.scores.values, edges.values)
    arrow = FeatureNode("blocks.0.hook_mlp_out", 3, "2: ->x\n/7 at 1")
    assert FeatureNode.of(arrow.label) == arrow


def test_bad_input(models, tinyworld) -> None:
    given, saes = (models["gpt2"], tokens(0), tokens(1), METRIC), three_saes(models["gpt2"])
    scores = feature_circuits.feature_scores(*given, saes, check=0)
    with pytest.raises(HooklineError, match="pass saes"):
        circuits.faithfulness(*given, scores)
    with pytest.raises(HooklineError, match="greedy"):
        circuits.faithfulness(*given, scores, saes=saes, method="greedy")
    with pytest.raises(HooklineError, match="none there"):
        circuits.faithfulness(*given, scores, saes={POINTS[0]: saes[POINTS[0]]})
    with pytest.raises(HooklineError, match="another one"):
        circuits.faithfulness(*given, scores, saes={name: autoencoders.sae_for(32, d_sae=4) for name in POINTS})
    with pytest.raises(HooklineError, match="width"):
        feature_circuits.feature_scores(tinyworld, *CAPITALS, autoencoders.sae_for(32, hook_name=POINT))
    for wrong in (None, "sae", [saes]):
        with pytest.raises(HooklineError, match="mapping"):
            feature_circuits.feature_scores(*given, wrong)
    with pytest.raises(HooklineError, match=r"batch.*pos"):
        feature_circuits.feature_scores(*given, {"blocks.0.attn.hook_pattern": autoencoders.sae_for(7)})
    with pytest.raises(HooklineError, match="differs"):
        feature_circuits.feature_scores(given[0], tokens(0), tokens(0), METRIC, saes)
    with pytest.raises(HooklineError, match="gradient"):
        feature_circuits.feature_scores(*given[:3], lambda logits: logits.argmax(-1).float()[:, -1], saes)
    heads = attribution.attribution_patching(*given, points="z", over=("layer", "head"), check=0)
    with pytest.raises(HooklineError, match="feature_scores"):
        circuits.faithfulness(*given, heads, saes=saes)
    with pytest.raises(HooklineError, match="feature_scores"):
        feature_circuits.feature_edges(*given, heads, saes)
    with pytest.raises(HooklineError, match="most"):
        feature_circuits.feature_edges(*given, scores, saes, most=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("sae_kind", ["standard", "topk"])
def test_without_a_corrupted_prompt_features_are_set_to_zero(models, kind, sae_kind) -> None:
    model, saes, text = models[kind], three_saes(models[kind], sae_kind), tokens(0, rows=2)
    scores = feature_circuits.feature_scores(model, text, None, METRIC, saes, check=0)
    clean = METRIC(model(text)).mean()
    name = POINTS[0]
    active = [label for label in scores.coords["node"] if label.startswith(name) and "error" not in label]
    for label in active[:3]:
        feature = FeatureNode.of(label).feature
        smaller = saes[name].spliced(name, edits=[edits.scale(1 - 1e-2, neuron=feature)])
        change = clean - METRIC(model.run_with_hooks(text, fwd_hooks=[smaller])).mean()
        assert scores.sel(node=label).item() == pytest.approx(float(change) / 1e-2, abs=2e-3, rel=0.1)
    curve = circuits.faithfulness(model, text, None, METRIC, scores, [0, 0.5, 1], saes=saes)
    assert curve.values[[0, 2]].tolist() == pytest.approx([0, 1], abs=1e-6)
    nothing = [each.spliced(at, keep_error=False, edits=[edits.zero()]) for at, each in saes.items()]
    expected = model.run_with_hooks(text, fwd_hooks=nothing)
    assert torch.allclose(
        without_features(model, dictionaries(model, saes), prompts_of(model, text)), expected, atol=1e-5
    )
    own = {name: saes[name]}
    alone = feature_circuits.feature_scores(model, text, None, METRIC, own, check=0)
    half = circuits.faithfulness(model, text, None, METRIC, alone, [0, 0.5, 1], saes=own).values[1]
    order = alone.values.abs().argsort(descending=True, stable=True)[round(len(alone.values) / 2) :].tolist()
    out = [FeatureNode.of(alone.coords["node"][at]).feature for at in order]
    gone = [edits.zero(neuron=[each for each in out if each != ERROR])]
    runs = {"half": saes[name].spliced(name, keep_error=ERROR not in out, edits=gone)}
    runs["none"] = saes[name].spliced(name, keep_error=False, edits=[edits.zero()])
    got = {key: METRIC(model.run_with_hooks(text, fwd_hooks=[hook])).mean() for key, hook in runs.items()}
    assert float(half) == pytest.approx(float((got["half"] - got["none"]) / (clean - got["none"])), abs=1e-4)


@torch.no_grad()
def test_zeroed_features_that_are_patched_one_by_one(models) -> None:
    """The nodes that are checked are those that a splice sets to 0."""
    model, saes, text = models["llama"], three_saes(models["llama"]), tokens(0)
    scores = feature_circuits.feature_scores(model, text, None, METRIC, saes, check=8)
    clean = METRIC(model(text)).mean()
    for cell in scores.info["sample"]:
        node = FeatureNode.of(cell["node"])
        if node.feature != ERROR:
            zeroed = saes[node.point].spliced(node.point, edits=[edits.zero(neuron=node.feature)])
            change = clean - METRIC(model.run_with_hooks(text, fwd_hooks=[zeroed])).mean()
            assert cell["true"] == pytest.approx(float(change), abs=1e-5)


def test_scores_of_zeros_and_of_a_corrupted_run_are_told_apart(models) -> None:
    given = models["llama"], tokens(0)
    saes = three_saes(models["llama"])
    zeros = feature_circuits.feature_scores(*given, None, METRIC, saes, check=0)
    patched = feature_circuits.feature_scores(*given, tokens(1), METRIC, saes, check=0)
    for corrupted, scores in ((None, patched), (tokens(1), zeros)):
        with pytest.raises(HooklineError, match=r"scores.*features"):
            circuits.faithfulness(*given, corrupted, METRIC, scores, saes=saes)
        with pytest.raises(HooklineError, match=r"scores.*features"):
            feature_circuits.feature_edges(*given, corrupted, METRIC, scores, saes)
    with pytest.raises(HooklineError, match="needs saes"):
        circuits.faithfulness(*given, None, METRIC, zeros)
    with pytest.raises(HooklineError, match="no direction"):
        feature_circuits.feature_scores(*given, None, METRIC, saes, direction="noise")
    found = feature_circuits.feature_edges(*given, None, METRIC, zeros, saes, most=10_000)
    label = zeros.coords["node"][0]
    assert float(found.of(label).values.sum()) == pytest.approx(zeros.sel(node=label).item(), abs=1e-5)

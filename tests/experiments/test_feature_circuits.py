"""Feature circuits: sums of scores and edges, masked runs against splices, both ends of the curve."""

import autoencoders
import pytest
import torch
from dictionaries import ITALY, JAPAN, POINT, countries
from experiment_models import tokens

from hookline import HooklineError
from hookline.experiments import attribution, circuits, feature_circuits, metrics
from hookline.experiments.core.feature_runs import ERROR, FeatureNode, FeatureRuns, dictionaries
from hookline.experiments.core.prompts import Prompts

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
    assert curve.values[0].item() == 0
    assert curve.values[-1].item() == 1
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
    with pytest.raises(HooklineError, match="has none there"):
        circuits.faithfulness(*given, scores, saes={POINTS[0]: saes[POINTS[0]]})
    with pytest.raises(HooklineError, match="another one"):
        circuits.faithfulness(*given, scores, saes={name: autoencoders.sae_for(32, d_sae=4) for name in POINTS})
    with pytest.raises(HooklineError, match="width"):
        feature_circuits.feature_scores(tinyworld, *CAPITALS, autoencoders.sae_for(32, hook_name=POINT))
    for wrong in (None, "sae", [saes]):
        with pytest.raises(HooklineError, match="autoencoders, or a mapping"):
            feature_circuits.feature_scores(*given, wrong)
    with pytest.raises(HooklineError, match="batch and pos"):
        feature_circuits.feature_scores(*given, {"blocks.0.attn.hook_pattern": autoencoders.sae_for(7)})
    with pytest.raises(HooklineError, match="no feature differs"):
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

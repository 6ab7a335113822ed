"""Circuits: masked runs against a slow reference, both ends of the curve, planted circuits, files."""

import json

import devices
import pytest
import tiny_models
import torch
from experiment_models import lead, tokens

import hookline
from hookline import HooklineError
from hookline.experiments import attribution, circuits, edges, metrics
from hookline.experiments.circuits.masked_runs import MaskedRuns
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.edges import sender_outputs

METRIC = metrics.logit_diff(5, 7)
NAMES = metrics.logit_diff(" Mary", " John")
KINDS = ("gpt2", "llama", "gemma2", "gptj", "granite")
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


@torch.no_grad()
def reference(model, clean, corrupted, runs, mask):
    """One masked run: receivers get inputs computed from the senders of the run before, until nothing changes."""
    _, far, streams = sender_outputs(model, Prompts.of_rows([corrupted[0]]), [x.point.name for x in runs.receivers])
    names = [f"blocks.{layer}.{kind}" for layer in range(4) for kind in ("attn.hook_z", "ln1_post.hook_scale")]
    names += [f"blocks.{layer}.hook_mlp_out" for layer in range(4)] + ["blocks.0.hook_resid_pre"]
    names = [name for name in names if name in model.hook_dict]
    own, logits = dict(far), None
    for _ in range(10):
        hooks = []
        for number, to in enumerate(runs.receivers):
            x = streams[to.point.name].clone()
            x = x if to.head is None else x[:, :, to.head]
            for sender, u in zip(runs.senders[: runs.seen_by[to.label]], mask[number], strict=False):
                x = x + u[..., None] * (own[sender] - far[sender])

            def put(there, x=x, head=to.head):
                if head is None:
                    return x
                there[:, :, head] = x
                return there

            hooks.append((to.point.name, put))
        logits, cache = model.run_with_cache(clean, names_filter=names, fwd_hooks=hooks)
        own = {"embed": cache["blocks.0.hook_resid_pre"]}
        for layer in range(4):
            own |= cache.head_parts(layer) | {f"mlp{layer}": cache["mlp_out", layer]}
    return logits


@pytest.mark.quick_for("gpt2", "gemma2")
@pytest.mark.parametrize("kind", KINDS)
def test_masked_runs_are_those_of_a_slow_reference(models, kind) -> None:
    model, clean, corrupted = models[kind], tokens(0), tokens(1)
    runs = MaskedRuns(model, *(Prompts.of_rows([each[0]]) for each in (clean, corrupted)))
    shape = (len(runs.receivers), len(runs.senders))
    draw = torch.Generator().manual_seed(0)
    masks = [torch.rand(*shape, n, generator=draw) < share for share, n in ((0.3, 1), (0.8, 1), (0.5, 7))]
    for mask in masks:
        ((_, found),) = runs.logits([mask], range(7))
        torch.testing.assert_close(found, reference(model, clean, corrupted, runs, mask), atol=2e-4, rtol=1e-3)
    ends = dict(zip(("none", "all"), (torch.zeros(*shape, 1).bool(), torch.ones(*shape, 1).bool()), strict=True))
    for mask, text in ((ends["none"], corrupted), (ends["all"], clean)):
        ((_, found),) = runs.logits([mask], range(7))
        torch.testing.assert_close(found, model(text).detach(), atol=1e-6 + devices.rounding(), rtol=1e-5)


@pytest.mark.parametrize("method", ["top", "greedy"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_goes_from_the_corrupted_to_the_clean_run(models, kind, method) -> None:
    given = models[kind], tokens(0), tokens(1), METRIC
    scores = edges.edge_scores(*given, check=0)
    curve = circuits.faithfulness(*given, scores, [0, 0.1, 1], method=method)
    assert curve.axes == ("size",)
    near = 1e-5 + 10 * devices.rounding()  # differences of logits, over one that may be small
    assert curve.values[0].item() == pytest.approx(0, abs=near)
    assert curve.values[-1].item() == pytest.approx(1, abs=near)
    assert curve.info["counts"] == [0, round(len(scores) * 0.1), len(scores)]
    a, b, c = curve.values.tolist()
    assert curve.info["cpr"] == pytest.approx((a + b) / 2 * 0.1 + (b + c) / 2 * 0.9, abs=1e-5)
    assert curve.info["cmd"] >= abs(1 - curve.info["cpr"]) - 1e-6


def test_one_edge_less_is_a_plain_run_with_that_input_changed(models) -> None:
    model, clean, corrupted = models["llama"], tokens(0), tokens(1)
    runs = MaskedRuns(model, *(Prompts.of_rows([each[0]]) for each in (clean, corrupted)))
    far, own = (sender_outputs(model, Prompts.of_rows([each[0]]))[1] for each in (corrupted, clean))
    labels = [each.label for each in runs.receivers]
    mask = torch.ones(len(labels), len(runs.senders), 1).bool()
    mask[labels.index("L2KV1.v"), runs.senders.index("mlp0")] = False
    ((_, found),) = runs.logits([mask], [-1])

    def change(x):
        x[:, :, 1] += far["mlp0"] - own["mlp0"]

    expected = model.run_with_hooks(clean, fwd_hooks=[("blocks.2.hook_v_input", change)])
    assert (lead(found) - lead(model(clean))).abs().item() > 1e-4
    torch.testing.assert_close(found[:, -1], expected[:, -1], atol=1e-5, rtol=1e-4)


def planted():
    """Three layers of four heads: L0H1 moves the token to the next position, L1H2 and the logits read only that.

    All other heads write to dimensions that the circuit and the logits do not read.
    """
    torch.manual_seed(0)
    module = tiny_models.causal_lm("gpt2")
    signal, junk = slice(0, 16), slice(16, 32)
    with torch.no_grad():
        module.transformer.wte.weight[:, junk] *= 0.1
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())
        module.lm_head.weight[:, junk] = 0
        for layer, block in enumerate(module.transformer.h):
            block.mlp.c_proj.weight[:, signal] = 0
            block.mlp.c_proj.weight[:, junk] *= 0.2
            heads = block.attn.c_proj.weight.view(4, 8, 32)
            for head in range(4):
                in_circuit = (layer, head) in ((0, 1), (1, 2))
                heads[head] = 0
                where = signal if in_circuit else junk
                heads[head][:, where] = torch.randn(8, 16) * (1.0 if in_circuit else 0.05)
                if in_circuit:
                    value = block.attn.c_attn.weight[:, 64 + 8 * head : 72 + 8 * head]
                    value.normal_()
                    value[junk] = 0
                    for first in (0, 32):
                        block.attn.c_attn.weight[:, first + 8 * head : first + 8 * head + 8] = 0
                else:
                    block.attn.c_attn.weight[:, 64 + 8 * head : 72 + 8 * head] *= 3
    true = {("embed", "L0H1.v"), ("embed", "L1H2.v"), ("embed", "logits")}
    return hookline.hook(module), true | {("L0H1", "L1H2.v"), ("L0H1", "logits"), ("L1H2", "logits")}


def auroc(scores, true) -> float:
    is_true = torch.tensor([pair in true for pair in zip(scores.senders, scores.receivers, strict=True)])
    assert int(is_true.sum()) == len(true)
    sizes = scores.values.abs().to(is_true.device)
    good, bad = sizes[is_true], sizes[~is_true]
    return (good[:, None] > bad).double().mean().item()


def test_a_planted_circuit_comes_first() -> None:
    model, true = planted()
    given = model, tokens(0, rows=4), tokens(1, rows=4), METRIC
    scores = edges.edge_scores(*given, steps=5, check=0)
    assert auroc(scores, true) >= 0.95
    curve = circuits.faithfulness(*given, scores, [0, len(true) / len(scores), 1])
    assert curve.values[1].item() == pytest.approx(1, abs=0.1)
    assert set(circuits.circuit(scores, 0.02).nodes) >= {"embed", "L0H1", "L1H2", "logits"}


def test_positions_make_circuits_smaller(tinyworld) -> None:
    given = tinyworld, CLEAN, CORRUPTED, NAMES
    scores = edges.edge_scores(*given, steps=5, check=0)
    placed = edges.edge_scores(*given, steps=5, by_position=True, check=8)
    assert placed.info["correlation"] > 0.9
    torch.testing.assert_close(placed.matrix.values, scores.matrix.values, atol=1e-4, rtol=1e-4)
    whole, small = (circuits.faithfulness(*given, each) for each in (scores, placed))
    assert small.info["cmd"] < whole.info["cmd"] < 0.05
    assert set(placed.top(1)[0].labels) == {"sender", "receiver", "pos"}
    with pytest.raises(HooklineError, match="position"):
        circuits.faithfulness(tinyworld, CLEAN[:-9], CORRUPTED[:-9], NAMES, placed)


def test_nodes(tinyworld) -> None:
    """All nodes ablated at size 0 is what ablating them by hooks gives; at 1 it is the clean run."""
    given = tinyworld, CLEAN, CORRUPTED, NAMES
    heads = attribution.attribution_patching(*given, points="z", over=("layer", "head"), check=0)
    mlps = attribution.attribution_patching(*given, points="mlp_out", over="layer", check=0)
    curve = circuits.faithfulness(*given, [heads, mlps], [0, 0.2, 1])
    _, cache = tinyworld.run_with_cache(CORRUPTED)
    hooks = [(name, lambda _, x=cache[name]: x) for name in cache if name.endswith(("attn.hook_z", "hook_mlp_out"))]
    logits = tinyworld.run_with_hooks(CLEAN, fwd_hooks=hooks)
    answers = [tinyworld.to_single_token(f" {name}") for name in ("Mary", "John")]
    value = (logits[0, -1, answers[0]] - logits[0, -1, answers[1]]).item()
    assert curve.values[0].item() == pytest.approx((value + 8.311) / (7.336 + 8.311), abs=1e-3)
    assert curve.values[-1].item() == pytest.approx(1, abs=1e-5 + devices.rounding())
    assert curve.info["counts"] == [0, 7, 36]
    placed = attribution.attribution_patching(*given, points="mlp_out", check=0)
    whole = circuits.faithfulness(*given, placed, [0, 1]).values[-1]
    assert whole.item() == pytest.approx(1, abs=1e-5 + devices.rounding())


def test_several_prompts_and_lengths(tinyworld) -> None:
    clean = [CLEAN, "So, when Alice and Bob went to the park, Bob gave a book to"]
    corrupted = [CORRUPTED, "So, when Alice and Bob went to the park, Alice gave a book to"]
    metric = metrics.logit_diff([" Mary", " Alice"], [" John", " Bob"])
    scores = edges.edge_scores(tinyworld, clean, corrupted, metric, check=0)
    both = circuits.faithfulness(tinyworld, clean, corrupted, metric, scores, [0, 0.02, 1], per_example=True)
    one = circuits.faithfulness(tinyworld, clean[0], corrupted[0], NAMES, scores, [0, 0.02, 1])
    torch.testing.assert_close(both.isel(example=0).values, one.values, atol=1e-4, rtol=1e-4)
    assert both.info["cpr"].shape == (2,)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gptj"])
def test_files(models, kind, tmp_path) -> None:
    model = models[kind]
    scores = edges.edge_scores(model, tokens(0), tokens(1), METRIC, check=0)
    found = circuits.circuit(scores, 0.05, method="greedy")
    path = circuits.save(found, tmp_path / "circuit.json", model)
    content = json.loads(path.read_text())
    assert content["cfg"]["parallel_attn_mlp"] == (kind == "gptj")
    assert {"input->a0.h0<q>", "m3->logits", "a0.h3->a1.h2<v>"} <= set(content["edges"])
    heads, layers = 4, 4
    into = sum((1 + 5 * layer) * 3 * heads for layer in range(layers))
    own = 0 if kind == "gptj" else heads
    assert len(content["edges"]) == into + sum(1 + 5 * layer + own for layer in range(layers)) + 21
    again = circuits.load(path, model)
    assert again.nodes == found.nodes
    assert len(again) == len(found)
    mine, theirs = (
        {(u, v): x for u, v, x in zip(e.senders, e.receivers, e.values.tolist(), strict=True)}
        for e in (scores, again.scores)
    )
    assert mine == pytest.approx(theirs, abs=1e-6)
    assert circuits.faithfulness(model, tokens(0), tokens(1), METRIC, again.scores, [0, 1]).shape == (2,)
    with pytest.raises(HooklineError, match="another model"):
        circuits.load(path, hookline.load("tinyworld"))


def test_a_greedy_circuit_is_connected(tinyworld) -> None:
    scores = edges.edge_scores(tinyworld, CLEAN, CORRUPTED, NAMES, check=0)
    found = circuits.circuit(scores, 0.01, method="greedy")
    edges_of = found.edges
    reached = {each.split(".")[0] for each in edges_of.receivers}
    assert {x for x in reached if x != "logits"} <= set(edges_of.senders)
    assert len(found) == 15
    assert "15 of 1519 edges" in repr(found)
    axes = found.plot()
    assert {text.get_text() for text in axes.texts} - {""} == set(found.nodes)


def test_bad_input(tinyworld, models, tmp_path) -> None:
    given = tinyworld, CLEAN, CORRUPTED, NAMES
    scores = edges.edge_scores(*given, check=0)
    for sizes in ([0, 1.5], [-0.1], [], [0.5, 0.1], 0.5, [True], [None], ["a"]):
        with pytest.raises(HooklineError, match="size"):
            circuits.faithfulness(*given, scores, sizes)
    with pytest.raises(HooklineError, match="another model"):
        circuits.faithfulness(*given, edges.edge_scores(models["llama"], tokens(0), tokens(1), METRIC, check=0))
    with pytest.raises(HooklineError, match="all of"):
        circuits.faithfulness(*given, scores.of("embed"))
    for wrong in ("scores", [], [scores]):
        with pytest.raises(HooklineError, match="EdgeScores"):
            circuits.faithfulness(*given, wrong)
    with pytest.raises(HooklineError, match="EdgeScores"):
        circuits.circuit("scores", 0.1)
    for values, more, why in ((scores.values * torch.nan, [], "NaN"), (scores.values, [0], "twice")):
        some = [*range(len(scores)), *more]
        names = [scores.senders[at] for at in some], [scores.receivers[at] for at in some]
        with pytest.raises(HooklineError, match=why):
            circuits.faithfulness(*given, edges.EdgeScores(values[some], *names))
    assert "0 of 1519 edges" in repr(circuits.circuit(scores, 0))
    with pytest.raises(HooklineError, match="method"):
        circuits.faithfulness(*given, scores, method="best")
    with pytest.raises(HooklineError, match="same"):
        circuits.faithfulness(tinyworld, CLEAN, CORRUPTED, lambda logits: torch.tensor(1.0), scores)
    for text in (
        "{",
        '{"cfg": {}}',
        '{"cfg": {"n_layers": 1, "n_heads": 1, "d_model": 1}, "edges": {"x->y": {"score": 1, "in_graph": true}}}',
    ):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(HooklineError, match=r"bad\.json"):
            circuits.load(path)
    with pytest.raises(HooklineError, match="circuit at"):
        circuits.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "score", "why"),
    [
        ("m99->logits", 1.0, "only 4 layers"),
        ("a0.h99->logits", 1.0, "8 heads"),
        ("m3->m0", 1.0, "before its sender"),
        ("m0->logits", float("nan"), "finite"),
        ("m0->logits", 1e300, "finite"),
    ],
)
def test_files_with_impossible_edges_are_refused(tinyworld, tmp_path, name, score, why) -> None:
    scores = edges.edge_scores(tinyworld, CLEAN, CORRUPTED, NAMES, check=0)
    path = circuits.save(scores, tmp_path / "circuit.json", tinyworld)
    content = json.loads(path.read_text())
    content["edges"][name] = {"score": score, "in_graph": True}
    path.write_text(json.dumps(content))
    for model in (tinyworld, None):
        with pytest.raises(HooklineError, match=why):
            circuits.load(path, model)


def test_circuits_run_in_batches_as_large_as_requested(tinyworld) -> None:
    given = tinyworld, CLEAN, CORRUPTED, NAMES
    scores, rows = edges.edge_scores(*given, check=0), []
    with tinyworld.hooks(fwd_hooks=[("hook_embed", lambda x: rows.append(len(x)))]):
        whole = circuits.faithfulness(*given, scores, [0, 0.1, 0.5, 1])
        most = max(rows)
        rows.clear()
        parts = circuits.faithfulness(*given, scores, [0, 0.1, 0.5, 1], batch_size=1)
    assert (most, max(rows)) == (4, 1)
    torch.testing.assert_close(parts.values, whole.values, atol=1e-4, rtol=1e-4)

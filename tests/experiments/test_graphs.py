"""Attribution graphs: edges sum to pre-activations, predictions equal what is measured, files hold what was saved."""

import json
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from experiment_models import Models, tokens
from torch import nn

import hookline
from hookline import HooklineError
from hookline.experiments import graphs
from hookline.experiments.graphs.graph_scores import completeness, influences, replacement
from hookline.sae import Transcoder, TranscoderOrigin, Transcoders, train_transcoders

PROMPT = "The capital city of Italy is"


def transcoders(
    model, *, d_sae: int = 40, cross_layer: bool = False, bias: float = -0.5, skip: bool = False, layers=None, **origin
) -> Transcoders:
    """Random transcoders with biases, of which some features are active."""
    random = torch.Generator().manual_seed(3)
    n, d = model.cfg.n_layers, model.cfg.d_model
    made = []
    for layer in range(n) if layers is None else layers:
        writes = range(layer, n) if cross_layer else [layer]
        weights = {
            "W_enc": torch.randn(d, d_sae, generator=random) / d**0.5,
            "b_enc": torch.full((d_sae,), bias),
            "W_dec": torch.randn(d_sae, len(writes), d, generator=random) / d,
            "b_dec": torch.randn(d, generator=random) / d,
        }
        weights |= {"W_skip": torch.randn(d, d, generator=random) / d} if skip else {}
        made.append(Transcoder(layer, weights, writes=writes))
    return Transcoders(made, TranscoderOrigin(**origin))


KINDS = ["gpt2", "llama", "gemma2", "gptj", "gpt_neox", "phi", "qwen3", "mixtral", "opt", "olmo2", "granite", "bloom"]


@pytest.mark.parametrize("kind", KINDS)
def test_edges_into_mlps_and_logits_sum_to_their_pre_activations(models, kind) -> None:
    graph = graphs.attribution_graph(models[kind], tokens(0), progress=False)
    found = graph.check()
    assert float(found.values.max()) < 1e-4
    assert len(found.values) == 4 * 7 + len(graph.of("logit"))
    assert graph.of("error") == []


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gptj"])
@pytest.mark.parametrize("options", [{}, {"cross_layer": True}, {"skip": True}, {"layers": [1, 3]}])
def test_edges_into_features_sum_to_their_pre_activations(models, kind, options) -> None:
    model = models[kind]
    given = transcoders(model, **options)
    graph = graphs.attribution_graph(model, tokens(0), given, progress=False)
    assert float(graph.check().values.max()) < 1e-4
    features = graph.of("feature")
    _, cache = model.run_with_cache(tokens(0), names_filter="blocks.*.mlp.hook_in")
    for node in features[:: max(1, len(features) // 20)]:
        found = given[node.layer].encode(cache[f"blocks.{node.layer}.mlp.hook_in"][0, node.pos])[node.feature].detach()
        assert node.activation == pytest.approx(float(found), rel=1e-4, abs=1e-6)
        assert node.pre_activation == pytest.approx(node.activation, rel=1e-4, abs=1e-6)  # ReLU: it is active
    assert len(graph.of("error")) == 7 * len(given)
    assert len(graph.of("mlp")) == 7 * (4 - len(given))


def test_an_edge_is_what_a_change_of_its_source_does_in_the_frozen_model(models) -> None:
    model = models["llama"]
    graph = graphs.attribution_graph(model, tokens(1), transcoders(model, bias=-0.3), progress=False)
    source = graph.of("token")[2]
    found = graph.intervene({source.id: 2.0})
    direct = graph.out_of(source)
    first = [node for node in graph.of("feature") if node.layer == 0]  # nothing in between
    assert first
    for node in first:
        wanted = float(direct.sel(node=node.id)) if node.id in direct.coords["node"] else 0.0
        assert float(found.sel(run="frozen", node=node.id)) == pytest.approx(wanted, abs=1e-5)


class Linear(nn.Module):
    """An MLP that is a linear map."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d) / d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_predicted_is_measured_where_transcoders_are_exact_and_nothing_is_thresholded(models) -> None:
    """MLPs that are linear maps, and transcoders that are exactly these: two features of opposite sign each."""
    model = Models()["llama"]
    d, made = model.cfg.d_model, []
    for layer, block in enumerate(model.module.model.layers):
        block.mlp = Linear(d)
        weight = block.mlp.weight.detach()
        encoder = torch.cat([torch.eye(d), -torch.eye(d)], 1)
        shift = torch.full((2 * d,), 50.0)  # every feature is on, whatever is changed
        decoder = torch.cat([weight, -weight]) / 2
        made.append(Transcoder(layer, {"W_enc": encoder, "b_enc": shift, "W_dec": decoder, "b_dec": torch.zeros(d)}))
    model = hookline.hook(model.module)
    graph = graphs.attribution_graph(model, tokens(2), Transcoders(made), progress=False)
    sizes = [float(node.activation or 0) for node in graph.of("feature")]
    assert len(sizes) == 4 * 7 * 2 * d
    node = next(each for each in graph.of("feature") if each.layer == 1 and each.pos == 3)
    found = graph.intervene({node.id: 0.5 * node.activation})
    changed = found.sel(run="frozen").values
    assert float(changed.abs().max()) > 1e-3
    torch.testing.assert_close(found.sel(run="predicted").values, changed, atol=1e-4, rtol=1e-3)
    errors = [graph.local.local.errors[layer].abs().max() for layer in range(4)]
    assert max(map(float, errors)) < 1e-4


@pytest.mark.parametrize("cross_layer", [False, True])
def test_predicted_is_measured_while_no_feature_turns_on(models, cross_layer) -> None:
    model = models["gpt2"]
    graph = graphs.attribution_graph(model, tokens(3), transcoders(model, cross_layer=cross_layer), progress=False)
    node = max(graph.of("feature"), key=lambda each: each.activation * (each.layer == 1))
    found = graph.intervene({node.id: 0.99 * node.activation})
    torch.testing.assert_close(found.sel(run="predicted").values, found.sel(run="frozen").values, atol=2e-5, rtol=1e-3)


def test_the_run_of_the_model_is_true_patching(models) -> None:
    model = models["gpt2"]
    given = transcoders(model)
    graph = graphs.attribution_graph(model, tokens(3), given, target=[5], progress=False)
    node = max(graph.of("feature"), key=lambda each: each.activation * (each.layer == 2))
    found = graph.intervene({node.id: 0.0})
    change = node.activation * given[2].W_dec[node.feature, 0].detach()

    def less(x: torch.Tensor) -> torch.Tensor:
        x[:, node.pos] -= change
        return x

    before, after = (
        model(tokens(3))[0, -1],
        model.run_with_hooks(tokens(3), fwd_hooks=[("blocks.2.hook_mlp_out", less)])[0, -1],
    )
    wanted = ((after[5] - after.mean()) - (before[5] - before.mean())).detach()
    assert float(found.sel(run="model", node=graph.of("logit")[0].id)) == pytest.approx(float(wanted), abs=1e-5)


def test_targets_are_the_most_likely_tokens_or_those_given(tinyworld) -> None:
    graph = graphs.attribution_graph(tinyworld, PROMPT, progress=False)
    logits = tinyworld(PROMPT)[0, -1].detach()
    assert [node.feature for node in graph.of("logit")] == [int(logits.argmax())]
    assert graph.of("logit")[0].text == " Rome"
    given = graphs.attribution_graph(tinyworld, PROMPT, target=[" Rome", " Paris"], progress=False)
    assert [node.text for node in given.of("logit")] == [" Rome", " Paris"]
    wanted = logits[given.of("logit")[1].feature] - logits.mean()
    assert given.of("logit")[1].pre_activation == pytest.approx(float(wanted), abs=1e-3)


def test_max_features_keeps_the_most_influential_and_the_sums(models) -> None:
    model = models["llama"]
    whole = graphs.attribution_graph(model, tokens(0), transcoders(model), progress=False)
    part = graphs.attribution_graph(model, tokens(0), transcoders(model), max_features=30, progress=False)
    assert len(part.of("feature")) == 30 < len(whole.of("feature"))
    assert float(part.check().values.max()) < 1e-4
    assert bool(part.rest.abs().max() > 0)
    at = [whole.ids.index(each) for each in part.ids]
    torch.testing.assert_close(part.edges, whole.edges[at][:, at], atol=1e-6, rtol=1e-4)
    top = whole.influence.values[[nth for nth, node in enumerate(whole.nodes) if node.kind == "feature"]]
    kept = [float(whole.influence.sel(node=node.id)) for node in part.of("feature")]
    assert sum(kept) > 0.9 * float(top.sort(descending=True).values[:30].sum())


def test_positions_of_errors_only_have_no_features(models) -> None:
    model = models["gpt2"]
    graph = graphs.attribution_graph(model, tokens(0), transcoders(model), errors_only=[0, -1], progress=False)
    assert {node.pos for node in graph.of("feature")} == {1, 2, 3, 4, 5}
    assert float(graph.check().values.max()) < 1e-4


def test_pruning_keeps_what_matters(models) -> None:
    model = models["gpt2"]
    graph = graphs.attribution_graph(model, tokens(0), transcoders(model), progress=False)
    part = graph.prune(0.7, 0.9)
    assert len(part) < len(graph)
    assert int((part.edges != 0).sum()) < int((graph.edges != 0).sum())
    assert part.of("token") == graph.of("token")
    assert part.of("logit") == graph.of("logit")
    for at, node in enumerate(part.nodes):
        if node.kind == "feature":
            assert bool((part.edges[at] != 0).any())
            assert bool((part.edges[:, at] != 0).any())
    assert float(part.check().values.max()) < 1e-4
    assert graph.prune(1.0, 1.0).check().values.shape[0] > 0


def test_influence_and_scores_of_a_graph_by_hand() -> None:
    """Token → feature → logit, with an error beside them: the feature has half of the logit."""
    edges = torch.zeros(4, 4)  # feature, error, token, logit
    edges[0, 2], edges[0, 1] = 3.0, -1.0
    edges[3, 0], edges[3, 1], edges[3, 2] = 2.0, 1.0, 1.0
    weights = torch.tensor([0.0, 0.0, 0.0, 0.5])
    found = influences(edges, weights)
    assert found.tolist() == pytest.approx([0.25, 0.125 + 0.0625, 0.125 + 0.1875, 0.0])
    is_error, is_token = torch.tensor([0, 1, 0, 0]).bool(), torch.tensor([0, 0, 1, 0]).bool()
    assert replacement(edges, weights, is_error, is_token) == pytest.approx(0.3125 / 0.5)
    through = torch.tensor([0.25, 0.1875, 0.3125, 0.5])
    wanted = float((torch.tensor([0.75, 1.0, 1.0, 0.75]) * through).sum() / through.sum())
    assert completeness(edges, weights, is_error) == pytest.approx(wanted)
    circle = torch.zeros(4, 4)
    circle[0, 3] = circle[3, 0] = 1.0
    with pytest.raises(HooklineError, match="cycle"):
        influences(circle, weights)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scores_of_attention_are_sums_over_pairs(models, kind) -> None:
    model = models[kind]
    graph = graphs.attribution_graph(model, tokens(4), transcoders(model), progress=False)
    parts = graph.qk(graph.of("token")[2], graph.of("logit")[0])
    at = {axis: parts.info[axis] for axis in ("layer", "head", "query", "key")}
    _, cache = model.run_with_cache(tokens(4), names_filter="blocks.*.attn.hook_attn_scores")
    score = cache[f"blocks.{at['layer']}.attn.hook_attn_scores"][0, at["head"], at["query"], at["key"]]
    assert float(parts.values.sum()) == pytest.approx(float(score), abs=1e-4)
    assert parts.info["score"] == pytest.approx(float(score), abs=1e-5)
    for node in graph.nodes:
        if node.pos > at["query"]:  # a later token is not in the query
            assert float(parts.sel(query_node=node.id).values.abs().max()) == 0


def test_heads_carry_an_edge_between_positions(models) -> None:
    """The edge from a token to the first layer's MLP at another position goes through that layer's heads."""
    model = models["llama"]
    graph = graphs.attribution_graph(model, tokens(4), progress=False)
    source, target = graph.of("token")[2], graph.node("mlp_0_5")
    found = graph.heads(source, target)
    assert float(found.values.sum()) == pytest.approx(found.info["edge"], rel=1e-3)
    assert float(found.isel(layer=0, query=5, key=2).values.sum()) == pytest.approx(found.info["edge"], rel=1e-3)


def test_files_hold_the_graph(tmp_path, tinyworld) -> None:
    graph = graphs.attribution_graph(tinyworld, PROMPT, transcoders(tinyworld), progress=False).prune(0.5)
    graph = replace(graph, pinned=(graph.ids[0],), groups={"first": graph.ids[:2]})
    graph.save(tmp_path / "g.json", slug="italy", scan="tinyworld")
    content = json.loads((tmp_path / "g.json").read_text())
    assert set(content) == {"metadata", "qParams", "nodes", "links"}
    assert content["metadata"]["slug"] == "italy"
    assert content["metadata"]["prompt_tokens"] == list(graph.tokens)
    assert content["qParams"]["supernodes"] == [["first", *graph.ids[:2]]]
    kinds = {"cross layer transcoder", "mlp reconstruction error", "embedding", "logit"}
    assert {node["feature_type"] for node in content["nodes"]} <= kinds
    assert len(content["links"]) == int((graph.edges != 0).sum())
    found = graphs.AttributionGraph.load(tmp_path / "g.json")
    assert found.nodes == graph.nodes
    assert found.edges.equal(graph.edges)
    assert found.tokens == graph.tokens
    assert found.pinned == graph.pinned
    assert {name: tuple(ids) for name, ids in graph.groups.items()} == found.groups
    assert float(found.check().values.max()) < 1e-4
    with pytest.raises(HooklineError, match=r"read.*file"):
        found.intervene({found.of("token")[0].id: 0.0})


def link_back(content) -> dict[str, Any]:
    """A link from the last node to the first."""
    first, *_, last = (node["node_id"] for node in content["nodes"])
    return {"source": last, "target": first, "weight": 1.0}


def test_files_that_cannot_be_used_say_why(tmp_path, tinyworld) -> None:
    with pytest.raises(HooklineError, match="graph at"):
        graphs.AttributionGraph.load(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(HooklineError, match="attribution graph"):
        graphs.AttributionGraph.load(tmp_path / "a.json")
    graphs.attribution_graph(tinyworld, PROMPT, progress=False).save(tmp_path / "b.json")
    content = json.loads((tmp_path / "b.json").read_text())
    twice = content | {"nodes": [*content["nodes"], content["nodes"][0]]}
    (tmp_path / "c.json").write_text(json.dumps(twice))
    with pytest.raises(HooklineError, match="two nodes"):
        graphs.AttributionGraph.load(tmp_path / "c.json")
    content["links"][0]["source"] = "nobody"
    (tmp_path / "d.json").write_text(json.dumps(content))
    with pytest.raises(HooklineError, match="link"):
        graphs.AttributionGraph.load(tmp_path / "d.json")
    wrong: dict[str, Any] = {
        "not after its source": lambda x: x["links"].append(link_back(x)),
        "cannot be used": lambda x: x["links"][0].update(weight=1e300),
        "at position -1": lambda x: x["nodes"][0].update(ctx_idx=-1),
        "damaged": lambda x: x["nodes"][0].update(activation="many"),
        "20,000": lambda x: x.update(nodes=[x["nodes"][0]] * 20_001),
    }
    for why, spoil in wrong.items():
        other = json.loads((tmp_path / "b.json").read_text())
        spoil(other)
        (tmp_path / "f.json").write_text(json.dumps(other))
        with pytest.raises(HooklineError, match=why):
            graphs.AttributionGraph.load(tmp_path / "f.json")
    del content["nodes"][0]["layer"]
    (tmp_path / "e.json").write_text(json.dumps(content))
    with pytest.raises(HooklineError, match="damaged"):
        graphs.AttributionGraph.load(tmp_path / "e.json")


@pytest.mark.parametrize("kind", ["mamba", "deepseek_v3", "qwen3_next", "bert"])
def test_models_that_are_not_linear_between_their_mlps_are_refused(models, kind) -> None:
    with pytest.raises(HooklineError, match=r"linear between|MLP whose"):
        graphs.attribution_graph(models[kind], tokens(0), progress=False)


def test_what_cannot_be_done_says_why(models, tinyworld) -> None:
    model = models["llama"]
    with pytest.raises(HooklineError, match="one prompt"):
        graphs.attribution_graph(model, tokens(0, rows=2))
    for options in ({"max_features": 0}, {"max_features": 2.5}, {"errors_only": 0}, {"logit_share": "all"}):
        with pytest.raises(HooklineError, match=next(iter(options))):
            graphs.attribution_graph(model, tokens(0), **options)
    with pytest.raises(HooklineError, match=r"path.*folder"):
        graphs.attribution_graph(model, tokens(0), 3)
    with pytest.raises(HooklineError, match=r"errors_only.*position 9"):
        graphs.attribution_graph(model, tokens(0), errors_only=[9])
    with pytest.raises(HooklineError, match="twice"):
        graphs.attribution_graph(model, tokens(0), target=[5, 5])
    with pytest.raises(HooklineError, match="are of 'gpt2'"):
        graphs.attribution_graph(model, tokens(0), transcoders(model, model_name="gpt2"))
    with pytest.raises(HooklineError, match="width 128"):
        graphs.attribution_graph(model, tokens(0), transcoders(tinyworld))
    spoiled = transcoders(model)
    spoiled[2].W_enc.data[0, 0] = torch.nan
    with pytest.raises(HooklineError, match=r"layer 2.*weights.*NaN"):
        graphs.attribution_graph(model, tokens(0), spoiled)
    with pytest.raises(HooklineError, match="same layer"):
        Transcoders([*transcoders(model), *transcoders(model)])
    with torch.inference_mode(), pytest.raises(HooklineError, match="inference_mode"):
        graphs.attribution_graph(model, tokens(0))
    graph = graphs.attribution_graph(model, tokens(0), progress=False)
    for wrong, why in (({}, "needs nodes"), ({"x": 0.0}, "no node 'x'"), ({"mlp_0_0": True}, "must be a number")):
        with pytest.raises(HooklineError, match=why):
            graph.intervene(wrong)
    with pytest.raises(HooklineError, match="logit"):
        graph.intervene({graph.of("logit")[0].id: 0.0})
    with pytest.raises(HooklineError, match="'feature', 'mlp'"):
        graph.of("head")
    with pytest.raises(HooklineError, match="incoming"):
        graph.into(graph.of("token")[0])
    with pytest.raises(HooklineError, match="fraction"):
        graph.prune(80)
    biased = graphs.attribution_graph(models["bloom"], tokens(0), progress=False)
    with pytest.raises(HooklineError, match="not proportional"):
        biased.qk(biased.of("token")[1], biased.of("logit")[0])


def test_a_page_is_strict_and_harmless(tmp_path, tinyworld) -> None:
    graph = graphs.attribution_graph(tinyworld, PROMPT, progress=False)
    page = graph.plot_html(title="</script><b>x", theme="dark")
    path = page.save(tmp_path / "graph.html")
    text = path.read_text()
    assert "default-src 'none'" in text
    assert "connect-src 'none'" in text
    assert "</script><b>x" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    with pytest.raises(HooklineError, match="theme"):
        graph.plot_html(theme="red")  # type: ignore[arg-type]
    large = replace(graph, nodes=graph.nodes * 100)
    with pytest.raises(HooklineError, match=r"prune\(\)"):
        large.plot_html()


def test_transcoders_of_another_layer_are_pointed_out(tmp_path, tinyworld) -> None:
    points = ["blocks.*.mlp.hook_in", "blocks.*.hook_mlp_out"]
    texts = [f"The capital of {name} is" for name in ("France", "Italy", "Japan", "Spain", "Russia")]
    store = hookline.harvest(tinyworld, texts, points, tmp_path / "rows", progress=False)
    own = train_transcoders(store, d_sae=64, k=8, steps=120, batch_size=25, lr=5e-3, progress=False).transcoders
    own = own.to(tinyworld.cfg.device)
    graph = graphs.attribution_graph(tinyworld, texts[1], own)
    assert min(graph.info["explained"].values()) > 0.5
    assert "another layer" not in repr(graph)
    moved = [Transcoder({0: 2, 2: 0}.get(each.layer, each.layer), dict(each.named_parameters())) for each in own]
    wrong = graphs.attribution_graph(tinyworld, texts[1], Transcoders(moved, own.origin))
    assert {layer for layer, value in wrong.info["explained"].items() if value < 0} == {"0", "2"}
    assert "in layers 0, 2: attention sinks" in repr(wrong)


@pytest.mark.parametrize(
    ("kind", "name", "value"), [("cohere", "logit_scale", 0.0625), ("granite", "logits_scaling", 8.0)]
)
def test_edges_into_a_logit_sum_to_the_logit_that_the_model_returns(kind, name, value) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind, **{name: value}))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = model.module(ids).logits[0, -1]
    graph = graphs.attribution_graph(model, ids, target=torch.tensor([3, 9]), progress=False)
    for node in (node for node in graph.nodes if node.kind == "logit"):
        column = graph.nodes.index(node)
        total = graph.edges[column].sum() + graph.bias[column]
        own = logits[node.feature] - logits.mean()
        assert float(total) == pytest.approx(float(own), abs=1e-5)
        assert node.pre_activation == pytest.approx(float(own), abs=1e-5)
    assert graph.check().top(1, by="value")[0].value < 1e-4

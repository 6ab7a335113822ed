"""Experiments on models whose weights accelerate offloads: the same values as in memory, or an error that says so."""

import pytest
import tiny_models
import torch
from autoencoders import sae_for
from experiment_models import tokens

import hookline
from hookline import HooklineError
from hookline.experiments import (
    attribution,
    circuits,
    edges,
    feature_circuits,
    graphs,
    jacobian,
    metrics,
    patching,
    probes,
    reading,
    relevance,
)
from hookline.sae import train_transcoders
from hookline.store.identity import weights_digest

pytestmark = pytest.mark.on_cpu(reason="accelerate offloads to the CPU")
accelerate = pytest.importorskip("accelerate")

METRIC = metrics.logit_diff(5, 7)
GIVEN = (tokens(0), tokens(1), METRIC)
POINT = "blocks.1.hook_resid_post"
TEXTS = [[5 + i, 17, 4 + i, 7, 3, 9] for i in range(12)]


def offloaded(how: str, folder, kind: str = "llama"):
    module = tiny_models.causal_lm(kind)
    if how == "cpu":
        return accelerate.cpu_offload(module, execution_device="cpu")
    if how == "disk":
        accelerate.disk_offload(module, folder, execution_device="cpu")
        return module
    places = {
        name: "cpu"
        for name, each in module.named_modules()
        if name and not name.startswith("model.layers") and not list(each.children())
    }
    places |= {f"model.layers.{layer}": "cpu" if layer < 2 else "disk" for layer in range(4)}
    return accelerate.dispatch_model(module, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def features(model):
    torch.manual_seed(0)  # the bias of the autoencoder is random
    saes = {POINT: sae_for(model.cfg.d_model)}
    scores = feature_circuits.feature_scores(model, *GIVEN, saes, progress=False)
    return torch.cat(
        [scores.values, circuits.faithfulness(model, *GIVEN, scores, [0, 0.3, 1], saes=saes, progress=False).values]
    )


SAME = {
    "patching": lambda model: patching.sweep(model, *GIVEN, progress=False).values,
    "attribution": lambda model: attribution.attribution_patching(model, *GIVEN, progress=False).values,
    "features": features,
    "probes": lambda model: probes.fit(model, TEXTS, [0, 1] * 6).weights,
    "reading": lambda model: reading.patchscope(model, tokens(0), tokens(1), marker=-1).values,
    "jacobian": lambda model: jacobian.fit(model, TEXTS[:2], layers=[1]).matrices,
}
REFUSED = {
    "graph": lambda model: graphs.attribution_graph(model, tokens(0), progress=False),
    "relevance": lambda model: relevance.relevance(model, *GIVEN, progress=False),
    "edges": lambda model: edges.edge_scores(model, *GIVEN, progress=False),
}


@pytest.mark.parametrize("how", ["cpu", "disk", "device_map"])
def test_offloaded_models_are_measured_or_refused(how, tmp_path) -> None:
    plain, model = hookline.hook(tiny_models.causal_lm("llama")), hookline.hook(offloaded(how, tmp_path))
    for name, measure in REFUSED.items():
        with pytest.raises(HooklineError, match="offloaded"):
            measure(model)
        assert torch.equal(plain(tokens(0)), model(tokens(0))), f"{name} left the model as it was"
    for name, measure in SAME.items():
        assert torch.allclose(measure(plain), measure(model), atol=1e-6), name


@pytest.mark.parametrize("how", ["cpu", "disk", "device_map"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # Gemma's embeddings are tied
def test_the_checksum_of_offloaded_weights_is_that_of_the_same_weights_in_memory(how, kind, tmp_path) -> None:
    plain = tiny_models.causal_lm(kind)
    model = offloaded(how, tmp_path, kind)
    assert weights_digest(model) == weights_digest(plain)
    with torch.no_grad():
        plain.get_parameter("model.layers.3.mlp.up_proj.weight")[0, 0] += 1
    assert weights_digest(model) != weights_digest(plain), "two checkpoints of one shape are told apart"


def test_transcoders_of_an_offloaded_model_fit_the_model_in_memory(tmp_path) -> None:
    points = ["blocks.*.mlp.hook_in", "blocks.*.hook_mlp_out"]
    model = hookline.hook(offloaded("disk", tmp_path / "weights"))
    store = hookline.harvest(model, TEXTS, points, tmp_path / "activations")
    trained = train_transcoders(store, d_sae=32, k=4, steps=3, batch_size=16, progress=False).transcoders
    graph = graphs.attribution_graph(hookline.hook(tiny_models.causal_lm("llama")), tokens(0), trained, progress=False)
    assert graph.of("feature")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a model on two devices needs a GPU")
def test_a_graph_of_a_model_on_two_devices_is_refused() -> None:
    module = tiny_models.causal_lm("llama")
    places = {name: "cpu" for name, each in module.named_modules() if name and not list(each.children())}
    places = {name: 0 if name.startswith("model.layers.1") else "cpu" for name in places}
    model = hookline.hook(accelerate.dispatch_model(module, places, main_device="cpu", force_hooks=True))
    with pytest.raises(HooklineError, match=r"needs.*device"):
        graphs.attribution_graph(model, tokens(0), progress=False)

"""What the libraries compute on the same weights, with TransformerLens and with hookline.

    python peers/stack_results.py there FOLDER       # with TransformerLens: saves weights and results
    python -m hookline.compat.transformer_lens peers/stack_results.py here FOLDER       # compares with them

`peers/stack.py` runs both, each in its own environment.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Values = dict[str, Tensor]


def main(name: str, folder: Path) -> None:
    """Compute everything; the second environment loads the first one's weights and prints differences."""
    path = folder / "results.pt"
    stored: dict[str, Any] = {} if name == "there" else torch.load(path)
    for what, (kind, compute) in COMPUTED.items():
        model = kind()
        weights = _weights(model, stored.get(what, {}).get("weights"))
        values = compute(model)
        if name == "there":
            stored[what] = {"weights": weights, "values": values}
            continue
        for key, value in values.items():
            expected = stored[what]["values"][key]
            is_same = torch.equal(expected.isnan(), value.isnan())
            difference = (value - expected).nan_to_num().abs().max().item() if is_same else float("nan")
            largest = expected.nan_to_num().abs().max().item()
            print(
                f"{what:14}{key:34}{value.numel():10} values up to {largest:8.3g}, largest difference {difference:.1e}"
            )
    if name == "there":
        torch.save(stored, path)


def _config() -> Any:
    from transformer_lens import HookedTransformerConfig

    sizes = {"n_layers": 3, "d_model": 32, "d_head": 8, "n_ctx": 32, "d_vocab": 50257, "act_fn": "gelu", "seed": 1}
    return HookedTransformerConfig(**sizes, tokenizer_name="gpt2", device="cpu", normalization_type="LN")


def _plain() -> Any:
    from transformer_lens import HookedTransformer

    return HookedTransformer(_config())


def _with_autoencoders() -> Any:
    from sae_lens import HookedSAETransformer

    return HookedSAETransformer(_config())


def _replacement() -> Any:
    from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel

    return TransformerLensReplacementModel(_config())


def _weights(model: Any, weights: Values | None) -> Values:
    """The weights of a model, from now on; random ones if none are given."""
    if weights is None:
        draw = torch.Generator().manual_seed(5)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in weights.items():
            if not name.endswith(("mask", "IGNORE")):
                value.add_(torch.randn(value.shape, generator=draw) * 0.1)
    model.load_state_dict(weights)
    return weights


def _random(module: Any) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def _sae(point: str) -> Any:
    from sae_lens import StandardSAE, StandardSAEConfig
    from sae_lens.saes.sae import SAEMetadata

    metadata = SAEMetadata(hook_name=point, prepend_bos=True, context_size=16)
    return _random(StandardSAE(StandardSAEConfig(d_in=32, d_sae=64, metadata=metadata)))


def _texts() -> Any:
    from datasets import Dataset

    words = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "nine", "birds")
    picks = torch.randint(len(words), (400, 40), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_dict({"text": [" ".join(words[pick] for pick in row) for row in picks]})


def splice(model: Any) -> Values:
    """sae-lens: losses with an autoencoder at some points, and its features."""
    tokens, values = torch.arange(3, 43).view(2, 20), {}
    for point in ("blocks.1.hook_resid_pre", "blocks.1.hook_mlp_out", "blocks.0.hook_attn_out"):
        values[f"loss, {point}"] = model.run_with_saes(tokens, saes=[_sae(point)], return_type="loss").detach()
    _, cache = model.run_with_cache_with_saes(tokens, saes=[_sae(point)], use_error_term=True)
    return values | {"features": cache[f"{point}.hook_sae_acts_post"].detach()}


def store(model: Any) -> Values:
    """sae-lens: batches of its activation store."""
    from sae_lens import ActivationsStore

    made = ActivationsStore.from_sae(
        model, _sae("blocks.1.hook_resid_pre"), _texts(), streaming=False, train_batch_size_tokens=64
    )
    torch.manual_seed(3)
    return {f"batch {index}": made.next_batch().detach() for index in range(3)}


def evaluation(model: Any) -> Values:
    """sae-lens: all metrics of `run_evals`."""
    from sae_lens import ActivationsStore
    from sae_lens.evals import get_eval_everything_config, run_evals
    from sae_lens.training.activation_scaler import ActivationScaler

    sae = _sae("blocks.1.hook_mlp_out")
    made = ActivationsStore.from_sae(model, sae, _texts(), streaming=False)
    config = get_eval_everything_config(batch_size_prompts=4, n_eval_reconstruction_batches=3)
    torch.manual_seed(3)
    metrics, of_features = run_evals(sae, made, model, ActivationScaler(), config)
    found = {name: torch.tensor(float(value)) for group in metrics.values() for name, value in group.items()}
    return found | {f"of features: {name}": torch.tensor(values) for name, values in of_features.items()}


def training(model: Any) -> Values:
    """sae-lens: the weights of an autoencoder after training."""
    from sae_lens import (
        LanguageModelSAERunnerConfig,
        LanguageModelSAETrainingRunner,
        LoggingConfig,
        StandardTrainingSAEConfig,
    )

    sizes = {"context_size": 16, "training_tokens": 4096, "train_batch_size_tokens": 128, "n_batches_in_buffer": 16}
    with tempfile.TemporaryDirectory() as folder:
        config = LanguageModelSAERunnerConfig(
            sae=StandardTrainingSAEConfig(d_in=32, d_sae=64, l1_coefficient=0.1),
            hook_name="blocks.1.hook_resid_pre", model_name="gpt2", dataset_path="texts", streaming=False,
            is_dataset_tokenized=False, store_batch_size_prompts=4, lr=1e-3, device="cpu", seed=7, n_checkpoints=0,
            checkpoint_path=folder, output_path=folder, logger=LoggingConfig(log_to_wandb=False), **sizes,
        )  # fmt: skip
        torch.manual_seed(3)
        trained = LanguageModelSAETrainingRunner(config, override_model=model, override_dataset=_texts()).run()
    return {name: value.detach().clone() for name, value in trained.named_parameters()}


def attribution(model: Any) -> Values:
    """circuit-tracer: the matrix of a graph, its files, and logits with features changed, with random transcoders."""
    from circuit_tracer.attribution.attribute import attribute
    from circuit_tracer.graph import Graph
    from circuit_tracer.transcoder import SingleLayerTranscoder, TranscoderSet
    from circuit_tracer.transcoder.activation_functions import TopK
    from circuit_tracer.utils import create_graph_files

    layers = {
        layer: _random(SingleLayerTranscoder(32, 128, TopK(4), layer, skip_connection=True, dtype=torch.float32))
        for layer in range(3)
    }
    model._configure_replacement_model(TranscoderSet(layers, "mlp.hook_in", "mlp.hook_out", scan="random"))
    prompt = torch.tensor([50256, 3, 4, 3, 2, 5])
    graph = attribute(prompt, model, verbose=False)
    logits, _ = model.feature_intervention(prompt, [(0, 3, 5, 2.0), (1, 4, 6, 3.0)])
    with tempfile.TemporaryDirectory() as folder:
        graph.to_pt(f"{folder}/graph.pt")
        read = Graph.from_pt(f"{folder}/graph.pt")
        create_graph_files(f"{folder}/graph.pt", "random", folder)
        written = json.loads(Path(folder, "random.json").read_text(encoding="utf-8"))
    links = {(link["source"], link["target"]): link["weight"] for link in written["links"]}
    influence = {node["node_id"]: node["influence"] or 0.0 for node in written["nodes"]}
    return {
        "matrix": graph.adjacency_matrix,
        "matrix of the .pt file": read.adjacency_matrix,
        "links of the .json file": torch.tensor([links[key] for key in sorted(links)]),
        "influences of the .json file": torch.tensor([influence[key] for key in sorted(influence)]),
        "logits after a change": logits,
    }


def edge_scores(model: Any) -> Values:
    """EAP-IG's scores of edges and nodes, by each of its methods, and the faithfulness of a circuit."""
    if importlib.util.find_spec("eap") is None:
        return {}
    from eap.attribute import attribute as score_edges
    from eap.attribute_node import attribute_node
    from eap.evaluate import evaluate_graph
    from eap.graph import Graph

    zeros = torch.zeros  # EAP-IG writes device="cuda" in the code
    torch.zeros = lambda *size, device=None, **kw: zeros(*size, device=None if device == "cuda" else device, **kw)
    values: Values = {}
    for name in ("attn_result", "split_qkv_input", "hook_mlp_in"):
        getattr(model, f"set_use_{name}")(True)
    texts = [f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary")]
    data = [([texts[0]], [texts[1]], torch.tensor([[5335, 1757]]))]

    def difference(logits: torch.Tensor, _clean: object, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[0, lengths[0] - 1, labels[0]].diff().mean()

    for method in ("EAP", "EAP-IG-inputs", "EAP-IG-activations", "clean-corrupted", "information-flow-routes"):
        graph, steps = Graph.from_model(model), {"ig_steps": 4} if "IG" in method else {}
        score_edges(model, graph, data, difference, method=method, quiet=True, **steps)
        values[method] = graph.scores.clone()
    graph.apply_topn(60, True)
    values["a circuit"] = evaluate_graph(model, graph, data, lambda *given: difference(*given)[None], quiet=True)
    graph = Graph.from_model(model, node_scores=True)
    attribute_node(model, graph, data, difference, method="EAP", quiet=True)
    torch.zeros = zeros
    return values | {"nodes": graph.nodes_scores.clone()}


COMPUTED: dict[str, tuple[Callable[[], Any], Callable[[Any], Values]]] = {
    "splice": (_with_autoencoders, splice),
    "store": (_plain, store),
    "evaluation": (_plain, evaluation),
    "training": (_plain, training),
    "attribution": (_replacement, attribution),
    "edges": (_plain, edge_scores),
}
"""What is computed, by its name in the table: a function that makes the model, and one that uses it."""

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Libraries built on TransformerLens: their own tests, and results on the same weights, with it and with hookline.

    python benchmarks/stack.py FOLDER --suite sae-lens=../SAELens --suite circuit-tracer=../circuit-tracer

FOLDER gets two environments: `there` with TransformerLens 3.5.1, `here` with hookline in its place. Both have the same
transformers and the same libraries. A suite is a checkout of a library, with its tests in `tests`. Tests that need a
model from the hub fail in both, unless HF_HOME has it. The last column is what matters: of the tests that pass with
TransformerLens, how many pass with hookline. EAP-IG is not on PyPI: its scores are compared if PYTHONPATH has the `src`
of a checkout.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SHARED = [*("datasets", "plotly", "babe", "nltk", "python-dotenv", "simple-parsing<0.2", "tenacity", "einops", "wandb"),
          *("pytest", "pytest-timeout", "greenlet", "ipython", "trio")]  # fmt: skip
LIBRARIES = ["sae-lens==6.54.12", "circuit-tracer==0.5.0", "nnsight==0.6.1", "plotly-express"]
"""Without their requirements, which contradict each other."""
ENVIRONMENTS = {"there": ["transformer-lens==3.5.1"], "here": ["-e", str(ROOT)]}
CONSTANT = "import huggingface_hub.constants as c; c.HF_HUB_ENABLE_HF_TRANSFER = False\n"
"""circuit-tracer imports a name that huggingface_hub 1.0 removed; hookline's stand-in puts it back by itself."""


def main() -> None:
    """Build the environments, run the suites, compare the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--suite", action="append", default=[], metavar="NAME=CHECKOUT")
    options.add_argument("--results", choices=("there", "here"), help=argparse.SUPPRESS)  # in an environment
    given = options.parse_args()
    if given.results:
        results(given.results, given.folder / "results.pt")
        return
    for name in ENVIRONMENTS:
        build(given.folder / name, name)
    print(f"{'library':20}{'pass there':>12}{'pass here':>12}{'of these':>12}")
    for suite in given.suite:
        name, _, checkout = suite.partition("=")
        there, here = (passed(given.folder, each, name, Path(checkout)) for each in ENVIRONMENTS)
        share = f"{len(there & here) / max(1, len(there)):.1%}"
        print(f"{name:20}{len(there):12}{len(here):12}{share:>12}", flush=True)
        for test in sorted(there - here):
            print(f"    only there: {test}")
    for name in ENVIRONMENTS:
        run(given.folder, name, [str(Path(__file__).resolve()), str(given.folder.resolve()), "--results", name])


def build(where: Path, name: str) -> None:
    """Make an environment, unless it exists."""
    if where.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    pip = [where / "bin" / "pip", "install", "-q"]
    subprocess.run([*pip, *ENVIRONMENTS[name], *SHARED], check=True)
    subprocess.run([*pip, "--no-deps", *LIBRARIES], check=True)
    if name == "there":
        site = next((where / "lib").glob("python*/site-packages"))
        (site / "sitecustomize.py").write_text(CONSTANT, encoding="utf-8")


def run(folder: Path, name: str, program: list[str], **options: object) -> subprocess.CompletedProcess:
    """Run a Python program in an environment; in `here`, with the stand-in."""
    stand_in = ["-m", "hookline.compat.transformer_lens"] if name == "here" else []
    command = [str(folder.resolve() / name / "bin" / "python"), *stand_in, *program]
    env = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, env=env, check=False, **options)  # type: ignore[call-overload]


def passed(folder: Path, name: str, suite: str, checkout: Path) -> set[str]:
    """The tests of a suite that pass in an environment."""
    report = folder.resolve() / f"{suite}-{name}.xml"
    flags = ["-q", "-p", "no:cacheprovider", "--timeout=120", "--continue-on-collection-errors", f"--junitxml={report}"]
    log = report.with_suffix(".log").open("w", encoding="utf-8")
    run(folder, name, ["-m", "pytest", "tests", *flags], cwd=checkout, stdout=log, stderr=log)
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}


def results(name: str, path: Path) -> None:
    """Compute everything in this environment; the second one loads the first one's weights and prints differences."""
    stored = {} if name == "there" else torch.load(path)
    for what, compute in {"splice": splice_loss, "attribution": attribution, "edges": edge_scores}.items():
        weights, values = compute(stored.get(what, {}).get("weights"))
        if name == "there":
            stored[what] = {"weights": weights, "values": values}
        else:
            for key, value in values.items():
                difference = (value - stored[what]["values"][key]).abs().max().item()
                print(f"{what:14}{key:24}largest difference {difference:.1e}")
    if name == "there":
        torch.save(stored, path)


def _config(**options: object) -> object:
    from transformer_lens import HookedTransformerConfig

    sizes = {"n_layers": 3, "d_model": 32, "d_head": 8, "n_ctx": 32, "d_vocab": 50257, "act_fn": "gelu", "seed": 1}
    return HookedTransformerConfig(**sizes | options, tokenizer_name="gpt2", device="cpu", normalization_type="LN")


def _weights(model: object, weights: dict | None) -> dict:
    """The weights of a model, from now on; random ones if none are given."""
    if weights is None:
        draw = torch.Generator().manual_seed(5)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in weights.items():
            if not name.endswith(("mask", "IGNORE")):
                value.add_(torch.randn(value.shape, generator=draw) * 0.1)
    model.load_state_dict(weights)
    return weights


def splice_loss(weights: dict | None) -> tuple[dict, dict]:
    """Losses with a sparse autoencoder at some points."""
    from sae_lens import HookedSAETransformer, StandardSAE, StandardSAEConfig
    from sae_lens.saes.sae import SAEMetadata

    model, values = HookedSAETransformer(_config()), {}
    weights = _weights(model, weights)
    tokens = torch.arange(3, 43).view(2, 20)
    for point in ("blocks.1.hook_resid_pre", "blocks.1.hook_mlp_out", "blocks.0.hook_attn_out"):
        torch.manual_seed(0)
        sae = StandardSAE(StandardSAEConfig(d_in=32, d_sae=64, metadata=SAEMetadata(hook_name=point)))
        for parameter in sae.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        values[point] = model.run_with_saes(tokens, saes=[sae], return_type="loss").detach()
    return weights, values


def attribution(weights: dict | None) -> tuple[dict, dict]:
    """The matrix of an attribution graph, and logits with a feature changed, with random transcoders."""
    from circuit_tracer.attribution.attribute import attribute
    from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
    from circuit_tracer.transcoder import SingleLayerTranscoder, TranscoderSet
    from circuit_tracer.transcoder.activation_functions import TopK

    model = TransformerLensReplacementModel(_config())
    weights = _weights(model, weights)
    torch.manual_seed(0)
    layers = {
        layer: SingleLayerTranscoder(32, 128, TopK(4), layer, skip_connection=True, dtype=torch.float32)
        for layer in range(3)
    }
    for parameter in (each for layer in layers.values() for each in layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    model._configure_replacement_model(TranscoderSet(layers, "mlp.hook_in", "mlp.hook_out"))
    prompt = torch.tensor([50256, 3, 4, 3, 2, 5])
    graph = attribute(prompt, model, verbose=False)
    logits, _ = model.feature_intervention(prompt, [(0, 3, 5, 2.0), (1, 4, 6, 3.0)])
    return weights, {"matrix": graph.adjacency_matrix, "logits after a change": logits}


def edge_scores(weights: dict | None) -> tuple[dict, dict]:
    """EAP-IG's scores of edges and nodes, by each of its methods, and the faithfulness of a circuit."""
    if importlib.util.find_spec("eap") is None:
        return {}, {}
    from eap.attribute import attribute as score_edges
    from eap.attribute_node import attribute_node
    from eap.evaluate import evaluate_graph
    from eap.graph import Graph
    from transformer_lens import HookedTransformer

    zeros = torch.zeros  # EAP-IG writes device="cuda" in the code
    torch.zeros = lambda *size, device=None, **kw: zeros(*size, device=None if device == "cuda" else device, **kw)
    model, values = HookedTransformer(_config()), {}
    weights = _weights(model, weights)
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
    return weights, values | {"nodes": graph.nodes_scores.clone()}


if __name__ == "__main__":
    main()

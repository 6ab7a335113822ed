"""Training sparse autoencoders, beside SAELens: steps per second, and the explained variance at equal sparsity.

    python benchmarks/sae_training.py --python PATH        a Python with sae-lens 6.54 installed
    python benchmarks/sae_training.py --make-env FOLDER    create such an environment there first

Both train on the same rows, with the same width, batch size, number of steps and learning rates, in one thread. The
autoencoders are then measured by the same code on rows that were held out. `--activations FILE` has rows of a model,
a tensor [row, d_in] saved by `torch.save`; without it, rows are sparse sums of random directions. Times are CPU time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HELD_OUT = 2048
KINDS = ("topk", "batchtopk", "matryoshka")


def main() -> None:
    """Train with both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a Python with sae-lens 6.54 installed")
    parser.add_argument("--make-env", metavar="FOLDER", help="create a virtual environment with it there, and use it")
    parser.add_argument("--activations", metavar="FILE", help="a tensor [row, d_in]")
    parser.add_argument("--width", type=int, default=2048, help="the number of features")
    parser.add_argument("--k", type=int, default=32, help="the number of active features")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--peer", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        run_peer(Path(options.peer), options)
        return
    if options.make_env:
        subprocess.run([sys.executable, "-m", "venv", options.make_env], check=True)
        options.python = f"{options.make_env}/bin/python"
        subprocess.run([options.python, "-m", "pip", "install", "-q", "sae-lens==6.54.*"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = torch.load(options.activations).float() if options.activations else synthetic()
        torch.save(ordinary(rows), Path(folder) / "rows.pt")
        if options.python:
            subprocess.run([options.python, __file__, "--peer", folder, *sys.argv[1:]], check=True)
        compare(Path(folder), options)


def synthetic() -> Tensor:
    """Sparse sums of random directions, with noise."""
    random = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(1024, 256, generator=random), dim=1)
    active = (torch.rand(20_000, 1024, generator=random) < 0.03) * torch.rand(20_000, 1024, generator=random)
    return active @ directions * 10 + torch.randn(20_000, 256, generator=random) * 0.1 + 1


def ordinary(rows: Tensor) -> Tensor:
    """The rows without attention sinks, which hookline leaves out of a training, and SAELens does not; shuffled."""
    norms = rows.norm(dim=1)
    rows = rows[norms <= 10 * norms.median()]
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def batches(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Batches of all rows, epoch after epoch, each in another order."""
    random = torch.Generator().manual_seed(1)
    while True:
        yield from (rows[part] for part in torch.randperm(len(rows), generator=random).split(size) if len(part) == size)


def run_peer(folder: Path, options: Any) -> None:
    """In the other Python: train SAELens's autoencoders, and save them with their times."""
    import sae_lens
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    rows = torch.load(folder / "rows.pt")[HELD_OUT:]
    seconds = {}
    for kind in KINDS:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"d_in": rows.shape[1], "d_sae": options.width, "k": options.k, "device": "cpu"}
        sizes["normalize_activations"] = "expected_average_only_in"
        name = {"topk": "TopK", "batchtopk": "BatchTopK", "matryoshka": "MatryoshkaBatchTopK"}[kind]
        if kind == "matryoshka":
            sizes["matryoshka_widths"] = [options.width // part for part in (8, 4, 2, 1)]
        sae = getattr(sae_lens, f"{name}TrainingSAE")(getattr(sae_lens, f"{name}TrainingSAEConfig")(**sizes))
        plan = SAETrainerConfig(
            total_training_samples=options.steps * options.batch,
            train_batch_size_samples=options.batch,
            lr=1e-3,
            lr_end=1e-5,
            lr_warm_up_steps=options.steps // 20,
            lr_decay_steps=options.steps // 5,
            dead_feature_window=options.steps // 8,  # as hookline's; the default is 1,000 steps
            n_batches_for_norm_estimate=10,
        )
        trainer = SAETrainer(plan, sae, batches(rows, options.batch))
        start = time.process_time()
        trainer.fit()
        seconds[kind] = time.process_time() - start
        sae.save_inference_model(str(folder / kind))
    (folder / "peer.json").write_text(json.dumps(seconds))


def compare(folder: Path, options: Any) -> None:
    """Train with hookline, and print speed and quality beside those of the peer."""
    from hookline.sae import SparseAutoencoder, train

    rows = torch.load(folder / "rows.pt")
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    sizes = f"{len(rows):,} rows of width {rows.shape[1]}, {options.width} features"
    print(f"{sizes}, {options.steps} steps of {options.batch} rows")
    print(f"{'':24} {'steps/s':>8} {'L0':>6} {'explained':>10} {'dead':>6}")
    file = folder / "peer.json"
    theirs = json.loads(file.read_text()) if file.exists() else {}
    train(rows[:64], d_sae=8, kind="topk", k=2, steps=2, progress=False)  # a first call imports
    for kind in KINDS:
        if kind in theirs:
            show(f"{kind}, SAELens", options.steps / theirs[kind], SparseAutoencoder.load(folder / kind), held_out)
        start = time.process_time()
        how = {"steps": options.steps, "batch_size": options.batch, "progress": False}
        sae = train(rows, d_sae=options.width, kind=kind, k=options.k, outliers="include", **how).sae
        show(f"{kind}, hookline", options.steps / (time.process_time() - start), sae, held_out)


@torch.no_grad()
def show(name: str, speed: float, sae: Any, x: Tensor) -> None:
    """Print one row: an autoencoder on rows that it was not trained on."""
    features = sae.encode(x)
    missed = (sae.decode(features, x) - x).pow(2).sum() / (x - x.mean(0)).pow(2).sum()
    active = features > 0
    l0, dead = float(active.sum(1).float().mean()), float((~active.any(0)).float().mean())
    print(f"{name:24} {speed:8.1f} {l0:6.1f} {1 - float(missed):10.1%} {dead:6.1%}")


if __name__ == "__main__":
    main()

"""Train transcoders on a store with the inputs and outputs of MLPs: all layers in one pass, alone or across layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.pages.text_tables import table
from hookline.progress import progress_bar
from hookline.sae.sae_config import check_count, is_count
from hookline.sae.sources import bad_rows
from hookline.sae.training_plan import L1, K, Metrics, TrainingPlan
from hookline.sae.transcoders import Transcoder, TranscoderOrigin, Transcoders
from hookline.store import Store, open_store
from hookline.text.outliers import Outliers, outlying, row_norms

_RECENT = 20
"""Over about how many steps the threshold is averaged."""


@dataclass(frozen=True)
class TranscoderTraining:
    """Trained transcoders with their history of metrics, averaged over layers. Prints as a table."""

    transcoders: Transcoders
    history: tuple[Metrics, ...]
    explained: Mapping[int, float]
    """The fraction of the variance of each layer's MLP output that is explained, in the last steps."""

    def __repr__(self) -> str:
        head = [metric.name for metric in fields(Metrics)]
        last = len(self.history) - 1
        shown = sorted({round(last * i / 9) for i in range(10)})
        rows = [[f"{getattr(self.history[i], name):.4g}" for name in head] for i in shown]
        layers = ", ".join(f"{layer}: {value:.2f}" for layer, value in self.explained.items())
        return f"{self.transcoders.extra_repr()}\n{table([head, *rows], '>')}\nexplained by layer: {layers}"


def train_transcoders(
    store: Store | str | Path,
    *,
    d_sae: int,
    layers: Sequence[int] | None = None,
    cross_layer: bool = False,
    kind: Literal["l1", "topk"] = "topk",
    l1: float | None = None,
    k: int | None = None,
    reads: str = "mlp.hook_in",
    writes: str = "hook_mlp_out",
    steps: int = 2000,
    batch_size: int = 1024,
    lr: float = 1e-3,
    outliers: Outliers = "exclude",
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> TranscoderTraining:
    """Train a transcoder for each layer of a store; returns them with their metrics.

        points = ["blocks.*.mlp.hook_in", "blocks.*.hook_mlp_out"]
        store = hookline.harvest(model, texts, points, "activations")
        training = hookline.sae.train_transcoders(store, d_sae=1024, k=16)
        training.transcoders.save("my_transcoders")

    All layers (or `layers`) are trained in one pass over the rows. With `cross_layer`, features write to the outputs of
    their own and all later layers. `kind="topk"` keeps the `k` most active features of each layer per row, on average
    over a batch; the result has a threshold for each feature (JumpReLU) that does the same for single rows. `kind="l1"`
    has ReLU features with a penalty `l1` on their activations times the norm of what they write. Rows that are outlying
    at one of the points, such as attention sinks, are left out: see `train`.
    """
    store = open_store(store)
    names = _points(store, layers, reads, writes)
    if kind not in ("l1", "topk"):
        raise HooklineError(f'kind must be "l1" or "topk", not {kind!r}')
    if (k if kind == "l1" else l1) is not None:
        raise HooklineError(f'{"k" if kind == "l1" else "l1"} does not apply to kind="{kind}"')
    check_count("batch_size", batch_size)
    chosen = (L1 if l1 is None else l1, K if k is None else k)
    if kind == "topk" and is_count(k) and k > d_sae:  # type: ignore[operator]
        raise HooklineError(f"k must be from 1 to d_sae ({d_sae}), not {k}")
    plan = TrainingPlan(kind, d_sae, *chosen, steps, lr, 0.05, 0.2, 0.1, 0, max(1, steps // 50), seed)
    about = store.manifest.about.model
    origin = TranscoderOrigin(reads, writes, about.get("id"), about.get("weights"))
    with torch.inference_mode(False), torch.enable_grad():
        trainer = _Trainer(plan, names, cross_layer, torch.device(device))
        return trainer.run(_batches(store, names, batch_size, seed, outliers, trainer.device), origin, progress)


def _points(store: Store, layers: Sequence[int] | None, reads: str, writes: str) -> dict[int, tuple[str, str]]:
    """The names of the two points of each layer."""
    pattern = re.compile(rf"blocks\.(\d+)\.({re.escape(reads)}|{re.escape(writes)})")
    names_by_layer: dict[int, dict[str, str]] = {}
    for name in store.points:
        if match := pattern.fullmatch(name):
            names_by_layer.setdefault(int(match[1]), {})[match[2]] = name
    whole = sorted(layer for layer, names in names_by_layer.items() if len(names) == 2)
    requested = whole if layers is None else sorted(set(layers))
    missing = [layer for layer in requested if layer not in whole]
    if missing or not requested:
        raise HooklineError(
            f"the store has both {reads} and {writes} of layers {whole}"
            + (f", but not of {missing}" if missing else "")
            + f": harvest(model, texts, ['blocks.*.{reads}', 'blocks.*.{writes}'], …)"
        )
    return {layer: (names_by_layer[layer][reads], names_by_layer[layer][writes]) for layer in requested}


def _batches(
    store: Store, names: Mapping[int, tuple[str, str]], size: int, seed: int, outliers: Outliers, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Rows at all points, epoch after epoch, without those that are outlying at one of them."""
    points = [name for pair in names.values() for name in pair]
    epoch = 0
    while True:
        is_empty = True
        for rows in store.batches(size, points, shuffle=True, seed=seed, epoch=epoch):
            x = {name: rows[name].float().to(device) for name in points}
            is_out = torch.stack([outlying(row_norms(activations), outliers)[0] for activations in x.values()]).any(0)
            if not bool(is_out.all()):
                is_empty = False
                yield {name: activations[~is_out] for name, activations in x.items()}
        if is_empty:
            raise HooklineError("the store has no rows to train on")
        epoch += 1


class _Trainer:
    """One training run, on activations scaled to a mean norm of √width."""

    def __init__(
        self, plan: TrainingPlan, names: Mapping[int, tuple[str, str]], cross_layer: bool, device: torch.device
    ) -> None:
        self.plan, self.names, self.cross_layer, self.device = plan, dict(names), cross_layer, device
        self.history: list[Metrics] = []
        self.sums: list[Tensor] = []
        self.threshold = torch.zeros(len(self.names), device=device)

    def run(self, batches: Iterator[dict[str, Tensor]], origin: TranscoderOrigin, progress: bool) -> TranscoderTraining:
        """Run all steps."""
        first = next(batches)
        self._begin(first)
        with progress_bar(progress, self.plan.steps, " steps") as bar:
            for step in range(self.plan.steps):
                self._step(first if step == 0 else next(batches), step)
                if (step + 1) % self.plan.log_every == 0 or step + 1 == self.plan.steps:
                    explained = self._log(step + 1)
                bar.update()
        return TranscoderTraining(self._unscaled(origin), tuple(self.history), explained)

    @torch.no_grad()
    def _begin(self, x: Mapping[str, Tensor]) -> None:
        self.scales = {}
        for name, activations in x.items():
            norm = float(activations.norm(dim=1).mean())
            if not math.isfinite(norm) or not norm:
                raise HooklineError(f"the mean norm of the activations at {name!r} is {norm}{bad_rows(activations)}")
            self.scales[name] = activations.shape[1] ** 0.5 / norm
        random = torch.Generator().manual_seed(self.plan.seed)
        layers = list(self.names)
        made = []
        for layer, (into, out) in self.names.items():
            writes = [to for to in layers if to >= layer] if self.cross_layer else [layer]
            encoder = nn.functional.normalize(torch.randn(self.plan.d_sae, x[into].shape[1], generator=random), dim=1)
            decoder = torch.randn(self.plan.d_sae, len(writes), x[out].shape[1], generator=random)
            decoder = decoder / decoder.norm(dim=(1, 2), keepdim=True)
            weights = {"W_enc": encoder.T, "b_enc": torch.zeros(self.plan.d_sae), "W_dec": decoder * 0.1}
            weights["b_dec"] = (x[out].mean(0) * self.scales[out]).cpu()
            made.append(Transcoder(layer, weights, writes=writes))
        self.transcoders = Transcoders(made).to(self.device)
        self.optimizer = torch.optim.Adam(self.transcoders.parameters(), lr=self.plan.lr, betas=(0.9, 0.99))
        self.active = {layer: torch.zeros(self.plan.d_sae, device=self.device) for layer in layers}

    def _step(self, x: Mapping[str, Tensor], step: int) -> None:
        inputs = {layer: x[into] * self.scales[into] for layer, (into, _) in self.names.items()}
        features, penalty = {}, torch.zeros((), device=self.device)
        for nth, (layer, layer_input) in enumerate(inputs.items()):
            features[layer], cost = self._features(nth, layer, layer_input)
            penalty = penalty + cost
        outputs = self.transcoders.outputs(inputs, features)
        targets = {layer: x[out] * self.scales[out] for layer, (_, out) in self.names.items()}
        errors = torch.stack([(outputs[layer] - y).pow(2).sum() / len(y) for layer, y in targets.items()])
        loss = errors.sum() + self.plan.l1_coefficient(step) * penalty
        if not bool(loss.isfinite()):
            bad = [f" at {name!r}{rows}" for name, activations in x.items() if (rows := bad_rows(activations))]
            raise HooklineError(f"the loss is {loss.item()} at step {step}{(bad or [': lower lr'])[0]}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(step)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            spread = torch.stack([(y - y.mean(0)).pow(2).sum() / len(y) for y in targets.values()])
            l0 = torch.stack([(layer_features > 0).sum() / len(layer_features) for layer_features in features.values()])
            self.sums.append(torch.stack([errors.detach(), spread, l0, loss.detach().expand_as(l0)]))
            for layer, layer_features in features.items():
                self.active[layer] += (layer_features > 0).sum(0)

    def _features(self, nth: int, layer: int, x: Float[Tensor, "row d"]) -> tuple[Tensor, Tensor]:
        """The active features of a layer in training, and their penalty."""
        transcoder = self.transcoders[layer]
        features = transcoder.encode(x)
        sizes = transcoder.W_dec.norm(dim=(1, 2))
        if self.plan.kind == "l1":
            return features, (features * sizes).sum() / len(x)
        with torch.no_grad():
            scores = (features * sizes).flatten()
            least = scores.topk(min(self.plan.k * len(x), len(scores)), sorted=True).values[-1].clamp(min=1e-8)
            share = 1 / _RECENT if bool(self.threshold[nth]) else 1.0
            self.threshold[nth] += share * (least - self.threshold[nth])
            mask = (scores >= least).view_as(features)
        return features * mask, torch.zeros((), device=self.device)

    def _log(self, step: int) -> dict[int, float]:
        """Record the metrics since the last record; returns the explained variance of each layer."""
        errors, spread, l0, loss = torch.stack(self.sums).mean(0).cpu()
        explained = 1 - errors / spread
        dead = sum(float((counts == 0).float().mean()) for counts in self.active.values()) / len(self.active)
        self.history.append(Metrics(step, float(loss[0]), float(l0.mean()), float(explained.mean()), dead))
        self.sums = []
        for counts in self.active.values():
            counts.zero_()
        return {layer: float(value) for layer, value in zip(self.names, explained, strict=True)}

    @torch.no_grad()
    def _unscaled(self, origin: TranscoderOrigin) -> Transcoders:
        """The transcoders of activations that are not scaled."""
        made = []
        for nth, transcoder in enumerate(self.transcoders):
            into, out = self.names[transcoder.layer]
            scales = torch.tensor([self.scales[self.names[to][1]] for to in transcoder.writes], device=self.device)
            weights: dict[str, Any] = {
                "W_enc": transcoder.W_enc * self.scales[into],
                "b_enc": transcoder.b_enc,
                "W_dec": transcoder.W_dec / scales[:, None],
                "b_dec": transcoder.b_dec / self.scales[out],
            }
            if self.plan.kind == "topk":
                weights["threshold"] = self.threshold[nth] / transcoder.W_dec.norm(dim=(1, 2)).clamp(min=1e-8)
            made.append(Transcoder(transcoder.layer, weights, writes=transcoder.writes))
        return Transcoders(made, origin)

"""Train a sparse autoencoder on activations; the result has the autoencoder and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hookline.errors import HooklineError, warn
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.sae_config import SAEConfig, check_count, is_count
from hookline.sae.sources import Data, Source, source_of
from hookline.text.outliers import Outliers, Outlying, factor_of, outlying, row_norms

L1, K = 2.0, 16
_Check: TypeAlias = tuple[Callable[[Any], bool], str]
_LAST_RESAMPLING = 0.75
"""The fraction of the steps after which no feature is resampled, so that the last ones can converge."""
_SHARE = 0.2
"""The norm of a resampled encoder direction, relative to the mean norm of those that are alive."""


@dataclass(frozen=True)
class Metrics:
    """The metrics on the batches since the previous record."""

    step: int
    loss: float
    l0: float
    """The mean number of active features."""
    explained_variance: float
    """The fraction of the activations' variance that the reconstruction explains."""
    dead: float
    """The fraction of dead features."""


@dataclass(frozen=True)
class Training:
    """A trained autoencoder with its history of metrics. Prints as a table."""

    sae: SparseAutoencoder
    history: tuple[Metrics, ...]
    steps: int
    """The number of steps run."""
    resampled: int
    """The number of times a dead feature was resampled."""
    is_interrupted: bool = False
    """Whether Ctrl-C stopped it early."""
    outlying: Outlying = field(default_factory=Outlying)
    """The rows that were excluded, counted in every epoch."""

    @property
    def last(self) -> Metrics:
        """The last metrics."""
        return self.history[-1]

    def __repr__(self) -> str:
        head = [each.name for each in fields(Metrics)]
        last = len(self.history) - 1
        shown = sorted({round(last * i / 9) for i in range(10)})  # evenly spaced, with the last
        rows = [[f"{getattr(self.history[i], name):.4g}" for name in head] for i in shown]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(f"{x:>{width}}" for x, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        end = "stopped by Ctrl-C after" if self.is_interrupted else "after"
        about = f"{self.sae.extra_repr()}; {end} {self.steps} steps, {self.resampled} features resampled"
        left_out = [f'left out: {self.outlying} (outliers="include" keeps them)'] if self.outlying.count else []
        return "\n".join([about, *left_out, *lines])


def train(
    data: Data,
    point: str | None = None,
    *,
    d_sae: int,
    kind: Literal["l1", "topk"] = "l1",
    l1: float | None = None,
    k: int | None = None,
    steps: int = 2000,
    batch_size: int | None = None,
    lr: float = 1e-3,
    warm_up: float = 0.05,
    decay: float = 0.2,
    l1_warm_up: float = 0.1,
    resample_every: int | None = None,
    log_every: int | None = None,
    outliers: Outliers = "exclude",
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Training:
    """Train a sparse autoencoder; returns it with its metrics.

        store = hookline.harvest(model, texts, "blocks.2.hook_resid_post", "activations")
        training = hookline.sae.train(store, "blocks.2.hook_resid_post", d_sae=1024, kind="topk", k=16)
        training.sae.save("my_sae")

    The data is a store (or its path), of which `point` selects the activations; a tensor or array [row, d_in]; or an
    iterable of such batches. Each epoch has a new order, until `steps` is reached. "l1" is a ReLU autoencoder with an
    L1 penalty of `l1` on the feature activations (for activations scaled to a mean norm of √d_in), "topk" keeps the `k`
    largest features.

    `warm_up` and `decay` are the fractions of the steps in which the learning rate rises at the start and falls at the
    end; `l1_warm_up` is the fraction in which the L1 penalty rises. Every `resample_every` steps (by default 8 times in
    all, 0 for never), features that were inactive since are resampled: pointed at poorly reconstructed inputs. Decoder
    directions have norm 1. The same seed gives the same autoencoder. Ctrl-C stops the training and returns the
    autoencoder so far.

    Rows whose norm is over 10 times the median of their batch, such as attention sinks, are left out: they would decide
    the scale, the mean and the loss. `training.outlying` says how many they were. `outliers="include"` trains on all
    rows, and a number takes the place of the 10.

    `device` is where it is trained: by default where a tensor of activations is, and the CPU for a store.
    """
    plan = TrainingPlan(
        *(kind, d_sae, L1 if l1 is None else l1, K if k is None else k, steps, lr, warm_up, decay, l1_warm_up),
        *(max(1, steps // 8) if resample_every is None else resample_every, log_every or max(1, steps // 50), seed),
    )
    if (k if kind == "l1" else l1) is not None:
        raise HooklineError(f'{"k" if kind == "l1" else "l1"} does not apply to kind="{kind}"')
    with torch.inference_mode(False), torch.enable_grad():  # whatever it is called in: training needs gradients
        where = torch.device(device or (data.device if isinstance(data, Tensor) else "cpu"))
        return Trainer(source_of(data, point, batch_size, seed), plan, where, outliers).run(progress)


_NUMBER: _Check = (lambda x: math.isfinite(x) and x >= 0, "a nonnegative number")
_FRACTION: _Check = (lambda x: 0 <= x <= 1, "a fraction of the steps, from 0 to 1")
_VALID: dict[str, _Check] = {
    "resample_every": (lambda x: x == 0 or is_count(x), "a number of steps, or 0 for never"),
    **dict.fromkeys(("l1", "lr"), _NUMBER),
    **dict.fromkeys(("warm_up", "decay", "l1_warm_up"), _FRACTION),
}


@dataclass(frozen=True)
class TrainingPlan:
    """The hyperparameters of a training run."""

    kind: str
    d_sae: int
    l1: float
    k: int
    steps: int
    lr: float
    warm_up: float
    decay: float
    l1_warm_up: float
    resample_every: int
    log_every: int
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in ("l1", "topk"):
            raise HooklineError(f'kind must be "l1" or "topk", not {self.kind!r}')
        for name in ("d_sae", "k", "steps", "log_every"):
            check_count(name, getattr(self, name))
        for name, (is_valid, expected) in _VALID.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise HooklineError(f"{name} must be {expected}, not {value!r}")

    def rate(self, step: int) -> float:
        """The learning rate at a step: linear warm-up, constant, linear decay."""
        rising = (step + 1) / max(1.0, self.warm_up * self.steps)
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, rising, falling)

    def l1_coefficient(self, step: int) -> float:
        """The L1 coefficient at a step, with its warm-up."""
        if self.kind == "topk":
            return 0.0
        return self.l1 * min(1.0, (step + 1) / max(1.0, self.l1_warm_up * self.steps))

    def resamples(self, step: int) -> bool:
        """Whether dead features are resampled after a step."""
        every = self.resample_every
        return bool(every) and (step + 1) % every == 0 and step + 1 <= _LAST_RESAMPLING * self.steps

    @property
    def patience(self) -> int:
        """The number of inactive steps after which a feature counts as dead."""
        return self.resample_every or max(1, self.steps // 8)

    def config(self, source: Source) -> SAEConfig:
        """The config of the autoencoder."""
        return SAEConfig(
            architecture="topk" if self.kind == "topk" else "standard",
            d_in=source.d_in,
            d_sae=self.d_sae,
            k=self.k if self.kind == "topk" else None,
            reshape_activations="hook_z" if source.is_of_heads else "none",
            hook_name=source.hook_name,
            metadata={"model_name": source.model_name, "trained_by": "hookline"},
        )


class DeadFeatures:
    """Counts for how many steps each feature has been inactive."""

    def __init__(self, d_sae: int, patience: int, device: torch.device) -> None:
        self.steps = torch.zeros(d_sae, dtype=torch.long, device=device)
        self.patience = patience

    def update(self, features: Tensor) -> None:
        """Count a batch."""
        self.steps += 1
        self.steps[(features > 0).any(0)] = 0

    def indices(self) -> Tensor:
        """The features that have been inactive for `patience` steps."""
        return (self.steps >= self.patience).nonzero().flatten()

    def share(self) -> float:
        """The fraction of dead features."""
        return len(self.indices()) / len(self.steps)


@torch.no_grad()
def resample(
    sae: SparseAutoencoder, optimizer: torch.optim.Adam, dead_features: DeadFeatures, x: Tensor, random: torch.Generator
) -> int:
    """Point dead features at poorly reconstructed inputs, sampled by their error; returns how many were resampled."""
    dead = dead_features.indices()
    if not len(dead):
        return 0
    error = x - sae(x)
    odds = error.pow(2).sum(1).pow(2).double().cpu() + 1e-30
    chosen = torch.multinomial(odds, len(dead), replacement=len(dead) > len(x), generator=random)
    directions = nn.functional.normalize(error[chosen.to(x.device)], dim=1)
    alive = dead_features.steps < dead_features.patience
    norm = sae.W_enc[:, alive].norm(dim=0).mean() if bool(alive.any()) else 1.0
    sae.W_dec[dead] = directions
    sae.W_enc[:, dead] = (directions * norm * _SHARE).T
    sae.b_enc[dead] = 0
    for parameter, axis in ((sae.W_dec, 0), (sae.W_enc, 1), (sae.b_enc, 0)):
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                optimizer.state[parameter][moment].index_fill_(axis, dead, 0)
    dead_features.steps[dead] = 0
    return len(dead)


class Trainer:
    """One training run: the autoencoder, its optimizer, and its statistics."""

    def __init__(
        self, source: Source, plan: TrainingPlan, device: torch.device, outliers: Outliers = "exclude"
    ) -> None:
        self.source, self.plan, self.device = source, plan, device
        self.outliers, self.outlying = outliers, Outlying(factor=factor_of(outliers))
        self.sae = SparseAutoencoder(plan.config(source), seed=plan.seed).to(device)
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=plan.lr)
        self.random = torch.Generator().manual_seed(plan.seed)
        self.dead_features = DeadFeatures(plan.d_sae, plan.patience, device)
        self.history: list[Metrics] = []
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.scale, self.steps, self.resampled, self.is_interrupted = 1.0, 0, 0, False

    def run(self, progress: bool) -> Training:
        """Run all steps; Ctrl-C stops early."""
        batches = self.source.batches()
        with tqdm(total=self.plan.steps, disable=not progress, delay=2, leave=False, unit=" steps") as bar:
            try:
                self._run(batches, bar)
            except KeyboardInterrupt:
                if not self.steps:
                    raise
                self.is_interrupted = True
        if self.steps % self.plan.log_every:
            self._log()
        if self.steps < self.plan.steps and not self.is_interrupted:
            warn(
                f"the batches ended after {self.steps} of {self.plan.steps} steps, so the learning rate did not "
                f"decay: set steps to the number of batches",
            )
        self._unscale()
        return Training(self.sae, tuple(self.history), self.steps, self.resampled, self.is_interrupted, self.outlying)

    def _run(self, batches: Iterator[Tensor], bar: Any) -> None:
        for x in batches:
            x = self._ordinary(x.to(device=self.device, dtype=torch.float32))
            if not self.steps:
                self._begin(x)
            self._step(x * self.scale)
            bar.update()
            if self.steps % self.plan.log_every == 0:
                self._log()
                bar.set_postfix(loss=f"{self.history[-1].loss:.3g}", l0=f"{self.history[-1].l0:.3g}")
            if self.steps == self.plan.steps:
                return

    def _ordinary(self, x: Tensor) -> Tensor:
        """The rows of a batch that are not outlying."""
        is_out, found = outlying(row_norms(x), self.outliers)
        self.outlying += found
        return x[~is_out] if found.count else x

    @torch.no_grad()
    def _begin(self, x: Tensor) -> None:
        """Scale activations to a mean norm of √d_in, so that hyperparameters are comparable across models."""
        norm = float(x.norm(dim=1).mean())
        if not math.isfinite(norm) or not norm:
            raise HooklineError(f"the mean norm of the activations is {norm}")
        self.scale = self.source.d_in**0.5 / norm
        self.sae.b_dec.copy_(x.mean(0) * self.scale)

    def _step(self, x: Tensor) -> None:
        sae, step = self.sae, self.steps
        features = sae.encode(x)
        mse = (sae.decode(features) - x).pow(2).sum()
        loss = (mse + self.plan.l1_coefficient(step) * features.sum()) / len(x)
        if not bool(loss.isfinite()):
            raise HooklineError(f"the loss is {loss.item()} at step {step}: lower lr, or check the activations")
        self.optimizer.zero_grad()
        loss.backward()
        self._move(step)
        self.steps += 1
        with torch.no_grad():
            self.dead_features.update(features)
            variance = (x - x.mean(0)).pow(2).sum()
            self.sums += torch.stack([loss.detach(), (features > 0).sum() / len(x), mse.detach(), variance]).double()
        if self.plan.resamples(step):
            self.resampled += resample(sae, self.optimizer, self.dead_features, x, self.random)

    @torch.no_grad()
    def _move(self, step: int) -> None:
        """One optimizer step that keeps the norms of the decoder directions at 1."""
        directions = self.sae.W_dec
        if directions.grad is not None:
            along = (directions.grad * directions).sum(1, keepdim=True)
            directions.grad -= along * directions
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(step)
        self.optimizer.step()
        self._normalize()

    def _normalize(self) -> None:
        self.sae.W_dec.copy_(nn.functional.normalize(self.sae.W_dec, dim=1))

    def _log(self) -> None:
        """Record the metrics of the steps since the last record."""
        count = self.steps - (self.history[-1].step if self.history else 0)
        loss, l0, mse, variance = self.sums.tolist()
        explained = 1 - mse / variance if variance else math.nan
        self.history.append(Metrics(self.steps, loss / count, l0 / count, explained, self.dead_features.share()))
        self.sums.zero_()

    @torch.no_grad()
    def _unscale(self) -> None:
        """Fold the scale into the weights: the encoder is homogeneous, so only the biases change."""
        self._normalize()  # Ctrl-C may have interrupted a step
        self.sae.b_enc.div_(self.scale)
        self.sae.b_dec.div_(self.scale)

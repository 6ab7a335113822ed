"""Train sparse autoencoders on activations; the result has the autoencoder and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError, warn
from hookline.progress import progress_bar
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.dead_features import DeadFeatures, resample
from hookline.sae.kinds import KINDS
from hookline.sae.sae_config import SAEConfig, check_count
from hookline.sae.sources import Data, Place, Source, bad_rows, joint_source, placed_batches, source_of
from hookline.sae.training_files import TrainingFile
from hookline.sae.training_plan import L0, L1, K, Metrics, TrainingPlan, checked_levels
from hookline.store import Store
from hookline.text.outliers import Outliers, Outlying, factor_of, outlying, row_norms

KindName: TypeAlias = Literal["l1", "topk", "batchtopk", "matryoshka", "jumprelu", "gated"]


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
        head = [metric.name for metric in fields(Metrics)]
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
    kind: KindName = "l1",
    l1: float | None = None,
    l0: float | None = None,
    k: int | None = None,
    levels: Sequence[int] | None = None,
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
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Training:
    """Train a sparse autoencoder; returns it with its metrics.

        >>> store = hookline.harvest(model, texts, "blocks.2.hook_resid_post", "activations")
        >>> training = hookline.sae.train(store, d_sae=64, kind="topk", k=4, steps=20, progress=False)
        >>> training.sae.save("my_sae")

    The data is a store (or its path), of which `point` selects the activations; a tensor or array [row, d_in]; or an
    iterable of such batches. Each epoch has a new order, until `steps` is reached. Kinds: "l1" is a ReLU autoencoder
    with an L1 penalty of `l1` on the feature activations (for activations scaled to a mean norm of √d_in), and "gated"
    has the penalty on gates; "topk" keeps the `k` largest features, "batchtopk" those of a batch; "matryoshka" is a
    "batchtopk" whose first features reconstruct by themselves, at each of `levels`; "jumprelu" has thresholds and a
    penalty of `l0` on the number of features.

    `warm_up` and `decay` are the fractions of the steps in which the learning rate rises at the start and falls at the
    end; `l1_warm_up` is the fraction in which the penalty rises. Every `resample_every` steps (by default 8 times in
    all, 0 for never), features that were inactive since are resampled: pointed at poorly reconstructed inputs. Decoder
    directions have norm 1. The same seed gives the same autoencoder. Ctrl-C stops the training and returns the
    autoencoder so far.

    With `checkpoint`, a file, the state is written every `checkpoint_every` steps (by default 10 times in all). Called
    again with the same arguments, the training resumes there, and ends with the same bits as without interruption.

    Rows whose norm is over 10 times the median of their batch, such as attention sinks, are left out: they would decide
    the scale, the mean and the loss. `training.outlying` says how many they were. `outliers="include"` trains on all
    rows, and a number takes the place of the 10.

    `device` is where it is trained: by default where a tensor of activations is, and the CPU for a store.
    """
    kind_options = {"l1": l1, "l0": l0, "k": k, "levels": levels}
    schedule = (steps, lr, warm_up, decay, l1_warm_up, resample_every, log_every, seed)
    plan = _plan(kind, d_sae, kind_options, *schedule)
    where = torch.device(device or (data.device if isinstance(data, Tensor) else "cpu"))
    source, file = source_of(data, point, batch_size, seed), _checkpoint(checkpoint, checkpoint_every, steps)
    with torch.inference_mode(False), torch.enable_grad():  # whatever it is called in: training needs gradients
        trainer = Trainer(source, plan, where, outliers, file)
        run = _Run({"": trainer}, lambda number: ({"": x} for x in source.epoch(number)))
        return run.run(progress, repeats=source.repeats)[""]


def train_many(
    data: Store | str | Path,
    points: str | Sequence[str] | None = None,
    *,
    d_sae: int,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    outliers: Outliers = "exclude",
    device: torch.device | str | None = None,
    progress: bool = True,
    **options: Any,
) -> dict[str, Training]:
    """Train an autoencoder at each of several points of a store, in one pass over it; returns them by point.

        trained = hookline.sae.train_many(store, "blocks.*.hook_resid_post", d_sae=1024, kind="batchtopk")
        trained["blocks.2.hook_resid_post"].sae

    Each is the one that `train` gives at that point, with the same options. `checkpoint` is a folder, with a file for
    each point.
    """
    kind_defaults = {"l1": None, "l0": None, "k": None, "levels": None}
    unknown = {*options} - {*kind_defaults, *_SCHEDULE, "kind", "batch_size"}
    if unknown:
        raise HooklineError(f"train_many has no option {', '.join(sorted(unknown))}: it has those of train")
    schedule = _SCHEDULE | {name: options[name] for name in _SCHEDULE if name in options}
    kind_options = {name: options.get(name) for name in kind_defaults}
    plan = _plan(options.get("kind", "l1"), d_sae, kind_options, *schedule.values())
    sources, epoch = joint_source(data, points, options.get("batch_size"), plan.seed)
    trainers = {}
    with torch.inference_mode(False), torch.enable_grad():
        for name, source in sources.items():
            path = None if checkpoint is None else Path(checkpoint) / f"{name}.safetensors"
            file = _checkpoint(path, checkpoint_every, plan.steps)
            trainers[name] = Trainer(source, plan, torch.device(device or "cpu"), outliers, file)
        return _Run(trainers, epoch).run(progress, repeats=True)


_SCHEDULE: dict[str, Any] = {
    **{"steps": 2000, "lr": 1e-3, "warm_up": 0.05, "decay": 0.2, "l1_warm_up": 0.1},
    **{"resample_every": None, "log_every": None, "seed": 0},
}
"""The defaults of `train`."""


def _plan(
    kind: Any,
    d_sae: int,
    kind_options: Mapping[str, Any],
    steps: int,
    lr: float,
    warm_up: float,
    decay: float,
    l1_warm_up: float,
    resample_every: int | None,
    log_every: int | None,
    seed: int,
) -> TrainingPlan:
    if kind not in KINDS:
        raise HooklineError(f"kind must be one of {', '.join(map(repr, KINDS))}, not {kind!r}")
    for name, value in kind_options.items():
        if value is not None and name not in KINDS[kind].options:
            raise HooklineError(
                f'{name} does not apply to kind="{kind}", which has {" and ".join(KINDS[kind].options)}'
            )
    l1, l0, k = (default if kind_options[name] is None else kind_options[name] for name, default in _DEFAULTS)
    for name, count in (("d_sae", d_sae), ("steps", steps), ("k", k)):
        check_count(name, count)
    resampling = max(1, steps // 8) if resample_every is None else resample_every
    logging = log_every or max(1, steps // 50)
    levels: tuple[int, ...] = ()
    if kind == "matryoshka":
        halves = sorted({max(1, d_sae // part) for part in (8, 4, 2, 1)})
        levels = tuple(halves if kind_options["levels"] is None else checked_levels(kind_options["levels"]))
    if "k" in KINDS[kind].options and k > d_sae:
        raise HooklineError(f'kind="{kind}" needs k from 1 to d_sae ({d_sae}), not {k!r}')
    return TrainingPlan(
        kind, d_sae, l1, k, steps, lr, warm_up, decay, l1_warm_up, resampling, logging, seed, l0=l0, levels=levels
    )


_DEFAULTS: tuple[tuple[str, Any], ...] = (("l1", L1), ("l0", L0), ("k", K))


def _checkpoint(path: str | Path | None, every: int | None, steps: int) -> TrainingFile | None:
    if path is None:
        if every is not None:
            raise HooklineError("checkpoint_every needs checkpoint=, the file to write to")
        return None
    check_count("checkpoint_every", 1 if every is None else every)
    return TrainingFile(Path(path), every or max(1, steps // 10))


def config_of_plan(plan: TrainingPlan, source: Source) -> SAEConfig:
    """The config of the autoencoder that a plan trains."""
    architecture = KINDS[plan.kind].architecture
    return SAEConfig(
        architecture=architecture,
        d_in=source.d_in,
        d_sae=plan.d_sae,
        k=plan.k if architecture == "topk" else None,
        reshape_activations="hook_z" if source.is_of_heads else "none",
        hook_name=source.hook_name,
        metadata={"model_name": source.model_name, "trained_by": "hookline", "trained_as": plan.kind},
    )


class Trainer:
    """The training of one autoencoder: its optimizer and its statistics."""

    def __init__(
        self,
        source: Source,
        plan: TrainingPlan,
        device: torch.device,
        outliers: Outliers = "exclude",
        checkpoint: TrainingFile | None = None,
    ) -> None:
        self.source, self.plan, self.device, self.checkpoint = source, plan, torch.device(device), checkpoint
        self.outliers, self.outlying = outliers, Outlying(factor=factor_of(outliers))
        self.kind = KINDS[plan.kind](plan)
        self.sae = SparseAutoencoder(config_of_plan(plan, source), seed=plan.seed).to(device)
        self.kind.begin(self.sae)
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=plan.lr)
        self.random = torch.Generator().manual_seed(plan.seed)
        self.dead_features = DeadFeatures(plan.d_sae, plan.patience, self.device)
        self.history: list[Metrics] = []
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.scale, self.steps, self.resampled = 1.0, 0, 0
        self.place: Place | None = None
        """The last batch that it was trained on."""

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.steps >= self.plan.steps

    def feed(self, batch: Tensor, place: Place) -> None:
        """Train on a batch, unless a checkpoint says that it was; then check that it is the same."""
        batch = self.source.checked(batch)
        if self.place is not None and place <= self.place:
            if place == self.place and self.checkpoint is not None:
                self.checkpoint.check_batch(batch)
            return
        if self.is_done:
            return
        x = self._ordinary(batch.to(device=self.device, dtype=torch.float32))
        if not self.steps:
            self._begin(x)
        self._step(x * self.scale)
        self.place = place
        if self.steps % self.plan.log_every == 0:
            self._log()
        if self.checkpoint is not None and (self.steps % self.checkpoint.every == 0 or self.is_done):
            self.checkpoint.save(self, batch)

    def finished(self, *, is_interrupted: bool) -> Training:
        """The autoencoder for activations as they are, with the metrics."""
        if self.steps > (self.history[-1].step if self.history else 0):
            self._log()
        self._unscale()
        self.sae.requires_grad_(True)
        history = tuple(self.history)
        return Training(self.sae, history, self.steps, self.resampled, is_interrupted, self.outlying)

    def _ordinary(self, x: Tensor) -> Tensor:
        """The rows of a batch that are not outlying."""
        is_out, summary = outlying(row_norms(x), self.outliers)
        self.outlying += summary
        return x[~is_out] if summary.count else x

    @torch.no_grad()
    def _begin(self, x: Tensor) -> None:
        """Scale activations to a mean norm of √d_in, so that hyperparameters are comparable across models."""
        norm = float(x.norm(dim=1).mean())
        if not math.isfinite(norm) or not norm:
            raise HooklineError(f"the mean norm of the activations is {norm}{bad_rows(x)}")
        self.scale = self.source.d_in**0.5 / norm
        self.sae.b_dec.copy_(x.mean(0) * self.scale)

    def _step(self, x: Tensor) -> None:
        sae, step = self.sae, self.steps
        features, mse, total = self.kind.loss(sae, x, step)
        loss = total / len(x)
        if not bool(loss.isfinite()):
            raise HooklineError(f"the loss is {loss.item()} at step {step}{bad_rows(x) or ': lower lr'}")
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
        self.kind.settle(self.sae)
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
        """Fold the scale into the weights: the encoder is homogeneous, so only biases and thresholds change."""
        self._normalize()  # Ctrl-C may have interrupted a step
        for name, parameter in self.sae.named_parameters():
            if parameter.ndim == 1 and name != "r_mag":  # a factor
                parameter.div_(self.scale)


class _Run:
    """Trainers that get the same batches, each at its own point."""

    def __init__(self, trainers: Mapping[str, Trainer], epoch: Callable[[int], Iterable[Mapping[str, Tensor]]]) -> None:
        self.trainers, self.epoch = trainers, epoch

    def run(self, progress: bool, *, repeats: bool) -> dict[str, Training]:
        """Run all steps; Ctrl-C stops early."""
        for trainer in self.trainers.values():
            if trainer.checkpoint is not None:
                trainer.checkpoint.restore(trainer)
        first = next(iter(self.trainers.values()))
        is_interrupted, total = False, first.plan.steps
        with progress_bar(progress, total, " steps") as bar:
            try:
                self._run(repeats, bar)
            except KeyboardInterrupt:
                if not all(trainer.steps for trainer in self.trainers.values()):
                    raise
                is_interrupted = True
        files = [trainer.checkpoint for trainer in self.trainers.values() if trainer.checkpoint is not None]
        for file in files if not is_interrupted else ():
            file.check_seen()
        if not first.is_done and not is_interrupted:
            warn(
                f"the batches ended after {first.steps} of {total} steps, so the learning rate did not "
                f"decay: set steps to the number of batches",
            )
        return {name: trainer.finished(is_interrupted=is_interrupted) for name, trainer in self.trainers.items()}

    def _run(self, repeats: bool, bar: Any) -> None:
        places = [trainer.place for trainer in self.trainers.values()]
        start = min((place for place in places if place is not None), default=None) if None not in places else None
        for place, batch in placed_batches(self.epoch, repeats=repeats, start=start):
            for name, trainer in self.trainers.items():
                trainer.feed(batch[name], place)
            steps = max(trainer.steps for trainer in self.trainers.values())
            bar.update(steps - bar.n)
            last = next(iter(self.trainers.values())).history[-1:]
            if last and last[0].step == steps:
                bar.set_postfix(loss=f"{last[0].loss:.3g}", l0=f"{last[0].l0:.3g}")
            if all(trainer.is_done for trainer in self.trainers.values()):
                return

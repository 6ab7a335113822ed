"""SaeTrainer: hookline's training of autoencoders, on a run of mi-crow's store."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import warn
from hookline.sae import train
from hookline.sae.sae_config import check_count

if TYPE_CHECKING:
    from hookline.compat.mi_crow.mechanistic.sae.modules.topk_sae import TopKSae
    from hookline.compat.mi_crow.store.local_store import LocalStore


@dataclass
class TopKSaeTrainingConfig:
    """How a top-k autoencoder is trained; `batch_size` counts tokens.

    The options after `verbose` do not apply here: training is in float32, and logs nothing. Setting one warns.
    """

    k: int = 10
    epochs: int = 1
    batch_size: int = 1024
    lr: float = 1e-3
    l1_lambda: float = 0.0
    device: str | torch.device = "cpu"
    max_batches_per_epoch: int | None = None
    verbose: bool = False
    dtype: torch.dtype | None = None
    use_amp: bool = True
    amp_dtype: torch.dtype | None = None
    clip_grad: float = 1.0
    monitoring: int = 1
    memory_efficient: bool = False

    def steps(self, rows: int) -> int:
        """The number of training steps on this many rows."""
        for name in ("k", "epochs", "batch_size"):
            check_count(name, getattr(self, name))
        batches = max(1, -(-rows // self.batch_size))
        return self.epochs * min(batches, self.max_batches_per_epoch or batches)


class SaeTrainer:
    """Trains an autoencoder."""

    def __init__(self, sae: TopKSae) -> None:
        self.sae = sae

    def train(
        self,
        store: LocalStore,
        run_id: str,
        layer_signature: str | int,
        config: TopKSaeTrainingConfig | None = None,
        training_run_id: str | None = None,
    ) -> dict[str, Any]:
        """Train on the activations of a run; returns the history, one number per epoch, and the name of the training.

        The lists of the history are also items of the result. `recon_mse` is the fraction of the variance that is not
        explained.
        """
        config = config or TopKSaeTrainingConfig()
        names = [field.name for field in fields(config)]
        for name in names[names.index("verbose") + 1 :]:
            if getattr(config, name) != getattr(TopKSaeTrainingConfig, name):
                warn(f"{name} has no effect here: training is in float32, and logs nothing")
        if config.l1_lambda:
            warn("l1_lambda has no effect on a top-k autoencoder: its sparsity is k")
        about, data = self.sae.context, store.open_run(run_id)
        steps = config.steps(len(data))
        training = train(
            data,
            store.point_of(run_id, layer_signature),
            d_sae=about.n_latents,
            kind="topk",
            k=config.k,
            steps=steps,
            lr=config.lr,
            batch_size=config.batch_size,
            log_every=max(1, steps // config.epochs),
            device=config.device,
            progress=config.verbose,
        )
        self.sae.use(training.sae)
        about.lm_layer_signature, about.device = layer_signature, str(config.device)
        name = training_run_id or f"training_{datetime.now():%Y%m%d_%H%M%S_%f}"
        columns = {"loss": "loss", "r2": "explained_variance", "l0": "l0", "dead_features_pct": "dead"}
        history = {key: [getattr(record, metric) for record in training.history] for key, metric in columns.items()}
        history |= {"recon_mse": [1 - r2 for r2 in history["r2"]], "l1": [0.0] * len(history["loss"])}
        store.put_run_metadata(name, {"trained_on": run_id, "layer": str(layer_signature), "history": history})
        return {"history": history, "training_run_id": name, **history}

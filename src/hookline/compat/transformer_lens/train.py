"""A training loop by TransformerLens's names: next-token loss, Adam or SGD, linear warmup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hookline.compat.transformer_lens._impl.lens_errors import LensValueError
from hookline.errors import HooklineError


@dataclass
class HookedTransformerTrainConfig:
    """Options of `train`; the names and defaults are those of TransformerLens."""

    num_epochs: int
    batch_size: int
    lr: float = 1e-3
    seed: int = 0
    momentum: float = 0.0
    max_grad_norm: float | None = None
    weight_decay: float | None = None
    optimizer_name: str = "Adam"
    device: str | torch.device | None = None
    warmup_steps: int = 0
    save_every: int | None = None
    save_dir: str | None = None
    wandb: bool = False
    wandb_project_name: str | None = None
    print_every: int | None = 50
    max_steps: int | None = None


def _optimizer(config: HookedTransformerTrainConfig, parameters: Any) -> torch.optim.Optimizer:
    if config.optimizer_name == "SGD":
        return torch.optim.SGD(
            parameters, lr=config.lr, weight_decay=config.weight_decay or 0.0, momentum=config.momentum
        )
    if config.optimizer_name not in ("Adam", "AdamW"):
        raise LensValueError(f"optimizer_name must be Adam, AdamW or SGD, not {config.optimizer_name!r}")
    if config.weight_decay is None:
        return torch.optim.Adam(parameters, lr=config.lr)
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)


def train(model: Any, config: HookedTransformerTrainConfig, dataset: Any) -> Any:
    """Train the model on a dataset of `{"tokens": …}` rows, and return it."""
    if config.wandb:
        raise HooklineError("wandb=True is not supported here: log the losses in a loop of your own")
    torch.manual_seed(config.seed)
    model.train()
    if config.device is not None:
        model.to(config.device)
    optimizer = _optimizer(config, model.parameters())
    rate = (lambda step: min(1.0, step / config.warmup_steps)) if config.warmup_steps else (lambda _: 1.0)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for epoch in range(1, config.num_epochs + 1):
        for step, batch in enumerate(DataLoader(dataset, batch_size=config.batch_size, shuffle=True)):
            loss = model(batch["tokens"].to(model.cfg.device), return_type="loss")
            loss.backward()
            if config.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            warm.step()
            optimizer.zero_grad()
            if config.print_every is not None and step % config.print_every == 0:
                print(f"Epoch {epoch} Step {step} Loss {loss.item()}")
            if config.save_every is not None and config.save_dir is not None and step % config.save_every == 0:
                torch.save(model.state_dict(), Path(config.save_dir) / f"model_{step}.pt")
            if config.max_steps is not None and step >= config.max_steps:
                break
    return model

"""Networks that are in training mode where they should not be."""

from __future__ import annotations

from torch import nn

from hookline.errors import warn


def warn_if_changing(root: nn.Module, what: str) -> None:
    """Warn of modules that compute something else in training mode."""
    changing = sorted({type(module).__name__ for module in root.modules() if module.training and _is_changing(module)})
    if changing:
        verb = "computes" if len(changing) == 1 else "compute"
        warn(f"{what} is in training mode, where {', '.join(changing)} {verb} something else: call eval() first")


def _is_changing(module: nn.Module) -> bool:
    return type(module).__name__.startswith(("Dropout", "BatchNorm")) and getattr(module, "p", 1) != 0

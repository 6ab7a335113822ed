"""Models that are sharded over processes: which of them cannot be hooked, and why."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookline.errors import HooklineError

PARALLEL_OPTIONS = ("tp_plan", "tp_size", "distributed_config", "device_mesh")
"""Options of `from_pretrained` that shard a model over processes."""


def refuse_sharded(module: nn.Module) -> None:
    """Raise if each process computes only a part of the values inside the model."""
    how = _parallelism(module)
    if how is not None:
        raise HooklineError(
            f"{type(module).__name__} is sharded over processes ({how}): inside attention, MLPs and experts each "
            "process has only its own part, so points there, weights (W_Q, …) and verify would be wrong. Load it "
            f"without {', '.join(PARALLEL_OPTIONS[:3])}; device_map='auto' spreads a model over devices within one "
            "process. hookline.HookedModule(model) offers native points with the values of this process: the output of "
            "a whole layer is complete, that of a sharded projection is not"
        )
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        raise HooklineError(
            f"nn.DataParallel on {len(module.device_ids)} devices replicates the model for every call without its "
            "hooks: hook the model inside it (model.module), or use DistributedDataParallel"
        )


def _parallelism(module: nn.Module) -> str | None:
    """How a model is sharded: its tensor, pipeline and expert parallelism, or its first DTensor parameter."""
    for each in module.modules():
        config: Any = getattr(vars(each).get("config"), "distributed_config", None)
        sizes = {kind: getattr(config, f"{kind}_size", None) or 1 for kind in ("tp", "pp", "ep")}
        sizes["tp"] = max(sizes["tp"], vars(each).get("_tp_size") or 1)
        split = [f"{kind}_size={size}" for kind, size in sizes.items() if size > 1]
        if split:
            return ", ".join(split)
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    uses_fsdp = any(isinstance(each, FSDPModule) for each in module.modules())  # which gathers parameters before use
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and not (uses_fsdp and parameter.device_mesh.ndim == 1):
            return f"{name} is a DTensor on {parameter.device_mesh}"
    return None

"""Models that are sharded over processes: points with whole activations, or a refusal that says why.

transformers shards a model by a plan of styles (`tp_plan`): the outputs of some layers and the inputs of others are
only this process's part. `prepare_sharded` reads that plan, and tells the engine where to collect the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from hookline.engine import Kind, sharding
from hookline.errors import HooklineError
from hookline.transformer import roles
from hookline.transformer.agreement import Agreement
from hookline.transformer.shard_lenses import Gathered, GatheredHeads, Shards, part_sizes

WHOLE = frozenset({
    *("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "all_reduce", "replicate"),
    *("embedding_rowwise", "embedding_colwise", "moe_tp_experts"),
})  # fmt: skip
"""Styles of layers whose input and output are whole in every process."""
SPLIT = {"colwise": (Kind.OUTPUT, "out_features", 1), "packed_colwise": (Kind.OUTPUT, "out_features", 2)} | {
    "rowwise": (Kind.INPUT, "in_features", 1)
}
"""Styles of layers of which one side is split: which one, the attribute with its whole width, and how many blocks."""
INSIDE = (Kind.QUERY, Kind.KEY, Kind.SCORES, Kind.PATTERN)


def prepare_sharded(module: nn.Module) -> None:
    """Make the points of a tensor-parallel model whole; raise if a model is sharded in any other way."""
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        raise HooklineError(
            f"nn.DataParallel on {len(module.device_ids)} devices replicates the model for every call without its "
            "hooks: hook the model inside it (model.module), or use DistributedDataParallel"
        )
    sharded = next((submodule for submodule in module.modules() if (vars(submodule).get("_tp_size") or 1) > 1), None)
    manager: Any = vars(sharded).get("_mesh_manager") if sharded is not None else None
    how = _other_parallelism(module, is_tensor_parallel=manager is not None)
    if how is not None:
        raise HooklineError(
            f"{type(module).__name__} is sharded over processes ({how}), where points inside a layer have only part of "
            "their values. Tensor parallelism by transformers alone is supported, from version 5.19 on: "
            "distributed_config=DistributedConfig(tp_plan='auto'); device_map='auto' spreads a model over devices "
            "within one process"
        )
    if sharded is not None and module not in sharding.processes:
        group = manager.get_mesh("tp").get_group()
        agreement = Agreement(group)
        _gather(sharded, group)
        sharding.sharing.update(dict.fromkeys((layer for layer, _ in _styles(sharded)), agreement))
        sharding.processes[module] = sharding.processes[sharded] = agreement


sharding.preparations.append(prepare_sharded)


def _other_parallelism(module: nn.Module, *, is_tensor_parallel: bool) -> str | None:
    """How a model is sharded other than by tensor parallelism: its sizes, or its first DTensor parameter."""
    for submodule in module.modules():
        config: Any = getattr(vars(submodule).get("config"), "distributed_config", None)
        kinds = ("pp", "ep", "fsdp") if is_tensor_parallel else ("tp", "pp", "ep")
        sizes = {kind: getattr(config, f"{kind}_size", None) or 1 for kind in kinds}
        if not is_tensor_parallel:
            sizes["tp"] = max(sizes["tp"], vars(submodule).get("_tp_size") or 1)
        split = [f"{kind}_size={size}" for kind, size in sizes.items() if size > 1]
        if split:
            return ", ".join(split)
    if is_tensor_parallel or not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    # FSDP gathers parameters before use.
    uses_fsdp = any(isinstance(submodule, FSDPModule) for submodule in module.modules())
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and not (uses_fsdp and parameter.device_mesh.ndim == 1):
            return f"{name} is a DTensor on {parameter.device_mesh}"
    return None


def _gather(model: nn.Module, group: Any) -> None:
    """Tell the engine which values of the model are parts, by its plan."""
    styles = dict(_styles(model))
    for module, style in styles.items():
        if style in SPLIT:
            kind, width, blocks = SPLIT[style]
            shards = Shards(group, part_sizes(getattr(module, width) // blocks, dist.get_world_size(group)))
            sharding.complete(module, kind, Gathered(shards, -1, blocks))
        elif style not in WHOLE:
            sharding.refuse(
                module, f"on a tensor-parallel model, points of layers of the style {style!r} are not available"
            )
    for parent in model.modules():
        children = [styles.get(child, "") for child in parent.children()]
        if not any(SPLIT.get(style, (None,))[0] is Kind.OUTPUT for style in children):
            continue
        _check_heads(parent, styles, dist.get_world_size(group))
        sharding.refuse_items(
            parent, f"on a tensor-parallel model, {type(parent).__name__} returns it for some heads only"
        )
        for kind in INSIDE:
            sharding.complete(parent, kind, GatheredHeads(group))
        for child in parent.children():
            if child not in styles:
                for submodule in child.modules():
                    sharding.refuse(
                        submodule,
                        f"{type(submodule).__name__} works on the part of an activation that this process has: on a "
                        f"tensor-parallel model its points are not available",
                    )


def check_processes(model: nn.Module, count: int) -> None:
    """Raise if that many processes cannot share the heads of a model that has a tensor-parallel plan."""
    styles = dict(_styles(model))
    for module in model.modules():
        _check_heads(module, styles, count)


def _check_heads(attn: nn.Module, styles: dict[nn.Module, str], count: int) -> None:
    """Raise if the processes would have parts of heads, with which attention fails."""
    size = getattr(attn, "head_dim", None)
    for names in (roles.QUERY, roles.KEY, roles.VALUE):
        width = getattr(layer := roles.child(attn, names), "out_features", 0)
        if not isinstance(size, int) or layer is None or styles.get(layer) != "colwise" or width % size:
            continue
        if any(part % size for part in part_sizes(width, count)):
            raise HooklineError(
                f"{type(attn).__name__} has {width // size} heads of {size} columns in one of its projections, which "
                f"{count} processes cannot share: use a number of processes that divides it"
            )


def _styles(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that the plan of a model names, with their styles."""
    plan = dict(model.tp_plan)  # type: ignore[arg-type]
    for name, module in model.named_modules():
        style = plan.get(_in_plan(name))
        if style is not None:
            yield module, style


def weight_style(name: str, plan: Mapping[str, str]) -> str | None:
    """The style in which a plan splits a parameter: its own, or that of its module."""
    plan_name = _in_plan(name)
    return plan.get(plan_name, plan.get(plan_name.rpartition(".")[0]))


def _in_plan(name: str) -> str:
    """The name of a module or parameter in a plan, where `*` is the number of a layer; as transformers writes it."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)

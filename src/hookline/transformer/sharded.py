"""Models that are sharded over processes: points with whole activations, or a refusal that says why.

transformers shards a model by a plan of styles (`tp_plan`): the outputs of some layers and the inputs of others are
only this process's part. `prepare_sharded` reads that plan, and tells the engine where to collect the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hookline.engine.actions import PointAction
from hookline.engine.order import Kind
from hookline.engine.split_values import before_runs, complete, preparations, refuse
from hookline.errors import HooklineError
from hookline.transformer.shard_lenses import TIMEOUT, Gathered, GatheredHeads, Shards

if TYPE_CHECKING:
    from hookline.engine.actions import Action

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
    sharded = next((each for each in module.modules() if (vars(each).get("_tp_size") or 1) > 1), None)
    manager: Any = vars(sharded).get("_mesh_manager") if sharded is not None else None
    how = _other_parallelism(module, is_tensor_parallel=manager is not None)
    if how is not None:
        raise HooklineError(
            f"{type(module).__name__} is sharded over processes ({how}), where points inside a layer have only part of "
            "their values. Tensor parallelism by transformers alone is supported: "
            "distributed_config=DistributedConfig(tp_plan='auto'); device_map='auto' spreads a model over devices "
            "within one process"
        )
    if sharded is not None and module not in before_runs:
        _gather(sharded, manager.get_mesh("tp").get_group())
        before_runs[module] = before_runs[sharded] = Agreement(manager.get_mesh("tp").get_group())


preparations.append(prepare_sharded)


def _other_parallelism(module: nn.Module, *, is_tensor_parallel: bool) -> str | None:
    """How a model is sharded other than by tensor parallelism: its sizes, or its first DTensor parameter."""
    for each in module.modules():
        config: Any = getattr(vars(each).get("config"), "distributed_config", None)
        kinds = ("pp", "ep", "fsdp") if is_tensor_parallel else ("tp", "pp", "ep")
        sizes = {kind: getattr(config, f"{kind}_size", None) or 1 for kind in kinds}
        if not is_tensor_parallel:
            sizes["tp"] = max(sizes["tp"], vars(each).get("_tp_size") or 1)
        split = [f"{kind}_size={size}" for kind, size in sizes.items() if size > 1]
        if split:
            return ", ".join(split)
    if is_tensor_parallel or not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    uses_fsdp = any(isinstance(each, FSDPModule) for each in module.modules())  # which gathers parameters before use
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
            complete(module, kind, Gathered(Shards(group, _sizes(getattr(module, width) // blocks, group)), -1, blocks))
        elif style not in WHOLE:
            refuse(module, f"on a tensor-parallel model, points of layers of the style {style!r} are not available")
    for parent in model.modules():
        children = [styles.get(child, "") for child in parent.children()]
        if not any(SPLIT.get(style, (None,))[0] is Kind.OUTPUT for style in children):
            continue
        for kind in INSIDE:
            complete(parent, kind, GatheredHeads(group))
        for child in parent.children():
            if child not in styles:
                for each in child.modules():
                    refuse(
                        each,
                        f"{type(each).__name__} works on the part of an activation that this process has: on a "
                        f"tensor-parallel model its points are not available",
                    )


def _styles(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that the plan of a model names, with their styles; found as transformers finds them."""
    from transformers.distributed.tensor_parallel import _get_parameter_plan

    plan = dict(model.tp_plan)  # type: ignore[arg-type]
    for name, module in model.named_modules():
        style = _get_parameter_plan(name, plan, is_weight=False)
        if style is not None:
            yield module, style


def _sizes(width: int, group: Any) -> tuple[int, ...]:
    """The widths of the parts of all processes; the last ones may be shorter, or empty."""
    count = dist.get_world_size(group)
    sizes = [len(part) for part in torch.arange(width).chunk(count)]
    return (*sizes, *[0] * (count - len(sizes)))


class Agreement:
    """Before each run: all processes must hook the same points, as each takes part in collecting their values."""

    def __init__(self, group: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._ranks = ranks
        self._group = dist.new_group(ranks, backend="gloo", timeout=TIMEOUT, use_local_synchronization=True)

    def __call__(self, actions: Sequence[Action]) -> None:
        """Raise if the hooks of another process differ, or if it does not come within a minute."""
        here = [each for each in actions if isinstance(each, PointAction)]
        mine = [f"{each.point.name} ({type(each).__name__}, {each.dir})" for each in here]
        summary = sha256("\n".join(mine).encode()).hexdigest()
        for rank, (other, some) in zip(self._ranks, self.told((summary, mine[:10])), strict=True):
            if other != summary:
                theirs, ours = (", ".join(names) or "nothing" for names in (some, mine[:10]))
                raise HooklineError(
                    f"process {rank} hooks {theirs}, and this one {ours}: on a sharded model every process must run "
                    "the same hooks in the same order"
                )

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self._ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first process."""
        return dist.get_rank() == self._ranks[0]

    def told(self, value: Any) -> list[Any]:
        """The values of all processes; raises if one does not come within a minute."""
        found: list[Any] = [None] * len(self._ranks)
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise HooklineError(
                f"another process did not begin the same run within {TIMEOUT.seconds} s: on a sharded model every "
                "process must run the same hooks in the same order"
            ) from error
        return found

"""What a run of a model needs in memory, known before it runs and before its weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import Plan, pass_without_data
from hookline.errors import HooklineError, how_many, shown_bytes
from hookline.transformer.memory.halving import free_bytes
from hookline.transformer.sharded import check_processes, weight_style

_ROW = 16
"""Bytes of a row of a store beside its activations: the numbers of its example, position and token."""
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""The layers whose output has the keys."""


@dataclass(frozen=True)
class Memory:
    """The memory of a run in bytes, of each device if there are several; printed as a table."""

    weights: int
    """Parameters and buffers."""
    loaded: int
    """How much of the weights is in memory already."""
    kv_cache: int
    """Keys and values, and the states of other mixers, at the end of the run."""
    forward: int
    """The most that is alive at once besides: activations between layers, logits, masks."""
    points: int
    """The activations that are cached."""
    store: int | None
    """The size of a store with the points of all texts."""
    available: int
    """What is free now."""
    device: str
    devices: int = 1
    what: str = ""
    """The run, in words."""

    @property
    def total(self) -> int:
        """All that is in memory at the peak."""
        return self.weights + self.kv_cache + self.forward + self.points

    @property
    def fits(self) -> bool:
        """Whether what is not in memory yet fits into what is free."""
        return self.total - self.loaded <= self.available

    def to_json(self) -> dict[str, Any]:
        """The numbers, and whether it fits."""
        return {**asdict(self), "total": self.total, "fits": self.fits}

    def __str__(self) -> str:
        lines = [
            ("weights", self.weights, "in memory already" if 2 * self.loaded > self.weights else ""),
            ("keys and values", self.kv_cache, ""),
            ("forward", self.forward, "peak of everything else in the forward pass; kernels may need more"),
            ("points", self.points, "cached activations"),
            ("total", self.total, f"on each of {self.devices} devices" if self.devices > 1 else ""),
            ("free", self.available, f"{self.device}: it {'fits' if self.fits else 'does not fit'}"),
        ]
        lines += [("store", self.store, "on disk")] if self.store is not None else []
        rows = [f"{name:<16}{shown_bytes(size or 0):>10}  {note}".rstrip() for name, size, note in lines]
        return "\n".join([self.what, *rows])


def check_counts(**counts: Any) -> None:
    """Raise unless all are numbers of things, 0 or more."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise HooklineError(f"{name}= is an integer, 0 or more, not {count!r:.60}")


def run_memory(
    root: nn.Module, plan: Plan, inputs: Mapping[str, Any], *, new_tokens: int = 0, texts: int = 0, devices: int = 1
) -> Memory:
    """The memory of a run with these inputs, whose cached points are those of the plan.

    `new_tokens` are generated after the inputs, a store is made of `texts` such inputs, and a model that transformers
    can split is on several `devices`. Weights, keys and values, and points are exact.
    """
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise HooklineError("the memory is known of inputs with input_ids, [batch, position]")
    batch, length = tokens.shape
    try:
        peak, output = pass_without_data(root, dict(inputs))
        cached = kv_bytes(output)
        longer = tokens.new_zeros(batch, length + new_tokens - 1) if new_tokens > 1 else None
        kv_cache = cached if longer is None else kv_bytes(pass_without_data(root, {"input_ids": longer})[1])
    except HooklineError:
        raise
    except Exception as error:  # whatever the model does that needs data
        why = str(error).strip().partition("\n")[0]
        raise HooklineError(
            f"the memory of this model is not known without running it ({type(error).__name__}: {why})"
        ) from error
    device, free = _free_here(root)
    style = split_styles(root) if devices > 1 else {}
    if style:
        check_processes(root, devices)
    stored = sum(row.nbytes for row in plan if row.use == "cache") // (batch * length) + _ROW
    return Memory(
        weights=weight_bytes(root, devices, style),
        loaded=weight_bytes(root, devices, style, is_loaded=True),
        kv_cache=kv_cache // devices if _splits_keys(style) else kv_cache,
        forward=max(0, peak - cached),
        points=plan.nbytes,
        store=texts * length * stored if texts else None,
        available=free,
        device=device,
        devices=devices,
        what=f"{type(root).__name__}, {next(root.parameters()).dtype}: {how_many(batch, 'text')} of "
        f"{how_many(length, 'token')}"
        + (f" and {how_many(new_tokens, 'new token')}" if new_tokens else "")
        + f", {how_many(len(plan), 'point')}",
    )


def kv_bytes(output: Any) -> int:
    """The bytes of the tensors in the key-value cache of an output; 0 if there is none."""
    caches = (getattr(output, name, None) for name in ("past_key_values", "cache_params"))
    cache = next((candidate for candidate in caches if candidate is not None), None)
    seen: dict[int, int] = {}
    waiting: list[Any] = [cache, *getattr(cache, "layers", ())]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            seen[id(value)] = value.nbytes
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            waiting += [x for x in vars(value).values() if isinstance(x, Tensor | list | tuple | dict)]
    return sum(seen.values())


def weight_bytes(
    root: nn.Module, devices: int = 1, styles: Mapping[str, str] | None = None, *, is_loaded: bool = False
) -> int:
    """The bytes of all parameters and buffers on the first of several devices; or of those that are in memory."""
    total = sum(x.nbytes for x in root.buffers() if not (is_loaded and x.is_meta))
    for name, parameter in root.named_parameters():
        if not (is_loaded and parameter.is_meta):
            total += _share(parameter, (styles or {}).get(name, ""), devices)
    return total


def split_styles(root: nn.Module) -> dict[str, str]:
    """How transformers' plan splits each parameter over devices; raises if the model has no plan."""
    plan = dict(getattr(root, "tp_plan", None) or {})
    if not plan:
        raise HooklineError(f"{type(root).__name__} has no tensor-parallel plan in transformers: leave out devices")
    styles = {name: weight_style(name, plan) for name, _ in root.named_parameters()}
    return {name: style for name, style in styles.items() if style is not None}


def _share(parameter: nn.Parameter, style: str, devices: int) -> int:
    """The bytes of a parameter on the first device, by the style in which it is split."""
    is_by_row = style.endswith("rowwise") and not style.startswith("embedding")
    columns = "colwise" in style and not style.startswith("embedding")
    if parameter.ndim == 1:
        axis = 0 if columns else None
    elif columns or style == "embedding_rowwise":
        axis = -2
    else:
        axis = -1 if is_by_row or style == "embedding_colwise" or style.startswith("rowwise") else None
    if axis is None:
        return parameter.nbytes
    return parameter.nbytes // parameter.shape[axis] * -(-parameter.shape[axis] // devices)


def _splits_keys(styles: Mapping[str, str]) -> bool:
    return any(name.rsplit(".", 2)[-2] in _KEYS and style == "colwise" for name, style in styles.items())


def _free_here(root: nn.Module) -> tuple[str, int]:
    """The device that the model is on, or would be loaded to, and its free memory."""
    device = next(root.parameters()).device
    if device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available()):
        device = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        return torch.cuda.get_device_name(device), free_bytes(device)
    try:
        with open("/proc/meminfo") as file:
            return "CPU", next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return "CPU", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

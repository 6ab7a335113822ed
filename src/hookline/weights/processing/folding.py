"""Fold the weight and bias of norms into the linear modules that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.transformer.norms import Norm, norm_of
from hookline.transformer.precision import upcast
from hookline.transformer.roles import EXPERTS, ROUTER, child
from hookline.weights.matrices import is_reversed, linear
from hookline.weights.processing.readers import path_of, reading_of
from hookline.weights.processing.swaps import Swaps

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints

_INTO_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "v1")


def fold_norms(points: ModelPoints, swaps: Swaps, run: Callable[[], Any]) -> None:
    """Fold every norm before attention, an MLP or the unembedding into the modules that read it."""
    anatomy = points.anatomy
    if any(stack.is_post_norm for stack in anatomy.stacks):
        raise HooklineError(f"{anatomy.kind} normalizes the stream itself, so its norms cannot be folded")
    norms = dict(_norms(points))
    reading = reading_of(points.root, norms, run)
    for stack in anatomy.stacks:
        for block in stack.blocks:
            check_called(points.root, block.module, reading.called, anatomy.width)
    mixtures = [block.mlp or block.mixer for stack in anatomy.stacks for block in stack.blocks]
    experts = {child(mixture, names) for mixture in mixtures if mixture is not None for names in (ROUTER, EXPERTS)}
    for module, norm in norms.items():
        _check_readers(points.root, module, reading.readers[module])
        for reader in reading.readers[module]:
            if reader in experts and not isinstance(reader, nn.Linear):
                _fold_into_experts(points.root, reader, norm, swaps)
            else:
                fold_into_linear(points.root, reader, norm, swaps)
        make_neutral(norm, swaps)


def make_neutral(norm: Norm, swaps: Swaps) -> None:
    """Set the weight and bias of a norm so that they have no effect."""
    for name, value in (("weight", 1.0 - norm.offset), ("bias", 0.0)):
        if (parameter := norm.module._parameters.get(name)) is not None:
            swaps.put(norm.module, name, torch.full_like(parameter, value))


def _norms(points: ModelPoints) -> Iterator[tuple[nn.Module, Norm]]:
    """The norms that are read by other modules and have a weight or a bias."""
    for stack in points.anatomy.stacks:
        norms = [norm for block in stack.blocks for norm in (block.ln1, block.ln2)]
        norms += [block.cross.norm for block in stack.blocks if block.cross is not None]
        is_read = stack is not points.anatomy.main or points.anatomy.unembed is not None
        for module in [*norms, stack.ln_final if is_read else None]:
            if module is None or all(parameter is None for parameter in module._parameters.values()):
                continue
            norm = norm_of(module, points.anatomy.width)
            if norm is None or not {*module._parameters} <= {"weight", "bias"} or [*module.children()]:
                raise HooklineError(f"{path_of(points.root, module)} is not a norm of a known form")
            yield module, norm


def _check_readers(root: nn.Module, norm: nn.Module, readers: list[nn.Module]) -> None:
    if not readers:
        raise HooklineError(f"no module with weights reads the output of {path_of(root, norm)} (quantized?)")
    for reader in readers:
        parents = path_of(root, reader).split(".")
        if any("base_layer" in root.get_submodule(".".join(parents[:n]))._modules for n in range(len(parents))):
            raise HooklineError(f"{'.'.join(parents)} is part of an adapter: merge it first, or pass fold_ln=False")


def check_called(root: nn.Module, within: nn.Module, called: frozenset[nn.Module], width: int | None = None) -> None:
    """Raise if a linear module was not called on the example: it might read a norm on other inputs."""
    for module in within.modules():
        into = getattr(module, "in_features", getattr(module, "nx", None))
        has_weight = module._parameters.get("weight") is not None
        if has_weight and into is not None and module not in called and width in (None, into):
            raise HooklineError(f"{path_of(root, module)} was not called on the example, so its input is not known")


def fold_into_linear(root: nn.Module, reader: nn.Module, norm: Norm, swaps: Swaps) -> None:
    """Multiply the weight of a norm into a linear module that reads it, and add its bias there."""
    try:
        matrix, bias = linear(reader)
    except HooklineError as error:
        raise HooklineError(f"{path_of(root, reader)} reads {path_of(root, norm.module)}: {error}") from error
    wide = upcast(matrix)
    new = as_wide(norm.gain, wide)[..., None] * wide
    if norm.subtracts_mean:  # its output has a mean of 0, so the mean of each column has no effect
        new = new - new.mean(0, keepdim=True)
    swaps.put(reader, "weight", new if is_reversed(reader) else new.T)
    if isinstance(norm.bias, Tensor):
        added = as_wide(norm.bias, wide) @ wide
        swaps.put(reader, "bias", added if bias is None else added + bias)


def _fold_into_experts(root: nn.Module, reader: nn.Module, norm: Norm, swaps: Swaps) -> None:
    """Fold a norm into a router, or into all experts at once, whose weights are one tensor."""
    if isinstance(norm.bias, Tensor) and bool(norm.bias.any()):
        raise HooklineError(f"{path_of(root, norm.module)} has a bias, and {path_of(root, reader)} has none to take it")
    weights = {name: parameter for name, parameter in reader._parameters.items() if parameter is not None}
    names = [name for name in weights if name in _INTO_EXPERTS] or (["weight"] if "weight" in weights else [])
    if not names:
        raise HooklineError(f"{path_of(root, reader)} has no known input projection among {list(weights)}")
    for name in names:
        if type(weights[name]) is not nn.Parameter or weights[name].is_meta:
            raise HooklineError(f"{name} of {path_of(root, reader)} is quantized or offloaded")
        wide = weights[name].float()
        gain = as_wide(norm.gain, wide)
        is_transposed = wide.ndim == 3 and (getattr(reader, "is_transposed", False) or wide.shape[-1] != len(gain))
        swaps.put(reader, name, wide * (gain[:, None] if is_transposed else gain))


def as_wide(x: Tensor | float, like: Tensor) -> Tensor:
    """A number or tensor with the dtype and device of another."""
    return torch.as_tensor(x, device=like.device, dtype=like.dtype).detach()

"""The weights of a model on the meta device, of which one part at a time is in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.loading import load
from hookline.model import HookedModel
from hookline.store.identity import tensor_checksum
from hookline.transformer.empty import Checkpoint, adopt, checkpoint_of, load_weights, targets_of

EMBED, HEAD, REST = "embeddings", "unembedding", "other parts"
"""The parts of a model beside its layers, which are numbered from 0."""

Part = Hashable


class LayerWeights:
    """The parts of a model without weights: its embeddings, each layer, its unembedding, and the rest.

    `holding(part, …)` is a context in which these are in memory. Tied weights are read once and stay tied, and a weight
    that several layers share belongs to each of them.
    """

    def __init__(self, model: HookedModel, device: torch.device) -> None:
        self._module, self._device = model.module, device
        self._checkpoint = _checkpoint_of(model)
        if self._checkpoint.loading.hf_quantizer is not None:
            raise HooklineError("by_layer=True does not read quantized weights: harvest without it")
        self._stamp = self.stamp
        self._empty = dict(_named(self._module))
        self._aliases: dict[int, list[str]] = {}
        for name, x in self._empty.items():
            self._aliases.setdefault(id(x), []).append(name)
        self._names = self._names_by_part(model)
        for part in self._module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    part._buffers[name] = buffer.to(device)

    def _names_by_part(self, model: HookedModel) -> dict[Part, set[str]]:
        """The names of the tensors of each part."""
        anatomy = model.anatomy
        modules: list[tuple[Part, nn.Module | None]] = [(EMBED, anatomy.main.embed), (HEAD, anatomy.unembed)]
        modules += [(index, block.module) for index, block in enumerate(anatomy.blocks)]
        names_by_part: dict[Part, set[str]] = {
            part: {name for _, x in _named(module) for name in self._aliases[id(x)]} if module is not None else set()
            for part, module in modules
        }
        return names_by_part | {REST: {*self._empty} - set[str]().union(*names_by_part.values())}

    @cached_property
    def _files(self) -> dict[Part, dict[str, str]]:
        """The tensors in the files that each part is made of, with their files."""
        files = self._checkpoint.keys()
        targets = targets_of(self._module, self._checkpoint, files)
        return {
            part: {key: file for key, file in files.items() if targets[key] in names}
            for part, names in self._names.items()
        }

    @property
    def stamp(self) -> str:
        """Changes if a file of the weights is written again."""
        stats = [
            (Path(file).name, (stat := Path(file).stat()).st_size, stat.st_mtime_ns) for file in self._checkpoint.files
        ]
        return hashlib.blake2b(repr(stats).encode(), digest_size=16).hexdigest()

    def check_unchanged(self) -> None:
        """Raise if the files of the weights are not those of the start."""
        if self.stamp != self._stamp:
            raise HooklineError(
                f"the files of the weights changed during the harvest: {self._checkpoint.files[0]}, … The layers so "
                f"far have the earlier weights: harvest again into another store"
            )

    def nbytes(self, *parts: Part) -> int:
        """The size of these parts in memory."""
        names = set[str]().union(*(self._names[part] for part in parts))
        return sum(x.nbytes for x in {id(self._empty[name]): self._empty[name] for name in names}.values())

    @contextmanager
    def holding(self, *parts: Part) -> Iterator[None]:
        """A context in which these parts are on the device; afterwards they are on the meta device again."""
        try:
            self._load(parts)
            yield
        finally:
            for part in parts:
                for name in self._names[part]:
                    _put(self._module, name, self._empty[name])

    def _load(self, parts: tuple[Part, ...]) -> None:
        files = {key: file for part in parts for key, file in self._files[part].items()}
        if files:
            load_weights(self._module, self._checkpoint, files, self._device)
        tensors = dict(_named(self._module))
        for part in parts:
            for name in self._names[part]:
                others = self._aliases[id(self._empty[name])]
                real = next((tensors[alias] for alias in others if not tensors[alias].is_meta), None)
                if real is None:
                    raise HooklineError(f"{name} is not in the files of the model: {self._checkpoint.files[0]}, …")
                for alias in others:
                    _put(self._module, alias, real)

    def digest(self) -> str:
        """The checksum of all weights that `weights_digest` computes of a model in memory; reads each file once."""
        sums: dict[str, str] = {}
        for part in self._names:
            with self.holding(part):
                sums |= {name: tensor_checksum(x) for name, x in self._tensors() if not x.is_meta and name not in sums}
        checksum = hashlib.blake2b(digest_size=16)
        for name, _ in self._tensors():
            checksum.update(f"{name} {sums[name]}".encode())
        return checksum.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return chain(self._module.named_parameters(), self._module.named_buffers())


def layers_device(by_layer: Any) -> torch.device:
    """The device that the layers run on: `by_layer`, or the CPU if it is True."""
    try:
        device = torch.device("cpu" if by_layer is True else by_layer)
        if torch.zeros(1, device=device).is_meta:
            raise ValueError("there are no weights on the meta device")
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise HooklineError(
            f"by_layer={by_layer!r} is not a device that layers can run on: {why}. Pass True for the CPU, or a device "
            f"such as 'cuda'"
        ) from error
    return device


def _checkpoint_of(model: HookedModel) -> Checkpoint:
    """The files of a model on the meta device, which it knows itself or which its config names."""
    module = model.module
    real = next((name for name, x in module.named_parameters() if not x.is_meta), None)
    if real is not None:
        raise HooklineError(
            f"by_layer=True is for a model whose weights are not in memory, but {real} is on {model.device}: pass the "
            f"model's folder, or hookline.load(folder, device='meta')"
        )
    checkpoint = checkpoint_of(module)
    if checkpoint is not None:
        return checkpoint
    folder: Any = getattr(module.config, "name_or_path", "")
    if not folder:
        raise HooklineError(
            "by_layer=True needs the folder of the weights, and this model's config does not name one: pass the "
            "folder instead of the model, or hookline.load(folder, device='meta')"
        )
    return adopt(module, load(folder, device="meta").module)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and saved buffers, also those with several names."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _put(module: nn.Module, name: str, x: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    part = module.get_submodule(path)
    named: Any = part._parameters if leaf in part._parameters else part._buffers
    named[leaf] = x

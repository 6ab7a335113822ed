"""Readers: the modules that read the output of a norm, found by comparing memory addresses during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookline.engine import undo
from hookline.errors import HooklineError
from hookline.values.structures import tensors_in


@dataclass(frozen=True)
class Reading:
    """The modules that a run of the model called, and the readers of each norm."""

    readers: dict[nn.Module, list[nn.Module]]
    """For each norm, the innermost modules with weights that take its output."""
    called: frozenset[nn.Module]
    """All modules with weights that were called."""


def reading_of(root: nn.Module, norms: Iterable[nn.Module], run: Callable[[], Any]) -> Reading:
    """The readers of norms in a run of the model.

    Raises if a reader takes another input in another call: folding a norm into it would change that call too.
    """
    outputs: dict[int, nn.Module] = {}
    live_outputs: list[Tensor] = []  # so that no other tensor takes their memory
    read: dict[nn.Module, set[nn.Module | None]] = {}

    def after_norm(norm: nn.Module, _args: Any, output: Any) -> None:
        live_outputs.append(output)
        outputs[_memory(output)] = norm

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        sources = {outputs.get(_memory(x)) for x in tensors_in((args, kwargs)) if x.is_floating_point()}
        read.setdefault(module, set()).update({norm for norm in sources if norm is not None} or {None})

    with_weights = [module for module in root.modules() if any(p is not None for p in module._parameters.values())]
    with undo.TorchHooks(
        before=[(module, before) for module in with_weights], after=[(norm, after_norm) for norm in norms]
    ):
        run()
    readers = {norm: _innermost(norm, read) for norm in norms}
    for norm, modules in readers.items():
        for module in modules:
            if read[module] != {norm}:
                raise HooklineError(f"{path_of(root, module)} reads {path_of(root, norm)}, but not in every call")
    return Reading(readers, frozenset(read))


def _innermost(norm: nn.Module, read: dict[nn.Module, set[nn.Module | None]]) -> list[nn.Module]:
    readers = [module for module, sources in read.items() if norm in sources]
    return [module for module in readers if not any(submodule in readers for submodule in [*module.modules()][1:])]


def path_of(root: nn.Module, module: nn.Module) -> str:
    """The path of a module in a model, for error messages."""
    return next((path for path, submodule in root.named_modules() if submodule is module), type(module).__name__)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata

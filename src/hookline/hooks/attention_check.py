"""The attention of any module: which modules compute it, and whether their points read and change what they should."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hookline.engine import attention
from hookline.errors import HooklineError, NeverFiredWarning
from hookline.functions.signatures import is_called
from hookline.pages.text_tables import table

if TYPE_CHECKING:
    from hookline.hooks.hooked_module import HookedModule

_CLOSE = 1e-4
"""How far outputs may be apart, relative to their largest value: separate steps round otherwise than a fused kernel."""


@dataclass(frozen=True, repr=False)
class AttentionReport:
    """The modules that compute attention, with the shape of their pattern, and what failed. Prints as a table."""

    patterns: Mapping[str, list[int]]
    """The shape of the pattern of each module, by its path."""
    problems: tuple[str, ...] = ()

    @property
    def points(self) -> list[str]:
        """The names of all points inside attention."""
        return [_point(path, name) for path in self.patterns for name in attention.NAMES]

    @property
    def is_sound(self) -> bool:
        """Whether every check passed."""
        return not self.problems

    def __repr__(self) -> str:
        if not self.patterns:
            return "no module computes attention by torch functions"
        rows = [["module", "pattern"], *([path or "(the module)", str(shape)] for path, shape in self.patterns.items())]
        end = "\n".join(self.problems) or f"{len(self.points)} points checked: all of them hold"
        return f"{table(rows)}\n{end}"


def _point(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@torch.no_grad()
def check_attention(net: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionReport:
    """Find the modules that compute attention on an input, and check their points.

    Reading changes nothing; the pattern is the softmax of the scores; a value that is replaced by itself changes
    nothing, and another value at any of the points changes the output.
    """
    if any(part.training for part in net.module.modules()):
        raise HooklineError("the module is in training mode, and may be random: call eval() first")
    check = _Check(net, args, kwargs)
    patterns = {path: list(shape) for path, shape in check.found().items()}
    return AttentionReport(patterns, tuple(problem for path in patterns for problem in check.problems(path)))


class _Check:
    """The checks of one module on one input."""

    def __init__(self, net: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.net, self.args, self.kwargs = net, args, kwargs
        self.plain = self._run([])

    def found(self) -> dict[str, torch.Size]:
        """The modules inside which a pattern is computed, with its shape."""
        shapes: dict[str, torch.Size] = {}
        hooks = []
        for path, module in self.net.index._modules.items():
            if is_called(module) and not isinstance(module, torch.jit.ScriptModule):
                hooks.append((self._name(path, "pattern"), _noting(shapes, path)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NeverFiredWarning)
            self._run(hooks)
        return {path: shapes[path] for path in self.net.index._modules if path in shapes}

    def problems(self, path: str) -> list[str]:
        """What does not hold of the points of a module."""
        values: dict[str, list[Tensor]] = {name: [] for name in attention.NAMES}
        reads = [(self._name(path, name), _keeping(values[name])) for name in attention.NAMES]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NeverFiredWarning)
            wrong = [] if self._is_close(self._run(reads)) else ["reading changes the output"]
        if not values["pattern"]:
            return [f"{path}: its points do not fire when only they are hooked; a hook there says why"]
        counts = {name: len(tensors) for name, tensors in values.items()}
        if len({*counts.values()}) != 1:
            return [f"{path}: the points fire differently often, {counts}: add the number of a call to a name (#1)"]
        for scores, pattern in zip(values["scores"], values["pattern"], strict=True):
            expected = scores.double().softmax(-1)
            hidden = scores.eq(-torch.inf).all(-1, keepdim=True)
            if not torch.allclose(expected.masked_fill(hidden, 0.0), pattern.double(), atol=1e-3):
                wrong.append("the pattern is not the softmax of the scores")
        for name in attention.NAMES:
            point = self._name(path, name)
            if len(values[name]) > 1:  # an edit of one of several
                point += "#0"
            if not self._is_close(self._run([(point, lambda x: x.clone())])):
                wrong.append(f"{name}: replaced by itself, the output changes")
            changed = self._run([(point, _other)])
            if values["pattern"][0].shape[-1] > 1 and self._is_close(changed, 0.0):
                wrong.append(f"{name}: with another value, the output is the same")
        return [f"{path}: {problem}" for problem in wrong]

    def _name(self, path: str, name: str) -> str:
        taken = _point(path, name) in self.net.index._modules
        return f"{path}:{name}" if taken else _point(path, name)

    def _run(self, hooks: list[tuple[str, Callable[[Tensor], Any]]]) -> list[Tensor]:
        with self.net.hooks(fwd_hooks=hooks):
            output = self.net(*self.args, **self.kwargs)
        return [x.clone() for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]

    def _is_close(self, output: list[Tensor], within: float = _CLOSE) -> bool:
        pairs = zip(self.plain, output, strict=True)
        return all(float((a - b).abs().max()) <= within * float(a.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _noting(shapes: dict[str, torch.Size], path: str) -> Callable[[Tensor], None]:
    def note(pattern: Tensor) -> None:
        shapes.setdefault(path, pattern.shape)

    return note


def _keeping(values: list[Tensor]) -> Callable[[Tensor], None]:
    def keep(x: Tensor) -> None:
        values.append(x.clone())

    return keep


def _other(x: Tensor) -> Tensor:
    """Another value: reversed along the keys, or the positions, and larger."""
    return x.flip(-1) * 1.5

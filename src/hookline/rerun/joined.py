"""Joined forward pass: each variant of a run joins the batch at the first layer where it differs.

The model's own forward starts with one text. At a layer, its stream is replaced by the streams of all variants that
start there, and at later layers more rows are added. So the weights are read once for all variants, and no variant runs
through a layer where it equals the baseline.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline.engine import Action, HookPoint, Kind, Run, Site, Skipping, Turn
from hookline.rerun.changes import RowChange, write_all
from hookline.rerun.image_inputs import in_one_row
from hookline.transformer.resume import pass_through
from hookline.types import ModuleCall

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints


class JoinRows(Action):
    """Adds rows at the input of a layer, or the output of the last; the first rows replace what was there."""

    def __init__(self, site: Site, rows: Tensor, *, is_first: bool) -> None:
        super().__init__()
        self.module, self.tap, self.lens = site.module, site.tap, site.lens
        self.turn = Turn.ENTER if site.kind is Kind.INPUT else Turn.LEAVE  # before all else of a layer, or after it
        self.rows, self.is_first = rows, is_first

    def __call__(self, value: Any) -> Any:
        """Return the value with more rows."""
        rows = self.rows if self.is_first else torch.cat([self.lens.get(value), self.rows])
        return self.lens.put(value, rows)


@dataclass(frozen=True)
class JoinedRun:
    """Rows that join at layers, with changes to single rows at points on the way."""

    points: ModelPoints
    joins: Mapping[int, Tensor]
    changes: Mapping[str, list[RowChange]]
    span: range
    """The positions that run."""
    inputs: dict[str, Any]
    read: list[int]
    """The positions, counted from the start of `span`, that need to be correct."""
    skipped: Mapping[nn.Module, ModuleCall]
    """Modules that are not run: their output is known."""

    @property
    def first(self) -> int:
        """The first layer that runs; the number of layers if none."""
        return min(self.joins)

    def site(self, layer: int) -> Site:
        """Where rows join: the input of a layer, or the output of the last."""
        points, n_layers = self.points, len(self.points.anatomy.blocks)
        if layer == n_layers:
            return points.find(f"{points.layer(layer - 1)}.hook_resid_post").site
        return points.find(f"{points.layer(layer)}.hook_resid_pre").site

    @property
    def narrowed(self) -> nn.Module | None:
        """The last MLP, if it has to run at the positions that are read only."""
        if len(self.read) == len(self.span) or _is_looked_into(self.points, self.changes):
            return None
        return self.points.anatomy.blocks[-1].mlp

    def output(self) -> Any:
        """The model's output."""
        points, anatomy, first = self.points, self.points.anatomy, self.first
        actions: list[Action] = [
            JoinRows(self.site(layer), rows, is_first=layer == first) for layer, rows in self.joins.items()
        ]
        actions += [change_action(points.find(name), placed, self.span) for name, placed in self.changes.items()]
        skipped = {**self.skipped, **dict.fromkeys(points.blocks()[:first], pass_through(anatomy))}
        if (mlp := self.narrowed) is not None:
            skipped[mlp] = _only_at(mlp, self.read)
        skipped |= dict.fromkeys(_activations(points.root), _fused)
        if first == len(anatomy.blocks):  # the rows replace the output of the last layer
            last = anatomy.blocks[-1].module
            actions = [action for action in actions if not isinstance(action, JoinRows)]
            skipped[last] = lambda _args, _kwargs: pass_through(anatomy, self.joins[first])((), {})
        run = Run(points.root, actions, is_one_pass=True)
        with Skipping(points.root, skipped), run:
            return run.call(self.inputs)


def _activations(root: nn.Module) -> list[nn.Module]:
    """The modules that compute GPT-2's GELU in eight elementwise operations: torch has a fused one."""
    if root not in _known:
        _known[root] = [module for module in root.modules() if type(module).__name__ == "NewGELUActivation"]
    return _known[root]


_known: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


def _fused(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    return F.gelu(args[0], approximate="tanh")


def _is_looked_into(points: ModelPoints, changes: Mapping[str, list[RowChange]]) -> bool:
    """Whether any change is in the last layer's MLP."""
    last = f"{points.layer(len(points.anatomy.blocks) - 1)}."
    return any(name.startswith(last) and "attn" not in name for name in changes)


def _only_at(mlp: nn.Module, read: list[int]) -> ModuleCall:
    """Run the last MLP only at the positions that are read; it acts on each position separately. Zeros elsewhere."""

    def give(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim == 3:
            x = args[0]
            output = mlp._call_impl(x[:, read], **kwargs)
            if isinstance(output, Tensor) and output.ndim == 3:
                return x.new_zeros(*x.shape[:2], output.shape[-1]).index_copy_(
                    1, torch.tensor(read, device=x.device), output
                )
        return mlp._call_impl(*args, **kwargs)

    return give


def change_action(point: HookPoint, placed: list[RowChange], span: range) -> Action:
    """The action that writes changes into their rows; patches of one text's images are numbered across its images."""

    def write(x: Tensor) -> None:
        write_all(x, placed, span)

    def write_patches(x: Tensor) -> Tensor:
        row = in_one_row(x, point).clone()
        write_all(row, placed, range(sys.maxsize))
        return row.view(x.shape)

    return point.action(write_patches if point.stream == "image" else write)

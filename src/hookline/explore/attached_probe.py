"""The probe of an explorer: at each of its points, what scores the tokens of a prompt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.probes import Monitor, Probes
from hookline.model import HookedModel

ProbeGiven: TypeAlias = Probes | Monitor | str | os.PathLike[str] | Mapping[str, Tensor]
"""The result of `probes.fit`, the file that it was saved to, a monitor of one layer, or directions by point."""


class AttachedProbe:
    """The probe that an explorer was given, with the point that the page begins with."""

    def __init__(self, model: HookedModel, probe: ProbeGiven) -> None:
        monitors, first = _monitors(probe)
        self._monitors = {_checked_point(model, monitor.point): monitor for monitor in monitors}
        self.first = model.point(first).name

    @classmethod
    def given(cls, model: HookedModel, probe: ProbeGiven | None) -> AttachedProbe | None:
        """The probe that the caller gave, if any."""
        return None if probe is None else cls(model, probe)

    def about(self) -> dict[str, Any]:
        """What the page needs to know about it."""
        return {"points": [*self._monitors], "first": self.first}

    def at(self, point: str) -> Monitor:
        """What scores the tokens at a point; "" is the first."""
        name = point or self.first
        if name not in self._monitors:
            raise HooklineError(f"the probe has no scores at {name!r}: it has them at {', '.join(self._monitors)}")
        return self._monitors[name]


def _monitors(probe: Any) -> tuple[list[Monitor], str]:
    """A monitor for each point, and the point to begin with."""
    if isinstance(probe, str | os.PathLike):
        probe = Probes.load(Path(probe))
    if isinstance(probe, Monitor):
        return [probe], probe.point
    if isinstance(probe, Mapping) and probe:
        return [Monitor(_of_direction(point, vector)) for point, vector in probe.items()], next(iter(probe))
    if not isinstance(probe, Probes):
        raise HooklineError(
            f"probe is the result of probes.fit, the path that it was saved to, a probes.Monitor, or a mapping from "
            f"points to directions; got {type(probe).__name__}"
        )
    return [Monitor(probe, layer) for layer in probe.layers], Monitor(probe).point


def _of_direction(point: str, vector: Any) -> Probes:
    """A probe whose score is the dot product with a direction."""
    if not isinstance(vector, Tensor) or vector.ndim != 1:
        raise HooklineError(f"the direction at {point!r} must be a tensor of one axis, got {vector!r:.60}")
    weights = torch.stack([torch.zeros_like(vector), vector])[None].detach().float().cpu()
    nothing = torch.zeros(1, 2)
    content: dict[str, Any] = {"classes": [0, 1], "layers": [0], "points": [point], "weights": weights, "bias": nothing}
    return Probes(torch.zeros(1), ("layer",), {"layer": [0]}, "direction", **content)


def _checked_point(model: HookedModel, name: str) -> str:
    """The name of a point; raises unless it has one vector per token."""
    point = model.point(name)
    letters = point.axes.split()
    if point.stream == "image" or letters[:2] != ["b", "p"] or len(letters) != 3:
        raise HooklineError(f"a probe scores one vector per token, but {name!r} has axes {point.axes}")
    return point.name

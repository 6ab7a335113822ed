"""Whether a device computes what the CPU computes, for each dtype: the model inside the package, run on both."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf, isnan

import torch
from torch import Tensor

from hookline.loading import load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MARGIN = 4
"""A device may be this many times further from the exact values than the CPU is: kernels sum in other orders."""
ROUNDINGS = {"cpu": 64, "other": 8}
"""Errors up to so many roundings of the dtype are within the limit in any case."""


@dataclass(frozen=True)
class DeviceNumbers:
    """The errors of a device in one dtype, relative to the CPU in float64, by family (`blocks.*.hook_mlp_out`)."""

    device: str
    dtype: str
    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    why: str = ""
    """Why there are no errors: the device does not run this dtype."""

    def bad_families(self) -> list[str]:
        """Return the families of points whose error is above the limit; the worst first."""
        bad = [name for name, error in self.errors.items() if error > self.limits[name]]
        return sorted(bad, key=lambda name: self.limits[name] / self.errors[name])

    def __str__(self) -> str:
        start = f"{self.device:<8} {self.dtype:<9}"
        if self.why:
            return f"{start} not available: {self.why}"
        if bad := self.bad_families():
            shown = ", ".join(f"{name} {self.errors[name]:.1e} (limit {self.limits[name]:.1e})" for name in bad[:3])
            return f"{start} WRONG at {len(bad)} of {len(self.errors)} families of points: {shown}"
        worst = max(self.errors, key=lambda name: self.errors[name])
        return f"{start} good: error at most {self.errors[worst]:.1e}, at {worst}"


def device_numbers(devices: list[str]) -> list[DeviceNumbers]:
    """Compare the CPU, and then each of the devices, with the CPU in float64."""
    exact = activations("cpu", torch.float64)
    comparisons = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        of_cpu: dict[str, float] = {}
        for device in ("cpu", *devices):
            try:
                errors = errors_by_family(activations(device, dtype), exact)
            except (RuntimeError, NotImplementedError, TypeError) as error:  # as torch reports missing kernels
                comparisons.append(DeviceNumbers(device, name, why=str(error).splitlines()[0][:200]))
                continue
            least = ROUNDINGS["cpu" if device == "cpu" else "other"] * torch.finfo(dtype).eps
            limits = {family: max(MARGIN * of_cpu.get(family, 0), least) for family in errors}
            of_cpu = errors if device == "cpu" else of_cpu
            comparisons.append(DeviceNumbers(device, name, errors, limits))
    return sorted(comparisons, key=lambda comparison: comparison.device != "cpu")


@torch.no_grad()
def activations(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All points of the model inside the package, and its logits without hooks: with its own attention kernel."""
    model = load("tinyworld", device=device, dtype=dtype)
    tokens = model.example_tokens()
    return {"logits": model(tokens)} | dict(model.cache(tokens, names_filter=[*model.hook_dict]).items())


def errors_by_family(computed: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each family: the norm of the difference, relative to the norm of the activation."""
    errors: dict[str, float] = {}
    for name, expected in exact.items():
        value, expected = computed[name].to("cpu", torch.float64), expected.double()
        is_masked = expected < torch.finfo(torch.float16).min  # the lowest number of each dtype, in attention scores
        difference = (value - expected).masked_fill(is_masked, 0).norm()
        error = (difference / expected.masked_fill(is_masked, 0).norm().clamp_min(1e-12)).item()
        family = re.sub(r"\.\d+\.", ".*.", name)
        errors[family] = max(errors.get(family, 0.0), inf if isnan(error) else error)
    return errors

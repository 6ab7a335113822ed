"""The report of `hookline doctor`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from hookline.doctor.device_numbers import DeviceNumbers, device_numbers
from hookline.doctor.environment import (
    accelerators,
    compiling,
    device_memory,
    device_name,
    package_versions,
    precision_settings,
)
from hookline.engine import tricks
from hookline.model import HookedModel


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about this machine and a model; `print` it, or `to_json()`."""

    versions: dict[str, str | None]
    devices: dict[str, dict[str, Any]]
    precision: dict[str, str]
    numbers: tuple[DeviceNumbers, ...]
    compiling: dict[str, str]
    tricks: dict[str, str]
    """For each of what the engine needs of torch and Python beside what they document: why it does not hold, or ""."""
    model: dict[str, Any]

    def problems(self) -> list[str]:
        """Return why results on this machine, or of this model, may be wrong."""
        wrong = [str(comparison) for comparison in self.numbers if comparison.bad_families()]
        wrong += [f"the trick {name} does not hold: {why}" for name, why in self.tricks.items() if why]
        return wrong + [f"{name}: {why}" for name, why in self.model["failed"].items()]

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        numbers = [asdict(comparison) | {"errors": _finite(comparison.errors)} for comparison in self.numbers]
        return asdict(self) | {"numbers": numbers, "problems": self.problems()}

    def __str__(self) -> str:
        points = ", ".join(f"{count} {status}" for status, count in self.model["points"].items())
        sections = {
            "versions": [f"{name:<24} {version or 'not installed'}" for name, version in self.versions.items()],
            "devices": [_device_line(name, about) for name, about in self.devices.items()],
            "settings": [f"{name:<24} {value}" for name, value in self.precision.items()],
            "numbers, against the CPU in float64": list(map(str, self.numbers)),
            "torch.compile": [f"{device:<24} {what}" for device, what in self.compiling.items()],
            "tricks": [
                f"{name:<24} {f'does not hold: {why}' if why else 'holds'}" for name, why in self.tricks.items()
            ],
            "model": [
                f"{self.model['name']} ({self.model['architecture']}), {self.model['dtype']} on {self.model['device']}",
                f"attention implementation {self.model['attention']}",
                f"points: {points}; `hookline verify` lists them",
            ],
            "problems": self.problems() or ["none"],
        }
        return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def diagnose(model: HookedModel) -> Diagnosis:
    """Examine this machine, and verify the points of a model."""
    devices = accelerators()
    about = {device: {"name": device_name(device), "memory_gb": device_memory(device)} for device in ("cpu", *devices)}
    return Diagnosis(
        versions=package_versions(),
        devices=about,
        precision=precision_settings(),
        numbers=tuple(device_numbers(devices)),
        compiling=compiling(devices),
        tricks=tricks(),
        model=model_facts(model),
    )


def model_facts(model: HookedModel) -> dict[str, Any]:
    """Return the model's dtype, device and attention, and what `verify` proves about its points."""
    report = model.verify()
    parameter = next(model.module.parameters())
    return {
        "name": model.cfg.model_name,
        "architecture": report.architecture,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "attention": getattr(model.module.config, "_attn_implementation", None) or "unknown",
        "points": dict(Counter(verdict.status for verdict in report.verdicts)),
        "failed": {verdict.name: verdict.why for verdict in report.failed()},
    }


def _finite(errors: dict[str, float]) -> dict[str, float | None]:
    """Errors for JSON, which has no infinity."""
    return {name: error if isfinite(error) else None for name, error in errors.items()}


def _device_line(name: str, about: dict[str, Any]) -> str:
    memory = ", ".join(f"{size:.1f} GB {what}" for what, size in about["memory_gb"].items())
    return f"{name:<8} {about['name']}; {memory or 'memory unknown'}"

"""What is installed, which devices there are, and whether `torch.compile` can work."""

from __future__ import annotations

import os
import platform
import re
import shutil
from importlib import metadata
from importlib.util import find_spec

import torch

import hookline

_REQUIREMENT = re.compile(r"^([\w.-]+)[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?")


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python, hookline and what it uses; None for an extra that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "hookline": hookline.__version__}
    try:
        requirements = metadata.requires("hookline") or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        requirements = ["torch", "transformers"]
    for requirement in requirements:
        name, extra = _REQUIREMENT.match(requirement).groups()  # type: ignore[union-attr]
        if extra != "dev":
            versions[f"{name} [{extra}]" if extra else name] = _version(name)
    return versions


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def accelerators() -> list[str]:
    """Return the devices other than the CPU, as torch names them."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        return [kind] if kind == "mps" else [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return []


def device_memory(device: str) -> dict[str, float]:
    """Return the free and total memory of a device in GB, as far as it can be determined."""
    kind = device.partition(":")[0]
    if kind in ("cuda", "xpu"):
        free, total = getattr(torch, kind).mem_get_info(device)
        return {"free": free / 1e9, "total": total / 1e9}
    if kind == "mps":
        return {"total": torch.mps.recommended_max_memory() / 1e9}
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        names = {"free": "SC_AVPHYS_PAGES", "total": "SC_PHYS_PAGES"}
        return {what: os.sysconf(name) * page / 1e9 for what, name in names.items() if name in os.sysconf_names}
    except AttributeError:  # Windows
        return {}


def device_name(device: str) -> str:
    """Return the name of a device's hardware."""
    if device.startswith(("cuda", "xpu")):
        return getattr(torch, device.partition(":")[0]).get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} cores"


def precision_settings() -> dict[str, str]:
    """Return the settings of this process that change float32 results on a GPU."""
    tf32 = str(torch.backends.cudnn.allow_tf32)
    return {"float32 matmul": torch.get_float32_matmul_precision(), "TF32 in cuDNN": tf32}


def compiling(devices: list[str]) -> dict[str, str]:
    """Return, for the CPU and each kind of device, what `torch.compile` uses there, or what it lacks."""
    import torch._dynamo  # slow to import

    if not torch._dynamo.is_dynamo_supported():  # type: ignore[attr-defined]
        return {"cpu": f"not available: torch {torch.__version__} does not compile on this system or Python"}
    compilers = filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")))
    backends = {"cpu": next(compilers, None) or "not available: there is no C++ compiler (install g++, or set CXX)"}
    for kind in dict.fromkeys(device.partition(":")[0] for device in devices):
        if kind == "mps":
            backends[kind] = "Metal shaders"
        else:
            backends[kind] = "Triton" if find_spec("triton") else "not available: pip install triton"
    return backends

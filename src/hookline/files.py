"""Files of tensors: safetensors that say what of ours is in them, so that no other file is taken for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hookline.errors import HooklineError


def write_tensors(path: str | Path, what: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors, each as memory of its own (they may share some, and files must not), and what is known of them."""
    own = {name: x.detach().cpu().clone().contiguous() for name, x in tensors.items()}
    try:
        save_file(own, path, {"hookline": what, **about})
    except (SafetensorError, OSError) as error:
        raise HooklineError(f"the {what} cannot be written to {path}: {error}") from error


def read_tensors(path: str | Path, what: str, *, called: str, writer: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `write_tensors` wrote for the same `what`, tensors and all; else an error that says what should have."""
    try:
        with safe_open(path, "pt") as file:
            about, found = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise HooklineError(f"{path} is no file of {called}: {error}") from error
    if about.pop("hookline", None) != what:
        raise HooklineError(f"{path} is a safetensors file, but not of {called}: it was not written by {writer}")
    return found, about

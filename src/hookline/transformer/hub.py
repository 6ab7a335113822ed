"""Locate a model by name: in the package, in a folder, or on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hookline.errors import HooklineError

EMBEDDED = ("tinyworld", "tinysight")
"""Models that ship with the package."""

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_OPTIONS = (
    *("device", "dtype", "device_map", "attn_implementation", "revision", "subfolder", "gguf_file", "token"),
    *("trust_remote_code", "local_files_only", "cache_dir", "quantization_config", "distributed_config"),
)
"""Options of `hookline.load` and of transformers' `from_pretrained` that are often used."""
_TIMEOUT = 10.0
"""Seconds to wait for the hub."""


def check_transformers() -> None:
    """Raise if an older transformers is installed, with what to install."""
    installed = version("transformers")
    if int(installed.partition(".")[0]) < 5:
        pins = "a library that pins an older one (circuit-tracer) is installed with --no-deps"
        raise HooklineError(f"hookline needs transformers 5, not {installed}: pip install -U 'transformers>=5'; {pins}")


class ModelSource(NamedTuple):
    """What to pass to `from_pretrained` for a name."""

    path: str | Path
    options: Mapping[str, Any] = MappingProxyType({})
    """Further options of `from_pretrained`."""


def find_model(name: str | Path, options: Mapping[str, Any]) -> ModelSource:
    """The location of a model; raises with a suggestion if it does not exist.

    `options` are those of transformers' `from_pretrained`, such as `revision` and `token`.
    """
    if not str(name):
        raise HooklineError("load takes a hub id or a folder, got an empty name")
    if not isinstance(name, str | Path):
        raise HooklineError(f"load takes a hub id or a folder, not {name!r:.60}; to wrap a module use hookline.hook")
    if name in EMBEDDED:
        return ModelSource(Path(__file__).parent.parent / "demo" / "assets" / name)
    path, hub_id = Path(name).expanduser(), str(name)
    if path.suffix == ".gguf" and path.is_file():
        if options.get("gguf_file") is not None:
            raise HooklineError(f"{path} is a file: leave gguf_file out, or pass the folder that contains it")
        return ModelSource(path.parent, {"gguf_file": path.name})
    if _is_folder(path, is_sure=hub_id.startswith((".", "~", "/")), is_gguf="gguf_file" in options):
        return ModelSource(path)
    meant = [] if "/" in hub_id else get_close_matches(hub_id.lower(), EMBEDDED, n=1, cutoff=0.75)
    if meant:
        raise HooklineError(f"no model or folder named {hub_id!r}: did you mean {meant[0]!r}?")
    return ModelSource(hub_id) if options.get("local_files_only") else _on_hub(hub_id, options)


def _is_folder(path: Path, *, is_sure: bool, is_gguf: bool) -> bool:
    """Whether the path is a folder with weights; raises if it can only be a path (`is_sure`) and does not exist.

    A folder with weights in GGUF format only is loaded by the path of a file, or by its name (`is_gguf`).
    """
    try:
        files = sorted(file.name for file in path.iterdir() if file.suffix in _WEIGHTS) if path.is_dir() else None
        is_file = path.is_file()
    except (OSError, ValueError) as error:
        raise HooklineError(f"cannot read folder {path}: {getattr(error, 'strerror', None) or error}") from error
    if is_file:
        raise HooklineError(f"{path} is a file: pass the folder that contains it")
    if files is None:
        if is_sure or path.is_absolute() or len(path.parts) > 2:
            raise HooklineError(f"folder {path} does not exist")
        return False
    if not files:
        raise HooklineError(f"folder {path} contains no weights ({', '.join(f'*{x}' for x in _WEIGHTS)})")
    if not is_gguf and all(name.endswith(".gguf") for name in files):
        named = " or ".join(repr(str(path / name)) for name in files[:4])
        raise HooklineError(f"the weights in the folder {path} are in GGUF format: name the file, {named}")
    return True


def _on_hub(hub_id: str, options: Mapping[str, Any]) -> ModelSource:
    """Check the hub once; transformers would retry five times for each file."""
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    revision = options.get("revision")
    shipped = f"{', '.join(EMBEDDED)} ship with the package"
    try:
        HfApi().model_info(hub_id, revision=revision, timeout=_TIMEOUT, token=options.get("token"), expand=["sha"])
    except errors.HFValidationError as error:
        raise HooklineError(f"folder {hub_id!r} does not exist, and it is not a valid hub id: {error}") from error
    except errors.RevisionNotFoundError as error:
        raise HooklineError(f"model {hub_id!r} has no revision {revision!r} on the hub") from error
    except errors.GatedRepoError:
        pass  # files may be cached or public; otherwise transformers explains how to get access
    except errors.RepositoryNotFoundError as error:
        raise HooklineError(
            f"{hub_id!r} is neither a folder nor a hub model (private: pass token=…). {shipped}"
        ) from error
    except errors.HfHubHTTPError:
        pass  # the hub is reachable, and may still serve the files
    except Exception as error:  # unreachable: the type depends on the HTTP library
        file = "/".join(filter(None, (options.get("subfolder"), options.get("gguf_file") or "config.json")))
        cached = try_to_load_from_cache(hub_id, file, cache_dir=options.get("cache_dir"), revision=revision)
        if not isinstance(cached, str):
            raise HooklineError(
                f"{hub_id!r} is neither a folder nor cached, and the hub is unreachable ({error}). {shipped}"
            ) from error
        return ModelSource(hub_id, {"local_files_only": True})  # from the download cache
    return ModelSource(hub_id)


@contextmanager
def as_hookline_error(name: str | Path) -> Iterator[None]:
    """Convert whatever transformers raises while loading into a HooklineError."""
    try:
        yield
    except (HooklineError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        unknown = re.search(r"unexpected keyword argument '(\w+)'", why) if isinstance(error, TypeError) else None
        if unknown and (near := get_close_matches(unknown[1], _OPTIONS, n=1, cutoff=0.7)):
            why += f". Did you mean {near[0]}=?"
        raise HooklineError(f"cannot load {name}: {type(error).__name__}: {why}") from error

"""Where a model is that is asked for by name: in the package, in a folder, or on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hookline.errors import HooklineError

EMBEDDED = ("tinyworld", "tinysight")
"""The models that are in the package."""

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_TIMEOUT = 10.0
"""How many seconds the hub has to answer that it is there."""


class Found(NamedTuple):
    """What transformers is given for a name."""

    path: str | Path
    is_cached_only: bool = False
    """Whether the hub cannot be reached, but the model was downloaded before."""


def found(name: str | Path, options: Mapping[str, Any]) -> Found:
    """Where the model is; an error that says what could have been meant if it is nowhere.

    `options` are those of transformers' `from_pretrained`; some say where on the hub a model is.
    """
    if not isinstance(name, str | Path):
        raise HooklineError(
            f"a model is loaded by a hub id or a folder, not {name!r:.60}; hookline.hook wraps a module"
        )
    if name in EMBEDDED:
        return Found(Path(__file__).parent.parent / "demo" / "assets" / name)
    if not str(name):
        raise HooklineError("a model is loaded by a hub id or a folder, and the name given is empty")
    if _is_folder(Path(name).expanduser(), is_sure=str(name).startswith((".", "~", "/"))):
        if "gguf_file" not in options:
            _check_is_not_gguf(Path(name).expanduser())
        return Found(Path(name).expanduser())
    hub_id = str(name)
    meant = [] if "/" in hub_id else get_close_matches(hub_id.lower(), EMBEDDED, n=1, cutoff=0.75)
    if meant:
        raise HooklineError(f"there is no model and no folder {hub_id!r}: did you mean {meant[0]!r}?")
    if options.get("local_files_only"):
        return Found(hub_id)
    return _on_hub(hub_id, options)


def _check_is_not_gguf(path: Path) -> None:
    """A folder with weights in a GGUF file only is loaded by the name of that file."""
    files = sorted(file.name for file in path.iterdir() if file.suffix in _WEIGHTS)
    if all(name.endswith(".gguf") for name in files):
        raise HooklineError(
            f"the weights in the folder {path} are in GGUF format: name the file, "
            + " or ".join(f"gguf_file={name!r}" for name in files[:4])
        )


def _is_folder(path: Path, *, is_sure: bool) -> bool:
    """Whether it is a folder, which must have a model in it; an error if it can be nothing else and is not one."""
    try:
        if path.is_dir():
            if not any(file.suffix in _WEIGHTS for file in path.iterdir()):
                raise HooklineError(
                    f"the folder {path} has no weights in it: no {', '.join(f'*{x}' for x in _WEIGHTS)}"
                )
            return True
        is_file = path.is_file()
    except (OSError, ValueError) as error:
        raise HooklineError(f"the folder {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if is_file:
        raise HooklineError(f"{path} is a file: a model is loaded from the folder that it is in")
    if is_sure or path.is_absolute() or len(path.parts) > 2:
        raise HooklineError(f"there is no folder {path}")
    return False


def _on_hub(hub_id: str, options: Mapping[str, Any]) -> Found:
    """Ask the hub once: transformers asks for each file, and each time waits and asks again five times."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    revision = options.get("revision")
    try:
        HfApi().model_info(hub_id, revision=revision, timeout=_TIMEOUT, token=options.get("token"), expand=["sha"])
    except HFValidationError as error:
        raise HooklineError(f"there is no folder {hub_id!r}, and it cannot be a hub id: {error}") from error
    except RevisionNotFoundError as error:
        raise HooklineError(f"the model {hub_id!r} has no revision {revision!r} on the hub") from error
    except GatedRepoError:
        pass  # its files may be downloaded already, or be open; if not, transformers says what to do
    except RepositoryNotFoundError as error:
        raise HooklineError(
            f"there is no folder {hub_id!r}, and no such model on the hub (or it is private: token=…). "
            f"{', '.join(EMBEDDED)} are in the package"
        ) from error
    except HfHubHTTPError:
        pass  # the hub is there, and may answer when asked for the files
    except Exception as error:  # it cannot be reached: the type depends on the HTTP library that this version uses
        file = "/".join(filter(None, (options.get("subfolder"), options.get("gguf_file") or "config.json")))
        cached = try_to_load_from_cache(hub_id, file, cache_dir=options.get("cache_dir"), revision=revision)
        if not isinstance(cached, str):
            raise HooklineError(
                f"there is no folder {hub_id!r}, no model of that name was downloaded before, and the hub cannot be "
                f"reached ({error}). {', '.join(EMBEDDED)} are in the package"
            ) from error
        return Found(hub_id, is_cached_only=True)
    return Found(hub_id)


@contextmanager
def one_error(name: str | Path) -> Iterator[None]:
    """Whatever transformers raises, which on a damaged folder can be anything, as one error of ours."""
    try:
        yield
    except (HooklineError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise HooklineError(f"{name} cannot be loaded: {type(error).__name__}: {why}") from error

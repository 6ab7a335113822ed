"""Files that others published: a part of a repository of the hub in the local cache, and NumPy's files of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.files.tensorfile import BAD_CONTENT, reason


def is_hub_id(name: object) -> bool:
    """Whether it is the name of a repository, owner/name, or of a folder in it, and not a path on this machine."""
    if not isinstance(name, str) or name.startswith((".", "/", "~")) or "\\" in name:
        return False
    return name.count("/") >= 1 and not name.endswith("/") and not Path(name).exists()


def downloaded(repo_id: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """The folder of a repository in the cache, with the files that match one of the patterns; downloads what is new."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]  # httpx's

    try:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        raise HooklineError(
            f"{_said(repo_id, revision)} is not in the local cache with all its files, and the hub cannot be reached "
            f"(HF_HUB_OFFLINE is set, or there is no network): {reason(error)}"
        ) from error
    except (HTTPError, OSError, *BAD_CONTENT) as error:
        raise HooklineError(f"{_said(repo_id, revision)} cannot be downloaded from the hub: {reason(error)}") from error
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if not any(fnmatch(path, pattern) for path in paths for pattern in patterns):
        raise HooklineError(
            f"{_said(repo_id, revision)} has no {' or '.join(patterns)}{_known(repo_id, revision, paths)}"
        )
    return folder


def _said(repo_id: str, revision: str | None) -> str:
    return repr(repo_id) if revision is None else f"{repo_id!r} at the revision {revision!r}"


def _known(repo_id: str, revision: str | None, paths: Sequence[str]) -> str:
    """Which folders the repository has, as far as the hub or the cache tells."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    with suppress(HTTPError, OSError):  # offline, there is what the cache has
        paths = HfApi().list_repo_files(repo_id, revision=revision)
    folders = sorted({PurePosixPath(path).parent.as_posix() for path in paths} - {"."})
    return f"; its folders are {', '.join(folders[:8])}{', …' if len(folders) > 8 else ''}" if folders else ""


def read_arrays(file: Path) -> dict[str, Tensor]:
    """The arrays of a .npz file; nothing in it is executed."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: torch.tensor(x) for name, x in arrays.items()}
    except (OSError, EOFError, MemoryError, BadZipFile, *BAD_CONTENT) as error:
        raise HooklineError(f"{file} cannot be read: {reason(error)}") from error

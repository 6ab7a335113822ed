"""An object store for tests: `objects://…`, in memory, safe for threads, with what such stores have and have not.

An object exists whole or not at all, can be created exclusively (or not: `exclusive = False`), and cannot be renamed.
fsspec's own `memory://` is not safe for threads.
"""

from collections.abc import Callable
from threading import RLock
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

_lock = RLock()


class Objects(MemoryFileSystem):
    protocol = ("objects",)
    root_marker = "/"
    store: dict[str, Any] = {}  # noqa: RUF012 - one for all instances, as in fsspec
    pseudo_dirs = [""]  # noqa: RUF012
    exclusive = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("objects://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode=mode if self.exclusive else "overwrite", **kwargs)


def _locked(name: str) -> Callable[..., Any]:
    original = getattr(Objects, name)

    def method(self: Objects, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            return original(self, *args, **kwargs)

    return method


for _name in ("ls", "exists", "info", "cat_file", "pipe_file", "cp_file", "rm_file", "_open", "makedirs", "size"):
    setattr(Objects, _name, _locked(_name))

fsspec.register_implementation("objects", Objects, clobber=True)

"""Folders that hold a store's files. Each file is written atomically, and one harvest writes at a time."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from filelock import lock_descriptor, unlock_descriptor

from hookline.errors import StoreError
from hookline.files.tensorfile import BAD_CONTENT, check_is_file, reason

Buffer = bytes | bytearray | memoryview

PART, LOCK = ".part", ".lock"
"""The suffix of a file that is being written, and the file that names the writer."""


class Bytes(Protocol):
    """The bytes of a file; only the requested ranges are fetched."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Buffer: ...


class Folder:
    """A folder on any file system that fsspec supports: `s3://…`, `gs://…`, `memory://…`."""

    part = PART
    """How the name of a file ends while it is written."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.path = url
        try:
            self._files, folder = url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise StoreError(f"{url} cannot be opened: {error}") from error
        self._folder = folder.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def names(self, *, unfinished: bool = False) -> list[str]:
        """The names of the files; or of those that are being written, or were when their writers died."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {reason(error)}") from error
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in paths)
        if unfinished:
            return sorted(name for name in names if name.endswith(PART))
        return sorted(name for name in names if not name.endswith((PART, LOCK)))

    def __contains__(self, name: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._at(name)))

    def open(self, name: str) -> Bytes:
        """The bytes of a file; FileNotFoundError if there is none."""
        return _Remote(self._files, self._at(name))

    def stage(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write a file under a temporary name, so that it is not part of the store yet. Thread-safe."""
        try:
            self._write(self._at(name + self.part), parts)
        except BaseException:
            self.discard(name)
            raise

    def _write(self, path: str, parts: Sequence[Buffer]) -> None:
        with self._files.open(path, "wb") as file:
            for part in parts:
                file.write(part)

    def place(self, names: Sequence[str]) -> None:
        """Rename staged files to their final names, in this order, each as atomically as the file system can."""
        for name in names:
            self._files.mv(self._at(name + self.part), self._at(name))

    def discard(self, name: str) -> None:
        """Delete a staged file, if there is one."""
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # the last two: not written by `stage`
            self._files.rm_file(self._at(name + self.part))

    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError if there is none."""
        return bytes(self._files.cat_file(self._at(name)))

    def make(self) -> None:
        """Create the folder, if there is none."""
        self._files.makedirs(self._folder, exist_ok=True)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless there is one; returns whether it was written. As exclusive as the file system can."""
        try:
            self._files.pipe_file(self._at(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    def overwrite(self, name: str, content: bytes) -> None:
        """Write a small file in place: a reader may see a part of it."""
        self._files.pipe_file(self._at(name), content)

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Write a lock file that names its owner; a lock left by a dead process of this machine is ignored."""
        self.make()
        lock = self._at(LOCK)
        if self._files.exists(lock):
            owner = self._files.cat_file(lock).decode(errors="replace")
            if not is_gone(owner):
                raise StoreError(f"{_in_use(self.path, owner)} If it is no longer running, delete {lock}")
        self._files.pipe_file(lock, this_process().encode())
        try:
            yield
        finally:
            self._files.rm(lock)

    def replace(self, name: str, content: bytes) -> None:
        """Write or replace a file atomically."""
        self.stage(name, [content])
        try:
            self.place([name])
        except BaseException:
            self.discard(name)
            raise


class LocalFolder(Folder):
    """A local folder, with guarantees that fsspec does not make for local files.

    Files are synced to disk and renamed atomically, links are not followed, and a lock ends with its process.
    """

    def __init__(self, path: str | Path) -> None:
        from fsspec import filesystem  # type: ignore[import-untyped]

        self._files = filesystem("file")
        self._folder = self.path = str(Path(os.path.expanduser(path)).absolute())

    def open(self, name: str) -> Bytes:
        """The file, memory-mapped: only the pages that are accessed are read."""
        check_is_file(Path(self._at(name)))
        with open(self._at(name), "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read(self, name: str) -> bytes:
        """All bytes of a file. It is not mapped, because others may overwrite it."""
        check_is_file(Path(self._at(name)))
        return Path(self._at(name)).read_bytes()

    def _write(self, path: str, parts: Sequence[Buffer]) -> None:
        Path(path).unlink(missing_ok=True)  # a file or link that somebody left there
        with open(path, "xb", buffering=0, opener=_without_links) as file:
            for view in (memoryview(part).cast("B") for part in parts if len(part)):
                while view:
                    done = os.write(file.fileno(), view)
                    if not done:
                        raise OSError(errno.ENOSPC, "no bytes were written")
                    view = view[done:]
            os.fsync(file.fileno())

    def place(self, names: Sequence[str]) -> None:
        """Rename, then sync the folder: after a crash a file is complete or absent, and so are all after it."""
        for name in names:
            os.replace(self._at(name + self.part), self._at(name))
        if sys.platform == "win32":  # folders cannot be opened there
            return
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless there is one, as a link, which cannot replace a file."""
        self.stage(name, [content])
        try:
            follows = os.link not in os.supports_follow_symlinks  # Windows has no choice
            os.link(self._at(name + self.part), self._at(name), follow_symlinks=follows)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if os.path.exists(self._at(name)):
                return False
            self.place([name])
        finally:
            self.discard(name)
        return True

    def overwrite(self, name: str, content: bytes) -> None:
        """Write a small file in place: a reader may see a part of it."""
        with open(self._at(name), "wb", opener=_without_links) as file:
            file.write(content)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock file. The system releases it when the process ends, however it ends."""
        with self._lock_file() as file:
            if not lock_descriptor(file.fileno(), blocking=False):
                file.seek(1)
                raise StoreError(_in_use(self.path, file.read()))
            try:
                file.truncate(0)
                file.write(" " + this_process())  # the first byte is the lock: on Windows nobody else can read it
                file.flush()
                yield
            finally:
                unlock_descriptor(file.fileno())

    def _lock_file(self) -> TextIO:
        try:
            os.makedirs(self._folder, exist_ok=True)
            return open(self._at(LOCK), "a+", opener=_without_links)
        except OSError as error:
            why = "it is a link, and a lock is a file" if error.errno == errno.ELOOP else reason(error)
            raise StoreError(f"{self.path} cannot be written to: {LOCK}: {why}") from error


_WITHOUT_LINKS = 0 if sys.platform == "win32" else os.O_NOFOLLOW | os.O_NONBLOCK


def _without_links(path: str, flags: int) -> int:
    """Open a file at that path; links are not followed, as somebody else may have put them there (not on Windows)."""
    return os.open(path, flags | _WITHOUT_LINKS, 0o666)


class _Remote:
    """The bytes of a remote file."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        self._size = int(files.size(path))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> Buffer:
        start, stop, _ = part.indices(self._size)
        return self._files.cat_file(self._path, start=start, end=stop) if stop > start else b""


def this_process() -> str:
    """Names this process, as JSON."""
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()})


def _in_use(path: str, owner: str) -> str:
    return f"another harvest is writing to {path}: {owner or 'it has just started'}. Wait for it, or use another store."


def is_gone(owner: str) -> bool:
    """Whether a lock was left by a process of this machine that no longer exists; not known on Windows."""
    try:
        process = json.loads(owner)
        is_here = process["host"] == socket.gethostname() and process["pid"] != os.getpid()
        if is_here and sys.platform != "win32":  # there, this would end the process
            os.kill(process["pid"], 0)
    except ProcessLookupError:
        return True
    except (*BAD_CONTENT, PermissionError):
        return False
    return False

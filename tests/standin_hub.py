"""A stand-in for the hub on this machine: it serves folders as repositories, through the hub's own interface.

    with serving({"owner/name": {"main": folder, "v2": other}}) as hub: …      # hub.address, hub.asked

Programs find it by HF_ENDPOINT, and download with huggingface_hub's own code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlparse

Repositories = Mapping[str, Mapping[str, Path]]
"""The folder of each revision of each repository; that of a broken file has its name with the ending .broken."""


def commit(repository: str, revision: str) -> str:
    """The commit of a revision."""
    return hashlib.sha1(f"{repository} {revision}".encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """The server, with what it was asked for."""

    def __init__(self, repositories: Repositories) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        """What HF_ENDPOINT is."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def folder(self, repository: str, revision: str) -> tuple[Path | None, str]:
        """The folder and the commit of a revision, a branch or a commit itself."""
        for name, folder in self.repositories[repository].items():
            if revision in (name, commit(repository, name)):
                return folder, commit(repository, name)
        return None, ""


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        """Answer without the contents."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer with the contents."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        self.server.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("api/models/").split("/")
        repository = "/".join(parts[:2])
        if repository not in self.server.repositories:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}", with_body)
            return
        what, revision = parts[2:4] if len(parts) > 3 else ("revision", "main")
        folder, sha = self.server.folder(repository, revision)
        if folder is None:
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", with_body)
        elif what == "resolve":
            self._file(folder / "/".join(parts[4:]), sha, with_body)
        else:
            self._json(self._listed(repository, what, folder, sha, "/".join(parts[4:])), with_body)

    def _listed(self, repository: str, what: str, folder: Path, sha: str, inner: str) -> Any:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".broken")
        named = {path.relative_to(folder).as_posix(): path for path in files}
        if what == "tree":
            inside = {name: path for name, path in named.items() if name.startswith(inner)}
            return [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _sum(path)}
                for name, path in inside.items()
            ]
        siblings = [{"rfilename": name} for name in named]
        return {"id": repository, "modelId": repository, "sha": sha, "private": False, "gated": False, "tags": [],
                "siblings": siblings}  # fmt: skip

    def _file(self, path: Path, sha: str, with_body: bool) -> None:
        if not path.is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b"", with_body)
            return
        body = path.read_bytes()
        headers = {"ETag": f'"{_sum(path)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if Path(f"{path}.broken").exists() and with_body:
            self._send(200, headers, body[: len(body) // 2], with_body, length=len(body))
            self.close_connection = True
        else:
            self._send(200, headers, body, with_body)

    def _json(self, content: Any, with_body: bool) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode(), with_body)

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, with_body: bool, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body) if length is None else length)}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


def _sum(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving(repositories: Repositories) -> Iterator[Hub]:
    """Serve these repositories until the end of the block."""
    hub = Hub(repositories)
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()

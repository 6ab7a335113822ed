"""The explorer's server: one page and its questions, on this machine only.

Whoever asks must know the token in the address, and a browser must ask from the page itself: other sites, and names
that were made to point to this machine, are refused.
"""

from __future__ import annotations

import hmac
import io
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from hookline.errors import HooklineError
from hookline.explore.session import Session
from hookline.pages.document import document, policy

Paths: TypeAlias = Mapping[str, str]

MOST_BYTES = 40_000_000
"""Of a question, with its images."""
MOST_SAVED_BYTES = 100_000_000
"""Of the views that are saved as one page."""
PATIENCE = 10.0
"""Seconds in which a request must arrive, from its first byte to its last."""
MOST_CONNECTIONS = 32


class Refused(Exception):  # noqa: N818 (it becomes an answer)
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class ExplorerServer(ThreadingHTTPServer):
    """Serves one model at `server.address`.

    with ExplorerServer(Session(model, "tinyworld"), {"prompt": "When Mary"}) as server:
        server.serve_forever()

    `state` is what the page begins with.
    """

    daemon_threads = True
    block_on_close = False
    patience = PATIENCE

    def __init__(self, session: Session, state: dict[str, Any], *, port: int = 0) -> None:
        self.session = session  # before the socket, which closes everything if it cannot be had
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise HooklineError(f"port {port} of 127.0.0.1 cannot be used: {error}. Use --port 0 for any") from None
        self.state = state
        self.token, self._link_token = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._link_left = threading.Semaphore(1)
        self.places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    @property
    def address(self) -> str:
        """Where the page is, with its token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    @property
    def link(self) -> str:
        """An address that leads to the page once: all users of a machine can read the arguments of a browser."""
        return f"http://127.0.0.1:{self.server_port}/{self._link_token}/"

    def take_link(self, token: str) -> bool:
        """Whether a token is that of the link; raises if the link was used before."""
        if not hmac.compare_digest(token.encode(), self._link_token.encode()):
            return False
        if not self._link_left.acquire(blocking=False):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                "this link opened the page once already: use the address that hookline printed. If it was not you who "
                "opened it, someone else on this machine did: close the explorer",
            )
        return True

    @property
    def hosts(self) -> tuple[str, str]:
        """The names under which a browser may ask."""
        return f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    def server_close(self) -> None:
        """Stop listening, end the worker's thread, and let go of the model and of what is kept of it."""
        super().server_close()
        self.session.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless there are too many already."""
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there was no thread for it
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle one connection, then release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: browsers often end connections early."""


class _Timed(io.RawIOBase):
    """The bytes of a connection, until a deadline, which does not move when a byte arrives."""

    def __init__(self, connection: socket.socket, patience: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + patience

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    server_version, sys_version = "hookline", ""
    protocol_version = "HTTP/1.0"  # one request a connection

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Timed(self.connection, self.server.patience))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed, and so no token ends up in a log."""

    def do_GET(self) -> None:
        """The page."""
        self._reply(self._page)

    def do_POST(self) -> None:
        """A question of the page."""
        self._reply(self._answer)

    def _reply(self, make: Callable[[], tuple[str, bytes]]) -> None:
        try:
            kind, content = make()
            self._send(HTTPStatus.OK, kind, content)
        except Refused as refused:
            self._send_error(refused.status, refused.message)
        except TimeoutError:
            self._send_error(HTTPStatus.REQUEST_TIMEOUT, "the request took too long")

    def _page(self) -> tuple[str, bytes]:
        server = self.server
        if server.take_link(self._parts()[0]):
            to = f'<meta http-equiv="refresh" content="0; url={server.address}">'
            return "text/html; charset=utf-8", f'<!doctype html><link rel="icon" href="data:,">{to}'.encode()
        if self._path() != "":
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        data = {"live": True, "model": server.session.described, "steps": [{"state": server.state}], "answers": []}
        return "text/html; charset=utf-8", document(data).encode()

    def _answer(self) -> tuple[str, bytes]:
        path, session = self._path(), self.server.session
        self._check_origin()
        body = self._body(MOST_SAVED_BYTES if path == "save" else MOST_BYTES)
        try:
            if path == "save":
                return "text/html; charset=utf-8", session.saved(body.get("state"), body.get("answers")).encode()
            if path == "cancel":
                session.cancel(body)
                return "application/json", b"{}"
            if path == "ask":
                return "application/json", json.dumps(session.ask(body).answered()).encode()
        except HooklineError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _parts(self) -> tuple[str, str]:
        """The token in the address, and what comes after it."""
        if self.headers.get("Host") not in self.server.hosts:
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers at 127.0.0.1 only")
        _, token, *rest = self.path.partition("?")[0].split("/") if self.path.startswith("/") else ("", "")
        return token, "/".join(rest)

    def _path(self) -> str:
        """What comes after the token in the address; raises unless the token is valid."""
        token, rest = self._parts()
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "the address has no valid token: use the one that hookline printed")
        return rest

    def _check_origin(self) -> None:
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        allowed = [f"http://{host}" for host in self.server.hosts]
        if (origin is not None and origin not in allowed) or site not in (None, "same-origin"):
            raise Refused(HTTPStatus.FORBIDDEN, "questions come from the explorer's own page")
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "questions are JSON")

    def _body(self, most: int) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a question needs its length")
        if len(length) > 12 or int(length) > most:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has up to {most:,} bytes")
        read = self.rfile.read(int(length))
        try:
            body = json.loads(read)
        except (ValueError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, "the question is not JSON") from None
        if len(read) < int(length) or not isinstance(body, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the question is not a whole JSON object")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The errors of http.server itself, such as an unknown method, in the same form."""
        self._send_error(HTTPStatus(code), message or explain or HTTPStatus(code).phrase)

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        self._send(status, "application/json", json.dumps({"error": message}).encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.connection.settimeout(self.server.patience)
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": f"{policy(is_live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

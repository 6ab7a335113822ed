"""The server answers its own page, and nobody else; whatever it is sent, it goes on."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch
from stores import tinyworld
from typer.testing import CliRunner

import hookline
from hookline import HooklineError
from hookline.cli import app
from hookline.explore import explore, export_page, server, session
from hookline.explore.jobs import Cancelled, Worker
from hookline.explore.views import answer
from hookline.pages.document import document, module

PROMPT = "When Mary and John went to the store, John gave a drink to"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def explorer():
    with explore(tinyworld(), PROMPT, browser=False) as found:
        yield found


def place(explorer) -> tuple[int, str]:
    _, port, token = re.fullmatch(r"http://(127\.0\.0\.1):(\d+)/([\w-]+)/", explorer.address).groups()
    return int(port), token


def request(explorer, method, path, body=None, headers=None):
    port, token = place(explorer)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path.replace("TOKEN", token), body, headers or {})
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply, content


def ask(explorer, headers=JSON, tab="a", state=0, **question):
    body = {"tab": tab, "slot": question["view"], "state": state, "question": {"prompt": PROMPT, **question}}
    reply, content = request(explorer, "POST", "/TOKEN/ask", json.dumps(body), headers)
    return reply.status, json.loads(content)


def test_the_page_has_everything_inside(explorer) -> None:
    reply, content = request(explorer, "GET", "/TOKEN/")
    page = content.decode()
    assert reply.status == 200
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert len(content) < 200_000


def test_a_question_is_answered_as_by_the_library(explorer) -> None:
    status, data = ask(explorer, view="next")
    assert status == 200
    expected = answer(tinyworld(), hookline.explore.question.Question("next", PROMPT))
    assert {key: data[key] for key in expected} == expected
    assert "hookline.load('tinyworld')" in data["script"]


@pytest.mark.parametrize("path", ["/", "/wrong/", "/TOKENx/", "//", "/wrong/TOKEN/", "*", "/é/"])
def test_without_the_token_nothing_is_told(explorer, path) -> None:
    for method in ("GET", "POST"):
        port, token = place(explorer)
        with socket.create_connection(("127.0.0.1", port)) as raw:
            line = f"{method} {path.replace('TOKEN', token)} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n"
            raw.sendall(line.encode())
            reply = raw.makefile("rb").read()
        assert token.encode() not in reply
        assert b" 403 " in reply.splitlines()[0] or b"400" in reply


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
    ],
)
def test_other_sites_are_refused(explorer, headers) -> None:
    status, data = ask(explorer, JSON | headers, view="next")
    assert status == 403
    assert "error" in data


def test_a_form_of_another_site_is_refused(explorer) -> None:
    assert ask(explorer, {"Content-Type": "text/plain"}, view="next")[0] == 415


def test_the_own_origin_is_allowed(explorer) -> None:
    port, _ = place(explorer)
    assert ask(explorer, JSON | {"Origin": f"http://127.0.0.1:{port}"}, view="next")[0] == 200


def test_a_huge_body_is_not_read(explorer) -> None:
    reply, _ = request(explorer, "POST", "/TOKEN/ask", b"", JSON | {"Content-Length": "99999999999"})
    assert reply.status == 413


@pytest.mark.parametrize("body", ["", "{", "[1]", "null", "{}", "[" * 50_000, '{"question": 3, "state": 0}'])
def test_a_body_that_is_no_question(explorer, body) -> None:
    reply, content = request(explorer, "POST", "/TOKEN/ask", body, JSON)
    assert 400 <= reply.status < 500
    assert "error" in json.loads(content)


@pytest.mark.parametrize(
    "sent", ["", "POST /TOKEN/ask HTTP/1.0\r\n", "POST /TOKEN/ask HTTP/1.0\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_slow_client_is_not_waited_for(explorer, monkeypatch, sent) -> None:
    monkeypatch.setattr(server.ExplorerServer, "patience", 0.3)
    port, token = place(explorer)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(sent.replace("TOKEN", token).encode())
        assert ask(explorer, view="next")[0] == 200  # others are answered meanwhile
        raw.makefile("rb").read()  # ends


def test_what_cannot_be_done_is_told_and_the_server_goes_on(explorer) -> None:
    status, data = ask(explorer, view="next", prompt="word " * 500)
    assert status == 200
    assert data["error"]
    assert ask(explorer, view="next")[0] == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "BREW"])
def test_an_unknown_method(explorer, method) -> None:
    reply, content = request(explorer, method, "/TOKEN/")
    assert reply.status == 501
    assert "error" in json.loads(content)


def test_what_a_model_raises_is_told_and_the_server_goes_on(explorer, monkeypatch) -> None:
    def broken(model, asked):
        raise AssertionError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(session, "answer", broken)
        assert ask(explorer, view="next") == (200, {"error": "AssertionError: out of luck"})
    assert "error" not in ask(explorer, view="next")[1]


def test_two_tabs_at_once(explorer) -> None:
    found = {}

    def one(tab):
        found[tab] = [ask(explorer, tab=tab, state=n, view="heads", measure="ablation") for n in range(3)]

    threads = [threading.Thread(target=one, args=(tab,)) for tab in "ab"]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert [status for tab in "ab" for status, _ in found[tab]] == [200] * 6
    assert found["a"][0][1]["values"] == found["b"][2][1]["values"]


def test_the_saved_page_has_the_data_inside_as_text(explorer) -> None:
    body = {"state": {"prompt": "</script><script>alert(1)</script>"}, "answers": []}
    reply, content = request(explorer, "POST", "/TOKEN/save", json.dumps(body), JSON)
    assert reply.status == 200
    assert b"<script>alert" not in content
    assert b"connect-src 'none'" in content


def test_a_newer_question_cancels_an_older_one() -> None:
    model, started = torch.nn.Linear(2, 2), threading.Event()

    def forever():
        started.set()
        while True:
            model(torch.zeros(1, 2))

    with Worker() as worker:
        old = worker.submit(forever, tab="a", slot="next", state=0)
        waiting = worker.submit(lambda: 1, tab="a", slot="lens", state=0)
        assert started.wait(10)
        new = worker.submit(lambda: 2, tab="a", slot="next", state=1)
        assert new.result() == 2
        for each in (old, waiting):
            with pytest.raises(Cancelled):
                each.result()
        late = worker.submit(forever, tab="b", slot="next", state=0)
        time.sleep(0.05)
        worker.cancel("b")
        with pytest.raises(Cancelled):
            late.result()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_an_error_of_a_job_is_raised_where_it_was_asked() -> None:
    with Worker() as worker:
        job = worker.submit(lambda: 1 / 0, tab="a", slot="next", state=0)
        with pytest.raises(ZeroDivisionError):
            job.result()
        assert worker.submit(lambda: 3, tab="a", slot="next", state=1).result() == 3


def test_a_port_that_is_taken_is_told(explorer) -> None:
    with pytest.raises(HooklineError):
        explore(tinyworld(), port=place(explorer)[0], browser=False)


def test_the_command_writes_a_page(tmp_path) -> None:
    result = CliRunner().invoke(app, ["explore", "--export", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert PROMPT in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "hookline", "explore", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]+/", address)
        with urllib.request.urlopen(address, timeout=20) as reply:
            assert PROMPT in reply.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


@pytest.mark.slow
def test_an_interrupt_ends_a_long_run() -> None:
    command = [sys.executable, "-m", "hookline", "explore", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()
        question = {"view": "generate", "prompt": PROMPT, "count": 100}
        body = json.dumps({"tab": "a", "slot": "generate", "state": 0, "question": question}).encode()

        def forever() -> None:
            with contextlib.suppress(OSError):  # it ends without an answer
                while True:
                    urllib.request.urlopen(urllib.request.Request(f"{address}ask", body, JSON), timeout=60).close()

        threading.Thread(target=forever, daemon=True).start()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def test_the_command_reports_a_model_that_cannot_be_loaded() -> None:
    assert CliRunner().invoke(app, ["explore", "tinywrld", "--no-browser"]).exit_code == 3


def test_a_plain_network_is_not_explored() -> None:
    with pytest.raises(HooklineError):
        explore(hookline.hook(torch.nn.Linear(2, 2)), browser=False)


def test_closing_twice() -> None:
    found = tinyworld().explore(PROMPT, browser=False)
    found.close()
    found.close()
    assert "closed" in repr(found)


def test_an_exported_page(tmp_path) -> None:
    path = export_page(tinyworld(), tmp_path / "page.html", PROMPT, PROMPT.replace("John gave", "Mary gave"))
    page = path.read_text()
    assert '"live": false' in page
    assert module() in page


def test_the_module_is_small() -> None:
    assert len(module().encode()) <= 200_000
    assert len(document({"live": True})) <= 250_000


def test_the_browser_is_started_with_a_link_that_works_once(monkeypatch) -> None:
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    with explore(tinyworld(), PROMPT) as found:
        _, token = place(found)
        [link] = opened
        assert token not in link
        path = link.removeprefix(found.address.removesuffix(f"{token}/"))
        evil = {"Host": "evil.example"}
        assert request(found, "GET", f"/{path}", headers=evil)[0].status == 403
        assert request(found, "POST", f"/{path}ask", "{}", JSON)[0].status == 403
        reply, content = request(found, "GET", f"/{path}")
        assert reply.status == 200
        assert f"url={found.address}" in content.decode()
        reply, content = request(found, "GET", f"/{path}")
        assert reply.status == 403
        assert token not in content.decode()
        assert request(found, "GET", "/TOKEN/")[0].status == 200


def test_a_connection_without_a_thread_leaves_its_place(explorer, monkeypatch) -> None:
    def full(self) -> None:
        raise RuntimeError("can't start new thread")

    port, _ = place(explorer)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        for _ in range(server.MOST_CONNECTIONS + 1):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as raw, contextlib.suppress(OSError):
                raw.recv(1)  # ends
    assert request(explorer, "GET", "/TOKEN/")[0].status == 200


def test_a_prompt_that_is_not_text_is_refused() -> None:
    with pytest.raises(HooklineError, match="not int"):
        explore(tinyworld(), 5, browser=False)

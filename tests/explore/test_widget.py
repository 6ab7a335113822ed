"""The widget of a notebook, without a notebook: messages in, messages out."""

import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from stores import tinyworld

import hookline
from hookline import HooklineError
from hookline.explore import explore, in_notebook
from hookline.explore.question import Question
from hookline.explore.views import answer

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"


def shell(kernel) -> SimpleNamespace:
    """The IPython module in a process with such a shell."""
    return SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel))


@pytest.mark.parametrize(
    ("ipython", "expected"),
    [
        (None, False),
        (SimpleNamespace(get_ipython=lambda: None), False),
        (SimpleNamespace(get_ipython=SimpleNamespace), False),
        (shell(None), False),
        (shell(object()), True),
    ],
    ids=["python", "imported", "terminal", "no kernel", "notebook"],
)
def test_a_notebook_is_a_process_with_a_kernel(monkeypatch, ipython, expected) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert in_notebook() is expected


def test_without_anywidget_the_server_is_offered(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", shell(object()))
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "hookline.explore.widget", raising=False)
    with pytest.raises(HooklineError, match="server=True"):
        explore(tinyworld(), PROMPT)
    with explore(tinyworld(), PROMPT, server=True, browser=False) as explorer:
        assert explorer.address.startswith("http://127.0.0.1:")


class Notebook:
    """The other end of the widgets' comms."""

    def __init__(self, comm) -> None:
        self.sent: list[dict] = []
        notebook = self

        class Comm(comm.base_comm.BaseComm):
            def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys) -> None:
                notebook.sent.append({"type": msg_type, **(data or {})})

        self.create = Comm

    def replies(self) -> list[dict]:
        return [each["content"] for each in self.sent if each.get("method") == "custom"]

    def post(self, widget, path, number=1, **body) -> None:
        content = {"id": number, "tab": "a", "path": path, "body": {"tab": "a", **body}}
        widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})

    def reply(self, number=1) -> dict:
        """Wait for the reply to a message."""
        for _ in range(1000):
            found = [each["reply"] for each in self.replies() if each["id"] == number]
            if found:
                return found[-1]
            time.sleep(0.02)
        raise AssertionError(f"no reply to {number}")

    def ask(self, widget, view, number=1, state=0, **question) -> dict:
        asked = {"view": view, "prompt": PROMPT, **question}
        self.post(widget, "ask", number, slot=view, state=state, question=asked)
        return self.reply(number)


@pytest.fixture
def notebook(monkeypatch) -> Notebook:
    pytest.importorskip("anywidget", reason='pip install "hookline[explore]" to test the explorer in notebooks')
    import comm

    found = Notebook(comm)
    monkeypatch.setattr(comm, "create_comm", found.create)
    return found


@pytest.fixture
def widget(notebook):
    with explore(tinyworld(), PROMPT, OTHER, server=False) as found:
        yield found


def test_a_message_is_answered_as_by_the_library(notebook, widget) -> None:
    data = notebook.ask(widget, "next")
    expected = answer(tinyworld(), Question("next", PROMPT))
    assert {key: data[key] for key in expected} == expected
    assert "hookline.load('tinyworld')" in data["script"]


def test_bad_messages_are_told_and_the_widget_goes_on(notebook, widget) -> None:
    assert "there is no view" in notebook.ask(widget, "nothing", 1)["error"]
    assert "unknown: ['wrong']" in notebook.ask(widget, "next", 2, wrong=1)["error"]
    notebook.post(widget, "elsewhere", 3)
    assert "elsewhere" in notebook.reply(3)["error"]
    notebook.post(widget, "save", 4, state=None)
    assert "state" in notebook.reply(4)["error"]
    assert notebook.ask(widget, "tokens", 5)["tokens"]["ids"]


def test_a_newer_state_and_a_cancel_message_end_a_run(notebook, widget) -> None:
    started, release = threading.Event(), threading.Event()
    busy = widget._session.worker.submit(
        lambda: (started.set(), release.wait()), tab="other", slot="next", state=0
    )  # the worker is not free, so that what is asked now has to wait
    started.wait()
    question = {"view": "next", "prompt": PROMPT}
    notebook.post(widget, "ask", 1, slot="next", state=0, question=question)
    notebook.post(widget, "ask", 2, slot="next", state=1, question=question)
    notebook.post(widget, "ask", 3, slot="lens", state=1, question={**question, "view": "lens"})
    notebook.post(widget, "cancel", 4)
    release.set()
    busy.result()
    assert [notebook.reply(number) for number in (1, 2, 3)] == [{"cancelled": True}] * 3
    assert notebook.ask(widget, "next", 5, state=2)["view"] == "next"


def test_state_and_edits_can_be_read_and_set(notebook, widget) -> None:
    assert (widget.state["prompt"], widget.state["other"], widget.edits) == (PROMPT, OTHER, [])
    widget.edits = [{"kind": "zero", "point": "blocks.3.attn.hook_z", "head": 4}]
    sent = [
        each["state"]["state"] for each in notebook.sent if each.get("method") == "update" and "state" in each["state"]
    ]
    assert (
        sent[-1]["edits"] == widget.edits == [{"on": True, "kind": "zero", "point": "blocks.3.attn.hook_z", "head": 4}]
    )
    page = {**widget.state, "edits": [], "prompt": "Mary"}  # the page changes it
    widget._handle_msg({"content": {"data": {"method": "update", "state": {"state": page}}}, "buffers": []})
    assert (widget.state["prompt"], widget.edits) == ("Mary", [])
    with pytest.raises(HooklineError, match="zero"):
        widget.edits = [{"kind": "remove", "point": "blocks.3.attn.hook_z"}]


def test_a_page_is_saved_from_the_answers_so_far(notebook, widget, tmp_path) -> None:
    with pytest.raises(HooklineError):
        widget.page()
    data = notebook.ask(widget, "next")
    notebook.ask(widget, "tokens", 2)
    assert data["before"]["f32"] in widget.page().save(tmp_path / "page.html").read_text()
    notebook.ask(widget, "tokens", 3, state=1, prompt="Mary")  # the page has moved on
    notebook.post(widget, "save", 4, state=dict(widget.state))
    page = notebook.reply(4)["page"]
    assert page.startswith("<!doctype html>")
    assert data["before"]["f32"] not in page


def test_two_widgets_do_not_mix(notebook, widget) -> None:
    with explore(tinyworld(), OTHER, server=False) as second:
        notebook.post(second, "ask", 7, slot="next", state=5, question={"view": "next", "prompt": OTHER})
        first = notebook.ask(widget, "next", 8)
        assert first["target"]["text"] == " Mary"
        assert notebook.reply(7)["target"]["text"] == " John"
    assert notebook.ask(widget, "tokens", 9)["tokens"]["ids"]


def test_closing_frees_the_model(notebook) -> None:
    model = hookline.load("tinyworld")
    gone = weakref.ref(model)
    widget = explore(model, PROMPT, server=False)
    notebook.ask(widget, "next")
    before = threading.active_count()
    widget.close()
    widget.close()
    assert threading.active_count() < before
    assert "closed" in repr(widget)
    notebook.post(widget, "ask", 2, slot="next", state=0, question={"view": "next", "prompt": PROMPT})
    del model
    gc.collect()
    assert gone() is None

"""The explorer as a widget in a notebook: the same page, over the widget's messages. Needs anywidget."""

from __future__ import annotations

import threading
from typing import Any

import anywidget
import traitlets

from hookline.engine import undo
from hookline.errors import HooklineError
from hookline.explore.question import LiveEdit
from hookline.explore.session import Asked, Session
from hookline.explore.views import Data
from hookline.pages.document import widget_module
from hookline.pages.html_page import HtmlPage

MOST_SAVED = 200
"""Answers in a page that is saved."""


class ExplorerWidget(anywidget.AnyWidget):
    """A page of a model in a notebook, live until `close`.

        explorer = model.explore(prompt)
        explorer                       # as the last line of a cell: shows it
        explorer.state["prompt"]       # what the page shows now; assign to `state` or `edits` to change it
        explorer.page()                # the current views as a page that needs no kernel

    Questions are answered in a thread, so other cells can run meanwhile.
    """

    _esm = widget_module()
    state = traitlets.Dict().tag(sync=True)
    about = traitlets.Dict().tag(sync=True)
    answers = traitlets.List().tag(sync=True)  # of a saved notebook: the page writes it, and only the notebook reads it
    height = traitlets.Int().tag(sync=True)

    def __init__(self, session: Session, *, state: Data, height: int) -> None:
        self._session, self._shown, self._lock = (
            session,
            list[tuple[Data, Data]](),
            undo.interrupt_safe(threading.Lock()),
        )
        super().__init__(state={"edits": [], **state}, about=session.described, height=height)
        self.on_msg(self._receive)

    @property
    def edits(self) -> list[dict[str, Any]]:
        """The list of edits, as "Save list" writes it; assign a list to change it."""
        return list(self.state.get("edits", ()))

    @edits.setter
    def edits(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            LiveEdit.of(row)
        self.state = {**self.state, "edits": [{"on": True, **row} for row in rows]}

    def page(self) -> HtmlPage:
        """The current views as a page that needs no kernel: shown in a cell, it is saved with the notebook."""
        if not self._shown:
            raise HooklineError("the page has no views yet: show the explorer in a cell, and wait for its answers")
        return HtmlPage(self._session.saved(dict(self.state), self._shown), self.height)

    def close(self) -> None:
        """Remove the widget, end its thread and let go of the model; may be called more than once."""
        self._session.close()
        super().close()

    def __enter__(self) -> ExplorerWidget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        is_open = self.comm is not None
        return f"Explorer of {self._session.name}: " + ("run the cell to show it" if is_open else "closed")

    def _receive(self, _: Any, message: Any, __: Any) -> None:
        """Answer a message of the page: at once, or when the worker's thread has the view."""
        number, tab = message.get("id"), message.get("tab")
        try:
            reply = self._replied(message.get("path"), message.get("body"))
        except HooklineError as error:
            reply = {"error": str(error)}
        if isinstance(reply, Asked):
            question = message["body"]["question"]
            threading.Thread(target=self._finish, args=(number, tab, question, reply), daemon=True).start()
        else:
            self.send({"id": number, "tab": tab, "reply": reply})

    def _replied(self, path: Any, body: Any) -> Data | Asked:
        if not isinstance(body, dict):
            raise HooklineError("a question is a JSON object")
        if path == "ask":
            return self._session.ask(body)
        if path == "cancel":
            self._session.cancel(body)
        elif path == "save":
            return {"page": self._session.saved(body.get("state"), self._shown)}
        elif path != "hello":
            raise HooklineError(f"there is no message {path!r}")
        return {}

    def _finish(self, number: Any, tab: Any, question: Data, pending: Asked) -> None:
        data = pending.answered()
        with self._lock:
            if "view" in data:  # of the older ones, those about the same prompts stay
                same = [pair for pair in self._shown if _prompts(pair[0]) == _prompts(question) and pair[0] != question]
                self._shown = [*same[1 - MOST_SAVED :], (question, data)]
        self.send({"id": number, "tab": tab, "reply": data})


def _prompts(question: Data) -> tuple[Any, Any]:
    return question.get("prompt"), question.get("other")

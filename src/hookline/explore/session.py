"""What pages ask about one model, and the answers: the same for the server and for the widget."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import OutOfMemoryError

from hookline.errors import HooklineError
from hookline.explore.attached_probe import AttachedProbe
from hookline.explore.attached_saes import AttachedSaes
from hookline.explore.jobs import Cancelled, Job, Worker
from hookline.explore.live_edits import script
from hookline.explore.question import Question
from hookline.explore.remembered import Remembered
from hookline.explore.shared_runs import SharedRuns
from hookline.explore.views import Data, about_model, answer
from hookline.model import HookedModel
from hookline.pages.document import document


class Asked:
    """A question that waits for its turn."""

    def __init__(self, job: Job, question: Question, session: Session) -> None:
        self._job, self._question, self._session = job, question, session
        self._start = time.perf_counter()

    def answered(self) -> Data:
        """Wait for the view; if the model raises an error, return its message for the page."""
        try:
            data = {**self._job.result(), "seconds": time.perf_counter() - self._start}
            return data | ({"script": self._session.script(self._question)} if self._question.view == "next" else {})
        except Cancelled:
            return {"cancelled": True}
        except HooklineError as error:
            return {"error": str(error)}
        except Exception as error:  # whatever a model raises
            return {"error": self._told(error)}

    def _told(self, error: Exception) -> str:
        if not (isinstance(error, MemoryError | OutOfMemoryError) or "allocate memory" in str(error)):
            return f"{type(error).__name__}: {error}"
        self._session.runs.clear()
        return f"not enough memory for this view: use a shorter prompt, or a smaller model ({type(error).__name__})"


class Session:
    """A model, the thread that runs what its pages ask, and what the pages know about the model.

    session = Session(model, "tinyworld")
    session.ask({"tab": "a", "slot": "next", "state": 0, "question": {"view": "next", "prompt": "Mary"}}).answered()
    """

    def __init__(
        self,
        model: HookedModel,
        name: str,
        *,
        saes: AttachedSaes | None = None,
        probe: AttachedProbe | None = None,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self.described = about_model(model, name, saes, probe)
        self.name, self.worker, self.runs, self.remembered = name, Worker(), SharedRuns(), Remembered()
        self._model: HookedModel | None = model
        self._saes, self._probe, self._paths = saes, probe, paths or {}

    def ask(self, body: dict[str, Any]) -> Asked:
        """Read a question and let it wait for its turn; raises if it is malformed."""
        state, model = body.get("state"), self._model
        if not isinstance(state, int):
            raise HooklineError("a question needs the number of the page's state")
        tab, slot = _short(body, "tab"), _short(body, "slot")
        question = Question.of(body.get("question"), self._saes, self._probe)
        if model is None:
            raise HooklineError("this explorer is closed: call model.explore again")
        job = self.worker.submit(lambda: self._view(model, question, tab, state), tab=tab, slot=slot, state=state)
        return Asked(job, question, self)

    def _view(self, model: HookedModel, question: Question, tab: str, state: int) -> Data:
        with self.runs.of_state(tab, state), self.remembered.used():
            return answer(model, question)

    def script(self, question: Question) -> str:
        """The program that prints what the page shows."""
        return script(self.name, question, self._paths)

    def cancel(self, body: dict[str, Any]) -> None:
        """Cancel everything that a tab has asked."""
        self.worker.cancel(_short(body, "tab"))

    def saved(self, state: Any, answers: Any) -> str:
        """The page with these answers inside: pairs of a question and the view that answers it."""
        if not isinstance(state, dict) or not isinstance(answers, list):
            raise HooklineError("a page is saved from its state and its answers")
        try:
            data = {"live": False, "model": self.described, "steps": [{"state": state}], "answers": answers}
            return document(data)
        except ValueError as error:  # NaN, which JSON does not have
            raise HooklineError(f"the page cannot be saved: {error}") from None

    def close(self) -> None:
        """Cancel everything, end the thread, and let go of the model; may be called more than once."""
        self.worker.close()
        self.runs.clear()
        self.remembered.clear()
        self._model = self._saes = self._probe = None


def _short(body: dict[str, Any], name: str) -> str:
    text = body.get(name)
    if not isinstance(text, str) or len(text) > 100:
        raise HooklineError(f"{name} is a short text")
    return text

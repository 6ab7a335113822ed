"""One thread that runs what the pages ask of a model, one job at a time; newer questions cancel older ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

MOST_WAITING = 64
"""Jobs that wait for their turn."""


class Cancelled(Exception):  # noqa: N818 (what happened, not a mistake)
    """The job was cancelled: something newer was asked, or the reader does not want to wait."""


class Job:
    """A question of a page. `state` counts up when the page changes its prompt or edits."""

    def __init__(self, run: Callable[[], Any], tab: str, slot: str, state: int) -> None:
        self.run, self.tab, self.slot, self.state = run, tab, slot, state
        self.cancelled, self.done = threading.Event(), threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def is_older(self, than: Job) -> bool:
        """Whether the other job makes this one useless."""
        same = self.slot == than.slot and self.state == than.state
        return self.tab == than.tab and (same or self.state < than.state)

    def result(self) -> Any:
        """Wait for the value; raises what the job raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.value

    def perform(self) -> None:
        """Run it in this thread, unless it is cancelled already."""
        try:
            if self.cancelled.is_set():
                raise Cancelled
            with _stopping(self.cancelled):
                self.value = self.run()
            if self.cancelled.is_set():
                raise Cancelled
        except BaseException as error:  # the thread goes on, and `result` raises it
            self.error = error
        self.done.set()


class Worker:
    """The thread, and the jobs that wait for it.

    with Worker() as worker:
        worker.submit(lambda: model(prompt), tab="a", slot="next", state=0).result()
    """

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="hookline explorer", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any], *, tab: str, slot: str, state: int) -> Job:
        """Add a job; jobs of the same tab that it makes useless are cancelled."""
        job = Job(run, tab, slot, state)
        with self._changed:
            for other in self._all():
                if other.is_older(job):
                    other.cancelled.set()
                elif job.is_older(other):
                    job.cancelled.set()  # it arrived late: the page has left that state
            if self._is_closed or len(self._waiting) >= MOST_WAITING:
                job.error = Cancelled()
                job.done.set()
                return job
            self._waiting.append(job)
            self._changed.notify()
        return job

    def cancel(self, tab: str) -> None:
        """Cancel all jobs of a tab."""
        with self._changed:
            for job in self._all():
                if job.tab == tab:
                    job.cancelled.set()

    def close(self) -> None:
        """Cancel everything, and wait a little for the thread to end: a single long operation is not waited for."""
        with self._changed:
            self._is_closed = True
            for job in self._all():
                job.cancelled.set()
            self._changed.notify()
        self._thread.join(timeout=2.0)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self) -> list[Job]:
        return [*self._waiting, *([] if self._current is None else [self._current])]

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            job.perform()

    def _next(self) -> Job | None:
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            self._current = self._waiting.popleft() if self._waiting else None
            return self._current


@contextmanager
def _stopping(cancelled: threading.Event) -> Iterator[None]:
    """Raise `Cancelled` in this thread when it next calls a module after the event was set."""
    thread_id = threading.get_ident()

    def check(*_: Any) -> None:
        if cancelled.is_set() and threading.get_ident() == thread_id:
            raise Cancelled

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()

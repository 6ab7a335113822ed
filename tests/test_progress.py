"""Progress bars: shown if asked, and otherwise nothing that other threads could wait for."""

import threading

import pytest
import tqdm.auto
from tqdm.std import TqdmDefaultWriteLock

from hookline.progress import HiddenBar, progress_bar


def test_a_bar_that_is_shown_counts() -> None:
    with progress_bar(True, 5, " steps", "training") as bar:
        bar.update()
        bar.update(3)
        assert (bar.n, bar.total, bar.unit, bar.desc, bar.leave) == (4, 5, " steps", "training", False)
    assert isinstance(bar, tqdm.auto.tqdm)


def test_a_bar_that_is_not_shown_takes_no_lock(monkeypatch) -> None:
    """An interrupt inside tqdm leaves its lock locked, and other threads must not wait for it."""
    lock = TqdmDefaultWriteLock()
    monkeypatch.setattr(tqdm.auto.tqdm, "_lock", lock, raising=False)
    found = []

    def work() -> None:
        with progress_bar(False, 5, " steps") as bar:
            bar.update(5)
            bar.set_postfix(loss=1)
            found.append(bar)

    with lock:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(20)
    assert [type(bar) for bar in found] == [HiddenBar]


def test_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), progress_bar(False, None, "text"):
        _ = 1 / 0

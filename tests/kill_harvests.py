"""Stop harvests at random moments until so many are stopped; each continues where the one before was stopped.

    python tests/kill_harvests.py FOLDER KILLS [SEED]

Prints what it met as JSON, for SIGKILL and for SIGINT. With SIGKILL every store must, in the end, be byte for byte that
of a harvest nobody disturbed. With SIGINT (Ctrl-C) a store must have every batch that was finished before the signal,
and have the same rows in the end. Processes are forked from one that has everything loaded, since loading takes longer
than harvesting.
"""

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stores import POINTS, files, same_rows, texts, tinyworld

import hookline
from hookline import HookedModel
from hookline.store import LocalStore

BATCH, STOPPED = 2, 77


class Counter:
    """A number that two processes see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def set(self, value: int) -> None:
        self._memory[:] = struct.pack("q", value)

    def get(self) -> int:
        return struct.unpack("q", self._memory[:])[0]


ASKED = Counter()
"""The number of the example that a harvest asked for last."""


def data() -> Iterator[str]:
    for number, text in enumerate(texts(60)):
        ASKED.set(number)
        yield text


def harvest(model: HookedModel, path: Path, **more: Any) -> None:
    options: dict[str, Any] = {"batch_size": BATCH, "shard_rows": 30, "dtype": torch.bfloat16, "progress": False}
    hookline.harvest(model, data(), POINTS, path, **options | more)


def child(model: HookedModel, path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without it
    code = 1
    try:
        harvest(model, path)
        code = 0
    except KeyboardInterrupt:
        code = STOPPED
    finally:
        os._exit(code)


def stopped(model: HookedModel, path: Path, seconds: float, how: signal.Signals) -> bool:
    """Harvest in another process and stop it after a while; whether it was still at it."""
    ASKED.set(0)
    process = os.fork()
    if not process:
        child(model, path)
    time.sleep(seconds)
    os.kill(process, how)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) not in (0, STOPPED):
        sys.exit("a harvest failed by itself")
    return os.WEXITSTATUS(status) == STOPPED


def check_kept(path: Path) -> None:
    """After Ctrl-C, every batch must be there that was finished before."""
    finished = ASKED.get() // BATCH * BATCH
    found = LocalStore(path).examples if (path / "manifest.json").exists() else 0
    if found < finished:
        sys.exit(f"an interrupt left {found} of {finished} examples")


def state(path: Path) -> str:
    """In which state a kill left the store, which must be one that can be read."""
    if not (path / "manifest.json").exists():
        return "nothing yet"
    found = LocalStore(path).verify()
    if not found.is_sound:
        sys.exit(f"after a kill: {found}")
    LocalStore(path).rows()
    if list(path.glob("*.part")):
        return "within a write"
    return "before the manifest" if "adds it" in str(found) else "between writes"


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    model = tinyworld()
    harvest(model, folder / "whole")
    start = time.perf_counter()
    harvest(model, folder / "timed")
    seconds = (time.perf_counter() - start) / 2
    signals = (signal.SIGKILL, signal.SIGINT)
    print(json.dumps({how.name: tried(model, folder, kills, seconds, how) for how in signals}))


def tried(model: HookedModel, folder: Path, kills: int, seconds: float, how: signal.Signals) -> dict[str, int]:
    """What was met when harvests were stopped by that signal, each within so many seconds."""
    wanted, met, stores, done = files(folder / "whole"), dict[str, int](), 0, 0
    while done < kills:
        path = folder / f"{how.name} {stores}"
        while done < kills and stopped(model, path, random.uniform(0, seconds), how):
            done += 1
            met[state(path)] = met.get(state(path), 0) + 1
            if how == signal.SIGINT:
                check_kept(path)
        harvest(model, path)
        is_same = same_rows(path, folder / "whole") if how == signal.SIGINT else files(path) == wanted
        if not is_same:
            sys.exit(f"{path.name} differs from a store that nobody disturbed")
        stores += 1
    return {"kills": done, "stores": stores, **met}


if __name__ == "__main__":
    random.seed(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""Kill harvests at random moments until so many are killed; each goes on where the one before was killed.

    python tests/kill_harvests.py FOLDER KILLS

Prints what it met as JSON. Every store must, in the end, be byte for byte that of a harvest nobody disturbed. Processes
are forked from one that has everything loaded, since loading takes longer than harvesting.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from stores import POINTS, files, texts, tinyworld

import hookline
from hookline import HookedModel
from hookline.store import LocalStore


def harvest(model: HookedModel, path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 2, "shard_rows": 30, "dtype": torch.bfloat16, "progress": False}
    hookline.harvest(model, texts(60), POINTS, path, **options)


def killed(model: HookedModel, path: Path, seconds: float) -> bool:
    """Harvest in another process and kill it after a while; whether it was still at it."""
    child = os.fork()
    if not child:
        harvest(model, path)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        sys.exit("a harvest failed by itself")
    return os.WIFSIGNALED(status)


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
    return "before the manifest" if "takes it up" in str(found) else "between writes"


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    model = tinyworld()
    harvest(model, folder / "whole")
    start = time.perf_counter()
    harvest(model, folder / "timed")
    whole = time.perf_counter() - start
    wanted, met, stores, done = files(folder / "whole"), dict[str, int](), 0, 0
    while done < kills:
        path = folder / str(stores)
        while done < kills and killed(model, path, random.uniform(0, whole / 2)):
            done += 1
            met[state(path)] = met.get(state(path), 0) + 1
        harvest(model, path)
        if files(path) != wanted:
            sys.exit(f"store {stores} differs from one that nobody disturbed")
        stores += 1
    print(json.dumps({"kills": done, "stores": stores, **met}))


if __name__ == "__main__":
    random.seed(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    main(Path(sys.argv[1]), int(sys.argv[2]))

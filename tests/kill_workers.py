"""Kill workers that harvest together with -9 at random moments, until so many are killed; others go on.

    python tests/kill_workers.py FOLDER KILLS [SEED]

Several workers harvest into one store, each in a process of its own; whenever one is killed, another may be started
with another rank and another number of workers. In the end every store must have the shards, records and manifest of a
harvest that nobody disturbed, byte for byte. Prints what it met as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from stores import POINTS, files, texts, tinyworld

import hookline
from hookline import HookedModel
from hookline.store import HarvestWorker, LocalStore

LEASE = 0.5


def harvest(model: HookedModel, path: Path, rank: int, world: int) -> None:
    worker = HarvestWorker(rank, world, unit=2, lease=LEASE)
    options = {"batch_size": 2, "shard_rows": 30, "dtype": torch.bfloat16, "progress": False}
    hookline.harvest(model, texts(60), POINTS, path, shard=worker, **options)  # type: ignore[arg-type]


def started(model: HookedModel, path: Path) -> int:
    """Start a worker in another process, as one of up to four."""
    world = random.randint(1, 4)
    rank = random.randrange(world)
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        harvest(model, path, rank, world)
        code = 0
    finally:
        os._exit(code)


def ended(process: int, *, wait: bool = False) -> bool:
    """Whether a worker has ended; it must not have failed by itself."""
    found, status = os.waitpid(process, 0 if wait else os.WNOHANG)
    if found and os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a worker failed by itself")
    return bool(found)


def disturbed(model: HookedModel, path: Path, kills: int, seconds: float) -> int:
    """Harvest with three workers at a time, killing some; returns how many were killed."""
    done, workers = 0, [started(model, path) for _ in range(3)]
    while workers:
        time.sleep(random.uniform(0, seconds))
        workers = [each for each in workers if not ended(each)]
        if workers and done < kills:
            victim = workers.pop(random.randrange(len(workers)))
            os.kill(victim, random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
            if random.random() < 0.5:  # one that sleeps beyond its lease and wakes up
                time.sleep(random.uniform(0, 2 * LEASE))
            os.kill(victim, signal.SIGKILL if random.random() < 0.7 else signal.SIGCONT)
            ended(victim, wait=True)
            done += 1
            if (path / "manifest.json").exists() and not (found := LocalStore(path).verify()).is_sound:
                sys.exit(f"after a kill: {found}")
            workers.append(started(model, path))
    return done


def undisturbed(path: Path) -> dict[str, bytes]:
    return {name: raw for name, raw in files(path).items() if not name.endswith((".part", ".lease"))}


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    model = tinyworld()
    start = time.perf_counter()
    harvest(model, folder / "whole", 0, 1)
    seconds, wanted, stores, done = time.perf_counter() - start, undisturbed(folder / "whole"), 0, 0
    while done < kills:
        path = folder / f"store {stores}"
        done += disturbed(model, path, min(8, kills - done), seconds / 3)
        harvest(model, path, 0, 1)  # all others may have been killed
        if undisturbed(path) != wanted:
            sys.exit(f"{path.name} differs from a store that nobody disturbed")
        if not LocalStore(path).verify().is_sound or not LocalStore(path).is_complete:
            sys.exit(f"{path.name} is not sound")
        stores += 1
    print(json.dumps({"kills": done, "stores": stores}))


if __name__ == "__main__":
    random.seed(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    main(Path(sys.argv[1]), int(sys.argv[2]))

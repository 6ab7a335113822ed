"""Programs on models that are sharded over two processes, which stay and get many programs.

`python -m fuzz.sharded RANK PORT` is one of them: it reads programs and writes what they observed.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz import compare
from fuzz.library import Library
from fuzz.oracle import Observed
from fuzz.program import Attach, Language, Program, hooks_of, read, runs
from fuzz.subject import Subject
from torch import Tensor
from transformers.utils import logging

TESTS = Path(__file__).parents[1]
PROCESSES = 2
KINDS = ("llama", "qwen2", "mistral", "gemma2")
DOES = ("logits", "loss", "both", "generate", "cache")


def is_sharded(program: Program) -> bool:
    """Whether every process has all that a program shows: classic points, and logits, losses or tokens."""
    network = program.network
    if not isinstance(network, Language) or network.kind not in KINDS or network.as_module:
        return False
    if (network.family, network.dtype, network.attention) != ("causal", "float32", "sdpa"):
        return False
    if any(isinstance(step, Attach) for step in program.steps):
        return False  # a hook of others gets the part of one process
    if any(run.mode == "grad" or run.is_training or run.autocast for run in runs(program)):
        return False
    if any(dict(run.options).get("does") not in DOES for run in runs(program)):
        return False
    reads = [place for run in runs(program) if isinstance(run.reads, tuple) for place in run.reads]
    places = [*reads, *(hook.place for hook in hooks_of(program))]
    return not any(place.name.startswith(place.module) for place in places)


class Process:
    """One of the processes."""

    def __init__(self, rank: int, port: int) -> None:
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.sharded", str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        atexit.register(self.end)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, program: Program) -> None:
        assert self.process.stdin is not None
        pickle.dump(repr(program), self.process.stdin)
        self.process.stdin.flush()

    def received(self) -> Observed | BaseException:
        assert self.process.stdout is not None
        found: Observed | BaseException = pickle.load(self.process.stdout)
        return found


@cache
def processes() -> list[Process]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Process(rank, port) for rank in range(PROCESSES)]


def run(subject: Subject, program: Program) -> Observed:
    """Run a program in all processes, which have models of their own and must observe the same."""
    for process in processes():
        process.send(program)
    observed = [process.received() for process in processes()]
    for result in observed:
        if isinstance(result, BaseException):
            raise result
    first, *others = observed
    for other in others:
        unlike = compare.difference(program, first, other)  # type: ignore[arg-type]
        if unlike is not None:
            raise AssertionError(f"the processes differ: {unlike}")
    return first  # type: ignore[return-value]


class ShardedSubject(Subject):
    """A part of a model."""

    def build(self) -> Any:
        return built(self.network.kind, self.network.dtype)

    def remember(self) -> None:
        """Parameters are parts, and nothing changes them."""

    def restore(self) -> None:
        """Nothing has changed."""

    def state(self) -> Observed:
        return {}


@cache
def built(kind: str, dtype: str) -> Any:
    """The part of a model that this process has."""
    import sharded_models

    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared, 0)
        module = sharded_models.both(kind, shared[0], getattr(torch, dtype))[1]
        torch.distributed.barrier()
    return module


def main() -> None:
    """Read programs until there are no more."""
    rank, port = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(PROCESSES), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    torch.distributed.init_process_group("gloo", rank=int(rank), world_size=PROCESSES)
    while True:
        try:
            program = read(pickle.load(sys.stdin.buffer))
        except EOFError:
            return
        try:
            observed: Any = Library(ShardedSubject(program.network), program).run()
        except Exception as error:  # raised in the process that asked
            observed = error
        answers.write(sendable(observed))
        answers.flush()


def sendable(observed: Any) -> bytes:
    """What was observed, or an error that can be sent."""
    if isinstance(observed, BaseException):
        try:
            return pickle.dumps(pickle.loads(pickle.dumps(observed)))
        except Exception:  # it refers to a model
            import hookline

            kind = hookline.HooklineError if isinstance(observed, hookline.HooklineError) else RuntimeError
            return pickle.dumps(kind(f"{type(observed).__name__}: {observed}"))
    return pickle.dumps({name: x.contiguous() if isinstance(x, Tensor) else x for name, x in observed.items()})


if __name__ == "__main__":
    main()

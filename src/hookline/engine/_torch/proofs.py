"""Whether a trick holds in this interpreter: proved once, when it is first needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Any

from hookline.errors import HooklineError

Probe = Callable[[], None]


class ProbeError(Exception):
    """A trick does not hold here, and why."""


class _Missing:
    """Something private that this version of torch or Python does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ProbeError(f"there is no {self._name}")


def private(owner: Any, path: str) -> Any:
    """What `owner` has at a path of attributes; otherwise a stand-in that raises when it is called."""
    value = owner
    for name in path.split("."):
        value = getattr(value, name, None)
    return _Missing(f"{getattr(owner, '__name__', owner)}.{path}") if value is None else value


def insist(is_so: bool, what: str) -> None:
    """Raise unless something is as a trick needs it."""
    if not is_so:
        raise ProbeError(f"it does not hold that {what}")


@cache
def why_broken(probe: Probe) -> str:
    """Why a trick does not hold; empty if it does.

    In a thread of its own, where no mode, transform, autocast or inference mode of the caller is on.
    """
    reasons = ["it was not tried"]

    def run() -> None:
        try:
            probe()
        except ProbeError as error:
            reasons[:] = [str(error)]
        except Exception as error:  # whatever another version raises
            reasons[:] = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
        else:
            reasons.clear()

    thread, is_collecting = Thread(target=run, name="hookline probe"), gc.isenabled()
    gc.disable()  # a finalizer that waits for a lock of this thread, which waits for the other one
    try:
        thread.start()
        thread.join()
    finally:
        if is_collecting:
            gc.enable()
    return "".join(reasons)


def once(probe: Probe) -> Callable[[], bool]:
    """Return the function that says whether a trick holds; from its second call on, it costs no Python call."""
    return cache(lambda: not why_broken(probe))


def requirement(*probes: Probe) -> Callable[[], None]:
    """Return the function that raises if one of these tricks, which nothing can replace, does not hold."""

    @cache
    def check() -> None:
        for probe in probes:
            if why := why_broken(probe):
                name = probe.__module__.rpartition(".")[2]
                raise HooklineError(
                    f"this needs what hookline calls {name}, and with this version of torch or Python {why}; "
                    f"`hookline doctor` lists what holds here, and docs/versions.md has the versions that were tried"
                )

    return check

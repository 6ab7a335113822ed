"""Real signals at random instants, and everything that they must not change."""

import _thread
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hookline.engine import schedule, taps
from hookline.engine._compiler import pausing
from hookline.engine._inner import operators
from hookline.engine._undo import blocks
from hookline.engine._undo.blocks import interrupt_safe
from hookline.engine.pass_state import pass_state

_PLACES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything on a model and in this thread that a run may change."""
    modules = dict(module.named_modules())
    return {
        "hooks": {(name, place): list(getattr(each, place)) for name, each in modules.items() for place in _PLACES},
        "parameters": {(name, key): id(x) for name, each in modules.items() for key, x in each._parameters.items()},
        "training": {name: each.training for name, each in modules.items()},
        "detours": {name: vars(each).get("_compiled_call_impl") for name, each in modules.items()},
        "standing hooks": [
            tap.permanent for each in modules.values() for tap in taps._taps.get(each, {}).values() if tap.permanent
        ],
        "active runs": schedule.active.get(),
        "open blocks": dict(blocks._open),
        "users of the compiler": set(pausing._users),
        "skipped modules": dict(pass_state.skipped),
        "watches": list(pass_state.interceptors),
        "operators": operators.is_off(),
        "hooks that are running": pass_state.hooks,
        # One that is over does nothing: torch may push it again when the traceback is freed.
        "modes": [mode for mode in overrides._get_current_function_mode_stack() if not getattr(mode, "is_over", False)],
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "gradients": torch.is_grad_enabled(),
    }


class Signals:
    """Sends signals into pieces of work at random instants, and looks at what they leave."""

    def __init__(self, module: nn.Module, call: Callable[[], Tensor], seed: int = 0) -> None:
        self.module, self.call, self.random = module, call, random.Random(seed)
        self.received = 0
        self.left: list[tuple[str, list[str]]] = []

    def _receive(self, *_: object) -> None:
        self.received += 1
        raise KeyboardInterrupt

    def send(self, name: str, work: Callable[[], Any], times: int) -> None:
        """Send so many into one piece of work, until one leaves something."""
        length = self._length(work)
        expected, before = self.call(), state_of(self.module)
        handler = signal.signal(signal.SIGALRM, self._receive)
        try:
            for _ in range(times):
                self._interrupt(work, max(1e-6, self.random.uniform(0, 1.05 * length)))
                after = state_of(self.module)
                wrong = [each for each in before if before[each] != after[each]]
                if not wrong and not torch.equal(self.call(), expected):
                    wrong = ["the output of a plain call"]
                if wrong:
                    self.left.append((name, wrong))
                    return
        finally:
            signal.signal(signal.SIGALRM, handler)

    def _length(self, work: Callable[[], Any]) -> float:
        lengths = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            lengths.append(time.perf_counter() - start)
        return min(lengths)

    def _interrupt(self, work: Callable[[], Any], after: float) -> None:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass


class Interrupted:
    """A context manager written in C as far as Python can tell: an interrupt arrives while it is entered."""

    __enter__ = _thread.interrupt_main

    def __init__(self) -> None:
        self.is_left = False

    def __exit__(self, *_: object) -> None:
        self.is_left = True


def is_left(is_entered: bool) -> bool:
    """Whether such a context manager is left, entered by `entered` or by a plain `with`."""
    block: Any = Interrupted()
    try:
        with interrupt_safe(block) if is_entered else block:
            id(block)  # where a pending interrupt is raised at the latest
    except KeyboardInterrupt:
        return block.is_left
    raise AssertionError("no interrupt")

"""Real signals at random instants, and a check that nothing is left after them."""

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, overrides

from hookline import blocks, compiled, taps


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything on a model and in this thread that a run may change."""
    modules = dict(module.named_modules())
    places = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    places += ("_forward_hooks_always_called",)
    return {
        "hooks": {(name, place): list(getattr(each, place)) for name, each in modules.items() for place in places},
        "parameters": {
            (name, key): id(value) for name, each in modules.items() for key, value in each._parameters.items()
        },
        "training": {name: each.training for name, each in modules.items()},
        "detours": {name: vars(each).get("_compiled_call_impl") for name, each in modules.items()},
        "active": taps.active.get(),
        "standing": {
            (name, kind): tap.standing
            for name, each in modules.items()
            for kind, tap in taps._taps.get(each, {}).items()
            if tap.standing
        },
        "blocks": dict(blocks._open),
        "compiled": set(compiled._users),
        "skipped": dict(taps.now.skipped),
        "watches": list(taps.now.watches),
        "depth in hooks": taps.now.hooks,
        "modes": [mode for mode in overrides._get_current_function_mode_stack() if not getattr(mode, "is_over", False)],
        "grad": torch.is_grad_enabled(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def interrupted(work: Callable[[], Any], after: float) -> bool:
    """Run `work`, and send this process a signal after some seconds; whether it came while `work` ran."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


class Signals:
    """Sends signals into pieces of work at random instants and counts what they leave."""

    def __init__(self, module: nn.Module, call: Callable[[], Tensor], seed: int = 0) -> None:
        self.module, self.call, self.random = module, call, random.Random(seed)
        self.sent, self.left = 0, []  # type: ignore[var-annotated]

    def send(self, name: str, work: Callable[[], Any], times: int) -> int:
        """So many signals into one piece of work; how many came while it ran."""
        work()
        start = time.perf_counter()
        work()
        length = time.perf_counter() - start
        expected, before, came = self.call(), state_of(self.module), 0
        handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for _ in range(times):
                came += interrupted(work, max(1e-6, self.random.uniform(0, 1.05 * length)))
                wrong = differences(before, state_of(self.module))
                if not wrong and not torch.equal(self.call(), expected):
                    wrong = ["the output of a plain call"]
                if wrong:
                    self.left.append((name, wrong))
                    return came
        finally:
            signal.signal(signal.SIGALRM, handler)
            self.sent += came
        return came

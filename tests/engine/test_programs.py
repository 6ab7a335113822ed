"""The engine on random programs with aliasing and in-place writes, against the same programs without it or by hand."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from programs import SIZE, Edited, Program, Store
from torch import Tensor, nn

import hookline
from hookline.errors import NeverFiredWarning

CASES = 3000


def given(seed: int) -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def state(module: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    """All that a run can be told by: its output, what it left in its input and in the buffers, and its gradients."""
    return [out.detach().clone(), x.detach().clone(), *(buffer.clone() for buffer in module.buffers())]


def gradients(module: nn.Module, out: Tensor) -> list[Tensor] | None:
    """Of the parameters; None where torch refuses."""
    module.zero_grad()
    try:
        out.sum().backward()
    except RuntimeError:
        return None
    return [torch.zeros(0) if p.grad is None else p.grad.clone() for p in module.parameters()]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: list[Tensor] | None, other: list[Tensor]) -> bool:
    """As `alike`, for gradients: a node more in the graph may change the order in which torch adds them up."""
    return one is not None and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(one, other, strict=True)
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Points that never fire, and gradients that are left out with a warning, are not what is compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)
        yield


def plain(make: Callable[[], nn.Module], seed: int, *, grad: bool) -> tuple[list[Tensor], list[Tensor] | None] | None:
    """What a program does by itself; None if torch refuses to run it."""
    module, x = make(), given(seed)
    try:
        with torch.set_grad_enabled(grad):
            out = module(x)
    except RuntimeError:
        return None
    return state(module, x, out), gradients(module, out) if grad else None


class Readers:
    """Hooks that only read, each in its own way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.kept = rng, []

    def pick(self) -> Callable[[Tensor], Any]:
        return self.rng.choice([lambda _h: None, lambda h: h, self.keep, self.work, self.look])

    def keep(self, h: Tensor) -> None:
        self.kept.append((h, h.detach().clone()))

    def work(self, h: Tensor) -> None:
        self.kept.append((h.detach().pow(2), h.detach().pow(2)))

    def look(self, h: Tensor) -> None:
        h.detach().cpu().numpy().sum()


def points_of(net: Any, rng: random.Random) -> list[str]:
    names = [name for name in net.hook_dict if rng.random() < 0.5]
    return names or ["output"]


def check_reads(seed: int, *, grad: bool) -> bool:
    expected = plain(lambda: Program(seed, blind=not grad), seed, grad=grad)
    if expected is None:
        return False
    rng = random.Random(seed)
    module, x, readers = Program(seed, blind=not grad), given(seed), Readers(rng)
    net = hookline.hook(module)
    with torch.set_grad_enabled(grad), quietly():
        out = net.run_with_hooks(x, fwd_hooks=[(name, readers.pick()) for name in points_of(net, rng)])
    assert alike(state(module, x, out), expected[0]), f"program {seed}: a hook that reads changes it"
    if grad and expected[1] is not None:
        found = gradients(module, out)
        assert close(found, expected[1]), f"program {seed}: a hook that reads changes gradients"
    assert all(torch.equal(a.detach(), b) for a, b in readers.kept), f"program {seed}: what a hook kept has changed"
    return True


def check_cache(seed: int, *, grad: bool) -> bool:
    expected = plain(lambda: Program(seed, blind=not grad), seed, grad=grad)
    if expected is None:
        return False
    by_hand, module, x = Program(seed, blind=not grad), Program(seed, blind=not grad), given(seed)
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        seen.setdefault(name, []).append(value.detach().clone())

    for name, child in by_hand.named_modules():
        before, after = f"{name}.input".lstrip("."), name or "output"
        child.register_forward_pre_hook(lambda _m, args, n=before: keep(n, args))
        child.register_forward_hook(lambda _m, _a, out, n=after: keep(n, out))
    views = [buffer.data for buffer in module.buffers()]  # made before the run, and used after it
    if x.device.type == "cpu":
        views = [view.numpy() for view in views]
    with torch.set_grad_enabled(grad):
        by_hand(given(seed))
        out, cache = hookline.hook(module).run_with_cache(x)
    assert alike(state(module, x, out), expected[0]), f"program {seed}: caching changes it"
    for view, buffer in zip(views, module.buffers(), strict=True):
        buffer.fill_(5)
        assert (view == 5).all(), f"program {seed}: a run cut a view off its buffer"
        view[:] = 7
    x.zero_()
    for name, tensors in seen.items():
        keys = [name] if len(tensors) == 1 else [f"{name}#{call}" for call in range(len(tensors))]
        for key, tensor in zip(keys, tensors, strict=True):
            assert torch.equal(cache[key], tensor), f"program {seed}: {key} is not what passed"
    return True


def with_gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, Any] | None:
    """A run with the gradients of everything; None where they are refused, as the model writes to what they need."""
    try:
        with quietly():
            return hookline.hook(module).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    except hookline.HooklineError as error:
        if "in place" in str(error):
            return None
        raise


def check_gradients(seed: int) -> bool:
    """With the gradients of everything, what a program computes stays the same."""
    expected = plain(lambda: Program(seed), seed, grad=True)
    if expected is None or expected[1] is None:
        return False
    module, x = Program(seed), given(seed)
    cached = with_gradients(module, x)
    if cached is None:
        return False
    out, _ = cached
    assert alike(state(module, x, out), expected[0]), f"program {seed}: caching gradients changes it"
    return True


def check_pure_gradients(seed: int) -> bool:
    """Without in-place writes, the gradients of a point are those of a copy put there by hand."""
    module, by_hand, x = Program(seed, writes=False), Program(seed, writes=False), given(seed)
    seen: dict[str, list[Tensor]] = {}

    def through(name: str, value: Tensor) -> Tensor:
        value = (value if value.requires_grad else value.detach().requires_grad_()).clone()
        value.retain_grad()
        seen.setdefault(name, []).append(value)
        return value

    for name, child in by_hand.named_modules():
        before, after = f"{name}.input".lstrip("."), name or "output"
        child.register_forward_pre_hook(lambda _m, args, n=before: (through(n, args[0]),))
        child.register_forward_hook(lambda _m, _a, out, n=after: through(n, out))
    if any(isinstance(part, nn.ReLU) and part.inplace for part in module.modules()):
        return False
    by_hand(x).sum().backward()
    stores = [name for name, child in by_hand.named_modules() if isinstance(child, Store)]
    if any(len(seen.get(name, ())) > 1 for name in stores):
        return False  # it writes to what it returned before, which the copy made by hand keeps
    cached = with_gradients(module, x)
    if cached is None:
        return False
    _, cache = cached
    for name, tensors in seen.items():
        keys = [f"{name}_grad"] if len(tensors) == 1 else [f"{name}#{call}_grad" for call in range(len(tensors))]
        wanted = {key: tensor.grad for key, tensor in zip(keys, tensors, strict=True) if tensor.grad is not None}
        for key, gradient in wanted.items():
            assert torch.allclose(cache[key], gradient, atol=1e-6), f"program {seed}: {key} is wrong"
    return True


def check_edit(seed: int, *, grad: bool) -> bool:
    rng = random.Random(seed)
    part, at_input, in_place = rng.randrange(2), rng.random() < 0.5, rng.random() < 0.5

    def make() -> Edited:
        module = Edited(seed, blind=not grad)
        module.part, module.at_input, module.edit = part, at_input, lambda h: h * 0.5 + 1
        return module

    def edit(h: Tensor) -> Tensor | None:
        if not in_place:
            return h * 0.5 + 1
        h.mul_(0.5).add_(1)
        return None

    expected = plain(make, seed, grad=grad)
    if expected is None:
        return False
    module, x = Program(seed, blind=not grad), given(seed)
    name = f"parts.{part}.input" if at_input else f"parts.{part}"
    with torch.set_grad_enabled(grad), quietly():
        out = hookline.hook(module).run_with_hooks(x, fwd_hooks=[(name, edit)])
    assert alike(state(module, x, out), expected[0]), f"program {seed}: the edit at {name} is not as by hand"
    if grad and expected[1] is not None:
        found = gradients(module, out)
        assert close(found, expected[1]), f"program {seed}: gradients after the edit at {name}"
    return True


CHECKS: dict[str, Callable[[int], bool]] = {
    "reads": lambda seed: check_reads(seed, grad=False),
    "reads with gradients": lambda seed: check_reads(seed, grad=True),
    "caches": lambda seed: check_cache(seed, grad=False),
    "caches with gradients": lambda seed: check_cache(seed, grad=True),
    "gradients": check_gradients,
    "gradients of pure programs": check_pure_gradients,
    "edits": lambda seed: check_edit(seed, grad=False),
    "edits with gradients": lambda seed: check_edit(seed, grad=True),
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_few_programs(check: str) -> None:
    assert sum(CHECKS[check](seed) for seed in range(40)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_thousands_of_programs(check: str) -> None:
    assert sum(CHECKS[check](seed) for seed in range(40, 40 + CASES)) >= CASES // 4

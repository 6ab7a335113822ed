"""The engine's tricks with what is private of torch and CPython: all hold here, and one that does not is noticed."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from networks import MLP
from torch import Tensor, nn

import hookline
from hookline import HooklineError
from hookline.engine import _torch, tricks
from hookline.engine._inner.interception import ModeInterceptor, OperatorInterceptor
from hookline.engine._memory.snapshots import has_own_memory, shared
from hookline.engine._recording.skipping import Skipping
from hookline.engine._torch import (
    attention_functions,
    bytecode,
    checkpoint_regions,
    compiled_calls,
    copy_on_write,
    data_parallel,
    dispatch_keys,
    eval_frames,
    fake_tensors,
    frames,
    graph_tasks,
    hooks_on_modules,
    interrupts,
    mode_stacks,
    proofs,
    refcounts,
    stance,
    thread_state,
    transforms,
    version_counters,
)
from hookline.engine._torch.proofs import ProbeError, why_broken

BROKEN = {
    "attention_functions": (attention_functions, "OPENED", attention_functions.WHOLE),
    "bytecode": (bytecode, "fate_of", lambda _frame, _inner: bytecode.USED),
    "checkpoint_regions": (checkpoint_regions, "FIRST_RUN", "renamed"),
    "compiled_calls": (compiled_calls, "ATTRIBUTE", "renamed"),
    "copy_on_write": (copy_on_write, "lazy_clone", Tensor.clone),
    "data_parallel": (data_parallel, "PARAMETERS", "renamed"),
    "dispatch_keys": (dispatch_keys, "set_key", lambda *_: None),
    "eval_frames": (eval_frames, "frame_callback", lambda: None),
    "fake_tensors": (fake_tensors, "tree_leaves", lambda tree: [tree]),
    "frames": (frames, "MODULE_CALL", frames.SEQUENTIAL),
    "graph_tasks": (graph_tasks, "current_graph_task", lambda: -1),
    "hooks_on_modules": (hooks_on_modules, "hooks_before", lambda _module: {}),
    "interrupts": (interrupts, "cover_entry", lambda function: function),
    "mode_stacks": (mode_stacks, "function_modes", lambda: [None]),
    "refcounts": (refcounts, "references", lambda _value: 1),
    "stance": (stance, "_FIRST_QUESTION", "is_dynamo_supported"),
    "thread_state": (thread_state, "is_autocast_on", lambda: False),
    "transforms": (transforms, "is_wrapped", lambda _x: False),
    "version_counters": (version_counters, "keep_version", lambda _x: torch.no_grad()),
}
"""For each trick, a part of it that is then not as it must be."""


@pytest.fixture(autouse=True)
def nothing_was_tried() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    why_broken.cache_clear()
    for module in (_torch, *(part for part, _, _ in BROKEN.values())):
        for value in vars(module).values():
            if getattr(value, "__module__", "") == proofs.__name__ and hasattr(value, "cache_clear"):
                value.cache_clear()


def break_trick(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, part, other = BROKEN[name]
    monkeypatch.setattr(module, part, other)


@pytest.mark.parametrize("name", _torch.PROBES)
def test_a_trick_holds(name) -> None:
    _torch.PROBES[name]()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trick_is_noticed(name, monkeypatch) -> None:
    break_trick(name, monkeypatch)
    assert why_broken(_torch.PROBES[name])


def test_all_tricks_are_tried() -> None:
    assert {*BROKEN} == {*_torch.PROBES}
    random = torch.get_rng_state()
    assert tricks() == dict.fromkeys(_torch.PROBES, "")
    assert torch.equal(random, torch.get_rng_state())


def test_what_is_missing_says_so() -> None:
    missing = proofs.private(torch, "_C._no_such_function")
    with pytest.raises(ProbeError):
        missing(1)
    assert "_no_such_function" in why_broken(missing)


def test_a_trick_is_tried_outside_of_what_surrounds_the_caller() -> None:
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert copy_on_write.can_share()
        assert why_broken(thread_state.probe) == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tricks_hold_whatever_the_default_dtype(dtype) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        assert tricks() == dict.fromkeys(_torch.PROBES, "")
    finally:
        torch.set_default_dtype(before)


def test_nothing_is_tried_at_import() -> None:
    code = "import hookline, hookline.engine._torch.proofs as p; assert p.why_broken.cache_info().misses == 0"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trick_is_tried_once(monkeypatch) -> None:
    assert copy_on_write.can_share()
    break_trick("copy_on_write", monkeypatch)
    assert copy_on_write.can_share()


@pytest.mark.parametrize(
    "name", ["hooks_on_modules", "graph_tasks", "thread_state", "mode_stacks", "transforms", "frames"]
)
def test_without_what_every_hook_needs_none_is_attached(name, monkeypatch) -> None:
    monkeypatch.setattr(proofs, "why_broken", lambda probe: "a test" if probe.__module__.endswith(name) else "")
    model = hookline.hook(MLP())
    with pytest.raises(HooklineError, match=name):
        model.run_with_hooks(torch.ones(2, 4), fwd_hooks=[("fc1", lambda x: x * 2)])


SLOWER = ["copy_on_write", "refcounts", "compiled_calls", "bytecode", "version_counters", "dispatch_keys"]


@pytest.mark.parametrize("name", SLOWER)
def test_without_a_trick_that_only_saves_time_results_are_the_same(name, monkeypatch) -> None:
    def results() -> tuple[list[Tensor], Tensor]:
        model, x = hookline.hook(net), torch.ones(2, 3, 8, requires_grad=True)
        out, cache = model.run_with_cache(x)
        out = model.run_with_hooks(
            x, fwd_hooks=[("linear1", lambda y: y.mul_(2)), ("self_attn.pattern", lambda p: p * 2)]
        )
        (grad,) = torch.autograd.grad(out.sum(), x)
        return [*cache.values()], grad

    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train()
    expected, expected_grad = results()
    monkeypatch.setattr(proofs, "why_broken", lambda probe: "a test" if probe.__module__.endswith(name) else "")
    forget()
    found, grad = results()
    assert all(map(torch.equal, found, expected))
    assert torch.equal(grad, expected_grad)


def test_a_trick_that_only_saves_time_is_off_where_it_does_not_hold(monkeypatch) -> None:
    x = torch.ones(2)
    is_on = shared(x, is_ours=True) is not None, has_own_memory(torch.ones(2))
    assert is_on == (True, True)
    assert ProductInterceptor.for_call((x,), {}) is ProductInterceptor
    monkeypatch.setattr(proofs, "why_broken", lambda _probe: "a test")
    forget()
    is_on = shared(x, is_ours=True) is not None, has_own_memory(torch.ones(2))
    assert is_on == (False, False)
    assert ProductInterceptor.for_call((x,), {}) is ModeInterceptor
    with pytest.raises(HooklineError, match="compiled_calls"):
        Skipping(nn.Identity(), {})


class ProductInterceptor(OperatorInterceptor):
    by_mode = ModeInterceptor


FIRST_HOOK = """
import sys, torch
from torch import nn
import hookline

net = hookline.HookedModule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
net.run_with_hooks(torch.ones(1, 2), fwd_hooks=[("0", torch.zeros_like)], bwd_hooks=[("1", lambda grad: None)])
with torch.no_grad():
    net.run_with_hooks(torch.ones(1, 2), fwd_hooks=[("0", torch.zeros_like)])
    net.run_with_cache(torch.ones(1, 2))
print("torch._dynamo" in sys.modules)
"""


def test_a_first_hook_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_HOOK], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

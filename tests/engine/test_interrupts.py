"""Interrupts: whenever one arrives, nothing is left of a run, a skipped layer or processed weights."""

import _thread
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import tiny_models
import torch
from interrupts import Signals, state_of
from networks import MLP, Twice, fill
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import hookline
from hookline.edits import zero
from hookline.engine import taps
from hookline.engine._recording.skipping import Skipping
from hookline.engine._torch.interrupts import cover_entry, table_entries
from hookline.engine._undo.blocks import UndoBlock, end_all, interrupt_safe, run_twice_on_interrupt
from hookline.engine._undo.modes import GradMode, uncached
from hookline.engine.pass_state import pass_state
from hookline.experiments import patching
from hookline.weights.processing.swaps import Swaps


def fail_with_a_signal_pending() -> None:
    """Raise an error in C code with an interrupt on its way: Python raises that on entering the next function."""
    list(map(_thread.interrupt_main, [signal.SIGINT, object()]))


class Log(UndoBlock):
    def __init__(self) -> None:
        self.events: list[str] = []

    def open(self):
        self.events.append("open")
        return self

    def close(self) -> None:
        self.events.append("close")


def test_an_interrupt_on_the_way_into_exit_does_not_skip_it() -> None:
    block = Log()
    with pytest.raises(KeyboardInterrupt) as caught, block:
        fail_with_a_signal_pending()
    assert isinstance(caught.value.__context__, TypeError)  # so it arrived there, and not in the block
    assert block.events == ["open", "close"]


def test_a_plain_exit_is_skipped() -> None:
    """What `covered` is for: if Python no longer does that, it can go."""

    class Plain(Log):
        def __exit__(self, *_):
            self.close()

    block = Plain()
    with pytest.raises(KeyboardInterrupt), block:
        fail_with_a_signal_pending()
    assert block.events == ["open"]
    block.end()


@pytest.mark.parametrize("is_entered", [True, False])
def test_an_interrupt_while_a_lock_is_taken_does_not_skip_its_release(is_entered) -> None:
    """What `entered` is for, from Python 3.14 on. In a process of its own: torch's compiler changes how calls end."""
    code = f"import sys; sys.path[:] = {sys.path}; from interrupts import is_left; print(is_left({is_entered}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(is_entered or sys.version_info < (3, 14))]


def test_a_lock_that_was_entered_is_one() -> None:
    lock = threading.RLock()
    with interrupt_safe(lock), interrupt_safe(lock) as is_taken:
        assert is_taken
        assert lock._is_owned()
    assert not lock._is_owned()


def test_covered_changes_the_entry_alone() -> None:
    def undo(undone: list[int], n: int) -> int:
        try:
            for each in range(n):
                undone.append(each)
        except KeyError:
            undone.clear()
        return n

    before = list(table_entries(undo.__code__.co_exceptiontable))
    after = list(table_entries(cover_entry(undo).__code__.co_exceptiontable))
    assert before[0][0] > 0
    assert after[0] == (0, before[0][0] + before[0][1], *before[0][2:])
    assert after[1:] == before[1:]
    undone: list[int] = []
    assert undo(undone, 3) == 3
    assert undone == [0, 1, 2]


def test_an_undoing_that_is_interrupted_goes_on() -> None:
    calls = []

    def undo() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_twice_on_interrupt(undo)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["hooks", "skipping", "processed weights", "gradients"])
def test_what_is_left_with_an_interrupt_pending_is_undone(kind) -> None:
    model = hookline.hook(tiny_models.nudged("gpt2"))
    tokens = model.example_tokens()
    mlp = model.anatomy.blocks[0].mlp
    before, logits = state_of(model.module), model(tokens)
    block = {
        "hooks": lambda: model.hooks(fwd_hooks=[("blocks.*.hook_resid_post", zero())]),
        "skipping": lambda: Skipping(model.module, {mlp: lambda args, _kwargs: args[0]}),
        "processed weights": model.processed_weights,
        "gradients": lambda: GradMode(False),
    }[kind]()
    with pytest.raises(KeyboardInterrupt), block:
        fail_with_a_signal_pending()
    assert state_of(model.module) == before
    assert torch.equal(model(tokens), logits)


def test_a_swap_that_is_interrupted_is_undone() -> None:
    module = nn.Linear(3, 3)
    own, swaps = dict(module._parameters), Swaps()

    class Interrupting(dict):
        """Where a module keeps its parameters, but an interrupt arrives just before or after one is put there."""

        when = ""

        def __setitem__(self, key, value):
            if self.when != "before":
                super().__setitem__(key, value)
            if self.when:
                self.when = ""
                raise KeyboardInterrupt

    module._parameters = Interrupting(module._parameters)
    for when in ("before", "after"):
        swaps.put(module, "bias", torch.ones(3))
        module._parameters.when = when
        with pytest.raises(KeyboardInterrupt):
            swaps.put(module, "weight", torch.ones(3, 3))
        module._parameters.when = when
        with pytest.raises(KeyboardInterrupt):
            swaps.undo()
        swaps.undo()
        assert all(module._parameters[name] is each for name, each in own.items())


def test_detach_all_ends_what_was_left() -> None:
    model = hookline.hook(tiny_models.nudged("gpt2"))
    other = hookline.hook(MLP())
    tokens = model.example_tokens()
    before, logits = state_of(model.module), model(tokens)
    left = model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", zero())])
    left.__enter__()
    model.processed_weights().__enter__()
    Skipping(model.module, {model.anatomy.blocks[1].mlp: lambda args, _kwargs: args[0]}).__enter__()
    with other.hooks(fwd_hooks=[("fc1", fill(0))]):
        model.detach_all()
        assert other(torch.ones(1, 4)).equal(other.module.fc2(other.module.act(torch.zeros(1, 8))))
    assert state_of(model.module) == before
    assert torch.equal(model(tokens), logits)
    end_all(model.module)  # once more does no harm


def test_calls_are_counted_anew_after_a_pass_that_was_interrupted() -> None:
    """Torch tells nobody that a pass ended in an interrupt."""
    net, x = hookline.hook(Twice()), torch.ones(1, 4)
    expected = net.module.cell(torch.zeros(1, 4))
    net.add_hook("cell#1", fill(0))
    assert torch.equal(net(x), expected)

    def interrupt(_h):
        raise KeyboardInterrupt

    for at in ("cell#0", "cell#2"):
        with pytest.raises(KeyboardInterrupt):
            net.run_with_hooks(x, fwd_hooks=[(at, interrupt)])
        assert torch.equal(net(x), expected)
    net.reset_hooks()


def test_a_mode_that_comes_back_late_does_nothing() -> None:
    """Torch pushes a mode again when a traceback is freed, if an interrupt arrives while it calls the mode."""
    net, x, seen = hookline.hook(nn.MultiheadAttention(8, 2, batch_first=True)), torch.randn(1, 3, 8), []

    def keep(pattern):
        seen.append(pass_state.interceptors[-1])
        return 2 * pattern

    net.run_with_hooks(x, x, x, fwd_hooks=[("pattern", keep)])
    output = net(x, x, x)[0]
    with seen[0]:
        assert torch.equal(net(x, x, x)[0], output)
        net.run_with_cache(x, x, x, names_filter="input")
        assert torch._C._len_torch_function_stack() == 0  # a run takes it away
        torch._C._push_on_torch_function_stack(seen[0])


WORK = ("run_with_hooks", "hooks", "cache", "run_with_cache", "stop", "start", "pattern", "sweep", "processed")


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
# Python drops an interrupt that arrives in a finalizer, and says so; nobody can raise it there.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::hookline.errors.HooklineWarning"
)
def test_signals_at_random_instants_leave_nothing(name) -> None:
    """3,600 signals in all."""
    model = hookline.load("tinyworld")
    tokens = model.example_tokens()
    stream = model(tokens, stop_at_layer=1)
    clean, corrupted = tokens[:1], tokens[:1].roll(1)

    def in_hooks():
        with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda h: 2 * h)]):
            model(tokens)

    def processed():
        with model.processed_weights():
            model(tokens)

    doubled = [("blocks.*.hook_resid_post", lambda h: 2 * h)]
    work = {
        "run_with_hooks": lambda: model.run_with_hooks(tokens, fwd_hooks=doubled),
        "hooks": in_hooks,
        "cache": lambda: model.cache(tokens, names_filter="blocks.0.hook_resid_post"),
        "run_with_cache": lambda: model.run_with_cache(tokens),
        "stop": lambda: model(tokens, stop_at_layer=1),
        "start": lambda: model(stream, start_at_layer=1),
        "pattern": lambda: model.run_with_hooks(tokens, fwd_hooks=[("blocks.*.attn.hook_pattern", lambda h: 2 * h)]),
        "sweep": lambda: patching.sweep(model, clean, corrupted, lambda logits: logits[:, -1, 3], progress=False),
        "processed": processed,
    }[name]
    signals = Signals(model.module, lambda: model.module(tokens).logits)
    while signals.received < 400 and not signals.left:
        signals.send(name, work, 50)
    assert signals.left == []


class InterruptAt:
    """Raises KeyboardInterrupt at one of the instants where Python would: on entering a function, after a C call."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame, event, _arg) -> None:
        # Python itself ignores what is raised in the callbacks of `weakref`, and in what they call.
        files = {each.f_code.co_filename for each in (frame, frame.f_back)}
        if event in ("call", "c_return") and weakref.__file__ not in files:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def run(self, work) -> bool:
        """Whether the interrupt came before `work` was over."""
        sys.setprofile(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def test_an_interrupt_in_add_hook_leaves_no_hook() -> None:
    module = MLP()
    net, x = hookline.hook(module), torch.randn(2, 4)
    net.add_hook("fc2", lambda h: None)()
    before, expected, number = state_of(module), module(x), 0
    while True:
        number += 1
        added: list = []
        if not InterruptAt(number).run(lambda added=added: added.append(net.add_hook("fc1", lambda h: h * 0))):
            break
        if added:  # it came after the call
            added[0]()
        assert net.point("fc1").fwd_hooks == [], number
        assert state_of(module) == before, number
        undo = net.add_hook("fc2", lambda h: None)
        assert torch.equal(net(x), expected), number
        undo()
    assert number > 50


def test_an_interrupt_while_a_hook_is_removed_leaves_no_hook() -> None:
    module = MLP()
    net, x = hookline.hook(module), torch.randn(2, 4)
    net.add_hook("fc2", lambda h: None)()
    before, expected, number = state_of(module), module(x), 0
    for remove in ("undo", "reset"):
        number, came = 0, True
        while came:
            number += 1
            undo = net.add_hook("fc1", lambda h: h * 0)
            came = InterruptAt(number + 1).run(undo if remove == "undo" else net.point("fc1").remove_hooks)
            if net.point("fc1").fwd_hooks:  # it came before anything was asked for
                undo()
            assert state_of(module) == before, (remove, number)
            assert torch.equal(net(x), expected), (remove, number)
        assert number > 30


def test_an_interrupt_puts_back_the_modes_of_selective_checkpointing() -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    (cache, _), number, came = create_selective_checkpoint_contexts([]), 0, True
    with Other(), cache, Other():
        before = _get_current_dispatch_mode_stack()
        while came:
            number += 1
            came = InterruptAt(number + 1).run(lambda: uncached(len, []))
            assert _get_current_dispatch_mode_stack() == before, number
    assert number > 30


def test_a_change_that_two_interrupts_ended_is_completed_later(monkeypatch) -> None:
    module = MLP()
    net, x = hookline.hook(module), torch.randn(2, 4)
    net.add_hook("fc2", lambda h: None)()
    before, expected = state_of(module), module(x)

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    def enter() -> None:
        with net.hooks():
            pass

    def undo_interrupted(undo) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(taps.Tap, "release", interrupt)
            undo()

    for settle in (lambda: net(x), net.detach_all, net.reset_hooks, enter):
        undo = net.add_hook("fc1", lambda h: h * 0)
        with pytest.raises(KeyboardInterrupt):
            undo_interrupted(undo)
        settle()
        assert state_of(module) == before
        assert torch.equal(net(x), expected)

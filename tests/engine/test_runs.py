"""Runs: whatever is raised, in whatever thread, beside whoever else's hooks."""

import asyncio
import contextvars
import linecache
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from networks import MLP, Twice, fill, hook_count, zero
from torch import nn

import hookline
from hookline import HookError, HooklineError, NeverFiredWarning
from hookline.engine import schedule
from hookline.engine._compiler import pausing
from hookline.engine._undo.blocks import _Entered
from hookline.errors import InvalidHookError


class Boom(nn.Module):
    def forward(self, x):
        raise OSError("in the model")


def raise_in_hook(h):
    raise ZeroDivisionError("in the hook")


def interrupt(h):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("hook", "expected"), [(raise_in_hook, HookError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("verb", ["run_with_hooks", "contexts", "backward"])
def test_nothing_is_left_after_an_error(net, x, hook, expected, verb) -> None:
    hooks = [("fc1", lambda h: h), ("act", hook)]
    bare = net(x)

    def nested():
        with net.hooks(fwd_hooks=hooks[:1]), net.hooks(fwd_hooks=hooks[1:]):
            net.run_with_cache(x)

    works = {
        "run_with_hooks": lambda: net.run_with_hooks(x, fwd_hooks=hooks),
        "contexts": nested,
        "backward": lambda: net.run_with_hooks(x, bwd_hooks=hooks).sum().backward(),
    }
    with pytest.raises(expected):
        works[verb]()
    assert hook_count(net.module) == 0
    assert torch.equal(net(x), bare)
    assert torch.equal(net.run_with_cache(x)[0], bare)


def test_an_error_of_a_hook_names_it(net, x) -> None:
    with pytest.raises(HookError, match=r"raise_in_hook.*'fc1'.*ZeroDivisionError") as error:
        net.run_with_hooks(x, fwd_hooks=[("fc1", raise_in_hook)])
    assert isinstance(error.value.original_error, ZeroDivisionError)
    assert error.value.__cause__ is error.value.original_error


def test_an_error_of_the_model_passes_as_it_is(x) -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), Boom()))
    with pytest.raises(OSError, match="the model"):
        net.run_with_cache(x)
    assert hook_count(net.module) == 0


def test_a_bad_name_in_the_middle_attaches_nothing(net, x) -> None:
    with pytest.raises(KeyError):
        net.run_with_hooks(x, fwd_hooks=[("fc1", zero), ("nope", zero), ("fc2", zero)])
    with pytest.raises(KeyError):
        net.add_hook(["fc1", "nope"], zero)
    with pytest.raises(InvalidHookError):
        net.add_hook(["fc1", "fc2"], 3)
    assert hook_count(net.module) == 0


class Refusing(OrderedDict):
    """Where torch keeps a module's hooks, but an interrupt comes just before or after one is put there."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def __setitem__(self, key, value):
        if self.when == "after":
            super().__setitem__(key, value)
        raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_attaching_attaches_nothing(net, x, when) -> None:
    net.module.fc2._forward_hooks = Refusing(when)
    with pytest.raises(KeyboardInterrupt):
        net.run_with_cache(x, fwd_hooks=[("fc1", torch.clone)])
    assert hook_count(net.module) == 0
    net.module.fc2._forward_hooks = OrderedDict()
    assert len(net.run_with_cache(x)[1]) == 8


def test_interrupts_at_any_moment_leave_nothing(x) -> None:
    """A Ctrl-C after every line that a small run takes, in turn."""
    net = hookline.hook(nn.Linear(4, 4))
    lines = 0

    def interrupt_after(limit: int):
        seen = 0

        def trace(frame, event, _arg):
            nonlocal seen
            if "hookline" not in frame.f_code.co_filename:
                return None
            # Python delivers an interrupt after a call, not between a `with` block and the release of its lock; nor
            # between the lines in which `entered` takes one, from Python 3.14 on.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if event == "line" and not line.endswith("lock:") and frame.f_code is not _Entered.__enter__.__code__:
                seen += 1
                if seen == limit:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        return trace

    def interrupt_all() -> None:
        nonlocal lines
        while True:
            lines += 1
            sys.settrace(interrupt_after(lines))
            try:
                with net.hooks(fwd_hooks=[("input", torch.relu)]):
                    net(x)
            except KeyboardInterrupt:
                assert hook_count(net.module) == 0, f"after line {lines}"
                assert schedule.active.get() == ()
                assert pausing._users == set()
            else:
                break
            finally:
                sys.settrace(None)

    # In a thread of its own: Python forgets to end the handling of an exception if a trace raises in the handler.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt_all).result()
    assert lines > 100


def test_threads_do_not_see_each_other(x) -> None:
    module = MLP()
    net = hookline.hook(module)
    with torch.no_grad():
        inner = module.act(module.fc1(x))
        expected = [module.fc2(inner + tag) for tag in range(8)]
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(tag: int) -> None:
        start.wait()
        with torch.no_grad():
            for turn in range(200):
                with net.hooks(fwd_hooks=[("act", lambda h: h + tag)]):
                    out, cache = net.run_with_cache(x, names_filter=["act", "fc1"] if turn % 2 else None)
                if not (torch.equal(out, expected[tag]) and torch.equal(cache["act"], inner + tag)):
                    failures.append(f"thread {tag}, turn {turn}")

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hook_count(module) == 0


def test_a_bare_run_beside_a_hooked_one(net, x) -> None:
    bare, results = net(x), []
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        thread = threading.Thread(target=lambda: results.append(net(x)))
        thread.start()
        thread.join()
        assert not torch.equal(net(x), bare)
    assert torch.equal(results[0], bare)


def test_tasks_do_not_see_each_other(net, x) -> None:
    async def work(value: float) -> bool:
        with net.hooks(fwd_hooks=[("output", fill(value))]):
            await asyncio.sleep(0)
            good = net(x).eq(value).all()
            await asyncio.sleep(0)
            return bool(good and net(x).eq(value).all())

    async def main() -> list[bool]:
        return await asyncio.gather(*(work(i) for i in range(20)))

    assert all(asyncio.run(main()))


def test_other_peoples_hooks_stay_and_see_what_they_should(net, x) -> None:
    module, seen = net.module, []
    handles = [
        module.fc1.register_forward_hook(lambda m, i, o: seen.append(("first", o.clone()))),
        module.fc1.register_forward_hook(lambda m, i, o: seen.append(("second", o.clone()))),
        module.act.register_forward_pre_hook(lambda m, i: seen.append(("pre", i[0].clone()))),
    ]
    order = list(module.fc1._forward_hooks)
    net.run_with_hooks(x, fwd_hooks=[("fc1", fill(3)), ("act.input", lambda h: h + 1)])
    assert [tag for tag, _ in seen] == ["first", "second", "pre"]
    assert seen[0][1].eq(3).all()
    assert seen[1][1].eq(3).all()
    assert seen[2][1].eq(4).all()
    assert list(module.fc1._forward_hooks) == order
    for handle in handles:
        handle.remove()


def test_a_cache_holds_what_other_peoples_hooks_changed(net, x) -> None:
    module = net.module
    handles = [
        module.fc1.register_forward_hook(lambda m, i, o: o * 2),
        module.act.register_forward_pre_hook(lambda m, i: (i[0] + 1,)),
    ]
    out, cache = net.run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    assert torch.equal(cache["act.input"], cache["fc1"] + 1)
    assert torch.equal(out, module.fc2(cache["act"]))
    assert torch.allclose(cache["fc1_grad"], cache["act.input_grad"])
    for handle in handles:
        handle.remove()
    assert torch.equal(cache["fc1"], 2 * module.fc1(x))


def test_other_peoples_backward_hooks(net, x) -> None:
    seen, ours = [], []
    handle = net.module.fc2.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0].clone(), go[0].clone())))
    hooks = [("fc2.input", ours.append), ("fc2", ours.append)]
    net.run_with_hooks(x, bwd_hooks=hooks, fwd_hooks=[("fc2", lambda h: h * 3)]).sum().backward()
    handle.remove()
    assert torch.equal(ours[0], torch.ones(5, 3)), "ours: the gradient of what flows out of the point"
    assert torch.allclose(ours[1], seen[0][0])


# Contexts that are not just entered and left


def test_a_context_left_in_another_thread_is_over(net, x) -> None:
    context = net.hooks(fwd_hooks=[("output", fill(1))])
    context.__enter__()
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    net(x)
    thread.start()
    thread.join()
    assert not net.run_with_cache(x)[0].eq(1).all(), "it is still in this thread's list, but closed"
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        assert not net(x).eq(1).all()
    schedule.active.set(())


def test_a_task_that_outlives_the_context(net, x) -> None:
    async def later() -> bool:
        await asyncio.sleep(0.01)
        return bool(net.run_with_cache(x)[0].eq(1).all())

    async def main() -> bool:
        with net.hooks(fwd_hooks=[("output", fill(1))]):
            net(x)
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        return await task

    assert asyncio.run(main()) is False


def test_a_context_cannot_be_entered_twice_at_once(net, x) -> None:
    context = net.hooks(fwd_hooks=[("output", fill(1))])
    with context:
        net(x)
        with pytest.raises(HooklineError, match="open already"), context:
            pass
    with context:
        assert net(x).eq(1).all()
    with pytest.warns(NeverFiredWarning), context:
        pass  # what fired the last time does not count


def test_all_hooks_of_a_module_thrown_away(net, x) -> None:
    with net.hooks(fwd_hooks=[("fc1", zero)]):
        net(x)
        net.module.fc1._forward_hooks = OrderedDict()
    net.run_with_cache(x)
    assert hook_count(net.module) == 0


def test_calls_are_counted_in_each_thread_by_itself(x) -> None:
    """Two passes at once, in threads that share the run by their context."""
    together, begins = threading.Barrier(2), []

    class Meeting(Twice):
        def forward(self, x):
            together.wait(10)
            for _ in range(3):
                x = self.cell(x)
                together.wait(10)
            return x

    net = hookline.hook(Meeting())
    cell = net.module.cell

    async def both():
        return await asyncio.gather(asyncio.to_thread(net, x), asyncio.to_thread(net, x))

    expected = cell(cell(torch.zeros_like(x)))
    with net.hooks(fwd_hooks=[("cell#0", fill(0)), ("cell", lambda h, hook: begins.append(hook.call))]):
        outputs = asyncio.run(both())
    assert all(torch.equal(out, expected) for out in outputs)
    assert sorted(begins) == [0, 0, 1, 1, 2, 2]


class Parallel(nn.Module):
    """Calls a module in its own thread and in another one, with or without the context."""

    def __init__(self, *, has_context: bool) -> None:
        super().__init__()
        self.fc, self.has_context = nn.Linear(4, 4), has_context

    def forward(self, x):
        found = []
        work = (lambda: found.append(self.fc(x))) if not self.has_context else None
        context = contextvars.copy_context()
        thread = threading.Thread(target=work or (lambda: context.run(lambda: found.append(self.fc(x)))), name="worker")
        thread.start()
        thread.join()
        return self.fc(x) + found[0]


@pytest.mark.parametrize("verb", ["run_with_hooks", "hooks", "cache"])
def test_calls_in_threads_of_the_model_are_reported(x, verb) -> None:
    net = hookline.hook(Parallel(has_context=False))

    def in_hooks():
        with net.hooks(fwd_hooks=[("fc", zero)]):
            net(x)

    work = {
        "run_with_hooks": lambda: net.run_with_hooks(x, fwd_hooks=[("fc", zero)]),
        "cache": lambda: net.run_with_cache(x, names_filter="fc"),
        "hooks": in_hooks,
    }[verb]
    with pytest.warns(NeverFiredWarning, match=r"(?s)'fc' \(Linear\).*worker"):
        work()


def test_threads_of_the_model_that_have_its_context_are_edited(x) -> None:
    net = hookline.hook(Parallel(has_context=True))
    assert net.run_with_hooks(x, fwd_hooks=[("fc", zero)]).eq(0).all()
    assert set(net.run_with_cache(x, names_filter="fc")[1]) == {"fc#0", "fc#1"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the error is in the worker
def test_one_call_among_several_threads_is_refused(x) -> None:
    net = hookline.hook(Parallel(has_context=True))
    failed = []
    hook, threading.excepthook = threading.excepthook, lambda args: failed.append(args.exc_value)
    try:
        with pytest.raises((HookError, IndexError)):
            net.run_with_hooks(x, fwd_hooks=[("fc#0", zero)])
    finally:
        threading.excepthook = hook
    assert "another thread" in str(failed[0])


def test_other_threads_that_run_the_whole_model_are_not_reported(net, x) -> None:
    bare, outputs = net(x), []
    with net.hooks(fwd_hooks=[("fc1", zero), ("act", lambda h: None)]):
        thread = threading.Thread(target=lambda: outputs.append(net(x)))
        thread.start()
        thread.join()
        net(x)
    assert torch.equal(outputs[0], bare)


def test_a_failure_in_another_thread_is_not_taken_for_one_that_was_swallowed(net, x) -> None:
    """Each thread's pass has its own outcome, though they share the run."""

    def fails_on_ones(h):
        if bool(h.eq(1).all()):
            raise ValueError("ones")

    with net.hooks(fwd_hooks=[("input", fails_on_ones)]):
        context = contextvars.copy_context()
        failed = []

        def work():
            try:
                net(torch.ones(1, 4))
            except HookError as error:
                failed.append(error)

        thread = threading.Thread(target=lambda: context.run(work))
        thread.start()
        thread.join()
        net(x)
    assert len(failed) == 1


def test_a_module_replaced_inside_a_context_is_reported() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net, x = hookline.hook(module), torch.ones(4)
    context = net.hooks(fwd_hooks=[("0", lambda h: h * 0)])
    context.__enter__()
    net(x)
    module[0] = nn.Linear(4, 4)
    net(x)
    with pytest.warns(NeverFiredWarning, match=r"longer.*model"):
        context.__exit__(None, None, None)


def test_a_context_left_in_another_thread_is_not_active_here() -> None:
    net, x = hookline.hook(nn.Sequential(nn.Linear(4, 4))), torch.ones(4)
    context = net.hooks(fwd_hooks=[("0", lambda h: h * 0)])
    context.__enter__()
    net(x)
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert not net(x).eq(0).all()
    assert schedule.active.get() == ()

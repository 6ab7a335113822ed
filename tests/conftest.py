"""One thread, one seed, shapes checked, and after every test: no hook left on any module."""

import gc
import random
import signal
import time
from collections.abc import Iterator

import hypothesis
import numpy
import pytest
import shape_checks
import torch
from torch import nn

gc.disable()  # until all tests are collected: almost everything that imports make stays
shape_checks.install()

import devices  # noqa: E402
import stores  # noqa: E402
from networks import MLP, has_taps  # noqa: E402 (after the import hook, or its shapes would not be checked)

import hookline  # noqa: E402
from hookline.engine import schedule, taps  # noqa: E402
from hookline.engine._compiler import pausing  # noqa: E402
from hookline.engine._inner import operators  # noqa: E402
from hookline.engine.pass_state import pass_state  # noqa: E402

hypothesis.settings.register_profile("any machine", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("any machine")
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background


def pytest_addoption(parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests make their tensors and models: cuda, cuda:1, …")


def pytest_configure(config) -> None:
    devices.use(config.getoption("--device"))


_THREADS_MAY_NOT_FAIL = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
"""Also in tests that ignore warnings of users, of which this is one."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out the slow ones
def pytest_collection_modifyitems(session, items) -> None:
    session.add_marker(_THREADS_MAY_NOT_FAIL)  # of the markers, the outermost is applied last
    for item in items:
        for mark in item.iter_markers("quick_for"):
            if not {*mark.args} & _ids(item):
                item.add_marker(pytest.mark.slow)
        if devices.DEVICE.type != "cpu" and (mark := item.get_closest_marker("on_cpu")):
            item.add_marker(pytest.mark.skip(reason=mark.kwargs.get("reason", "it is about memory of the CPU")))


def _ids(item) -> set[str]:
    """The parameters of a test, as its id has them."""
    return {*item.callspec.id.split("-")}


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Refuse words of `quick_for` that no variant of a test has, or all of it would run in `make test-all` only."""
    made = yield
    variants = [item for item in made if isinstance(item, pytest.Function)] if isinstance(made, list) else []
    for mark in variants[0].iter_markers("quick_for") if variants else ():
        if unknown := {*mark.args} - set().union(*map(_ids, variants)):
            raise collector.CollectError(f"quick_for of {name}: no variant has {', '.join(sorted(unknown))}")
    return made


@pytest.fixture
def device() -> torch.device:
    """The device of the tests: see `devices`."""
    return devices.DEVICE


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again, nor after every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    if devices.DEVICE.type == "cpu":
        torch.default_generator.manual_seed(0)  # torch.manual_seed notes the stack for each other kind of device
    else:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef) -> None:
    """What several tests share is the same, whichever of them comes first."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture(autouse=True)
def _told_of_ragged_batches(monkeypatch) -> None:
    """It is said once in a process, which may be in any test; the one about it takes this back."""
    monkeypatch.setattr("hookline.text.ragged.warned", {"ragged"})


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert schedule.active.get() == ()
    if _hooked():
        gc.collect()  # a model that is gone, hooks and all, leaves nothing behind
        ends = time.monotonic() + (1.0 if devices.DEVICE.type == "cuda" else 0.0)
        while _hooked() and time.monotonic() < ends:  # the thread of autograd may still have a graph that failed
            time.sleep(0.01)
    assert _hooked() == []
    assert pausing._users == set()
    assert not pass_state.interceptors
    assert operators.is_off()
    hooks, pass_state.hooks = pass_state.hooks, 0
    assert hooks == 0  # or later tests would seem to run inside a hook
    assert stores.changes_to_tinyworld() == 0


def _hooked() -> list[nn.Module]:
    return [module for module in list(taps._taps) if has_taps(module)]


@pytest.fixture
def mlp() -> nn.Module:
    return MLP()


@pytest.fixture
def net(mlp):
    return hookline.hook(mlp)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 4)

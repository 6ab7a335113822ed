"""The oracle itself, and that the checks notice what they are for."""

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from networks import MLP, Twice
from torch import Tensor, nn
from zoo import checks, oracle
from zoo.network import Network
from zoo.run import in_child

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # of fork, beside pytest's own threads


@dataclass
class Pair:
    left: Tensor
    right: dict[str, Tensor]


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, *, scale=None):
        h = self.inner(x * scale)
        self.relu(h)
        return Pair(h, {"double": h * 2})


def test_every_tensor_of_every_call_is_seen(x) -> None:
    net = Parts()
    with oracle.watching(net) as seen:
        out = net(x, scale=torch.tensor(2.0))
    assert [*seen.tensors[oracle.Event("", "input", 0)]] == [(0, 0), (1, "scale")]
    assert [*seen.tensors[oracle.Event("", "output", 0)]] == [("left",), ("right", "double")]
    assert torch.equal(seen.tensors[oracle.Event("inner", "output", 0)][()], x * 2)  # before the ReLU wrote to it
    assert torch.equal(out.left, (x * 2).relu())
    assert oracle.Event("inner", "output", 0) in seen.passed_through
    twice = Twice()
    with oracle.watching(twice) as seen:
        twice(x)
    assert [event.call for event in seen.tensors if event[:2] == ("cell", "output")] == [0, 1, 2]


def test_an_edited_input_is_nobody_elses_and_what_a_module_writes_is_the_callers(x) -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x):
            h = x * 1
            return self.conv(h), h * 1, self.relu(h), h

    net = Net()
    with oracle.editing(net, oracle.Edit("conv", "input", torch.zeros_like)) as fired:
        changed, same, *_ = net(x)
    assert [*fired.values()] == [1]
    assert torch.equal(changed, net.conv(torch.zeros_like(x)))
    assert torch.equal(same, x)
    with oracle.editing(net, oracle.Edit("relu", "input", torch.neg)):
        *_, returned, written = net(x)
    assert torch.equal(written, (-x).relu())
    assert returned is written


def test_gradients_by_hand_are_those_of_the_event_alone() -> None:
    net, x = MLP(), torch.randn(5, 4)
    with oracle.differentiating(net, {oracle.Event("act", "input", 0)}) as gradients:
        out = net(x)
        out.sum().backward()
    h = net.fc1(x).detach().requires_grad_()
    net.fc2(net.act(h)).sum().backward()
    torch.testing.assert_close(gradients[oracle.Event("act", "input", 0)], h.grad)


class Leaky:
    """A wrapper that does what the checks are to notice."""

    def __init__(self, net, leak) -> None:
        self.net, self.leak, self.module = net, leak, net.module

    def hooks(self, **options):
        return self.net.hooks(**{which: [(name, self.leak) for name, _ in pairs] for which, pairs in options.items()})


@pytest.mark.parametrize(("leak", "is_noticed"), [(checks.changed, False), (torch.neg, True), (lambda t: None, True)])
def test_the_check_of_an_edit_notices_another_edit(net, x, leak, is_noticed) -> None:
    subject, findings = checks.Subject(net.module, (x,)), checks.Findings()
    checks.check_edit(subject, Leaky(net, leak), findings, "fc2", "input", in_place=False, grad=False)
    assert bool(findings.problems) == is_noticed


def test_bits_are_compared_with_nan_and_the_sign_of_zero() -> None:
    x = torch.tensor([float("nan"), 0.0])
    assert oracle.same_bits(x, x.clone())
    assert not oracle.same_bits(x, torch.tensor([float("nan"), -0.0]))
    assert oracle.distance(x, torch.tensor([1.0, 0.0])) == float("inf")


def test_a_network_that_crashes_or_hangs_does_not_end_the_run() -> None:
    assert in_child(Network("crash", lambda: os.kill(os.getpid(), signal.SIGKILL)), 20, 1)["status"] == "crashed"
    assert in_child(Network("hang", lambda: time.sleep(60)), 0.5, 1)["status"] == "time is up"
    record = in_child(Network("fine", lambda: (MLP(), (torch.randn(2, 4),), {})), 100, 1)
    assert (record["status"], record["problems"]) == ("ok", [])

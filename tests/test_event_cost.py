"""How many Python calls an event costs, counted in a process without shape checks, and the order of actions."""

from __future__ import annotations

import subprocess
import sys

from hookline.engine.order import Phase, Turn

MOST = 20
"""Python calls around the user's function, from torch's call of our hook until it returns."""

COUNT = """
import sys, torch
from torch import nn
import hookline

net = hookline.hook(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
calls = []

def user(x):
    return x * 2

def run():
    return net.run_with_hooks(torch.ones(1, 4), fwd_hooks=[("1", user)])

def is_in_event(frame):
    while frame is not None:
        if frame.f_code.co_qualname == "Listener.__call__":
            return True
        frame = frame.f_back
    return False

def profile(frame, event, _):
    if event == "call" and is_in_event(frame):
        calls.append(frame.f_code.co_qualname)

with torch.no_grad():
    run()
    sys.setprofile(profile)
    run()
    sys.setprofile(None)

assert calls.count("user") == 1, calls
calls.remove("user")
print(len(calls), *calls)
"""


def test_calls_around_a_plain_hook() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    number, *names = done.stdout.split()
    assert names[0] == "Listener.__call__"
    assert int(number) <= MOST, names


def test_the_order_of_actions() -> None:
    assert [turn.name for turn in Turn] == [
        "CALLERS_TENSORS",
        "BEGIN",
        "EFFECT",
        "ENTER",
        "AT_POINTS",
        "LEAVE",
        "KEEP",
        "DERIVE",
        "SEND",
    ]
    assert [phase.name for phase in Phase] == ["BOUND", "EDIT", "GRADIENT", "RECORD"]

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


RUNS = """
import sys, torch
import hookline

model = hookline.load("tinyworld")
text = "When Mary and John went to the store"

def zero_last(x):
    x[:, -1] = 0
    return x

def calls(run):
    run(), run()
    count = [0]
    def profile(frame, event, _):
        count[0] += event == "call" and "hookline" in frame.f_code.co_filename
    sys.setprofile(profile)
    run()
    sys.setprofile(None)
    return count[0]

def hooked(*layers, point):
    pairs = [(f"blocks.{layer}.{point}", zero_last) for layer in layers]
    return calls(lambda: model.run_with_hooks(text, fwd_hooks=pairs))

def cached_under_a_hook():
    with model.hooks([("blocks.1.attn.hook_z", zero_last)]):
        model.run_with_cache(text)

with torch.no_grad():
    for point in ("attn.hook_z", "hook_resid_pre", "hook_resid_post", "mlp.hook_post"):
        print(point, hooked(1, 2, point=point) - hooked(1, point=point))
    print("cache", calls(lambda: model.run_with_cache(text)))
    print("cache_under_a_hook", calls(cached_under_a_hook))
"""
"""Python calls of hookline in whole runs of the bundled model, planning and undoing included."""

MOST_IN_RUNS = {
    **{"attn.hook_z": 70, "hook_resid_pre": 70, "hook_resid_post": 40, "mlp.hook_post": 70},
    **{"cache": 700, "cache_under_a_hook": 1_060},
}
"""For one more hook at each point; for a full cache; and for that in a context with a hook."""


def test_calls_of_whole_runs() -> None:
    done = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, check=True)
    calls = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert calls.keys() == MOST_IN_RUNS.keys()
    assert {name: count for name, count in calls.items() if count > MOST_IN_RUNS[name]} == {}


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

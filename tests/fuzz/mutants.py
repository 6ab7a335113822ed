"""Faults that are put into a copy of the library, to see whether the fuzzer notices: `make fuzz-mutants`.

A fault is a line of the library and what stands there instead. Each copy runs the same 2,000 programs at most, until
one of them fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hookline"
PROGRAMS = 2_000


class Mutant(NamedTuple):
    """A fault: what it is, where, and which text is replaced by which."""

    fault: str
    file: str
    before: str
    after: str


MUTANTS = (
    Mutant(
        "a cached activation is not copied when the model writes to it",
        "engine/_recording/recorder.py",
        "            return snapshot(x, is_for_reading=True)\n        moved",
        "            return x\n        moved",
    ),
    Mutant(
        "a deferred cache keeps tensors that the model writes to",
        "engine/_recording/captures.py",
        "                kept = shared(x.detach() if x.requires_grad else x, is_for_reading=True)",
        "                kept = x.detach() if x.requires_grad else x",
    ),
    Mutant(
        "what a hook returned is not copied",
        "engine/_memory/results.py",
        "    return result if is_free else snapshot(result)",
        "    return result",
    ),
    Mutant(
        "an edit at one call acts at the next one",
        "engine/actions.py",
        "        return call == self.point.only",
        "        return call == self.point.only + 1",
    ),
    Mutant(
        "an edit at one call acts at all of them",
        "engine/actions.py",
        "        return call == self.point.only",
        "        return True",
    ),
    Mutant(
        "the edited input of a module is not given back to its caller",
        "engine/_memory/aliases.py",
        "            wrote = sent.is_written() and _write(sent.old, sent.new)",
        "            wrote = False",
    ),
    Mutant(
        "an edit at an input is written to the caller's tensor",
        "engine/_memory/aliases.py",
        "            wrote = sent.is_written() and _write(sent.old, sent.new)",
        "            wrote = _write(sent.old, sent.new)",
    ),
    Mutant(
        "an edit of an output that is ignored is lost",
        "engine/_memory/aliases.py",
        "    written = [_write(x, edited) for x, edited in found]\n    return any(written)",
        "    return bool(found)",
    ),
    Mutant(
        "hooks of others come before ours",
        "engine/taps.py",
        "        is_first = not late and kind is not Kind.END",
        "        is_first = late and kind is not Kind.END",
    ),
    Mutant(
        "reads do not see what hooks of others changed",
        "engine/actions.py",
        "        self.tap = site.last_tap() if self.is_late else site.tap",
        "        self.tap = site.tap",
    ),
    Mutant(
        "a hook stays on its module",
        "engine/taps.py",
        "for tap, module in taps.items() if not tap.users]",
        "for tap, module in taps.items() if not tap.users and tap.kind is not Kind.INPUT]",
    ),
    Mutant(
        "a hook that writes in place is taken for one that only reads",
        "engine/_memory/snapshots.py",
        "    if is_unchanged(given, kept):\n        return True",
        "    if given.shape == kept.shape:\n        return True",
    ),
    Mutant(
        "what a backward hook returns is dropped",
        "engine/_gradients/gradients.py",
        "            return fit(self, result, grad)",
        "            return None",
    ),
    Mutant(
        "the second backward hook of a point is not attached",
        "engine/_gradients/gradients.py",
        "        for tap in taps:\n            tap.attach(sent)",
        "        for tap in taps[:1]:\n            tap.attach(sent)",
    ),
    Mutant(
        "backward hooks of views run in the other order",
        "engine/_gradients/gradients.py",
        "        steps.insert(place, _GradientStep(self))",
        "        steps.append(_GradientStep(self))",
    ),
    Mutant(
        "an edit cuts the graph",
        "engine/_memory/results.py",
        "    return result if is_free else snapshot(result)",
        "    return result.detach() if result.requires_grad else snapshot(result)",
    ),
    Mutant(
        "a checkpointed region runs again without its edits",
        "engine/events.py",
        "        action.keep_for_second_run(must_act=True)\n    is_inside",
        "        pass\n    is_inside",
    ),
    Mutant(
        "selective checkpointing keeps what hooks compute",
        "engine/events.py",
        "        if count_dispatch_modes() and has_caches():",
        "        if False:",
    ),
    Mutant(
        "a checkpointed region runs again without the random numbers of hooks that only read",
        "engine/events.py",
        "    checkpointing.draw_again(action)\n",
        "",
    ),
    Mutant(
        "hooks that are prepended go last",
        "engine/actions.py",
        "        self.order = -next(numbers) if prepend else next(numbers)",
        "        self.order = next(numbers)",
    ),
    Mutant(
        "positions of edits count padding",
        "text/token_positions.py",
        "        columns = [column for column, is_counted in enumerate(flags) if is_counted]",
        "        columns = list(range(len(flags)))",
    ),
    Mutant(
        "an edit of neurons acts on the next ones",
        "hooks/data_edits.py",
        'neuron = None if self.neuron is None else chosen("neuron", self.neuron, x, x.ndim - 1)',
        'neuron = None if self.neuron is None else chosen("neuron", self.neuron, x, x.ndim - 1).roll(1, -1)',
    ),
    Mutant(
        "an edit of a head acts on the next one",
        "hooks/data_edits.py",
        'head = None if self.head is None else chosen("head", self.head, x, head_axis(hook))',
        'head = None if self.head is None else chosen("head", self.head, x, head_axis(hook)).roll(1, head_axis(hook))',
    ),
    Mutant(
        "a context that is left leaves the hooks of the one around it, too",
        "engine/runs.py",
        "        active.set(tuple([run for run in active.get() if run is not self]))",
        "        active.set(())",
    ),
    Mutant(
        "the result is not cast to the dtype of the activation",
        "engine/_memory/results.py",
        "            result = cast(result, like)",
        "            result = cast(result, like) * 1.01",
    ),
    Mutant(
        "the calls of a module are cached in the other order",
        "engine/_recording/recorder.py",
        "            values.setdefault(entry, []).extend(kept)",
        "            values.setdefault(entry, []).insert(0, *kept)",
    ),
    Mutant(
        "a tensor that stands twice in an output is edited once",
        "engine/lenses.py",
        "        if sum(x is first for x in tensors_in(value)) == 1:",
        "        if first is not None:",
    ),
    Mutant(
        "containers are edited in place, not copied",
        "values/structures.py",
        "    kind: Any = type(value)\n    if kind is tuple",
        "    if type(value) in (dict, list):\n        value[key] = child\n        return value\n"
        "    kind: Any = type(value)\n    if kind is tuple",
    ),
    Mutant(
        "a planned run calls the hooks of the last run in another order",
        "engine/_recording/ready.py",
        "            edit.renew(hooks[number][1], planned_from[2 * number + 1])",
        "            edit.renew(hooks[-1 - number][1], planned_from[2 * number + 1])",
    ),
    Mutant(
        "a planned run is used although its modules were replaced or changed",
        "engine/_recording/ready.py",
        "    if ready is None or not ready.is_current():",
        "    if ready is None:",
    ),
)


def checked() -> None:
    """Raise if a fault does not fit the library as it is."""
    for mutant in MUTANTS:
        if (SOURCE / mutant.file).read_text().count(mutant.before) != 1:
            raise ValueError(f"{mutant.fault}: what it replaces does not stand once in {mutant.file}")


def noticed(mutant: Mutant, programs: int) -> tuple[bool, str]:
    """Whether a program fails with the fault in the library, and which."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "hookline"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.file
        path.write_text(path.read_text().replace(mutant.before, mutant.after))
        command = [sys.executable, str(ROOT / "tests" / "fuzz" / "run.py"), "--first", "0", "--processes", "1"]
        command += ["--programs", str(programs), "--minutes", "60", "--until-failure", "--out", folder]
        command += ["--without", "inductor"]  # which takes a minute for a model, and shows what the other graphs show
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    failure = re.search(r"^(\d+ .*): ", done.stdout, re.MULTILINE)
    if failure is None and not re.search(r"^\d+ programs$", done.stdout, re.MULTILINE):
        raise RuntimeError(f"{mutant.fault}: the fuzzer itself failed:\n{done.stdout}\n{done.stderr}")
    return failure is not None, failure[0][:120] if failure is not None else ""


def main() -> None:
    """Try every fault, and end with how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--only", help="faults with this in their name")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    checked()
    mutants = [mutant for mutant in MUTANTS if options.only is None or options.only in mutant.fault]
    count = 0
    with ThreadPoolExecutor(options.processes) as pool:
        results = pool.map(lambda mutant: (mutant, time.monotonic(), *noticed(mutant, options.programs)), mutants)
        for mutant, began, is_noticed, how in results:
            count += is_noticed
            seconds = f"{time.monotonic() - began:.0f} s"
            print(
                f"{'noticed' if is_noticed else 'MISSED':8} {mutant.fault} ({mutant.file}; {seconds}) {how}", flush=True
            )
    print(f"{count} of {len(mutants)} noticed")
    sys.exit(count < len(mutants))


if __name__ == "__main__":
    main()

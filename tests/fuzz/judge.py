"""One program and one executor: does the library do what hooks by hand do?"""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from fuzz import compare, networks, oracle
from fuzz.changes import KEEPING
from fuzz.oracle import ANYTHING, Observed
from fuzz.program import Language, Plain, Program, Run, hooks_of, runs
from fuzz.shrink import shrink
from fuzz.subject import Subject, quietly
from torch import Tensor, nn
from zoo.oracle import Event, hooked, tensors, version

import hookline

REFUSALS = (
    r"this point has no known position axis",  # docs/hook-objects.md
    r"was removed or disabled between the forward pass and the backward pass, which recomputes",  # docs/hooks.md
    r"is for one call of its module .* recomputed by a checkpoint",  # calls have no number there (docs/hooks.md)
    r"neuron= indexes the last axis, and .* as of an image",  # docs/hook-objects.md
    r"has 1 positions, but the text has .* is ambiguous there",  # generate computes the last logits of a prompt only
    r"positions at .* are ambiguous",  # sequence-first modules (docs/hook-objects.md)
    r"two activations would be cached as .* the name of a module",  # docs/names.md
)
"""What the library refuses for a reason that its docs give. Any other refusal is a failure."""


class Verdict(NamedTuple):
    """The outcome of a program in an executor."""

    kind: Literal["agrees", "invalid", "refused", "fails"]
    text: str = ""


def by_hand(subject: Subject, program: Program, *, is_clear: bool = False) -> Observed | Verdict:
    """What the oracle observes, or why the program cannot be run even by hand. `is_clear`: somebody looked at it."""
    parts = [part for _, part in program.network.parts] if isinstance(program.network, Plain) else []
    if "Blind()" in parts and any(run.mode == "grad" for run in runs(program)):
        return Verdict("invalid", "torch takes wrong gradients where a module writes through `.data`")
    if not is_clear and (unsaid := unsaid_by_hand(program, parts)) is not None:
        return Verdict("invalid", unsaid)
    if any(run.is_training for run in runs(program)) and any(hook.way == "edit" for hook in hooks_of(program)):
        return Verdict("invalid", "dropout draws numbers in the order of the memory, which edits as data may change")
    try:
        with quietly():
            for run in runs(program):  # clones made by hand may hide that the network cannot be differentiated
                if run.mode == "grad":
                    subject.observe(run, subject.module)
                if run.gradients:
                    subject.observe(run, subject.differentiated)
                    unsaid = None if is_clear else unsaid_of_aliases(subject, program, run)
                    if unsaid is not None:
                        return Verdict("invalid", unsaid)
            subject.restore()
            observed = oracle.ByHand(subject, program).run()
            if not any(run.gradients for run in runs(program)):
                return observed
            subject.restore()
            return with_gradients(program, observed, oracle.ByHand(subject, without_gradients(program)).run())
    except Exception as error:  # torch refuses it, with or without hookline
        return Verdict("invalid", f"{type(error).__name__}: {error}"[:200])
    finally:
        subject.restore()


ALIASES = ("nn.Identity()", "Same()", "Turn()", "nn.Dropout", "nn.Sequential(nn.Identity()", "Own()", "Store()")


def unsaid_by_hand(program: Program, parts: list[str]) -> str | None:
    """Why clones made by hand cannot say what a program must show; None if they can."""
    has_checkpoint = any(part.startswith(("Again(", "Selective(")) for part in parts)
    if has_checkpoint and any(hook.change in KEEPING for hook in hooks_of(program)):
        return "a function that keeps state is called twice in a checkpointed region"
    places = [hook.place for hook in hooks_of(program)]
    places += [gradient.place for run in runs(program) for gradient in run.gradients]
    if has_checkpoint and any(place.call is not None for place in places):
        return "calls have no number where a checkpoint runs its region again"
    if isinstance(program.network, Language) and any(run.is_training and run.options for run in runs(program)):
        return "how many random numbers a run draws that ends early"
    return None


def unsaid_of_aliases(subject: Subject, program: Program, run: Run) -> str | None:
    """Why clones made by hand cannot say what a gradient is of a tensor that the network writes to later."""
    if not isinstance(program.network, Plain):
        return None
    written, table = written_later(subject, run), dict(program.network.parts)
    places = [hook.place for hook in hooks_of(program)] + [gradient.place for gradient in run.gradients]
    if ("", "input") in written and any((place.module, place.side) == ("", "input") for place in places):
        return "whether the edited input of a network that writes to it has a graph"
    for place in (gradient.place for gradient in run.gradients):
        part = table.get(place.module.split(".")[0], "")
        has_aliases = part.startswith(ALIASES) or not place.module or part in ("Clear()", "Scale()")
        if has_aliases and (place.module, place.side) in written:
            return "the gradient of a tensor that has several names, to one of which the network writes"
        if "Store()" in table.values() and (place.module, place.side) in written:
            return "whether a buffer that the network writes to gets the graph of a gradient at another of its names"
    return None


def written_later(subject: Subject, run: Run) -> set[tuple[str, str]]:
    """The events, by module and side, at which a tensor passes that the network writes to afterward."""
    passed: list[tuple[tuple[str, str], Tensor, int]] = []

    def keep(_module: nn.Module, event: Event, value: Any) -> None:
        passed.extend((event[:2], x, version(x)) for _, x in tensors(value))

    with hooked(subject.module, keep, first=False):
        subject.observe(run, subject.module)
    return {event for event, x, before in passed if version(x) != before}


def without_gradients(program: Program) -> Program:
    """The program without its backward hooks."""
    steps = [replace(step, gradients=()) if isinstance(step, Run) else step for step in program.steps]
    return replace(program, steps=tuple(steps))


def with_gradients(program: Program, observed: Observed, bare: Observed) -> Observed | Verdict:
    """What a program shows whose gradients are read at clones made by hand.

    A clone is not the tensor that the network writes to later. Where that changes what the network computes, it
    must do what it does without backward hooks, and hooks by hand cannot say what the gradients are.
    """
    only_read = all(gradient.change == "read" for run in runs(program) for gradient in run.gradients)
    names = [name for name in bare if only_read or " gradient " not in f" {name} "]
    if compare.difference(program, {name: bare[name] for name in names}, observed, extra=False) is None:
        return observed
    if not only_read:
        return Verdict("invalid", "clones made by hand change what the network computes")
    return {name: bare.get(name, ANYTHING) for name in observed} | {"anything": ANYTHING}


def judge(subject: Subject, program: Program, executor: Any, expected: Observed) -> Verdict:
    """Run the program with the library, and compare."""
    before, refused = attributes(subject.module), None
    try:
        observed = executor.run(subject, program)
    except hookline.HooklineError as refusal:
        text = f"{type(refusal).__name__}: {refusal}"
        is_documented = any(re.search(pattern, text, re.DOTALL) for pattern in REFUSALS)
        refused = Verdict("refused" if is_documented else "fails", text[:600])
    except Exception as error:  # whatever it is, it is a finding
        return Verdict("fails", f"raises {type(error).__name__}: {error}"[:600])
    finally:
        subject.restore()
    if refused is not None:
        gc.collect()  # the error may keep the graph of the pass, and with it the hooks of a checkpointed region
        return refused
    if executor.only_text:
        expected, observed = (compare.only_text(program, each) for each in (expected, observed))
    unlike = compare.difference(program, expected, observed, exact=executor.is_exact)
    if unlike is not None:
        return settled(program, executor, unlike)
    after = attributes(subject.module)
    if before != after:
        gc.collect()  # the graph of a pass that failed may have to be freed first
        after = attributes(subject.module)
    left = [path for path in before if before[path] != after.get(path)]
    return Verdict("fails", f"left on {left[0]!r}: {before[left[0]]} became {after[left[0]]}") if left else AGREES


def settled(program: Program, executor: Any, unlike: str) -> Verdict:
    """The verdict about a difference that may be rounding, which norms of small numbers and choices of experts enlarge.

    In float64 rounding is smaller by nine digits, and a mistake is as large as before. What cannot run in it is judged
    in float32.
    """
    network = program.network
    may_be_rounding = not (executor.is_exact and compare.is_exact(program)) or " gradient" in unlike
    if not may_be_rounding or network.dtype == "float64" or "differs by" not in unlike:
        return Verdict("fails", unlike)
    steps = [replace(step, autocast=False) if isinstance(step, Run) else step for step in program.steps]
    for dtype in ("float64", "float32") if network.dtype == "bfloat16" else ("float64",):
        wide = Program(replace(network, dtype=dtype), tuple(steps))
        subject = Subject(wide.network)
        expected = by_hand(subject, wide)
        if not isinstance(expected, Verdict):
            verdict = judge(subject, wide, executor, expected)
            is_wrong = verdict.kind == "fails"
            return Verdict("fails", f"{unlike}; in {dtype}: {verdict.text}") if is_wrong else verdict
    return Verdict("fails", unlike)


AGREES = Verdict("agrees")


def attributes(module: nn.Module) -> dict[str, Any]:
    """What is on every module: its attributes by name, and how many hooks."""
    return {
        path: (sorted(vars(part)), [len(hooks) for key, hooks in sorted(vars(part).items()) if key.endswith("_hooks")])
        for path, part in module.named_modules()
    }


def is_like(one: Verdict, other: Verdict) -> bool:
    """Whether two failures may have the same cause: the same kind of thing differs, or the same error is raised."""
    return other.kind == "fails" and sort_of(one.text) == sort_of(other.text)


def sort_of(text: str) -> str:
    if text.startswith(("raises", "left on")) or "Error" in text[:40]:
        return re.sub(r"'[^']*'|\d+", "", text)[:70]
    name, _, what = text.partition(": ")
    word = name.split()[1] if " " in name else name
    return f"{word} {'missing' if 'missing' in what else 'only' if 'only' in what else 'differs'}"


def smaller(program: Program, executor: Any, failure: Verdict, seconds: float = 15) -> Program:
    """The program with as much taken away as still fails in the same way."""

    def fails(candidate: Program) -> bool:
        try:
            if not executor.takes(candidate):
                return False
            subject = Subject(candidate.network)
        except Exception:  # what is left is no network
            return False
        expected = by_hand(subject, candidate)
        return not isinstance(expected, Verdict) and is_like(failure, judge(subject, candidate, executor, expected))

    return shrink(program, fails, seconds)


def script(program: Program, executor: str, text: str) -> str:
    """A program that runs alone, in the root of the project."""
    lines = networks.source(program.network).rstrip().splitlines() if isinstance(program.network, Plain) else []
    return (
        f"# {' '.join(text.split())[:300]}\n"
        + "".join(f"#   {line}\n" for line in lines)
        + 'import sys; sys.path.insert(0, "tests")\n'
        "from fuzz.program import *\nfrom fuzz.run import replay\n\n"
        f"replay({executor!r}, {program!r})\n"
    )

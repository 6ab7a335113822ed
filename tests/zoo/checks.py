"""The checks of one network: what the library reads, edits and differentiates, against the oracle."""

from __future__ import annotations

import copy
import io
import pickle
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from zoo import oracle
from zoo.oracle import Edit, Event, Path

import hookline

CLOSE, ROUNDING = 1e-4, 1e-7
"""Gradients may be added in another order. A difference is not from that if it is larger than these parts of the
largest value of this gradient, and of all of them: some gradients are nothing but rounding."""
SLOW = 0.005
"""Seconds of a forward pass from which on the cost of hooks is measured."""


@dataclass
class Problem:
    """One disagreement: the check, the point, and what differs."""

    check: str
    point: str
    what: str
    by: float | None = None


@dataclass
class Findings:
    """What the checks of a network found."""

    compared: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """What the library refused to do, by check and point, with its message."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What could not be checked, and why."""
    cost: dict[str, float] = field(default_factory=dict)

    def add(self, check: str, point: str, problems: Iterable[tuple[str, float | None]]) -> None:
        self.compared[check] += 1
        self.problems += [Problem(check, point, what, by) for what, by in problems]


@dataclass
class Outcome:
    """What one run returned, and what it did to the inputs, the state and the random numbers."""

    output: dict[Path, Tensor]
    inputs: dict[Path, Tensor]
    state: dict[str, Tensor]
    """Parameters and buffers that have other bits than before the run."""
    random: Tensor
    error: Exception | None = None
    raw: Any = None


def differences(
    expected: dict[Any, Tensor], actual: dict[Any, Tensor], what: str
) -> Iterator[tuple[str, float | None]]:
    """How two sets of tensors differ."""
    for key in expected.keys() | actual.keys():
        if key not in expected or key not in actual:
            yield f"{what} {_text(key)} only {'with' if key in actual else 'without'} the library", None
        elif not oracle.same_bits(expected[key], actual[key]):
            yield f"{what} {_text(key)}", oracle.distance(expected[key], actual[key])


def _text(key: Any) -> str:
    return "".join(f"[{part}]" for part in key) if isinstance(key, tuple) else str(key)


def compare(expected: Outcome, actual: Outcome) -> Iterator[tuple[str, float | None]]:
    """How a run with the library differs from that of the oracle."""
    if (expected.error is None) != (actual.error is None):
        error = expected.error or actual.error
        yield (
            f"raises {'only without' if expected.error else 'with'} the library: {type(error).__name__}: {error}"[:400],
            None,
        )
        return
    if expected.error is not None:
        return
    yield from differences(expected.output, actual.output, "output")
    yield from differences(expected.inputs, actual.inputs, "the user's input")
    yield from differences(expected.state, actual.state, "state")
    if not torch.equal(expected.random, actual.random):
        yield "the state of the random numbers", None


def seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for each GPU to come
    random.seed(0)
    numpy.random.seed(0)


class Subject:
    """A network and its inputs, which every run finds as they were at first."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs or {}
        self.tensors = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self.saved = {name: x.detach().clone() for name, x in self.tensors.items()}
        self.buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self.versions = {name: oracle.version(x) for name, x in self.tensors.items()}
        self.names = {name for name, _ in module.named_modules(remove_duplicate=False)}
        self.learns = any(x.requires_grad for x in module.parameters())
        self.leaves: dict[str, Tensor] = {}
        """The inputs of the last run with gradients, if the network has no parameters that have some."""

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of their own for one run."""
        return copy.deepcopy((self.args, self.kwargs))

    def restore(self, names: Iterable[str]) -> None:
        for name in names:
            self.tensors[name].data.copy_(self.saved[name])
        self.versions = {name: oracle.version(x) for name, x in self.tensors.items()}

    def changed(self, *, checks_all: bool = False) -> dict[str, Tensor]:
        """What has other bits: buffers, and parameters that torch counts as written; or all of them, which is slow."""
        written = [
            name
            for name, x in self.tensors.items()
            if checks_all or name in self.buffers or oracle.version(x) != self.versions[name]
        ]  # batch norm writes to its statistics without being counted
        return {
            name: self.tensors[name].detach().clone()
            for name in written
            if not oracle.same_bits(self.tensors[name], self.saved[name])
        }

    def run(self, call: Callable[..., Any], *, grad: bool = False, keeps_output: bool = False) -> Outcome:
        """Call the network, or what wraps it, on inputs of its own."""
        args, kwargs = self.inputs()
        if grad and not self.learns:
            args, kwargs = self._with_gradients((args, kwargs))
        seed()
        output, error = None, None
        try:
            with torch.set_grad_enabled(grad):
                output = call(*args, **kwargs)
        except Exception as failure:  # it is compared, and reported
            error = failure
        outcome = Outcome(
            {path: x.detach().clone() for path, x in oracle.everything(output)},
            {path: x.detach().clone() for path, x in oracle.everything((args, kwargs))},
            self.changed(),
            torch.get_rng_state(),
            error,
            output if keeps_output else None,
        )
        self.restore(outcome.state)
        return outcome

    def _with_gradients(self, inputs: Any) -> Any:
        """Inputs that have gradients, and may be written to."""
        self.leaves = {}
        for path, x in oracle.tensors(inputs):
            if x.is_floating_point() or x.is_complex():
                self.leaves[f"input {_text(path)}"] = leaf = x.requires_grad_()
                inputs = oracle.replaced(inputs, path, leaf.clone())
        return inputs

    def point(self, module: str, side: str, path: Path = (), call: int | None = None) -> str:
        """The native name of a point, as docs/names.md says."""
        name = module
        if side == "input" or not module:
            name = f"{module}.{side}" if module else side
            name = f"{module}:{side}" if name in self.names else name
        keys = path[1:] if side == "input" else path
        return name + "".join(f"[{key}]" for key in keys) + ("" if call is None else f"#{call}")

    def seen(self, *, grad: bool = False) -> tuple[oracle.Seen, Outcome]:
        """What the oracle reads at every event."""
        with oracle.watching(self.module) as seen:
            outcome = self.run(self.module, grad=grad)
        return seen, outcome


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def leaves(subject: Subject, seen: oracle.Seen) -> list[tuple[str, str]]:
    """The inputs and outputs of modules without children that were called and passed a tensor."""
    parents = {name for name, module in subject.module.named_modules() if next(module.children(), None) is not None}
    events = [(event.module, event.side) for event in seen.tensors if event.module not in parents]
    return list(dict.fromkeys(events))


# What is changed at a point.


def changed(x: Tensor) -> Tensor:
    """Another value that fits: numbers are scaled and shifted, indices and masks trade places."""
    if x.is_floating_point() or x.is_complex():
        return x * 0.5 + 0.125
    return x.roll(1, -1) if x.ndim else x


def changed_in_place(x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex():
        x.mul_(0.5).add_(0.125)
    elif x.ndim:
        x.copy_(x.roll(1, -1))


def changed_by_writing(x: Tensor) -> Tensor:
    """As `changed_in_place`, for the oracle, which has a clone."""
    changed_in_place(x)
    return x


def check_edit(
    subject: Subject,
    net: Any,
    findings: Findings,
    module: str,
    side: Any,
    *,
    in_place: bool,
    grad: bool,
    call: int | None = None,
    bare: Outcome | None = None,
) -> None:
    """An edit at one point, against a torch hook that returns a changed clone."""
    name = subject.point(module, side, call=call)
    check = f"edit {side} {'in place' if in_place else 'returned'}"
    edit = Edit(module, side, changed_by_writing if in_place else changed, call)
    with oracle.editing(subject.module, edit):
        expected = subject.run(subject.module, grad=grad)
    try:
        hook = changed_in_place if in_place else changed
        with quietly(), net.hooks(fwd_hooks=[(name, hook)]):
            actual = subject.run(net.module, grad=grad)
    except hookline.HooklineError as refusal:
        findings.refused[f"{check} at {name}"] = f"{type(refusal).__name__}: {refusal}"
        return
    if isinstance(actual.error, hookline.HooklineError) and expected.error is None:
        findings.refused[f"{check} at {name}"] = f"{type(actual.error).__name__}: {actual.error}"
        return
    problems = list(compare(expected, actual))
    if problems and side == "output" and expected.error is None:
        bare = bare or subject.run(subject.module, grad=grad)
        if not list(compare(bare, expected)):  # whoever called the module ignores what it returns
            with oracle.editing(subject.module, edit, in_place=True):
                expected = subject.run(subject.module, grad=grad)
            problems = list(compare(expected, actual))
    findings.add(check, name, problems)


def check_unhooked(subject: Subject, findings: Findings) -> Any:
    """The wrapper computes what the module does, and a pass repeats bit by bit. Returns the wrapper, or None."""
    for _ in range(2):
        bare = subject.run(subject.module)
    if bare.error is not None:
        raise bare.error
    again = subject.run(subject.module)
    if different := list(compare(bare, again)):
        findings.left_out["everything"] = f"the network itself does not repeat: {different[0]}"
        return None
    net = hookline.HookedModule(subject.module)
    findings.add("unhooked", "", compare(bare, subject.run(net)))
    return net


def check_front_door(subject: Subject, findings: Findings) -> None:
    """`hookline.hook` accepts it; a language model's own wrapper reads native points as they are."""
    try:
        model = hookline.hook(subject.module)
    except Exception as error:  # whatever it is, it is a finding
        findings.add("hook", "", [(f"hookline.hook raises {type(error).__name__}: {error}"[:400], None)])
        return
    findings.add("hook", "", [])
    if not isinstance(model, hookline.HookedModel):
        return
    bare = subject.run(subject.module)
    values: dict[str, Tensor] = {}

    def cached(*args: Any, **kwargs: Any) -> Any:
        output, cache = model.run_with_cache(*args, **kwargs)
        values.update(cache)
        return output

    with quietly():
        outcome = subject.run(cached)
    if isinstance(outcome.error, hookline.HooklineError):
        findings.refused["cache of a language model"] = f"{type(outcome.error).__name__}: {outcome.error}"[:400]
        return
    if outcome.error is not None:
        findings.add("cache of a model", "", [(f"raises {type(outcome.error).__name__}: {outcome.error}"[:400], None)])
        return
    logits = outcome.output.get(())
    if logits is not None:
        is_there = any(oracle.same_bits(logits, x) for x in bare.output.values())
        findings.add("cache of a model", "", [] if is_there else [("its logits are not the module's", None)])
    findings.compared["values of a model"] += len(values)
    seen, _ = subject.seen()
    first = {event: path for event, path in seen.first.items() if seen.calls(event.module, event.side) == 1}
    events = random.Random(0).sample(sorted(first), min(len(first), 30))
    names = [subject.point(event.module, event.side) for event in events]
    values.clear()
    try:
        with quietly():
            subject.run(
                lambda *args, **kwargs: values.update(model.run_with_cache(*args, names_filter=names, **kwargs)[1])
            )
    except hookline.HooklineError as refusal:
        findings.refused["native names of a model"] = f"{type(refusal).__name__}: {refusal}"[:400]
    for event, name in zip(events, names, strict=True):
        wanted = {name: seen.tensors[event][first[event]]}
        if values:
            findings.add("native value of a model", name, differences(wanted, {name: values[name]}, "value"))


def check_cache(subject: Subject, net: Any, findings: Findings, *, grad: bool = False) -> oracle.Seen | None:
    """A full cache, and one of every tensor at every event, against clones by hand."""
    seen, expected = subject.seen(grad=grad)
    again, _ = subject.seen(grad=grad)
    if expected.error is not None:
        findings.left_out["cache"] = f"the network fails with torch hooks on it: {expected.error!r}"[:400]
        return None
    unstable = {
        event for event, values in seen.tensors.items() if list(differences(values, again.tensors.get(event, {}), ""))
    }  # memory that nobody has written to yet
    cache: Any = None

    def cached(*args: Any, **kwargs: Any) -> Any:
        nonlocal cache
        output, cache = net.run_with_cache(*args, **kwargs)
        return output

    with quietly():
        actual = subject.run(cached, grad=grad)
    if isinstance(actual.error, hookline.HooklineError):
        findings.refused["full cache"] = f"{type(actual.error).__name__}: {actual.error}"[:400]
        return seen
    findings.add("full cache", "output", compare(expected, actual))
    if actual.error is not None:
        return seen
    _check_values(subject, seen, cache, findings, {e: [p] for e, p in seen.first.items() if e not in unstable}, True)
    names, wanted = [], {}
    for event, values in seen.tensors.items():
        paths = [p for p in values if p != seen.first[event] and _can_be_named(p) and event not in unstable]
        if paths:
            wanted[event] = paths
            call = None if seen.calls(event.module, event.side) == 1 else event.call
            names += [subject.point(event.module, event.side, path, call) for path in paths]
    if not names:
        return seen

    def named(*args: Any, **kwargs: Any) -> Any:
        nonlocal cache
        output, cache = net.run_with_cache(*args, names_filter=[*dict.fromkeys(names)], **kwargs)
        return output

    with quietly():
        actual = subject.run(named, grad=grad)
    if isinstance(actual.error, hookline.HooklineError):
        findings.refused["cache of parts"] = f"{type(actual.error).__name__}: {actual.error}"[:400]
        return seen
    findings.add("parts", "output", compare(expected, actual))
    if actual.error is None:
        _check_values(subject, seen, cache, findings, wanted, False)
    return seen


def _can_be_named(path: Path) -> bool:
    return all(isinstance(key, int) or (isinstance(key, str) and not {*"[]#"} & {*key} and key) for key in path)


def _check_values(
    subject: Subject, seen: oracle.Seen, cache: Any, findings: Findings, wanted: dict[Event, list[Path]], is_full: bool
) -> None:
    """Every wanted value by its name, with the call if there are several."""
    check, names = "cached value" if is_full else "cached part", set()
    for event, paths in wanted.items():
        is_one = seen.calls(event.module, event.side) == 1
        for path in paths:
            name = subject.point(event.module, event.side, () if is_full else path, None if is_one else event.call)
            names.add(name)
            try:
                actual = cache[name]
            except KeyError as error:
                findings.add(check, name, [(f"is not in the cache: {error}"[:400], None)])
                continue
            findings.add(check, name, differences({name: seen.tensors[event][path]}, {name: actual}, "value"))
    if is_full and len(cache) > len(names) and not findings.problems:
        findings.compared["further cached values"] += len(cache) - len(names)


def loss_of(output: Any) -> Tensor:
    """A number that depends on every tensor of the output, each element with a weight of its own."""
    total: Any = 0.0
    for _, x in oracle.everything(output):
        if x.requires_grad and not x.is_nested and x.layout == torch.strided:
            x = torch.view_as_real(x) if x.is_complex() else x
            weights = torch.linspace(0, 3.1 * x.numel(), x.numel(), dtype=torch.float32).cos().reshape(x.shape)
            total = total + (x.float() * weights).sum()
    return total


def gradients_of_parameters(subject: Subject, output: Any) -> dict[str, Tensor]:
    """Gradients of the loss at the parameters, or at the inputs if there are none, by a backward pass of the whole."""
    try:
        loss_of(output).backward()
        learners = subject.tensors | subject.leaves
        return {name: x.grad for name, x in learners.items() if x.grad is not None}
    finally:
        for x in subject.tensors.values():
            x.grad = None


def apart(expected: Tensor, actual: Tensor, largest: float) -> float | None:
    """How far apart two gradients are, relative to the largest value; None if not further than rounding explains."""
    by = oracle.distance(expected, actual)
    local = expected.abs().max().item() if expected.numel() else 0.0
    return by if by == float("inf") or by * local > CLOSE * local + ROUNDING * largest else None


def largest_of(gradients: Iterable[Tensor]) -> float:
    return max((x.abs().nan_to_num(0, 0, 0).max().item() for x in gradients if x.numel()), default=0.0)


def check_gradients(
    subject: Subject, net: Any, findings: Findings, seen: oracle.Seen, choose: random.Random, count: int = 4
) -> None:
    """Gradients at every point against tensor hooks, and backward hooks that read or edit at some of them."""
    bare = subject.run(subject.module, grad=True, keeps_output=True)
    try:
        plain = gradients_of_parameters(subject, bare.raw)
        again = gradients_of_parameters(subject, subject.run(subject.module, grad=True, keeps_output=True).raw)
    except Exception as error:  # networks without gradients
        findings.left_out["gradients"] = f"{type(error).__name__}: {error}"[:300]
        return
    if list(differences(plain, again, "")):
        findings.left_out["gradients"] = "the network's own gradients do not repeat"
        return
    events = {event for event, path in seen.first.items() if seen.tensors[event][path].is_floating_point()}
    expected = by_hand(subject, events, bare)
    if expected is None:  # somewhere the network relies on two tensors being one
        events = set(choose.sample(sorted(events), min(len(events), 12)))
        expected = {}
        for event in sorted(events):
            one = by_hand(subject, {event}, bare)
            if one is None:
                events.discard(event)
            else:
                expected |= one
    if not events:
        findings.left_out["gradients"] = "the network depends on tensors being one, at every point tried"
        return
    names = sorted({subject.point(event.module, event.side) for event in events})
    cache: Any = None

    def cached(*args: Any, **kwargs: Any) -> Any:
        nonlocal cache
        output, cache = net.run_with_cache(*args, names_filter=names, incl_bwd=True, loss_fn=loss_of, **kwargs)
        return output

    with quietly():
        actual = subject.run(cached, grad=True)
    if isinstance(actual.error, hookline.HooklineError):
        findings.refused["incl_bwd"] = f"{type(actual.error).__name__}: {actual.error}"[:400]
    else:
        findings.add("incl_bwd", "output", compare(bare, actual))
        if actual.error is None:
            largest = largest_of(expected.values())
            for event in sorted(events):
                _check_gradient(subject, seen, event, expected, cache, largest, findings)
    reached = sorted(event for event, gradient in expected.items() if gradient.abs().sum() > 0)
    through = [event for event in reached if event in seen.passed_through]  # what others may write to afterward
    chosen = {*choose.sample(reached, min(len(reached), count)), *choose.sample(through, min(len(through), count))}
    for event in sorted(chosen):
        _check_backward_hook(subject, net, findings, seen, event, plain, expected)


def by_hand(subject: Subject, events: set[Event], bare: Outcome) -> dict[Event, Tensor] | None:
    """Gradients at events by tensor hooks; None if the clones that these need change the output."""
    with oracle.differentiating(subject.module, events) as gradients:
        outcome = subject.run(subject.module, grad=True, keeps_output=True)
        if outcome.error is not None or list(compare(bare, outcome)):
            return None
        gradients.clear()  # those of a network that differentiates in its forward pass are not the loss's
        try:
            gradients_of_parameters(subject, outcome.raw)
        except RuntimeError:
            return None
    return gradients


def _check_gradient(
    subject: Subject,
    seen: oracle.Seen,
    event: Event,
    by_hand: dict[Event, Tensor],
    cache: Any,
    largest: float,
    findings: Findings,
) -> None:
    expected = by_hand.get(event)
    is_one = seen.calls(event.module, event.side) == 1
    name = subject.point(event.module, event.side, (), None if is_one else event.call) + "_grad"
    actual = cache.get(name)
    problems: list[tuple[str, float | None]] = []
    if expected is None or actual is None:
        there = expected if actual is None else actual
        if there is not None and there.abs().sum() > ROUNDING * largest:
            problems = [(f"gradient only {'by hand' if actual is None else 'with the library'}", None)]
    else:
        by = apart(expected, actual, largest)
        problems = [] if by is None else [("gradient", by)]
    findings.add("gradient", name, problems)


def _check_backward_hook(
    subject: Subject,
    net: Any,
    findings: Findings,
    seen: oracle.Seen,
    event: Event,
    plain: dict[str, Tensor],
    by_hand: dict[Event, Tensor],
) -> None:
    """A hook that reads changes no bit of the parameters' gradients; one that edits changes them as by hand."""
    is_one = seen.calls(event.module, event.side) == 1
    name = subject.point(event.module, event.side, (), None if is_one else event.call)
    largest = largest_of(by_hand.values())
    for check, change in (("bwd_hooks reading", None), ("bwd_hooks editing", lambda g: g * 0.5 + 0.01)):
        # More than one where the network differentiates in its forward pass.
        wanted: list[Tensor] = []

        def tensor_hook(g: Tensor, change: Any = change, wanted: list[Tensor] = wanted) -> Tensor | None:
            wanted.append(g.clone())
            return None if change is None else change(g)

        with oracle.differentiating(subject.module, {event}, tensor_hook):
            outcome = subject.run(subject.module, grad=True, keeps_output=True)
            expected = gradients_of_parameters(subject, outcome.raw)
        # Otherwise hooks by hand, too, make torch add gradients in another order.
        is_exact = change is None and not list(differences(plain, expected, ""))
        received: list[Tensor] = []

        def hook(g: Tensor, change: Any = change, received: list[Tensor] = received) -> Tensor | None:
            received.append(g.clone())
            return None if change is None else change(g)

        try:
            with quietly(), net.hooks(bwd_hooks=[(name, hook)]):
                outcome = subject.run(net.module, grad=True, keeps_output=True)
            if outcome.error is not None:
                raise outcome.error
            actual = gradients_of_parameters(subject, outcome.raw)
        except hookline.HooklineError as refusal:
            findings.refused[f"{check} at {name}"] = f"{type(refusal).__name__}: {refusal}"[:400]
            continue
        except Exception as error:  # whatever it is, it is a finding
            findings.add(check, name, [(f"raises {type(error).__name__}: {error}"[:300], None)])
            continue
        scale = largest_of(expected.values())
        problems = [
            (what, by)
            for key in sorted(expected.keys() | actual.keys())
            for what, by in differences(*({key: g[key]} if key in g else {} for g in (expected, actual)), "gradient of")
            if by is None or is_exact or apart(expected[key], actual[key], scale) is not None
        ]
        if len(received) != len(wanted):
            problems.insert(0, (f"the hook was called {len(received)} times, that by hand {len(wanted)} times", None))
        gaps = [apart(*pair, largest) for pair in zip(wanted, received, strict=False)]
        problems[:0] = [("the gradient that the hook got", gap) for gap in gaps if gap is not None][:1]
        findings.add(check, name, problems[:3])


def check_edits(
    subject: Subject, net: Any, findings: Findings, seen: oracle.Seen, choose: random.Random, count: int, ends: float
) -> None:
    """Edits at random leaf inputs and outputs, returned and in place, with and without gradients, at a call or all."""
    sides: dict[str, list[tuple[str, str]]] = {"input": [], "output": []}
    for module, side in leaves(subject, seen):
        sides[side].append((module, side))
    chosen = [place for places in sides.values() for place in choose.sample(places, min(count, len(places)))]
    choose.shuffle(chosen)
    for index, (module, side) in enumerate(chosen):
        if time.process_time() > ends:
            findings.left_out["edits"] = f"time is up after {index} of {len(chosen)}"
            break
        calls = seen.calls(module, side)
        call = choose.randrange(calls) if calls > 1 and choose.random() < 0.5 else None
        grad = choose.random() < 0.5
        for in_place in (False, True):
            check_edit(subject, net, findings, module, side, in_place=in_place, grad=grad, call=call)
            grad = not grad


def check_training(subject: Subject, net: Any, findings: Findings, choose: random.Random) -> None:
    """In training mode, with the same seed: outputs, buffers, random numbers and every cached value."""
    modes = {module: module.training for module in subject.module.modules()}
    subject.module.train()
    try:
        bare = [subject.run(subject.module, grad=True) for _ in range(2)]
        if uncounted := subject.changed(checks_all=True):  # a codebook that learns through `.data`
            subject.buffers |= set(uncounted)
            subject.restore(uncounted)
            bare = [subject.run(subject.module, grad=True) for _ in range(2)]
        if bare[0].error is not None or list(compare(*bare)):
            findings.left_out["training"] = f"does not run or repeat in training mode: {bare[0].error!r}"[:300]
            return
        findings.add("training", "", compare(bare[0], subject.run(net, grad=True)))
        inner = Findings()
        seen = check_cache(subject, net, inner, grad=True)
        if seen is not None:
            check_edits(subject, net, inner, seen, choose, 1, time.process_time() + 10)
        findings.compared["training"] += sum(inner.compared.values())
        findings.problems += [Problem(f"training: {p.check}", p.point, p.what, p.by) for p in inner.problems]
        findings.refused |= {f"training: {what}": why for what, why in inner.refused.items()}
    finally:
        for module, mode in modes.items():
            module.training = mode


def marks(module: nn.Module) -> dict[str, Any]:
    """What is on every module: its attributes by name, and its hooks."""
    found = {}
    for name, each in module.named_modules():
        hooks = [value for key, value in sorted(vars(each).items()) if key.endswith("_hooks")]
        found[name] = sorted(vars(each)), [len(value) for value in hooks if isinstance(value, dict)]
    return found


def check_copies(subject: Subject, net: Any, findings: Findings) -> None:
    """Copies and pickles of a wrapper that has been used compute the same."""
    expected = subject.run(subject.module)
    for check, make, bare_make in (
        ("deepcopy", copy.deepcopy, copy.deepcopy),
        ("pickle", pickled, pickled),
    ):
        try:
            bare = bare_make(subject.module)
        except Exception as error:  # the network itself cannot be copied
            findings.left_out[check] = f"{type(error).__name__}: {error}"[:200]
            continue
        reference = subject.run(bare)
        if list(compare(expected, reference)):
            findings.left_out[check] = "a copy of the bare network computes something else"
            continue
        try:
            findings.add(check, "", compare(reference, subject.run(make(net))))
        except Exception as error:  # whatever it is, it is a finding
            findings.add(check, "", [(f"raises {type(error).__name__}: {error}"[:300], None)])


def pickled(value: Any) -> Any:
    buffer = io.BytesIO()
    pickle.dump(value, buffer)
    buffer.seek(0)
    return pickle.load(buffer)


def check_cost(subject: Subject, net: Any, findings: Findings, seen: oracle.Seen, seconds: float = 4.0) -> None:
    """Medians of one hook and of a full cache, relative to the bare network, taken in turn."""
    outputs = [module for module, side in leaves(subject, seen) if side == "output"] or [""]
    name = subject.point(outputs[len(outputs) // 2], "output")
    args, kwargs = subject.inputs()

    def by_hook() -> None:
        net.run_with_hooks(*args, fwd_hooks=[(name, read)], **kwargs)

    def cached() -> None:
        net.run_with_cache(*args, **kwargs)

    ways: dict[str, Callable[[], Any]] = {"bare": lambda: subject.module(*args, **kwargs), "hook": by_hook}
    ways["cache"] = cached
    times: dict[str, list[float]] = {way: [] for way in ways}
    ends = time.process_time() + seconds
    with torch.no_grad(), quietly():
        while len(times["bare"]) < 12 and (time.process_time() < ends or len(times["bare"]) < 4):
            for way, call in ways.items():
                seed()
                start = time.process_time()  # whatever else the machine does
                call()
                times[way].append(time.process_time() - start)
    bare = median(times["bare"][1:])
    findings.cost["ms"] = bare * 1000
    if bare > SLOW:
        findings.cost |= {way: median(times[way][1:]) / bare for way in ("hook", "cache")}
    subject.restore(subject.changed())


def read(x: Tensor) -> None:
    """A hook that only reads."""


def check_network(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, *, edits: int = 4, seconds: float = 30
) -> Findings:
    """All checks of one network; those that remain after so many seconds of the processor's time are left out."""
    ends = time.process_time() + seconds
    module.eval()
    subject, findings, choose = Subject(module, args, kwargs), Findings(), random.Random(name)
    net = check_unhooked(subject, findings)
    if net is None:
        return findings
    before = marks(module)
    check_front_door(subject, findings)
    seen = check_cache(subject, net, findings)
    if seen is not None:
        check_edits(subject, net, findings, seen, choose, edits, ends)
        if time.process_time() < ends:
            check_gradients(subject, net, findings, seen, choose, edits)
        else:
            findings.left_out["gradients"] = "time is up"
        if time.process_time() < ends:
            check_training(subject, net, findings, choose)
        else:
            findings.left_out["training"] = "time is up"
    findings.add("state", "", [(f"{name} has other bits", None) for name in subject.changed(checks_all=True)])
    after = marks(module)
    left = [path for path in before if before[path] != after[path]]
    findings.add("nothing left", "", [(f"{path}: {before[path]} became {after[path]}", None) for path in left[:3]])
    check_copies(subject, net, findings)
    if seen is not None and leaves(subject, seen):
        try:
            check_cost(subject, net, findings, seen)
        except hookline.HooklineError as refusal:
            findings.left_out["cost"] = f"{type(refusal).__name__}: {refusal}"[:400]
    return findings


def check_leaves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: int = 20) -> Findings:
    """An edit at the input and the output of every leaf, gradients at all points, and some backward hooks."""
    module.eval()
    subject, findings = Subject(module, args, kwargs), Findings()
    net = check_unhooked(subject, findings)
    if net is None:
        return findings
    seen = check_cache(subject, net, findings)
    if seen is None:
        return findings
    for index, (path, side) in enumerate(leaves(subject, seen)):
        check_edit(subject, net, findings, path, side, in_place=bool(index % 2), grad=bool(index // 2 % 2))
    check_gradients(subject, net, findings, seen, random.Random(0), hooks)
    findings.add("state", "", [(f"{name} has other bits", None) for name in subject.changed(checks_all=True)])
    return findings

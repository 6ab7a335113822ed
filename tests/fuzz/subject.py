"""The network of a program, its inputs, and what one run of it shows. Both interpreters run through here."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import devices
import torch
from fuzz import insides, language_runs, languages, networks, oracle
from fuzz.changes import RaisedError
from fuzz.oracle import Acting, Observed, loss_of, settings
from fuzz.program import Language, Plain, Run
from torch import Tensor, nn
from zoo.oracle import everything, replaced, same_bits, tensors

STORED = re.compile(r"(\w+) = ")
CALLED = re.compile(r"self\.(\w+)\(")
CALL = re.compile(r"self\.\w+\([^()]*\)$")
"""A line, or what it stores, that is one call and nothing else."""


class InvalidError(Exception):
    """The network cannot run what the program does, with or without hookline."""


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


class Subject:
    """A network that both interpreters find as it was at first."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.module = self.build()
        self.tensors: dict[str, Tensor] = {}
        self.saved: dict[str, Tensor] = {}
        self.remember()

    def build(self) -> nn.Module:
        return languages.build(self.network) if isinstance(self.network, Language) else networks.build(self.network)

    def inputs(self, run: Run) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.network, Language):
            return languages.inputs(self.network, run)
        return networks.inputs(self.network, run.seed, grad=run.mode == "grad")

    def ignored(self) -> set[tuple[str, int]]:
        """Calls, by module and number, whose callers ignore what they return: it is in no variable that is read."""
        if not isinstance(self.network, Plain):
            return set()
        lines = [statement.strip() for line in self.network.lines for statement in line.split(";")]
        calls, ignored = Counter[str](), set()
        last_inside = {name: "act" for name, part in self.network.parts if part == "Residual()"}
        sequences = [name for name, part in self.network.parts if part.startswith("nn.Sequential(")]
        last_in_sequence = {name: str(len(list(self.module.get_submodule(name).children())) - 1) for name in sequences}
        for index, line in enumerate(lines):
            variable = STORED.match(line)
            later = " ".join((line[variable.end() :] if variable else "", *lines[index + 1 :]))
            is_read = variable is not None and re.search(rf"\b{variable[1]}\b", later) is not None
            is_whole = CALL.match(line[variable.end() :] if variable else line)
            for name in CALLED.findall(line):
                if is_whole is not None and not is_read:
                    ignored.add((name, calls[name]))
                    if name in last_in_sequence:  # which returns what its last module returns
                        ignored.add((f"{name}.{last_in_sequence[name]}", calls[name]))
                if name in last_inside:
                    ignored.add((f"{name}.{last_inside[name]}", calls[name]))
                calls[name] += 1
        return ignored

    def remember(self) -> None:
        if isinstance(self.network, Language):  # another program may have used the model
            self.tensors, self.saved = languages.first_state(self.network)
            return
        named = named_tensors(self.module)
        self.tensors = dict(named)
        self.saved = {name: x.detach().clone() for name, x in named}

    def restore(self) -> None:
        """Put the state back that it had at first, also what modules have replaced."""
        for name, x in named_tensors(self.module):
            x.grad = None
            if not same_bits(x, self.saved[name]):
                owner, _, last = name.rpartition(".")
                first = self.tensors[name]
                first.data = self.saved[name].clone()
                if x is not first:
                    setattr(self.module.get_submodule(owner), last, first)

    def state(self) -> Observed:
        """Parameters and buffers that have other bits than at first."""
        named = named_tensors(self.module)
        return {f"state {name}": x.detach().clone() for name, x in named if not same_bits(x, self.saved[name])}

    def observe(self, run: Run, call: Callable[..., Any]) -> Observed:
        """What one run shows: outputs, gradients, what it did to inputs, parameters, buffers and random numbers."""
        args, kwargs = self.inputs(run)
        observed: Observed = {}
        self.module.train(run.is_training)
        torch.manual_seed(run.seed)
        try:
            with settings(run):
                output = call(*args, **kwargs)
            observed |= {f"output {path}": x.detach().clone() for path, x in everything(output)}
            if run.mode == "grad":
                observed |= self.backward(output, (args, kwargs))
        except RaisedError:
            observed["error"] = "raised"
        finally:
            self.module.eval()
        observed |= {f"the user's input {path}": x.detach().clone() for path, x in everything((args, kwargs))}
        observed["random numbers"] = torch.get_rng_state()
        if devices.DEVICE.type == "cuda":
            observed["random numbers of the device"] = torch.cuda.get_rng_state()
        return observed | self.state()

    def differentiated(self, *args: Any, **kwargs: Any) -> Any:
        """The network on inputs that have a graph, as they have where a gradient is asked for."""
        values = (args, kwargs)
        for path, x in tensors(values):
            if x.is_floating_point():
                values = replaced(values, path, (x if x.requires_grad else x.detach().requires_grad_()).clone())
        return self.module(*values[0], **values[1])

    def backward(self, output: Any, arguments: Any) -> Observed:
        """Gradients of parameters and inputs, of a sum with weights."""
        loss = loss_of(output)
        if loss is not None:
            loss.backward()
        named = dict(self.module.named_parameters())
        given = {f"input {path}": x for path, x in everything(arguments) if x.requires_grad}
        observed = {}
        for name, x in (*named.items(), *given.items()):
            if x.grad is not None:
                observed[f"gradient of {name}"] = x.grad.detach().clone()
                x.grad = None
        return observed

    def by_hand(self, run: Run, edits: Iterable[Acting]) -> Observed:
        """A run with hooks placed by hand."""
        edits, is_language = list(edits), isinstance(self.network, Language)
        passing = (insides.LanguagePass if is_language else oracle.Pass)(self.module, edits, run, self.ignored())

        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(passing, insides.LanguagePass):
                return language_runs.by_hand(self, run, passing, kwargs)
            output = self.module(*args, **kwargs)
            passing.ends()
            return output

        is_experiment = dict(run.options).get("does") in language_runs.EXPERIMENTS  # which has passes of its own
        with nullcontext() if is_experiment else passing.attached():
            observed = self.observe(run, call)
        if "error" not in observed:
            return observed | passing.observed
        plain = self.changed_by(run)  # how much of it is done when an error ends the pass is not said
        ignored = {module for module, _ in passing.ignored}
        if any(acting.hook.place.module in ignored for acting in edits):  # those write to arguments of their modules
            plain |= {name for name in observed if name.startswith(("the user's input", "state"))}
        return {name: oracle.ANYTHING if name in plain else value for name, value in observed.items()}

    def changed_by(self, run: Run) -> set[str]:
        """What of the user's the network itself writes to."""
        before, arguments, module = self.inputs(run), self.inputs(run), deepcopy(self.module)
        with settings(run):
            module(*arguments[0], **arguments[1])
        pairs = zip(everything(before), everything(arguments), strict=True)
        changed = {f"the user's input {path}" for (path, x), (_, y) in pairs if not same_bits(x, y)}
        state = zip(named_tensors(self.module), named_tensors(module), strict=True)
        return changed | {f"state {name}" for (name, x), (_, y) in state if not same_bits(x, y)}

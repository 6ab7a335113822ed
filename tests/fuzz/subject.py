"""The network of a program, its inputs, and what one run of it shows. Both interpreters run through here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fuzz import languages, networks, oracle
from fuzz.changes import RaisedError
from fuzz.oracle import Acting, Observed, loss_of, settings
from fuzz.program import Language, Plain, Run
from torch import Tensor, nn
from zoo.oracle import everything, same_bits

IGNORED = re.compile(r"self\.(\w+)\(")


class InvalidError(Exception):
    """The network cannot run what the program does, with or without hookline."""


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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

    def ignored(self) -> set[str]:
        """Modules whose callers ignore what they return."""
        if isinstance(self.network, Language):
            return set()
        assert isinstance(self.network, Plain)
        names = {match[1] for line in self.network.lines if (match := IGNORED.match(line))}
        residuals = {f"{name}.act" for name, part in self.network.parts if part == "Residual()"}
        return names | residuals

    def remember(self) -> None:
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        if isinstance(self.network, Language):  # another program may have used the model
            self.tensors, self.saved = languages.first_state(self.network)
            return
        self.tensors = dict(named)
        self.saved = {name: x.detach().clone() for name, x in named}

    def restore(self) -> None:
        """Put the state back that it had at first, also what modules have replaced."""
        for name, x in (*self.module.named_parameters(), *self.module.named_buffers()):
            x.grad = None
            if not same_bits(x, self.saved[name]):
                owner, _, last = name.rpartition(".")
                first = self.tensors[name]
                first.data = self.saved[name].clone()
                if x is not first:
                    setattr(self.module.get_submodule(owner), last, first)

    def state(self) -> Observed:
        """Parameters and buffers that have other bits than at first."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
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
        return observed | self.state()

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
        edits = list(edits)
        text = languages.text(run) if isinstance(self.network, Language) else None
        for acting in edits:
            acting.text = text
        passing = oracle.Pass(self.module, edits, run, self.ignored())

        def call(*args: Any, **kwargs: Any) -> Any:
            with passing.attached():
                return self.module(*args, **kwargs)

        observed = self.observe(run, call)
        return observed if "error" in observed else observed | passing.observed

"""Programs as data: a network, and what is done to it. Two interpreters run the same program and are compared.

`oracle.py` does it by hand with torch hooks, `library.py` with hookline. A program prints as Python, and `eval` reads
it back: that is how regressions are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Side: TypeAlias = Literal["input", "output"]
Way: TypeAlias = Literal["return", "in place", "data", "edit"]


@dataclass(frozen=True)
class Place:
    """A point: the name that the library gets, and where it is, for the oracle."""

    name: str
    module: str
    side: str = "output"
    call: int | None = None
    path: tuple[Any, ...] | None = None
    """Keys that lead to the tensor; None for the first one. For an input they begin in `(args, kwargs)`."""
    heads: int = 0
    """As how many heads the last axis is seen; 0 for an axis that is not divided."""
    part: tuple[int, int] | None = None
    """Which part of the last axis it is, before that is divided."""
    chunk: tuple[int, int] | None = None
    """Which of how many chunks of each head."""
    inside: str = ""
    """What it is inside the module, or around it, if no event has it: see `insides.py`."""

    @property
    def lens(self) -> tuple[Any, ...]:
        """How it sees the tensor at its event."""
        return self.path, self.heads, self.part, self.chunk, self.inside


@dataclass(frozen=True)
class Hook:
    """A forward hook: what it does to the activation, and how it says so."""

    place: Place
    change: str
    way: Way = "return"
    where: tuple[tuple[str, Any], ...] = ()
    """Options of an edit as data: pos, head, neuron, mask."""


@dataclass(frozen=True)
class Gradient:
    """A backward hook; `read` keeps the gradient."""

    place: Place
    change: str = "read"


@dataclass(frozen=True)
class Foreign:
    """A torch hook of somebody else, on the first tensor of a module's input or output."""

    module: str
    side: Side
    change: str
    is_first: bool = False


@dataclass(frozen=True)
class Add:
    """`add_hook`, under a number."""

    number: int
    hook: Hook
    prepend: bool = False


@dataclass(frozen=True)
class Attach:
    """Attach a torch hook of somebody else, under a number."""

    number: int
    foreign: Foreign


@dataclass(frozen=True)
class Swap:
    """Replace a module by another of its class, under a number."""

    number: int
    module: str


@dataclass(frozen=True)
class Remove:
    """Remove what was added under a number; a module that was replaced comes back."""

    number: int


@dataclass(frozen=True)
class Enter:
    """Open a context with hooks."""

    hooks: tuple[Hook, ...]


@dataclass(frozen=True)
class Leave:
    """Close the innermost context."""


@dataclass(frozen=True)
class Run:
    """One pass, with hooks of its own."""

    hooks: tuple[Hook, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    reads: tuple[Place, ...] | Literal["all"] | None = None
    """What is cached."""
    mode: Literal["no_grad", "grad", "inference"] = "no_grad"
    is_training: bool = False
    autocast: bool = False
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """Of a language model: the kind of run, padding, and so on."""


Step: TypeAlias = Add | Attach | Swap | Remove | Enter | Leave | Run


@dataclass(frozen=True)
class Plain:
    """A network as the source of its class."""

    parts: tuple[tuple[str, str], ...]
    """Names of modules, and the expressions that make them."""
    lines: tuple[str, ...]
    """The body of `forward`."""
    inputs: tuple[tuple[str, str], ...]
    """Names of arguments, and the expressions that make them."""
    dtype: str = "float32"
    layout: str = "contiguous_format"
    by_keyword: bool = False
    requires_grad: bool = False
    is_scripted: bool = False


@dataclass(frozen=True)
class Language:
    """A tiny model of transformers with random weights."""

    kind: str
    family: Literal["causal", "encoder", "seq2seq", "vision"] = "causal"
    dtype: str = "float32"
    attention: str = "sdpa"
    as_module: bool = False
    """Wrapped as any module is, with native points only."""


@dataclass(frozen=True)
class Program:
    """A network and the steps that are run on it."""

    network: Plain | Language
    steps: tuple[Step, ...]


def runs(program: Program) -> list[Run]:
    return [step for step in program.steps if isinstance(step, Run)]


def hooks_of(program: Program) -> list[Hook]:
    """Every forward hook of a program."""
    hooks: list[Hook] = []
    for step in program.steps:
        if isinstance(step, Add):
            hooks.append(step.hook)
        elif isinstance(step, Enter | Run):
            hooks += step.hooks
    return hooks


def read(text: str) -> Program:
    """The program that was printed as this text."""
    classes = (Place, Hook, Gradient, Foreign, Add, Attach, Swap, Remove, Enter, Leave, Run, Plain, Language, Program)
    program = eval(text, {cls.__name__: cls for cls in classes})
    assert isinstance(program, Program)
    return program

"""What a catalog lists: networks by name, each with the function that builds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

Built: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, and the arguments and keywords that it is called with."""

LARGEST = 30_000_000
"""Parameters of the largest network that is checked."""


class Network(NamedTuple):
    """A row of a catalog. Its module is built in a process of its own."""

    name: str
    build: Callable[[], Built]


class TooLargeError(Exception):
    """The network cannot be made smaller by arguments."""


def size_of(make: Callable[[], nn.Module]) -> int:
    """The parameters that a network would have, without memory for them."""
    with torch.device("meta"):
        return sum(x.numel() for x in make().parameters())


def smallest(make: Callable[..., nn.Module], *options: dict[str, Any]) -> nn.Module:
    """The network as it comes, or with the first of these options that makes it small enough.

    Options that a network does not take are passed over.
    """
    sizes = []
    for arguments in ({}, *options):
        try:
            try:
                sizes.append(size_of(lambda arguments=arguments: make(**arguments)))
            except NotImplementedError:  # it computes something while it is built
                sizes.append(sum(x.numel() for x in make(**arguments).parameters()))
        except Exception:  # it does not take these options
            if not arguments:
                raise
            continue
        if sizes[-1] <= LARGEST:
            return make(**arguments)
    raise TooLargeError(f"{min(sizes):,} parameters")


def runs(module: nn.Module, *inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Built:
    """The network with the first of these inputs that it takes."""
    module.eval()
    error: Exception | None = None
    for args, kwargs in inputs:
        try:
            with torch.no_grad():
                module(*args, **kwargs)
        except Exception as failure:  # the next one may fit
            error = error or failure
        else:
            return module, args, kwargs
    assert error is not None
    raise error


def image(size: int, rows: int = 1, channels: int = 3) -> torch.Tensor:
    return torch.randn(rows, channels, size, size)


def images(*sizes: int, rows: int = 1) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((image(size, rows),), {}) for size in sizes]


def tokens(count: int = 24, vocabulary: int = 100, rows: int = 1) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, count))


def filled(cls: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a class that have a value in a table of small sizes, by their names."""
    return {name: values[name] for name in inspect.signature(cls).parameters if name in values}


def can_be_filled(cls: Callable[..., Any], values: dict[str, Any]) -> bool:
    """Whether such a table has every argument that a class cannot do without."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except ValueError:
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.name in values or p.default is not p.empty or p.kind in kinds for p in parameters)

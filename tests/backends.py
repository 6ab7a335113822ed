"""Backends of torch.compile for tests."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from releases import torch_is_before

has_graphs = not torch_is_before("2.10")
cannot_compile = sys.version_info >= (3, 14) and not has_graphs
needs_compiler = pytest.mark.skipif(cannot_compile, reason="torch before 2.10 does not compile on Python 3.14")
needs_graphs = pytest.mark.skipif(
    not has_graphs,
    reason="torch 2.8 cannot trace models of transformers, and graphs of 2.9 lose what they read: runs are uncompiled",
)


class Counting:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

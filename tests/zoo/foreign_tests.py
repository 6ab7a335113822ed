"""Test modules of other repositories, imported for the small networks that they build.

They may be of another version than the library, or need packages that nobody has here: what they import and does not
exist is replaced by a stand-in.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

from zoo.network import Built

LACKING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'|No module named '([\w.]+)'")


class StandIn(ModuleType):
    """A module that is not installed: every name in it is a mock."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def folder_of(variable: str, inside: str) -> Path:
    """The folder of tests that an environment variable names."""
    folder = Path(os.environ.get(variable, "")).resolve()
    if not (folder / inside).is_dir():
        raise FileNotFoundError(f"{variable} is not the folder of tests of that repository: it lacks {inside}")
    sys.path.insert(0, str(folder.parent))
    return folder


def imported(name: str) -> ModuleType:
    """The test module, with stand-ins for what it imports and nobody has."""
    for _ in range(20):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            match = LACKING.search(str(error))
            if match is None:
                raise
            lacking, module, whole = match.groups()
            if whole is None:
                setattr(sys.modules[module], lacking, MagicMock(name=lacking))
            elif whole.split(".")[0] in ("tests", "transformers", "diffusers"):
                raise
            else:
                sys.modules[whole] = StandIn(whole)
    raise ImportError(f"{name} lacks too much")


def failing(error: Exception) -> Any:
    """What raises the error when the network is built, so that it is listed."""

    def build() -> Built:
        raise error

    return build

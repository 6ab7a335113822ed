"""Versions of torch and transformers on which what a test expects depends."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from unittest import SkipTest

import torch
from packaging.version import Version

_CONSTRAINTS = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8")
PINNED = re.findall(r"^transformers==(.+)$", _CONSTRAINTS, re.MULTILINE)[0]
"""The version of transformers that the tests are written with: it has every architecture that they name."""


def torch_is_before(wanted: str) -> bool:
    """Whether torch is older than a version; builds for a device count as the release."""
    return Version(Version(torch.__version__).base_version) < Version(wanted)


def transformers_is_before(wanted: str) -> bool:
    """Whether transformers is older than a version."""
    return Version(version("transformers")) < Version(wanted)


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Skip a test if an older version of transformers asks for torchvision here, which newer ones do without."""
    try:
        yield
    except Exception as error:
        if "Torchvision library" not in str(error) or not transformers_is_before(PINNED):
            raise
        raise SkipTest("this version of transformers needs torchvision, which is not a dependency") from error

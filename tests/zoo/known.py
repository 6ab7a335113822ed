"""Disagreements that are known, each with the reason and where it is explained. Nothing is skipped: they are listed."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, NamedTuple


class Known(NamedTuple):
    """Globs for a package, a network and a check, and why they disagree."""

    package: str
    network: str
    check: str
    reason: str
    link: str
    """A page, an issue or a line that says more."""


KNOWN: tuple[Known, ...] = (
    Known(
        "timm",
        "efficientformer_l1",
        "gradient",
        "torch's batch norm takes wrong gradients where these are laid out in a way that a hook here changes",
        "docs/reliability.md",
    ),
    Known(
        "torchvision",
        "convnext_*",
        "bwd_hooks reading",
        "the block writes in place to what stochastic depth returned unchanged; the gradient there is read through a "
        "view, and torch then adds up the gradient of a parameter in another order",
        "docs/reliability.md",
    ),
    Known(
        "transformers_tests",
        "JanusModel",
        "*",
        "its test passes generation_mode, which the model ignores; the wrapper refuses keywords that have no effect",
        "docs/errors.md",
    ),
)


def reason(package: str, network: str, problem: dict[str, Any]) -> str | None:
    """Why a disagreement is expected, with a link; None if it is not."""
    for known in KNOWN:
        patterns = zip((package, network, problem["check"]), known[:3], strict=True)
        if all(fnmatch(text, pattern) for text, pattern in patterns):
            return f"{known.reason} ({known.link})"
    return None

"""Suggestions: the names that people mean when they write a name that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

_RULES = (
    (r"(?:(?:module|_orig_mod|base_model\.model)\.)+(.+)", r"\1"),  # of DDP, torch.compile, peft
    (r"(.+?)(#\d+)[.:]input(\[.+)?", r"\1.input\3\2"),
    (r"(.+?)(#\d+)[.:]output", r"\1\2"),
    (r"(.+)\.(?:weight|bias)", r"\1"),
    (r"(.+)\[(\d+)\](.*)", r"\1.\2\3"),
    (r"(.+)\.(\w+)", r"\1.hook_\2_out"),
    (r"(.+)", r"\1.hook_out"),
)
"""What is written, and the name that may be meant."""


def rewritten(name: str) -> Iterator[str]:
    """The names that the rules make of a name, which may exist or not."""
    for pattern, template in _RULES:
        if (match := re.fullmatch(pattern, name)) is not None:
            yield match.expand(template)


def with_other_prefix(name: str, names: Iterable[str]) -> Sequence[str]:
    """The names that end as this one does, from a dot on: those of a model inside another, or around it."""
    longer = [other for other in names if other.endswith(f".{name}")]
    shorter = [other for other in names if name.endswith(f".{other}") and other not in ("input", "output")]
    return [*longer[:2], *sorted(shorter, key=len)[-1:]]


def meant_by(name: str, names: Sequence[str], is_point: Callable[[str], bool]) -> list[str]:
    """The names of points that a name may mean, the likeliest first, without those that are merely similar."""
    return [*filter(is_point, rewritten(name)), *with_other_prefix(name, names)]

"""Training and held-out prompts: a split by prompt, in which prompts with the same tokens stay together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hookline.errors import HooklineError, how_many
from hookline.experiments.core.labels import Label, is_label, scalar


@dataclass(frozen=True, eq=False)
class Split:
    """The classes of prompts, and which prompts are held out."""

    classes: list[Label]
    label: Int[Tensor, " prompt"]
    """The class of each prompt, as a number."""
    is_test: Bool[Tensor, " prompt"]

    def counts(self) -> tuple[int, int]:
        """The numbers of training and held-out prompts."""
        held_out = int(self.is_test.sum())
        return len(self.is_test) - held_out, held_out

    def majority(self) -> float:
        """The held-out accuracy of always answering the most frequent class of the training prompts."""
        most = torch.bincount(self.label[~self.is_test], minlength=len(self.classes)).argmax()
        return float((self.label[self.is_test] == most).double().mean())


def class_numbers(labels: Any, prompts: int) -> tuple[list[Label], Int[Tensor, " prompt"]]:
    """The classes in order, and the number of the class of each prompt."""
    given = labels.tolist() if hasattr(labels, "tolist") else list(labels) if not isinstance(labels, str) else [labels]
    plain = [int(each) if isinstance(each, bool) else scalar(each) for each in given]
    if len(plain) != prompts:
        raise HooklineError(
            f"there must be one label for each prompt: got {how_many(len(plain), 'label')} "
            f"for {how_many(prompts, 'prompt')}"
        )
    if not all(map(is_label, plain)) or len({isinstance(each, str) for each in plain}) > 1:
        raise HooklineError(f"labels must be strings, or numbers, or booleans; got {plain[:6]!r}")
    classes = sorted(set(plain))
    if len(classes) < 2:
        raise HooklineError(
            f"a probe needs prompts of two classes or more, but all {prompts} prompts have the label {plain[:1]}"
        )
    if len(classes) > max(2, len(plain) // 2) or any(isinstance(each, float) and each % 1 for each in plain):
        raise HooklineError(
            f"there are {len(classes)} classes for {prompts} prompts: a probe predicts classes, of two prompts or more "
            f"each. For a quantity, pass labels of ranges, such as values > median"
        )
    places = {each: number for number, each in enumerate(classes)}
    return classes, torch.tensor([places[each] for each in plain])


def split_prompts(labels: Any, same: Sequence[int], groups: Sequence[Hashable] | None, test: float, seed: int) -> Split:
    """Hold out about a share `test` of the prompts of each class, whole groups at a time.

    Prompts with the same tokens (`same`) are in one group, in addition to `groups`.
    """
    if isinstance(test, bool) or not isinstance(test, int | float) or not 0 < test < 1:
        raise HooklineError(f"test must be the share of the prompts to hold out, between 0 and 1; got {test!r}")
    classes, label = class_numbers(labels, len(same))
    group = _joined(same, groups)
    members: dict[int, list[int]] = {}
    for number, each in enumerate(group):
        members.setdefault(each, []).append(number)
    total = torch.bincount(label, minlength=len(classes))
    wanted = (total * test).round().clamp_min(1)
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed)).tolist()
    is_test, held_out = torch.zeros(len(label), dtype=torch.bool), torch.zeros(len(classes))
    for some in [list(members.values())[at] for at in order]:
        counts = torch.bincount(label[some], minlength=len(classes))
        if bool((held_out + counts <= wanted)[counts > 0].all()):
            is_test[some] = True
            held_out += counts
    for number, name in enumerate(classes):
        here = is_test[label == number]
        if bool(here.all()) or not bool(here.any()):
            apart = len({group[each] for each in (label == number).nonzero().flatten().tolist()})
            raise HooklineError(
                f"the class {name!r} has {how_many(len(here), 'prompt')} in {how_many(apart, 'group')} "
                f"(prompts with the same tokens are one group), too few to train on some "
                f"and hold out others, test={test:g}: add different prompts"
            )
    return Split(classes, label, is_test)


def _joined(same: Sequence[int], groups: Sequence[Hashable] | None) -> list[int]:
    """A number for each prompt: equal if two prompts are the same, or in the same group, also through others."""
    if groups is None:
        return list(same)
    given = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(given) != len(same):
        raise HooklineError(
            f"groups must have one entry for each prompt: got {len(given)} for {how_many(len(same), 'prompt')}"
        )
    parent = list(range(len(same)))

    def root(at: int) -> int:
        while parent[at] != at:
            at = parent[at]
        return at

    first: dict[Any, int] = {}
    for number, (twin, name) in enumerate(zip(same, given, strict=True)):
        for other in (twin, first.setdefault(name, number)):
            low, high = sorted((root(number), root(other)))
            parent[high] = low
    return [root(number) for number in range(len(same))]


def shuffled(label: Int[Tensor, " prompt"], same: Sequence[int], count: int, seed: int) -> Int[Tensor, "count prompt"]:
    """The labels dealt to other prompts at random, `count` times; prompts with the same tokens share a label."""
    random = torch.Generator().manual_seed(seed + 1)
    units, unit = torch.tensor(list(same)).unique(return_inverse=True)
    own = label[units]
    found = [own[torch.randperm(len(units), generator=random)][unit] for _ in range(count)]
    return torch.stack(found) if found else label.new_zeros(0, len(label))

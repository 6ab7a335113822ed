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
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels) if not isinstance(labels, str) else [labels]
    plain = [int(value) if isinstance(value, bool) else scalar(value) for value in values]
    if len(plain) != prompts:
        raise HooklineError(
            f"there must be one label for each prompt: got {how_many(len(plain), 'label')} "
            f"for {how_many(prompts, 'prompt')}"
        )
    if not all(map(is_label, plain)) or len({isinstance(label, str) for label in plain}) > 1:
        raise HooklineError(f"labels must be strings, or numbers, or booleans; got {plain[:6]!r}")
    classes = sorted(set(plain))
    if len(classes) < 2:
        raise HooklineError(
            f"a probe needs prompts of two classes or more, but all {prompts} prompts have the label {plain[:1]}"
        )
    if len(classes) > max(2, len(plain) // 2) or any(isinstance(label, float) and label % 1 for label in plain):
        raise HooklineError(
            f"there are {len(classes)} classes for {prompts} prompts: a probe predicts classes, of two prompts or more "
            f"each. For a quantity, pass labels of ranges, such as values > median"
        )
    places = {label: number for number, label in enumerate(classes)}
    return classes, torch.tensor([places[label] for label in plain])


def split_prompts(labels: Any, same: Sequence[int], groups: Sequence[Hashable] | None, test: float, seed: int) -> Split:
    """Hold out about a share `test` of the prompts of each class, whole groups at a time.

    Prompts with the same tokens (`same`) are in one group, in addition to `groups`.
    """
    if isinstance(test, bool) or not isinstance(test, int | float) or not 0 < test < 1:
        raise HooklineError(f"test must be the share of the prompts to hold out, between 0 and 1; got {test!r}")
    classes, label = class_numbers(labels, len(same))
    group = _joined(same, groups)
    members: dict[int, list[int]] = {}
    for number, group_number in enumerate(group):
        members.setdefault(group_number, []).append(number)
    total = torch.bincount(label, minlength=len(classes))
    quota = (total * test).round().clamp_min(1)
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed)).tolist()
    is_test, held_out = torch.zeros(len(label), dtype=torch.bool), torch.zeros(len(classes))
    for prompts in [list(members.values())[at] for at in order]:
        counts = torch.bincount(label[prompts], minlength=len(classes))
        if bool((held_out + counts <= quota)[counts > 0].all()):
            is_test[prompts] = True
            held_out += counts
    for number, name in enumerate(classes):
        is_held_out = is_test[label == number]
        if bool(is_held_out.all()) or not bool(is_held_out.any()):
            apart = len({group[prompt] for prompt in (label == number).nonzero().flatten().tolist()})
            raise HooklineError(
                f"the class {name!r} has {how_many(len(is_held_out), 'prompt')} in {how_many(apart, 'group')} "
                f"(prompts with the same tokens are one group), too few to train on some "
                f"and hold out others, test={test:g}: add different prompts"
            )
    return Split(classes, label, is_test)


def _joined(same: Sequence[int], groups: Sequence[Hashable] | None) -> list[int]:
    """A number for each prompt: equal if two prompts are the same, or in the same group, also through others."""
    if groups is None:
        return list(same)
    group_names = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(group_names) != len(same):
        raise HooklineError(
            f"groups must have one entry for each prompt: got {len(group_names)} for {how_many(len(same), 'prompt')}"
        )
    parent = list(range(len(same)))

    def root(at: int) -> int:
        while parent[at] != at:
            at = parent[at]
        return at

    first: dict[Any, int] = {}
    for number, (twin, name) in enumerate(zip(same, group_names, strict=True)):
        for other in (twin, first.setdefault(name, number)):
            low, high = sorted((root(number), root(other)))
            parent[high] = low
    return [root(number) for number in range(len(same))]


def shuffled(label: Int[Tensor, " prompt"], same: Sequence[int], count: int, seed: int) -> Int[Tensor, "count prompt"]:
    """The labels dealt to other prompts at random, `count` times; prompts with the same tokens share a label."""
    random = torch.Generator().manual_seed(seed + 1)
    units, unit = torch.tensor(list(same)).unique(return_inverse=True)
    unit_labels = label[units]
    shuffles = [unit_labels[torch.randperm(len(units), generator=random)][unit] for _ in range(count)]
    return torch.stack(shuffles) if shuffles else label.new_zeros(0, len(label))

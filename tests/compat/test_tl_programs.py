"""Random programs of hooks, against what TransformerLens does with them.

Which hooks a point has, and in which order they fire, follows there from a list of hooks at each point, each with the
level of its context. The lists are kept here beside the model, and compared with what it does. The same programs, and
more, are run by TransformerLens itself in `peers/parity_transformerlens.py`.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from tiny_models import nudged

from hookline.compat.transformer_lens import HookedTransformer

TOKENS = torch.arange(3, 10).view(1, 7)
NAMES = (
    "hook_embed",
    "blocks.0.hook_resid_pre",
    "blocks.0.attn.hook_z",
    "blocks.1.mlp.hook_post",
    "blocks.2.ln2.hook_scale",
)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=nudged("gpt2"))


@dataclass
class Handle:
    """A hook that is at a point."""

    number: int
    level: int | None = None
    is_permanent: bool = False


class Program:
    """A model, and beside it the lists of hooks that its points must have."""

    def __init__(self, model: HookedTransformer, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.at: dict[str, list[Handle]] = {name: [] for name in NAMES}
        self.count = self.level = 0
        self.fired: list[tuple[int, str]] = []

    def hook(self):
        self.count += 1
        number = self.count

        def note(x, hook):
            self.fired.append((number, hook.name))

        return Handle(number, self.level), note

    def remove(self, names=NAMES, *, permanent: bool = False, level: int | None = None) -> None:
        def stays(handle: Handle) -> bool:
            return not permanent and (handle.is_permanent or (level is not None and handle.level != level))

        for name in names:
            self.at[name] = [handle for handle in self.at[name] if stays(handle)]

    def check(self) -> None:
        for name, handles in self.at.items():
            assert len(self.model.hook_dict[name].fwd_hooks) == len(handles), name
        self.fired.clear()
        self.model(TOKENS)
        self.check_fired()

    def check_fired(self) -> None:
        assert self.fired == [(handle.number, name) for name in NAMES for handle in self.at[name]]

    def pairs(self):
        """Hooks of a context that is about to open, at names or by filter."""
        for _ in range(self.random.randint(0, 2)):
            handle, note = self.hook()
            chosen = [self.random.choice(NAMES)] if self.random.random() < 0.6 else list(self.random.sample(NAMES, 2))
            for name in chosen:
                self.at[name].append(handle)
            yield chosen[0] if len(chosen) == 1 else chosen.__contains__, note

    def run_with_hooks(self) -> None:
        resets = self.random.random() < 0.6
        self.level += 1
        hooks = [*self.pairs()]
        self.fired.clear()
        self.model.run_with_hooks(TOKENS, fwd_hooks=hooks, reset_hooks_end=resets)
        self.check_fired()
        if resets:
            self.remove(level=self.level)
        self.level -= 1

    def run_with_cache(self) -> None:
        self.model.run_with_cache(TOKENS, names_filter=self.random.choice(NAMES))
        self.remove(level=self.level + 1)

    def context(self) -> None:
        if self.level == 3:
            return
        resets = self.random.random() < 0.6
        self.level += 1
        with self.model.hooks([*self.pairs()], reset_hooks_end=resets):
            for _ in range(self.random.randint(1, 4)):
                self.step()
        if resets:
            self.remove(level=self.level)
        self.level -= 1

    def add_hook(self) -> None:
        handle, note = self.hook()
        handle.level, handle.is_permanent = None, self.random.random() < 0.3
        name, prepend = self.random.choice(NAMES), self.random.random() < 0.4
        self.model.add_hook(name, note, is_permanent=handle.is_permanent, prepend=prepend)
        self.at[name].insert(0 if prepend else len(self.at[name]), handle)

    def reset(self) -> None:
        permanent = self.random.random() < 0.3
        self.model.reset_hooks(including_permanent=permanent)
        self.remove(permanent=permanent)

    def remove_of_point(self) -> None:
        name = self.random.choice(NAMES)
        self.model.hook_dict[name].remove_hooks("fwd")
        self.remove([name])

    def step(self) -> None:
        steps = (
            self.run_with_hooks,
            self.run_with_cache,
            self.context,
            self.add_hook,
            self.reset,
            self.remove_of_point,
        )
        self.random.choices(steps, (3, 1, 4, 3, 1, 1))[0]()
        self.check()


def run_programs(model: HookedTransformer, seeds: range) -> None:
    for seed in seeds:
        program = Program(model, seed)
        try:
            with torch.no_grad():
                for _ in range(6):
                    program.step()
        finally:
            model.reset_hooks(including_permanent=True)


@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # hooks that a program removes before a run
def test_random_programs(model) -> None:
    run_programs(model, range(12))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")
def test_many_random_programs(model) -> None:
    run_programs(model, range(12, 300))

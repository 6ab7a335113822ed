"""Random programs, compiled and uncompiled: edits, functions with state, and what others do to the model in between."""

import random
import warnings
from contextlib import ExitStack

import pytest
import torch
from backends import Counting, needs_graphs
from stateful import State, negate, stopping, tiny_llama
from torch.compiler import set_stance
from transformers.models.llama import modeling_llama

from hookline.edits import add, scale, zero
from hookline.errors import HooklineWarning
from hookline.positions import last, new_tokens

pytestmark = [
    needs_graphs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler's own imports
    pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning"),
]

POINTS = ["blocks.0.hook_mlp_out", "blocks.0.hook_resid_post", "blocks.0.attn.hook_z", "blocks.0.hook_resid_pre"]
MLP = modeling_llama.LlamaMLP


def tripled(self, x):
    return MLP.original(self, x) * 3


class Program:
    """A sequence of runs with hooks, foreign hooks, replaced methods and stances between them."""

    def __init__(self, model, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        torch.manual_seed(seed)
        self.state, self.stack, self.handles, self.results = State(), ExitStack(), [], []
        self.ids = torch.randint(0, 60, (2, 6))  # 0 is the pad token
        self.options = stopping(model, self.ids)

    def run(self):
        """The results of all runs, and what the functions kept."""
        with self.stack, torch.no_grad():
            for _ in range(5):
                self.happen()
                getattr(self, self.random.choice(["text", "cached", "streamed", "forward"]))()
        return [*self.results, *self.state.seen(), torch.rand(2)]

    def hooks(self):
        """Up to two hooks, half of them data."""
        vector, found = torch.randn(32), []
        for name in self.random.sample(POINTS, self.random.randrange(3)):
            functions = [*self.state.functions().items()] if "attn" not in name else []
            edits = [scale(-1.5), zero(pos=new_tokens), lambda x: x * 0.5, *[function for _, function in functions]]
            edits += [] if "attn" in name else [add(vector), add(vector, pos=last), lambda x: x + vector]
            found.append((name, self.random.choice(edits)))
        return found

    def happen(self) -> None:
        """Something that changes what the model computes, or nothing."""
        layer, norm = self.model.module.model.layers[0], self.model.module.model.norm
        what = self.random.randrange(10)
        if what == 0:
            self.handles.append(norm.register_forward_hook(negate))
        elif what == 1:
            self.handles.append(layer.mlp.register_forward_pre_hook(negate))
        elif what in (2, 3, 4) and self.handles:
            self.handles.pop().remove()
        elif what == 5:
            MLP.forward = tripled if MLP.forward is MLP.original else MLP.original
        elif what == 6:
            set_stance(self.random.choice(["force_eager", "default"]))
        elif what == 7:
            self.handles.append(_Undo(self.model.add_hook("blocks.0.hook_mlp_out", scale(2.0))))

    def text(self) -> None:
        """A generation, greedy or sampled, which may stop early."""
        options = self.options if self.random.random() < 0.5 else {"max_new_tokens": 12, "do_sample": False}
        options = {**options, "do_sample": self.random.random() < 0.5}
        with self.model.hooks(self.hooks()):
            self.results.append(self.model.generate(self.ids, **options))

    def cached(self) -> None:
        """A generation with its activations."""
        with self.model.hooks(self.hooks()):
            tokens, cache = self.model.generate_with_cache(self.ids, names_filter=POINTS[:2], **self.options)
        self.results += [tokens, *cache.values()]

    def streamed(self) -> None:
        """A stream, between whose tokens something happens."""
        with self.model.hooks(self.hooks()):
            for column in self.model.stream(self.ids, max_new_tokens=8, do_sample=False):
                self.results.append(column)
                if self.random.random() < 0.3:
                    self.happen()

    def forward(self) -> None:
        """A pass over the text."""
        with self.model.hooks(self.hooks()):
            logits, cache = self.model.run_with_cache(self.ids, names_filter=POINTS[1])
        self.results += [logits, *cache.values()]

    def close(self) -> None:
        """Undo what is left."""
        while self.handles:
            self.handles.pop().remove()
        MLP.forward = MLP.original
        set_stance("default")


class _Undo:
    def __init__(self, undo) -> None:
        self.remove = undo


def results(model, seed):
    program = Program(model, seed)
    try:
        return program.run()
    finally:
        program.close()


def compare(model, seeds) -> None:
    MLP.original = MLP.forward
    runs = model.compile(backend=Counting())
    vars(model)["_compiled_runs"] = None
    is_used = False
    try:
        for seed in seeds:
            expected = results(model, seed)
            vars(model)["_compiled_runs"] = runs
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HooklineWarning)  # this runs uncompiled
                found = results(model, seed)
            vars(model)["_compiled_runs"] = None
            assert len(found) == len(expected), seed
            for x, right in zip(found, expected, strict=True):
                torch.testing.assert_close(x, right, rtol=1e-4, atol=1e-5, msg=lambda text, n=seed: f"seed {n}: {text}")
            is_used |= runs.graphs > 0
    finally:
        runs.close()
        vars(model)["_compiled_runs"] = None
        del MLP.original
    assert is_used


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(autouse=True)
def without_graphs():
    torch._dynamo.reset()


def test_a_program(model) -> None:
    compare(model, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_hundreds_of_programs(part, model) -> None:
    compare(model, range(100 + 30 * part, 130 + 30 * part))

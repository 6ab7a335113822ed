"""A formula that is written once works in every way of running: at once, deferred, recorded, and compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from backends import Counting, needs_graphs
from tiny_models import causal_lm
from torch import Tensor

import hookline
from hookline.edits import add
from hookline.engine import FIRST, Formula, Kind, Site, chained, lens_of
from hookline.engine._recording.deferred import Deferred
from hookline.errors import HookError
from hookline.transformer import point_table
from hookline.transformer.point_table import PointRow

NAME = "blocks.1.hook_half_update"


@dataclass(frozen=True)
class HalfUpdate(Formula):
    """Half of what a layer adds to the stream: a lens that nobody has yet."""

    needs: tuple[Site] = field()

    @staticmethod
    def compute(x: Tensor, before: Tensor) -> Tensor:
        return (x - before) / 2

    @staticmethod
    def restore(x: Tensor, tensor: Tensor, before: Tensor) -> Tensor:
        return before + 2 * tensor


def site_of(block, config) -> Site:
    before = Site(block.module, Kind.INPUT, lens_of(block.module, Kind.INPUT))
    return Site(block.module, Kind.OUTPUT, chained(FIRST, HalfUpdate((before,))), stage=1)


@pytest.fixture
def model(monkeypatch):
    row = PointRow("hook_half_update", "b p d", site=site_of, after="hook_resid_post")
    monkeypatch.setitem(point_table.POINTS, row.name, row)
    return hookline.hook(causal_lm("llama"))


@pytest.fixture
def tokens(model):
    return model.example_tokens()


def by_hand(model, tokens, change=lambda x: x) -> tuple[Tensor, Tensor]:
    """What the point has, and the logits after a change of it, by a torch hook."""
    seen = []

    def hook(_module, args, output):
        seen.append((output - args[0]) / 2)
        return args[0] + 2 * change(seen[0])

    handle = model.module.model.layers[1].register_forward_hook(hook)
    try:
        return model.module(tokens).logits, seen[0]
    finally:
        handle.remove()


@torch.no_grad()
def test_a_new_formula_at_once(model, tokens) -> None:
    expected, half = by_hand(model, tokens, lambda x: x * 3)
    seen = []

    def triple(x):
        seen.append(x.clone())
        return x * 3

    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(NAME, triple)]), expected)
    assert torch.equal(seen[0], half)


@torch.no_grad()
def test_a_new_formula_deferred_and_recorded(model, tokens) -> None:
    half = by_hand(model, tokens)[1]
    _, full = model.run_with_cache(tokens)
    assert type(full._tensors.found[NAME]) is Deferred
    assert torch.equal(full[NAME], half)
    _, recorded = model.run_with_cache(tokens, names_filter=NAME)
    assert torch.equal(recorded[NAME], half)
    with model.hooks([("blocks.0.hook_resid_post", lambda x: x * 0.5)]):
        _, under_a_hook = model.run_with_cache(tokens)
        _, named = model.run_with_cache(tokens, names_filter=NAME)
    assert torch.equal(under_a_hook[NAME], named[NAME])
    assert not torch.equal(named[NAME], half)


def test_a_new_formula_has_gradients(model, tokens) -> None:
    _, cache = model.run_with_cache(
        tokens, names_filter=[NAME, "blocks.1.hook_resid_post"], incl_bwd=True, return_type="loss"
    )
    # The stream after the layer is the stream before it plus twice the point.
    torch.testing.assert_close(cache[f"{NAME}_grad"], 2 * cache["blocks.1.hook_resid_post_grad"])


@needs_graphs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports
@torch.no_grad()
def test_a_new_formula_compiled(model, tokens) -> None:
    torch._dynamo.reset()
    edits = [(NAME, add(torch.ones(model.cfg.d_model), 0.5))]
    expected, cache = model.run_with_cache(tokens, names_filter=NAME, fwd_hooks=edits)
    with model.compiled(backend=Counting()) as runs:
        logits, read = model.run_with_cache(tokens, names_filter=NAME, fwd_hooks=edits)
        assert not runs.reasons
        assert runs.graphs == 1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(read[NAME], cache[NAME], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@torch.no_grad()
def test_what_a_formula_needs_has_to_have_run(model, tokens) -> None:
    block = model.module.model.layers[0].mlp

    @dataclass(frozen=True)
    class Needs(Formula):
        needs: tuple[Site] = field()

        @staticmethod
        def compute(x: Tensor, later: Tensor) -> Tensor:
            return x + later

        restore = compute

    later = Site(model.module.model.layers[1], Kind.OUTPUT)
    site = Site(block, Kind.OUTPUT, chained(FIRST, Needs((later,))))
    point = hookline.HookPoint.at_site("early", site, model.index.permanent)
    with pytest.raises(HookError, match=r"'early'.*LlamaDecoderLayer"):
        model.run_with_hooks(tokens, fwd_hooks=[(point, lambda x: x * 2)])

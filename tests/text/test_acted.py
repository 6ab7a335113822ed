"""`run.acted`: at how many rows an edit acted, by position of the text."""

from collections import Counter

import pytest
import torch
from backends import Counting, needs_graphs
from tiny_models import causal_lm
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline import at, last, token
from hookline.edits import add, replace, scale, zero
from hookline.errors import NeverFiredWarning
from hookline.hooks import FunctionController, LayerActivationDetector
from hookline.positions import new_tokens, step

RESID, Z, KEYS = "blocks.1.hook_resid_post", "blocks.0.attn.hook_z", "blocks.1.attn.hook_rot_k"
IDS = torch.tensor([[0, 0, 5, 4, 7], [3, 4, 5, 6, 9]])
MASK = IDS.ne(0).long()
GREEDY = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=None)
    return hookline.hook(LlamaForCausalLM(config).eval())


def generated(model, edit, point=RESID, **options):
    """What `acted` says of a generation of the padded prompts."""
    with model.hooks([(point, edit)]) as run:
        model.generate(IDS, attention_mask=MASK, **{**GREEDY, **options})
    return run.acted[point]


# The first row has three tokens, the second five; of four new tokens three are run.
EVERYWHERE = Counter({0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1})
BY_HAND = [
    (scale(2.0), EVERYWHERE),
    (lambda x: x * 2, EVERYWHERE),
    (scale(2.0, pos=new_tokens), Counter({3: 1, 4: 1, 5: 2, 6: 1, 7: 1})),
    (at(new_tokens, lambda x, hook: x + 1), Counter({3: 1, 4: 1, 5: 2, 6: 1, 7: 1})),
    (scale(2.0, pos=last), Counter({2: 1, 3: 1, 4: 2, 5: 2, 6: 1, 7: 1})),
    (zero(pos=step(0)), Counter({0: 2, 1: 2, 2: 2, 3: 1, 4: 1})),
    (zero(pos=[1, 6]), Counter({1: 2, 6: 1})),
    (zero(pos=torch.tensor([2, 4])), Counter({2: 1, 4: 1})),
    (zero(mask=torch.tensor([[[True]], [[False]]])), Counter({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})),
    (zero(mask=torch.tensor([[[False]], [[False]]])), Counter()),
    (zero(mask=torch.arange(32) > 30, pos=1), Counter({1: 2})),
]
"""Edits of a generation, with the counts that follow from the lengths of the prompts."""


@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # masks without True, a missing position
@pytest.mark.parametrize("number", range(len(BY_HAND)))
def test_a_generation_after_padding_on_the_left(model, number) -> None:
    edit, expected = BY_HAND[number]
    assert generated(model, edit) == expected


@needs_graphs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports
@pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")
def test_a_compiled_generation_counts_the_same(model) -> None:
    torch._dynamo.reset()
    with model.compiled(backend=Counting()) as runs:
        for edit, expected in BY_HAND * 2:  # first the proof, then the graph alone
            assert generated(model, edit) == expected, edit
        for streamed in (1, 3):
            with model.hooks([(RESID, scale(2.0))]) as run:
                stream = model.stream(IDS[1:], max_new_tokens=5)
                for _ in range(1 + streamed):
                    next(stream)
                in_between = run.acted
            assert in_between == {RESID: Counter(range(5 + streamed))}
            stream.close()
            assert run.acted == in_between
        for ids in (IDS[1:], IDS[1:, :4]) * 2:
            with model.hooks([(RESID, add(torch.ones(32), pos=[0, -1]))]) as run, torch.no_grad():
                model(ids)
            assert run.acted == {RESID: {0: 1, ids.shape[1] - 1: 1}}
        assert runs.graphs
        assert not any("edit" not in reason for reason in runs.reasons), runs.reasons
    torch._dynamo.reset()


def test_rows_that_have_ended_are_padding() -> None:
    torch.manual_seed(0)
    model = hookline.hook(causal_lm("llama"))
    tokens = model.generate(IDS, attention_mask=MASK, **GREEDY)
    ends = int(tokens[1, 6])  # the second new token of the second row
    assert ends not in tokens[0, 5:].tolist(), "the first row goes on"
    with model.hooks([(RESID, scale(1.0))]) as run:
        model.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=4, eos_token_id=ends, pad_token_id=0)
    assert run.acted[RESID] == {0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 1}


def test_passes_add_up_with_padding_on_both_sides(model) -> None:
    right = torch.tensor([[5, 4, 7, 0, 0], [3, 4, 5, 6, 9]])
    with model.hooks([(RESID, scale(2.0, pos=[0, -1])), (Z, lambda z: None)]) as run:
        model(IDS, attention_mask=MASK)
        model(right, attention_mask=right.ne(0).long())
        once = run.acted
        model.module(IDS)  # without a mask nothing is padding
    assert once == {RESID: {0: 4, 2: 2, 4: 2}, Z: {0: 4, 1: 4, 2: 4, 3: 2, 4: 2}}
    assert run.acted[RESID] == {0: 6, 2: 2, 4: 4}
    with run:
        model(IDS[:1], attention_mask=MASK[:1])
    assert run.acted[RESID] == {0: 1, 2: 1}, "used again, a context begins anew"
    assert run.acted[RESID][7] == 0


def test_several_edits_names_and_kinds_of_points(model) -> None:
    pattern = "blocks.1.attn.hook_pattern"
    hooks = [("resid_post1", scale(2.0, pos=0)), ("resid_post1", scale(2.0)), (pattern, zero(head=1, pos=2))]
    with model.hooks([*hooks, ("unembed.hook_out", at(-1, replace(0.0)))], [(Z, lambda gradient: None)]) as run:
        model(IDS[1:])
    assert list(run.acted) == [hooks[0][0], pattern, "unembed.hook_out"]
    assert run.acted["resid_post1"] == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    assert run.acted[pattern] == {2: 1}
    assert run.acted["unembed.hook_out"] == {4: 1}
    with model.hooks([(KEYS, lambda k: k * 2)]) as run:
        model.generate(IDS[1:], **GREEDY)
    assert run.acted[KEYS] == {**dict.fromkeys(range(5), 4), 5: 3, 6: 2, 7: 1}, "each pass has all keys so far"


def test_only_what_took_effect_counts(model) -> None:
    def fails(x):
        raise ValueError

    with (
        pytest.warns(match="ValueError"),
        model.hooks([(RESID, fails), (Z, lambda z: z * 2)], on_error="skip") as run,
    ):
        model(IDS[1:])
    assert run.acted == {RESID: {}, Z: Counter(range(5))}
    with pytest.warns(NeverFiredWarning), model.hooks([(RESID, scale(2.0, pos=token(33)))]) as run:
        model(IDS[1:])
    assert run.acted == {RESID: {}}


def test_networks_without_a_text() -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with net.hooks([("0", zero(neuron=1)), ("1", zero(mask=torch.tensor([[True], [False], [False]])))]) as run:
        net(torch.randn(3, 4))
        net(torch.randn(3, 4))
    assert run.acted == {"0": {None: 6}, "1": {None: 2}}


def test_a_region_that_recomputes_counts_once(model) -> None:
    llama = causal_lm("llama").train()
    llama.gradient_checkpointing_enable()
    model = hookline.hook(llama)
    with model.hooks([(RESID, lambda x: x * 2)]) as run:
        model(IDS[1:], return_type="loss").backward()
    assert run.acted == {RESID: Counter(range(5))}


def test_hook_objects_count_too(model) -> None:
    layer = "model.layers.0"
    hooks = [(layer, FunctionController(layer, lambda x: 2 * x)), (Z, FunctionController(Z, at(last, lambda z: 2 * z)))]
    detector = LayerActivationDetector(RESID)
    with model.hooks([*hooks, (RESID, detector)]) as run:
        model(IDS, attention_mask=MASK)
    assert run.acted == {layer: {0: 2, 1: 2, 2: 2, 3: 1, 4: 1}, Z: {2: 1, 4: 1}}, "a detector edits nothing"


def test_hooks_that_stay_are_counted_until_the_context_is_left(model) -> None:
    try:
        with model.hooks([(RESID, scale(2.0, pos=1))], reset_hooks_end=False) as run:
            model(IDS[1:])
        model(IDS[1:])
        assert run.acted == {RESID: {1: 1}}
    finally:
        model.reset_hooks(including_permanent=True)


def test_thousands_of_passes_are_counted_on_the_way(model, monkeypatch) -> None:
    monkeypatch.setattr("hookline.text.acted._MOST", 3)
    with model.hooks([(RESID, scale(2.0, pos=1))]) as run:
        for _ in range(10):
            model(IDS[1:])
            assert all(len(action.tally.log) <= 3 for action in run._hook_actions)
    assert run.acted == {RESID: {1: 10}}

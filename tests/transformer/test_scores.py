"""Edited attention scores: masked entries stay masked, and real tokens of a padded batch stay finite."""

import pytest
import tiny_models
import torch

import hookline
from hookline.engine._memory import results

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11]])
PAD = 3
MASK = torch.ones_like(IDS).index_put_((torch.tensor(0), torch.arange(PAD)), torch.tensor(0))
PLACES = (MASK.cumsum(1) - 1).clamp(min=0)


def in_place(scores: torch.Tensor) -> None:
    scores.mul_(-0.5)


EDITS = {
    "scaled": lambda scores: scores * 1.3,
    "negated": torch.neg,
    "multiplied": lambda scores: scores * 1e5,
    "in place": in_place,
}


def scores_of(kind: str, attention: str) -> tuple[hookline.HookedModel, list[str]]:
    module = tiny_models.causal_lm(kind)
    if attention:
        module.set_attn_implementation(attention)
    model = hookline.hook(module)
    return model, [name for name in model.hook_dict if name.endswith("hook_attn_scores")]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    ("kind", "attention"), [("gpt2", "eager"), ("gpt2", "sdpa"), ("gpt_neo", ""), ("llama", "eager")]
)
def test_edited_scores_in_a_padded_batch_are_those_of_the_text_alone(kind, attention, edit) -> None:
    model, names = scores_of(kind, attention)
    hooks = [(name, EDITS[edit]) for name in names]
    with torch.no_grad():
        padded = model.run_with_hooks(IDS, attention_mask=MASK, position_ids=PLACES, fwd_hooks=hooks)
        alone = model.run_with_hooks(IDS[:1, PAD:], fwd_hooks=hooks)
    torch.testing.assert_close(padded[0, PAD:], alone[0], atol=1e-4, rtol=1e-4)
    assert padded.isfinite().all()


@pytest.mark.parametrize("kind", ["gptj", "mpt", "codegen"])
def test_scores_in_a_wider_dtype_than_the_model(kind) -> None:
    """The mask is the lowest number of the model's dtype, which is not a low one among those of the scores."""
    module = tiny_models.causal_lm(kind).half()
    model = hookline.hook(module)
    names = [name for name in model.hook_dict if name.endswith("hook_attn_scores")]
    later = IDS.clone()
    later[:, -1] += 1
    with torch.no_grad():
        assert model.run_with_cache(IDS, names_filter=names)[1][names[0]].dtype == torch.float32
        for edit in EDITS.values():
            one, other = (model.run_with_hooks(ids, fwd_hooks=[(names, edit)])[:, :-1] for ids in (IDS, later))
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


def test_a_masked_entry_gets_an_ordinary_number_where_a_hook_says_so() -> None:
    model, (name, *_) = scores_of("gpt2", "eager")
    pattern = name.replace("attn_scores", "pattern")
    _, cache = model.run_with_cache(IDS, names_filter=[name, pattern], fwd_hooks=[(name, torch.zeros_like)])
    assert cache[name].eq(0).all()
    torch.testing.assert_close(cache[pattern], torch.full_like(cache[pattern], 1 / IDS.shape[1]))


def test_nothing_is_unmasked_where_all_others_are_masked_by_a_hook() -> None:
    model, (name, *_) = scores_of("gpt2", "eager")
    _, cache = model.run_with_cache(IDS, names_filter=[name], fwd_hooks=[(name, lambda x: x.fill_(-torch.inf))])
    assert cache[name].eq(-torch.inf).all()


def test_verify_tries_a_scaled_score_in_a_padded_batch(monkeypatch) -> None:
    model, names = scores_of("gpt_neo", "")
    assert not model.verify().failed()
    monkeypatch.setattr(results, "_masked_alike", lambda scores, *_: scores)
    assert [verdict.name for verdict in model.verify().failed()] == names[:-1]  # in the last layer only padding is NaN

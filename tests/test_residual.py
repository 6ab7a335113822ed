"""The parts of the stream sum to it, and what they add to a logit sums to that, on models as they are."""

import pytest
import tiny_models
import torch

import hookline
from hookline import HooklineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
KINDS = [
    *(
        "gpt2",
        "llama",
        "gptj",
        "gpt_neox",
        "bloom",
        "mpt",
        "falcon",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "gemma3_text",
    ),
    *("mistral", "mixtral", "olmo2", "stablelm", "starcoder2", "codegen", "granite", "olmo", "deepseek_v3"),
    *("gpt_bigcode", "persimmon", "exaone4", "smollm3", "qwen3_moe", "gpt_oss", "glm4", "nemotron", "cohere", "biogpt"),
    *("gemma3_text", "olmoe", "helium"),
]


def cached(kind):
    module = tiny_models.nudged(kind)
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    with torch.no_grad():
        return model, *model.run_with_cache(**inputs)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_parts_sum_to_the_stream_and_to_the_logit(kind) -> None:
    _, logits, cache = cached(kind)
    parts, labels = cache.decompose_resid(return_labels=True)
    assert torch.allclose(parts.sum(0), cache["resid_post", -1], atol=1e-4)
    assert labels[0] == "embed"
    assert len(labels) == len(parts)
    middle = cache.decompose_resid(2)
    assert torch.allclose(middle.sum(0), cache["resid_pre", 2], atol=1e-4)
    tokens, rows = torch.tensor([5, 9]), torch.arange(2)
    attributed = cache.logit_attrs(parts[:, :, -1], tokens, pos_slice=-1).sum(0) + cache.logit_bias(tokens)
    assert torch.allclose(attributed, logits[rows, -1, tokens], atol=1e-3, rtol=1e-3)
    lead = cache.logit_attrs(parts, tokens, tokens + 1).sum(0) + cache.logit_bias(tokens, tokens + 1)[:, None]
    assert torch.allclose(lead, logits[rows, :, tokens] - logits[rows, :, tokens + 1], atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_heads_sum_to_what_attention_adds() -> None:
    model, _, cache = cached("gpt2")
    heads, labels = cache.stack_head_results(return_labels=True)
    assert labels[:2] == ["L0H0", "L0H1"]
    by_layer = heads.unflatten(0, (4, 4)).sum(1) + model.b_O[:, None, None]
    assert torch.allclose(by_layer, cache.stack_activation("attn_out"), atol=1e-5)
    everything = cache.stack_head_results(incl_remainder=True)
    assert torch.allclose(everything.sum(0), cache["resid_post", 3], atol=1e-5)


@torch.no_grad()
def test_the_stream_layer_by_layer_and_its_lens() -> None:
    _, logits, cache = cached("llama")
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == [f"{layer}_{side}" for layer in range(4) for side in ("pre", "mid")] + ["final_post"]
    assert torch.equal(stack[3], cache["resid_mid", 1])
    assert torch.allclose(cache.logit_lens()[-1], logits, atol=1e-6)
    normed = cache.accumulated_resid(apply_ln=True)
    assert torch.allclose(normed[-1], cache["ln_final.hook_normalized"], atol=1e-5)
    first = cache.decompose_resid(1, apply_ln=True).sum(0)
    assert torch.allclose(first, cache["normalized", 1, "ln1"], atol=1e-5)


def test_what_does_not_add_up_is_refused() -> None:
    _, _, cache = cached("gemma2")
    with pytest.raises(HooklineError, match="not linear in the stream"):
        cache.logit_attrs(cache.decompose_resid(), 5)
    _, _, cache = cached("minicpm3")
    with pytest.raises(HooklineError, match="between the final norm and the unembedding"):
        cache.logit_attrs(cache.decompose_resid(), 5)
    bert = hookline.hook(tiny_models.encoder("bert"))
    _, cache = bert.run_with_cache(torch.tensor([[3, 4, 5]]))
    with pytest.raises(HooklineError, match="norms the stream after each addition"):
        cache.decompose_resid()
    _, _, cache = cached("gpt2")
    with pytest.raises(HooklineError, match="layer 9, but the model has 4"):
        cache.accumulated_resid(9)


@torch.no_grad()
def test_which_head_says_mary() -> None:
    model = hookline.load("tinyworld")
    _, cache = model.run_with_cache("When Mary and John went to the store, John gave a drink to")
    heads, labels = cache.stack_head_results(pos_slice=-1, return_labels=True)
    lead = cache.logit_attrs(heads, " Mary", " John", pos_slice=-1)[:, 0]
    assert labels[lead.argmax()] == "L3H4"
    alone = cache.remove_batch_dim()
    heads = alone.stack_head_results(pos_slice=-1)
    assert torch.allclose(alone.logit_attrs(heads, " Mary", " John", pos_slice=-1), lead, atol=1e-5)

"""The parts of the stream sum to it, and what they add to a logit sums to that, on models as they are."""

import ast

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
NO_NEURONS = ["mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss", "olmoe", "phi3", "glm4"]


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
    assert labels == model.all_head_labels()
    by_layer = heads.unflatten(0, (4, 4)).sum(1) + model.b_O[:, None, None]
    assert torch.allclose(by_layer, cache.stack_activation("attn_out"), atol=1e-5)
    everything, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    assert labels[-1] == "remainder"
    assert torch.allclose(everything.sum(0), cache["resid_post", 3], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_head_and_neuron_sums_to_the_stream(kind) -> None:
    model, logits, cache = cached(kind)
    end = cache["resid_post", -1]
    coarse, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    assert torch.allclose(coarse.sum(0), end, atol=1e-4)
    assert labels[: model.cfg.n_heads] == [f"L0H{head}" for head in range(model.cfg.n_heads)]
    assert labels[-1] == "bias"
    attributed = cache.logit_attrs(coarse, 5).sum(0) + cache.logit_bias(5)
    assert torch.allclose(attributed, logits[..., 5], atol=1e-3, rtol=1e-3)
    if any(f"blocks.{layer}.mlp.hook_post" not in model.hook_dict for layer in range(4)):
        assert kind in NO_NEURONS
        with pytest.raises(HooklineError, match="expand_neurons=False"):
            cache.get_full_resid_decomposition()
        return
    fine, labels = cache.get_full_resid_decomposition(pos_slice=-1, return_labels=True)
    assert torch.allclose(fine.sum(0), end[:, -1], atol=1e-4)
    assert "L3N7" in labels
    neuron = cache.get_neuron_results(3, 7)[..., 0, :]
    assert torch.allclose(fine[labels.index("L3N7")], neuron[:, -1], atol=1e-6)
    into = cache.get_full_resid_decomposition(1, mlp_input=True).sum(0)
    assert torch.allclose(into, cache._stream(1, mlp_input=True), atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "llama"])
@torch.no_grad()
def test_float64_models_whose_norms_round_to_float32(kind) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind).double())
    ids = torch.arange(3, 9)[None]
    _, cache = model.run_with_cache(ids)
    assert torch.allclose(cache.get_full_resid_decomposition().sum(0), cache["resid_post", -1], atol=1e-5)
    _, edited = model.run_with_cache(ids, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x: x * 1.001)])
    with pytest.raises(HooklineError, match="edited"):
        edited.get_full_resid_decomposition()


@torch.no_grad()
def test_neurons_by_layer_and_some_of_them() -> None:
    model, _, cache = cached("granite")  # has a factor between MLP and stream
    neurons = cache.get_neuron_results(1)
    assert torch.allclose(neurons.sum(-2), cache["mlp_out", 1], atol=1e-5)
    some, labels = cache.stack_neuron_results(2, neuron_slice=[3, -1], return_labels=True, incl_remainder=True)
    assert labels == ["L0N3", f"L0N{model.cfg.d_mlp - 1}", "L1N3", f"L1N{model.cfg.d_mlp - 1}", "remainder"]
    assert torch.allclose(some[2], neurons[..., 3, :], atol=1e-6)
    assert torch.allclose(some.sum(0), cache["resid_pre", 2], atol=1e-5)
    normed = cache.stack_neuron_results(2, incl_remainder=True, apply_ln=True).sum(0)
    assert torch.allclose(normed, cache["normalized", 2, "ln1"], atol=1e-4)
    with pytest.raises(HooklineError, match="neuron 999"):
        cache.get_neuron_results(1, [999])


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma2", "olmo2", "exaone4"])
@torch.no_grad()
def test_norms_after_attention_and_mlp_are_gone_through(kind) -> None:
    _, _, cache = cached(kind)
    heads = cache.stack_head_results(1)
    assert torch.allclose(heads.sum(0), cache["attn_out", 0], atol=1e-4)  # these have no biases
    assert torch.allclose(cache.get_neuron_results(0).sum(-2), cache["mlp_out", 0], atol=1e-4)


@torch.no_grad()
def test_the_stream_layer_by_layer_and_its_lens() -> None:
    model, logits, cache = cached("llama")
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == [f"{layer}_{side}" for layer in range(4) for side in ("pre", "mid")] + ["final_post"]
    assert torch.equal(stack[3], cache["resid_mid", 1])
    assert torch.allclose(cache.logit_lens()[-1], logits, atol=1e-6)
    normed = cache.accumulated_resid(apply_ln=True)
    assert torch.allclose(normed @ model.W_U + model.b_U, cache.logit_lens(), atol=1e-5)
    first = cache.decompose_resid(1, apply_ln=True).sum(0)
    assert torch.allclose(first, cache["normalized", 1, "ln1"], atol=1e-5)
    before_mlp, labels = cache.decompose_resid(1, mlp_input=True, apply_ln=True, return_labels=True)
    assert labels == ["embed", "0_attn_out", "0_mlp_out", "1_attn_out"]
    assert torch.allclose(before_mlp.sum(0), cache["normalized", 1, "ln2"], atol=1e-5)
    stack, labels = cache.accumulated_resid(1, mlp_input=True, apply_ln=True, return_labels=True)
    assert labels == ["0_pre", "1_pre", "1_mid"]
    assert torch.allclose(stack[-1], cache["normalized", 1, "ln2"], atol=1e-5)
    with pytest.raises(HooklineError, match="mlp_input"):
        cache.decompose_resid(mlp_input=True)
    with pytest.raises(HooklineError, match="recompute_ln"):
        cache.apply_ln_to_stack(stack, 1, recompute_ln=True)


@pytest.mark.parametrize("kind", ["gptj", "phi", "cohere"])
@torch.no_grad()
def test_side_by_side_the_mlp_reads_what_the_attention_reads(kind) -> None:
    _, _, cache = cached(kind)
    assert torch.equal(cache.decompose_resid(2, mlp_input=True), cache.decompose_resid(2))
    normed = cache.decompose_resid(2, mlp_input=True, apply_ln=True).sum(0)
    assert torch.allclose(normed, cache["normalized", 2, "ln1"], atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere", "minicpm3", "recurrent_gemma"])
@torch.no_grad()
def test_the_lens_reads_out_as_the_model_does(kind) -> None:
    _, logits, cache = cached(kind)
    assert torch.allclose(cache.logit_lens()[-1], logits, atol=1e-4)


@pytest.mark.parametrize("kind", ["t5", "pegasus"])
@torch.no_grad()
def test_decoders_with_an_encoder(kind) -> None:
    module = tiny_models.seq2seq(kind)
    logits, cache = hookline.hook(module).run_with_cache(**tiny_models.inputs(module))
    parts, labels = cache.get_full_resid_decomposition(return_labels=True)
    assert "1_cross_attn_out" in labels
    assert torch.allclose(parts.sum(0), cache[f"decoder.{cache.n_layers - 1}.hook_resid_post"], atol=1e-4)
    if kind == "t5":
        shares = cache.logit_attrs(parts, 5).sum(0) + cache.logit_bias(5)
        assert torch.allclose(shares, logits[..., 5], atol=1e-4)


@torch.no_grad()
def test_a_model_without_a_final_norm() -> None:
    module = tiny_models.nudged("gpt2")
    module.transformer.ln_f = torch.nn.Identity()
    logits, cache = hookline.hook(module).run_with_cache(**tiny_models.inputs(module))
    parts = cache.decompose_resid(apply_ln=True)
    assert torch.allclose(parts.sum(0), cache["resid_post", -1], atol=1e-4)
    assert torch.allclose(cache.logit_attrs(parts, 5).sum(0), logits[..., 5], atol=1e-3)
    assert torch.allclose(cache.logit_lens()[-1], logits, atol=1e-4)


@torch.no_grad()
def test_tokens_of_a_logit() -> None:
    _, logits, cache = cached("gpt2")
    parts, bias = cache.decompose_resid(), cache.logit_bias
    rows, each = torch.tensor([5, 9]), torch.arange(14).view(2, 7)
    at_each = cache.logit_attrs(parts, each).sum(0) + bias(each)
    assert torch.allclose(at_each, logits.gather(-1, each[..., None])[..., 0], atol=1e-4)
    by_row = cache.logit_attrs(parts, rows, 3).sum(0) + bias(rows, 3)[:, None]
    assert torch.allclose(by_row, torch.stack([logits[0, :, 5], logits[1, :, 9]]) - logits[..., 3], atol=1e-4)
    one = cache.logit_attrs(parts[:, 1], 4, batch_slice=1).sum(0) + bias(4)
    assert torch.allclose(one, logits[1, :, 4], atol=1e-4)
    whole = cache.logit_attrs(cache["resid_post", -1], 4) + bias(4)  # the stream itself, not its parts
    assert torch.allclose(whole, logits[..., 4], atol=1e-4)


def test_stacks_and_tokens_of_a_wrong_shape() -> None:
    _, _, cache = cached("gpt2")
    parts = cache.decompose_resid()
    with pytest.raises(HooklineError, match=r"\[10, 2, 32\].*\[2, 7\]"):
        cache.logit_attrs(parts[:, :, -1], 5)
    with pytest.raises(HooklineError, match=r"\[3\].*\[2, 7\]"):
        cache.logit_attrs(parts, torch.tensor([1, 2, 3]))
    with pytest.raises(HooklineError, match="64"):
        cache.logit_attrs(parts, 64)
    with pytest.raises(HooklineError, match="tokenizer"):
        cache.logit_attrs(parts, " Mary")
    with pytest.raises(HooklineError, match="2 rows"):
        cache.logit_attrs(parts[:, 0], 5, has_batch_dim=False)
    with pytest.raises(HooklineError, match="row 2"):
        cache.logit_attrs(parts[:, 0], 5, batch_slice=2)


@torch.no_grad()
def test_rows_and_positions_of_a_cache_keep_working() -> None:
    _, logits, cache = cached("gpt2")
    row = cache.rows(1)
    assert not row.has_batch_dim
    parts = row.decompose_resid()
    assert torch.allclose(row.logit_attrs(parts, 5).sum(0) + row.logit_bias(5), logits[1, :, 5], atol=1e-4)
    assert torch.equal(row.decompose_resid(pos_slice=-1), parts[:, -1])
    flipped = cache.apply_slice_to_batch_dim([1, 0])
    assert torch.equal(flipped["q", 2], cache["q", 2].flip(0))
    last = cache.at(-1)
    assert last["resid_post", 3].shape == (2, 32)
    assert last["pattern", 3].shape == (2, 4, 7)
    parts = last.get_full_resid_decomposition()
    assert torch.allclose(last.logit_attrs(parts, 5).sum(0) + last.logit_bias(5), logits[:, -1, 5], atol=1e-4)
    assert torch.allclose(last.logit_lens()[-1], logits[:, -1], atol=1e-5)
    both = cache.rows(slice(0, 1)).at([2, 4])
    assert torch.allclose(both.logit_lens()[-1], logits[:1, [2, 4]], atol=1e-5)
    with pytest.raises(HooklineError, match="positions -1"):
        last.decompose_resid(pos_slice=-1)
    with pytest.raises(HooklineError, match="positions -1"):
        last.at(0)


@torch.no_grad()
def test_a_cache_of_some_positions_is_what_a_run_would_have_kept() -> None:
    model, _, cache = cached("llama")
    inputs = tiny_models.inputs(model.module)
    _, kept = model.run_with_cache(**inputs, pos_slice=slice(1, 4))
    picked = cache.at(slice(1, 4))
    assert list(picked) == list(kept)
    assert all(torch.equal(picked[name], kept[name]) for name in kept)
    assert torch.equal(picked.logits, kept.logits)


@torch.no_grad()
def test_weights_that_changed_since_are_noticed() -> None:
    model, _, cache = cached("gpt2")
    inputs = tiny_models.inputs(model.module)
    with model.processed_weights():
        with pytest.raises(HooklineError, match="restored"):
            cache.logit_attrs(cache.decompose_resid(), 5)
        logits, new = model.run_with_cache(**inputs)
        parts = new.get_full_resid_decomposition()
        assert torch.allclose(new.logit_attrs(parts, 5).sum(0) + new.logit_bias(5), logits[..., 5], atol=1e-4)
    with pytest.raises(HooklineError, match="restored"):
        new.get_neuron_results(0)
    cache.get_neuron_results(0)


def test_what_does_not_add_up_is_refused() -> None:
    _, _, cache = cached("gemma2")
    with pytest.raises(HooklineError, match="not linear"):
        cache.logit_attrs(cache.decompose_resid(), 5)
    _, _, cache = cached("modernbert-decoder")
    with pytest.raises(HooklineError, match="final norm"):
        cache.logit_attrs(cache["resid_post", -1], 5)
    _, _, cache = cached("falcon_h1")
    with pytest.raises(HooklineError, match="sum"):
        cache.decompose_resid()
    bert = hookline.hook(tiny_models.encoder("bert"))
    _, cache = bert.run_with_cache(torch.tensor([[3, 4, 5]]))
    with pytest.raises(HooklineError, match="normalizes"):
        cache.decompose_resid()
    model, _, cache = cached("gpt2")
    with pytest.raises(HooklineError, match="layer 9"):
        cache.accumulated_resid(9)
    edit = [("blocks.1.hook_resid_mid", torch.zeros_like)]
    _, edited = model.run_with_cache(torch.tensor([[3, 4, 5]]), fwd_hooks=edit)
    with pytest.raises(HooklineError, match="edited"):
        edited.decompose_resid()


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


def test_a_cache_of_resid_post_has_the_next_resid_pre() -> None:
    module = tiny_models.nudged("llama")
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    names = ["blocks.0.hook_resid_pre", "blocks.*.hook_resid_post", "unembed.*"]
    with torch.no_grad():
        whole, cache = model.run_with_cache(**inputs)[1], model.run_with_cache(**inputs, names_filter=names)[1]
    assert torch.equal(cache["resid_pre", 2], whole["resid_pre", 2])
    assert torch.equal(cache["model.layers.2.input"], whole["resid_pre", 2])
    assert torch.equal(cache.accumulated_resid(apply_ln=True), whole.accumulated_resid(apply_ln=True))
    assert torch.equal(cache.logit_lens(2), whole.logit_lens(2))
    assert torch.equal(cache.at(-1)["resid_pre", 1], whole["resid_pre", 1][:, -1])
    assert ("resid_pre", 1) not in model.run_with_cache(**inputs, names_filter="blocks.2.hook_resid_post")[1]


@pytest.mark.parametrize("way", ["run", "context", "torch"])
def test_not_if_a_hook_changed_what_the_next_layer_gets(way) -> None:
    module = tiny_models.nudged("llama")
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    options = {"names_filter": ["blocks.*.hook_resid_post", "blocks.0.hook_resid_pre"]}
    hooks = [("blocks.2.hook_resid_pre", lambda x: x * 2)]
    if way == "run":
        _, cache = model.run_with_cache(**inputs, **options, fwd_hooks=hooks)
    elif way == "context":
        with model.hooks(fwd_hooks=hooks):
            _, cache = model.run_with_cache(**inputs, **options)
    else:
        handle = module.model.layers[2].register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:]))
        _, cache = model.run_with_cache(**inputs, **options)
        handle.remove()
    assert ("resid_pre", 2) not in cache
    with pytest.raises(hookline.errors.UnavailablePointError, match=r"blocks\.\*\.hook_resid_pre"):
        cache.accumulated_resid()


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (lambda cache: cache.accumulated_resid(), []),
        (lambda cache: cache.accumulated_resid(2, apply_ln=True), ["blocks.2.ln1.hook_scale"]),
        (lambda cache: cache.accumulated_resid(2, mlp_input=True), ["blocks.2.hook_resid_mid"]),
        (lambda cache: cache.accumulated_resid(incl_mid=True), ["blocks.0.hook_resid_mid"]),
        (lambda cache: cache.logit_lens(1), ["unembed.hook_in", "unembed.hook_out"]),
    ],
)
@torch.no_grad()
def test_an_error_about_the_stream_has_the_whole_filter(read, missing) -> None:
    module = tiny_models.nudged("llama")
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    _, cache = model.run_with_cache(**inputs, names_filter="blocks.*.hook_resid_post")
    with pytest.raises(hookline.errors.UnavailablePointError) as error:
        read(cache)
    assert all(repr(name) in str(error.value) for name in ["blocks.0.hook_resid_pre", *missing])
    names_filter = ast.literal_eval(str(error.value).partition("names_filter=")[2])
    _, whole = model.run_with_cache(**inputs)
    assert torch.equal(read(model.run_with_cache(**inputs, names_filter=names_filter)[1]), read(whole))

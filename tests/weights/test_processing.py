"""Processed weights: the model says the same, and is what it was afterwards, or it is refused."""

import pytest
import tiny_models
import torch
from torch import nn

import hookline
from hookline import HooklineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
STEPS = ("fold_ln", "fold_value_biases", "center_writing_weights", "center_unembed")
WITH_MEAN = ["gpt2", "gpt_neox", "gptj", "opt", "phi", "falcon", "cohere", "olmo", "stablelm", "starcoder2", "codegen"]
WITHOUT_MEAN = [
    "llama",
    "mistral",
    "qwen2",
    "granite",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "olmo2",
    "gemma3_text",
    "helium",
]
OTHERS = ["bloom", "gemma2", "gpt_oss", "mamba", "nemotron", "biogpt"]


def only(step):
    return {each: each == step for each in STEPS}


def parameters(module):
    return {name: (id(each), each._version) for name, each in module.named_parameters(remove_duplicate=False)}


def wrapped(kind):
    module = tiny_models.nudged(kind)
    inputs = tiny_models.inputs(module, seed=5)
    with torch.no_grad():
        return hookline.hook(module), module, inputs, module(**inputs).logits


@pytest.mark.parametrize("kind", [*WITH_MEAN, *WITHOUT_MEAN, *OTHERS])
@torch.no_grad()
def test_whatever_is_exact_keeps_probabilities_and_is_undone(kind) -> None:
    model, module, inputs, logits = wrapped(kind)
    before = parameters(module)
    with model.processed_weights() as done:
        assert model.processing is done
        assert done.fold_ln
        assert done.center_writing_weights == (kind in WITH_MEAN or kind in ("nemotron", "biogpt"))
        assert done.center_unembed == (kind != "gemma2")
        processed = module(**inputs).logits
        assert not torch.equal(processed, logits)
        torch.testing.assert_close(processed.log_softmax(-1), logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert model.processing is None
    assert parameters(module) == before
    assert torch.equal(module(**inputs).logits, logits)


@pytest.mark.parametrize("step", STEPS)
@torch.no_grad()
def test_each_step_by_itself(step) -> None:
    model, module, inputs, logits = wrapped("gpt2")
    done = model.process_weights(**only(step))
    assert [each for each in STEPS if getattr(done, each)] == [step]
    processed = module(**inputs).logits
    if step == "center_unembed":
        torch.testing.assert_close(processed, logits - logits.mean(-1, keepdim=True), atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(processed, logits, atol=1e-4, rtol=1e-4)
    model.restore_weights()
    assert torch.equal(module(**inputs).logits, logits)


@torch.no_grad()
def test_what_each_step_is_for() -> None:
    model, module, inputs, _ = wrapped("gpt2")
    model.process_weights()
    _, cache = model.run_with_cache(**inputs, names_filter=["*hook_resid_post", "*normalized", "*mlp.hook_in"])
    for block in module.transformer.h:
        assert bool((block.ln_1.weight == 1).all() and (block.ln_1.bias == 0).all())
    assert not model.b_V.any()
    assert torch.allclose(model.W_U.mean(-1), torch.zeros(32), atol=1e-6)
    for layer in range(4):
        assert torch.allclose(cache["resid_post", layer].mean(-1), torch.zeros(2, 7), atol=1e-5)
        assert torch.allclose(cache["normalized", layer, "ln2"], cache[f"blocks.{layer}.mlp.hook_in"], atol=1e-6)
    model.restore_weights()


@torch.no_grad()
def test_tied_embeddings_are_untied_and_tied_again() -> None:
    model, module, inputs, _ = wrapped("gpt2")
    tied = module.transformer.wte.weight
    assert module.lm_head.weight is tied
    with model.processed_weights(**only("fold_ln")):
        assert module.transformer.wte.weight is tied
        assert module.lm_head.weight is not tied
        assert torch.equal(model.run_with_cache(**inputs)[1]["embed"], tied[inputs["input_ids"]])
    assert module.lm_head.weight is module.transformer.wte.weight is tied


@pytest.mark.parametrize(
    ("kind", "step", "why"),
    [
        ("llama", "center_writing_weights", "LlamaRMSNorm"),
        ("bloom", "center_writing_weights", "blocks.0"),
        ("gemma2", "center_unembed", "soft cap"),
        ("recurrent_gemma", "center_unembed", "soft cap"),
        ("gemma2", "center_writing_weights", "norms after attention"),
        ("gpt_oss", "fold_value_biases", "sinks"),
        ("rwkv", "fold_ln", "RwkvSelfAttention"),
        ("minimax", "fold_ln", "changes the output"),
        ("minicpm3", "fold_ln", "no module"),
        ("phimoe", "fold_ln", "bias"),
        ("phimoe", "center_writing_weights", "experts"),
        ("deepseek_v3", "fold_value_biases", "projection"),
    ],
)
def test_what_is_not_exact_is_refused_and_changes_nothing(kind, step, why) -> None:
    model, module, _, _ = wrapped(kind)
    before = parameters(module)
    with pytest.raises(HooklineError, match=f"{step}.*{why}"):
        model.process_weights(**only(step))
    assert parameters(module) == before
    assert model.processing is None


def test_encoders_and_seq2seq_models() -> None:
    bert = hookline.hook(tiny_models.encoder("bert", head=True))
    with pytest.raises(HooklineError, match=r"fold_ln.*bert"):
        bert.process_weights(fold_ln=True)
    with bert.processed_weights() as done:
        assert (done.fold_value_biases, done.center_unembed, done.fold_ln) == (True, True, False)
        assert [name for name, _ in done.left_out] == ["fold_ln", "center_writing_weights"]
        assert "fold_ln: left out" in str(done)
    pegasus = hookline.hook(tiny_models.seq2seq("pegasus"))
    with pegasus.processed_weights(**only("fold_value_biases")), torch.no_grad():
        assert not pegasus.module.model.decoder.layers[0].encoder_attn.v_proj.bias.any()
    longformer = hookline.hook(tiny_models.encoder("longformer", head=True))
    with pytest.raises(HooklineError, match="query_global"):
        longformer.process_weights(**only("fold_value_biases"))


def test_an_adapter_is_refused() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_models.nudged("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(HooklineError, match="adapter"):
        hookline.hook(adapted).process_weights(fold_ln=True)


@torch.no_grad()
def test_hooks_stand_and_see_nothing_of_the_proof() -> None:
    model, module, inputs, _ = wrapped("llama")
    seen = []
    model.add_hook("blocks.1.hook_resid_post", lambda x: seen.append(x.shape))
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", torch.zeros_like)]), model.processed_weights():
        assert seen == []
        module(**inputs)
        assert len(seen) == 1
    model.reset_hooks()


@torch.no_grad()
def test_twice_and_after_a_failure() -> None:
    model, module, inputs, logits = wrapped("llama")
    with model.processed_weights(), pytest.raises(HooklineError, match="restore_weights"):
        hookline.hook(module).process_weights()
    with pytest.raises(ZeroDivisionError), model.processed_weights():
        raise ZeroDivisionError
    assert torch.equal(module(**inputs).logits, logits)
    with pytest.raises(HooklineError, match="False"):
        model.process_weights(**dict.fromkeys(STEPS, False))
    model.restore_weights()


def test_a_model_that_was_moved_is_moved_back_first() -> None:
    model, module, _, _ = wrapped("llama")
    model.process_weights()
    module.double()
    with pytest.raises(HooklineError, match="Move"):
        model.restore_weights()
    module.float()
    model.restore_weights()
    model.process_weights()
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.clone())
    with pytest.raises(HooklineError, match="replaced"):
        model.restore_weights()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_other_dtypes_and_gradients(dtype) -> None:
    model, module, inputs, _ = wrapped("gpt2")
    module.to(dtype).requires_grad_(False)
    logits = module(**inputs).logits
    with model.processed_weights() as done:
        assert done.left_out == ()
        assert {each.dtype for each in module.parameters()} == {dtype}
        assert not any(each.requires_grad for each in module.parameters())
    assert torch.equal(module(**inputs).logits, logits)


def test_gradients_flow_to_what_is_there() -> None:
    model, module, inputs, _ = wrapped("llama")
    with model.processed_weights():
        module(**inputs).logits.sum().backward()
        assert module.lm_head.weight.grad is not None
    assert module.lm_head.weight.grad is None


@torch.no_grad()
def test_training_with_dropout() -> None:
    model, module, _, _ = wrapped("gpt2")
    module.train()
    with model.processed_weights(**only("fold_ln")):
        assert module.training
    with pytest.raises(HooklineError, match=r"changes.*output"):
        model.process_weights(**only("fold_value_biases"))


@pytest.mark.slow
@torch.no_grad()
def test_compiled_code_sees_the_weights_that_are_there() -> None:
    model, module, inputs, logits = wrapped("gpt2")
    module.compile(backend="eager")
    module(**inputs)
    with model.processed_weights(**only("center_unembed")):
        centred = logits - logits.mean(-1, keepdim=True)
        torch.testing.assert_close(module(**inputs).logits, centred, atol=1e-4, rtol=1e-4)
    assert torch.equal(module(**inputs).logits, logits)
    capped = hookline.hook(tiny_models.nudged("gemma2"))
    capped.module.compile(backend="eager")
    with pytest.raises(HooklineError, match="soft cap"):
        capped.process_weights(**only("center_unembed"))
    torch._dynamo.reset()

"""HookedTransformer around pretrained models: loading, running, tokens, and what it refuses."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from tiny_models import causal_lm, nudged
from transformers.utils import logging as transformers_logging

import hookline
from hookline.compat import transformer_lens
from hookline.compat.transformer_lens import HookedTransformer, HookedTransformerKeyValueCache
from hookline.compat.transformer_lens._impl.aliases import get_official_model_name
from hookline.compat.transformer_lens.model_bridge import TransformerBridge
from hookline.errors import HooklineError, HooklineWarning

TEXT = "When Mary and John went to the store, John gave a drink to"
TEXTS = [TEXT, "The capital of France is"]
TOKENS = torch.arange(3, 17).view(2, 7)
KINDS = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "falcon", "bloom", "llama", "gemma2", "qwen2", "mistral", "olmo2")


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("tinyworld", device="cpu")


@pytest.fixture(scope="module")
def plain() -> hookline.HookedModel:
    return hookline.load("tinyworld")


# Imports


def test_classes_are_where_transformer_lens_has_them() -> None:
    from hookline.compat.transformer_lens import hook_points, patching, utils
    from hookline.compat.transformer_lens.ActivationCache import ActivationCache
    from hookline.compat.transformer_lens.FactoredMatrix import FactoredMatrix
    from hookline.compat.transformer_lens.HookedTransformer import HookedTransformer as Same
    from hookline.compat.transformer_lens.HookedTransformerConfig import HookedTransformerConfig
    from hookline.compat.transformer_lens.utilities import get_corner
    from hookline.compat.transformer_lens.utils import Slice, get_act_name, test_prompt, to_numpy

    assert Same is transformer_lens.HookedTransformer is HookedTransformer
    assert ActivationCache is transformer_lens.ActivationCache
    assert FactoredMatrix is transformer_lens.FactoredMatrix
    assert HookedTransformerConfig is transformer_lens.HookedTransformerConfig
    assert hook_points.HookPoint is transformer_lens.HookPoint is hookline.HookPoint
    assert utils.get_act_name is get_act_name
    assert utils.get_corner is get_corner
    assert patching.get_act_patch_resid_pre
    assert (utils.Slice, utils.to_numpy, utils.test_prompt) == (Slice, to_numpy, test_prompt)


# Loading


def test_processing_keeps_what_the_model_says(model, plain) -> None:
    tokens = model.to_tokens(TEXT)
    torch.testing.assert_close(model(tokens).log_softmax(-1), plain(tokens).log_softmax(-1), atol=1e-3, rtol=1e-3)
    assert model.cfg.normalization_type == "LNPre"
    assert model.W_U.mean(-1).abs().max() < 1e-5, "centred over the vocabulary"
    assert model.W_E.mean(-1).abs().max() < 1e-5, "what is written is centred"
    assert model.W_Q.mean(-2).abs().max() < 1e-5, "what reads a folded norm too, as TransformerLens does"
    assert model.b_V.abs().max() == 0


def test_each_option_of_processing_is_its_own() -> None:
    done = HookedTransformer.from_pretrained("tinyworld", fold_ln=False, center_unembed=False, device="cpu")
    assert done.cfg.normalization_type == "LN"
    assert done.W_U.mean(-1).abs().max() > 1e-4
    assert done.W_E.mean(-1).abs().max() < 1e-5


def test_weights_come_back() -> None:
    module = nudged("gpt2")
    before = dict(module.named_parameters())
    model = HookedTransformer.from_pretrained("gpt2", hf_model=module)
    assert model.module is module
    with pytest.raises(HooklineError, match="already processed"):
        HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=module)
    with pytest.raises(HooklineError, match="already processed"):
        model.process_weights_()
    model.restore_weights()
    assert model.cfg.normalization_type == "LN"
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_refactoring(kind) -> None:
    module = nudged(kind)
    before = dict(module.named_parameters())
    model = HookedTransformer.from_pretrained(kind, hf_model=module)
    expected, plain = model.run_with_cache(TOKENS)
    model.restore_weights()
    model.process_weights_(refactor_factored_attn_matrices=True)
    logits, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache["pattern", 1], plain["pattern", 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        model.W_O @ model.W_O.mT, torch.eye(model.cfg.d_head).expand(4, 4, -1, -1), atol=1e-4, rtol=0
    )
    sizes = [
        torch.cat([matrix, bias[:, :, None]], 2).norm(dim=-2)
        for matrix, bias in ((model.W_Q, model.b_Q), (model.W_K, model.b_K))
    ]
    torch.testing.assert_close(sizes[0], sizes[1], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(
        cache["z", 1].norm(dim=-1), (cache["z", 1][:, :, :, None] @ model.W_O[1]).norm(dim=-1)[..., 0]
    )
    model.restore_weights()
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_refactoring_in_double_precision() -> None:
    module = nudged("gpt2")
    expected = HookedTransformer.from_pretrained("gpt2", hf_model=module, dtype=torch.float64)(TOKENS)
    options = {"dtype": torch.float64, "refactor_factored_attn_matrices": True}
    found = HookedTransformer.from_pretrained("gpt2", hf_model=module, **options)(TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


def test_refactoring_is_refused_with_rotary_positions() -> None:
    module = nudged("llama")
    before = dict(module.named_parameters())
    with pytest.warns(HooklineWarning), pytest.raises(HooklineError, match="rotary"):
        HookedTransformer.from_pretrained("llama", hf_model=module, refactor_factored_attn_matrices=True)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_no_processing_is_the_model_itself() -> None:
    module = nudged("llama")
    expected = module(TOKENS).logits
    model = HookedTransformer.from_pretrained_no_processing("llama", hf_model=module)
    assert torch.equal(model(TOKENS), expected)
    assert model.processing is None


def test_what_is_not_exact_is_left_out_with_a_warning() -> None:
    module = nudged("llama")
    with torch.no_grad():
        expected = module(TOKENS).logits.log_softmax(-1)
    with pytest.warns(HooklineWarning, match="center_writing_weights"):
        model = HookedTransformer.from_pretrained("llama", hf_model=module)
    assert model.cfg.normalization_type == "RMSPre"
    torch.testing.assert_close(model(TOKENS).log_softmax(-1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind) -> None:
    module = nudged(kind)
    model = HookedTransformer.from_pretrained_no_processing(kind, hf_model=module)
    cfg = model.cfg
    logits, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(logits, module(TOKENS).logits)
    assert cache["z", 0].shape == (2, 7, cfg.n_heads, cfg.d_head)
    assert cache["k", 0].shape == (2, 7, cfg.n_key_value_heads or cfg.n_heads, cfg.d_head)
    assert model.W_K.shape == (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head)
    assert (cfg.normalization_type, cfg.gated_mlp) == (
        ("RMS", True) if kind in ("llama", "gemma2", "qwen2", "mistral", "olmo2") else ("LN", False)
    )


def test_another_dtype_is_a_copy() -> None:
    module = causal_lm("gpt2")
    model = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=module, dtype="bfloat16")
    assert model.cfg.dtype == model(TOKENS).dtype == torch.bfloat16
    assert next(module.parameters()).dtype == torch.float32


def test_first_layers(plain) -> None:
    short = HookedTransformer.from_pretrained_no_processing("tinyworld", first_n_layers=2, device="cpu")
    assert short.cfg.n_layers == 2
    tokens = short.to_tokens(TEXT)
    torch.testing.assert_close(short(tokens, stop_at_layer=2), plain(tokens, stop_at_layer=2))
    with pytest.raises(HooklineError, match="has 4 layers"):
        HookedTransformer.from_pretrained("tinyworld", first_n_layers=5)


def test_later_layers_that_are_not_wanted_are_not_reported(caplog, monkeypatch) -> None:
    logger, level = logging.getLogger("transformers"), transformers_logging.get_verbosity()
    monkeypatch.setattr(logger, "propagate", True)
    transformers_logging.set_verbosity_warning()
    try:
        HookedTransformer.from_pretrained_no_processing("tinyworld", first_n_layers=2, device="cpu")
        assert transformers_logging.get_verbosity() == logging.WARNING
    finally:
        transformers_logging.set_verbosity(level)
    assert not [record for record in caplog.records if "UNEXPECTED" in record.getMessage()]


def test_a_folder(tmp_path, plain) -> None:
    plain.module.save_pretrained(tmp_path / "mine")
    plain.tokenizer.save_pretrained(tmp_path / "mine")
    model = HookedTransformer.from_pretrained_no_processing(str(tmp_path / "mine"), device="cpu")
    assert model.cfg.model_name == "mine"
    assert torch.equal(model(TEXT), plain(model.to_tokens(TEXT)))


@pytest.mark.parametrize(
    "options",
    [
        {"n_devices": 2},
        {"n_ctx": 5},
        {"dtype": "float99"},
        {"checkpoint_value": 3, "checkpoint_label": 3},
        {"checkpoint_value": 3},
        {"default_padding_side": "top"},
    ],
)
def test_options_that_cannot_be_had_raise(options) -> None:
    with pytest.raises(HooklineError):
        HookedTransformer.from_pretrained("tinyworld", device="cpu", **options)


def test_no_encoders() -> None:
    from tiny_models import encoder

    with pytest.raises(HooklineError, match="causal"):
        HookedTransformer.from_pretrained("bert", hf_model=encoder("bert", head=True))


def test_short_names() -> None:
    assert get_official_model_name("gpt2-small") == "gpt2"
    assert (
        get_official_model_name("pythia-70m")
        == get_official_model_name("pythia-19m")
        == get_official_model_name("pythia")
        == "EleutherAI/pythia-70m"
    )
    assert get_official_model_name("EleutherAI/pythia-1.3b-deduped") == "EleutherAI/pythia-1.4b-deduped"
    assert get_official_model_name("gemma-2-2b") == "google/gemma-2-2b"
    assert get_official_model_name("tiny-stories-1M") == "roneneldan/TinyStories-1M"
    assert get_official_model_name("EleutherAI/gpt-j-6b") == "EleutherAI/gpt-j-6B" == get_official_model_name("GPT-J")
    assert get_official_model_name("some/model") == "some/model"
    assert get_official_model_name("gelu-2l") == "NeelNanda/GELU_2L512W_C4_Code"


# Running


def test_return_types(model) -> None:
    logits = model(TEXT)
    both = model(TEXT, return_type="both")
    unpacked, loss = both
    assert torch.equal(both.logits, logits)
    assert torch.equal(unpacked, logits)
    assert torch.equal(both.loss, loss)
    assert torch.equal(model(TEXT, "loss"), loss)
    per_token = model(TEXT, return_type="loss", loss_per_token=True)
    assert per_token.shape == (1, logits.shape[1] - 1)
    torch.testing.assert_close(per_token.mean(), loss)
    assert model(TEXT, return_type=None) is None
    assert torch.equal(model.forward(TEXT), logits)
    torch.testing.assert_close(model.loss_fn(logits, model.to_tokens(TEXT)), loss)
    output = model(TEXT, return_type="output", output_hidden_states=True)
    assert len(output.hidden_states) == model.cfg.n_layers + 1
    assert torch.equal(output.logits, model(TEXT))
    with pytest.raises(HooklineError, match="output_hidden_states=True"):
        model(TEXT, output_hidden_states=True)


def test_layers(model) -> None:
    logits, cache = model.run_with_cache(TEXT)
    assert torch.equal(model(TEXT, stop_at_layer=0), model.input_to_embed(TEXT)[0])
    for layer in (1, -1):
        mid = model(TEXT, stop_at_layer=layer, return_type=None)
        torch.testing.assert_close(mid, cache["resid_pre", layer])
        torch.testing.assert_close(model(mid, start_at_layer=layer), logits)
    torch.testing.assert_close(model(TEXT, stop_at_layer=4), cache["resid_post", 3])
    mid = model(TEXT, stop_at_layer=2)
    torch.testing.assert_close(
        model(mid, start_at_layer=2, tokens=model.to_tokens(TEXT), return_type="loss"), model(TEXT, return_type="loss")
    )
    with pytest.raises(HooklineError):
        model(TEXT, stop_at_layer=5)


def test_padding_changes_nothing(model) -> None:
    alone = [model(text)[0] for text in TEXTS]
    left, right = (model(TEXTS, padding_side=side) for side in ("left", "right"))
    for row, own in enumerate(alone):
        torch.testing.assert_close(left[row, -len(own) :], own, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(right[row, : len(own)], own, atol=1e-4, rtol=1e-4)
    losses = [model(text, return_type="loss", loss_per_token=True) for text in TEXTS]
    mean = torch.cat(losses, 1).mean()
    for side in ("left", "right"):
        torch.testing.assert_close(model(TEXTS, return_type="loss", padding_side=side), mean, atol=1e-4, rtol=1e-4)


def test_tokens_padded_on_the_left_are_known_by_their_padding(model) -> None:
    tokens = model.to_tokens(TEXTS, padding_side="left")
    expected = model(TEXTS, padding_side="left")
    assert torch.equal(model(tokens), expected), "this tensor remembers"
    assert torch.equal(model(tokens.clone(), padding_side="left"), expected), "and this one is told by its side"
    mask = transformer_lens.utils.get_attention_mask(model.tokenizer, tokens, True, "left")
    assert mask.sum(1).tolist() == [model.to_tokens(text).shape[1] for text in TEXTS]
    assert torch.equal(model(tokens.clone(), attention_mask=mask), expected)


def test_text_is_not_to_be_ignored(model) -> None:
    with pytest.raises(HooklineError, match="prepend_bos"):
        model(TOKENS, prepend_bos=True)
    with pytest.raises(HooklineError, match="shortformer"):
        model(TOKENS, shortformer_pos_embed=torch.zeros(1))
    with pytest.raises(HooklineError, match="loss_per_token"):
        model(TOKENS, loss_per_token=True)


def test_key_value_cache(model) -> None:
    tokens, whole = model.to_tokens(TEXT), model(TEXT)
    kept = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device)
    assert kept[0].past_keys.shape == (1, 0, 8, 16)
    first = model(tokens[:, :5], past_kv_cache=kept)
    kept.freeze()
    for _ in range(2):
        rest = model(tokens[:, 5:], past_kv_cache=kept)
        torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=1e-4, rtol=1e-4)
    assert kept.entries[3].past_values.shape == (1, 5, 8, 16)
    kept.unfreeze()
    model(tokens[:, 5:8], past_kv_cache=kept, return_type=None)
    found, loss = model(tokens[:, 8:], past_kv_cache=kept, return_type="both")
    torch.testing.assert_close(found, whole[:, 8:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss, model.loss_fn(whole[:, 8:], tokens[:, 8:]), atol=1e-4, rtol=1e-4)
    assert len(kept[0].past_keys[0]) == tokens.shape[1]
    with pytest.raises(HooklineError, match="batch size 1"):
        model(TEXTS, past_kv_cache=kept)
    with pytest.raises(HooklineError, match="frozen cache"):
        model(found, start_at_layer=1, past_kv_cache=kept)


def test_key_value_cache_with_padding_on_the_left(model) -> None:
    kept = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, 2)
    tokens = model.to_tokens(TEXTS, padding_side="left")
    model(tokens, past_kv_cache=kept)
    more = model.to_tokens([" Mary", " Paris"], prepend_bos=False)
    found = model(more, past_kv_cache=kept)
    for row, text in enumerate((TEXT + " Mary", TEXTS[1] + " Paris")):
        torch.testing.assert_close(found[row, -1], model(text)[0, -1], atol=1e-4, rtol=1e-4)


def test_failed_runs_leave_the_key_value_cache(model) -> None:
    kept = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device)
    model(TEXT, past_kv_cache=kept)
    length = kept[0].past_keys.shape[1]

    def fail(x):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        model.run_with_hooks(TOKENS[:1], past_kv_cache=kept, fwd_hooks=[("blocks.3.hook_resid_post", fail)])
    assert kept[0].past_keys.shape[1] == kept.previous_attention_mask.shape[1] == length


# Generation


def test_generation_is_greedy_or_drawn(model) -> None:
    assert model.generate(TEXT, 2, do_sample=False, verbose=False) == TEXT + " Mary."
    assert model.generate(TEXT, 2, temperature=0.0, verbose=False) == TEXT + " Mary."
    assert model.generate(TEXT, 2, top_k=1, verbose=False) == TEXT + " Mary."
    tokens = model.to_tokens(TEXT)
    new = model.generate(tokens, 2, do_sample=False, verbose=False)
    assert torch.equal(new[:, :-2], tokens)
    assert model.generate(TEXT, 2, do_sample=False, verbose=False, return_type="tokens").equal(new)
    without = model.generate(TEXT, 2, do_sample=False, verbose=False, use_past_kv_cache=False, return_type="tokens")
    assert without.equal(new)
    torch.manual_seed(0)
    drawn = {model.generate(TEXT, 1, temperature=8.0, verbose=False) for _ in range(8)}
    assert len(drawn) > 2, "no top 50 of the model's own settings"


def test_generation_of_several_texts(model) -> None:
    assert model.generate(TEXTS, 2, do_sample=False, verbose=False) == [TEXT + " Mary.", TEXTS[1] + " Paris."]
    tokens = model.to_tokens(TEXTS, padding_side="left").clone()
    again = model.generate(tokens, 2, do_sample=False, verbose=False, padding_side="left", return_type="str")
    assert again == [TEXT + " Mary.", TEXTS[1] + " Paris."]


def test_generation_stops(model) -> None:
    end = model.to_single_token(".")
    stopped = model.generate(TEXTS[1], 20, do_sample=False, eos_token_id=end, verbose=False, return_type="tokens")
    assert stopped[0, -1] == end
    assert stopped.shape[1] == model.to_tokens(TEXTS[1]).shape[1] + 2
    free = model.generate(TEXTS[1], 20, do_sample=False, stop_at_eos=False, verbose=False, return_type="tokens")
    assert free.shape[1] == model.to_tokens(TEXTS[1]).shape[1] + 20


def test_frequency_penalty(model) -> None:
    tokens = model.generate(
        TEXT, 20, do_sample=False, freq_penalty=100.0, stop_at_eos=False, return_type="tokens", verbose=False
    )
    assert len(set(tokens[0, model.to_tokens(TEXT).shape[1] :].tolist())) == 20, "no token comes twice"


def test_generation_from_nothing(model, capsys) -> None:
    assert isinstance(model.generate(max_new_tokens=3), str)
    assert "3/3" in capsys.readouterr().err


def test_generation_has_hooks(model) -> None:
    steps = []
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: steps.append(x.shape[1]))]):
        model.generate(TEXTS[1], 3, do_sample=False, stop_at_eos=False, verbose=False)
    assert steps == [model.to_tokens(TEXTS[1]).shape[1], 1, 1]


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_p": 0.0}, {"temperature": -1.0}, {"return_type": "text"},
                                     {"prepend_bos": True}, {"padding_side": "right"}])  # fmt: skip
def test_generation_refuses(model, options) -> None:
    with pytest.raises(HooklineError):
        model.generate(TOKENS, 1, verbose=False, **options)


def test_generation_without_a_tokenizer() -> None:
    model = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=causal_lm("gpt2"))
    with pytest.raises(HooklineError, match="eos_token_id"):
        model.generate(TOKENS, 2, verbose=False)
    assert model.generate(TOKENS, 2, stop_at_eos=False, verbose=False).shape == (2, 9)


# Tokens


def test_the_beginning_comes_first_once(model) -> None:
    begin = model.tokenizer.bos_token_id
    assert model.to_tokens("The capital")[0].tolist() == [begin, *model.to_tokens("The capital", prepend_bos=False)[0]]
    assert model.to_str_tokens("The capital") == ["<|endoftext|>", "The", " capital"]
    assert model.to_str_tokens(["The", "The capital"], prepend_bos=False) == [["The"], ["The", " capital"]]
    assert model.to_tokens("").tolist() == [[begin]]
    with pytest.raises(HooklineError, match="no tokens"):
        model.to_tokens("", prepend_bos=False)


def test_tokenizers_that_begin_by_themselves(plain) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(plain.tokenizer)
    begin = ("<|endoftext|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    assert tokenizer("The")["input_ids"][0] == tokenizer.bos_token_id
    model = HookedTransformer.from_pretrained_no_processing("tinyworld", tokenizer=tokenizer, device="cpu")
    assert model.cfg.tokenizer_prepends_bos
    assert model.to_str_tokens("The capital") == ["<|endoftext|>", "The", " capital"]
    assert model.to_str_tokens("The capital", prepend_bos=False) == ["The", " capital"]


def test_the_default_can_be_set(plain) -> None:
    model = HookedTransformer.from_pretrained_no_processing("tinyworld", default_prepend_bos=False, device="cpu")
    assert model.to_str_tokens("The capital") == ["The", " capital"]
    assert torch.equal(model("The capital"), plain(model.to_tokens("The capital")))
    model.cfg.default_prepend_bos = True
    assert model.to_str_tokens("The capital") == ["<|endoftext|>", "The", " capital"]
    assert model("The capital").shape[1] == 3


def test_a_tokenizer_without_a_beginning(plain) -> None:
    tokenizer = copy.deepcopy(plain.tokenizer)
    tokenizer.bos_token = tokenizer.pad_token = None
    model = HookedTransformer.from_pretrained_no_processing(
        "tinyworld", tokenizer=tokenizer, default_padding_side="left", device="cpu"
    )
    assert model.to_str_tokens("The") == ["<|endoftext|>", "The"]
    assert model.to_tokens(["The", "The capital"])[0].tolist()[:2] == [0, 0]
    assert tokenizer.bos_token is None, "it is not ours to change"


def test_token_helpers(model) -> None:
    france = model.to_single_token(" France")
    assert model.to_single_str_token(france) == " France"
    assert model.to_string(model.to_tokens(TEXTS[1], prepend_bos=False)) == [TEXTS[1]]
    assert (
        model.to_string([france])
        == model.to_string(np.array([france]))
        == model.to_string(torch.tensor(france))
        == " France"
    )
    assert model.to_str_tokens(model.to_tokens(TEXTS[1])) == model.to_str_tokens(TEXTS[1])
    assert model.to_str_tokens(np.array([france])) == [" France"]
    assert model.get_token_position(" France", TEXTS[1]) == 4
    assert model.get_token_position(france, TEXTS[1], prepend_bos=False) == 3
    assert model.get_token_position(" John", TEXT, mode="last") > model.get_token_position(" John", TEXT)
    with pytest.raises(HooklineError, match="the prompt"):
        model.get_token_position(" Paris", TEXTS[1])
    with pytest.raises(HooklineError, match=r"tokens.* one"):
        model.to_single_token(" France and Germany")


def test_long_text_is_cut_with_a_warning(model) -> None:
    with pytest.warns(HooklineWarning, match="truncated.*128"):
        assert model.to_tokens("word " * 300).shape == (1, 128)
    assert model.to_tokens("word " * 300, truncate=False).shape[1] > 128


# The model itself


def test_it_can_be_copied_and_pickled(model) -> None:
    module = causal_lm("gpt2")
    own = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=module, default_prepend_bos=False)
    for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert torch.equal(other(TOKENS), own(TOKENS))
        assert other.cfg.default_prepend_bos is False
        assert other.module is not module


def test_dtype_and_device_are_known() -> None:
    model = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=causal_lm("gpt2"))
    assert model.to(torch.bfloat16) is model
    assert model.cfg.dtype == torch.bfloat16
    assert model.cpu().cfg.device == torch.device("cpu")
    assert not model.eval().module.training


def test_verify(model) -> None:
    assert "0 failed" in str(model.verify())


def test_what_is_left_out_says_what_to_do(model) -> None:
    with pytest.raises(AttributeError, match="process_weights_"):
        model.fold_layer_norm({})
    with pytest.raises(AttributeError, match="no pos_embed"):
        HookedTransformer.from_pretrained_no_processing("llama", hf_model=causal_lm("llama")).pos_embed


def test_bridge_options() -> None:
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=nudged("gpt2"))
    assert bridge.original_model is bridge.module
    bridge.enable_compatibility_mode(no_processing=True)
    assert bridge.processing is None
    bridge.enable_compatibility_mode(fold_ln=False, center_writing_weights=False, fold_value_biases=False)
    assert bridge.processing.center_unembed
    assert not bridge.processing.fold_ln
    for options in ({"load_weights": False}, {"max_memory": {}}):
        with pytest.raises(HooklineError, match="not supported"):
            TransformerBridge.boot_transformers("tinyworld", **options)

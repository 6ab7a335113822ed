"""Toy models by HookedTransformer(cfg), and TransformerLens's utils."""

import numpy as np
import pytest
import torch

import hookline
from hookline.compat.transformer_lens import (
    FactoredMatrix,
    HookedTransformer,
    HookedTransformerConfig,
    HookedTransformerKeyValueCache,
    utils,
)
from hookline.compat.transformer_lens.utils import token_rows
from hookline.errors import HooklineError

TOKENS = torch.arange(20).view(2, 10) % 17
SIZES = {"n_layers": 2, "d_model": 32, "d_head": 8, "n_ctx": 12, "d_vocab": 17, "device": "cpu", "seed": 0}


def toy(**options) -> HookedTransformer:
    return HookedTransformer(HookedTransformerConfig(**{**SIZES, "act_fn": "relu", **options}))


def test_a_toy_is_what_its_configuration_says() -> None:
    cfg = HookedTransformerConfig(**SIZES, act_fn="gelu")
    model = HookedTransformer(cfg)
    assert model.cfg is cfg
    assert model(TOKENS).shape == (2, 10, 17)
    _, cache = model.run_with_cache(TOKENS)
    assert cache["pre", 1].shape == (2, 10, 128)
    torch.testing.assert_close(cache.decompose_resid().sum(0), cache["resid_post", -1])
    from_dict = HookedTransformer(cfg.to_dict())
    assert torch.equal(from_dict(TOKENS), model(TOKENS)), "the same seed"


@pytest.mark.parametrize(
    "options",
    [
        {"attn_only": True, "normalization_type": None},
        {"attn_only": True, "positional_embedding_type": "shortformer"},
        {"normalization_type": "LNPre", "act_fn": "solu_ln"},
        {"normalization_type": "LN", "act_fn": "solu_ln"},
        {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu", "positional_embedding_type": "rotary"},
        {"n_key_value_heads": 2, "normalization_type": "RMSPre"},
        {"parallel_attn_mlp": True},
        {"d_vocab_out": 5},
        {"use_qk_norm": True},
        {"post_embedding_ln": True},
        {"positional_embedding_type": "alibi"},
    ],
)
def test_state_makes_another_toy_the_same(options) -> None:
    one, other = toy(**options), toy(**{**options, "seed": 1})
    with torch.no_grad():
        for parameter in one.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert not torch.allclose(one(TOKENS), other(TOKENS))
    buffers = {"blocks.0.attn.mask": torch.ones(12, 12), "blocks.1.attn.IGNORE": torch.tensor(-1e5)}
    other.load_state_dict({**one.state_dict(), **buffers})
    torch.testing.assert_close(other(TOKENS), one(TOKENS))
    assert not [name for name in one.state_dict() if name.endswith((".weight", ".bias"))], "all have names there"


def test_norms_of_queries_and_of_embeddings_have_their_names() -> None:
    assert {"blocks.0.attn.q_norm.w", "blocks.1.attn.k_norm.w"} <= set(toy(use_qk_norm=True).state_dict())
    assert {"embed.ln.w", "embed.ln.b"} <= set(toy(post_embedding_ln=True).state_dict())


def test_positions_that_are_never_read_are_left_out() -> None:
    model = toy(positional_embedding_type="alibi")
    keys = model.load_state_dict({**model.state_dict(), "pos_embed.W_pos": torch.ones(12, 32)})
    assert keys.unexpected_keys == []
    rotary = toy(positional_embedding_type="rotary")
    with pytest.raises(HooklineError, match="pos_embed"):
        rotary.load_state_dict({**rotary.state_dict(), "pos_embed.W_pos": torch.ones(12, 32)})


def test_the_loss_of_logits_for_fewer_tokens() -> None:
    model = toy(d_vocab_out=5)
    tokens = torch.tensor([[9, 1, 4, 0], [16, 2, 2, 3]])
    logits, loss = model(tokens, return_type="both")
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(tokens, return_type="loss"), expected)
    with pytest.raises(HooklineError, match="5 tokens"):
        model(TOKENS, return_type="loss")


def test_text_without_a_tokenizer_says_how_to_have_one() -> None:
    with pytest.raises(HooklineError, match="set_tokenizer"):
        toy()("some text")


def test_a_gated_bias_goes_where_it_does_the_same() -> None:
    model = toy(normalization_type="RMS", gated_mlp=True, act_fn="silu")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    bias = torch.linspace(-1, 1, state["blocks.0.mlp.b_in"].numel())
    model.load_state_dict({**state, "blocks.0.mlp.b_in": bias})  # which TransformerLens adds to the product
    assert not model.b_in.any()
    torch.testing.assert_close(model.b_out[0], state["blocks.0.mlp.b_out"] + bias @ state["blocks.0.mlp.W_out"])


def test_training_without_biases() -> None:
    model = toy(attn_only=True)
    for name, parameter in model.named_parameters():
        if "b_" in name:
            parameter.requires_grad = False
    optimiser = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(TOKENS, return_type="loss")
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert model.b_Q.abs().max() == model.b_U.abs().max() == 0


def test_processing_a_toy() -> None:
    model = toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    before = model(TOKENS).log_softmax(-1)
    model.process_weights_()
    assert model.cfg.normalization_type == "LNPre"
    torch.testing.assert_close(model(TOKENS).log_softmax(-1), before, atol=1e-4, rtol=1e-4)


def test_norms_without_weights_stay_what_they_are() -> None:
    model = toy(normalization_type="LNPre")
    model.process_weights_(fold_value_biases=False)
    assert model.cfg.normalization_type == "LNPre"
    model.restore_weights()
    assert model.cfg.normalization_type == "LNPre"


def test_new_weights() -> None:
    model = toy(seed=None)
    before = model(TOKENS)
    model.init_weights()
    assert not torch.allclose(model(TOKENS), before)
    with pytest.raises(HooklineError, match="pretrained"):
        HookedTransformer.from_pretrained("tinyworld", device="cpu").init_weights()


def test_a_toy_generates_and_goes_on() -> None:
    model = toy(positional_embedding_type="rotary")
    new = model.generate(TOKENS[:, :4], 3, do_sample=False, stop_at_eos=False, verbose=False)
    assert torch.equal(new[:, 4], model(TOKENS[:, :4])[:, -1].argmax(-1))
    kept = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, 2)
    parts = [model(part, past_kv_cache=kept) for part in (TOKENS[:, :6], TOKENS[:, 6:])]
    torch.testing.assert_close(torch.cat(parts, 1), model(TOKENS))


def test_a_toy_with_text() -> None:
    tokenizer = hookline.load("tinyworld").tokenizer
    sizes = {name: value for name, value in SIZES.items() if name != "d_vocab"}
    model = HookedTransformer(HookedTransformerConfig(**sizes, act_fn="relu"), tokenizer, default_padding_side="left")
    assert model.cfg.d_vocab == model.cfg.d_vocab_out == 1024
    assert model("The capital").shape == (1, 3, 1024)
    assert model.tokenizer.padding_side == "left"
    assert model.cfg.tokenizer_name is None, "the configuration alone would not find it"
    with pytest.raises(HooklineError, match="d_vocab"):
        HookedTransformer(HookedTransformerConfig(**sizes, act_fn="relu"))
    with pytest.raises(HooklineError, match="tokenizer"):
        HookedTransformer(HookedTransformerConfig(**SIZES, act_fn="relu"), default_padding_side="left")


# Utils


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (("k", 6, "a"), "blocks.6.attn.hook_k"),
        (("k6",), "blocks.6.attn.hook_k"),
        (("pre", 2), "blocks.2.mlp.hook_pre"),
        (("embed",), "hook_embed"),
        (("normalized", 27, "ln2"), "blocks.27.ln2.hook_normalized"),
        (("scale4ln1",), "blocks.4.ln1.hook_scale"),
        (("attn", 3), "blocks.3.attn.hook_pattern"),
        (("resid_post", 0), "blocks.0.hook_resid_post"),
        (("scale",), "ln_final.hook_scale"),
        (("mlp_post", 1), "blocks.1.mlp.hook_post"),
        (("blocks.1.hook_mlp_in",), "blocks.1.hook_mlp_in"),
        (("attn_logits", 2, "attn"), "blocks.2.attn.hook_attn_scores"),
    ],
)
def test_names(asked, name) -> None:
    assert utils.get_act_name(*asked) == name


def test_slices() -> None:
    x = torch.arange(24).view(2, 12)
    assert utils.Slice(3).apply(x, -1).tolist() == [3, 15]
    assert utils.Slice((1, 7, 2)).apply(x, 1)[0].tolist() == [1, 3, 5]
    assert utils.Slice([4, 1]).apply(x, 1)[0].tolist() == [4, 1]
    assert utils.Slice().apply(x).equal(x)
    assert utils.Slice.unwrap(3).apply(x, 1).shape == (2, 1)
    assert utils.Slice((1, 3)).indices(9).tolist() == [1, 2]
    assert utils.Slice(-1).indices().tolist() == [-1]
    with pytest.raises(HooklineError, match="length"):
        utils.Slice((1, 3)).indices()
    with pytest.raises(HooklineError, match="slice"):
        utils.Slice("all")


def test_numbers() -> None:
    x = torch.tensor([1.5], requires_grad=True)
    for each in (x, x.bfloat16(), [1.5], np.array([1.5])):
        assert utils.to_numpy(each).tolist() == [1.5]
    with pytest.raises(HooklineError, match="object"):
        utils.to_numpy(object())
    matrix = FactoredMatrix(torch.randn(5, 2), torch.randn(2, 5))
    torch.testing.assert_close(utils.get_corner(matrix, 2), matrix.AB[:2, :2])
    assert utils.get_corner(torch.zeros(5, 5)).shape == (3, 3)
    assert utils.remove_batch_dim(torch.zeros(1, 3)).shape == (3,)
    assert utils.remove_batch_dim(torch.zeros(2, 3)).shape == (2, 3)
    assert utils.transpose(torch.zeros(1, 2, 3)).shape == (1, 3, 2)
    assert utils.is_lower_triangular(torch.eye(3))
    assert not utils.is_lower_triangular(torch.ones(3, 3))
    assert utils.get_cumsum_along_dim(torch.tensor([1, 2, 3]), 0, reverse=True).tolist() == [6, 5, 3]
    assert utils.get_offset_position_ids(1, torch.tensor([[0, 1, 1]])).tolist() == [[0, 1]]
    assert utils.repeat_along_head_dimension(torch.zeros(1, 2, 3), 4).shape == (1, 2, 4, 3)
    assert utils.filter_dict_by_prefix({"a.b": 1, "ab": 2}, "a") == {"b": 1}
    assert utils.get_device() in ("cpu", "cuda", "mps")


def test_losses() -> None:
    logits = torch.randn(2, 4, 6)
    tokens = torch.randint(6, (2, 4))
    each = utils.lm_cross_entropy_loss(logits, tokens, per_token=True)
    expected = -logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(utils.lm_cross_entropy_loss(logits, tokens), expected.mean())
    right = torch.nn.functional.one_hot(tokens.roll(-1, 1), 6).float()
    assert utils.lm_accuracy(right, tokens) == 1
    assert utils.lm_accuracy(right, tokens, per_token=True).shape == (2, 3)


def test_activations() -> None:
    x = torch.linspace(-3, 3, 50)
    exact = x * torch.distributions.Normal(0, 1).cdf(x)
    torch.testing.assert_close(utils.gelu_new(x), exact, atol=1e-3, rtol=0)
    torch.testing.assert_close(utils.gelu_fast(x), utils.gelu_new(x))
    torch.testing.assert_close(utils.solu(x), x * x.softmax(-1))


def test_sampling() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[5.0, 4.0, 3.0, -5.0]]).expand(200, -1)
    assert utils.sample_logits(logits, temperature=0.0).eq(0).all()
    assert set(utils.sample_logits(logits, top_k=2).tolist()) == {0, 1}
    assert set(utils.sample_logits(logits, top_p=0.7).tolist()) == {0, 1}
    before = torch.zeros(200, 3, dtype=torch.long)
    assert utils.sample_logits(logits, temperature=0.0, freq_penalty=1.0, tokens=before).eq(1).all()
    assert utils.sample_logits(logits, freq_penalty=100.0, tokens=before).ne(0).all()
    with pytest.raises(HooklineError, match="pass tokens"):
        utils.sample_logits(logits, freq_penalty=1.0)


def test_trying_a_prompt(capsys) -> None:
    model = HookedTransformer.from_pretrained("tinyworld", device="cpu")
    prompt = "When Mary and John went to the store, John gave a drink to"
    utils.test_prompt(prompt, "Mary", model)
    out = capsys.readouterr().out
    assert "Tokenized answer: [' Mary']" in out
    assert out.rstrip().endswith("Ranks of the answer tokens: [(' Mary', 0)]")
    assert out.count("Top ") == 10
    utils.test_prompt(prompt, ["Mary", "John"], model, print_details=False)
    several = capsys.readouterr().out
    assert several.startswith("Ranks of the answer tokens: [[(' Mary', 0), (' John', ")
    utils.test_prompt("The capital of France is", " Paris.", model, print_details=False)
    assert capsys.readouterr().out.rstrip() == "Ranks of the answer tokens: [(' Paris', 0), ('.', 0)]"
    with pytest.raises(HooklineError, match="answer"):
        utils.test_prompt(prompt, [], model)


def test_rows_of_tokens() -> None:
    tokenizer = hookline.load("tinyworld").tokenizer
    texts = ["The capital of France is Paris.", "The capital of Italy is Rome."]
    joined = [*tokenizer(texts[0])["input_ids"], tokenizer.eos_token_id, *tokenizer(texts[1])["input_ids"]]
    rows = token_rows(texts, tokenizer, 5)
    assert (rows[:, 0] == tokenizer.bos_token_id).all()
    assert rows[:, 1:].flatten().tolist() == joined[: len(joined) // 4 * 4]
    padded = token_rows(texts, tokenizer, 50, add_bos_token=False)
    assert padded.shape == (1, 50)
    assert padded[0, : len(joined)].tolist() == joined
    assert token_rows([], tokenizer, 5).shape == (0, 5)
    with pytest.raises(HooklineError, match="no room"):
        token_rows(texts, tokenizer, 1)


def test_datasets() -> None:
    datasets = pytest.importorskip(
        "datasets", reason="not a dependency: tokenize_and_concatenate is for those who have it"
    )
    tokenizer = hookline.load("tinyworld").tokenizer
    texts = datasets.Dataset.from_dict({"text": ["The capital of France is Paris."] * 4, "meta": [1] * 4})
    rows = utils.tokenize_and_concatenate(texts, tokenizer, max_length=5, num_proc=1)
    assert rows["tokens"][:].tolist() == token_rows(texts["text"], tokenizer, 5).tolist()
    with pytest.raises(HooklineError, match="no column"):
        utils.tokenize_and_concatenate(texts, tokenizer, column_name="body")


def test_defaults_for_a_while() -> None:
    model = HookedTransformer.from_pretrained_no_processing("tinyworld", device="cpu")
    longer, side = model.to_tokens("Mary").shape[1], model.tokenizer.padding_side
    with utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left"):
        assert model.to_tokens("Mary").shape[1] == longer - 1
        assert model.tokenizer.padding_side == "left"
    assert model.to_tokens("Mary").shape[1] == longer
    assert model.tokenizer.padding_side == side
    with pytest.raises(HooklineError, match="no default"), utils.LocallyOverridenDefaults(model, truncate=True):
        pass
    with pytest.raises(HooklineError, match="padding_side"), utils.LocallyOverridenDefaults(toy(), padding_side="left"):
        pass


def test_files_memory_and_names(tmp_path, capsys) -> None:
    utils.print_gpu_mem("here")
    assert capsys.readouterr().out.startswith("here ~ ")
    assert "gpt2" in utils.OFFICIAL_MODEL_NAMES
    tokenizer = HookedTransformer.from_pretrained_no_processing("tinyworld", device="cpu").tokenizer
    begun = utils.get_tokenizer_with_bos(tokenizer)
    assert begun("Mary")["input_ids"][0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("", "HookedAudioEncoder", "hookline.hook"),
        (".utilities.multi_gpu", "resolve_device_map", "device_map"),
        (".utils", "get_dataset", "load_dataset"),
        (".patching", "generic_activation_patch", "sweep"),
    ],
)
def test_names_that_are_left_out_say_what_is_there(module, name, instead) -> None:
    with pytest.raises(ImportError, match=instead):
        exec(f"from hookline.compat.transformer_lens{module} import {name}")
    with pytest.raises(ImportError, match="import name"):
        exec(f"from hookline.compat.transformer_lens{module} import nothing_like_that")


def test_positions_of_a_shortformer() -> None:
    model = toy(positional_embedding_type="shortformer", attn_only=True)
    logits, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["pos_embed"], model.W_pos[: TOKENS.shape[1]].expand(len(TOKENS), -1, -1))
    assert torch.equal(model.pos_embed(TOKENS), cache["pos_embed"])
    queries = cache["normalized", 0, "ln1"] * model.blocks[0].ln1.w + model.blocks[0].ln1.b + cache["pos_embed"]
    expected = torch.einsum("bpd,hde->bphe", queries, model.W_Q[0]) + model.b_Q[0]
    torch.testing.assert_close(cache["q", 0], expected)
    parts, labels = cache.decompose_resid(return_labels=True)
    assert "pos_embed" not in labels, "it is not in the stream"
    torch.testing.assert_close(parts.sum(0), cache["resid_post", -1])
    zeroed = model.run_with_hooks(TOKENS, fwd_hooks=[("hook_pos_embed", lambda x, hook: torch.zeros_like(x))])
    assert not torch.allclose(zeroed, logits)
    model.W_pos.data.zero_()
    torch.testing.assert_close(model(TOKENS), zeroed)


def test_variants_of_a_shortformer_with_other_positions() -> None:
    model = toy(positional_embedding_type="shortformer")
    hooks = [("hook_pos_embed", lambda x: 2 * x)]
    base = model.baseline(TOKENS[:1], fwd_hooks=hooks)
    change = base.change("blocks.1.hook_resid_pre", torch.ones(32), pos=4)
    ((_, found),) = base.rerun([[change]])

    def patch(x: torch.Tensor) -> torch.Tensor:
        return x.index_fill(1, torch.tensor(4), 1.0)

    expected = model.run_with_hooks(TOKENS[:1], fwd_hooks=[*hooks, ("blocks.1.hook_resid_pre", patch)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_states_have_the_buffers_that_transformer_lens_requires() -> None:
    state = toy().state_dict()
    assert {name for name in state if name.endswith(("mask", "IGNORE"))} == {
        f"blocks.{layer}.attn.{name}" for layer in (0, 1) for name in ("mask", "IGNORE")
    }
    assert state["blocks.0.attn.mask"].shape == (0, 0)
    model = toy(seed=5)
    state["blocks.0.attn.IGNORE"] = torch.full_like(state["blocks.0.attn.IGNORE"], -1e10)
    model.load_state_dict(state)
    assert torch.equal(model(TOKENS), toy()(TOKENS))

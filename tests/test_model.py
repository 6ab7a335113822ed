"""A language model, wrapped: text and tokens in, logits and loss out, generation under hooks."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_models
import torch
from backends import needs_compiler
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import hookline
from hookline import HookedModel, HooklineError, at
from hookline.cli import app
from hookline.experiments import ablation, metrics, patching
from hookline.text.loss import lm_loss

WORDS = ["<pad>", "<bos>", "<eos>", "the", "cat", "sat", "on", "a", "mat", "dog"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def model(tokenizer) -> HookedModel:
    return hookline.hook(tiny_models.causal_lm("gpt2"), tokenizer)


def test_text_and_tokens_give_the_models_own_logits(model) -> None:
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        own = model.module(ids).logits
        assert torch.equal(model("the cat sat"), own)
        assert torch.equal(model(["the cat sat"]), own)
        assert torch.equal(model(ids), own)
        assert torch.equal(model(ids[0]), own), "one row is a batch of one"
        assert torch.equal(model(input_ids=ids), own)
        assert model("the cat sat", return_type=None) is None


def test_loss(model) -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    logits, loss = model(ids, return_type="both")
    own = model.module(ids, labels=ids).loss
    assert torch.allclose(loss, own, atol=1e-6)
    per_token = model(ids, return_type="loss", loss_per_token=True)
    assert torch.allclose(per_token.mean(), own, atol=1e-6)
    assert torch.allclose(per_token[0], F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none"))
    with pytest.raises(HooklineError, match="return_type"):
        model(ids, return_type="log")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom", "opt"])  # positions learned, rotary, ALiBi, from the mask
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_what_is_real(kind, tokenizer, side) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind), tokenizer)
    with torch.no_grad():
        both = model(["the cat sat on", "the dog"], padding_side=side)
        assert torch.allclose(both[1, :2] if side == "right" else both[1, -2:], model("the dog")[0], atol=1e-5)
        assert torch.allclose(both[0], model("the cat sat on")[0], atol=1e-5)
        loss = model(["the cat sat on", "the dog"], padding_side=side, return_type="loss", loss_per_token=True)
        assert loss[1].ne(0).sum() == 1, "of two words, one is predicted"


def test_text_helpers(model) -> None:
    assert model.to_tokens("the cat").tolist() == [[3, 4]]
    assert model.to_tokens("the cat", prepend_bos=True).tolist() == [[1, 3, 4]]
    assert model.to_str_tokens("the cat") == ["the", "cat"]
    assert model.to_str_tokens(["the cat", "the"]) == [["the", "cat"], ["the"]]
    assert model.to_string(torch.tensor([3, 4])) == "the cat"
    assert model.to_string(torch.tensor([[3, 4], [3, 9]])) == ["the cat", "the dog"]
    assert model.to_single_token("cat") == 4
    assert model.get_token_position("cat", "the cat sat on the cat") == 1
    assert model.get_token_position("cat", "the cat sat on the cat", mode="last") == 5
    with pytest.raises(HooklineError, match=r"\['the', 'cat'\]"):
        model.to_single_token("the cat")
    with pytest.raises(HooklineError, match="'dog'"):
        model.get_token_position("dog", "the cat")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (["the", ""], "empty"),
        (torch.tensor([[999999]]), "token 999999"),
        (torch.tensor([[-1]]), "token -1"),
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.ones(1, 500, dtype=torch.long), "500 tokens"),
        (torch.ones(1, 3), "integers"),
    ],
)
def test_bad_prompts(model, prompt, message) -> None:
    with pytest.raises(HooklineError, match=message):
        model(prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"start_at_layer": 1},
            r"start_at_layer.*\[batch, pos, 32\], not \[1, 2\]",
        ),
        ({"retun_type": "loss"}, "did you mean 'return_type'"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask.*\[1, 3\].*\[1, 2\]"),
        ({"return_dict": False}, "return_dict=False"),
        ({"stop_at_layer": 1, "return_type": "loss"}, "stop_at_layer returns"),
        ({"tokens": torch.tensor([[3]])}, "start_at_layer"),
        ({"loss_per_token": True}, "loss_per_token needs"),
        ({"prepend_bos": True}, "prepend_bos and padding_side"),
        ({"padding_side": "left"}, "prepend_bos and padding_side"),
        ({"input_ids": torch.tensor([[3]])}, "given twice"),
    ],
)
def test_no_option_is_accepted_and_then_ignored(model, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        model(torch.tensor([[3, 4]]), **options)


def test_the_loss_is_as_exact_as_torchs_own() -> None:
    logits, tokens = torch.randn(2, 6, 50_000) * 4 + 30, torch.randint(0, 50_000, (2, 6))
    exact = torch.nn.functional.cross_entropy(logits[:, :-1].double().mT, tokens[:, 1:], reduction="none")
    assert (lm_loss(logits, tokens, per_token=True) - exact).abs().max() < 1e-5


def test_what_has_no_loss(model) -> None:
    with pytest.raises(HooklineError, match="two tokens"):
        model(torch.tensor([[3]]), return_type="loss")
    with pytest.raises(HooklineError, match="embeddings"):
        model(inputs_embeds=torch.zeros(1, 2, model.cfg.d_model), return_type="loss")
    with pytest.raises(HooklineError, match=r"\(1, 2, 3\)"):
        model(torch.zeros(1, 2, 3, dtype=torch.long))
    with pytest.raises(HooklineError, match="padding_side"):
        model("the cat", padding_side="up")


def test_without_a_tokenizer() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    assert model(torch.tensor([3, 4])).shape[:2] == (1, 2)
    with pytest.raises(HooklineError, match="tokenizer"):
        model("the cat")
    with pytest.raises(HooklineError, match="supported language"):
        hookline.hook(torch.nn.Linear(1, 1), tokenizer="something")


def test_generation_under_hooks(model) -> None:
    """Hooks fire on every step, with the cache of keys and values on, and see just the new position."""
    shapes, keys = [], []
    hooks = [
        ("blocks.1.hook_resid_post", lambda h: shapes.append(h.shape[1])),
        ("blocks.1.attn.hook_pattern", lambda p: keys.append(p.shape[-1])),
    ]
    bare = model.generate("the cat sat", max_new_tokens=5, min_new_tokens=5, do_sample=False)
    with model.hooks(fwd_hooks=hooks):
        assert model.generate("the cat sat", max_new_tokens=5, min_new_tokens=5, do_sample=False) == bare
    assert shapes == [3, 1, 1, 1, 1]
    assert keys == [3, 4, 5, 6, 7], "the pattern covers all keys"
    steered = [("blocks.1.hook_resid_post", lambda h: h + 5 * torch.randn(h.shape[-1], generator=torch.Generator()))]
    with model.hooks(fwd_hooks=steered):
        ids = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert ids.shape == (1, 8)


def test_a_call_needs_an_input(model) -> None:
    for call in (model, model.generate, model.run_with_cache):
        with pytest.raises(HooklineError, match="no input"):
            call()


def test_ids_that_are_no_tokens_have_no_text(model) -> None:
    for ids in ([500], torch.tensor([3, 500]), torch.tensor([[3, 500]]), [-1]):
        with pytest.raises(HooklineError, match=r"token (500|-1) .*0 to \d+"):
            model.to_string(ids)
    with pytest.raises(HooklineError, match="token 500"):
        model.to_str_tokens(torch.tensor([3, 500]))
    with pytest.raises(HooklineError, match=r"integers, not 1\.5"):
        model.to_string(torch.tensor([1.5]))


def test_generate_takes_what_a_call_takes(model) -> None:
    quick = {"max_new_tokens": 2, "do_sample": False}
    with_bos = model.generate(model.to_tokens("the cat", prepend_bos=True), **quick)
    assert model.generate("the cat", prepend_bos=True, **quick) == model.tokenizer.decode(
        with_bos[0], skip_special_tokens=True
    )
    _, cache = model.generate_with_cache("the cat", prepend_bos=True, names_filter="hook_embed", **quick)
    assert cache["hook_embed"].shape[1] == 4
    assert len(list(model.stream("the cat", prepend_bos=True, **quick))) <= 2
    for wrong in (2.5, 0, -1, "2"):
        with pytest.raises(HooklineError, match="max_new_tokens"):
            model.generate("the cat", max_new_tokens=wrong)
    for continued in (model.generate, model.generate_with_cache, model.stream):
        with pytest.raises(HooklineError, match=r"seed.* 1\.5"):
            continued("the cat", 2, do_sample=True, seed=1.5)


def test_generate_says_how_it_takes_hooks(model) -> None:
    with pytest.raises(HooklineError, match=r"with model\.hooks"):
        model.generate("the cat", fwd_hooks=[("hook_embed", torch.zeros_like)])


def test_plans_of_text(model) -> None:
    plan = model.plan("blocks.1.hook_resid_post", input="the cat sat")
    assert plan[0].shape == (1, 3, 32)
    assert "[1, 3, 32]" in str(model.points("blocks.0.hook_resid_pre", input=torch.tensor([[3, 4, 5]])))


def test_load_from_a_folder(model, tokenizer, tmp_path) -> None:
    model.module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = hookline.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded("the cat sat"), model("the cat sat"))
    half = hookline.load(tmp_path, dtype=torch.bfloat16)
    assert half.cfg.dtype == torch.bfloat16
    assert "gpt2: 4 layers" in repr(half)


def test_folders_without_a_model(model, tmp_path) -> None:
    with pytest.raises(HooklineError, match="exist"):
        hookline.load(tmp_path / "nowhere")
    model.module.config.save_pretrained(tmp_path)
    with pytest.raises(HooklineError, match=r"contains.*weights"):
        hookline.load(tmp_path)


def test_stopping_early(model) -> None:
    """The layers from there on are not run at all."""
    ran = []
    handles = [
        layer.register_forward_hook(lambda *_, n=n: ran.append(n)) for n, layer in enumerate(model.module.transformer.h)
    ]
    with torch.no_grad():
        _, cache = model.run_with_cache("the cat sat")
        ran.clear()
        assert torch.equal(model("the cat sat", stop_at_layer=2), cache["resid_pre", 2])
        assert ran == [0, 1]
        ran.clear()
        assert torch.equal(model("the cat sat", stop_at_layer=-1), cache["resid_pre", 3])
        ran.clear()
        assert list(model.cache("the cat sat", names_filter="blocks.1.attn.hook_z")) == ["blocks.1.attn.hook_z"]
        assert ran == [0]
    for handle in handles:
        handle.remove()
    stream = model("the cat sat", stop_at_layer=2)
    stream.sum().backward()
    assert model.module.transformer.wte.weight.grad is not None
    with pytest.raises(HooklineError, match="stop_at_layer=9"):
        model("the cat", stop_at_layer=9)


@pytest.mark.parametrize("grad", [True, False])
def test_a_run_up_to_the_end_of_a_layer_caches_what_leaves_it(model, grad) -> None:
    with torch.set_grad_enabled(grad):
        stream, cache = model.run_with_cache("the cat sat", stop_at_layer=4)
        assert torch.equal(cache["resid_post", 3], stream)
        assert "ln_final.hook_normalized" not in cache
        stream, cache = model.run_with_cache("the cat sat", stop_at_layer=2, names_filter="blocks.*.hook_resid_post")
        assert torch.equal(cache["resid_post", 1], stream)


def test_starting_late(model) -> None:
    """The layers before that one are not run at all, nor is anybody's hook on them."""
    ran = []
    layers = model.module.transformer.h
    handles = [
        part.register_forward_hook(lambda *_, n=n: ran.append(n))
        for n in range(4)
        for part in (layers[n], layers[n].mlp)
    ]
    ids = model.to_tokens("the cat sat")
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids)
        for layer in (0, 1, 3, -1):
            ran.clear()
            assert torch.equal(model(cache["resid_pre", layer], start_at_layer=layer), logits)
            assert set(ran) == set(range(layer % 4, 4))
        assert torch.equal(model(cache["resid_post", 3], start_at_layer=4), logits)
        assert torch.equal(model(cache["resid_pre", 2][0], start_at_layer=2), logits)
        stream = model(cache["resid_pre", 1], start_at_layer=1, stop_at_layer=3)
        assert torch.equal(stream, cache["resid_pre", 3])
        ran.clear()
        late, again = model.run_with_cache(cache["resid_pre", 2] * 2, start_at_layer=2)
        assert set(ran) == {2, 3}
        assert "blocks.1.hook_resid_post" not in again
        assert "blocks.2.hook_resid_pre" in again
        doubled = model.run_with_hooks(ids, fwd_hooks=[("blocks.2.hook_resid_pre", lambda x: x * 2)])
        assert torch.allclose(late, doubled, atol=1e-6)
        loss = model(cache["resid_pre", 2], start_at_layer=2, tokens=ids, return_type="loss")
        assert torch.equal(loss, model(ids, return_type="loss"))
    for handle in handles:
        handle.remove()
    assert not any("_compiled_call_impl" in vars(layer) for layer in layers)


def test_starting_late_with_padding_and_gradients() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    ids, mask = tiny_models.inputs(model.module)["input_ids"], torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    stream = model(ids, attention_mask=mask, stop_at_layer=2).detach().requires_grad_()
    logits = model(stream, start_at_layer=2, attention_mask=mask)
    assert torch.equal(logits, model(ids, attention_mask=mask))
    _, cache = model.run_with_cache(
        ids, attention_mask=mask, names_filter="blocks.2.hook_resid_pre", incl_bwd=True, loss_fn=torch.sum
    )
    assert torch.allclose(
        torch.autograd.grad(logits.sum(), stream)[0], cache["blocks.2.hook_resid_pre_grad"], atol=1e-6
    )


def test_what_comes_before_the_start_cannot_be_hooked(model) -> None:
    stream = torch.randn(1, 3, 32)
    for name in ("hook_embed", "hook_pos_embed", "blocks.0.attn.hook_z", "transformer.h.1"):
        with pytest.raises(HooklineError, match="before layer 2"):
            model.run_with_hooks(stream, start_at_layer=2, fwd_hooks=[(name, torch.zeros_like)])
    for options, message in [
        ({"start_at_layer": 9}, "start_at_layer=9"),
        ({"start_at_layer": 2.0}, r"start_at_layer=2\.0"),
        ({"start_at_layer": 1, "stop_at_layer": "2"}, "stop_at_layer='2'"),
        ({"start_at_layer": 1, "return_type": "loss"}, "give tokens"),
        ({"start_at_layer": 1, "prepend_bos": True}, "start_at_layer"),
        ({"start_at_layer": 1, "decoder_input": "the"}, "start_at_layer"),
        ({"start_at_layer": 1, "attention_mask": torch.ones(1, 2)}, "attention_mask"),
    ]:
        with pytest.raises(HooklineError, match=message):
            model(stream, **options)
    with pytest.raises(HooklineError, match="stop_at_layer=1"):
        model(stream, start_at_layer=3, stop_at_layer=1)
    with pytest.raises(HooklineError, match="not 5"):
        model(5)
    with pytest.raises(HooklineError, match="102"):
        model.generate("the cat", max_new_tokens=100)
    with pytest.raises(HooklineError, match="width 32, not 5"):
        model(torch.randn(1, 3, 5), start_at_layer=1)


def test_another_thread_skips_nothing(model) -> None:
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits, stream = model(ids), model(ids, stop_at_layer=2)
        seen = []
        with ThreadPoolExecutor(1) as pool:
            hooks = [("blocks.2.hook_resid_pre", lambda _: seen.append(pool.submit(model, ids).result()))]
            late = model.run_with_hooks(stream, start_at_layer=2, fwd_hooks=hooks)
    assert torch.equal(seen[0].detach(), logits)
    assert torch.equal(late, logits)


def test_commands(model, tokenizer, tmp_path) -> None:
    model.module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    runner = CliRunner()
    listed = runner.invoke(app, ["points", str(tmp_path), "blocks.0.attn.*"])
    assert listed.exit_code == 0, listed.output
    assert "blocks.0.attn.hook_pattern" in listed.output
    proved = runner.invoke(app, ["verify", str(tmp_path)])
    assert proved.exit_code == 0, proved.output
    assert "0 failed" in proved.output


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, {"n_kv_heads": 2}),
        ("falcon", {"multi_query": True, "alibi": True}, {"n_kv_heads": 1, "positions": "alibi"}),
        ("mpt", {}, {"positions": "alibi"}),
        ("llama", {}, {"positions": "rotary", "n_kv_heads": 2}),
        ("gpt2", {}, {"positions": "added to the stream", "norm": "LayerNorm"}),
    ],
)
def test_cfg_says_what_is_there(kind, settings, expected) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind, **settings))
    assert {name: getattr(model.cfg, name) for name in expected} == expected
    tokens = model.example_tokens()
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=["k0", "blocks.0.mlp.hook_pre"])
    assert cache["k", 0].shape[2] == model.cfg.n_kv_heads
    assert cache["pre", 0].shape[2] == model.cfg.d_mlp


def test_a_block_by_its_number(model) -> None:
    with torch.no_grad():
        _, cache = model.run_with_cache("the cat sat", names_filter=[1, ("q", 2)])
        _, full = model.run_with_cache("the cat sat")
    for name in (1, "1", "resid_post1", ("resid_post", 1), "blocks.1.hook_resid_post"):
        assert torch.equal(cache[name], full["resid_post", 1])
    assert "q2" in cache
    for number in (9, "9", -9):
        with pytest.raises(hookline.UnknownPointError, match=r"Layers.*0 to 3"):
            model.run_with_cache("the cat sat", names_filter=number)


def test_token_ids_are_those_that_the_embedding_has() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    rows = model.cfg.d_vocab
    with pytest.raises(HooklineError, match=f"token {rows} "):
        model(torch.tensor([[3, rows]]))
    model.module.resize_token_embeddings(rows + 8, mean_resizing=False)
    assert model(torch.tensor([[3, rows + 7]])).shape == (1, 2, rows + 8)
    with pytest.raises(HooklineError, match=f"token {rows + 8} "):
        model(torch.tensor([[3, rows + 8]]))


def test_tokens_that_were_checked_are_checked_again_once_they_or_the_model_change() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    tokens = torch.tensor([[3, 4, 5, 6]])
    expected = model(tokens)
    assert torch.equal(model(tokens), expected)
    rows = model.module.get_input_embeddings().num_embeddings
    tokens[0, 1] = rows
    with pytest.raises(HooklineError, match="range"):
        model(tokens)
    tokens[0, 1] = rows - 1
    model(tokens)
    model.module.resize_token_embeddings(rows - 4, mean_resizing=False)
    with pytest.raises(HooklineError, match="range"):
        model(tokens)
    tokens[0, 1] = 4
    model(tokens)
    model.module.set_input_embeddings(torch.nn.Embedding(5, model.cfg.d_model))
    with pytest.raises(HooklineError, match="range"):
        model(tokens)


@pytest.mark.parametrize("shape", [(2, 2), (4,), (2, 4)])
def test_tokens_that_got_other_data_are_checked_again(shape) -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    tokens = torch.tensor([[3, 4, 5, 6]])
    hooks = [("blocks.0.hook_resid_post", lambda h: h * 2)]
    model.run_with_hooks(tokens, fwd_hooks=hooks)
    tokens.data = torch.arange(math.prod(shape)).view(shape)
    expected = model.run_with_hooks(tokens.clone(), fwd_hooks=hooks)
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=hooks), expected)


def test_the_same_tokens_again_have_the_same_positions(model) -> None:
    tokens = model.to_tokens("the cat sat on a mat")
    plain = model(tokens)
    for places in ([-1], [0, 1], [-1]):
        found = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", at(places, torch.zeros_like))])
        stream = model.cache(tokens, names_filter="blocks.0.hook_resid_post")["blocks.0.hook_resid_post"]
        stream[:, places] = 0
        assert torch.allclose(found, model(stream, start_at_layer=1), atol=1e-5)
        assert not torch.allclose(found, plain)


def test_the_loss_needs_all_logits(model) -> None:
    tokens = torch.tensor([[3, 4, 5]])
    for return_type in ("loss", "both"):
        with pytest.raises(HooklineError, match="logits_to_keep"):
            model(tokens, return_type=return_type, logits_to_keep=1)
    assert torch.equal(model(tokens, return_type="loss", logits_to_keep=0), model(tokens, return_type="loss"))


@pytest.mark.parametrize("option", [{"logits_to_keep": 1}, {"return_type": "loss"}, {"loss_per_token": True}])
def test_last_logits_takes_no_other_output(model, option) -> None:
    (name,) = option
    with pytest.raises(HooklineError, match=name):
        model.last_logits(torch.tensor([[3, 4, 5]]), **option)


def test_labels_and_what_is_returned(model) -> None:
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.equal(model(tokens, "logits", labels=tokens), model(tokens))
    assert torch.equal(model(tokens, return_type="logits", labels=tokens), model(tokens))
    assert torch.equal(model(tokens, labels=tokens)["loss"], model(tokens, return_type="loss", labels=tokens))


@pytest.mark.parametrize("head", [False, True])
def test_a_model_that_cannot_generate(head) -> None:
    model = hookline.hook(tiny_models.encoder("bert", head))
    with pytest.raises(HooklineError, match="generate"):
        model.generate(torch.tensor([[3, 4, 5]]))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda model: model.generate("the cat", max_new_token=3), "'max_new_tokens'"),
        (lambda model: model.run_with_cache("the cat", names_filter="resid_post"), "('resid_post', 0)"),
        (lambda model: model.run_with_cache("the cat", names_filter="hook_z"), "'blocks.*.attn.hook_z'"),
        (lambda model: model.blocks[1].attn.hook_zz, "'blocks.1.attn.hook_z'"),
        (lambda model: model.run_with_hooks("the cat", fwd_hooks=[("q0", lambda a, b, c: a)]), "hook(output)"),
        (lambda model: model.run_with_cache("the cat", pos_slice=hookline.token("mat")), "token('mat') in row 0 ("),
        (lambda model: hookline.edits.add(torch.ones(3), coef=2.0), "vector, coefficient, match_norm, pos, head"),
        (lambda model: patching.sweep(model, "the cat", "a dog", "logit_diff", pos=-1), "isel(pos=-1)"),
        (lambda model: metrics.prob("cat")(torch.zeros(1, 2, 10)), "model.to_single_token('cat')"),
        (lambda model: ablation.ablate(model, "the cat", metrics.prob(4)).normalized, "no corrupted run"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(model, wrong, named) -> None:
    with pytest.raises((HooklineError, AttributeError, TypeError)) as error:
        wrong(model)
    assert named in str(error.value)


def test_a_plan_counts_one_point(model) -> None:
    assert str(model.plan(names_filter="blocks.0.hook_resid_pre")).splitlines()[-1] == "1 point at 1 module"


def test_a_text_is_not_read_character_by_character(model) -> None:
    class Text(str):
        def __iter__(self):
            raise AssertionError("a prompt of 100,000 characters would take a quarter of a second in every call")

    assert torch.equal(model(Text("The capital")), model("The capital"))


def with_hooks_in_a_block(model, ids):
    with model.hooks(fwd_hooks=[("resid_post0", torch.zeros_like)]):
        return model(ids)


IN_COMPILED_CODE = {
    "run_with_cache": lambda model, ids: model.run_with_cache(ids)[1]["pattern", 1],
    "hooks": with_hooks_in_a_block,
    "stop_at_layer": lambda model, ids: model(ids, stop_at_layer=1),
    "generate": lambda model, ids: model.generate(ids, max_new_tokens=2, do_sample=False),
    "sweep": lambda model, ids: patching.sweep(model, ids, ids.flip(1), lambda logits: logits[:, -1, 3]).values,
}


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports
@pytest.mark.quick_for("run_with_cache", "hooks")
@pytest.mark.parametrize("name", IN_COMPILED_CODE)
def test_methods_can_be_called_from_code_that_is_being_compiled(model, name) -> None:
    call, ids = IN_COMPILED_CODE[name], torch.tensor([[3, 4, 5]])
    expected = call(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: call(model, ids + 0), backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(ids), expected)
    torch._dynamo.reset()


def test_public_attributes_are_read_only() -> None:
    model = hookline.load("tinyworld")
    assert model.index.find("z1").canonical_name == "blocks.1.attn.hook_z"
    assert len(model.anatomy.blocks) == model.cfg.n_layers
    assert model.device == model.module.device == model.cfg.device
    assert model.text.tokenizer is model.tokenizer
    for name in ("index", "anatomy", "device", "text"):
        with pytest.raises(AttributeError, match="no setter"):
            setattr(model, name, None)
    assert [point.name for point in hookline.hook(torch.nn.Linear(2, 2)).index.select("output")] == ["output"]

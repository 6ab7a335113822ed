"""What TransformerLens 3.5 does by default, where it could be done otherwise: facts asked of that library itself."""

import copy
import warnings

import numpy as np
import pytest
import torch
from tiny_models import causal_lm, nudged

from hookline.compat.transformer_lens import HookedTransformer, utils
from hookline.compat.transformer_lens.model_bridge import TransformerBridge
from hookline.errors import HooklineError, HooklineWarning

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own

TOKENS = torch.arange(3, 17).view(2, 7)


def made(kind: str) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(kind, hf_model=nudged(kind))


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("gpt2", hf_model=nudged("gpt2"))


@pytest.fixture(scope="module")
def tinyworld() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("tinyworld", device="cpu")


# Text


@pytest.mark.parametrize(
    ("kind", "in_transformer", "in_bridge"),
    [
        ("gpt2", True, True),
        ("llama", True, True),
        ("gpt_neo", True, True),
        ("gptj", True, True),
        ("opt", True, True),
        ("phi3", True, True),
        ("gpt_neox", False, False),
        ("bloom", False, False),
        ("phi", False, False),
        ("qwen2", False, False),
        ("qwen3", False, False),
        ("granite", True, False),
        ("smollm3", True, False),
    ],
)
def test_whether_text_begins_with_a_bos(kind, in_transformer, in_bridge) -> None:
    module = causal_lm(kind)
    own = HookedTransformer.from_pretrained_no_processing(kind, hf_model=module)
    assert own.cfg.default_prepend_bos is in_transformer
    assert TransformerBridge.boot_transformers(kind, hf_model=module).cfg.default_prepend_bos is in_bridge
    for given in (True, False):
        own = HookedTransformer.from_pretrained_no_processing(kind, hf_model=module, default_prepend_bos=given)
        assert own.cfg.default_prepend_bos is given


def test_tokens_follow_the_default(tinyworld) -> None:
    module = causal_lm("qwen2", vocab_size=tinyworld.cfg.d_vocab)
    qwen = HookedTransformer.from_pretrained_no_processing("qwen2", hf_model=module, tokenizer=tinyworld.tokenizer)
    text = "When Mary and John went"
    assert torch.equal(qwen.to_tokens(text), tinyworld.to_tokens(text, prepend_bos=False))
    assert torch.equal(qwen.to_tokens(text, prepend_bos=True), tinyworld.to_tokens(text))


# Configuration


def test_cfg_of_architectures() -> None:
    neo, j, bloom, qwen3 = (made(kind).cfg for kind in ("gpt_neo", "gptj", "bloom", "qwen3"))
    assert (neo.use_attn_scale, neo.attn_scale, neo.use_local_attn, neo.window_size) == (False, -1.0, True, 4)
    assert neo.attn_types == nudged("gpt_neo").config.attention_layers
    assert (j.rotary_adjacent_pairs, j.parallel_attn_mlp, j.use_attn_scale) == (True, True, True)
    assert (bloom.act_fn, bloom.n_ctx, bloom.post_embedding_ln) == ("gelu_fast", 2048, True)
    assert bloom.positional_embedding_type == "alibi"
    assert (qwen3.use_qk_norm, qwen3.final_rms, qwen3.gated_mlp) == (True, True, True)


def test_cfg_of_more_architectures() -> None:
    gemma, mixtral, phi3, llama = (made(kind).cfg for kind in ("gemma2", "mixtral", "phi3", "llama"))
    assert (gemma.use_local_attn, gemma.attn_scale) == (True, 4.0)
    assert set(gemma.attn_types) == {"local", "global"}
    assert gemma.use_normalization_before_and_after
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.gated_mlp) == (4, 2, True)
    assert phi3.gated_mlp
    assert not llama.use_qk_norm
    assert not llama.use_local_attn
    assert not llama.use_normalization_before_and_after


def test_dropout_of_a_model_in_training_mode_is_active_with_a_warning() -> None:
    """TransformerLens has no dropout, so a program written for it does not expect runs that differ."""
    with pytest.warns(HooklineWarning, match="dropout"):
        model = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=nudged("gpt2").train())
    assert not torch.equal(model(TOKENS), model(TOKENS))
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HooklineWarning)
        HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=nudged("gpt2").eval())


# Points


def test_blooms_embedding_is_normed() -> None:
    bloom = made("bloom")
    _, cache = bloom.run_with_cache(TOKENS)
    base = bloom.module.transformer
    assert torch.equal(cache["embed"], base.word_embeddings_layernorm(base.word_embeddings(TOKENS)))
    assert torch.equal(cache["embed"], cache["resid_pre", 0])
    assert torch.equal(bloom.embed(TOKENS), cache["embed"])
    _, labels = cache.decompose_resid(return_labels=True)
    assert "embed_other" not in labels
    edited = bloom.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", lambda x, hook: x * 0)], stop_at_layer=0)
    assert not edited.any()


def test_layers_may_be_integers_of_torch_and_numpy(model) -> None:
    _, cache = model.run_with_cache(TOKENS)
    for layer in (torch.tensor(1), np.int64(1), np.arange(3)[1], torch.arange(3)[1]):
        assert torch.equal(cache["attn", layer], cache["attn", 1])
        assert torch.equal(cache["scale", layer, "ln1"], cache["scale", 1, "ln1"])
        assert torch.equal(model.blocks[layer].attn.W_Q, model.blocks[1].attn.W_Q)
        assert utils.get_act_name("scale", layer, "ln1") == "blocks.1.ln1.hook_scale"
    with pytest.raises(KeyError):
        cache["attn", torch.tensor(1.5)]


FLAGGED = {
    "set_use_hook_mlp_in": "hook_mlp_in",
    "set_use_attn_result": "hook_result",
    "set_use_split_qkv_input": "hook_q_input",
    "set_use_attn_in": "hook_attn_in",
}


@pytest.mark.parametrize("setter", FLAGGED)
def test_filters_take_flagged_points_by_flag_or_by_name(setter) -> None:
    model, ending = made("gpt2"), FLAGGED[setter]
    for names_filter in (None, lambda name: True, lambda name: name.startswith("blocks.1.")):
        _, cache = model.run_with_cache(TOKENS, names_filter=names_filter)
        assert not [name for name in cache if name.endswith(ending)]
        getattr(model, setter)(True)
        _, cache = model.run_with_cache(TOKENS, names_filter=names_filter)
        assert [name for name in cache if name.endswith(ending)]
        getattr(model, setter)(False)
    name = next(name for name in model.hook_dict if name.endswith(ending))
    for names_filter in (name, [name], lambda each: each == name):
        assert [*model.run_with_cache(TOKENS, names_filter=names_filter)[1]] == [name]


def test_filters_do_not_reach_points_that_are_hooklines_own(model) -> None:
    _, cache = model.run_with_cache(TOKENS, names_filter=lambda name: "ln_final" in name)
    assert [*cache] == ["ln_final.hook_scale", "ln_final.hook_normalized"]
    _, cache = model.run_with_cache(TOKENS, names_filter=lambda name: "mlp" in name and name.startswith("blocks.0."))
    assert [*cache] == ["blocks.0.mlp.hook_pre", "blocks.0.mlp.hook_post", "blocks.0.hook_mlp_out"]
    seen = []
    model.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: "mlp" in name, lambda x, hook: seen.append(hook.name))])
    assert len(seen) == 3 * model.cfg.n_layers


# Parts of the stream


def test_batch_slices_take_rows_of_the_stack(model) -> None:
    _, cache = model.run_with_cache(TOKENS)
    stack = cache.decompose_resid(pos_slice=-1)
    whole = cache.apply_ln_to_stack(stack, pos_slice=-1)
    attrs = cache.logit_attrs(stack, TOKENS[:, -1], pos_slice=-1)
    for rows in ([1], (0, 1), slice(1, 2), [1, 0], 1):
        where = slice(*rows) if isinstance(rows, tuple) else rows
        options = {"pos_slice": -1, "batch_slice": rows}
        torch.testing.assert_close(cache.apply_ln_to_stack(stack, **options), whole[:, where])
        torch.testing.assert_close(cache.logit_attrs(stack, TOKENS[where, -1], **options), attrs[:, where])
    of_row = cache.apply_ln_to_stack(stack[:, 1], pos_slice=-1, batch_slice=1, has_batch_dim=False)
    torch.testing.assert_close(of_row, whole[:, 1])
    with pytest.raises(HooklineError, match="2 rows"):
        cache.apply_ln_to_stack(stack[:, [1]], pos_slice=-1, batch_slice=[1])


# Hooks


def test_a_reset_removes_the_hooks_of_open_contexts(model) -> None:
    clean = model(TOKENS)
    with model.hooks([("blocks.0.hook_attn_out", lambda x, hook: x * 0)]):
        with model.hooks([("blocks.1.hook_attn_out", lambda x, hook: x * 0)]):
            model.reset_hooks(direction="bwd")
            assert not torch.equal(model(TOKENS), clean)
            model.reset_hooks()
            assert torch.equal(model(TOKENS), clean)
        assert torch.equal(model(TOKENS), clean)
        model.add_hook("blocks.2.hook_attn_out", lambda x, hook: x * 0, is_permanent=True)
        model.reset_hooks()
        assert not torch.equal(model(TOKENS), clean)
    model.reset_hooks(including_permanent=True)


def test_a_points_hooks_are_those_of_open_contexts_too(model) -> None:
    point, other = model.hook_dict["blocks.0.hook_attn_out"], model.hook_dict["blocks.1.hook_attn_out"]

    def first(x, hook):
        return x * 0

    def second(x, hook):
        return None

    clean = model(TOKENS)
    model.add_hook("blocks.0.hook_attn_out", second)
    with model.hooks([("blocks.0.hook_attn_out", first)], [("blocks.0.hook_attn_out", second)]):
        assert [each.user_hook for each in point.fwd_hooks] == [second, first]
        assert [each.user_hook for each in point.bwd_hooks] == [second]
        listed = model.list_hooks("blocks.0.hook_attn_out", "fwd")
        assert listed == {"blocks.0.hook_attn_out": point.fwd_hooks}
        assert point.has_hooks()
        assert not other.has_hooks()
        point.remove_hooks("fwd")
        assert point.fwd_hooks == []
        assert [each.user_hook for each in point.bwd_hooks] == [second]
        assert torch.equal(model(TOKENS), clean)
    assert not point.has_hooks()


def test_hooks_that_a_context_leaves_go_with_the_next_of_its_level(model) -> None:
    clean, name = model(TOKENS), "blocks.0.hook_attn_out"
    left = {"fwd_hooks": [(name, lambda x, hook: x * 0)], "reset_hooks_end": False}
    model.run_with_hooks(TOKENS, **left)
    assert not torch.equal(model(TOKENS), clean)
    with model.hooks():
        model.run_with_hooks(TOKENS, fwd_hooks=[])  # a level deeper
        assert not torch.equal(model(TOKENS), clean)
    assert torch.equal(model(TOKENS), clean)
    for ends in (
        lambda: model.run_with_hooks(TOKENS),
        lambda: model.run_with_cache(TOKENS, names_filter=name),
    ):
        model.run_with_hooks(TOKENS, **left)
        model.run_with_hooks(TOKENS, reset_hooks_end=False)
        assert model.hook_dict[name].has_hooks()
        ends()
        assert not model.hook_dict[name].has_hooks()
    with model.hooks():
        model.run_with_hooks(TOKENS, **left)
    assert model.hook_dict[name].has_hooks()  # of level 2, which ended before
    model.reset_hooks()


class MyError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number


@pytest.mark.parametrize("copied", [False, True])
def test_an_exception_of_a_hook_is_caught_as_itself(model, copied) -> None:
    model, error = copy.deepcopy(model) if copied else model, MyError(3)

    def fail(x, hook):
        raise error

    for run in (
        lambda: model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", fail)]),
        lambda: model.run_with_cache(TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", fail)]),
        lambda: model.generate(TOKENS, 2, stop_at_eos=False, verbose=False),
        lambda: model(TOKENS),
    ):
        with pytest.raises(MyError) as caught, model.hooks([("blocks.0.attn.hook_pattern", fail)]):
            run()
        assert caught.value is error
        assert "blocks.0.attn.hook_pattern" in error.__notes__[-1]
    with pytest.raises(MyError), model.hooks(bwd_hooks=[("blocks.1.hook_resid_pre", fail)]):
        model(TOKENS, return_type="loss").backward()
    assert model(TOKENS).isfinite().all()


def test_contexts_are_cleared_where_points_are_taken_from_hook_dict(model) -> None:
    for clear in (model.reset_hooks, model.clear_contexts):
        for name in ("blocks.0.hook_resid_pre", "blocks.0.attn.hook_pattern", "ln_final.hook_scale"):
            model.hook_dict[name].ctx["x"] = 1
            clear()
            assert model.hook_dict[name].ctx == {}
    model.reset_hooks(clear_contexts=False)


def test_contexts_are_cleared_only_when_hooks_are_reset(model) -> None:
    point = model.hook_dict["blocks.0.hook_resid_pre"]
    hooks = [("blocks.0.hook_resid_pre", lambda x, hook: hook.ctx.update(seen=True))]
    for resets in (False, True):
        model.run_with_hooks(TOKENS, fwd_hooks=hooks, clear_contexts=True, reset_hooks_end=resets)
        assert bool(point.ctx) is not resets
    assert not point.has_hooks()


# Generation


def test_generation_gives_logits(tinyworld) -> None:
    tokens = tinyworld.to_tokens("When Mary and John went to the")
    greedy = {"do_sample": False, "verbose": False}
    new = tinyworld.generate(tokens, 3, **greedy)
    for return_type in ("input", "str", "tokens"):
        found = tinyworld.generate(tokens, 3, output_logits=True, return_type=return_type, **greedy)
        assert torch.equal(found.sequences, new)
        assert [step.shape for step in found.logits] == [(1, tinyworld.cfg.d_vocab)] * 3
    by_hand = tinyworld(new)[:, tokens.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(found.logits, 1), by_hand, atol=1e-4, rtol=1e-4)
    text = "When Mary and John went to the"
    assert torch.equal(tinyworld.generate(text, 3, output_logits=True, **greedy).sequences, new)
    # As in TransformerLens, this alone changes nothing.
    assert torch.equal(tinyworld.generate(tokens, 3, return_dict_in_generate=True, **greedy), new)
    assert isinstance(tinyworld.generate(text, 3, return_dict_in_generate=True, **greedy), str)
    with pytest.warns(UserWarning, match="output_hidden_states"):
        assert torch.equal(tinyworld.generate(tokens, 3, output_hidden_states=True, **greedy), new)

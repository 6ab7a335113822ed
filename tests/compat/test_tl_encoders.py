"""BERT and T5 by TransformerLens's names; `peers/parity_encoders.py` compares the numbers with TransformerLens."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, T5Config, T5ForConditionalGeneration

from hookline import HooklineError
from hookline.compat.transformer_lens import (
    BertNextSentencePrediction,
    FactoredMatrix,
    HookedEncoder,
    HookedEncoderDecoder,
    HookedTransformerConfig,
)

TOKENS = torch.tensor([[5, 9, 31, 7, 7, 44], [3, 9, 12, 40, 2, 6]])
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
BERT = {"vocab_size": 70, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture
def bert() -> HookedEncoder:
    torch.manual_seed(0)
    return HookedEncoder.from_pretrained("bert", hf_model=BertForPreTraining(BertConfig(**BERT)).eval(), device="cpu")


@pytest.fixture
def t5() -> HookedEncoderDecoder:
    torch.manual_seed(0)
    config = T5Config(vocab_size=70, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return HookedEncoderDecoder.from_pretrained("t5", hf_model=T5ForConditionalGeneration(config).eval(), device="cpu")


def test_bert_returns_what_transformers_does(bert) -> None:
    own = bert.module(TOKENS, token_type_ids=TYPES, attention_mask=MASK)
    assert torch.equal(bert(TOKENS, "logits", TYPES, MASK), own.prediction_logits)
    assert bert(TOKENS, return_type=None) is None
    hidden = bert.module.bert(TOKENS, token_type_ids=TYPES, attention_mask=MASK).last_hidden_state
    assert torch.equal(bert.encoder_output(TOKENS, TYPES, MASK), hidden)
    assert torch.equal(bert.unembed(bert.mlm_head(hidden)), own.prediction_logits)
    assert torch.equal(bert.nsp_head(bert.pooler(hidden)), own.seq_relationship_logits)
    with pytest.raises(HooklineError, match="return_type"):
        bert(TOKENS, "loss")


def test_weights_of_bert_are_where_transformer_lens_has_them(bert) -> None:
    embeddings = bert.module.bert.embeddings
    assert bert.embed.embed.W_E is bert.W_E is embeddings.word_embeddings.weight
    assert bert.embed.pos_embed.W_pos is bert.W_pos is embeddings.position_embeddings.weight
    assert bert.embed.token_type_embed.W_token_type is embeddings.token_type_embeddings.weight
    assert bert.embed.ln is embeddings.LayerNorm
    assert torch.equal(bert.unembed.W_U, bert.W_U)
    assert bert.unembed.b_U is bert.b_U
    assert torch.equal(bert.embed(TOKENS), embeddings(TOKENS))
    assert isinstance(bert.QK, FactoredMatrix)
    assert isinstance(bert.OV[0], FactoredMatrix)


def test_points_of_bert_are_those_of_transformer_lens(bert) -> None:
    _, cache = bert.run_with_cache(TOKENS, token_type_ids=TYPES)
    block = bert.module.bert.encoder.layer[1]
    before = cache["blocks.1.hook_resid_pre"]
    assert torch.allclose(cache["blocks.1.hook_resid_mid"], before + cache["blocks.1.hook_attn_out"], atol=1e-6)
    middle = block.attention.output.LayerNorm(cache["blocks.1.hook_resid_mid"])
    assert torch.allclose(cache["blocks.1.hook_resid_post"], middle + cache["blocks.1.hook_mlp_out"], atol=1e-6)
    after = block.output.LayerNorm(cache["blocks.1.hook_resid_post"])
    assert torch.allclose(cache["blocks.1.hook_normalized_resid_post"], after, atol=1e-6)
    assert torch.equal(cache["encoder.1.hook_resid_post"], cache["blocks.1.hook_normalized_resid_post"]), "hookline's"
    parts = ("embed.hook_embed", "embed.hook_pos_embed", "embed.hook_token_type_embed")
    embedded = bert.module.bert.embeddings.LayerNorm(sum(cache[name] for name in parts))
    assert torch.allclose(cache["hook_full_embed"], embedded, atol=1e-6)
    assert torch.equal(cache["hook_full_embed"], cache["resid_pre", 0])
    assert cache["q", 1].shape == (2, 6, 4, 8)
    assert set(cache) <= set(bert.hook_dict)
    assert not [name for name in bert.hook_dict if name.startswith("encoder.")]
    assert "blocks.0.hook_mlp_in" not in list(cache), "TransformerLens has it with a flag"
    with pytest.raises(HooklineError):
        cache.decompose_resid()


def test_edits_of_bert_take_effect_once(bert) -> None:
    plain, fired = bert(TOKENS), []

    def shift(x, hook):
        fired.append(hook.name)
        return x + torch.arange(1, x.shape[-1] + 1)  # norms undo a factor, but not this

    names = [
        "blocks.0.hook_resid_mid",
        "blocks.1.hook_resid_post",
        "embed.hook_token_type_embed",
        "embed.ln.hook_scale",
    ]
    for name in names:
        assert not torch.allclose(bert.run_with_hooks(TOKENS, fwd_hooks=[(name, shift)]), plain), name
    assert fired == names
    assert torch.equal(bert(TOKENS), plain)


def test_next_sentence_prediction(bert) -> None:
    nsp = BertNextSentencePrediction(bert)
    own = bert.module(TOKENS, token_type_ids=TYPES, attention_mask=MASK).seq_relationship_logits
    inputs = {"token_type_ids": TYPES, "one_zero_attention_mask": MASK}
    assert torch.equal(nsp(TOKENS, **inputs), own)
    output, cache = nsp.run_with_cache(TOKENS, **inputs)
    assert torch.equal(output, own)
    assert torch.equal(cache["nsp_head.hook_nsp_out"], own)
    assert cache["pooler.hook_pooler_out"].shape == (2, 32)
    assert "sequential" in nsp(TOKENS[:1], "predictions", TYPES[:1])
    with bert.hooks([("nsp_head.hook_nsp_out", lambda x, hook: x * 0)]):
        assert not nsp(TOKENS, **inputs).any()
    with pytest.raises(HooklineError, match="token_type_ids"):
        nsp(TOKENS)
    with pytest.raises(HooklineError, match="two sentences"):
        nsp(["one"])


def test_models_that_do_not_fit_are_refused(t5) -> None:
    masked = HookedEncoder.from_pretrained("bert", hf_model=BertForMaskedLM(BertConfig(**BERT)).eval(), device="cpu")
    assert torch.equal(masked(TOKENS), masked.module(TOKENS).logits)
    with pytest.raises(AttributeError, match="BertForPreTraining"):
        BertNextSentencePrediction(masked)(TOKENS, token_type_ids=TYPES)
    with pytest.raises(HooklineError, match=r"HookedEncoder.*Bert"):
        HookedEncoder.from_pretrained("t5", hf_model=t5.module)
    with pytest.raises(HooklineError, match="T5ForConditionalGeneration"):
        HookedEncoderDecoder.from_pretrained("bert", hf_model=masked.module)
    with pytest.raises(HooklineError, match="quantization_config"):
        HookedEncoder.from_pretrained("bert", hf_model=masked.module, load_in_4bit=True)


def test_new_encoders() -> None:
    fields = {"d_model": 32, "d_head": 8, "n_layers": 2, "n_ctx": 10, "d_mlp": 48, "d_vocab": 70, "device": "cpu"}
    bert = HookedEncoder(HookedTransformerConfig(act_fn="gelu", **fields))
    assert bert(TOKENS).shape == (2, 6, 70)
    assert bert.W_Q.shape == (2, 4, 32, 8)
    assert bert.W_E_pos.shape == (80, 32)
    t5 = HookedEncoderDecoder(HookedTransformerConfig(act_fn="relu", **fields))
    assert t5(TOKENS, TOKENS[:, :2]).shape == (2, 2, 70)
    with pytest.raises(AssertionError, match="d_vocab"):
        HookedEncoder(HookedTransformerConfig(act_fn="gelu", **(fields | {"d_vocab": -1})))
    with pytest.raises(HooklineError, match="from_pretrained"):
        HookedEncoder("bert-base-cased")


def test_t5_returns_what_transformers_does(t5) -> None:
    own = t5.module(TOKENS, attention_mask=MASK, decoder_input_ids=TOKENS[:, :4]).logits
    logits, cache = t5.run_with_cache(TOKENS, TOKENS[:, :4], one_zero_attention_mask=MASK)
    assert torch.equal(logits, own)
    assert cache["hook_embed"].shape == (2, 6, 32)
    assert cache["decoder.0.cross_attn.hook_pattern"].shape == (2, 4, 4, 6)
    crossed = cache["decoder.1.hook_resid_mid"] + cache["decoder.1.hook_cross_attn_out"]
    assert torch.allclose(cache["decoder.1.hook_resid_mid_cross"], crossed, atol=1e-6)
    scale = (cache["decoder.1.hook_resid_mid"] ** 2).mean(-1, keepdim=True) + 1e-6
    assert torch.allclose(cache["decoder.1.ln2.hook_scale"], scale.sqrt(), atol=1e-6), "the norm before cross-attention"
    scale = (cache["decoder.1.hook_resid_mid_cross"] ** 2).mean(-1, keepdim=True) + 1e-6
    assert torch.allclose(cache["decoder.1.ln3.hook_scale"], scale.sqrt(), atol=1e-6)
    assert {"encoder_final_ln.hook_scale", "decoder_final_ln.hook_normalized"} <= set(cache)
    assert t5.W_Q.shape == (4, 4, 32, 8)
    attention = t5.module.encoder.block[0].layer[0].SelfAttention
    assert torch.equal(t5.W_Q[0], attention.q.weight.T.unflatten(1, (4, 8)).movedim(1, 0)), "the encoder first"
    assert t5.all_head_labels()[::8] == ["EL0H0", "DL0H0"]
    with pytest.raises(HooklineError, match="decoder_input"):
        t5(TOKENS)


def test_t5_generates(t5) -> None:
    own = t5.module.generate(TOKENS, attention_mask=MASK, max_new_tokens=4, do_sample=False, min_new_tokens=4)
    fired = []
    with t5.hooks([("decoder.0.hook_resid_pre", lambda x, hook: fired.append(x.shape[1]))]):
        new = t5.generate(TOKENS, MASK, max_new_tokens=4, do_sample=False, stop_at_eos=False)
    assert torch.equal(new, own)
    assert fired == [1, 1, 1, 1]

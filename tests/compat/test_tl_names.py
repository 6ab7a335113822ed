"""Every public name of TransformerLens in the table of docs/from-transformerlens.md, and its tools."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from hookline.compat.transformer_lens.tools.analysis import direct_logit_attribution
from tiny_models import nudged

from hookline import HooklineError, hook
from hookline.compat.transformer_lens import HookedTransformer, SVDInterpreter, TransformerBridge, evals, head_detector
from hookline.compat.transformer_lens._impl.absent import METHODS, AbsentNameError
from hookline.compat.transformer_lens._impl.hooked_transformer import NOT_HERE
from hookline.compat.transformer_lens.train import HookedTransformerTrainConfig, train
from hookline.compat.transformer_lens.utils import get_nested_attr, init_kaiming_uniform_, set_nested_attr
from hookline.weights.matrices import Weights

PAGE = Path(__file__).parents[2] / "docs" / "from-transformerlens.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().partition("<!-- names: begin -->")[2].splitlines()
    if line.startswith("| `transformer_lens") and "and below" not in line
]
TOKENS = torch.arange(3, 17).view(2, 7)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("gpt2", hf_model=nudged("gpt2"))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_names_are_where_the_page_says(row) -> None:
    path, here = row[0].strip("`"), re.findall(r"`([\w.]+)`", row[1])
    module = importlib.import_module(f"hookline.compat.{path}")
    owner = None
    for name in here:
        if name.startswith("."):
            has_it = hasattr(owner, name[1:]) or name[1:] in Weights.names()
            assert has_it or name[1:] in owner.__annotations__, f"{owner.__name__}{name}"
        else:
            owner = getattr(module, name)
    for names, reason in re.findall(r"((?:`[\w.]+`(?:, )?)+): ([^;|]+)", row[2] if len(row) > 2 else ""):
        assert len(reason) > 5
        for name in re.findall(r"`([\w.]+)`", names):
            if name.startswith("."):
                assert any(name[1:] in known for known in (NOT_HERE, *METHODS.values()))
            elif path != "transformer_lens.components":
                with pytest.raises((AbsentNameError, AttributeError)):
                    getattr(module, name)


def test_the_table_is_there() -> None:
    assert len(ROWS) > 30


# Bridge names


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_inputs_and_outputs_of_modules_by_bridge_names(kind) -> None:
    model = hook(nudged(kind))
    block, parts = model.anatomy.blocks[1], {"ln1": "ln1", "ln2": "ln2", "attn.o": "o", "mlp.out": "mlp_out"}
    names = {f"blocks.1.{part}.hook_{side}": (part, side) for part in parts for side in ("in", "out")}
    _, cache = model.run_with_cache(TOKENS, names_filter=[*names, "blocks.1.attn.hook_z", "unembed.hook_out"])
    assert torch.equal(cache["blocks.1.attn.o.hook_in"], cache["blocks.1.attn.hook_z"])
    assert torch.equal(block.ln1(cache["blocks.1.ln1.hook_in"]), cache["blocks.1.ln1.hook_out"])
    assert torch.equal(block.mlp_out(cache["blocks.1.mlp.out.hook_in"]), cache["blocks.1.mlp.out.hook_out"])
    assert torch.equal(cache["hook_unembed"], cache["unembed.hook_out"])
    for name in ("blocks.9.ln1.hook_out", "blocks.1.attn.x.hook_out"):
        with pytest.raises(HooklineError):
            model.point(name)


def test_both_branches_of_a_gated_mlp_by_bridge_names() -> None:
    model = hook(nudged("llama"))
    mlp = model.module.model.layers[0].mlp
    assert model.point("blocks.0.mlp.gate.hook_out").site.module is mlp.gate_proj
    assert model.point("blocks.0.mlp.in.hook_out").site.module is mlp.up_proj
    assert hook(nudged("gpt2")).point("blocks.0.mlp.in.hook_out").canonical_name == "blocks.0.mlp.hook_pre"


def test_methods_of_a_bridge() -> None:
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=nudged("gpt2"))
    assert torch.equal(bridge.tl_parameters()["blocks.0.attn.W_Q"], bridge.W_Q[0])
    assert dict(bridge.tl_named_parameters()).keys() == bridge.get_params().keys()
    assert bridge.get_hook_point("blocks.0.attn.q.hook_out").canonical_name == "blocks.0.attn.hook_q"
    assert bridge.get_hook_point("nothing") is None
    with pytest.raises(AttributeError, match="all_head_labels"):
        bridge.attn_head_labels


# Ungrouped keys and values


def test_ungrouped_heads_have_their_own_keys_and_values() -> None:
    model = HookedTransformer.from_pretrained_no_processing("llama", hf_model=nudged("llama"))
    plain, weights = model(TOKENS), model.W_K
    parameters = list(model.module.parameters())
    model.set_ungroup_grouped_query_attention(True)
    logits, cache = model.run_with_cache(TOKENS)
    assert torch.allclose(logits, plain, atol=1e-5)
    assert cache["k", 0].shape[2] == cache["v", 0].shape[2] == model.cfg.n_heads
    assert torch.equal(model.W_K, weights)

    def zero(x, hook):
        x[:, :, 1] = 0
        return x

    heads = model.run_with_cache(TOKENS)[1]["z", 0]
    with model.hooks([("blocks.0.attn.hook_v", zero)]):
        edited = model.run_with_cache(TOKENS)[1]["z", 0]
    changed = (edited - heads).abs().amax((0, 1, 3))
    assert changed[1] > 1e-3
    assert not changed[[index for index in range(model.cfg.n_heads) if index != 1]].any(), "only that head"
    model.set_ungroup_grouped_query_attention(False)
    assert torch.equal(model(TOKENS), plain)
    assert all(one is other for one, other in zip(model.module.parameters(), parameters, strict=True))


def test_trained_copies_are_not_joined_again() -> None:
    model = HookedTransformer.from_pretrained_no_processing("llama", hf_model=nudged("llama"))
    model.set_ungroup_grouped_query_attention(True)
    model.module.model.layers[0].self_attn.k_proj.weight.data[0] += 1
    with pytest.raises(HooklineError, match="joined"):
        model.set_ungroup_grouped_query_attention(False)


# Tools


def test_singular_vectors(model) -> None:
    found = SVDInterpreter(model).get_singular_vectors("OV", layer_index=1, num_vectors=3, head_index=2)
    assert found.shape == (model.cfg.d_vocab, 1, 3)
    vectors = torch.linalg.svd(model.W_V[1, 2] @ model.W_O[1, 2])[2][:3]
    assert torch.allclose(found[:, 0].T.abs(), (vectors @ model.W_U).abs(), atol=1e-4)
    for options in ({"layer_index": 1}, {"layer_index": 9, "head_index": 0}, {"layer_index": 0, "head_index": 99}):
        with pytest.raises(AssertionError):
            SVDInterpreter(model).get_singular_vectors("OV", **options)
    with pytest.raises(ValueError, match="vector_type"):
        SVDInterpreter(model).get_singular_vectors("QK", 0)


def test_head_scores() -> None:
    attention = torch.eye(4).roll(1, 0).tril()
    attention[0, 0] = 1.0
    tokens = torch.tensor([[1, 2, 1, 2]])
    pattern = head_detector.get_previous_token_head_detection_pattern(tokens)
    options = {"exclude_bos": False, "exclude_current_token": False}
    score = head_detector.compute_head_attention_similarity_score
    assert score(attention, pattern, error_measure="mul", **options) == pytest.approx(0.75)
    assert score(attention, pattern, error_measure="abs", **options) == pytest.approx(0.75)
    assert head_detector.get_duplicate_token_head_detection_pattern(tokens).nonzero().tolist() == [[2, 0], [3, 1]]
    assert head_detector.get_induction_head_detection_pattern(tokens).nonzero().tolist() == [[2, 1], [3, 2]]
    with pytest.raises(AssertionError, match="not square"):
        score(attention[:2], pattern, error_measure="mul", **options)


def test_detecting_heads() -> None:
    model = HookedTransformer.from_pretrained("tinyworld", device="cpu")
    text = "The capital of France is Paris. The capital of France is"
    scores = head_detector.detect_head(model, text, "induction_head", heads=[(0, 1)])
    assert scores.shape == (model.cfg.n_layers, model.cfg.n_heads)
    assert (scores == -1).sum() == scores.numel() - 1
    both = head_detector.detect_head(model, [text, text], "induction_head", heads={0: [1]})
    assert torch.allclose(both, scores)
    with pytest.raises(AssertionError, match="lower triangular"):
        head_detector.detect_head(model, text, torch.ones(3, 3))


def test_evaluations() -> None:
    model = HookedTransformer.from_pretrained("tinyworld", device="cpu")
    loader = [{"tokens": model.to_tokens("The capital of France is Paris")}] * 3
    loss = model(loader[0]["tokens"], return_type="loss").item()
    assert evals.evaluate_on_dataset(model, loader) == pytest.approx(loss)
    assert evals.sanity_check(model).ndim == 0
    data = evals.IOIDataset(model.tokenizer, num_samples=6, symmetric=True, seed=1)
    assert len(data) == 6
    assert {*data.samples[0]} == {"text", "IO", "S"}
    found = evals.ioi_eval(model, data, batch_size=4)
    assert {*found} == {"Logit Difference", "Accuracy"}
    assert 0 <= found["Accuracy"] <= 1
    assert evals.induction_loss(model, subseq_len=8).ndim == 0


def test_direct_logit_attribution_sums_to_the_logit(model) -> None:
    found = direct_logit_attribution(model, TOKENS, torch.tensor([4, 5]))
    logits = model(TOKENS)[[0, 1], -1, [4, 5]] - model.b_U[[4, 5]]
    assert torch.allclose(found.attribution.sum(0), logits, atol=1e-4)
    assert len(found.top(2)) == 2
    with pytest.raises(ValueError, match="unit"):
        direct_logit_attribution(model, TOKENS, 4, unit="neuron")


def test_training_lowers_the_loss() -> None:
    model = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=nudged("gpt2"))
    before = model(TOKENS, return_type="loss").item()
    rows = [{"tokens": row} for row in TOKENS]
    train(model, HookedTransformerTrainConfig(num_epochs=20, batch_size=2, lr=1e-2, print_every=None), rows)
    model.module.eval()
    assert model(TOKENS, return_type="loss").item() < before / 2
    with pytest.raises(ValueError, match="optimizer_name"):
        train(model, HookedTransformerTrainConfig(1, 2, optimizer_name="Lion"), rows)


def test_small_functions(model) -> None:
    owner = torch.nn.Sequential(torch.nn.Linear(2, 3))
    set_nested_attr(owner, "0.note", 5)
    assert get_nested_attr(owner, "0.note") == 5
    drawn = init_kaiming_uniform_(torch.empty(4, 100, 50))
    assert float(drawn.std()) == pytest.approx((2 / 100) ** 0.5, rel=0.05)
    with pytest.raises(HooklineError, match="device_map"):
        HookedTransformer.from_pretrained("gpt2", hf_model=model.module, n_devices=2)

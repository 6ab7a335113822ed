"""Weights in the classic layout: they give what the points show."""

from copy import deepcopy

import accelerate
import pytest
import tiny_models
import torch

import hookline
from hookline import HooklineError
from hookline.weights.read_only import ReadOnlyTensor, read_only

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
KINDS = [
    "gpt2",
    "llama",
    "gpt_neox",
    "bloom",
    "phi",
    "phi3",
    "falcon",
    "opt",
    "gemma2",
    "qwen2",
    "gptj",
    "codegen",
    "mpt",
]


def wrapped(kind):
    module = tiny_models.nudged(kind)
    return hookline.hook(module), tiny_models.inputs(module)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_attention_give_its_points(kind) -> None:
    model, inputs = wrapped(kind)
    parts = ["attn.hook_in", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z"]
    names = [f"blocks.{layer}.{part}" for layer in range(model.cfg.n_layers) for part in parts]
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, names_filter=[*names, "blocks.*.attn.hook_result"])
        weights = {part: (getattr(model, f"W_{part}"), getattr(model, f"b_{part}")) for part in "QKVO"}
    for layer in range(model.cfg.n_layers):
        for part in "QKV":
            w, b = weights[part][0][layer], weights[part][1][layer]
            projected = torch.einsum("bpd,hde->bphe", cache[f"blocks.{layer}.attn.hook_in"], w) + b
            assert torch.allclose(projected, cache[part.lower(), layer], atol=1e-4)
        result = torch.einsum("bphe,hed->bphd", cache["z", layer], weights["O"][0][layer])
        assert torch.allclose(result, cache["result", layer], atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "gemma2", "opt"])
def test_weights_of_mlps_and_of_both_ends(kind) -> None:
    model, inputs = wrapped(kind)
    with torch.no_grad():
        _, cache = model.run_with_cache(
            **inputs, names_filter=[name for name in model.hook_dict if "mlp" in name or "embed" in name]
        )
        w_in, b_in, w_out, b_out = model.W_in, model.b_in, model.W_out, model.b_out
        for layer in range(model.cfg.n_layers):
            into, out = cache[f"blocks.{layer}.mlp.hook_in"] if kind != "opt" else None, cache["mlp_out", layer]
            if into is not None:
                gated = f"blocks.{layer}.mlp.hook_pre_linear" in cache
                seen = cache["pre_linear" if gated else "pre", layer]
                assert torch.allclose(into @ w_in[layer] + b_in[layer], seen, atol=1e-4)
                if gated:
                    assert torch.allclose(into @ model.W_gate[layer], cache["pre", layer], atol=1e-4)
            if kind != "gemma2":  # a norm comes after
                assert torch.allclose(cache["post", layer] @ w_out[layer] + b_out[layer], out, atol=1e-4)
        assert torch.allclose(cache["unembed.hook_in"] @ model.W_U + model.b_U, cache["unembed.hook_out"], atol=1e-4)
        if kind == "gpt2":
            assert torch.equal(model.W_E[inputs["input_ids"]], cache["embed"])
            assert torch.equal(model.W_pos[:7].expand(2, -1, -1), cache["pos_embed"].expand(2, -1, -1))
        if kind == "opt":  # its positions begin at an offset
            assert torch.equal(model.W_pos[:7], cache["pos_embed"][0])


def test_weights_are_the_models_own() -> None:
    model, _ = wrapped("gpt2")
    view = model.blocks[1].attn.W_Q
    assert view.data_ptr() == model.module.transformer.h[1].attn.c_attn.weight.data_ptr()
    assert torch.equal(model.W_Q[1], view)
    assert model.blocks[2].mlp.W_in.shape == (model.cfg.d_model, model.cfg.d_mlp)


@pytest.mark.quick_for("gpt2", "llama", "bloom")
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "bloom", "phi3", "opt", "llama", "qwen2", "gptj"])
def test_writing_into_a_weight_changes_the_model_or_is_refused(kind) -> None:
    names = [f"{kind}_{part}" for part in "QKVO" for kind in "Wb"]
    for name in names:
        model, inputs = wrapped(kind)
        before = model(**inputs)
        target = getattr(model.blocks[0].attn, name)
        if isinstance(target, ReadOnlyTensor):
            assert target.eq(0).all(), f"{kind} {name} should be a view"
            with pytest.raises(HooklineError, match=f"no {name}"):
                target.data[:] = 1
            continue
        with torch.no_grad():
            target.copy_(torch.randn(target.shape))
        is_moot = name == "b_K"  # it adds the same to all scores of a query, unless keys are turned
        assert is_moot or not torch.equal(model(**inputs), before), f"{kind} {name}"


def test_weights_of_the_whole_model_are_plain_copies() -> None:
    model, _ = wrapped("llama")
    assert type(model.W_K) is type(model.b_Q) is torch.Tensor
    model.b_Q.data.fill_(1)
    assert model.b_Q.eq(0).all()


@torch.no_grad()
def test_both_embeddings_labels_and_directions() -> None:
    model, _ = wrapped("gpt2")
    assert torch.equal(model.W_E_pos[: model.cfg.d_vocab], model.W_E)
    assert torch.equal(model.W_E_pos[model.cfg.d_vocab :], model.W_pos)
    assert model.all_head_labels()[:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
    ids = torch.tensor([[3, 4], [5, 6]])
    assert torch.equal(model.tokens_to_residual_directions(ids)[1, 0], model.W_U[:, 5])
    assert torch.equal(model.tokens_to_residual_directions(5), model.W_U[:, 5])
    tinyworld = hookline.load("tinyworld")
    mary, john = (tinyworld.to_single_token(name) for name in (" Mary", " John"))
    assert torch.equal(tinyworld.tokens_to_residual_directions([" Mary", " John"]), tinyworld.W_U[:, [mary, john]].T)
    for nonsense in (-1, 64, 0.5, torch.tensor([True])):
        with pytest.raises(HooklineError, match="0 to 63"):
            model.tokens_to_residual_directions(nonsense)


@pytest.mark.parametrize("kind", ["gpt2", "phi", "granite", "opt"])
@torch.no_grad()
def test_accumulated_bias_is_what_is_left_without_heads_and_neurons(kind) -> None:
    model, inputs = wrapped(kind)
    _, cache = model.run_with_cache(**inputs)
    for layer, mlp_input in ((0, False), (2, False), (1, True), (4, False)):
        parts, labels = cache.get_full_resid_decomposition(layer, mlp_input=mlp_input, return_labels=True)
        bias = model.accumulated_bias(layer, mlp_input=mlp_input)
        assert torch.allclose(parts[labels.index("bias")], bias.expand(2, 7, -1), atol=1e-6)
    fewer = model.accumulated_bias(2, include_mlp_biases=False)
    parts, labels = cache.get_full_resid_decomposition(2, expand_neurons=False, return_labels=True)
    assert torch.allclose(parts[labels.index("bias")][0, 0], fewer, atol=1e-6)
    with pytest.raises(HooklineError, match="layer 4"):
        model.accumulated_bias(4, mlp_input=True)


@pytest.mark.parametrize(("kind", "mode"), [("gpt2", "Q"), ("gpt2", "K"), ("llama", "Q"), ("llama", "V")])
@torch.no_grad()
def test_composition_scores(kind, mode) -> None:
    model, _ = wrapped(kind)
    scores = model.all_composition_scores(mode)
    assert scores.shape == (4, 4, 4, 4)
    assert not scores[2, :, :3].any()
    reader = {"Q": model.QK, "K": model.QK.T, "V": model.OV}[mode]
    one, other = model.OV[0, 3].AB, reader[2, 1].AB
    assert torch.allclose(scores[0, 3, 2, 1], (one @ other).norm() / one.norm() / other.norm(), atol=1e-5)
    with pytest.raises(HooklineError, match="'O'"):
        model.all_composition_scores("O")


@torch.no_grad()
def test_circuits_of_grouped_heads_both_ways() -> None:
    model, _ = wrapped("llama")
    assert model.W_K.shape[1] == 2
    by_group = hookline.weights.FactoredMatrix(model.W_Q.unflatten(1, (2, -1)), model.W_K.mT[:, :, None])
    assert torch.allclose(by_group.AB.flatten(1, 2), model.QK.AB, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "ask", "message"),
    [
        ("gpt2", lambda model: model.W_gate, "has no gate"),
        ("llama", lambda model: model.W_pos, "no learned position embedding"),
        ("mixtral", lambda model: model.W_in, "each expert has its own"),
        ("mamba", lambda model: model.W_Q, "no softmax attention"),
        ("gpt2", lambda model: model.blocks[0].attn.W_X, "W_X"),
        ("gemma2", lambda model: model.accumulated_bias(1), "gemma2"),
        ("gpt2", lambda model: model.b_gate, "has no gate"),
    ],
)
def test_weights_that_are_not_there(kind, ask, message) -> None:
    with pytest.raises((HooklineError, KeyError), match=message):
        ask(wrapped(kind)[0])


class Adapter(torch.nn.Module):
    """Around a linear map, as peft's are, and with the same `weight`."""

    def __init__(self, base_layer) -> None:
        super().__init__()
        self.base_layer, self.weight, self.out_features = base_layer, base_layer.weight, base_layer.out_features

    def forward(self, x):
        return 2 * self.base_layer(x)


def test_what_an_adapter_changes_is_no_weight_of_its_own() -> None:
    model, _ = wrapped("llama")
    attn = model.module.model.layers[0].self_attn
    attn.q_proj = Adapter(attn.q_proj)
    with pytest.raises(HooklineError, match="Adapter"):
        model.blocks[0].attn.W_Q


# Copies


def test_copies_refuse_every_way_of_writing() -> None:
    own = torch.nn.Parameter(torch.ones(2, 3))
    copy = read_only(own * 2, "write elsewhere")
    ways = [
        lambda: copy.zero_(),
        lambda: copy[0].add_(1),
        lambda: copy.T.data.mul_(2),
        lambda: copy.view(-1).detach().fill_(1),
        lambda: copy.unbind()[1].fill_(1),
        lambda: torch.nn.init.kaiming_uniform_(copy),
        lambda: torch.add(own, 1, out=copy),
        lambda: torch._foreach_zero_([copy]),
        lambda: copy.requires_grad_(False),
        lambda: copy.__iadd__(1),
    ]
    for way in ways:
        with pytest.raises(HooklineError, match="write elsewhere"):
            way()
    assert torch.equal(copy, own * 2)


def test_what_is_made_of_copies_is_plain(tmp_path) -> None:
    own = torch.nn.Parameter(torch.ones(2, 3))
    copy = read_only(own * 2, "write elsewhere")
    for made in (copy + 1, copy.clone(), own * copy, torch.stack([copy]), copy.svd()[0], copy.max(0).values):
        assert type(made) is torch.Tensor
    copy.sum().backward()
    assert own.grad.eq(2).all()
    torch.save(copy.detach(), tmp_path / "copy.pt")
    assert type(torch.load(tmp_path / "copy.pt")) is torch.Tensor
    assert type(deepcopy(copy.detach())) is torch.Tensor
    plain = torch.zeros(2, 3)
    plain.copy_(copy)
    assert type(plain) is torch.Tensor
    assert plain.eq(2).all()


def test_offloaded_weights_are_refused() -> None:
    module = tiny_models.causal_lm("llama")
    accelerate.cpu_offload(module)
    model = hookline.hook(module)
    for name in ("W_Q", "W_O", "W_in", "W_U", "W_E"):
        with pytest.raises(HooklineError, match="offloaded"):
            getattr(model, name)


@pytest.mark.parametrize(
    ("name", "said"), [("W_Q", r"W\[:\]"), ("hook_z", "use a hook"), ("anything", "change nothing")]
)
def test_assigning_to_a_path_raises(name, said) -> None:
    """It would be kept by the path alone, and the model would not see it."""
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    with pytest.raises(AttributeError, match=said):
        setattr(model.blocks[0].attn, name, torch.zeros(1))

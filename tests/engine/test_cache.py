"""The cache, and stopping early."""

import pickle

import pytest
import tiny_models
import torch
from networks import Twice
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import hookline
from hookline.errors import UnavailablePointError


def test_cache_options(net) -> None:
    x = torch.randn(1, 4)
    _, cache = net.run_with_cache(x, remove_batch_dim=True)
    assert cache["fc1"].shape == (8,)
    assert not cache.has_batch_dim
    assert cache.remove_batch_dim() is cache
    _, wide = net.run_with_cache(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"'input'.*\(2, 4\)"):
        wide.remove_batch_dim()
    assert wide.to(torch.float64)["fc1"].dtype == torch.float64
    text = repr(wide)
    assert "ActivationCache: 8 activations, " in text
    assert "fc1        [2, 8] float32, 64 bytes" in text


def test_cache_errors(net, x) -> None:
    _, cache = net.run_with_cache(x, names_filter="fc1")
    with pytest.raises(hookline.UnknownPointError, match="'fc1'"):
        cache["fc12"]
    with pytest.raises(UnavailablePointError, match="'act'"):
        cache["act"]


def test_stop_early(net, x) -> None:
    ran = []
    handle = net.module.fc2.register_forward_hook(lambda *_: ran.append(1))
    assert list(net.cache(x, names_filter=["fc1", "fc1.input"], stop_early=True)) == ["fc1.input", "fc1"]
    assert ran == []
    assert list(net.cache(x, names_filter="fc1")) == ["fc1"]
    assert ran == [1]
    handle.remove()


def test_more_ways_to_ask(net, x) -> None:
    _, cache = net.run_with_cache(x)
    assert cache[net.hook_dict["fc1"]] is cache["fc1"]
    assert cache["fc1#0"] is cache["fc1"]
    for nonsense in (0, None, ("fc1",)):
        assert nonsense not in cache
        with pytest.raises(KeyError, match="point"):
            cache[nonsense]
    twice = hookline.hook(Twice()).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)[1]
    assert len(twice.calls("cell_grad")) == len(twice.calls("cell")) == 3


def test_a_cache_can_be_pickled_without_its_model(net, x) -> None:
    _, cache = net.run_with_cache(x)
    again = pickle.loads(pickle.dumps(cache))
    assert list(again) == list(cache)
    assert torch.equal(again["fc1"], cache["fc1"])
    assert len(pickle.dumps(cache)) < 20_000


def test_a_change_of_dtype_is_for_floats() -> None:
    cache = hookline.hook(nn.Embedding(3, 2)).cache(torch.tensor([1]))
    half = cache.to(dtype=torch.float16)
    assert half["input"].dtype == torch.int64
    assert half["output"].dtype == torch.float16
    assert cache.to("cpu", torch.bfloat16)["output"].dtype == torch.bfloat16


def test_a_tensor_without_a_batch_axis_stays(x) -> None:
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).sum()

    cache = hookline.hook(Loss()).cache(x[:1], remove_batch_dim=True)
    assert cache["fc"].shape == (4,)
    assert cache["output"].shape == ()


def test_names_that_would_clash(x) -> None:
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.w_grad = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.w_grad(self.w(x))

    with pytest.raises(hookline.HooklineError, match="'w_grad'"):
        hookline.hook(Clash()).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)


def test_sparse_tensors_have_a_size(x) -> None:
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse()

    assert "output" in repr(hookline.hook(Sparse()).cache(x))


def test_save_and_load(tmp_path) -> None:
    model = hookline.load("tinyworld")
    with torch.no_grad():
        _, cache = model.run_with_cache("Mary went to the store")
    cache.save(tmp_path / "cache.safetensors")
    again = type(cache).load(tmp_path / "cache.safetensors", model)
    assert set(again) == set(cache)
    assert all(torch.equal(again[name], cache[name]) for name in cache)
    assert torch.equal(again["q", 3], cache["q", 3])
    assert torch.allclose(again.decompose_resid().sum(0), cache["resid_post", -1], atol=1e-5)
    assert list(again) == list(cache)
    assert type(hookline.ActivationCache.load(tmp_path / "cache.safetensors", model)) is type(cache)
    bare = hookline.ActivationCache.load(tmp_path / "cache.safetensors")
    assert torch.equal(bare["blocks.3.attn.hook_q"], cache["q", 3])
    assert "<code>blocks.0-3.attn.hook_q</code>" in cache._repr_html_()


@torch.no_grad()
def test_a_file_knows_where_it_is_from(tmp_path) -> None:
    model = hookline.load("tinyworld")
    path = tmp_path / "cache.safetensors"
    _, cache = model.run_with_cache("Mary went to the store", pos_slice=-1)
    cache.save(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert about["architecture"] == model.cfg.architecture
    assert (about["model"], about["positions"]) == (model.cfg.model_name, "-1")
    with pytest.raises(hookline.HooklineError, match="'-1'"):
        hookline.ActivationCache.load(path, model).decompose_resid(pos_slice=0)
    other = hookline.hook(tiny_models.causal_lm("opt"))
    with pytest.raises(hookline.HooklineError, match=rf"{model.cfg.architecture}.* opt"):
        hookline.ActivationCache.load(path, other)
    with model.processed_weights(fold_ln=True):
        stale = hookline.ActivationCache.load(path, model)
        with pytest.raises(hookline.HooklineError, match="processed"):
            stale.get_neuron_results(0)
        model.run_with_cache("Mary went to the store")[1].save(path)
        hookline.ActivationCache.load(path, model).get_neuron_results(0)
    with pytest.raises(hookline.HooklineError, match="processed"):
        hookline.ActivationCache.load(path, model).get_neuron_results(0)


def test_a_broken_file(tmp_path) -> None:
    path = tmp_path / "cache.safetensors"
    hookline.hook(nn.Linear(4, 4)).cache(torch.randn(2, 4)).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(hookline.HooklineError, match="activations"):
        hookline.ActivationCache.load(path)


def test_rows(net, x) -> None:
    _, cache = net.run_with_cache(x)
    assert torch.equal(cache.rows(slice(1, 3))["fc1"], cache["fc1"][1:3])
    assert torch.equal(cache.rows([4, 0])["fc1"], cache["fc1"][[4, 0]])
    assert torch.equal(cache.rows(x[:, 0] > 0)["fc1"], cache["fc1"][x[:, 0] > 0])
    one = cache.apply_slice_to_batch_dim(-1)
    assert torch.equal(one["fc1"], cache["fc1"][-1])
    assert (one.has_batch_dim, cache.has_batch_dim) == (False, True)
    assert len(cache["fc1"]) == 5
    with pytest.raises(hookline.HooklineError, match="row 5"):
        cache.rows(5)
    with pytest.raises(hookline.HooklineError, match="mask"):
        cache.rows(torch.ones(3, dtype=torch.bool))
    with pytest.raises(hookline.HooklineError, match="row"):
        one.rows(0)


def test_rows_of_what_has_no_rows(x) -> None:
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 2)

        def forward(self, x):
            return self.fc(x.reshape(-1, 1)).sum()

    cache = hookline.hook(Flat()).cache(x)
    with pytest.raises(hookline.HooklineError, match=r"\[20, 1\].* 5 rows"):
        cache.rows(0)


@torch.no_grad()
def test_padding_goes_with_its_row() -> None:
    model = hookline.load("tinyworld")
    texts = ["Mary went to the store", "John gave a drink to Mary and went"]
    _, cache = model.run_with_cache(texts, padding_side="right")
    short = len(model.to_str_tokens(texts[0]))
    row = cache.rows(0)
    assert torch.equal(row.decompose_resid(pos_slice=-1), cache.decompose_resid()[:, 0, short - 1])
    assert torch.equal(cache.at(hookline.last)["resid_post", 3][0], cache["resid_post", 3][0, short - 1])


@pytest.mark.parametrize(
    ("short", "name"),
    [
        (("z", 1), "blocks.1.attn.hook_z"),
        (("resid_post", -1), "blocks.3.hook_resid_post"),
        ("q2", "blocks.2.attn.hook_q"),
        (("scale", 2, "ln1"), "blocks.2.ln1.hook_scale"),
        (("normalized", 3, "ln2"), "blocks.3.ln2.hook_normalized"),
        ("embed", "hook_embed"),
        (("embed",), "hook_embed"),
        (("pattern", 0, "attn"), "blocks.0.attn.hook_pattern"),
        (("attn", 0), "blocks.0.attn.hook_pattern"),
        (("mlp_post", 1), "blocks.1.mlp.hook_post"),
        (("attn_out", 1), "blocks.1.hook_attn_out"),
    ],
)
def test_shorthand(short, name) -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    cache = model.cache(torch.tensor([[3, 4, 5]]))
    assert cache[short] is cache[name]
    assert list(cache) == [each for each, _ in cache.items()] == list(cache.keys())


def test_files_that_are_no_caches(tmp_path) -> None:
    (tmp_path / "broken").write_bytes(b"nothing")
    with pytest.raises(hookline.HooklineError, match="activations"):
        hookline.ActivationCache.load(tmp_path / "broken")
    with pytest.raises(hookline.HooklineError, match="activations"):
        hookline.ActivationCache.load(tmp_path / "nowhere")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(hookline.HooklineError, match=r"written.*cache"):
        hookline.ActivationCache.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "float16"])
def test_a_dtype_that_would_destroy_the_values(net, dtype) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(hookline.HooklineError, match="floating"):
        net.run_with_cache(x, dtype=dtype)
    with pytest.raises(hookline.HooklineError, match="floating"):
        net.cache(x).to(dtype=dtype)


def test_arguments_that_cannot_be_used_are_named_before_the_run(net) -> None:
    x = torch.ones(1, 4)
    net.module.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(hookline.HooklineError, match="device='nope'"):
        net.run_with_cache(x, device="nope")
    with pytest.raises(hookline.HooklineError, match="'sum'"):
        net.run_with_cache(x, incl_bwd=True, loss_fn="sum")


def test_values_that_overflow_a_dtype() -> None:
    net, x = hookline.hook(nn.Sequential(nn.Identity())), torch.tensor([[1e6, 1.0]])
    with pytest.raises(hookline.HooklineError, match=r"overflow torch.float16.*dtype=torch.bfloat16"):
        net.run_with_cache(x, dtype=torch.float16)
    with pytest.raises(hookline.HooklineError, match=r"overflow torch.float16"):
        net.cache(x).to(torch.float16)
    assert net.cache(x).to(torch.bfloat16)["0"].isfinite().all()
    infinite = torch.tensor([[-torch.inf, torch.finfo(torch.float32).min]])  # as masks have it
    assert net.run_with_cache(infinite, dtype=torch.float16)[1]["0"].isinf().all()


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "bart", "t5", "llama"])
def test_a_write_to_one_row_of_a_cached_activation_changes_no_other(kind, filtered) -> None:
    make = {"bert": tiny_models.encoder, "t5": tiny_models.seq2seq, "bart": tiny_models.seq2seq}
    module = make.get(kind, tiny_models.causal_lm)(kind)
    model = hookline.hook(module)
    cache = model.cache(**tiny_models.inputs(module), names_filter=list(model.hook_dict) if filtered else None)
    for name in cache:
        x = cache[name]
        others = x[1:].clone()
        x[0] = -x[0]
        assert torch.equal(x[1:], others), name
        assert torch.equal(cache[name], x), name
    assert kind != "gpt2" or "hook_pos_embed" in cache


def test_a_cached_gradient_and_each_call_can_be_written_by_row() -> None:
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(self.twice(x.expand(3, 4)) * 2)

    x = torch.ones(1, 4, requires_grad=True)
    _, cache = hookline.hook(Expands()).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)
    for value in (*cache.calls("twice.input"), cache["output_grad"]):
        value[0] = 0
        assert value.sum(1).count_nonzero() == 2
    assert cache["twice.input#0"][0].eq(0).all()

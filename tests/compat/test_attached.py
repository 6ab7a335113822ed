"""Modules attached to a HookedTransformer, by doubles that do it as sae-lens and circuit-tracer do."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tiny_models import causal_lm
from torch import nn

from hookline.compat.transformer_lens import HookedRootModule, HookedTransformer, HookedTransformerConfig, HookPoint
from hookline.errors import HooklineError

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])


class Sae(HookedRootModule):
    """A double of a sparse autoencoder."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, 24), nn.Linear(24, width)
        self.hook_acts, self.hook_out = HookPoint(), HookPoint()
        self.setup()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hook_out(self.decoder(self.hook_acts(self.encoder(x).relu())))


class Spliced(HookedTransformer):
    """A double of a HookedTransformer with autoencoders, which wraps MLPs when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            self._wrap_mlp(block.mlp)
        self.setup()
        self.seen: list[Any] = []

    @staticmethod
    def _wrap_mlp(mlp: Any) -> None:
        mlp.hook_in = HookPoint()
        own = mlp.forward
        mlp.forward = lambda x: own(mlp.hook_in(x))

    def forward(self, input: Any, **kwargs: Any) -> Any:
        self.seen.append(input)
        return super().forward(input, **kwargs)


class Wrapped(nn.Module):
    """A double of a replaced MLP."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.old, self.hook_in, self.hook_out = old, HookPoint(), HookPoint()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hook_out(self.old(self.hook_in(x)))


def toy(kind: type = HookedTransformer, **options: Any) -> Any:
    sizes = {"n_layers": 2, "d_model": 16, "d_head": 8, "n_ctx": 12, "d_vocab": 20, "act_fn": "gelu", "seed": 1}
    return kind(HookedTransformerConfig(**sizes | options))


@pytest.mark.parametrize("name", ["blocks.0.hook_mlp_out", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid"])
def test_a_module_in_the_place_of_a_point_is_called_there(name: str) -> None:
    model, sae = toy(), Sae()
    before, part = model(TOKENS), model.blocks[int(name.split(".")[1])]
    with torch.no_grad():
        expected = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: sae(x))])
    setattr(part, name.rpartition(".")[2], sae)
    torch.testing.assert_close(model(TOKENS), expected)
    assert name not in model.hook_dict
    _, cache = model.run_with_cache(TOKENS)
    assert {f"{name}.hook_acts", f"{name}.hook_out"} <= set(cache)
    edited = model.run_with_hooks(TOKENS, fwd_hooks=[(f"{name}.hook_acts", lambda x, hook: x * 0)])
    assert not torch.allclose(edited, expected)
    model.reset_hooks(including_permanent=True)
    torch.testing.assert_close(model(TOKENS), expected)
    setattr(part, name.rpartition(".")[2], HookPoint())
    assert torch.equal(model(TOKENS), before), "a new HookPoint restores the model's own point"
    assert name in model.hook_dict
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.module.modules())


def test_a_new_point_in_the_place_of_one_is_the_models() -> None:
    model = toy()
    point = HookPoint()
    model.blocks[0].hook_mlp_out = point
    assert model.hook_dict["blocks.0.hook_mlp_out"] is point
    point.add_hook(lambda x, hook: x * 0)
    expected = toy().run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0)])
    torch.testing.assert_close(model(TOKENS), expected)
    model.reset_hooks()
    assert not point.fwd_hooks


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_module_in_the_place_of_a_component_is_called_instead(model_type: str) -> None:
    model = HookedTransformer.from_pretrained_no_processing(model_type, hf_model=causal_lm(model_type), device="cpu")
    before, own = model(TOKENS), model.blocks[1].mlp
    model.blocks[1].mlp = Wrapped(own)
    model.unembed = Wrapped(model.unembed)
    model.blocks[0].ln2 = nn.Sequential(model.blocks[0].ln2, HookPoint())
    model.setup()
    assert torch.equal(model(TOKENS), before)
    _, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["unembed.hook_out"], before)
    assert torch.equal(cache["blocks.1.mlp.hook_out"], cache["blocks.1.hook_mlp_out"])
    assert {"blocks.1.mlp.old.hook_pre", "blocks.0.ln2.1", "blocks.0.ln2.0.hook_scale"} <= set(cache)
    zeroed = [model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: x * 0)]) for name in
              ("blocks.1.mlp.hook_out", "blocks.1.hook_mlp_out")]  # fmt: skip
    assert torch.equal(*zeroed)
    assert not torch.allclose(zeroed[0], before)
    del model.blocks[1].mlp
    assert torch.equal(model(TOKENS), before)
    assert "blocks.1.mlp.hook_pre" in model.hook_dict
    assert "forward" not in vars(own.module)


def test_attention_cannot_be_replaced() -> None:
    model = toy()
    with pytest.raises(HooklineError, match="replaced"):
        model.blocks[0].attn = Wrapped(model.blocks[0].attn)
    with pytest.raises(HooklineError):
        model.blocks[0].attn.scale = 3


def test_hooks_at_one_point_share_a_tensor_that_they_keep() -> None:
    model = toy()
    model.blocks[0].mlp = Wrapped(model.blocks[0].mlp)
    kept: list[torch.Tensor] = []
    point = model.blocks[0].mlp.hook_in
    point.add_hook(lambda x, hook: kept.append(x))
    point.add_hook(lambda x, hook: kept.append(x))
    grads: list[torch.Tensor] = []
    model(TOKENS)
    kept[1].register_hook(grads.append)
    kept[0].sum().backward()
    assert len(grads) == 1, "the gradient of one passes through the other"


def test_a_subclass_is_made_by_its_own_init_and_its_forward_runs() -> None:
    model = Spliced.from_pretrained("gpt2", hf_model=causal_lm("gpt2"), device="cpu", fold_ln=False)
    plain = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=causal_lm("gpt2"), device="cpu")
    assert torch.allclose(model(TOKENS).log_softmax(-1), plain(TOKENS).log_softmax(-1), atol=1e-5)
    assert len(model.seen) == 1
    _, cache = model.run_with_cache(TOKENS)
    assert "blocks.0.mlp.hook_in" in cache
    assert len(model.seen) == 2


def test_a_subclass_that_does_not_pass_its_config_on_is_refused() -> None:
    class Other(HookedTransformer):
        def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(copy.copy(cfg), *args, **kwargs)

    class Silent(HookedTransformer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    for kind in (Other, Silent):
        with pytest.raises(HooklineError, match=kind.__name__):
            kind.from_pretrained("gpt2", hf_model=causal_lm("gpt2"), device="cpu")
    assert toy()(TOKENS).shape == (1, 6, 20), "the failed one is forgotten"


def test_a_subclass_must_leave_our_names_alone() -> None:
    with pytest.raises(HooklineError, match="weights"):
        type("Mine", (HookedTransformer,), {"weights": None})


def test_the_model_is_a_module() -> None:
    model = toy()
    n_own = len(list(model.module.parameters()))
    model.transcoder, model.scale = Sae(), nn.Parameter(torch.ones(1))
    assert len(list(model.parameters())) == n_own + 5 == len(dict(model.named_parameters()))
    names = dict(model.named_modules())
    assert {"blocks.0.attn", "blocks.1.mlp", "blocks.0.attn.hook_z", "unembed", "transcoder.encoder"} <= set(names)
    assert names["blocks.0.attn.hook_z"] is model.hook_dict["blocks.0.attn.hook_z"]
    found = {id(p) for module in names.values() for p in module._parameters.values() if p is not None}
    assert {id(p) for p in model.module.parameters()} <= found, "code that walks over modules finds every parameter"
    assert not hasattr(model.module, "transcoder")
    assert isinstance(model.get_submodule("blocks.0.attn.hook_q"), HookPoint)
    model.eval()
    assert not model.transcoder.training
    assert not model.module.training
    model.to(torch.float64)
    assert model.transcoder.encoder.weight.dtype is torch.float64
    assert model.cfg.dtype is torch.float64


def test_its_state_dict_includes_attached_modules() -> None:
    one, other = toy(), toy(seed=2)
    one.transcoder, other.transcoder = Sae(), Sae()
    state = {name: value.clone() for name, value in one.state_dict().items()}
    assert {"transcoder.encoder.weight", "blocks.0.attn.W_Q"} <= set(state)
    other.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    with pytest.raises(HooklineError, match="transcoder"):
        other.load_state_dict({name: value for name, value in state.items() if "transcoder" not in name})


def test_an_optimizer_trains_the_model_and_what_is_attached() -> None:
    model = toy()
    model.blocks[0].hook_mlp_out = Sae()
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(TOKENS, return_type="loss").backward()
    optimizer.step()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert "blocks.0.hook_mlp_out.encoder.weight" in changed
    assert any("attn" in name for name in changed)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_torch_hooks_on_the_model_get_what_it_returns() -> None:
    model, seen = toy(), []
    handle = model.register_forward_hook(lambda module, args, output: seen.append((module, args[0], output)))
    logits = model(TOKENS)
    model.run_with_cache(TOKENS, return_type=None)
    handle.remove()
    model(TOKENS)
    assert len(seen) == 2
    assert seen[0][0] is model
    assert seen[0][1] is TOKENS
    assert seen[0][2] is logits
    assert not model.module._forward_hooks


def test_a_copy_has_its_own_attached_modules() -> None:
    model = toy()
    model.blocks[1].mlp = Wrapped(model.blocks[1].mlp)
    other = copy.deepcopy(model)
    assert torch.equal(model(TOKENS), other(TOKENS))
    other.blocks[1].mlp.hook_out.add_hook(lambda x, hook: x * 0)
    with torch.no_grad():
        next(other.module.parameters()).zero_()
    assert not torch.allclose(model(TOKENS), other(TOKENS))
    assert other.blocks[1].mlp.old.module is not model.blocks[1].mlp.old.module


def test_a_copy_has_the_parameters_and_buffers_that_were_set_on_the_model() -> None:
    model = toy()
    model.scale = nn.Parameter(torch.full((2,), 3.0))
    model.register_buffer("mean", torch.ones(2))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.scale, model.scale)
        assert torch.equal(other.mean, model.mean)
        assert other.scale is not model.scale
        assert "scale" in dict(other.named_parameters())


def test_a_model_with_modules_at_its_points_says_that_it_cannot_be_copied() -> None:
    model = toy()
    model.blocks[0].hook_mlp_out = Sae()
    with pytest.raises(HooklineError, match=r"blocks\.0\.hook_mlp_out"):
        copy.deepcopy(model)
    model.blocks[0].hook_mlp_out = HookPoint()
    assert torch.equal(copy.deepcopy(model)(TOKENS), model(TOKENS))


def test_parameters_and_buffers_set_on_the_model_are_treated_as_its_own() -> None:
    model = toy()
    model.scale = nn.Parameter(torch.ones(2))
    model.register_buffer("mean", torch.ones(2))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    model.scale.sum().backward()
    model.zero_grad()
    assert model.scale.grad is None
    model.to(torch.float64)
    assert model.scale.dtype is model.mean.dtype is torch.float64
    model.float()
    assert model.mean.dtype is torch.float32
    assert not model.requires_grad_(False).scale.requires_grad
    model.mean = torch.zeros(2)
    assert torch.equal(model.state_dict()["mean"], torch.zeros(2))
    assert "passing" not in model.state_dict()
    assert {"mean", "passing"} <= set(dict(model.named_buffers()))
    del model.scale, model.mean
    assert not {"scale", "mean"} & set(model.state_dict())


@pytest.mark.parametrize("name", ["float", "double", "half", "bfloat16"])
def test_attached_modules_follow_a_change_of_dtype(name: str) -> None:
    model = toy().to(torch.float64 if name == "float" else torch.float32)
    model.blocks[0].hook_mlp_out = Sae()
    dtype = getattr(nn.Linear(1, 1), name)().weight.dtype
    assert getattr(model, name)() is model
    assert model.cfg.dtype is dtype
    assert {each.dtype for each in model.parameters()} == {dtype}
    assert model(TOKENS).dtype is dtype


class Parent(nn.Module):
    """A module with a HookedTransformer inside, to which modules are attached."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model, self.head = toy(seed=seed), nn.Linear(20, 2)
        self.model.blocks[0].hook_mlp_out = Sae()
        self.model.scale = nn.Parameter(torch.full((2,), float(seed)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(tokens))


def test_the_state_dict_of_a_parent_module_loads_the_model_and_what_is_attached() -> None:
    one, other = Parent(1), Parent(2)
    assert not torch.equal(one(TOKENS), other(TOKENS))
    state = one.state_dict()
    other.load_state_dict(state)
    assert torch.equal(one(TOKENS), other(TOKENS))
    assert torch.equal(one.model.scale, other.model.scale)
    assert {id(each) for each in one.model.parameters()} < {id(each) for each in one.parameters()}
    for name in state:
        with pytest.raises(RuntimeError, match="Missing key"):
            other.load_state_dict({each: value for each, value in state.items() if each != name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**state, "model.extra": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({name: torch.zeros(3, 3, 3) for name in state})


def test_rotary_positions_by_parts() -> None:
    options = {"positional_embedding_type": "rotary", "use_NTK_by_parts_rope": True, "NTK_by_parts_factor": 8.0}
    slow, plain = toy(**options, NTK_original_ctx_len=4), toy(positional_embedding_type="rotary")
    slow.load_state_dict(plain.state_dict())
    assert not torch.allclose(slow(TOKENS), plain(TOKENS))
    fast = toy(**options, NTK_original_ctx_len=10**9)
    fast.load_state_dict(plain.state_dict())
    assert torch.equal(fast(TOKENS), plain(TOKENS)), "every frequency turns often in so long a context"

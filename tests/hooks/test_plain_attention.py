"""Attention inside any module: read, edited and verified; nothing is intercepted where nobody looks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.engine._inner import interception
from hookline.errors import HooklineError, NeverFiredWarning

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
NAMES = ("q", "k", "scores", "pattern")


class Attention(nn.Module):
    """Attention as people write it, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.heads = how, 4
        self.qkv, self.out, self.soft = nn.Linear(16, 48), nn.Linear(16, 16), nn.Softmax(dim=-1)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        match self.how:
            case "fused":
                z = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
            case "matmul":
                z = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
            case "bmm":
                q, k, v = (each.flatten(0, 1) for each in (q, k, v))
                z = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 2, -1), v).unflatten(0, (-1, 4))
            case "einsum":
                pattern = self.soft(torch.einsum("bhid,bhjd->bhij", q, k) / 2)
                z = torch.einsum("bhij,bhjd->bhid", pattern, v)
        return self.out(z.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn, self.gate, self.fc = attn, nn.Linear(16, 3), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x).softmax(-1).sum(-1, keepdim=True)  # not attention
        return self.fc(x + self.attn(x)) * gate


def net(how: str) -> hookline.HookedModule:
    torch.manual_seed(0)
    return hookline.hook(Net(Attention(how)).eval())


WAYS = ["fused", "matmul", "bmm", "einsum"]


@pytest.mark.parametrize("how", WAYS)
def test_every_way_gives_the_same_values(how) -> None:
    model = net(how)
    output, cache = model.run_with_cache(X, names_filter=[f"attn.{name}" for name in NAMES])
    assert torch.equal(output, model(X)), "reading changes nothing"
    assert {name: tuple(cache[f"attn.{name}"].shape) for name in NAMES} == {
        **dict.fromkeys(("q", "k"), (2, 4, 5, 4)),
        **dict.fromkeys(("scores", "pattern"), (2, 4, 5, 5)),
    }
    q, k = (cache[f"attn.{name}"] for name in ("q", "k"))
    torch.testing.assert_close(cache["attn.scores"], q @ k.transpose(-2, -1) / 2)
    torch.testing.assert_close(cache["attn.pattern"], cache["attn.scores"].softmax(-1))
    fused = net("fused").cache(X, names_filter=[f"attn.{name}" for name in NAMES])
    for name, value in fused.items():
        torch.testing.assert_close(cache[name], value)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_edits_take_effect(how, name) -> None:
    model = net(how)
    value = model.cache(X, names_filter=f"attn.{name}")[f"attn.{name}"]
    torch.testing.assert_close(model.run_with_hooks(X, fwd_hooks=[(f"attn.{name}", lambda x: x.clone())]), model(X))
    edited = model.run_with_hooks(X, fwd_hooks=[(f"attn.{name}", lambda _x: value.flip(-2) * 2)])
    other = net("matmul").run_with_hooks(X, fwd_hooks=[(f"attn.{name}", lambda _x: value.flip(-2) * 2)])
    assert not torch.allclose(edited, model(X), atol=1e-3)
    torch.testing.assert_close(edited, other)


@pytest.mark.parametrize("how", WAYS)
def test_verify_finds_and_proves_them(how) -> None:
    report = net(how).verify(X)
    assert report.is_sound, report
    assert report.patterns == {"attn": [2, 4, 5, 5]}
    assert report.points == [f"attn.{name}" for name in NAMES]


def test_verify_says_what_is_wrong() -> None:
    class Unused(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            return x

    report = hookline.hook(Net(Unused("matmul")).eval()).verify(X)
    assert not report.is_sound
    assert len(report.problems) == 4
    with pytest.raises(HooklineError, match="training mode"):
        hookline.hook(Net(Attention("fused"))).verify(X)
    assert not hookline.hook(nn.Sequential(nn.Linear(16, 16)).eval()).verify(X).patterns


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention(need_weights, grad) -> None:
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    model = hookline.hook(attn)
    with torch.set_grad_enabled(grad):
        (output, _), cache = model.run_with_cache(X, X, X, need_weights=need_weights, names_filter=list(NAMES))
        wanted, weights = attn(X, X, X, average_attn_weights=False)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(cache["pattern"], weights)
    (edited, _) = model.run_with_hooks(X, X, X, need_weights=need_weights, fwd_hooks=[("pattern", torch.zeros_like)])
    torch.testing.assert_close(edited, attn.out_proj.bias.expand_as(edited))
    assert model.verify(X, X, X, need_weights=need_weights).is_sound


@torch.no_grad()
def test_encoder_layers_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()  # torch warns of nested tensors
    model = hookline.hook(encoder)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    report = model.verify(X, src_key_padding_mask=mask)
    assert list(report.patterns) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert report.is_sound, report
    cache = model.cache(X, src_key_padding_mask=mask, names_filter=report.points)
    assert not cache["layers.1.self_attn.pattern"][1, ..., 3:].any()


def test_masks_of_fused_calls() -> None:
    model = net("fused")
    model.attn.mask = torch.ones(5, 5, dtype=torch.bool).tril()
    assert model.verify(X).is_sound
    assert torch.equal(model.cache(X, names_filter="attn.pattern")["attn.pattern"].triu(1), torch.zeros(2, 4, 5, 5))


def test_nothing_is_intercepted_where_nobody_looks(monkeypatch) -> None:
    model, calls = net("fused"), []
    monkeypatch.setattr(interception, "start", lambda each: calls.append(each))
    model(X)
    model.run_with_cache(X)
    assert calls == []


def test_a_glob_says_how_to_find_them() -> None:
    net = hookline.hook(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    x = torch.randn(1, 3, 8)
    for glob in ("*.pattern", "*attn.q"):
        with pytest.raises(hookline.UnknownPointError, match=r"verify\(\*inputs\)\.points"):
            net.cache(x, names_filter=glob)
    assert "self_attn.pattern" in net.cache(x, names_filter=net.verify(x).points)


def test_a_parent_has_not_the_attention_of_its_children() -> None:
    model = net("fused")
    with pytest.warns(NeverFiredWarning, match="child"):
        model.run_with_hooks(X, fwd_hooks=[("pattern", lambda x: x)])
    both = []
    with pytest.warns(NeverFiredWarning):
        model.run_with_hooks(X, fwd_hooks=[("attn.pattern", both.append), ("pattern", both.append)])
    assert len(both) == 1


def test_a_module_with_two_attentions() -> None:
    class Twice(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + super().forward(x.flip(1))

    for how in WAYS:
        model, seen = hookline.hook(Net(Twice(how)).eval()), {name: [] for name in NAMES}
        model.run_with_hooks(X, fwd_hooks=[(f"attn.{name}", seen[name].append) for name in NAMES])
        assert {name: len(each) for name, each in seen.items()} == dict.fromkeys(NAMES, 2), how


def test_a_module_of_that_name_comes_first() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.q = 1, nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x)
            return F.scaled_dot_product_attention(q * 2, x, x)

    model = hookline.hook(nn.Sequential(Named()).eval())
    cache = model.cache(X, names_filter=["0.q", "0:q", "0.k"])
    torch.testing.assert_close(cache["0:q"], cache["0.q"] * 2)
    assert torch.equal(cache["0.k"], X)
    assert model.verify(X).is_sound


def test_gradients_are_those_of_the_pattern() -> None:
    wanted = None
    for how in WAYS:
        model, seen = net(how), []
        with model.hooks(bwd_hooks=[("attn.pattern", seen.append)]):
            model(X).sum().backward()
        wanted = seen[0] if wanted is None else wanted
        torch.testing.assert_close(seen[0], wanted)


def test_of_timm() -> None:
    timm = pytest.importorskip("timm", reason="it is not a dependency: pip install timm torchvision")
    vit = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2).eval()
    model, image = hookline.hook(vit), torch.randn(1, 3, 32, 32)
    report = model.verify(image)
    assert list(report.patterns) == ["blocks.0.attn", "blocks.1.attn"]
    assert report.is_sound, report


def test_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers", reason="it is not a dependency: pip install diffusers")
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()
    report = hookline.hook(unet).verify(torch.randn(1, 4, 8, 8), torch.tensor([5]), torch.randn(1, 7, 12))
    assert report.is_sound, report
    assert report.patterns["down_blocks.0.attentions.0.transformer_blocks.0.attn2"] == [1, 4, 64, 7]


COMPILED = {"scripted": torch.jit.script, "traced": lambda module: torch.jit.trace(module, X)}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", COMPILED)
def test_verify_of_a_network_with_a_child_of_torchscript(compiled) -> None:
    class WithChild(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            child = nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1))
            self.attn, self.fc = Attention("matmul"), COMPILED[compiled](child)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.attn(x))

    net = hookline.hook(WithChild().eval())
    report = net.verify(X)
    assert report.is_sound
    assert list(report.patterns) == ["attn"]
    assert "fc" in net.registry.list_layers()

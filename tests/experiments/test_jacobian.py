"""The Jacobian lens: against brute force, on linear models, under hooks, its edits, its files, and what it refuses."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open
from tiny_models import causal_lm, encoder, seq2seq
from torch import Tensor, nn
from torch.autograd.functional import jacobian as brute_force
from transformers.activations import LinearActivation

import hookline
from hookline import HooklineError, NeverFiredWarning
from hookline.engine.hook_actions import Edit
from hookline.experiments import jacobian, logit_lens
from hookline.experiments.jacobian import JacobianLens, cotangents, linear_activations

TOKENS = torch.tensor([[5, 9, 31, 7, 44, 2, 18]])
PROMPT = "When Mary and John went to the store, John gave a drink to"


def layers_of(module: nn.Module) -> nn.ModuleList:
    return max((each for each in module.modules() if isinstance(each, nn.ModuleList)), key=len)


def by_hand(module: nn.Module, tokens: Tensor, layer: int) -> Tensor:
    """∂ final stream ∕ ∂ stream after a layer, `[final pos, d, pos, d]`, with torch's own hooks and Jacobian."""
    layers, seen = layers_of(module), {}

    def through(h: Tensor) -> Tensor:
        def enter(_module, _args, out):
            return (h[None], *out[1:]) if isinstance(out, tuple) else h[None]

        def leave(_module, _args, out):
            seen["final"] = out[0] if isinstance(out, tuple) else out

        handles = [layers[layer].register_forward_hook(enter), layers[-1].register_forward_hook(leave)]
        module(tokens, use_cache=False)
        for handle in handles:
            handle.remove()
        return seen["final"][0]

    def keep(_module, _args, out):
        seen["start"] = out[0] if isinstance(out, tuple) else out

    handle = layers[layer].register_forward_hook(keep)
    with torch.no_grad():
        module(tokens, use_cache=False)
    handle.remove()
    return brute_force(through, seen["start"][0])


def summed(blocks: Tensor) -> Tensor:
    """The mean over source positions of the sum over target positions at and after."""
    final, _, source, _ = blocks.shape
    is_after = torch.arange(final)[:, None] >= torch.arange(source)
    return torch.einsum("tisj,ts->ij", blocks, is_after.to(blocks)) / source


@pytest.mark.quick_for("gpt2", "mixtral")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gpt_neox", "cohere", "mixtral"])
def test_it_is_the_jacobian_by_brute_force(kind) -> None:
    module = causal_lm(kind)  # in float32, in which some models compute norms and experts anyway
    lens = jacobian.fit(hookline.hook(module), TOKENS)
    n = len(layers_of(module))
    assert lens.layers == [*range(n)]
    for layer in (0, n - 2):
        torch.testing.assert_close(lens.matrix(layer), summed(by_hand(module, TOKENS, layer)), atol=2e-5, rtol=1e-4)
    assert torch.equal(lens.matrix(n - 1), torch.eye(len(lens.matrix(0))))


def linear_gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    """A GPT-2 without norms, with uniform attention and linear MLPs; the value-output and MLP maps of each layer."""
    module = causal_lm("gpt2").double()
    width, values, maps = module.config.n_embd, [], []
    for block in module.transformer.h:
        block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
        block.mlp = nn.Linear(width, width).double()
        with torch.no_grad():
            block.attn.c_attn.weight[:, : 2 * width] = 0  # queries and keys
            block.attn.c_attn.bias[: 2 * width] = 0
        values.append((block.attn.c_attn.weight[:, 2 * width :] @ block.attn.c_proj.weight).T.detach())
        maps.append(block.mlp.weight.detach())
    return module, torch.stack(values), torch.stack(maps)


def test_on_a_linear_model_it_is_the_product_of_its_maps() -> None:
    module, values, maps = linear_gpt2()
    lens = jacobian.fit(hookline.hook(module), TOKENS)
    n, eye = TOKENS.shape[1], torch.eye(len(maps[0])).double()
    uniform = torch.tril(torch.ones(n, n)).double() / torch.arange(1, n + 1)[:, None]
    found = torch.eye(n * len(eye)).double()
    for layer in reversed(range(len(maps))):
        by_position = found.view(n, len(eye), n, len(eye))
        torch.testing.assert_close(lens.matrix(layer), summed(by_position))
        attention = torch.kron(torch.eye(n).double(), eye) + torch.kron(uniform, values[layer])
        found = found @ torch.kron(torch.eye(n).double(), eye + maps[layer]) @ attention


def test_without_attention_it_is_the_plain_product() -> None:
    module, _, maps = linear_gpt2()
    for block in module.transformer.h:
        nn.init.zeros_(block.attn.c_proj.weight)
    lens, product = jacobian.fit(hookline.hook(module), TOKENS), torch.eye(len(maps[0])).double()
    for layer in reversed(range(len(maps))):
        torch.testing.assert_close(lens.matrix(layer), product)
        product = product @ (torch.eye(len(product)) + maps[layer])


def test_batches_of_cotangents_and_repeated_texts_agree(models, monkeypatch) -> None:
    model = models["llama"]
    whole = jacobian.fit(model, TOKENS)
    for size in (1, 5):
        torch.testing.assert_close(jacobian.fit(model, TOKENS, batch_size=size).matrices, whole.matrices)

    def unbatched(_function):
        raise RuntimeError("Batching rule not implemented")

    monkeypatch.setattr(cotangents.torch.func, "vmap", unbatched)
    torch.testing.assert_close(jacobian.fit(model, TOKENS, batch_size=5).matrices, whole.matrices)


def test_products_in_bfloat16_are_close(models) -> None:
    exact, fast = (jacobian.fit(models["llama"], TOKENS, [0], dtype=each).matrix(0) for each in (None, torch.bfloat16))
    assert fast.dtype == torch.float32
    assert 0 < float((fast - exact).norm() / exact.norm()) < 0.02


def replaced_in(model: hookline.HookedModel) -> list[str]:
    """The points of the activation functions that get another backward pass."""
    actions = linear_activations.linear_activations(model).actions
    return [each.point.name for each in actions if isinstance(each, Edit)]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_activation_functions_are_one_product_and_the_matrices_stay_the_same(kind, monkeypatch) -> None:
    model = hookline.hook(causal_lm(kind))
    assert len(replaced_in(model)) == 2 * model.cfg.n_layers
    found = jacobian.fit(model, TOKENS).matrices
    monkeypatch.setattr(cotangents, "linear_activations", lambda _model: nullcontext())
    torch.testing.assert_close(found, jacobian.fit(model, TOKENS).matrices, atol=1e-6, rtol=1e-5)


def test_under_hooks_that_mix_positions_activation_functions_are_differentiated_step_by_step() -> None:
    model = hookline.hook(causal_lm("gpt2"))

    def with_the_position_before(x: Tensor) -> Tensor:
        return x + x.roll(1, 1) * torch.arange(x.shape[1]).clamp(max=1)[:, None]

    plain = jacobian.fit(model, TOKENS).matrices
    name = "transformer.h.1.mlp.act"
    with model.hooks(fwd_hooks=[(name, with_the_position_before)]):
        assert replaced_in(model) == []
        found = jacobian.fit(model, TOKENS).matrices
    model.add_hook(name, with_the_position_before)
    assert torch.equal(jacobian.fit(model, TOKENS).matrices, found)
    model.reset_hooks()
    assert not torch.allclose(found, plain)
    handle = model.module.transformer.h[1].mlp.act.register_forward_hook(lambda _m, _a, y: with_the_position_before(y))
    torch.testing.assert_close(jacobian.fit(model, TOKENS).matrices, found, atol=1e-6, rtol=1e-5)
    handle.remove()


def test_an_activation_function_that_returns_its_input() -> None:
    module = causal_lm("gpt2")
    for block in module.transformer.h:
        block.mlp.act = LinearActivation()
    found = jacobian.fit(hookline.hook(module), TOKENS).matrix(0)
    torch.testing.assert_close(found, summed(by_hand(module, TOKENS, 0)), atol=2e-5, rtol=1e-4)


def test_activation_functions_that_are_not_called_are_nothing_to_warn_of(recwarn) -> None:
    module = causal_lm("gpt2")
    module.unused = LinearActivation()
    jacobian.fit(hookline.hook(module), TOKENS, layers=[0])
    assert not [each for each in recwarn if issubclass(each.category, NeverFiredWarning)]


def test_activation_functions_that_somebody_else_has_changed_are_left_alone() -> None:
    module = causal_lm("gpt2")
    one, two, three, _ = (block.mlp.act for block in module.transformer.h)
    one.register_full_backward_hook(lambda _m, given, _out: (given[0].roll(1, 1),))
    two.register_full_backward_pre_hook(lambda _m, out: (out[0].roll(1, 1),))
    three.forward = lambda x: x.roll(1, 1)
    assert replaced_in(hookline.hook(module)) == ["transformer.h.3.mlp.act.input", "transformer.h.3.mlp.act"]


def test_the_mean_is_over_all_positions_of_all_texts(models) -> None:
    model, short = models["gpt2"], TOKENS[:, :3]
    both = jacobian.fit(model, [TOKENS[0].tolist(), short[0].tolist()], layers=[1])
    one, other = (jacobian.fit(model, each, layers=[1]).matrix(1) for each in (TOKENS, short))
    torch.testing.assert_close(both.matrix(1), (7 * one + 3 * other) / 10)
    assert both.layers == [1]
    assert both.info["positions"] == 10


def test_windows_are_texts_of_their_own(models) -> None:
    model, rows = models["gpt2"], torch.arange(3, 20)[None]
    whole = jacobian.fit(model, rows, [0], window=8)
    torch.testing.assert_close(whole.matrices, jacobian.fit(model, rows[:, :16].view(2, 8), [0]).matrices)
    assert whole.info["texts"] == 2


def test_positions_that_take_part_are_sources_and_targets(models) -> None:
    module = models["gpt2"].module
    blocks = by_hand(module, TOKENS, 1)[2:6, :, 2:6]
    lens = jacobian.fit(models["gpt2"], TOKENS, [1], pos=slice(2, -1))
    torch.testing.assert_close(lens.matrix(1), summed(blocks), atol=1e-5, rtol=1e-4)


def test_outlying_positions_are_no_sources(models) -> None:
    model = hookline.hook(causal_lm("gpt2").double())
    model.add_hook("blocks.1.hook_resid_post", lambda x: torch.cat([1000 * x[:, :1], x[:, 1:]], 1))
    lens = jacobian.fit(model, TOKENS, [1])
    assert lens.info["positions"] == 6
    included = jacobian.fit(model, TOKENS, [1], outliers="include").matrix(1)
    assert not torch.allclose(lens.matrix(1), included)


def test_permanent_hooks_take_part() -> None:
    model = hookline.hook(causal_lm("llama").double())
    before = jacobian.fit(model, TOKENS, [1]).matrix(1)
    model.add_hook("blocks.2.hook_resid_post", lambda x: 2 * x)
    after = jacobian.fit(model, TOKENS, [1, 2])
    assert not torch.allclose(after.matrix(1), before)
    model.reset_hooks(including_permanent=True)
    layers = layers_of(model.module)
    handle = layers[2].register_forward_hook(lambda _m, _a, out: 2 * out)
    torch.testing.assert_close(after.matrix(1), summed(by_hand(model.module, TOKENS, 1)))
    handle.remove()


@pytest.mark.slow
def test_in_directions_that_differ_it_has_the_error_that_it_reports() -> None:
    torch.manual_seed(0)
    model, texts = hookline.hook(causal_lm("llama")), torch.randint(3, 60, (40, 8))
    exact, some = jacobian.fit(model, texts, [0, 1]), jacobian.fit(model, texts, [0, 1], rank=8)
    full = jacobian.fit(model, torch.randint(3, 60, (200, 8)), [0, 1])
    assert (some.errors > exact.errors).all()
    for lens in (exact, some):
        true = (lens.matrices - full.matrices).flatten(1).norm(dim=1) / full.matrices.flatten(1).norm(dim=1)
        assert ((lens.errors / true > 0.6) & (lens.errors / true < 1.6)).all(), (lens.errors, true)
    in_all = jacobian.fit(model, texts[:4], [0, 1])
    assert (in_all.errors > some.errors).all()


def test_all_directions_are_the_plain_mean(models) -> None:
    texts = torch.arange(3, 51).view(6, 8)
    exact = jacobian.fit(models["gpt2"], texts, [0])
    nearly = jacobian.fit(models["gpt2"], texts, [0], rank=31)
    assert float((exact.matrices - nearly.matrices).norm() / exact.matrices.norm()) < float(exact.errors)


# Reading and editing.


@pytest.fixture(scope="module")
def lens(tinyworld) -> JacobianLens:
    texts = [PROMPT, "The capital of France is", "Tom went to the garden. Tom was hungry"]
    return jacobian.fit(tinyworld, texts, progress=False)


def test_at_the_last_layer_it_reads_what_the_model_predicts(tinyworld, lens) -> None:
    result = lens.read(PROMPT)
    probs = tinyworld(PROMPT)[0].softmax(-1)
    torch.testing.assert_close(result.sel(layer=3).values, probs.max(-1).values.detach(), atol=1e-5, rtol=1e-4)
    assert result.info["tokens"][3][-1] == " Mary"
    assert result.axes == ("layer", "pos")
    assert result.coords["pos"] == logit_lens.logit_lens(tinyworld, PROMPT).coords["pos"]
    assert lens.tokens(PROMPT, top=2).tokens[3][0][0] == " Mary"


def test_it_reads_the_stream_times_the_matrix(tinyworld, lens) -> None:
    _, cache = tinyworld.run_with_cache(PROMPT)
    stream = cache["resid_post", 1]
    mapped = stream @ lens.matrix(1).T.to(stream)
    logits = tinyworld.module.lm_head(tinyworld.module.transformer.ln_f(mapped))[0].detach()
    mary = tinyworld.to_single_token(" Mary")
    found = lens.read(PROMPT, " Mary", measure="logit").sel(layer=1)
    torch.testing.assert_close(found.values, logits[:, mary], atol=1e-4, rtol=1e-4)
    ranks = lens.read([PROMPT, PROMPT], " Mary", measure="rank", pos=-1)
    assert ranks.axes == ("layer",)
    assert int(ranks.values[1]) == int((logits[-1] > logits[-1, mary]).sum())


def test_with_the_identity_it_is_the_logit_lens(tinyworld, lens) -> None:
    plain = JacobianLens(
        torch.eye(128).expand(4, 128, 128), [0, 1, 2, 3], lens.norms, lens.errors, lens.info, tinyworld
    )
    there = logit_lens.logit_lens(tinyworld, PROMPT, " Mary").sel(layer=[0, 1, 2, 3])
    torch.testing.assert_close(plain.read(PROMPT, " Mary").values, there.values)


def test_directions_are_those_in_which_the_logit_rises(tinyworld, lens) -> None:
    """The gradient of the lens's logit, as the final norm has a fixed scale."""
    h = torch.randn(128, requires_grad=True)
    norm = tinyworld.module.transformer.ln_f
    mapped = lens.matrix(1).to(h) @ h
    scale = (mapped - mapped.mean()).square().mean().add(norm.eps).sqrt().detach()
    normed = (mapped - mapped.mean()) / scale * norm.weight + norm.bias
    mary = tinyworld.to_single_token(" Mary")
    (grad,) = torch.autograd.grad(tinyworld.module.lm_head(normed)[mary], h)
    torch.testing.assert_close(lens.directions(" Mary", 1)[0] / float(scale), grad, atol=1e-5, rtol=1e-4)


def test_edits_along_the_directions(tinyworld, lens) -> None:
    mary, john = (lens.directions(each, 2)[0] for each in (" Mary", " John"))
    name = "blocks.2.hook_resid_post"
    before = tinyworld.cache(PROMPT, names_filter=name)[name]
    units = torch.stack([mary / mary.norm(), john / john.norm()]).to(before)

    def after(hooks) -> Tensor:
        with tinyworld.hooks(fwd_hooks=hooks):
            return tinyworld.cache(PROMPT, names_filter=name)[name]

    steered = after(lens.steer(" Mary", [2], 0.5)) - before
    torch.testing.assert_close(steered, (0.5 * float(lens.norms[2]) * units[0]).expand_as(before), atol=1e-4, rtol=1e-3)
    assert (after(lens.ablate([" Mary", " John"], [2])) @ units.T).abs().max() < 1e-3
    coordinates = [x @ torch.linalg.pinv(units.T).T for x in (before, after(lens.swap(" Mary", " John", [2])))]
    torch.testing.assert_close(coordinates[1], coordinates[0].flip(-1), atol=1e-3, rtol=1e-3)
    at_last = after(lens.steer(" Mary", [2], pos=-1)) - before
    assert not at_last[0, :-1].any()
    assert len(lens.ablate(" Mary")) == 4


# Files.


def test_a_lens_is_saved_and_loaded(tinyworld, lens, tmp_path) -> None:
    lens.save(tmp_path / "lens")
    bare, bound = JacobianLens.load(tmp_path / "lens"), JacobianLens.load(tmp_path / "lens", tinyworld)
    assert torch.equal(bare.matrix(2), lens.matrix(2))
    assert torch.equal(bound.read(PROMPT).values, lens.read(PROMPT).values)
    assert repr(bound) == repr(lens)
    with pytest.raises(HooklineError, match="no model"):
        bare.read(PROMPT)
    with safe_open(tmp_path / "lens", "pt") as file:
        assert json.loads(file.metadata()["info"])["model"] == "tinyworld"


def test_a_lens_of_another_model_is_refused(tmp_path) -> None:
    module = causal_lm("gpt2")
    jacobian.fit(hookline.hook(module), TOKENS, [0]).save(tmp_path / "lens")
    with pytest.raises(HooklineError, match="another model"):
        JacobianLens.load(tmp_path / "lens", hookline.load("tinyworld"), check=False)
    other = causal_lm("gpt2")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    with pytest.raises(HooklineError, match="weights"):
        JacobianLens.load(tmp_path / "lens", hookline.hook(other))
    assert JacobianLens.load(tmp_path / "lens", hookline.hook(other), check=False).layers == [0]


# Bad input.


@pytest.mark.parametrize(
    ("texts", "options", "match"),
    [
        ([], {}, "empty"),
        ([""], {}, "non-empty"),
        ("Tom went home", {"window": 64}, "window=64"),
        (["Tom went to the garden", "Tom"], {"window": 3}, "text 1 has"),
        (PROMPT, {"window": 0}, "window"),
        (PROMPT, {"window": 1000}, "context"),
        (PROMPT, {"layers": [4]}, "layer 4 is out of range"),
        (PROMPT, {"layers": []}, "layers"),
        (PROMPT, {"layers": 2}, "layers"),
        (PROMPT, {"rank": 8}, "leave rank out"),
        ([PROMPT] * 5, {"rank": 128}, "from 1 to 127"),
        (PROMPT, {"pos": 40}, "pos=40"),
        (PROMPT, {"outliers": 0.5}, "outliers"),
        (PROMPT, {"dtype": torch.int8}, "dtype"),
        (PROMPT, {"batch_size": 0}, "batch_size"),
        (PROMPT, {"per_example": True}, "per_example"),
    ],
)
def test_what_a_fit_refuses(tinyworld, texts, options, match) -> None:
    with pytest.raises(HooklineError, match=match):
        jacobian.fit(tinyworld, texts, **options)


def test_what_reads_refuse(lens) -> None:
    for call in (
        lambda: lens.matrix(4),
        lambda: lens.read(PROMPT, measure="rank"),
        lambda: lens.read(PROMPT, measure="size"),
        lambda: lens.read([PROMPT, PROMPT], pos=-1),
        lambda: lens.read(PROMPT, " Mary and"),
        lambda: lens.tokens(PROMPT, top=0),
        lambda: lens.steer(" Mary", [7]),
        lambda: lens.swap(" Mary", " Mary"),
    ):
        with pytest.raises(HooklineError):
            call()
    assert torch.equal(lens.matrix(-1), lens.matrix(3))


def test_models_without_a_causal_stream_are_refused() -> None:
    for module in (encoder("bert", head=True), seq2seq("t5")):
        with pytest.raises(HooklineError, match="decoder-only"):
            jacobian.fit(hookline.hook(module), TOKENS)


def test_values_that_are_not_finite_are_refused(models, tinyworld) -> None:
    broken = [("blocks.1.hook_resid_post", lambda x: x * torch.nan)]
    with tinyworld.hooks(fwd_hooks=broken), pytest.raises(HooklineError, match="not finite"):
        jacobian.fit(tinyworld, PROMPT)
    steep = [("blocks.2.hook_resid_post", lambda x: (1e30 * (1e30 * (x - x.detach()))) + x)]
    with models["gpt2"].hooks(fwd_hooks=steep), pytest.raises(HooklineError, match=r"Jacobian.*finite"):
        jacobian.fit(models["gpt2"], TOKENS, [1])


def test_a_model_without_weights_is_refused() -> None:
    model = hookline.hook(causal_lm("gpt2").to("meta"))
    for window in (None, 3):
        with pytest.raises(HooklineError, match="without weights"):
            jacobian.fit(model, TOKENS, window=window)


def test_a_decoder_that_looks_ahead_is_refused() -> None:
    module = causal_lm("gpt2")
    model = hookline.hook(module)
    model.add_hook("blocks.2.hook_attn_out", lambda x: x + x.mean(1, keepdim=True))
    with pytest.raises(HooklineError, match="causal"):
        jacobian.fit(model, TOKENS)

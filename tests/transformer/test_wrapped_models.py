"""Language models as people have them: with adapters, quantised, offloaded, checkpointed, compiled, at 16 bits.

What is right is found out by plain torch hooks and by hand, not by hookline.
"""

import copy
import importlib.util
from contextlib import nullcontext
from functools import partial

import devices
import pytest
import tiny_models
import tiny_vision
import torch
from backends import needs_compiler
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, BertForPreTraining
from transformers.utils import ModelOutput

import hookline
from hookline import HookedModel, HooklineError, NeverFiredWarning, UnknownPointError
from hookline.engine.pass_state import pass_state
from hookline.transformer.outputs import outcome
from hookline.transformer.verify.report import verify_model

IDS = torch.tensor([[5, 17, 42, 7, 3, 9, 22], [6, 7, 8, 9, 10, 11, 12]])

# Of torch, transformers and the packages around them, about themselves.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning", "error::hookline.NeverFiredWarning"
)


def needs(package: str):
    """A test that needs a package that `make test` does not install."""
    missing = importlib.util.find_spec(package) is None
    skip = pytest.mark.skipif(missing, reason=f"needs {package}, which `make test-all` installs")
    return lambda test: pytest.mark.slow(skip(test))


def output_of(module: nn.Module, run) -> torch.Tensor:
    """What a module gives while `run` runs, by a plain torch hook."""
    seen = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.no_grad():
        run()
    handle.remove()
    return seen[0]


def attention(model, layer: int = 1) -> nn.Module:
    return next(
        module
        for name, module in model.named_modules()
        if name.endswith((f".{layer}.self_attn", f".{layer}.attn", f".{layer}.attention"))
    )


def own_qkv(model) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of layer 1, cut out of what the projections give, by hand."""
    attn, run = attention(model), lambda: model(input_ids=IDS)
    if hasattr(attn, "q_proj"):
        flat = [output_of(getattr(attn, f"{name}_proj"), run) for name in "qkv"]
        return tuple(x.unflatten(-1, (heads, 24)) for x, heads in zip(flat, (4, 2, 2), strict=True))
    if hasattr(attn, "c_attn"):
        return tuple(x.unflatten(-1, (4, 8)) for x in output_of(attn.c_attn, run).split(32, -1))
    if hasattr(attn, "qkv_proj"):
        flat = output_of(attn.qkv_proj, run).split([4 * 24, 2 * 24, 2 * 24], -1)
        return tuple(x.unflatten(-1, (-1, 24)) for x in flat)
    return output_of(attn.query_key_value, run).unflatten(-1, (4, 3, 8)).unbind(-2)


def check_model(model, *, has_gradients: bool = True) -> HookedModel:
    """The whole of what is promised of a language model, on this one."""
    with torch.no_grad():
        own = model(input_ids=IDS).logits
        wrapped = hookline.hook(model)
        assert isinstance(wrapped, HookedModel)
        logits, cache = wrapped.run_with_cache(IDS)
        assert torch.equal(logits, own), "caching changes no bit"
        for name, value in zip("qkv", own_qkv(model), strict=True):
            assert torch.equal(cache[name, 1], value), name
        edited, after = wrapped.run_with_cache(IDS, fwd_hooks=[("blocks.1.attn.hook_v", torch.zeros_like)])
        assert after["z", 1].eq(0).all(), "no values, nothing to mix"
        assert not torch.equal(edited, own)
        assert torch.equal(model(input_ids=IDS).logits, own), "nothing stays"
    if has_gradients:
        assert wrapped.verify(IDS).failed() == []
    return wrapped


# Adapters


def with_lora(kind: str, targets, **options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=kind == "gpt2", task_type="CAUSAL_LM"
    )
    return get_peft_model(tiny_models.causal_lm(kind, **options), config).eval()


LORA = [
    ("llama", ["q_proj", "v_proj"]),
    ("llama", "all-linear"),
    ("llama", ["q_proj", "embed_tokens", "lm_head"]),
    ("gpt2", ["c_attn"]),
    ("gpt2", ["c_attn", "c_proj", "c_fc"]),
    ("gpt_neox", ["query_key_value"]),
    ("phi3", ["qkv_proj", "down_proj"]),
]


@needs("peft")
@pytest.mark.parametrize(("kind", "targets"), LORA)
def test_lora(kind, targets) -> None:
    """All points are there, and queries and values are what the adapter makes of them."""
    model = with_lora(kind, targets)
    wrapped = check_model(model)
    assert set(wrapped.hook_dict) == set(hookline.hook(tiny_models.causal_lm(kind)).hook_dict)
    with torch.no_grad(), model.disable_adapter():
        logits, without = wrapped.run_with_cache(IDS)
        assert torch.equal(logits, tiny_models.causal_lm(kind)(IDS).logits)
    assert not torch.equal(without["q", 1], own_qkv(model)[0])


@needs("peft")
def test_an_adapter_from_a_folder_and_merged(tmp_path) -> None:
    from peft import PeftModel

    model = with_lora("llama", ["q_proj", "v_proj"])
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_models.causal_lm("llama"), tmp_path).eval()
    wrapped = check_model(loaded)
    with torch.no_grad():
        assert torch.equal(wrapped(IDS), model(input_ids=IDS).logits)
        merged = loaded.merge_and_unload()
        check_model(merged)
        queries = wrapped.run_with_cache(IDS)[1]["q", 1]
    assert torch.equal(queries, own_qkv(merged)[0]), "the old wrapper looks anew"


@needs("peft")
def test_an_adapter_put_into_a_wrapped_model() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_models.causal_lm("llama")
    wrapped = hookline.hook(base)
    name = "blocks.1.attn.hook_q"
    before = wrapped.point(name)
    wrapped.add_hook(name, torch.zeros_like)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with torch.no_grad():
        assert torch.equal(wrapped.cache(IDS, names_filter="blocks.1.attn.hook_k")["k", 1], own_qkv(base)[1])
        with pytest.warns(NeverFiredWarning, match=r"\(Linear\)"):
            wrapped(IDS)
        wrapped.reset_hooks()
        with pytest.raises(UnknownPointError, match="by name"):
            wrapped.run_with_hooks(IDS, fwd_hooks=[(before, torch.zeros_like)])
        assert torch.equal(wrapped.run_with_cache(IDS)[1]["q", 1], own_qkv(base)[0])
    assert wrapped.verify(IDS).failed() == []


@needs("peft")
@pytest.mark.parametrize(("kind", "targets"), [("llama", ["q_proj", "down_proj"]), ("gpt2", ["c_attn"])])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_an_adapter_under_hooks(kind, targets, checkpointed) -> None:
    model = without_dropout(with_lora(kind, targets))
    if checkpointed:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = hookline.hook(model)
    own = gradients(model, model(input_ids=IDS, labels=IDS).loss)
    assert all("lora" in name for name in own)
    loss, _ = wrapped.run_with_cache(IDS, return_type="loss")
    assert_same(gradients(model, loss), own)
    read = []
    with wrapped.hooks(fwd_hooks=[("blocks.1.attn.*", lambda x: None)], bwd_hooks=[("q1", read.append)]):
        loss = model(input_ids=IDS, labels=IDS).loss
    assert_same(gradients(model, loss), own)
    assert len(read) == 1


def test_a_module_put_around_another() -> None:
    """The inner one is still in the model, but what had its name is now the outer one."""

    class Doubled(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.base_layer(x)

    base = tiny_models.causal_lm("llama")
    wrapped = hookline.hook(base)
    before = wrapped.blocks[1].attn.hook_q
    wrapped.add_hook("blocks.1.attn.hook_q", torch.zeros_like)
    attention(base).q_proj = Doubled(attention(base).q_proj)
    with torch.no_grad():
        wrapped.cache(IDS, names_filter="blocks.2.hook_resid_pre")  # looks at the model anew
        with pytest.warns(NeverFiredWarning, match="no longer"):
            wrapped(IDS)
        wrapped.reset_hooks()
        with pytest.raises(UnknownPointError, match="by name"):
            wrapped.cache(IDS, names_filter=before)
        assert type(wrapped.blocks[1].attn.hook_q.site.module) is Doubled
        assert torch.equal(wrapped.cache(IDS, names_filter="q1")["q", 1], own_qkv(base)[0])


def test_what_a_point_needs_is_replaced() -> None:
    """What this architecture's MLP adds is worked out from what went into a norm."""
    base = tiny_models.causal_lm("granitemoeshared")
    wrapped = hookline.hook(base)
    with torch.no_grad():
        before = wrapped.cache(IDS, names_filter="blocks.1.hook_mlp_out")["mlp_out", 1]
        layer = base.model.layers[1]
        layer.post_attention_layernorm = copy.deepcopy(layer.post_attention_layernorm)
        assert torch.equal(wrapped.cache(IDS, names_filter="blocks.1.hook_mlp_out")["mlp_out", 1], before)


# Quantised

FUSED_OR_NOT = ["llama", "gpt_neox", "phi3"]


@pytest.mark.on_cpu
@pytest.mark.parametrize("kind", FUSED_OR_NOT)
def test_dynamically_quantised(kind) -> None:
    """Their weight is a method, and they have no gradients; that is said."""
    model = torch.ao.quantization.quantize_dynamic(tiny_models.causal_lm(kind), {nn.Linear}, dtype=torch.qint8)
    wrapped = check_model(model, has_gradients=False)
    _, cache = wrapped.run_with_cache(IDS, return_type="loss", incl_bwd=True, names_filter="blocks.1.attn.hook_q")
    with pytest.raises(UnknownPointError, match="reached"):
        cache["blocks.1.attn.hook_q_grad"]


@needs("torchao")
@pytest.mark.parametrize("kind", FUSED_OR_NOT)
def test_torchao(kind) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny_models.causal_lm(kind)
    quantize_(model, Int8WeightOnlyConfig())
    assert type(attention(model).get_submodule("o_proj" if kind != "gpt_neox" else "dense").weight) is not nn.Parameter
    check_model(model)


@needs("bitsandbytes")
@pytest.mark.parametrize("kind", FUSED_OR_NOT)
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(kind, bits) -> None:
    import bitsandbytes

    def quantised(linear: nn.Linear) -> nn.Linear:
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        if bits == 8:
            new = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            new.load_state_dict(linear.state_dict())
            return new.to(devices.DEVICE)
        new = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        new.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        new.bias = linear.bias
        return new.to(devices.DEVICE)

    model = tiny_models.causal_lm(kind)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not model.get_output_embeddings():
                setattr(module, name, quantised(child))
    if bits == 4 and kind != "llama":
        fused = attention(model).get_submodule("qkv_proj" if kind == "phi3" else "query_key_value")
        assert fused.weight.shape[0] != fused.out_features, "packed"
    check_model(model)


# Offloaded


def offloaded(kind: str, how: str, folder):
    import accelerate

    model = tiny_models.causal_lm(kind)
    if how == "cpu":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if how == "disk":
        accelerate.disk_offload(model, folder, execution_device="cpu")
        return model
    layers = "model.layers" if kind == "llama" else "transformer.h"
    places = {
        name: "cpu"
        for name, module in model.named_modules()
        if name and not name.startswith(layers) and not list(module.children())
    }
    places |= {f"{layers}.{layer}": "cpu" if layer < 1 else "disk" for layer in range(4)}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@needs("accelerate")
@pytest.mark.on_cpu
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["cpu", "disk", "device_map"])
def test_offloaded(kind, how, tmp_path) -> None:
    """Weights that are only there while their module runs."""
    model = offloaded(kind, how, tmp_path)
    assert attention(model).get_submodule("o_proj" if kind == "llama" else "c_proj").weight.is_meta
    assert how != "device_map" or set(model.hf_device_map.values()) == {"cpu", "disk"}
    wrapped = check_model(model)
    assert wrapped.cfg.device == torch.device("cpu")
    plain = hookline.hook(tiny_models.causal_lm(kind))
    with torch.no_grad():
        cache, own = (each.run_with_cache(IDS)[1] for each in (wrapped, plain))
        assert all(torch.equal(cache[name], own[name]) for name in cache)
        gone = set(own) - set(cache)
        assert all(name.endswith(("hook_scale", "hook_normalized")) for name in gone), gone
        results = [each.cache(IDS, names_filter="blocks.1.attn.hook_result") for each in (wrapped, plain)]
        assert torch.allclose(results[0]["result", 1], results[1]["result", 1], atol=1e-5)
    with pytest.raises(UnknownPointError, match="no data"):
        wrapped.point("blocks.1.ln1.hook_scale")
    ids = wrapped.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(ids, plain.generate(IDS, max_new_tokens=3, do_sample=False))


@needs("accelerate")
def test_offloading_a_wrapped_model() -> None:
    import accelerate

    model = tiny_models.causal_lm("llama")
    wrapped = hookline.hook(model)
    with torch.no_grad():
        logits, cache = wrapped.run_with_cache(IDS, names_filter="blocks.*.attn.*")
        accelerate.cpu_offload(model, execution_device=devices.DEVICE)
        again, after = wrapped.run_with_cache(IDS, names_filter="blocks.*.attn.*")
    assert torch.equal(logits, again)
    assert all(torch.equal(after[name], cache[name]) for name in cache)


@needs("accelerate")
def test_loading_with_a_device_map(tmp_path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = tiny_models.causal_lm("llama")
    model.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"<eos>": 0, "the": 1, "cat": 2}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path)
    loaded = hookline.load(tmp_path, device_map="auto")
    with torch.no_grad():
        assert torch.equal(loaded(IDS), model(IDS).logits)


# Gradient checkpointing


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(own)
    for name, gradient in own.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


POINTS = [
    "blocks.1.hook_resid_pre",
    "blocks.1.ln1.hook_scale",
    "blocks.1.ln1.hook_normalized",
    "blocks.1.hook_q_input",
    "blocks.1.attn.hook_q",
    "blocks.1.attn.hook_rot_q",
    "blocks.1.attn.hook_rot_k",
    "blocks.1.attn.hook_attn_scores",
    "blocks.1.attn.hook_pattern",
    "blocks.1.attn.hook_z",
    "blocks.1.attn.hook_result",
    "blocks.1.hook_resid_mid",
    "blocks.1.mlp.hook_post",
    "blocks.1.hook_resid_post",
]


def checkpointed(kind: str, attn: str, reentrant: bool):
    model = without_dropout(tiny_models.causal_lm(kind, attn_implementation=attn, use_cache=False)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


@pytest.mark.quick_for("llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_edits_in_a_checkpointed_model(kind, attn, reentrant) -> None:
    """Gradients are those of the same edits without checkpointing, and hooks that only read are called once."""
    model = checkpointed(kind, attn, reentrant)
    wrapped = hookline.hook(model)

    def run(names: list[str]) -> tuple[dict[str, torch.Tensor], list[str], dict[str, torch.Tensor]]:
        read, back = [], {}
        loss = wrapped.run_with_hooks(
            IDS,
            return_type="loss",
            fwd_hooks=[
                *((n, lambda x: 0.7 * x) for n in names),
                *((n, lambda x, hook: read.append(hook.name)) for n in names),
            ],
            bwd_hooks=[(n, lambda g, hook: back.update({hook.name: g.clone()}) or 0.5 * g) for n in names],
        )
        return gradients(model, loss), read, back

    bare = gradients(model, model(IDS, labels=IDS).loss)
    together = [name for name in POINTS if "input" not in name]  # a head's own copy has no norm of its own
    for names in [*([name] for name in POINTS), together]:
        found, read, back = run(names)
        model.gradient_checkpointing_disable()
        own, _, own_back = run(names)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert_same(found, own)
        assert_same(back, own_back)
        assert sorted(read) == sorted(names)
        assert any(not torch.allclose(found[name], bare[name]) for name in bare), names
    assert not pass_state.interceptors


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", POINTS)
def test_looking_into_a_checkpointed_model(reentrant, name) -> None:
    """However somebody looks, the gradients stay the model's own."""
    model = checkpointed("llama", "sdpa", reentrant)
    wrapped = hookline.hook(model)
    own = gradients(model, model(IDS, labels=IDS).loss)
    read = []

    assert_same(gradients(model, wrapped.run_with_cache(IDS, return_type="loss", names_filter=name)[0]), own)
    for hooks in ({"fwd_hooks": [(name, lambda x: read.append(x))]}, {"bwd_hooks": [(name, lambda g: None)]}):
        assert_same(gradients(model, wrapped.run_with_hooks(IDS, return_type="loss", **hooks)), own)
        with wrapped.hooks(**hooks):
            assert_same(gradients(model, wrapped(IDS, return_type="loss")), own)
    undo = wrapped.add_hook(name, lambda x: read.append(x))
    assert_same(gradients(model, wrapped(IDS, return_type="loss")), own)
    undo()
    assert len(read) == 3, "once in each forward pass, and not when it recomputes"
    # One who looks and one who edits, in the same region.
    hooks = [(name, lambda x: None), ("blocks.1.attn.hook_k", torch.clone)]
    assert_same(gradients(model, wrapped.run_with_hooks(IDS, return_type="loss", fwd_hooks=hooks)), own)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid", "blocks.1.hook_resid_post"])
def test_layers_whose_hooks_are_outside_the_checkpoint(reentrant, name) -> None:
    """As transformers does it from 5.23 on: no event brings the input of a layer when its parts recompute."""
    model = without_dropout(tiny_models.causal_lm("llama", use_cache=False)).train()
    model.enable_input_require_grads()
    wrapped = hookline.hook(model)

    def run() -> dict[str, torch.Tensor]:
        hooks = {"fwd_hooks": [(name, lambda x: 0.7 * x)], "bwd_hooks": [(name, lambda g: 0.5 * g)]}
        return gradients(model, wrapped.run_with_hooks(IDS, return_type="loss", **hooks))

    own = run()
    for layer in model.model.layers:

        def recomputed(*args, forward=layer.forward, **kwargs):
            return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)

        layer.forward = recomputed
    assert_same(run(), own)


@pytest.mark.parametrize("name", ["ln1.hook_scale", "ln1.hook_normalized", "hook_q_input", "attn.hook_result"])
def test_the_same_embeddings_twice(name) -> None:
    """What an edit made of them in the first pass is forgotten in the second."""
    wrapped = hookline.hook(tiny_models.causal_lm("llama"))
    embeddings = torch.randn(1, 5, wrapped.cfg.d_model)
    with torch.no_grad(), wrapped.hooks(fwd_hooks=[(f"blocks.0.{name}", lambda x: 2 * x)]):
        assert torch.equal(wrapped(inputs_embeds=embeddings), wrapped(inputs_embeds=embeddings))


# The kind of attention, precision, compilation


@pytest.mark.quick_for("llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_another_attention_after_wrapping(kind) -> None:
    model = tiny_models.causal_lm(kind)
    wrapped = hookline.hook(model)
    with torch.no_grad():
        for attn in ("eager", "sdpa", "eager"):
            assert wrapped.set_attn_implementation(attn) is None
            assert wrapped.cfg.attn_implementation == attn == model.config._attn_implementation
            logits, cache = wrapped.run_with_cache(IDS)
            assert torch.equal(logits, model(IDS).logits)
            pattern = cache["pattern", 1]
            edited = wrapped.run_with_hooks(IDS, fwd_hooks=[("pattern1", torch.zeros_like)])
            assert not torch.allclose(edited, logits)
            assert wrapped.verify(IDS).failed() == []
        assert torch.equal(pattern, model(IDS, output_attentions=True).attentions[1])
    with pytest.raises(ImportError, match="FlashAttention2"):
        wrapped.set_attn_implementation("flash_attention_2")


@pytest.mark.slow
def test_flex_attention_cannot_be_looked_into() -> None:
    """It says so, and all that is not inside it goes on."""
    wrapped = hookline.hook(tiny_models.causal_lm("llama"))
    with torch.no_grad():
        own = wrapped(IDS)
        wrapped.set_attn_implementation("flex_attention")
        assert wrapped.cfg.attn_implementation == "flex_attention"
        logits, cache = wrapped.run_with_cache(IDS)
        assert torch.allclose(logits, own, atol=1e-4)
        assert ("q", 1) in cache
        assert ("pattern", 1) not in cache
        with pytest.warns(NeverFiredWarning, match=r"set_attn_implementation\('sdpa'\)"):
            wrapped.run_with_hooks(IDS, fwd_hooks=[("pattern1", torch.zeros_like)])
        edited = wrapped.run_with_hooks(IDS, fwd_hooks=[("v1", torch.zeros_like)])
        assert not torch.allclose(edited, logits, atol=1e-4)


@pytest.mark.quick_for("llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
def test_sixteen_bits(kind, dtype) -> None:
    """Not a bit changes; an edit's result has the dtype of its point; the proof allows for the rounding."""
    model = tiny_models.causal_lm(kind)
    wrapped = hookline.hook(model)
    with torch.autocast(devices.DEVICE.type, dtype=torch.bfloat16) if dtype == "autocast" else nullcontext():
        if dtype != "autocast":
            assert wrapped.to(dtype) is wrapped, "after wrapping"
            assert wrapped.cfg.dtype == dtype
        with torch.no_grad():
            own = model(IDS).logits
            logits, cache = wrapped.run_with_cache(IDS)
            assert logits.dtype == (torch.bfloat16 if dtype == "autocast" else dtype)
            assert torch.equal(logits, own)
            for name in ("attn.hook_q", "attn.hook_pattern", "attn.hook_z", "mlp.hook_post", "hook_resid_post"):
                name = f"blocks.1.{name}"
                hooks = [(name, lambda x: x.double() / 2)]
                edited, after = wrapped.run_with_cache(IDS, fwd_hooks=hooks, names_filter=name)
                assert after[name].dtype == cache[name].dtype
                assert torch.equal(after[name], (cache[name].double() / 2).to(cache[name].dtype))
                assert edited.dtype == own.dtype
                assert not torch.equal(edited, own)
        assert wrapped.verify(IDS).failed() == []


@needs_compiler
@pytest.mark.quick_for("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("part", ["model", "layers"])
def test_compiled(kind, part) -> None:
    model = tiny_models.causal_lm(kind)
    with torch.no_grad():
        own = model(IDS).logits
    if part == "model":
        wrapped = hookline.hook(torch.compile(model, backend="eager"))
    else:
        wrapped = hookline.hook(model)
        for layer in model.model.layers if kind == "llama" else model.transformer.h:
            layer.compile(backend="eager")
    with torch.no_grad():
        assert torch.allclose(wrapped(IDS), own, atol=1e-5)
        logits, cache = wrapped.run_with_cache(IDS)
        assert torch.equal(logits, own), "with hooks it is the plain model"
        assert torch.equal(cache["q", 1], own_qkv(tiny_models.causal_lm(kind))[0])
        edited = wrapped.run_with_hooks(IDS, fwd_hooks=[("q1", torch.zeros_like)])
        assert not torch.allclose(edited, own)
        assert torch.allclose(wrapped(IDS), own, atol=1e-5)
    torch._dynamo.reset()


# Other heads


@pytest.mark.quick_for("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_without_a_language_models_head(kind) -> None:
    """They have the same points; without any head the last hidden state is what comes out."""
    config = tiny_models.config(kind, pad_token_id=0)
    for auto in (AutoModel, AutoModelForSequenceClassification):
        model = auto.from_config(config).eval()
        wrapped = hookline.hook(model)
        with torch.no_grad():
            output, cache = wrapped.run_with_cache(IDS)
            assert torch.equal(output, model(IDS)[0])
            assert cache["z", 1].shape[:3] == (2, 7, 4)
            assert torch.equal(cache["resid_pre", 1], model(IDS, output_hidden_states=True).hidden_states[1])
        assert wrapped.verify(IDS).failed() == []
        with pytest.raises(HooklineError, match="next-token loss"):
            wrapped(IDS, return_type="loss")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tied_weights(kind) -> None:
    """An edit of the embeddings is none of the unembedding."""
    model = tiny_models.causal_lm(kind, tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    wrapped = check_model(model)
    hooks = [("ln_final.hook_out", torch.zeros_like), ("hook_embed", torch.zeros_like)]
    assert wrapped.run_with_hooks(IDS, fwd_hooks=hooks).eq(0).all()
    with torch.no_grad():
        logits = wrapped.run_with_hooks(IDS, fwd_hooks=[("unembed.hook_in", torch.ones_like)])
    assert torch.allclose(logits[0, 0], model.get_input_embeddings().weight.sum(-1), atol=1e-5)


@needs("peft")
def test_lora_on_a_model_that_sees() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    model = hookline.hook(get_peft_model(tiny_vision.module_of("llava"), config).eval())
    assert {"vision.blocks.0.attn.hook_q", "blocks.0.attn.hook_q", "projector.hook_out"} <= set(model.hook_dict)
    assert verify_model(model, tiny_vision.inputs_of("llava")).failed() == []


def test_a_model_with_two_heads_returns_the_logits_of_its_tokens() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForPreTraining(BertConfig(**sizes, num_hidden_layers=1)).eval()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(hookline.hook(model)(ids), model(ids).prediction_logits)
    with pytest.raises(HooklineError, match=r"loss.*none"):
        outcome(ModelOutput(loss=torch.zeros(())))

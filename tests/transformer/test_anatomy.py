"""The anatomy of every architecture, proved against the model itself."""

import copy
import re

import pytest
import tiny_models
import torch
from releases import torch_is_before, transformers_is_before
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hookline
from hookline import HookedModel
from hookline.errors import HooklineWarning
from hookline.transformer.dialects import classic_name
from hookline.transformer.outputs import outcome
from hookline.transformer.verify.report import verify_model

QUICK = [
    "gpt2",
    "llama",
    "qwen3",
    "gemma2",
    "gpt_oss",
    "bloom",
    "mpt",
    "falcon",
    "opt",
    "bert",
    "bart",
    "phi3",
    "mamba",
]
QUICK_ENCODERS = ["bert", "distilbert", "modernbert"]
QUICK_SEQ2SEQ = ["t5", "bart", "t5gemma"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own

# Their layers are not where layers usually are; native points work.
WITHOUT_ANATOMY = {
    *("blt", "hrm_text", "longcat_flash", "xlm", "xlnet", "xlstm"),
    *("albert", "flaubert", "fnet", "funnel", "ibert", "canine"),
    *("fsmt", "glmasr", "longt5", "qwen2_audio", "qwen3_asr"),
}


@pytest.fixture(autouse=True)
def _quiet():
    import transformers

    transformers.logging.set_verbosity_error()


def check(kind: str, make=tiny_models.causal_lm) -> None:
    module = make(kind)
    inputs = tiny_models.inputs(module)
    with torch.no_grad():
        bare = outcome(module(**inputs))
    model = hookline.hook(module)
    assert isinstance(model, HookedModel) == (kind not in WITHOUT_ANATOMY)
    if not isinstance(model, HookedModel):
        assert len(model.hook_dict) > 10
        return
    assert [str(verdict) for verdict in verify_model(model, inputs).failed()] == []
    with torch.no_grad():
        assert torch.equal(outcome(module(**inputs)), bare)


def check_resuming(kind: str) -> None:
    """A run that starts in the middle gives what the whole run gives, or refuses."""
    module = tiny_models.causal_lm(kind)
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    if not isinstance(model, HookedModel) or "blocks.1.hook_resid_pre" not in model.hook_dict:
        return
    needs_tokens = kind.startswith("zamba") or bool(model.anatomy.towers)
    tokens = inputs["input_ids"] if needs_tokens else None
    more = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits, cache = model.run_with_cache(**inputs, names_filter="blocks.1.hook_resid_pre")
        stream = cache["resid_pre", 1]
        if stream.ndim != 3 or stream.shape[-1] != model.anatomy.width or kind in CANNOT_RESUME:
            with pytest.raises(hookline.HooklineError):
                model(stream, start_at_layer=1, tokens=tokens, **more)
        else:
            assert torch.allclose(model(stream, start_at_layer=1, tokens=tokens, **more), logits, atol=1e-5)


# Their layers hand on more than the stream.
CANNOT_RESUME = {
    *("glm_moe_dsa", "hy_v4", "zaya", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    "musicgen_melody",
    *(("moshi",) if transformers_is_before("5.21") else ()),  # a tuple
}


@pytest.mark.parametrize("kind", QUICK)
def test_architecture(kind) -> None:
    check(kind)
    check_resuming(kind)


@pytest.mark.parametrize("kind", QUICK_ENCODERS)
def test_encoder(kind) -> None:
    check(kind, tiny_models.encoder)


@pytest.mark.parametrize("kind", QUICK_SEQ2SEQ)
def test_encoder_decoder(kind) -> None:
    check(kind, tiny_models.seq2seq)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in tiny_models.ENCODERS if kind not in QUICK_ENCODERS])
def test_every_other_encoder(kind) -> None:
    check(kind, tiny_models.encoder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in tiny_models.SEQ2SEQ if kind not in QUICK_SEQ2SEQ])
def test_every_other_encoder_decoder(kind) -> None:
    check(kind, tiny_models.seq2seq)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in tiny_models.CAUSAL if kind not in QUICK])
def test_every_other_architecture(kind) -> None:
    check(kind)
    check_resuming(kind)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_the_verifier_catches_a_wrong_anatomy(kind, monkeypatch) -> None:
    """Points that are somewhere else than their names say do not pass."""
    module = tiny_models.causal_lm(kind)
    model = hookline.hook(module)
    specs = model.index.specs
    wrong = {
        "blocks.1.hook_attn_out": "blocks.1.hook_mlp_out",
        "blocks.1.attn.hook_v": "blocks.1.attn.hook_k",
        "blocks.2.attn.hook_pattern": "blocks.1.attn.hook_pattern",
        "blocks.3.hook_resid_pre": "blocks.1.hook_resid_pre",
    }
    for name, other in wrong.items():
        point = hookline.HookPoint.at_site(name, specs[other].site, model.index.permanent)
        monkeypatch.setitem(model.index.hook_dict, name, point)
    model.index._asked.clear()
    failed = {verdict.name for verdict in verify_model(model, tiny_models.inputs(module)).failed()}
    assert failed >= set(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_cached_runs_are_bitwise_equal(kind, implementation, dtype) -> None:
    module = tiny_models.causal_lm(kind).to(dtype)
    module.set_attn_implementation(implementation)
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    with torch.no_grad():
        bare = module(**inputs).logits
        logits, cache = model.run_with_cache(**inputs, names_filter=list(model.hook_dict))
    assert torch.equal(logits, bare)
    assert len(cache) == len(model.hook_dict)
    assert module.config._attn_implementation == implementation


class FusedCalls(TorchDispatchMode):
    """Counts the fused attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.on_cpu(reason="a GPU has no fused kernel for grouped queries in 32 bits")
@pytest.mark.parametrize(
    ("hooks", "fewer"),
    [
        ([], 0),
        ([("blocks.1.attn.hook_pattern", lambda p: p * 0.5)], 1),
        ([("blocks.1.attn.hook_rot_q", lambda q: q * 0.5)], 0),  # queries can be edited without leaving it
        ([("blocks.1.attn.hook_z", lambda z: z * 0.5)], 0),
    ],
)
def test_only_the_layer_whose_pattern_is_edited_leaves_the_fused_attention(hooks, fewer) -> None:
    ungrouped = {"num_key_value_heads": 4} if torch_is_before("2.9") else {}  # it has no fused kernel for groups
    module = tiny_models.causal_lm("llama", **ungrouped)
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    with torch.no_grad(), FusedCalls() as calls:
        model.run_with_hooks(**inputs, fwd_hooks=hooks)
    assert calls.count == len(module.model.layers) - fewer


def test_padding_gives_the_patterns_of_the_eager_model() -> None:
    module = tiny_models.causal_lm("llama")
    ids = tiny_models.inputs(module)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model = hookline.hook(module)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, attention_mask=mask, names_filter="blocks.*.attn.hook_pattern")
        module.set_attn_implementation("eager")
        own = module(ids, attention_mask=mask, output_attentions=True).attentions
    for layer, attention in enumerate(own):
        real = mask.bool()[:, None, :, None].expand_as(attention)
        assert torch.allclose(cache["pattern", layer][real], attention[real], atol=1e-6)


class InAttention(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupt_inside_an_attention_that_is_looked_into() -> None:
    module = tiny_models.causal_lm("llama")
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    with torch.no_grad():
        bare = model(**inputs)
        original, module.model.layers[1].self_attn.o_proj = module.model.layers[1].self_attn.o_proj, InAttention()
        with pytest.raises(KeyboardInterrupt):
            model.run_with_cache(**inputs)
        module.model.layers[1].self_attn.o_proj = original
        assert torch.equal(model.run_with_cache(**inputs)[0], bare)


@pytest.mark.parametrize(
    ("asked", "classic"),
    [
        (("q", 1), "blocks.1.attn.hook_q"),
        ("q1", "blocks.1.attn.hook_q"),
        (("resid_post", -1), "blocks.3.hook_resid_post"),
        (("scale", 2, "ln1"), "blocks.2.ln1.hook_scale"),
        ("embed", "hook_embed"),
        ("blocks.1.attn.q.hook_out", "blocks.1.attn.hook_q"),
        ("blocks.-1.hook_in", "blocks.3.hook_resid_pre"),
        ("embed.hook_out", "hook_embed"),
        (("lm.layer.pre", 2), "blocks.2.hook_resid_pre"),
        ("lm.attn.2.out", "blocks.2.hook_attn_out"),
        ("transformer.h.0", None),
        (3, None),
    ],
)
def test_dialects(asked, classic) -> None:
    assert classic_name(asked, {"blocks": 4}) == classic


@pytest.mark.parametrize(
    ("asked", "classic"),
    [
        ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_pre"),  # which there is not: it must be said which stack
        (("q", -1, "decoder"), "decoder.3.attn.hook_q"),
        (("pattern", 0, "decoder", "cross_attn"), "decoder.0.cross_attn.hook_pattern"),
        ("encoder.-1.hook_out", "encoder.5.hook_resid_post"),
    ],
)
def test_dialects_of_two_stacks(asked, classic) -> None:
    assert classic_name(asked, {"encoder": 6, "decoder": 4}) == classic


def test_every_dialect_reaches_the_same_point() -> None:
    module = tiny_models.causal_lm("gpt2")
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs)
        names = ["blocks.1.hook_resid_post", "blocks.1.hook_out", "resid_post1", "transformer.h.1", "lm.layer.1.post"]
        for name in [*names, ("resid_post", 1), ("lm.layer.post", 1)]:
            assert torch.equal(cache[name], cache["blocks.1.hook_resid_post"])
            zeroed = model.run_with_hooks(**inputs, fwd_hooks=[(name, torch.zeros_like)])
            assert torch.equal(zeroed, model.run_with_hooks(**inputs, fwd_hooks=[(names[0], torch.zeros_like)]))
        assert torch.equal(model.run_with_cache(**inputs, names_filter=1)[1]["1"], cache["resid_post", 1])
        native = model.run_with_cache(**inputs, names_filter="transformer.h.*.attn.c_attn")[1]
        assert len(native) == model.cfg.n_layers


def test_points_by_attribute() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    assert model.blocks[1].attn.hook_z is model.hook_dict["blocks.1.attn.hook_z"]
    assert model.blocks[-1].hook_resid_post.name == f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    assert model.hook_embed.axes == "b p d"
    assert len(model.blocks) == model.cfg.n_layers
    assert "hook_pattern" in dir(model.blocks[0].attn)
    with pytest.raises(IndexError):
        model.blocks[99]
    with pytest.raises(AttributeError, match=r"'blocks\.0\.nonsense'"):
        model.blocks[0].nonsense


def test_a_point_that_is_not_to_be_had_says_why() -> None:
    llama = hookline.hook(tiny_models.causal_lm("llama"))
    with pytest.raises(hookline.errors.UnavailablePointError, match="position embedding"):
        llama.point("hook_pos_embed")
    mamba = hookline.hook(tiny_models.causal_lm("mamba"))
    with pytest.raises(hookline.errors.UnavailablePointError, match="softmax"):
        mamba.point("blocks.0.attn.hook_pattern")
    gptj = hookline.hook(tiny_models.causal_lm("gptj"))
    with pytest.raises(hookline.errors.UnavailablePointError, match="parallel"):
        gptj.point("blocks.0.hook_resid_mid")
    doge = hookline.hook(tiny_models.causal_lm("doge"))
    with pytest.raises(hookline.errors.UnavailablePointError, match="fails verification"):
        doge.point("blocks.0.hook_mlp_out")


def test_a_wrapped_language_model_can_be_copied() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    inputs = tiny_models.inputs(model.module)
    other = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(other(**inputs), model(**inputs))
        assert list(other.hook_dict) == list(model.hook_dict)


def test_an_attention_that_cannot_be_looked_into_is_reported() -> None:
    """Some kernels are not seen, flash attention's among them; whoever asks for a pattern then is told."""
    module = tiny_models.causal_lm("llama")
    model, inputs = hookline.hook(module), tiny_models.inputs(module)
    attention = module.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with torch.no_grad(), pytest.warns(hookline.NeverFiredWarning, match=r"set_attn_implementation\('sdpa'\)"):
        model.run_with_hooks(**inputs, fwd_hooks=[("blocks.1.attn.hook_pattern", torch.clone)])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gptj", "mixtral", "gemma2", "bloom"])
def test_points_are_listed_in_the_order_in_which_they_fire(kind) -> None:
    module = tiny_models.causal_lm(kind)
    model, fired = hookline.hook(module), []
    hooks = [(name, lambda _, hook: fired.append(hook.name)) for name in model.hook_dict]
    with torch.no_grad():
        model.run_with_hooks(**tiny_models.inputs(module), fwd_hooks=hooks)
    assert fired == list(model.hook_dict)


def test_what_a_hook_computes_inside_attention_is_not_the_models() -> None:
    module = tiny_models.causal_lm("llama")
    model, inputs = hookline.hook(module), tiny_models.inputs(module)

    def busy(v):
        torch.softmax(v @ v.transpose(-1, -2), -1)
        torch.nn.functional.scaled_dot_product_attention(v, v, v)

    pattern, v = "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_v"
    with torch.no_grad():
        _, plain = model.run_with_cache(**inputs, names_filter=pattern)
        _, cache = model.run_with_cache(**inputs, names_filter=pattern, fwd_hooks=[(v, busy)])
    assert list(cache) == [pattern]
    assert torch.equal(cache[pattern], plain[pattern])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm.mlp.9.out", "Layers are 0 to 3"),
        ("blocks.4.hook_resid_pre", "Layers are 0 to 3"),
        ("lm.layer.post", r"needs a layer: \('lm.layer.post', 3\)"),
        ("blocks.0.mlp.hook_router", "not a mixture of experts"),
        ("blocks.0.ln1_post.hook_scale", "no such norm"),
        ("blocks.0.mlp.hook_pre_linear", "no gate"),
    ],
)
def test_names_that_are_nearly_right(name, message) -> None:
    with pytest.raises(hookline.UnknownPointError, match=message):
        hookline.hook(tiny_models.causal_lm("gpt2")).point(name)


def test_two_stacks_want_to_be_told_apart() -> None:
    with pytest.raises(hookline.UnknownPointError, match="'encoder"):
        hookline.hook(tiny_models.seq2seq("t5")).point("blocks.0.hook_resid_pre")


def test_globs_in_other_dialects_and_layers_by_any_name() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    chosen = model.index.select("lm.layer.*.post")
    assert [point.name for point in chosen] == [f"blocks.{layer}.hook_resid_post" for layer in range(4)]
    for name in ("q3", "q-1", "blocks.-1.hook_resid_post", "lm.attn.3.pre", "transformer.h.3.attn"):
        assert model.point(name).layer() == 3
    assert model.hook_dict["q3"].site == model.hook_dict["blocks.3.attn.hook_q"].site
    bert = hookline.hook(tiny_models.encoder("bert"))
    assert len(bert.index.select("blocks.*.attn.hook_z")) == 4


def test_a_cache_without_what_is_recorded_on_request_says_so() -> None:
    module = tiny_models.causal_lm("gpt2")
    _, cache = hookline.hook(module).run_with_cache(**tiny_models.inputs(module))
    with pytest.raises(hookline.errors.UnavailablePointError, match="by name"):
        cache["result", 1]


def test_an_unknown_architecture_says_what_was_not_found() -> None:
    net = hookline.hook(tiny_models.causal_lm("xlstm"))
    with pytest.raises(hookline.UnknownPointError, match=r"transformer/roles\.py"):
        net.point("blocks.0.hook_resid_pre")
    with pytest.raises(hookline.UnknownPointError) as error:
        net.point("nothing")
    assert "roles.py" not in str(error.value)


@pytest.mark.parametrize(
    ("names_filter", "is_asked"),
    [
        ("blocks.1.attn.hook_result", True),
        (("result", 1), True),
        ("blocks.*.attn.hook_result", True),
        ("*hook_result", True),
        (["blocks.1.attn.hook_z", "blocks.1.*.hook_result"], True),
        (re.compile(r"hook_(z|q)$|hook_result$"), True),
        (re.compile(r"hook_(z|result)$"), True),
        ([lambda name: name.endswith(("hook_z", "hook_result")), "blocks.*.hook_result"], True),
        (lambda name: name.endswith("hook_result"), True),
        ("blocks.1.attn.hook_res*", True),  # it can mean nothing else
        (None, False),
        ("blocks.*", False),
        ("blocks.1.hook_*", False),
        ("*attn*", False),
        (re.compile("attn"), False),
        (lambda name: "attn" in name, False),
        (["blocks.1.*", "blocks.0.hook_resid_post"], False),
    ],
)
@pytest.mark.filterwarnings("ignore:this filter also matches:hookline.errors.HooklineWarning")
def test_filters_include_points_on_request_only_by_name(names_filter, is_asked, tmp_path) -> None:
    model, name = hookline.hook(tiny_models.causal_lm("llama")), "blocks.1.attn.hook_result"
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        cache = model.run_with_cache(ids, names_filter=names_filter)[1]
    others = [each for each in cache if model.index.is_on_request(each) and "hook_result" not in each]
    assert (name in cache) == is_asked
    assert not others
    plans = (model.plan(names_filter), model.points(names_filter), model.plan(fwd_hooks=[(names_filter, lambda x: x)]))
    assert [name in str(plan) for plan in plans] == [is_asked] * 3
    hooked = []
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=[(names_filter, lambda x, hook: hooked.append(hook.canonical_name))])
        remove = model.add_hook(names_filter, lambda x, hook: hooked.append(hook.canonical_name))
        model(ids)
        remove()
    assert hooked.count(name) == 2 * is_asked
    if is_asked or names_filter == "blocks.1.hook_*":  # others have points that cannot be stored
        store = hookline.harvest(model, ids, names_filter, tmp_path / "store", progress=False)
        assert (name in store) == is_asked


@pytest.mark.parametrize("name", ["blocks.1.attn.hook_result", "blocks.0.hook_q_input"])
def test_a_filter_that_drops_points_on_request_says_so(name) -> None:
    model, ids = hookline.hook(tiny_models.causal_lm("llama")), torch.tensor([[3, 4, 5]])
    wanted = {name, "blocks.1.attn.hook_z"}
    with pytest.warns(HooklineWarning, match=re.escape(f"'{name}'")):
        _, cache = model.run_with_cache(ids, names_filter=lambda each: each in wanted)
    assert list(cache) == ["blocks.1.attn.hook_z"]
    with pytest.warns(HooklineWarning, match=re.escape("'blocks.*.attn.hook_result'")):
        model.run_with_hooks(ids, fwd_hooks=[(re.compile("attn"), lambda x: x)])
    _, cache = model.run_with_cache(ids, names_filter=[lambda each: each in wanted, name])
    assert {*cache} == wanted

"""What a call returns: options that add to the model's own output object are honored or refused in every verb."""

import pytest
import tiny_models
import tiny_vision
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTForImageClassification
from transformers.utils import ModelOutput

import hookline
from hookline import HooklineError
from hookline.errors import HooklineWarning

IMAGES = torch.rand(2, 3, 16, 16)
IDS = torch.tensor([[5, 17, 42, 7, 3]])
POINT = "blocks.1.hook_resid_pre"
ASKING = [
    {"output_hidden_states": True},
    {"output_attentions": True},
    {"output_router_logits": True},
    {"return_dict": False},
    {"use_cache": True, "start_at_layer": 1},
]
VERBS = {
    "call": lambda model, *args, **options: model(*args, **options),
    "hooks": lambda model, *args, **options: model.run_with_hooks(*args, **options),
    "cache": lambda model, *args, **options: model.run_with_cache(*args, names_filter=POINT, **options)[0],
    "in a context": lambda model, *args, **options: _in_a_context(model, args, options),
}


def _in_a_context(model, args, options):
    with model.hooks([(POINT, lambda x: None)]):
        return model(*args, **options)


@pytest.fixture(scope="module")
def model():
    return hookline.hook(tiny_models.causal_lm("mixtral", attn_implementation="eager"))


@pytest.mark.parametrize("verb", [*VERBS, "cache alone"])
@pytest.mark.parametrize("option", ASKING, ids=lambda option: next(iter(option)))
@pytest.mark.parametrize("returned", ["logits", "loss", None, "default"])
def test_an_option_whose_effect_would_not_be_returned(model, verb, option, returned) -> None:
    run = VERBS.get(verb) or (lambda model, *args, **options: model.cache(*args, names_filter=POINT, **options))
    prompt = model(IDS, stop_at_layer=1) if "start_at_layer" in option else IDS
    chosen = {} if returned == "default" else {"return_type": returned}
    with pytest.raises(HooklineError) as error:
        run(model, prompt, **option, **chosen)
    name, value = next(iter(option.items()))
    assert str(error.value).startswith(f"{name}={value}")
    assert 'return_type="output"' in str(error.value)
    assert "model.module" in str(error.value)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ASKING[:3], ids=lambda option: next(iter(option)))
def test_the_models_own_output(model, verb, option) -> None:
    output, own = VERBS[verb](model, IDS, "output", **option), model.module(IDS, **option)
    assert type(output) is type(own)
    assert output.keys() == own.keys()
    assert all(torch.equal(output.hidden_states[n], x) for n, x in enumerate(own.get("hidden_states") or ()))
    assert torch.equal(output.logits, own.logits)


def test_the_models_own_output_has_the_edits(model) -> None:
    hooks = [("blocks.0.hook_resid_post", torch.zeros_like)]
    output, cache = model.run_with_cache(IDS, "output", output_hidden_states=True, fwd_hooks=hooks)
    assert not output.hidden_states[1].any()
    assert torch.equal(output.logits, model.run_with_hooks(IDS, fwd_hooks=hooks))
    assert torch.equal(cache.logits, output.logits)
    stream = model(IDS, stop_at_layer=1)
    assert torch.equal(model(stream, "output", start_at_layer=1).logits, model(IDS))
    assert isinstance(model(IDS, "output", return_dict=False), tuple)


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_off_or_done_anyway_is_accepted(model, verb) -> None:
    off = {
        name: value
        for name in ("output_hidden_states", "output_attentions", "output_router_logits")
        for value in (False, None)
    }
    for option in [
        *({name: value} for name, value in off.items()),
        {"use_cache": True},
        {"use_cache": False},
        {"return_dict": True},
    ]:
        assert torch.equal(VERBS[verb](model, IDS, **option), model.module(IDS).logits), option


def test_a_cache_of_keys_and_values_is_filled_or_returned(model) -> None:
    past = model(IDS[:, :3], "output", use_cache=True).past_key_values
    logits = model(IDS[:, 3:], past_key_values=past, use_cache=True)
    assert past.get_seq_length() == 5
    assert torch.allclose(logits, model(IDS)[:, 3:], atol=1e-5)
    without = hookline.hook(tiny_models.causal_lm("llama", use_cache=False))
    with pytest.raises(HooklineError, match="use_cache=True"):
        without(IDS, use_cache=True)
    assert without(IDS, "output", use_cache=True).past_key_values.get_seq_length() == 5


def test_labels_change_nothing(model) -> None:
    output = model(IDS, labels=IDS, output_hidden_states=True)
    assert len(output.hidden_states) == len(model.module(IDS, output_hidden_states=True).hidden_states)
    assert torch.equal(model(IDS, "output", labels=IDS).loss, output.loss)
    with pytest.raises(HooklineError, match="output_hidden_states=True"):
        model(IDS, "loss", labels=IDS, output_hidden_states=True)


def test_the_own_output_is_not_what_a_graph_computes() -> None:
    tinyworld = hookline.load("tinyworld")
    with tinyworld.compiled(backend="eager") as runs:
        with pytest.warns(HooklineWarning, match="output"):
            output = tinyworld("Mary went", "output", output_hidden_states=True)
        assert len(output.hidden_states) == 5
        assert runs.reasons
        with pytest.raises(HooklineError, match="output_hidden_states=True"):
            tinyworld("Mary went", output_hidden_states=True)


def test_models_that_take_images() -> None:
    sight = hookline.load("tinysight")
    inputs = sight.example_inputs()
    with pytest.raises(HooklineError, match="output_hidden_states=True"):
        sight(**inputs, output_hidden_states=True)
    assert isinstance(sight.run_with_hooks(**inputs, return_type="output"), ModelOutput)
    assert torch.equal(sight(**inputs, use_cache=True), sight(**inputs))


def test_the_loss_of_a_model_that_compares() -> None:
    module = CLIPModel(CLIPConfig(**tiny_vision.CONFIGS["clip"])).eval()
    inputs = {"input_ids": IDS, "pixel_values": torch.randn(1, 3, 16, 16)}
    with pytest.raises(HooklineError, match="return_loss=True"):
        hookline.hook(module)(**inputs, return_loss=True)
    assert hookline.hook(module)(return_type="output", **inputs, return_loss=True).loss is not None


@pytest.mark.parametrize("verb", ["generate", "generate_with_cache"])
def test_options_of_a_generation(verb) -> None:
    tinyworld = hookline.load("tinyworld")
    run = getattr(tinyworld, verb)
    ids = tinyworld.to_tokens("Mary went")
    for prompt in ("Mary went", ids):
        with pytest.raises(HooklineError, match="output_scores=True"):
            run(prompt, 2, output_scores=True)
        if verb == "generate_with_cache" or prompt is not ids:
            with pytest.raises(HooklineError, match="return_dict_in_generate"):
                run(prompt, 2, return_dict_in_generate=True)
        assert run(prompt, 2, do_sample=False, output_scores=False) is not None
    both = {"return_dict_in_generate": True, "output_scores": True}
    assert len(tinyworld.generate(ids, 2, do_sample=False, **both).scores) == 2


@pytest.fixture(scope="module")
def classes():
    config = ViTConfig(**tiny_vision.SEEN, num_labels=3)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 3))
    return {
        "language": (hookline.load("tinyworld"), IDS, {"input_ids": IDS}),
        "bert": (hookline.hook(tiny_models.encoder("bert")), IDS, {"input_ids": IDS}),
        "t5": (hookline.hook(tiny_models.seq2seq("t5")), None, {"input_ids": IDS, "decoder_input_ids": IDS}),
        "vit": (hookline.hook(ViTForImageClassification(config).eval()), IMAGES, {"pixel_values": IMAGES}),
        "cnn": (hookline.hook(convolutions.eval()), IMAGES, {"input": IMAGES}),
    }


@pytest.mark.parametrize("kind", ["language", "bert", "t5", "vit", "cnn"])
def test_what_a_call_returns_and_a_loss_function_gets(classes, kind) -> None:
    model, positional, keywords = classes[kind]
    outputs = []

    def loss(output):
        outputs.append(output)
        return output.sum()

    point = list(model.hook_dict)[3]
    returned, cache = model.run_with_cache(**keywords, names_filter=point, incl_bwd=True, loss_fn=loss)
    assert torch.equal(returned, outputs[0])
    assert torch.equal(returned, model(**keywords))
    assert set(cache) == {point, f"{point}_grad"}
    if positional is not None:
        assert torch.equal(model(positional), returned)
        assert torch.equal(model.run_with_cache(positional, names_filter=point)[1][point], cache[point])
    if kind != "cnn":
        assert torch.equal(getattr(model(**keywords, return_type="output"), "logits", returned), returned)
        for option in ASKING[:2]:
            with pytest.raises(HooklineError, match=r'return_type="output".*model\.module'):
                model(**keywords, **option)


def test_a_float_tensor_is_the_images_of_a_vision_model(classes) -> None:
    model, _, keywords = classes["vit"]
    labels = torch.tensor([0, 1])
    assert torch.equal(model(IMAGES, labels=labels).loss, model(**keywords, labels=labels).loss)
    assert torch.equal(model.cache(IMAGES)["resid_post", 0], model.cache(**keywords)["resid_post", 0])
    assert model.plan("blocks.0.hook_resid_post", input=IMAGES)[0].shape[0] == len(IMAGES)
    with pytest.raises(HooklineError, match="pixel_values"):
        model(IMAGES, pixel_values=IMAGES)
    with pytest.raises(HooklineError, match="images"):
        model(IDS)
    with pytest.raises(HooklineError, match="prepend_bos"):
        model(IMAGES, prepend_bos=True)

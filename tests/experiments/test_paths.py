"""Path patching: against two plain runs with hooks, and where there is no path."""

import devices
import pytest
import torch
from experiment_models import tokens
from tiny_models import encoder

import hookline
from hookline.experiments import metrics, patching
from hookline.experiments.paths import path_patch

METRIC = metrics.logit_diff(5, 7)
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


def metric_of(logits):
    return (logits[:, -1, 5] - logits[:, -1, 7]).mean().item()


def set_head(value, head):
    def hook(x):
        x[:, :, head] = value[:, :, head]

    return hook


def set_all(value):
    return lambda x: value


def naive(model, source, target, sender, receivers, *, through_mlps):
    """Two runs, every head but the sender held by itself; all in the words of `run_with_hooks`."""
    layer, head = sender
    n, heads = model.cfg.n_layers, model.cfg.n_heads
    _, given = model.run_with_cache(source)
    _, own = model.run_with_cache(target)
    hooks = [(("z", layer), set_head(given["z", layer], head))]
    for each in range(layer + 1, n):
        hooks += [(("z", each), set_head(own["z", each], other)) for other in range(heads)]
    if not through_mlps:
        hooks += [(("mlp_out", each), set_all(own["mlp_out", each])) for each in range(layer, n)]
    logits, first = model.run_with_cache(target, fwd_hooks=hooks)
    if receivers == "logits":
        return metric_of(logits)
    hooks = []
    for kind, *where in receivers:
        if kind == "mlp":
            hooks.append((("mlp_in", where[0]), set_all(first["mlp_in", where[0]])))
        else:
            hooks.append(((kind, where[0]), set_head(first[kind, where[0]], where[1])))
    return metric_of(model.run_with_hooks(target, fwd_hooks=hooks))


RECEIVERS = {
    "logits": "logits",
    "queries": [("q", 3, 1)],
    "keys and values": [("k", 2, 1), ("v", 3, 0)],
    "an MLP": [("mlp", 2)],
    "several": [("q", 1, 2), ("v", 3, 1), ("mlp", 3)],
}


@pytest.mark.quick_for("gpt2", "llama")
@pytest.mark.parametrize("through_mlps", [True, False])
@pytest.mark.parametrize("receivers", RECEIVERS.values(), ids=RECEIVERS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "mixtral", "gptj"])
def test_it_is_what_two_plain_runs_give(models, kind, receivers, through_mlps) -> None:
    model, clean, corrupted = models[kind], tokens(0), tokens(1)
    result = path_patch(model, clean, corrupted, METRIC, receivers=receivers, through_mlps=through_mlps)
    assert result.axes == ("layer", "head")
    for layer, head in [(0, 0), (1, 3), (2, 1), (3, 2)]:
        expected = naive(model, clean, corrupted, (layer, head), receivers, through_mlps=through_mlps)
        assert result.values[layer, head].item() == pytest.approx(expected, abs=2e-4)
    assert result.values.std() > 1e-4


def test_noising_is_denoising_with_the_prompts_exchanged(models) -> None:
    model, a, b = models["gpt2"], tokens(0), tokens(1)
    noised = path_patch(model, a, b, METRIC, receivers=[("q", 3, 1)], direction="noise")
    denoised = path_patch(model, b, a, METRIC, receivers=[("q", 3, 1)])
    torch.testing.assert_close(noised.values, denoised.values)
    assert noised.info["clean"] == pytest.approx(denoised.info["corrupted"])


def test_the_last_layers_heads_have_only_direct_paths(models) -> None:
    """Where nothing is in between, a path to the logits is all there is."""
    for kind in ("gpt2", "llama"):
        given = models[kind], tokens(0), tokens(1), METRIC
        patched = patching.sweep(*given, points="z", over=("layer", "head")).values[-1]
        torch.testing.assert_close(path_patch(*given).values[-1], patched, atol=2e-4, rtol=1e-4)


def test_without_a_path_nothing_changes(models) -> None:
    result = path_patch(models["llama"], tokens(0), tokens(1), METRIC, receivers=[("q", 1, 0)])
    assert (result.values[1:] == result.info["corrupted"]).all()
    assert (result.values[0] != result.info["corrupted"]).any()


def test_mlps_send_too(models) -> None:
    model, clean, corrupted = models["gpt2"], tokens(0), tokens(1)
    result = path_patch(model, clean, corrupted, METRIC, senders="mlps", receivers=[("mlp", 3)], through_mlps=False)
    _, given = model.run_with_cache(clean)
    logits, own = model.run_with_cache(corrupted)
    for layer in range(3):
        read = own["mlp_in", 3] + given["mlp_out", layer] - own["mlp_out", layer]
        logits = model.run_with_hooks(corrupted, fwd_hooks=[(("mlp_in", 3), set_all(read))])
        assert result.values[layer].item() == pytest.approx(metric_of(logits), abs=2e-4)
    assert result.values[3].item() == pytest.approx(result.info["corrupted"])


def test_a_list_of_senders(models) -> None:
    given = models["gpt2"], tokens(0), tokens(1), METRIC
    some = path_patch(*given, senders=[(1, 3), ("mlp", 0)], receivers=[("v", 3, 1)])
    assert some.coords == {"sender": ["L1H3", "mlp0"]}
    heads = path_patch(*given, receivers=[("v", 3, 1)])
    mlps = path_patch(*given, senders="mlps", receivers=[("v", 3, 1)])
    torch.testing.assert_close(some.values, torch.stack([heads.values[1, 3], mlps.values[0]]))


def test_several_prompts_and_small_batches(models) -> None:
    model, clean, corrupted = models["llama"], tokens(0, rows=2), tokens(1, rows=2)
    result = path_patch(model, clean, corrupted, METRIC, receivers=[("q", 2, 1)], per_example=True, batch_size=3)
    for row in range(2):
        one = path_patch(model, clean[row], corrupted[row], METRIC, receivers=[("q", 2, 1)])
        torch.testing.assert_close(result.isel(example=row).values, one.values, atol=2e-4, rtol=1e-4)


def test_an_encoder_has_paths_too() -> None:
    model = hookline.hook(encoder("bert", head=True))
    given = model, tokens(0), tokens(1), METRIC
    result = path_patch(*given, receivers=[("q", 3, 1), ("mlp", 2)])
    assert (result.values[3] - result.info["corrupted"]).abs().max() <= devices.rounding()
    assert result.values[:3].std() > 0


def test_the_giver_gets_its_answer_from_the_sentence() -> None:
    """In tinyworld L3H4 copies the receiver's name: what it says goes to the logits, its queries hardly matter."""
    model = hookline.load("tinyworld")
    given = model, CLEAN, CORRUPTED, metrics.logit_diff(" Mary", " John")
    top = path_patch(*given).normalized.top(1, by="value")[0]
    assert top.labels == {"layer": 3, "head": 4}
    assert top.value > 0.5
    values = path_patch(*given, senders="mlps", receivers=[("v", 3, 4)]).normalized
    assert values.values[0] > 0.3


def test_an_image_and_a_file(models, tmp_path) -> None:
    result = path_patch(models["gpt2"], tokens(0), tokens(1), METRIC, receivers=[("q", 3, 1)])
    result.save(tmp_path / "paths.safetensors")
    again = type(result).load(tmp_path / "paths.safetensors")
    assert torch.equal(again.values, result.values)
    assert again.info["receivers"] == ["L3H1.q"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"senders": []}, "senders is"),
        ({"senders": "neurons"}, "senders is"),
        ({"senders": [(4, 0)]}, "no layer 4"),
        ({"senders": [(0, 9)]}, "no head 9"),
        ({"senders": [("q", 0, 1)]}, "a sender is"),
        ({"receivers": []}, "receivers is"),
        ({"receivers": [("q", 9, 0)]}, "no layer 9"),
        ({"receivers": [("k", 1, 2)]}, "no head 2"),
        ({"receivers": [("q", 1, 0), "logits"]}, "a list without it"),
        ({"receivers": [("z", 1, 0)]}, "a receiver is"),
        ({"direction": "both"}, "direction is"),
    ],
)
def test_bad_input(models, asked, said) -> None:
    with pytest.raises(hookline.HooklineError, match=said):
        path_patch(models["llama"], tokens(0), tokens(1), METRIC, **asked)


def test_prompts_of_different_length(models) -> None:
    with pytest.raises(hookline.HooklineError, match="Row 0"):
        path_patch(models["llama"], tokens(0), tokens(1, length=6), METRIC)

"""Edge attribution: the parts sum to the whole, single edges are what a plain run gives, and what is said of them."""

import devices
import pytest
import torch
from experiment_models import lead, tokens
from tiny_models import causal_lm, encoder

import hookline
from hookline.experiments import metrics
from hookline.experiments.edges import edge_scores

METRIC = metrics.logit_diff(5, 7)
KINDS = ("gpt2", "llama", "gemma2", "mixtral", "gptj", "granite")
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


def point_of(receiver, model):
    """The point that a receiver reads, and its head."""
    if receiver == "logits":
        return f"blocks.{model.cfg.n_layers - 1}.hook_resid_post", None
    if receiver.startswith("mlp"):
        return f"blocks.{receiver[3:]}.hook_mlp_in", None
    name, kind = receiver.split(".")
    layer, head = name.removeprefix("L").replace("KV", "H").split("H")
    return f"blocks.{layer}.hook_{kind}_input", int(head)


@pytest.mark.parametrize("kind", KINDS)
def test_what_senders_tell_a_receiver_is_all_it_reads(models, kind) -> None:
    """The scores of all edges into a receiver are the gradient times the difference of what it reads."""
    model, clean, corrupted = models[kind], tokens(0), tokens(1)
    scores = edge_scores(model, clean, corrupted, METRIC, check=0)
    receivers = list(dict.fromkeys(scores.receivers))
    names = list(dict.fromkeys(point_of(each, model)[0] for each in receivers))
    _, given = model.run_with_cache(clean, names_filter=names)
    _, own = model.run_with_cache(
        corrupted, names_filter=names, incl_bwd=True, loss_fn=lambda logits: lead(logits).sum()
    )
    for receiver in receivers:
        name, head = point_of(receiver, model)
        change = (given[name] - own[name]) * own[f"{name}_grad"]
        expected = (change if head is None else change[:, :, head]).sum().item()
        assert scores.of(to=receiver).values.sum().item() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sample_is_what_plain_runs_give(models, kind) -> None:
    model, clean, corrupted = models[kind], tokens(0), tokens(1)
    scores = edge_scores(model, clean, corrupted, METRIC, check=8, seed=1)
    assert scores.info["checked"] == 8
    given, own = (model.run_with_cache(each)[1] for each in (clean, corrupted))
    before = lead(model(corrupted)).item()
    heads = [dict(zip(*cache.stack_head_results(return_labels=True)[::-1], strict=True)) for cache in (given, own)]
    for cell in scores.info["sample"]:
        sender = cell["sender"]
        if sender == "embed":
            change = given["resid_pre", 0] - own["resid_pre", 0]
        elif sender.startswith("mlp"):
            change = given["mlp_out", int(sender[3:])] - own["mlp_out", int(sender[3:])]
        else:
            change = heads[0][sender] - heads[1][sender]
        name, head = point_of(cell["receiver"], model)

        def add(x, change=change, head=head):
            if head is None:
                return x + change
            x[:, :, head] += change
            return None

        after = lead(model.run_with_hooks(corrupted, fwd_hooks=[(name, add)])).item()
        assert cell["true"] == pytest.approx(after - before, abs=5e-4)
        assert cell["estimate"] == pytest.approx(scores.of(sender, cell["receiver"]), abs=1e-4)


def test_only_earlier_ones_tell_later_ones(models) -> None:
    """4 layers of 4 heads: to q, k and v of each head all before; to an MLP also its own layer's heads."""
    scores = edge_scores(models["gpt2"], tokens(0), tokens(1), METRIC, check=0)
    to_heads = sum(12 * (1 + 5 * layer) for layer in range(4))
    to_mlps = sum(1 + 5 * layer + 4 for layer in range(4))
    assert len(scores) == to_heads + to_mlps + 21
    assert ("L1H0", "mlp1") in zip(scores.senders, scores.receivers, strict=True)
    with pytest.raises(hookline.HooklineError, match="comes before"):
        scores.of("mlp1", "mlp1")
    beside = edge_scores(models["gptj"], tokens(0), tokens(1), METRIC, check=0)
    with pytest.raises(hookline.HooklineError, match="comes before"):
        beside.of("L1H0", "mlp1")


def test_rows_are_averaged_and_padding_left_out(tinyworld) -> None:
    clean = [CLEAN, "So, when Alice and Bob went to the park, Bob gave a book to"]
    corrupted = [CORRUPTED, "So, when Alice and Bob went to the park, Alice gave a book to"]
    both = edge_scores(tinyworld, clean, corrupted, metrics.logit_diff([" Mary", " Alice"], [" John", " Bob"]))
    one = edge_scores(tinyworld, clean[0], corrupted[0], metrics.logit_diff(" Mary", " John"), check=0)
    other = edge_scores(tinyworld, clean[1], corrupted[1], metrics.logit_diff(" Alice", " Bob"), check=0)
    torch.testing.assert_close(both.values, (one.values + other.values) / 2, atol=1e-3, rtol=1e-3)
    assert both.info["correlation"] > 0.9


def test_the_circuit_of_tinyworld(tinyworld) -> None:
    """The name goes from the embeddings by the first MLP to the values of L3H4, and from there to the logits."""
    scores = edge_scores(tinyworld, CLEAN, CORRUPTED, metrics.logit_diff(" Mary", " John"), steps=5)
    strong = {(cell.labels["sender"], cell.labels["receiver"]) for cell in scores.top(6)}
    assert {("mlp0", "L3H4.v"), ("L3H4", "logits"), ("embed", "mlp0")} <= strong
    assert scores.info["steps"] == 5


def test_half_of_the_checked_edges_are_those_that_stand_out(tinyworld) -> None:
    scores = edge_scores(tinyworld, CLEAN, CORRUPTED, metrics.logit_diff(" Mary", " John"), steps=5, check=20, seed=1)
    sample = scores.info["sample"]
    named = [{"sender": cell["sender"], "receiver": cell["receiver"]} for cell in sample]
    assert [cell["chosen"] for cell in sample] == ["top"] * 10 + ["random"] * 10
    assert [cell.labels for cell in scores.top(10)] == named[:10]
    assert len({tuple(each.values()) for each in named}) == 20
    other = edge_scores(tinyworld, CLEAN, CORRUPTED, metrics.logit_diff(" Mary", " John"), steps=5, check=20, seed=2)
    same = [pytest.approx(each["true"], rel=devices.rounding(), abs=0) for each in sample[:10]]
    assert [each["true"] for each in other.info["sample"][:10]] == same
    assert [each["sender"] for each in other.info["sample"][10:]] != [each["sender"] for each in sample[10:]]
    top = scores.info["top_correlation"]
    assert other.info["top_correlation"] == pytest.approx(top, rel=devices.rounding(), abs=0)
    assert top > 0.9
    assert "top_correlation" in repr(scores)
    assert "random_correlation" in repr(scores)


def test_noise_and_steps_take_effect(models) -> None:
    given = models["llama"], tokens(0), tokens(1), METRIC
    plain, stepped, noised = (edge_scores(*given, check=0, **how) for how in ({}, {"steps": 4}, {"direction": "noise"}))
    assert not torch.allclose(plain.values, stepped.values)
    swapped = edge_scores(given[0], given[2], given[1], METRIC, check=0)
    torch.testing.assert_close(noised.values, swapped.values)


def test_as_a_matrix_and_as_text(models) -> None:
    scores = edge_scores(models["gpt2"], tokens(0), tokens(1), METRIC)
    assert scores.matrix.sel(sender="embed", receiver="logits").item() == pytest.approx(scores.of("embed", "logits"))
    assert scores.matrix.sel(sender="mlp3", receiver="L0H0.q").item() == 0
    best = scores.top(1)[0]
    assert f"{best.labels['sender']}" in repr(scores)
    assert abs(best.value) == scores.values.abs().max().item()
    assert [cell.value for cell in scores.top(3, by="lowest")] == scores.values.sort().values[:3].tolist()
    with pytest.raises(hookline.HooklineError, match="L9H9"):
        scores.of("L9H9")


def test_as_a_dataframe(models) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas comes with hookline[data]")
    scores = edge_scores(models["gpt2"], tokens(0), tokens(1), METRIC, check=0)
    table = scores.to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns) == ["sender", "receiver", "value"]
    assert table["value"].tolist() == pytest.approx(scores.values.tolist())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"per_example": True}, "per_example"),
        ({"steps": -1}, "steps is"),
        ({"steps": 1}, "steps=1"),
        ({"check": "all"}, "check is"),
        ({"direction": "both"}, "direction is"),
    ],
)
def test_bad_input(models, asked, said) -> None:
    with pytest.raises(hookline.HooklineError, match=said):
        edge_scores(models["gpt2"], tokens(0), tokens(1), METRIC, **asked)


def test_one_metric_only(models) -> None:
    with pytest.raises(hookline.HooklineError, match="one metric"):
        edge_scores(models["gpt2"], tokens(0), tokens(1), [METRIC, "kl"])


def test_models_without_such_edges_are_refused() -> None:
    with pytest.raises(hookline.HooklineError, match="stream"):
        edge_scores(hookline.hook(encoder("bert", head=True)), tokens(0), tokens(1), METRIC)
    with pytest.raises(hookline.HooklineError, match="attention"):
        edge_scores(hookline.hook(causal_lm("mamba")), tokens(0), tokens(1), METRIC)

"""Monitors: scores of a probe while a model writes, compiled and not, bounds that stop or edit."""

import pytest
import torch
from backends import Counting, needs_graphs
from tiny_models import causal_lm
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline import HooklineError, at
from hookline.edits import add, save, scale
from hookline.experiments import probes

IDS = torch.tensor([[0, 0, 5, 4, 7], [3, 4, 5, 6, 9]])
MASK = IDS.ne(0).long()
RESID = "blocks.{}.hook_resid_post"
SEED = 29
"""Of probe weights for which a new token has a higher score than all tokens before it."""
GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=None)
    return hookline.hook(LlamaForCausalLM(config).eval())


def made(classes: int = 2, scale_by: float = 1.0, width: int = 32, seed: int = 1) -> probes.Probes:
    """Probes with weights of our own."""
    generator = torch.Generator().manual_seed(seed)
    weights = scale_by * torch.randn(2, classes, width, generator=generator)
    return probes.Probes(
        torch.tensor([0.9, 0.7]),
        ("layer",),
        {"layer": [0, 1]},
        classes=[*range(classes)],
        layers=[0, 1],
        points=[RESID.format(0), RESID.format(1)],
        weights=weights,
        bias=torch.randn(2, classes, generator=generator),
        means=weights,
    )


def by_hand(cache, probe, layer):
    weight, bias = probe.weights[layer], probe.bias[layer]
    return cache[RESID.format(layer)] @ (weight[1] - weight[0]) + bias[1] - bias[0]


def check_scores(model) -> None:
    probe = made()
    first, second = probes.Monitor(probe, layer=0), probes.Monitor(probe, layer=1)
    tokens, cache = model.generate_with_cache(
        IDS, attention_mask=MASK, names_filter="blocks.*.hook_resid_post", monitors=[first, second], **GREEDY
    )
    whole = torch.nn.functional.pad(MASK, (0, 6), value=1)
    graphs, vars(model)["_compiled_runs"] = vars(model).get("_compiled_runs"), None
    try:
        full = model.cache(tokens, attention_mask=whole, names_filter="blocks.*.hook_resid_post")
    finally:
        vars(model)["_compiled_runs"] = graphs
    for monitor, layer in ((first, 0), (second, 1)):
        assert monitor.scores.shape == (2, 10)
        assert monitor.scores[0, :2].isnan().all()
        for of in (cache, {name: full[name][:, :-1] for name in cache}):
            expected = by_hand(of, probe, layer)
            assert torch.allclose(monitor.scores[0, 2:], expected[0, 2:], atol=1e-4)
            assert torch.allclose(monitor.scores[1], expected[1], atol=1e-4)


def test_scores_are_those_of_a_full_cache(model) -> None:
    check_scores(model)
    assert not any(module._forward_hooks for module in model.module.modules())


@needs_graphs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports
def test_scores_are_computed_in_the_graph(model) -> None:
    torch._dynamo.reset()
    with model.compiled(backend=Counting()) as runs:
        for _ in range(3):
            check_scores(model)
        assert not runs.reasons
        graphs = runs.graphs
        probe = made(scale_by=-3.0)  # other values compile nothing
        again = [probes.Monitor(probe, layer=layer) for layer in (0, 1)]
        _, cache = model.generate_with_cache(
            IDS, attention_mask=MASK, names_filter="blocks.*.hook_resid_post", monitors=again, **GREEDY
        )
        assert runs.graphs == graphs
        assert torch.allclose(again[1].scores[1], by_hand(cache, probe, 1)[1], atol=1e-4)
        twice = [probes.Monitor(made(), layer=1), probes.Monitor(probe, layer=1)]
        for _ in range(2):
            _, cache = model.generate_with_cache(IDS[1:], names_filter=RESID.format(1), monitors=twice, **GREEDY)
            assert torch.allclose(twice[0].scores, by_hand(cache, made(), 1), atol=1e-4)
            assert torch.allclose(twice[1].scores, by_hand(cache, probe, 1), atol=1e-4)
        uncompiled = stopped_and_edited(model)
        for _ in range(2):
            found = stopped_and_edited(model)
            assert all(torch.equal(one, other) for one, other in zip(found, uncompiled, strict=True))
        assert not runs.reasons, runs.reasons
    plain = stopped_and_edited(model)
    assert all(torch.equal(one, other) for one, other in zip(uncompiled, plain, strict=True))
    torch._dynamo.reset()


def stopped_and_edited(model) -> list[torch.Tensor]:
    """Tokens of a stream, of one that ends by a score, and of generations with edits from a score on."""
    probe = made(seed=SEED)
    monitor = probes.Monitor(probe, 1)
    stream = torch.stack([*model.stream(IDS, attention_mask=MASK, monitors=[monitor], max_new_tokens=8)], 1)
    scores = monitor.scores
    assert scores.shape == (2, 12)
    assert scores[1].isfinite().all()
    values = scores[1].tolist()
    records = [at for at in range(6, 11) if values[at] > max(values[:at])]
    assert records, "a new token has a higher score than all before it"
    middle = (values[records[0]] + max(values[: records[0]])) / 2
    ended = probes.Monitor(probe, 1, stop_above=middle)
    short = torch.stack([*model.stream(IDS[1:], max_new_tokens=8, monitors=[ended])], 1)
    assert torch.allclose(ended.scores, scores[1:, : records[0] + 1], atol=1e-4)
    assert short.shape[1] == records[0] - 5 + 2, "the last token is that chosen where the score was beyond the bound"
    results = [stream, short]
    highest = max(values[:5])
    for bound in (monitor.above(middle), monitor.below(highest + 1.0)):
        for edit in (add(torch.ones(32), 9.0, on=bound), at(bound, lambda x: x + 9.0)):
            with model.hooks([(RESID.format(0), edit)]) as run:
                tokens, cache = model.generate_with_cache(
                    IDS[1:], names_filter=RESID.format(0), monitors=[monitor], do_sample=False, max_new_tokens=8
                )
            values = monitor.scores[0]
            beyond = values > bound.bound if bound.is_above else values < bound.bound
            first = int(beyond.nonzero()[0])
            expected = dict.fromkeys(range(max(5, first + 1), 12), 1)
            assert run.acted == {RESID.format(0): expected}
            assert expected
            results += [tokens, cache[RESID.format(0)][:, max(5, first + 1)]]
    return results


def test_bounds_stop_and_edit(model) -> None:
    stopped_and_edited(model)


def test_rows_end_by_themselves(model) -> None:
    monitor = probes.Monitor(made(), 1)
    options = {"attention_mask": MASK, "names_filter": RESID.format(1), "do_sample": False, "max_new_tokens": 8}
    plain, _ = model.generate_with_cache(IDS, monitors=[monitor], **options)
    values = monitor.scores
    low, high = values[:, 6:11].max(1).values.sort().values.tolist()
    ends = probes.Monitor(made(), 1, stop_above=(low + high) / 2)
    tokens, _ = model.generate_with_cache(IDS, monitors=[ends], **options)
    row = int(values[:, 6:11].max(1).values.argmax())
    first = int((values[row] > (low + high) / 2).nonzero()[0])
    assert torch.equal(tokens[row, : first + 2], plain[row, : first + 2])
    assert tokens[row, max(first + 2, 6) :].eq(0).all(), "its row is padded after the token that was chosen there"
    if not bool((values[1 - row] > (low + high) / 2).any()):
        assert torch.equal(tokens[1 - row], plain[1 - row])


def test_classes_and_layers() -> None:
    assert probes.Monitor(made()).layer == 0, "the layer with the highest accuracy"
    with pytest.raises(HooklineError, match="label="):
        probes.Monitor(made(3), 1)
    with pytest.raises(HooklineError, match="layer 7"):
        probes.Monitor(made(), 7)
    weight, bias = made(3).weights[1, 2], made(3).bias[1, 2]
    _, found, offset = made(3).functional(1, 2)
    assert torch.equal(found, weight)
    assert torch.equal(offset, bias)


def test_an_edit_by_a_score_needs_a_generation_that_is_watched(model) -> None:
    monitor = probes.Monitor(made(), 1)
    model.generate_with_cache(IDS[1:], names_filter=RESID.format(0), monitors=[monitor], **GREEDY)
    for hook in (scale(2.0, on=monitor.above(-1e9)), at(monitor.above(-1e9), lambda x: 2 * x)):
        for run in (model.generate, model, lambda ids, **_: next(model.stream(ids))):
            with model.hooks([(RESID.format(0), hook)]), pytest.raises(HooklineError, match=r"monitors=\[monitor\]"):
                run(IDS[1:], **(GREEDY if run == model.generate else {}))
        remove = model.add_hook(RESID.format(0), hook)
        with pytest.raises(HooklineError, match="watch"):
            model.generate(IDS[1:], **GREEDY)
        remove()
    for piece in model.stream(IDS[1:], monitors=[monitor], max_new_tokens=3):
        assert piece.shape == (1,)
        break
    with model.hooks([(RESID.format(0), hook)]), pytest.raises(HooklineError, match="watch"):
        model.generate(IDS[1:], **GREEDY)
    with pytest.raises(HooklineError, match=r"generate_with_cache\(…, monitors="):
        model.generate(IDS[1:], monitors=[monitor], **GREEDY)


def test_what_is_refused(model, tmp_path) -> None:
    monitor = probes.Monitor(made(), 1)
    with pytest.raises(HooklineError, match="watched"):
        monitor.scores
    for wrong in (lambda: monitor.above(float("nan")), lambda: probes.Monitor(made(), stop_below="a")):
        with pytest.raises(HooklineError, match="finite number"):
            wrong()
    with pytest.raises(HooklineError, match="Monitor takes"):
        probes.Monitor(torch.ones(32))
    for monitors in ([monitor, monitor], [made()]):
        with pytest.raises(HooklineError, match="monitors"):
            model.generate_with_cache(IDS, monitors=monitors, names_filter=RESID.format(0))
    with pytest.raises(HooklineError, match="on="):
        scale(2.0, on=0.5)
    with pytest.raises(HooklineError, match="saved"):
        save(tmp_path, [(RESID.format(0), scale(2.0, on=monitor.above(1.0)))])
    with pytest.raises(HooklineError, match="saved"):
        save(tmp_path, [(RESID.format(0), scale(2.0, pos=monitor.above(1.0)))])
    with model.hooks([(RESID.format(0), scale(2.0, on=monitor.above(1.0)))]), pytest.raises(HooklineError):
        model.generate(IDS[1:], **GREEDY)
    with pytest.raises(HooklineError, match="another model"):
        hookline.hook(causal_lm("gpt2")).generate_with_cache(
            IDS[1:], monitors=[probes.Monitor(made(width=20), 1)], names_filter=RESID.format(0)
        )
    with pytest.raises(HooklineError, match="once"):
        model.generate_with_cache(IDS, monitors=[monitor], names_filter=RESID.format(0), use_cache=False, **GREEDY)

"""Metrics: what they give, what they refuse, and which positions they are found to read."""

from functools import partial

import pytest
import torch
from tiny_models import causal_lm, encoder
from torch.nn import functional as F

import hookline
from hookline import HooklineError
from hookline.errors import HooklineWarning
from hookline.experiments import ablation, attribution, edges, metrics, patching, paths, tracing
from hookline.experiments.core.metric_positions import positions_read
from hookline.experiments.metrics import as_metric, checked_value
from hookline.text.loss import lm_loss

TENSORS_ON_CPU = True

BATCH, WIDTH, VOCAB = 3, 11, 20
ROWS = torch.arange(BATCH)
EVERYWHERE = list(range(WIDTH))


@pytest.fixture
def logits():
    return torch.randn(BATCH, WIDTH, VOCAB)


@pytest.fixture
def tokens():
    return torch.randint(0, VOCAB, (BATCH, WIDTH))


@pytest.fixture(scope="module")
def model():
    return hookline.hook(causal_lm("gpt2"))


def read(metric, logits):
    return positions_read(metric, logits).nonzero().flatten().tolist()


# What they give


def test_logit_diff_is_the_difference_at_the_position(logits):
    metric = metrics.logit_diff(3, torch.tensor([4, 5, 6]), pos=2)
    assert torch.equal(metric(logits), logits[:, 2, 3] - logits[ROWS, 2, torch.tensor([4, 5, 6])])


def test_probabilities_of_all_tokens_sum_to_one(logits):
    total = sum(metrics.prob(token)(logits) for token in range(VOCAB))
    assert torch.allclose(total, torch.ones(BATCH))
    assert torch.allclose(metrics.log_prob(7)(logits).exp(), metrics.prob(7)(logits))


def test_ranks_of_all_tokens_are_all_numbers(logits):
    ranks = torch.stack([metrics.rank(token)(logits) for token in range(VOCAB)])
    assert torch.equal(ranks.sort(0).values, torch.arange(VOCAB).float()[:, None].expand(-1, BATCH))
    assert torch.equal(metrics.rank(logits[:, -1].argmax(-1))(logits), torch.zeros(BATCH))


def test_rank_among_nan_is_nan(logits):
    logits[1, -1] = torch.nan
    assert metrics.rank(3)(logits).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("pos", [-1, 4, None])
def test_kl_is_zero_to_itself_and_positive_to_others(logits, pos):
    metric = metrics.kl(logits, pos=pos)
    assert torch.allclose(metric(logits), torch.zeros(BATCH), atol=1e-6)
    assert (metric(torch.randn_like(logits)) > 0).all()


def test_kl_with_tokens_that_cannot_be(logits):
    reference = logits.clone()
    reference[:, :, 5] = -torch.inf
    value = metrics.kl(reference)(logits)
    assert value.isfinite().all()
    assert (value > 0).all()


def test_kl_is_torchs(logits):
    other = torch.randn_like(logits)
    expected = F.kl_div(other[:, -1].log_softmax(-1), logits[:, -1].softmax(-1), reduction="none").sum(-1)
    assert torch.allclose(metrics.kl(logits)(other), expected, atol=1e-6)


def test_loss_is_the_models(model):
    ids = model.example_tokens()
    logits, loss = model(ids, return_type="both")
    assert torch.allclose(metrics.loss(ids)(logits).mean(), loss)


def test_loss_leaves_padding_out(logits, tokens):
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    alone = lm_loss(logits[1:2, :7], tokens[1:2, :7])
    logits[1, 7:] = torch.nan
    value = metrics.loss(tokens, mask)(logits)
    assert torch.allclose(value[1], alone)
    assert torch.allclose(value[0], lm_loss(logits[:1], tokens[:1]))


def test_positions_of_each_row(logits):
    pos = torch.tensor([2, -1, 4])
    assert torch.equal(metrics.logit_diff(1, 2, pos=pos)(logits), (logits[..., 1] - logits[..., 2])[ROWS, pos])


def test_half_precision_is_measured_in_single(logits):
    assert metrics.prob(3)(logits.bfloat16()).dtype == torch.float32


def test_gradients_flow(logits):
    logits.requires_grad_()
    metrics.logit_diff(3, 4)(logits).sum().backward()
    assert logits.grad.abs().sum((0, 2)).nonzero().tolist() == [[WIDTH - 1]]


def test_repr_is_what_makes_it():
    assert repr(metrics.logit_diff(" Mary", 5)) == "logit_diff(answer=' Mary', wrong=5, pos=-1)"
    assert repr(metrics.prob([1, 2])) == "prob(answer=[1, 2], pos=-1)"


# What they refuse


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metrics.prob(1.5), "an answer is a text"),
        (lambda: metrics.prob(True), "an answer is a text"),
        (lambda: metrics.prob([]), "an answer is a text"),
        (lambda: metrics.prob(torch.ones(2)), "one per row"),
        (lambda: metrics.prob(1, pos=1.5), "pos is an index"),
        (lambda: metrics.prob(1, pos=True), "pos is an index"),
        (lambda: metrics.kl(torch.ones(2, 3)), r"\[batch, pos, vocab\]"),
        (lambda: metrics.kl(torch.ones(1, 2, 3), mask=torch.ones(1, 2)), "pos=None"),
        (lambda: metrics.loss(torch.ones(2, 3)), "needs token ids"),
        (lambda: metrics.loss(torch.ones(2, 1).long()), "at least two tokens"),
    ],
)
def test_what_cannot_be_a_metric(make, message):
    with pytest.raises(HooklineError, match=message):
        make()


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (metrics.prob(VOCAB), "out of range.*0 to 19"),
        (metrics.prob([1, 2]), "2 tokens for 3"),
        (metrics.prob(1, pos=WIDTH), "position 11"),
        (metrics.prob(1, pos=[0, 1]), "2 positions for 3"),
        (metrics.prob(" Mary"), "is text"),
        (metrics.kl(torch.zeros(1, 2, 3)), "reference.*1, 2, 3"),
        (metrics.loss(torch.zeros(2, 2).long()), "tokens.*2, 2"),
    ],
)
def test_logits_that_do_not_fit(logits, metric, message):
    with pytest.raises(HooklineError, match=message):
        metric(logits)


def test_logits_without_positions_are_refused(logits):
    with pytest.raises(HooklineError, match=r"shape \[3, 20\]"):
        metrics.prob(1)(logits[:, -1])


# As an experiment gets them


def test_text_becomes_ids(tinyworld):
    tokens = tinyworld.to_tokens(["Emily gave a book to", "Oliver gave a key to"])
    emily, oliver = map(tinyworld.to_single_token, (" Emily", " Oliver"))
    metric = metrics.logit_diff([" Emily", oliver], [" Oliver", " Emily"]).resolved(tinyworld, tokens)
    assert (metric.answer.tolist(), metric.wrong.tolist()) == ([emily, oliver], [oliver, emily])
    for same in (" Emily", [" Oliver", " Emily"]):
        with pytest.raises(HooklineError, match="same token"):
            metrics.logit_diff(" Emily", same).resolved(tinyworld, tokens)


def test_an_answer_without_its_space_is_reported(tinyworld):
    clean = "When Mary and John went to the store, John gave a drink to"
    for answers in ("Mary", ("Mary", "John")):
        tokens = tinyworld.to_tokens([clean] * (1 if isinstance(answers, str) else 2))
        with pytest.warns(HooklineWarning, match="' Mary'.*another"):
            metrics.prob(answers).resolved(tinyworld, tokens)
    for fine in (" Mary", tinyworld.to_single_token("Mary"), "."):
        metrics.prob(fine).resolved(tinyworld, tokens)
    metrics.prob("Mary").resolved(tinyworld, tinyworld.to_tokens("User: I think ("))


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_in_the_text(tinyworld, side):
    prompts = ["Once upon a time there was", "Once upon a"]
    tokens = tinyworld.to_tokens(prompts, padding_side=side)
    for pos in (0, 1, -1, -2):
        metric = metrics.prob(5, pos=pos).resolved(tinyworld, tokens, tokens.padding_mask)
        columns = torch.as_tensor(metric.pos).expand(2)
        assert [int(row[at]) for row, at in zip(tokens, columns, strict=True)] == [
            int(tinyworld.to_tokens(prompt)[0, pos]) for prompt in prompts
        ]
    with pytest.raises(HooklineError, match="prompt 1"):
        metrics.prob(5, pos=tokens.shape[1] - 1).resolved(tinyworld, tokens, tokens.padding_mask)


def test_bad_answers_are_seen_before_a_run(model):
    tokens = model.example_tokens()
    for metric, message in [
        (metrics.prob(10_000), "out of range"),
        (metrics.prob([1, 2, 3]), "3 tokens for 2"),
        (metrics.prob(1, pos=[1, 2, 3]), "3 positions for 2"),
        (metrics.prob(1, pos=99), "position 99"),
        (metrics.prob(" Mary"), "tokenizer"),
    ]:
        with pytest.raises(HooklineError, match=message):
            metric.resolved(model, tokens)


def test_as_metric_takes_all_kinds(model):
    tokens = model.example_tokens()
    clean, corrupted = model(tokens), model(tokens.flip(0))

    def mine(logits):
        return logits[:, -1, 0]

    def make(spec):
        return as_metric(spec, model, clean, corrupted, tokens)

    assert list(make(mine)) == ["mine"]
    assert list(make(lambda logits: logits.mean())) == ["metric"]
    assert list(make(partial(mine))) == ["mine"]
    assert list(make(["kl", "loss", metrics.prob(3)])) == ["kl", "loss", "prob"]
    found = make({"a": metrics.prob(3), "b": metrics.prob(4)})
    assert torch.equal(found["b"](clean), metrics.prob(4)(clean))
    assert torch.allclose(make("kl")["kl"](clean), torch.zeros(2), atol=1e-6)
    assert torch.allclose(make("loss")["loss"](clean).mean(), model(tokens, return_type="loss"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("logit_diff", r'metrics.logit_diff\(" Mary", " John"\)'),
        (metrics.prob, r'metrics.prob\(" Mary"\)'),
        ("logitdiff", "Did you mean 'logit_diff'"),
        (5, "a metric is a function"),
        ([], "no metric"),
        ({}, "no metric"),
        ({1: "kl"}, "are their names"),
        ([metrics.prob(1), metrics.prob(2)], "two metrics.* 'prob'"),
        (lambda logits: logits[:, -1], r"torch.float32.* \[2, 64\]"),
        ({"mine": lambda logits: logits[:, -1, 0] / 0 * 0}, "mine.* NaN in row 0"),
    ],
)
def test_as_metric_refuses(model, spec, message):
    tokens = model.example_tokens()
    with pytest.raises(HooklineError, match=message):
        as_metric(spec, model, model(tokens), None, tokens)


def test_a_metric_must_have_a_number_for_the_corrupted_run_too(model):
    tokens = model.example_tokens()
    clean = model(tokens)
    with pytest.raises(HooklineError, match="NaN"):
        as_metric(lambda logits: logits[:, -1, 0], model, clean, torch.full_like(clean, torch.nan), tokens)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], r"list \[1.0\]"),
        (None, "NoneType None"),
        (torch.ones(4), r"shape \[4\].*shape \[3\]"),
        (torch.ones(3, 1), r"shape \[3, 1\]"),
        (torch.ones(0), r"shape \[0\]"),
        (torch.tensor([1.0, torch.nan, 2.0]), "NaN in row 1"),
        (torch.tensor(torch.nan), "NaN:"),
        (torch.ones(3, dtype=torch.complex64), "complex64"),
    ],
)
def test_checked_refuses(value, message):
    with pytest.raises(HooklineError, match=message):
        checked_value(value, 3)


def test_checked_gives_floats_and_keeps_the_graph():
    assert checked_value(torch.tensor([True, False, True]), 3).tolist() == [1.0, 0.0, 1.0]
    assert checked_value(torch.ones(3, requires_grad=True) * 2, 3).requires_grad
    assert checked_value(torch.ones((), dtype=torch.float64), 3).dtype == torch.float64


# Which positions are read

TARGETS = torch.arange(BATCH * WIDTH).reshape(BATCH, WIDTH) % VOCAB
PADDED = (torch.arange(WIDTH) >= 4).long().expand(BATCH, -1)

EXACT = {
    "last": (lambda x: x[:, -1, 3] - x[:, -1, 4], [10]),
    "last by its number": (lambda x: x[:, WIDTH - 1, 3], [10]),
    "first": (lambda x: x[:, 0, 3], [0]),
    "one": (lambda x: x[:, 5, 3], [5]),
    "two": (lambda x: x[:, 5, 3] + x[:, 9, 2], [5, 9]),
    "by shape": (lambda x: x[:, x.shape[1] // 2, 0], [5]),
    "one per row": (lambda x: x[ROWS, [2, 4, 6], 1], [2, 4, 6]),
    "row by row": (lambda x: torch.stack([row[at, 0] for row, at in zip(x, (2, 4, 6), strict=True)]), [2, 4, 6]),
    "one row only": (lambda x: x[1, 3, 0], [3]),
    "mean": (lambda x: x.mean(), EVERYWHERE),
    "softmax over vocab": (lambda x: x.softmax(-1)[:, -1, 0], [10]),
    "softmax over positions": (lambda x: x.softmax(1)[:, -1, 0], EVERYWHERE),
    "constant mask": (lambda x: x.masked_fill(torch.arange(WIDTH)[None, :, None] != 4, 0).sum((1, 2)), [4]),
    "constant where": (lambda x: torch.where(torch.arange(WIDTH)[:, None] > 8, x, 0.0).sum((1, 2)), [9, 10]),
    "boolean index": (lambda x: x[:, torch.arange(WIDTH) > 8].mean((1, 2)), [9, 10]),
    "cross-entropy": (lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), TARGETS[:, 1:].flatten()), EVERYWHERE[:-1]),
    "cross-entropy, ignored": (
        lambda x: F.cross_entropy(x.flatten(0, 1), TARGETS.where(PADDED > 0, -100).flatten()),
        EVERYWHERE[4:],
    ),
    "argmax of one": (lambda x: (x[:, -1].argmax(-1) == 3).float(), [10]),
    "comparison": (lambda x: (x[:, 2, 0] > x[:, 3, 0]).float(), [2, 3]),
    "accuracy, right or wrong": (lambda x: (x[:, :-1].argmax(-1) == TARGETS[:, 1:]).float().mean(1), EVERYWHERE[:-1]),
    "max over positions": (lambda x: x.amax(1)[:, 0], EVERYWHERE),
    "top k": (lambda x: x[:, -1].topk(3).values.mean(-1), [10]),
    "clamped": (lambda x: x[:, 7, 0].clamp(0, 1), [7]),
    "squared": (lambda x: (x[:, 3, 0] - 1) ** 2, [3]),
    "nan_to_num of one": (lambda x: torch.nan_to_num(x[:, 3, 0]), [3]),
    "other precision": (lambda x: x.bfloat16()[:, -1, 0].float(), [10]),
    "einsum": (lambda x: torch.einsum("bpv,v->bp", x, torch.ones(VOCAB))[:, -1], [10]),
    "writes in place": (lambda x: x[:, 1:].zero_().sum() + x[:, 0, 0], [0]),
    "named: rank": (metrics.rank(3), [10]),
    "named: rows": (metrics.logit_diff(torch.tensor([1, 2, 3]), 4, pos=[1, 2, 3]), [1, 2, 3]),
    "named: log_prob": (metrics.log_prob(2, pos=0), [0]),
    "named: loss, padded": (metrics.loss(TARGETS, PADDED), EVERYWHERE[4:-1]),
}


@pytest.mark.parametrize("name", EXACT)
def test_positions_are_found_exactly(logits, name):
    metric, expected = EXACT[name]
    assert read(metric, logits) == expected
    with torch.inference_mode():
        assert read(metric, logits.clone()) == expected


def _raises_on_nan(x):
    if x.isnan().any():
        raise ValueError("NaN")
    return x[:, -1, 0]


def _branches(x):
    return x[:, 2, 0] if x[0, -1, 0] > 0 else x[:, 5, 0]


def _remembers(x, _memory={}):  # noqa: B006 (this is the point)
    return _memory.setdefault("value", x[:, -1, 0].clone())


def _steers_by_shape(x):
    return x[:, len((x[0, -1] > 0).nonzero()) % WIDTH, 0]


def _writes_a_condition(x):
    buffer = torch.zeros(BATCH, 2, dtype=torch.bool)
    buffer[:, 0] = x[:, -1, 0] > 0
    return torch.where(buffer.any(1), x[:, 2, 0], x[:, 5, 0])


def _writes_a_condition_into_the_logits(x):
    x[:, 0] = 0.0
    x[:, 0, 0] = (x[:, -1, 0] > 0).float()
    return torch.where(x[:, 0, 0] > 0, x[:, 2, 0], x[:, 5, 0])


def _conditions_after_an_unusual_view(x):
    x[:, -1].unfold(1, 2, 1)
    return torch.where(x[:, -1, 0] > 0, x[:, 2, 0], x[:, 5, 0])


# Whatever these read of one text, of another it may be something else; or it cannot be seen at all.
IN_DOUBT = {
    "nanmean": lambda x: x.nanmean((1, 2)),
    "nan_to_num of all": lambda x: torch.nan_to_num(x)[:, -1, 0],
    "raises": _raises_on_nan,
    "constant": lambda x: torch.ones(BATCH),
    "remembers": _remembers,
    "random": lambda x: x[:, -1, 0] + torch.rand(BATCH),
    "a branch": _branches,
    "an index": lambda x: x[ROWS, x[:, -1].argmax(-1) % WIDTH, 0],
    "a condition": lambda x: torch.where(x[:, -1, 0] > 0, x[:, 2, 0], x[:, 5, 0]),
    "a condition, written": _writes_a_condition,
    "a condition, written into the logits": _writes_a_condition_into_the_logits,
    "a condition after an unusual view": _conditions_after_an_unusual_view,
    "a product with a condition": lambda x: (x[:, -1, 0] > 0) * x[:, 2, 0],
    "a shape": _steers_by_shape,
    "numpy": lambda x: torch.tensor((x.cpu().numpy()[:, -1, 0] > 0).astype("float32")),
    "a list": lambda x: torch.tensor([float(each > 0) for each in x[:, -1, 0].tolist()]),
    "a list of whole numbers": lambda x: x[ROWS, [at % WIDTH for at in x[:, -1].argmax(-1).tolist()], 0],
    "a number": lambda x: torch.tensor(float(x[0, -1, 0].item() > 0)),
}


@pytest.mark.parametrize("name", IN_DOUBT)
def test_in_doubt_all_positions_are_read(logits, name):
    assert read(IN_DOUBT[name], logits) == EVERYWHERE


@pytest.mark.parametrize("name", EXACT)
def test_what_is_not_read_makes_no_difference(logits, name):
    metric, _ = EXACT[name]
    where = positions_read(metric, logits)
    for other in (torch.randn_like(logits) * 100, torch.full_like(logits, torch.nan)):
        new = torch.randn_like(logits)
        mixed = torch.where(where[:, None], new, other)
        assert torch.equal(metric(mixed), metric(new.clone()))


def test_few_calls_are_enough_for_one_position():
    calls = []

    def last(x):
        calls.append(1)
        return x[:, -1, 0]

    assert read(last, torch.randn(1, 512, 4)) == [511]
    assert len(calls) <= 6


def test_a_metric_with_a_state_is_not_shown_nan(logits):
    total = torch.zeros(BATCH)

    def running(x):
        return total.add_(x[:, -1, 0]).clone()

    assert read(running, logits) == EVERYWHERE
    assert total.isfinite().all()


def test_with_too_many_positions_to_try_more_are_named():
    wanted = torch.arange(0, 512, 3)
    found = positions_read(lambda x: x[:, wanted].mean((1, 2)), torch.randn(1, 512, 4))
    assert found[wanted].all()


def test_a_compiled_metric_is_looked_into(logits):
    compiled = torch.compile(lambda x: (x[:, -1].argmax(-1) == 3).float(), backend="eager")
    assert read(compiled, logits) == [10]


def test_the_logits_stay_as_they_are(logits):
    before = logits.clone()
    positions_read(lambda x: x.zero_()[:, -1, 0] + x[:, 0, 0], logits)
    assert torch.equal(logits, before)


def test_one_position_is_read(logits):
    assert positions_read(lambda x: x[:, 0, 0], logits[:, :1]).tolist() == [True]


def test_a_wrong_metric_is_refused_by_name_of_its_shape(logits):
    with pytest.raises(HooklineError, match=r"shape \[3, 20\]"):
        positions_read(lambda x: x[:, -1], logits)


# What they are given

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


def writing(logits):
    logits /= 2
    logits -= logits.mean(-1, keepdim=True)
    return logits[:, -1, 40] - logits[:, -1, 50]


def reading(logits):
    logits = logits / 2
    logits = logits - logits.mean(-1, keepdim=True)
    return logits[:, -1, 40] - logits[:, -1, 50]


EXPERIMENTS = {
    "sweep": lambda model, metric: patching.sweep(model, CLEAN, CORRUPTED, metric),
    "noising": lambda model, metric: patching.sweep(model, CLEAN, CORRUPTED, metric, direction="noise"),
    "attribute": lambda model, metric: attribution.attribution_patching(model, CLEAN, CORRUPTED, metric),
    "steps": lambda model, metric: attribution.attribution_patching(
        model, CLEAN, CORRUPTED, metric, steps=2, along="inputs"
    ),
    "ablate": lambda model, metric: ablation.ablate(model, CLEAN, metric, of="mlps"),
    "paths": lambda model, metric: paths.path_patch(model, CLEAN, CORRUPTED, metric, senders=[(1, 3), (2, 0)]),
    "trace": lambda model, metric: tracing.trace(model, CLEAN, "Mary", metric, samples=2, points="mlp_out"),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_metric_may_write_to_its_logits(tinyworld, name):
    run = EXPERIMENTS[name]
    wrote = run(tinyworld, {"a": writing, "b": metrics.log_prob(40), "c": writing})
    read = run(tinyworld, {"a": reading, "b": metrics.log_prob(40), "c": reading})
    torch.testing.assert_close(wrote.values, read.values, atol=2e-4, rtol=1e-4)
    for key in ("clean", "corrupted"):
        if key in read.info:
            torch.testing.assert_close(wrote.info[key].values, read.info[key].values, atol=2e-4, rtol=1e-4)


def test_edges_of_a_metric_that_writes_to_its_logits(tinyworld):
    wrote, read = (edges.edge_scores(tinyworld, CLEAN, CORRUPTED, metric, check=4) for metric in (writing, reading))
    torch.testing.assert_close(wrote.values, read.values, atol=1e-4, rtol=1e-4)
    assert wrote.info["clean"] == pytest.approx(read.info["clean"], abs=1e-4)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_metrics_of_tokens_need_an_unembedding(kind):
    model, tokens = hookline.hook(encoder(kind)), torch.tensor([[3, 4, 5]])
    hidden = model(tokens)
    asked = [metrics.logit_diff(5, 7), metrics.prob(5), metrics.log_prob(5), metrics.rank(5), metrics.kl(hidden), "kl"]
    for metric in (*asked, metrics.kl, "loss", metrics.loss(tokens), *([metrics.prob([5, 6])] * (kind == "gpt2"))):
        with pytest.raises(HooklineError, match="no unembedding"):
            ablation.ablate(model, tokens, metric, of="mlps", progress=False)
    result = ablation.ablate(model, tokens, lambda out: out[:, -1, 3], of="mlps", progress=False)
    assert result.values.isfinite().all()


@torch.no_grad()
def test_in_context_loss_is_the_difference_of_two_losses(model) -> None:
    tokens = torch.randint(3, 60, (3, 11))
    losses = model(tokens, return_type="loss", loss_per_token=True)
    metric = metrics.in_context_loss(tokens, early=2, late=[9, 10, -2])
    late = torch.stack([losses[0, 8], losses[1, 9], losses[2, 8]])
    torch.testing.assert_close(metric.resolved(model, tokens)(model(tokens)), late - losses[:, 1])
    assert positions_read(metric.resolved(model, tokens), model(tokens)).nonzero().flatten().tolist() == [1, 8, 9]
    result = ablation.ablate(model, tokens, metrics.in_context_loss(tokens, early=2, late=9), of="mlps")
    assert result.info["clean"] == pytest.approx(float((losses[:, 8] - losses[:, 1]).mean()), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_in_context_loss_does_not_count_padding(model, side) -> None:
    texts = [torch.randint(3, 60, (length,)) for length in (7, 11)]
    result = ablation.ablate(
        model, [text.tolist() for text in texts], lambda logits: logits[:, 0, 0], of="mlps"
    )  # the two run as one batch
    assert result.by_example.shape[-1] == 2
    width = max(map(len, texts))
    ends = [(width - len(text), 0) if side == "left" else (0, width - len(text)) for text in texts]
    tokens = torch.stack([F.pad(text, end) for text, end in zip(texts, ends, strict=True)])
    mask = torch.stack([F.pad(torch.ones(len(text)), end) for text, end in zip(texts, ends, strict=True)]).bool()
    logits = torch.randn(2, width, 60)
    found = metrics.in_context_loss(tokens, early=1, late=-1).resolved(model, tokens, mask)(logits)
    for row, text in enumerate(texts):
        scores = logits[row, mask[row]].log_softmax(-1)
        assert found[row] == pytest.approx(float(scores[0, text[1]] - scores[-2, text[-1]]), abs=1e-5)


def test_in_context_loss_needs_a_token_before(model) -> None:
    tokens = torch.randint(3, 60, (2, 11))
    for positions in ({"early": 0, "late": 5}, {"late": 500}, {"early": 2, "late": 11}):
        with pytest.raises(HooklineError):
            metrics.in_context_loss(tokens, **positions).resolved(model, tokens)(torch.randn(2, 11, 60))
    with pytest.raises(HooklineError, match="token ids"):
        metrics.in_context_loss(tokens.float())

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

import hookline
from hookline import HooklineError
from hookline.compat.transformer_lens._impl import sweeps
from hookline.errors import HooklineWarning, UnknownPointError
from hookline.experiments import ablation, attribution, head_detectors, metrics, patching, paths, steering
from hookline.experiments.result import Result
from hookline.rerun.changes import index_of

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
NAMES = metrics.logit_diff(" Mary", " John")


def rows(seed: int, n: int = 1, length: int = 8) -> Tensor:
    return torch.randint(3, 60, (n, length), generator=torch.Generator().manual_seed(seed))


def difference(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 6]


def one_by_one(
    model: Any, source: Tensor, target: Tensor, metric: Callable[[Tensor], Tensor], kind: str, result: Result
) -> Tensor:
    """The same sweep as a loop over full runs with a hook."""
    names = {layer: model.index.name_of((kind, layer)) for layer in result.coords["layer"]}
    cache = model.run_with_cache(source, names_filter=list(names.values()))[1]
    values = torch.empty(result.shape)
    for cell in itertools.product(*map(range, result.shape)):
        at = dict(zip(result.axes, cell, strict=True))
        name = names[result.coords["layer"][at.pop("layer")]]
        where = (slice(None), *index_of(model.point(name), **at))

        def patch(x: Tensor, name: str = name, where: Any = where) -> None:
            x[where] = cache[name][where]

        with torch.no_grad():
            values[cell] = metric(model.run_with_hooks(target, fwd_hooks=[(name, patch)])).mean().item()
    return values


SWEEPS = [
    ("resid_pre", ("layer", "pos")),
    ("resid_post", ("pos", "layer")),
    ("attn_out", ("layer", "pos")),
    ("mlp_out", ("layer", "pos")),
    ("z", ("layer", "head")),
    ("z", ("layer", "head", "pos")),
    ("k", ("layer", "head")),
    ("pattern", ("layer", "head", "pos")),
    ("pattern", ("layer", "pos", "src")),
    ("post", ("layer", "pos")),
]


@pytest.mark.quick_for("gpt2", "gemma2")
@pytest.mark.parametrize(("kind", "over"), SWEEPS)
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gptj", "gemma2", "bert"])
def test_a_sweep_is_a_loop_over_runs_with_a_hook(architecture: str, kind: str, over: tuple[str, ...]) -> None:
    make = tiny_models.encoder if architecture == "bert" else tiny_models.causal_lm
    model: Any = hookline.hook(make(architecture).eval())
    clean, corrupted = rows(0, length=6), rows(1, length=6)
    corrupted[:, :2] = clean[:, :2]
    result = patching.sweep(model, clean, corrupted, difference, points=kind, over=over)
    expected = one_by_one(model, clean, corrupted, difference, kind, result)
    torch.testing.assert_close(result.values, expected, rtol=1e-4, atol=1e-5)
    assert result.axes == over
    assert result.values.std() > 1e-4
    assert result.info["corrupted"] == pytest.approx(float(difference(model(corrupted)).detach()), abs=1e-5)
    assert result.info["clean"] == pytest.approx(float(difference(model(clean)).detach()), abs=1e-5)


def test_noising_is_denoising_the_other_way_round() -> None:
    model: Any = hookline.hook(tiny_models.causal_lm("llama").eval())
    clean, corrupted = rows(0), rows(1)
    noised = patching.sweep(model, clean, corrupted, difference, points="z", direction="noise")
    other = patching.sweep(model, corrupted, clean, difference, points="z")
    assert torch.equal(noised.values, other.values)
    assert (noised.info["clean"], noised.info["corrupted"]) == (other.info["corrupted"], other.info["clean"])


def test_everything_patched_gives_the_other_run_and_nothing_gives_the_same() -> None:
    model: Any = hookline.hook(tiny_models.causal_lm("gpt2").eval())
    result = patching.sweep(model, rows(0), rows(1), difference, points="resid_pre", over="layer")
    torch.testing.assert_close(result.normalized.values, torch.ones(4), rtol=1e-4, atol=1e-4)
    same = patching.sweep(model, rows(1), rows(1), difference)
    assert bool((same.values == same.info["corrupted"]).all())


def test_several_prompts_go_together_and_can_be_kept_apart() -> None:
    model: Any = hookline.hook(tiny_models.causal_lm("llama").eval())
    clean, corrupted = rows(0, 3), rows(1, 3)
    mean = patching.sweep(model, clean, corrupted, difference, points="z", over=("layer", "head"))
    apart = patching.sweep(model, clean, corrupted, difference, points="z", over=("layer", "head"), per_example=True)
    assert apart.axes == ("layer", "head", "example")
    torch.testing.assert_close(apart.values.mean(-1), mean.values)
    for row in range(3):
        alone = patching.sweep(model, clean[[row]], corrupted[[row]], difference, points="z", over=("layer", "head"))
        torch.testing.assert_close(apart.values[..., row], alone.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_part_of_a_prompt(tinyworld: hookline.HookedModel, side: str) -> None:
    other = (
        "Later, Tom and Mary went to the store and Mary gave a drink to",
        "Later, Tom and Mary went to the store and Tom gave a drink to",
    )
    answers = metrics.logit_diff([" Mary", " Tom"], [" John", " Mary"])
    clean, corrupted = (
        tinyworld.to_tokens([first, second], padding_side=side)
        for first, second in ((CLEAN, other[0]), (CORRUPTED, other[1]))
    )
    both = patching.sweep(tinyworld, clean, corrupted, answers, points="z", over=("layer", "head"), per_example=True)
    first = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES, points="z", over=("layer", "head"))
    torch.testing.assert_close(both.values[..., 0], first.values, rtol=1e-4, atol=1e-4)
    by_place = patching.sweep(tinyworld, clean, corrupted, answers, per_example=True)
    alone = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES)
    columns = slice(by_place.shape[1] - alone.shape[1], None) if side == "left" else slice(alone.shape[1])
    torch.testing.assert_close(by_place.values[:, columns, 0], alone.values, rtol=1e-4, atol=1e-4)


def test_several_metrics_and_several_points_are_axes(tinyworld: hookline.HookedModel) -> None:
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, [NAMES, "kl"], points=["resid_pre", "attn_out", "mlp_out"])
    assert result.axes == ("metric", "point", "layer", "pos")
    assert result.coords["metric"] == ["logit_diff", "kl"]
    alone = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES, points="attn_out")
    assert torch.allclose(result.sel(metric="logit_diff", point="attn_out").values, alone.values, atol=1e-4)
    assert result.coords["pos"][1] == "1: Mary"


def test_the_head_that_moves_the_name_is_found(tinyworld: hookline.HookedModel) -> None:
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES, points="z", over=("layer", "head"))
    best = result.normalized.top(1)[0]
    assert (best.labels["layer"], best.labels["head"]) == (3, 4)
    assert best.value > 0.9


def test_any_list_of_points_can_be_swept(tinyworld: hookline.HookedModel) -> None:
    result = patching.sweep(
        tinyworld, CLEAN, CORRUPTED, NAMES, points=["blocks.*.mlp.hook_post", "ln_final.hook_normalized"], over=["pos"]
    )
    assert result.axes == ("point", "pos")
    assert result.coords["point"][-1] == "ln_final.hook_normalized"
    whole = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES, points="ln_final.hook_normalized", over="point")
    assert float(whole.normalized.values) == pytest.approx(1, abs=1e-3)


def test_points_by_their_native_names_can_be_swept(tinyworld: hookline.HookedModel) -> None:
    names = ["transformer.h.0.mlp", "transformer.h.3.attn.c_proj"]
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES, points=names, over="point")
    metric = NAMES.resolved(tinyworld, tinyworld.to_tokens(CLEAN))
    cache = tinyworld.run_with_cache(CLEAN, names_filter=names)[1]
    for name, value in zip(names, result.values, strict=True):
        patched = tinyworld.run_with_hooks(CORRUPTED, fwd_hooks=[(name, lambda _, name=name: cache[name])])
        assert float(value) == pytest.approx(float(metric(patched.detach())), abs=1e-3)


def test_the_classic_functions_are_sweeps() -> None:
    model: Any = hookline.hook(tiny_models.causal_lm("llama").eval())
    clean, corrupted = rows(0, 2), rows(1, 2)
    cache = model.run_with_cache(clean)[1]

    def metric(logits: Tensor) -> Tensor:
        return difference(logits).mean()

    found = sweeps.get_act_patch_attn_head_out_by_pos(model, corrupted, cache, metric)
    swept = patching.sweep(model, clean, corrupted, metric, points="z", over=("layer", "pos", "head"))
    torch.testing.assert_close(found.values, swept.values)
    every = sweeps.get_act_patch_attn_head_all_pos_every(model, corrupted, cache, metric)
    assert every.shape == (5, 4, 4)
    keys = sweeps.get_act_patch_attn_head_k_all_pos(model, corrupted, cache, metric)  # of each group of two heads
    torch.testing.assert_close(every.sel(point="k").values, keys.values.repeat_interleave(2, 1))
    assert sweeps.get_act_patch_attn_head_pattern_by_pos(model, corrupted, cache, metric).axes == (
        "layer",
        "head",
        "pos",
    )
    assert sweeps.get_act_patch_block_every(model, corrupted, cache, metric).shape == (3, 4, 8)


def test_a_metric_that_looks_elsewhere_only_sometimes_is_right_all_the_same(tinyworld: hookline.HookedModel) -> None:
    logits = tinyworld(CORRUPTED)
    usual = int(logits[0, -1].argmax())

    def fickle(logits: Tensor) -> Tensor:
        answer = logits[:, -1, usual] - logits[:, -1].amax(-1)  # 0 for what is usual
        elsewhere = logits[:, 3].logsumexp(-1)
        return torch.where(answer == 0, answer, elsewhere) if bool((answer != 0).any()) else answer

    found = patching.sweep(tinyworld, CLEAN, CORRUPTED, fickle)
    cache = tinyworld.run_with_cache(CLEAN)[1]

    def patch(resid: Tensor) -> None:
        resid[:, 9] = cache["resid_pre", 0][:, 9]

    patched = tinyworld.run_with_hooks(CORRUPTED, fwd_hooks=[("blocks.0.hook_resid_pre", patch)])
    assert int(patched[0, -1].argmax()) != usual
    assert float(found.values[0, 9]) == pytest.approx(float(fickle(patched.detach())), abs=1e-3)


def test_a_metric_may_keep_what_it_is_shown(tinyworld: hookline.HookedModel) -> None:
    kept: list[Tensor] = []

    def keeping(logits: Tensor) -> Tensor:
        kept.append(logits)
        return NAMES_BY_ID(logits)

    mary, john = tinyworld.to_single_token(" Mary"), tinyworld.to_single_token(" John")
    NAMES_BY_ID = metrics.logit_diff(mary, john)  # noqa: N806
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, keeping, points="z", over=("layer", "head"), control=0)
    shown = torch.stack([NAMES_BY_ID(logits)[0] for logits in kept[-32:]])
    torch.testing.assert_close(shown.sort().values, result.values.flatten().sort().values)


def test_an_interrupt_keeps_what_is_done_and_it_can_go_on(tinyworld: hookline.HookedModel) -> None:
    calls = itertools.count()

    def impatient(logits: Tensor) -> Tensor:
        if next(calls) == 40:
            raise KeyboardInterrupt
        return difference(logits)

    part = patching.sweep(tinyworld, CLEAN, CORRUPTED, {"lead": impatient}, batch_size=4)
    assert not part.complete
    assert 0 < int(part.values.isnan().sum()) < part.values.numel()
    seen = [0]

    def counting(logits: Tensor) -> Tensor:
        seen[0] += 1
        return difference(logits)

    whole = patching.sweep(tinyworld, CLEAN, CORRUPTED, difference)
    resumed = patching.sweep(tinyworld, CLEAN, CORRUPTED, {"lead": counting}, resume=part)
    torch.testing.assert_close(resumed.values, whole.values, rtol=1e-4, atol=1e-4)
    assert resumed.complete
    assert seen[0] < part.values.numel()


@pytest.mark.parametrize(
    "other",
    [
        {"direction": "noise"},
        {"points": "resid_post"},
        {"corrupted": CORRUPTED.replace("store", "park")},
        {"metric": {"lead": metrics.logit_diff(" Mary", " Tom")}},
        {"metric": "kl"},
    ],
)
def test_another_experiment_cannot_be_resumed(tinyworld: hookline.HookedModel, other: dict[str, Any]) -> None:
    given = {"corrupted": CORRUPTED, "metric": {"lead": NAMES}, "points": "resid_pre"}
    first = patching.sweep(tinyworld, CLEAN, **given)
    again = patching.sweep(tinyworld, CLEAN, **given, resume=first)
    assert torch.equal(first.values, again.values)
    with pytest.raises(HooklineError, match="resume="):
        patching.sweep(tinyworld, CLEAN, **{**given, **other}, resume=first)


def test_a_metric_that_reads_padding_is_refused(tinyworld: hookline.HookedModel) -> None:
    texts = [CLEAN, "Later, Tom and Mary went to the store and Mary gave a drink to"]
    assert len({len(tinyworld.to_tokens(text)[0]) for text in texts}) == 2

    def last_column(logits: Tensor) -> Tensor:
        return logits[:, -1, 5]

    with pytest.raises(HooklineError, match="last_column"):
        patching.sweep(tinyworld, texts, texts, last_column)
    tokens = tinyworld.to_tokens(texts, padding_side="left")
    patching.sweep(tinyworld, tokens, tokens, last_column, points="z", over=("layer", "head"))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_size_of_batches_makes_no_difference(tinyworld: hookline.HookedModel, size: int) -> None:
    whole = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES)
    found = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES, batch_size=size)
    torch.testing.assert_close(found.values, whole.values, rtol=1e-4, atol=1e-4)


def test_hooks_that_stand_are_part_of_every_run(tinyworld: hookline.HookedModel) -> None:
    def without(z: Tensor) -> None:
        z[:, :, 4] = 0

    hooks = [("blocks.3.attn.hook_z", without)]
    with tinyworld.hooks(fwd_hooks=hooks):
        inside = patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES)
        expected = tinyworld(CLEAN)
    assert inside.info["clean"] == pytest.approx(
        float(NAMES.resolved(tinyworld, tinyworld.to_tokens(CLEAN))(expected.detach())), abs=1e-4
    )


def test_dropout_is_warned_about() -> None:
    module = tiny_models.causal_lm("gpt2").train()
    with pytest.warns(HooklineWarning, match="dropout"):
        patching.sweep(hookline.hook(module), rows(0), rows(1), difference)  # type: ignore[arg-type]


def bad(**changes: Any) -> dict[str, Any]:
    return {"clean": CLEAN, "corrupted": CORRUPTED, "metric": NAMES} | changes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (bad(clean="When Mary and John went to the store"), r"clean has \[1, 8\].*tokens \['"),
        (bad(metric=lambda logits: logits[:, -1]), "a torch.float32 tensor of shape"),
        (bad(metric=lambda logits: logits[:, -1, 0] * torch.nan), "NaN"),
        (bad(metric=lambda logits: "3.0"), "str '3.0'"),
        (bad(point="z"), "did you mean 'points'"),
        (bad(layers=2), r"layers is a list"),
        (bad(metric="logit_dif"), "Did you mean 'logit_diff'"),
        (bad(points=[]), "needs points"),
        (bad(over=()), "needs points and axes"),
        (bad(over=("layer", "position")), "the axes of a sweep are"),
        (bad(over=("layer", "layer")), "each at most once"),
        (bad(over=("layer", "head")), "has no axis 'head'"),
        (bad(points="resid"), "layers have no point"),
        (bad(layers=[7]), "layer"),
        (bad(direction="up"), 'direction is "denoise"'),
        (bad(batch_size=0), "batch_size"),
        (bad(batch_size=True), "batch_size"),
        (bad(resume="sweep.safetensors"), "sweep.safetensors"),
        (bad(points="blocks.9.hook_resid_pre", over="pos"), "blocks.9"),
        (bad(points=["z", "resid_pre"], over=("layer", "head")), "has no axis 'head'"),
    ],
)
def test_bad_input_is_refused(tinyworld: hookline.HookedModel, given: dict[str, Any], message: str) -> None:
    clean, corrupted, metric = given.pop("clean"), given.pop("corrupted"), given.pop("metric")
    with pytest.raises((HooklineError, UnknownPointError), match=message):
        patching.sweep(tinyworld, clean, corrupted, metric, **given)


def test_options_that_do_not_exist_are_refused(tinyworld: hookline.HookedModel) -> None:
    with pytest.raises(HooklineError, match="mean 'per_example'"):
        patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES, per_exampel=True)
    with pytest.raises(HooklineError, match="per_example"):
        patching.sweep(
            tinyworld, [CLEAN, CLEAN], [CORRUPTED, CORRUPTED], lambda x: x[:, -1, 0].mean(), per_example=True
        )


@pytest.mark.filterwarnings("ignore:logit_diff is")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_patterns_are_patched_where_the_metric_reads_before_all_differences(kind: str) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind))
    clean, corrupted = rows(0), rows(0)
    corrupted[0, 5] = 3 if clean[0, 5] != 3 else 4
    result = patching.sweep(
        model, clean, corrupted, metrics.logit_diff(5, 6, pos=2), points="pattern", over=("layer", "head")
    )
    assert result.values.unique().tolist() == [result.info["corrupted"]]
    every = metrics.logit_diff(5, 6, pos=-1)
    result = patching.sweep(model, clean, corrupted, every, points="pattern", over=("layer", "head", "pos"))
    assert (result.values != result.info["corrupted"]).any()


# Hooks that draw random numbers


@pytest.mark.quick_for("blocks.1.hook_resid_pre")
@pytest.mark.parametrize("name", ["hook_embed", "blocks.1.hook_resid_pre", "blocks.1.attn.hook_pattern"])
def test_noise_that_is_active_does_not_depend_on_the_batch_size(tinyworld: hookline.HookedModel, name: str) -> None:
    def swept(prompts: tuple[Any, Any], metric: Any, **options: Any) -> Tensor:
        return patching.sweep(tinyworld, *prompts, metric, points="z", over=("layer", "head"), **options).values

    noisy = hookline.edits.noise(0.3, seed=1)
    with tinyworld.hooks([(name, noisy)]):
        one, five, most = (swept((CLEAN, CORRUPTED), NAMES, batch_size=n) for n in (1, 5, "auto"))
        torch.testing.assert_close(one, five, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one, most, atol=1e-4, rtol=1e-4)
        both = [CLEAN, "So, when Alice and Bob went to the park, Bob gave a book to"]
        other = [CORRUPTED, "So, when Alice and Bob went to the park, Alice gave a book to"]
        metric = metrics.logit_diff([" Mary", " Alice"], [" John", " Bob"])
        several = swept((both, other), metric, per_example=True)
        torch.testing.assert_close(several[..., 0], one, atol=1e-4, rtol=1e-4)
        cache = tinyworld.run_with_cache(CLEAN)[1]

        def patch(x: Tensor) -> None:
            x[:, :, 4] = cache["z", 3][:, :, 4]

        by_hand = tinyworld.run_with_hooks(CORRUPTED, fwd_hooks=[("blocks.3.attn.hook_z", patch)])
    ids = [tinyworld.to_single_token(each) for each in (" Mary", " John")]
    assert one[3, 4].item() == pytest.approx((by_hand[0, -1, ids[0]] - by_hand[0, -1, ids[1]]).item(), abs=1e-3)
    assert not torch.allclose(one, swept((CLEAN, CORRUPTED), NAMES), atol=1e-2), "the noise is there"


@pytest.mark.parametrize("by_row", [False, True])
def test_a_hook_that_does_something_else_each_time_is_refused(tinyworld: hookline.HookedModel, by_row: bool) -> None:
    def shaken(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0) if by_row else None
        return x + torch.randn(x.shape, generator=generator)

    with (
        tinyworld.hooks([("blocks.1.hook_resid_pre", shaken)]),
        pytest.raises(HooklineError, match=r"noise\(std"),
    ):
        patching.sweep(tinyworld, CLEAN, CORRUPTED, NAMES)


def test_other_experiments_with_noise_that_is_active(tinyworld: hookline.HookedModel) -> None:
    with tinyworld.hooks([("blocks.1.hook_resid_pre", hookline.edits.noise(0.3))]):
        pair = [CLEAN, CLEAN.replace("store", "park")], [CORRUPTED, CORRUPTED.replace("store", "park")]
        found = attribution.attribution_patching(
            tinyworld, *pair, NAMES, points="z", over=("layer", "head"), steps=4, check=12
        )
        assert found.info["mean_abs_error"] < 0.2
        each = [attribution.attribution_patching(tinyworld, *one, NAMES, check=0) for one in zip(*pair, strict=True)]
        whole = attribution.attribution_patching(tinyworld, *pair, NAMES, check=0)
        torch.testing.assert_close(whole.values, (each[0].values + each[1].values) / 2, atol=1e-3, rtol=1e-3)
        of = {"senders": [(0, 1), (1, 3)], "receivers": [("mlp", 3)]}
        one, most = (paths.path_patch(tinyworld, *pair, NAMES, **of, batch_size=n) for n in (1, "auto"))
        torch.testing.assert_close(one.values, most.values, atol=1e-4, rtol=1e-4)
        ragged = [[CLEAN, f"So, {CLEAN}"], [CORRUPTED, f"So, {CORRUPTED}"]]
        with pytest.raises(HooklineError, match="different lengths"):
            attribution.attribution_patching(tinyworld, *ragged, NAMES)


@pytest.mark.parametrize("where", ["functional", "part"])
def test_other_chances_in_training_mode_are_warned_of_too(where: str) -> None:
    if where == "functional":
        module = tiny_models.causal_lm("llama")
        for layer in module.model.layers:
            layer.self_attn.attention_dropout = 0.2
        module.train()
    else:
        module = tiny_models.causal_lm("gpt2")
        for dropout in module.modules():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.p = 0.2
        module.transformer.h[1].train()
    model = hookline.hook(module)
    with pytest.warns(HooklineWarning, match="training mode"):
        patching.sweep(model, rows(0), rows(1), difference)


@pytest.mark.parametrize("points", ["blocks.1.hook_resid_pre", "hook_embed", ("z", 1)])
def test_one_point_is_not_one_of_every_layer(points) -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    clean, corrupted = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 2, 3]])
    with pytest.raises(HooklineError, match="layers"):
        patching.sweep(model, clean, corrupted, lambda logits: logits[:, -1, 0], points=points)


def test_a_metric_that_reads_nothing_is_warned_of(tinyworld) -> None:
    prompts = "The capital of Italy is", "The capital of Japan is"
    with pytest.warns(HooklineWarning, match="read nothing"):
        patching.sweep(tinyworld, *prompts, lambda logits: torch.zeros(len(logits)), progress=False)


def test_a_network_that_is_not_a_language_model() -> None:
    net, x = hookline.hook(torch.nn.Sequential(torch.nn.Linear(4, 4))), torch.randn(2, 4)
    metric = metrics.logit_diff(1, 2)
    for run in (
        lambda: patching.sweep(net, x, x, metric),
        lambda: ablation.ablate(net, x, metric),
        lambda: head_detectors.head_scores(net),
        lambda: steering.generate(net, "text", torch.zeros(4), 0),
    ):
        with pytest.raises(hookline.HooklineError, match="run_with_cache"):
            run()

from __future__ import annotations

import pytest
import tiny_models
import torch
from torch import Tensor

import hookline
from hookline import HooklineError
from hookline.rerun.baseline import Baseline
from hookline.rerun.batching import Budget, make_batches
from hookline.rerun.changes import Change, Entry
from hookline.rerun.strategy import Strategy

SOME = ["gpt2", "llama", "gpt_neox", "gptj", "opt", "mistral", "gemma2", "mixtral", "cohere", "gpt_oss", "phi", "qwen3"]
POINTS = ("hook_resid_pre", "attn.hook_z", "attn.hook_q", "attn.hook_pattern", "hook_attn_out", "hook_mlp_out",
          "mlp.hook_post", "hook_resid_mid", "hook_resid_post", "ln1.hook_normalized", "attn.hook_k")  # fmt: skip


def wrapped(kind: str) -> hookline.HookedModel:
    make = tiny_models.encoder if kind in tiny_models.ENCODERS else tiny_models.causal_lm
    model = hookline.hook(make(kind).eval())
    assert isinstance(model, hookline.HookedModel)
    return model


def tokens(length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(seed))


def logits_of(base: Baseline, variants: list[list[Change]], positions: list[int] | None = None) -> Tensor:
    found = {}
    for numbers, logits in base.rerun(variants, positions=positions):
        found |= dict(zip(numbers, logits, strict=True))
    assert sorted(found) == list(range(len(variants)))
    return torch.stack([found[number] for number in range(len(variants))])


def some_variants(model: hookline.HookedModel, base: Baseline, other: Baseline) -> list[list[Change]]:
    """At every point of two layers: one position, all positions, and two places together."""
    names = [name for layer in (1, 3) for point in POINTS if (name := f"{prefix(model)}.{layer}.{point}") in base.kept]
    variants = []
    for name in names:
        axes = base.model.index.find(name).axes
        pos = axes.split().index("p") - 1
        variants.append([base.change(name, other.kept[name].select(pos, 4), pos=4)])
        variants.append([base.change(name, other.kept[name])])
    variants.append([variants[0][0], variants[-2][0]])
    variants.append([])
    return variants


def prefix(model: hookline.HookedModel) -> str:
    return model.anatomy.main.name


def names_in(model: hookline.HookedModel) -> list[str]:
    names = [f"{prefix(model)}.{layer}.{point}" for layer in (1, 3) for point in POINTS]
    return [name for name in names if name in model.hook_dict]


def check_ways_agree(kind: str) -> Strategy:
    model, keep = wrapped(kind), names_in(wrapped(kind))
    base, other = (model.baseline(tokens(seed=seed), keep=keep) for seed in (0, 1))
    plain = model.baseline(tokens(), keep=keep, strategy=Strategy.FULL)
    variants = some_variants(model, base, other)
    expected = logits_of(plain, variants)
    changed = (expected[:-1] - plain.logits).abs().amax((1, 2)) > 1e-6
    assert changed.float().mean() > 0.8  # a window may hide a position, and an expert's threshold a small change
    for positions in (None, [-1], [2, 5]):
        found = logits_of(base, variants, positions)
        shown = expected if positions is None else expected[:, sorted(each % 9 for each in positions)]
        torch.testing.assert_close(found, shown, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    return base.strategy


@pytest.mark.parametrize("kind", SOME)
def test_variants_resumed_are_what_they_are_from_the_beginning(kind: str) -> None:
    assert check_ways_agree(kind) == Strategy.FROM_POSITION


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("bert", Strategy.FROM_LAYER),
        ("jamba", Strategy.FROM_LAYER),
        ("bloom", Strategy.FULL),
        ("gemma3n_text", Strategy.FULL),
    ],
)
def test_models_that_cannot_be_resumed_are_run_as_they_can(kind: str, strategy: Strategy) -> None:
    assert check_ways_agree(kind) == strategy


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in tiny_models.CAUSAL if kind not in SOME])
def test_every_architecture_gives_the_same_either_way(kind: str) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind).eval())
    if not isinstance(model, hookline.HookedModel):
        pytest.skip("its anatomy is not known")
    if kind.startswith(("mllama", "musicgen", "reformer", "rwkv")):
        pytest.skip("layers are left out without an image; rows are codebooks; none of these points is offered")
    if kind in ("cpmant", "prophetnet", "deepseek_v4"):
        with pytest.raises(HooklineError, match="positions"):
            model.baseline(tokens(), keep=names_in(model))
        return
    check_ways_agree(kind)


@pytest.mark.parametrize("kind", ["deepseek_v32", "axk2"])
def test_models_that_choose_among_all_keys_are_run_from_the_beginning(kind: str) -> None:
    assert check_ways_agree(kind) == Strategy.FULL


def test_angles_that_depend_on_the_length_keep_it() -> None:
    config = tiny_models.causal_lm("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config.max_position_embeddings = 8
    model = hookline.hook(type(tiny_models.causal_lm("llama"))(config).eval())
    config.max_position_embeddings = 64  # the rotary embedding has read it already
    base = model.baseline(tokens(12))
    variant = [base.change("blocks.1.hook_resid_pre", torch.ones(32), pos=1)]
    plain = logits_of(model.baseline(tokens(12), strategy=Strategy.FULL), [variant], [5])
    torch.testing.assert_close(logits_of(base, [variant], [5]), plain, rtol=1e-4, atol=1e-4)


def test_a_baseline_is_the_run_itself() -> None:
    model = wrapped("llama")
    base = model.baseline(tokens(), keep=["blocks.1.attn.hook_z"])
    logits, cache = model.run_with_cache(tokens())
    torch.testing.assert_close(base.logits, logits[0], rtol=0, atol=0)
    assert torch.equal(base.kept["blocks.1.attn.hook_z"], cache["z", 1][0])
    assert all(torch.equal(base.streams[layer], cache["resid_pre", layer][0]) for layer in range(4))


def test_layers_before_a_change_are_not_run() -> None:
    model = wrapped("llama")
    base = model.baseline(tokens())
    calls: list[tuple[int, torch.Size]] = []
    for number, layer in enumerate(model.module.model.layers):
        layer.register_forward_hook(lambda _m, _a, out, number=number: calls.append((number, out.shape)))
    change = base.change("blocks.2.hook_resid_pre", base.streams[2][6] * 2, pos=6)
    logits_of(base, [[change]], [-1])
    assert calls == [(2, torch.Size([1, 3, 32])), (3, torch.Size([1, 3, 32]))]


def test_variants_join_where_they_differ() -> None:
    model = wrapped("gpt2")
    base = model.baseline(tokens())
    rows: list[int] = []
    for layer in model.module.transformer.h:
        layer.register_forward_pre_hook(lambda _m, args: rows.append(args[0].shape[0]))
    changes = [base.change(f"blocks.{layer}.hook_resid_pre", base.streams[layer][0] * 2, pos=0) for layer in (1, 1, 3)]
    logits_of(base, [[change] for change in changes], [-1])
    assert rows == [2, 2, 3]


def test_what_comes_after_all_that_is_read_is_not_run() -> None:
    model = wrapped("llama")
    base = model.baseline(tokens())
    late = [base.change("blocks.1.hook_resid_pre", base.streams[1][7] * 2, pos=7)]
    assert torch.equal(logits_of(base, [late], [3])[0], base.logits[[3]])


def test_hooks_that_stand_are_honoured() -> None:
    model = wrapped("gpt2")
    variant = ("blocks.2.hook_resid_pre", torch.ones(32), 4)

    def expected() -> Tensor:
        def put(resid: Tensor) -> None:
            resid[:, variant[2]] = variant[1]

        return model.run_with_hooks(tokens(), fwd_hooks=[(variant[0], put)])[0]

    free = expected()
    with model.hooks(fwd_hooks=[("blocks.3.attn.hook_z", torch.zeros_like)]):
        base = model.baseline(tokens())
        assert base.strategy == Strategy.FULL
        found = logits_of(base, [[base.change(variant[0], variant[1], pos=variant[2])]])[0]
        torch.testing.assert_close(found, expected())
        assert not torch.allclose(found, free)
    model.add_hook("blocks.3.attn.hook_z", torch.zeros_like)
    base = model.baseline(tokens())
    torch.testing.assert_close(logits_of(base, [[base.change(variant[0], variant[1], pos=variant[2])]])[0], found)
    model.reset_hooks()


@pytest.mark.parametrize(
    ("point", "strategy"), [("hook_embed", Strategy.FROM_POSITION), ("blocks.1.hook_mlp_out", Strategy.FULL)]
)
def test_a_baselines_own_hooks_are_in_its_variants(point: str, strategy: Strategy) -> None:
    model = wrapped("llama")
    own = [(point, lambda x: x + 0.3 * torch.arange(x.shape[-1]))]
    base = model.baseline(tokens(), fwd_hooks=own)
    assert base.strategy == strategy

    def put(resid: Tensor) -> None:
        resid[:, 4] = 1.0

    found = logits_of(base, [[base.change("blocks.2.hook_resid_pre", torch.ones(32), pos=4)]])[0]
    expected = model.run_with_hooks(tokens(), fwd_hooks=[*own, ("blocks.2.hook_resid_pre", put)])[0]
    torch.testing.assert_close(found, expected)


def test_embeddings_can_be_changed_too() -> None:
    model = wrapped("llama")
    base = model.baseline(tokens())
    found = logits_of(base, [[base.change("hook_embed", torch.ones(32), pos=4)]])[0]

    def put(x: Tensor) -> None:
        x[:, 4] = 1.0

    torch.testing.assert_close(found, model.run_with_hooks(tokens(), fwd_hooks=[("hook_embed", put)])[0])


def test_it_holds_in_sixteen_bits() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama").eval().to(torch.bfloat16))
    base = model.baseline(tokens())
    assert base.strategy == Strategy.FROM_POSITION
    change = base.change("blocks.1.hook_resid_pre", base.streams[1][4].roll(1), pos=4)
    plain = logits_of(model.baseline(tokens(), strategy=Strategy.FULL), [[change]])
    torch.testing.assert_close(logits_of(base, [[change]]), plain, rtol=0.05, atol=0.05)


def test_bad_baselines_and_changes_are_refused() -> None:
    model = wrapped("gpt2")
    with pytest.raises(HooklineError, match=r"\[2, 9\]"):
        Baseline(model, tokens().expand(2, -1))
    base = model.baseline(tokens())
    with pytest.raises(HooklineError, match="position 9"):
        base.change("blocks.0.hook_resid_pre", torch.ones(32), pos=9)
    with pytest.raises(HooklineError, match="'head'"):
        base.change("blocks.0.hook_resid_pre", torch.ones(32), head=1)


def test_positions_come_as_they_are_asked_for() -> None:
    model = wrapped("llama")
    base = model.baseline(tokens())
    variant = [base.change("blocks.1.hook_resid_pre", torch.ones(32), pos=1)]
    whole = logits_of(base, [variant])
    assert torch.allclose(logits_of(base, [variant, []], [8, 0, -1, 3])[0], whole[0, [8, 0, 8, 3]], atol=1e-5)
    for bad, message in ((-1, "list"), ([], "list"), ([9], "the text has 9 tokens"), ([-10], "the text has 9")):
        with pytest.raises(HooklineError, match=message):
            list(base.rerun([variant], positions=bad))


def test_a_change_after_what_is_read_is_left_out() -> None:
    model = wrapped("gpt2")
    base = model.baseline(tokens(), keep=["blocks.1.attn.hook_z"])
    z = base.kept["blocks.1.attn.hook_z"]
    both = [base.change("blocks.1.attn.hook_z", z[pos] * 0, pos=pos) for pos in (1, 7)]
    plain = model.baseline(tokens(), strategy=Strategy.FULL)
    torch.testing.assert_close(logits_of(base, [both], [3]), logits_of(plain, [both], [3]))


def test_what_changes_in_the_model_makes_a_baseline_old() -> None:
    model = wrapped("gpt2")
    base = model.baseline(tokens())
    variant = [base.change("blocks.1.hook_resid_pre", torch.ones(32), pos=1)]
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", torch.zeros_like)]):
        with pytest.raises(HooklineError, match="hooks"):
            list(base.rerun([variant]))
        model(tokens())
    list(base.rerun([variant]))
    with torch.no_grad():
        model.module.lm_head.weight.add_(1)
    with pytest.raises(HooklineError, match="weights"):
        list(base.rerun([variant]))


def test_values_that_do_not_fit_are_named() -> None:
    model = wrapped("gpt2")
    base = model.baseline(tokens())
    with pytest.raises(HooklineError, match=r"\[7\]"):
        list(base.rerun([[base.change("blocks.1.hook_resid_pre", torch.ones(7), pos=1)]]))
    with pytest.raises(HooklineError, match="tensor"):
        base.change("blocks.1.hook_resid_pre", 3, pos=1)
    with pytest.raises(HooklineError, match="variant"):
        list(base.rerun([base.change("blocks.1.hook_resid_pre", torch.ones(32), pos=1)]))


@pytest.mark.parametrize("kind", ["mpt", "llama"])
def test_scores_are_put_into_runs_of_the_same_length(kind: str) -> None:
    model, name = wrapped(kind), "blocks.1.attn.hook_attn_scores"
    base, other = (model.baseline(tokens(seed=seed), keep=[name]) for seed in (0, 1))
    variant = [base.change(name, other.kept[name][..., 2], src=2)]
    plain = logits_of(model.baseline(tokens(), strategy=Strategy.FULL), [variant], [5])
    torch.testing.assert_close(logits_of(base, [variant], [5]), plain, rtol=1e-4, atol=1e-4)


def test_parts_hold_every_variant_once_and_start_no_later_than_any() -> None:
    entries = {number: Entry(layer, position) for number, (layer, position) in enumerate(
        (layer, position) for layer in range(4) for position in range(30))}  # fmt: skip
    for room in (10, 200, 10_000):
        found = make_batches(entries, 4, 30, Budget(room, 20), None, from_any=True)
        assert sorted(number for part in found for number in part.numbers) == sorted(entries)
        for part in found:
            assert all(entries[number].position >= part.start for number in part.numbers)
            assert len(part.numbers) == 1 or len(part.numbers) * (30 - part.start) <= room
            assert list(part.numbers) == sorted(part.numbers, key=lambda number: entries[number].layer)


@pytest.mark.parametrize("positions", [[1], None])
def test_a_value_for_another_number_of_positions_is_refused(positions: list[int] | None) -> None:
    model = wrapped("llama")
    base = Baseline(model, tokens(9), keep=["blocks.1.attn.hook_z", "blocks.1.attn.hook_pattern"])
    z, pattern = base.kept["blocks.1.attn.hook_z"], base.kept["blocks.1.attn.hook_pattern"]
    for value in (torch.cat([z, z[:3]]), z[:5]):
        with pytest.raises(HooklineError, match="9 tokens"):
            base.change("blocks.1.attn.hook_z", value)
    with pytest.raises(HooklineError, match="9 tokens"):
        base.change("blocks.1.attn.hook_z", torch.cat([z, z[:3]])[:, 0], head=0)
    with pytest.raises(HooklineError, match="9 tokens"):
        base.change("blocks.1.attn.hook_pattern", torch.cat([pattern, pattern[..., :2]], -1))
    same = [[base.change("blocks.1.attn.hook_z", z)], [base.change("blocks.1.attn.hook_pattern", pattern)]]
    expected = base.logits if positions is None else base.logits[positions]
    for found in logits_of(base, same, positions):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["hook_pattern", "hook_attn_scores"])
def test_patterns_changed_after_all_that_is_read_leave_it_as_it_was(name: str) -> None:
    model = wrapped("llama")
    name = f"blocks.1.attn.{name}"
    base = Baseline(model, tokens(9), keep=[name])
    assert base.strategy == Strategy.FROM_POSITION
    changes = [[base.change(name, base.kept[name][:, pos].roll(1, 0), pos=pos)] for pos in (2, 4, 6, 8)]
    found = logits_of(base, changes, [3])
    plain = logits_of(Baseline(model, tokens(9), strategy=Strategy.FULL), changes, [3])
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    assert not torch.equal(found[0, 0], base.logits[3])
    assert torch.equal(found[1:, 0], base.logits[3].expand(3, -1))

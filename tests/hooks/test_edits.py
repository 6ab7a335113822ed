"""Edits as data: what they do, how they print and compare, and their files."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import causal_lm
from torch import Tensor, nn

import hookline
from hookline import HookError, HooklineError, NeverFiredWarning, UnknownPointError, at, last, token
from hookline.edits import add, cap, freeze, mean, noise, project_out, reflect, replace, scale, zero
from hookline.edits import load as load_edits
from hookline.edits import save as save_edits
from hookline.errors import InvalidHookError
from hookline.hooks import Controller, FunctionController
from hookline.positions import image_tokens, new_tokens, step

TOKENS = torch.arange(12).view(2, 6) + 3
RESID, Z, POST = "blocks.1.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.mlp.hook_post"


@pytest.fixture(scope="module")
def model():
    return hookline.hook(causal_lm("llama"))


def run(model, name, hook, tokens=TOKENS) -> tuple[Tensor, Tensor]:
    """What flows out of a point under a hook, and without it."""
    _, cache = model.run_with_cache(tokens, names_filter=name, fwd_hooks=[(name, hook)])
    return cache[name], model.run_with_cache(tokens, names_filter=name)[1][name]


def test_each_kind(model) -> None:
    vector = torch.randn(model.cfg.d_model)
    for edit, by_hand in {
        zero(): lambda h: h * 0,
        scale(3): lambda h: h * 3,
        add(vector, 2.0): lambda h: h + 2 * vector,
        replace(vector): lambda h: vector.expand(h.shape),
        replace(0.5): lambda h: torch.full_like(h, 0.5),
        mean(vector): lambda h: vector.expand(h.shape),
        project_out(vector): lambda h: h - (h @ vector)[..., None] * vector / (vector @ vector),
        reflect(vector): lambda h: h - 2 * (h @ vector)[..., None] * vector / (vector @ vector),
    }.items():
        after, before = run(model, RESID, edit)
        assert torch.allclose(after, by_hand(before)), edit
        assert torch.equal(edit(before, model.hook_dict[RESID]), after), "it is a function too"
    after, before = run(model, RESID, mean(torch.stack([vector, 3 * vector]).view(2, 1, -1)))
    assert torch.allclose(after, (2 * vector).expand(before.shape))


def test_their_own_activation_changes_nothing(model) -> None:
    logits, cache = model.run_with_cache(TOKENS, names_filter=[RESID, "blocks.1.attn.hook_pattern"])
    for name in cache:
        for edit in (freeze(cache[name]), replace(cache[name]), scale(1), noise(0)):
            assert torch.allclose(model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)]), logits, atol=1e-5)
    own = mean(cache[RESID])
    after, before = run(model, RESID, own)
    assert torch.allclose(after, before.mean((0, 1)).expand(before.shape), atol=1e-6)
    pattern = "blocks.1.attn.hook_pattern"
    after, before = run(model, pattern, mean(cache[pattern]))
    assert torch.allclose(after, before.mean(0, keepdim=True).expand(before.shape)), "of attention, the rows' mean"


def test_where_it_applies(model) -> None:
    """What is selected is changed, and nothing else; several selections mean where all of them hold."""
    mask = torch.zeros(2, 6, 1, 1, dtype=torch.bool)
    mask[1, 2] = True
    rows = torch.tensor([[True] * 3 + [False] * 3, [False] * 6])
    for chosen, where in {
        zero(head=2): (..., 2, slice(None)),
        zero(head=[0, -1]): (..., [0, 3], slice(None)),
        zero(neuron=5): (..., 5),
        zero(pos=last): (slice(None), -1),
        zero(pos=[1, 2]): (slice(None), [1, 2]),
        zero(pos=slice(0, 2), head=1): (slice(None), slice(0, 2), 1),
        zero(pos=torch.tensor([0, 3]), neuron=[1]): ([0, 1], [0, 3], slice(None), 1),
        zero(pos=token(7)): None,
        zero(pos=rows): (0, slice(0, 3)),
        zero(mask=mask): (1, 2),
        zero(mask=mask, head=1): (1, 2, 1),
    }.items():
        if where is None:
            with pytest.raises(HookError, match=r"token\(7\) in row 1"):
                run(model, Z, chosen)
            continue
        after, before = run(model, Z, chosen)
        expected = before.clone()
        expected[where] = 0
        assert torch.equal(after, expected), chosen
        assert not torch.equal(after, before)


def test_key_value_heads_have_their_own_numbers(model) -> None:
    assert model.cfg.n_kv_heads == 2
    after, before = run(model, "blocks.1.attn.hook_v", zero(head=1))
    assert after[:, :, 1].eq(0).all()
    assert torch.equal(after[:, :, 0], before[:, :, 0])


def test_padding_does_not_count(model) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    run_ = {"attention_mask": mask, "names_filter": RESID}
    _, cache = model.run_with_cache(TOKENS, fwd_hooks=[(RESID, replace(7.0, pos=last))], **run_)
    assert cache[RESID].eq(7).all(-1).nonzero().tolist() == [[0, 3], [1, 5]]


def test_a_mean_leaves_padding_out(model) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    _, cache = model.run_with_cache(TOKENS, attention_mask=mask)
    real = mask.bool()
    for name in (RESID, Z, "blocks.1.attn.hook_k", "model.layers.1"):
        expected = cache[name][real].mean(0)
        for edit in (mean(cache[name]), mean(cache[name].clone(), over=real), mean(expected)):
            if edit.value.ndim not in (1, cache[name].ndim):
                continue
            out, _ = run(model, name, edit)
            assert torch.allclose(out, expected.expand(out.shape), atol=1e-6)
    plain, _ = run(model, RESID, mean(cache[RESID].clone()))
    assert not torch.allclose(plain[0, 0], cache[RESID][real].mean(0), atol=1e-3)
    pattern = cache["blocks.1.attn.hook_pattern"]
    out, _ = run(model, "blocks.1.attn.hook_pattern", mean(pattern))
    assert torch.allclose(out[0, :, :2], pattern.mean(0)[:, :2], atol=1e-6)
    assert torch.allclose(out[1, :, 2:], pattern[0, :, 2:], atol=1e-6), "of these positions only one row has any"
    for over, message in ((real[:, :3], "over= has the shape"), (torch.zeros_like(real), "leaves nothing")):
        with pytest.raises(HookError, match=message):
            run(model, RESID, mean(cache[RESID], over=over))
    with pytest.raises(HookError, match="over="):
        run(model, RESID, mean(torch.ones(cache[RESID].shape[-1]), over=real))


def test_positions_that_some_texts_have_not_are_told_at_the_end(model) -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 2:] = 0
    for pos, missed in (([0, 99], "position 99 in row 0"), (4, "position 4 in row 1, which has 2")):
        for hook in (scale(2, pos=pos), at(pos, lambda h: h * 2), FunctionController(RESID, at(pos, lambda h: h * 2))):
            with pytest.warns(NeverFiredWarning, match=missed), model.hooks([(RESID, hook)]):
                model(TOKENS, attention_mask=mask)
            with pytest.raises(HookError, match="position"):
                model.run_with_hooks(TOKENS, attention_mask=mask, fwd_hooks=[(RESID, hook)])
    with model.hooks([(RESID, scale(2, pos=1))]):
        model(TOKENS, attention_mask=mask)
    by_row, late = model.hooks([(RESID, zero(pos=torch.tensor([3, 50])))]), model.hooks([(RESID, scale(2, pos=[7, 9]))])
    with pytest.warns(NeverFiredWarning, match="position 50.*row 1.* 6"), by_row:
        model(TOKENS)
    with pytest.warns(NeverFiredWarning, match="position 9.*row 0.* 8$"), late:
        model.generate(TOKENS[:1], 3, do_sample=False)
    again = model.hooks([(RESID, scale(2, pos=[0, 7]))])
    with again:  # the prompt has 6 positions; the others come later
        model.generate(TOKENS[:1], 3, do_sample=False)
    with pytest.warns(NeverFiredWarning, match="position 7.*row 0"), again:
        [model(tokens) for tokens in (TOKENS[:1], torch.arange(9)[None] + 3)]  # the other does not make up for it


def test_experts_that_are_not_there() -> None:
    moe = hookline.hook(causal_lm("mixtral"))
    name = "blocks.0.mlp.hook_expert_indices"
    chosen = moe.run_with_cache(TOKENS, names_filter=name)[1][name]
    count = moe.module.config.num_local_experts

    class Choose(Controller):
        def modify_activations(self, module, inputs, output):
            return output * 0 + count

    for bad in (count, -1):
        for hook in (replace(bad, pos=1), lambda h, bad=bad: h.fill_(bad)):
            with pytest.raises(HookError, match=rf"expert {bad}.* 0 to {count - 1}"):
                moe.run_with_hooks(TOKENS, fwd_hooks=[(name, hook)])
    with pytest.raises(HookError, match=r"chose.*expert"):
        moe.run_with_hooks(TOKENS, fwd_hooks=[(name, Choose())])
    assert torch.equal(run(moe, name, replace(count - 1))[0], torch.full_like(chosen, count - 1))


def test_an_edit_that_is_for_nothing_is_told(model) -> None:
    nowhere = zero(mask=torch.zeros(6, 1, dtype=torch.bool))
    with pytest.warns(NeverFiredWarning, match="mask"):
        assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[(RESID, nowhere)]), model(TOKENS))


def test_in_generation(model) -> None:
    direction = torch.randn(model.cfg.d_model) * 9
    for pos in (last, new_tokens, step(2), None):
        results = []
        for hook in (add(direction, pos=pos), at(pos, lambda h: h + direction)):
            with model.hooks([(RESID, hook)]):
                results.append(model.generate(TOKENS[:1], 4, do_sample=False))
        assert torch.equal(*results), pos
    with (
        pytest.warns(NeverFiredWarning, match=r"zero\(pos=step\(7\)\)"),
        model.hooks([(RESID, zero(pos=step(7)))]),
    ):
        model.generate(TOKENS[:1], 3, do_sample=False)


def test_noise_is_the_same_at_the_same_place(model) -> None:
    name = "hook_embed"
    a, before = run(model, name, noise(2.0, seed=1))
    assert torch.equal(run(model, name, noise(2.0, seed=1))[0], a)
    assert not torch.equal(run(model, name, noise(2.0, seed=2))[0], a)
    assert 1.7 < (a - before).std() < 2.3
    other, before_there = run(model, RESID, noise(2.0, seed=1))
    assert not torch.allclose(other - before_there, a - before), "another place, other noise"
    _, cache = model.run_with_cache(TOKENS, names_filter=name, fwd_hooks=[(name, noise(2.0, pos=[0, 1]))])
    assert torch.equal(cache[name][:, 2:], before[:, 2:])


def test_gradients(model) -> None:
    """An edit works on a gradient as well, and lets gradients through where it does not apply."""

    def grads(**hooks):
        _, cache = model.run_with_cache(TOKENS, names_filter=Z, incl_bwd=True, return_type="loss", **hooks)
        return cache[f"{Z}_grad"]

    clean, cut = grads(), grads(bwd_hooks=[(Z, zero(head=1))])
    assert cut[:, :, 1].eq(0).all()
    assert torch.equal(cut[:, :, 0], clean[:, :, 0])
    x = torch.randn(2, 6, 4, model.cfg.d_head, requires_grad=True)
    zero(head=1)(x, model.hook_dict[Z]).sum().backward()
    assert x.grad[:, :, 1].eq(0).all()
    assert x.grad[:, :, 0].eq(1).all()


def test_values_must_fit(model) -> None:
    d = model.cfg.d_model
    for edit, message in {
        replace(torch.ones(2, d)): "as many axes",
        replace(torch.ones(d + 1)): "does not broadcast",
        freeze(torch.ones(d)): r"the frozen value has shape",
        zero(mask=torch.ones(5, dtype=torch.bool)): r"mask of shape \[5\] does not broadcast",
        zero(neuron=d): f"neuron={d}",
    }.items():
        with pytest.raises(HookError, match=message):
            model.run_with_hooks(TOKENS, fwd_hooks=[(RESID, edit)])
    with pytest.raises(HookError, match=r"torch\.int64"):
        model.run_with_hooks(TOKENS, fwd_hooks=[("hook_tokens", scale(2))])
    with pytest.raises(HookError, match=r"torch\.int64"):
        model.run_with_hooks(TOKENS, fwd_hooks=[("hook_tokens", replace(0.5))])
    assert torch.equal(
        model.run_with_hooks(TOKENS, fwd_hooks=[("hook_tokens", replace(5))]), model(torch.full_like(TOKENS, 5))
    )


def test_mistakes_are_told_before_the_run(model) -> None:
    with pytest.raises(HooklineError, match=r"head=.*b p d"):
        model.hooks([(RESID, zero(head=1))])
    with pytest.raises(HooklineError, match="unknown"):
        model.hooks([("model.layers.0", zero(head=1))])
    with pytest.raises(HooklineError, match="neuron="):
        model.hooks([("blocks.0.attn.hook_pattern", zero(neuron=1))])
    with pytest.raises(InvalidHookError, match=r"zero\(\)"):
        model.hooks([zero()])
    vector = torch.ones(3, requires_grad=True)
    for make, message in {
        lambda: zero(head="1"): "head=",
        lambda: zero(head=[]): "head=",
        lambda: zero(neuron=True): "neuron=",
        lambda: zero(mask=torch.ones(3)): "mask=",
        lambda: zero(pos="last"): "'last'",
        lambda: scale("2"): "factor=",
        lambda: scale(float("nan")): "factor=",
        lambda: noise(-1): "std=",
        lambda: noise(1, seed=0.5): "seed",
        lambda: add(vector): "pass vector.detach",
        lambda: replace("x"): "value=.*'x'",
        lambda: add([1.0] * 100): r"vector=.*a list: use torch\.as_tensor",
        lambda: scale(torch.ones(2)): r"factor=.*float32 tensor of shape \[2\]",
        lambda: zero(mask=torch.ones(300)): r"mask=.*float32 tensor of shape \[300\]",
        lambda: mean(torch.ones(2, 3, 4), torch.ones(2, 3)): "over=",
    }.items():
        with pytest.raises(HooklineError, match=message):
            make()


def test_an_edit_is_a_value() -> None:
    vector = torch.randn(4)
    edit = add(vector, 2, pos=last)
    assert edit == add(vector.clone(), 2.0, pos=last)
    assert hash(edit) == hash(add(vector.clone(), 2.0, pos=last))
    kept = edit.vector.clone()
    vector.zero_()
    assert torch.equal(edit.vector, kept), "what happens to the tensor later does not matter"
    assert edit != add(vector, 2, pos=last)
    assert zero() != scale(0)
    assert zero(head=[1, 2]) == zero(head=(1, 2))
    assert zero(head=1) != zero(head=2)
    assert len({zero(), zero(), zero(head=1)}) == 2
    assert replace(torch.tensor(float("-inf"))) == replace(torch.tensor(float("-inf")))
    assert repr(edit) == "add(vector=<[4] float32>, coefficient=2, pos=last)"
    assert repr(zero(pos=token(" Paris"), head=[1, 2])) == "zero(pos=token(' Paris'), head=[1, 2])"
    assert repr(noise(0.1, 3)) == "noise(std=0.1, seed=3)"
    with pytest.raises(AttributeError):
        edit.coefficient = 3


POSITIONS = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.builds(slice, st.integers(0, 2), st.integers(3, 5), st.none()),
    st.lists(st.integers(-5, 5), min_size=1),
    st.sampled_from([last, new_tokens, image_tokens, step(0), step(3), token("a"), token(7, nth=0), token("", nth=1)]),
    st.builds(torch.tensor, st.lists(st.integers(0, 5), min_size=1)),
    st.builds(torch.tensor, st.lists(st.booleans(), min_size=1)),
)
UNITS = st.one_of(st.none(), st.integers(-9, 9), st.lists(st.integers(-9, 9), min_size=1))
NUMBERS = st.floats(-1e30, 1e30)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
TENSORS = st.builds(
    lambda shape, dtype: torch.randn(shape).to(dtype), st.lists(st.integers(0, 3), max_size=4).map(tuple), DTYPES
)
WHERE = {
    "pos": POSITIONS,
    "head": UNITS,
    "neuron": UNITS,
    "mask": st.one_of(st.none(), TENSORS.map(lambda x: x > 0)),
}
EDITS = st.one_of(
    st.builds(zero, **WHERE),
    st.builds(scale, NUMBERS, **WHERE),
    *(st.builds(kind, DTYPES.map(lambda x: torch.randn(4).to(x)), **WHERE) for kind in (project_out, reflect)),
    st.builds(cap, DTYPES.map(lambda x: torch.randn(4).to(x)), st.floats(-9, 0), st.floats(0, 9), **WHERE),
    st.builds(noise, st.floats(0, 10), st.integers(0, 2**40), **WHERE),
    st.builds(add, st.one_of(TENSORS, NUMBERS), NUMBERS, **WHERE),
    *(st.builds(kind, st.one_of(TENSORS, NUMBERS), **WHERE) for kind in (mean, replace, freeze)),
)
NAMES = st.sampled_from([RESID, "blocks.*.hook_mlp_out", ("q", 3), 2, -1, ["fc1", "fc2"], "lm.mlp.1.out", "é#0"])


@given(st.lists(st.tuples(NAMES, EDITS), max_size=4))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_give_back_what_was_saved(tmp_path, pairs) -> None:
    save_edits(tmp_path / "edits", pairs)
    again = load_edits(tmp_path / "edits")
    assert [name for name, _ in again] == [name for name, _ in pairs]
    for (_, loaded), (_, saved) in zip(again, pairs, strict=True):
        assert loaded == saved
        assert repr(loaded) == repr(saved)


def test_what_was_loaded_does_the_same(model, tmp_path) -> None:
    hooks = [(RESID, add(torch.randn(model.cfg.d_model), 3, pos=last)), (("z", 1), zero(head=2)), (0, scale(0.5))]
    save_edits(tmp_path, hooks)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["edits.json", "tensors.safetensors"]
    a, b = (model.run_with_hooks(TOKENS, fwd_hooks=pairs) for pairs in (hooks, load_edits(tmp_path)))
    assert torch.equal(a, b)


def test_what_cannot_be_saved(model, tmp_path) -> None:
    for pair in [("fc1", torch.relu), ("fc1", hookline.hooks.LayerActivationDetector()), zero(), ("fc1",)]:
        with pytest.raises(InvalidHookError, match="pairs"):
            save_edits(tmp_path / "x", [pair])
    with pytest.raises(HooklineError, match=r"point.*saved"):
        save_edits(tmp_path / "x", [(lambda name: True, zero())])
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(HooklineError, match="a file"):
        save_edits(tmp_path / "file", [])


def _changed(folder: Path, change) -> None:
    table = json.loads((folder / "edits.json").read_text())
    result = change(table)
    table = result if isinstance(result, list) else table
    (folder / "edits.json").write_text(json.dumps(table))


BROKEN = {
    "code": lambda t: t["edits"][0].update(edit="os.system"),
    "class": lambda t: t["edits"][0].update(edit="__class__"),
    "an unknown field": lambda t: t["edits"][0].update(hook="eval"),
    "a kind that is no word": lambda t: t["edits"][0].update(edit=[]),
    "a tensor that is no word": lambda t: t["edits"][0].update(vector={"tensor": []}),
    "no field": lambda t: t["edits"][0].pop("vector"),
    "no point": lambda t: t["edits"][0].pop("point"),
    "a point that is none": lambda t: t["edits"][0].update(point={"import": "os"}),
    "a tensor that is none": lambda t: t["edits"][0].update(vector={"tensor": "../x"}),
    "a tensor of another kind": lambda t: t["edits"][0].update(vector=[1, 2]),
    "a number that is text": lambda t: t["edits"][0].update(coefficient="1"),
    "a number that is none": lambda t: t["edits"][0].update(coefficient=float("nan")),
    "heads that are text": lambda t: t["edits"][0].update(head="1"),
    "a position that is none": lambda t: t["edits"][0].update(pos={"meaning": "exec"}),
    "another position": lambda t: t["edits"][0].update(pos={"token": {}, "nth": 0}),
    "a tensor nobody uses": lambda t: t["edits"].clear(),
    "another version": lambda t: t.update(version=9),
    "another format": lambda t: t.update(format="pickle"),
    "edits that are no list": lambda t: t.update(edits={}),
    "an edit that is no row": lambda t: t.update(edits=[3]),
    "no table": lambda t: [1],
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_file_is_checked(tmp_path, change) -> None:
    save_edits(tmp_path, [(RESID, add(torch.ones(4)))])
    _changed(tmp_path, change)
    with pytest.raises(HooklineError):
        load_edits(tmp_path)


def test_damaged_files(tmp_path) -> None:
    with pytest.raises(HooklineError, match="no edits"):
        load_edits(tmp_path)
    save_edits(tmp_path, [(RESID, add(torch.ones(4)))])
    tensors = tmp_path / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(HooklineError, match=r"tensors\.safetensors"):
        load_edits(tmp_path)
    tensors.unlink()
    with pytest.raises(HooklineError, match=r"lacks tensors\.safetensors"):
        load_edits(tmp_path)
    (tmp_path / "edits.json").write_text("{")
    with pytest.raises(HooklineError, match="JSON"):
        load_edits(tmp_path)


def test_names_are_checked_by_the_model(model, tmp_path) -> None:
    save_edits(tmp_path, [("blocks.1.hook_nose", zero())])
    with pytest.raises(UnknownPointError):
        model.run_with_hooks(TOKENS, fwd_hooks=load_edits(tmp_path))


def test_values_that_the_dtype_cannot_hold() -> None:
    half = hookline.hook(causal_lm("llama").to(torch.bfloat16))
    for value, message in ((1e39, "3.38953e\\+38"), (torch.ones(32) * 1j, "a complex value")):
        for edit in (replace(value), add(value)):
            with pytest.raises(HookError, match=message):
                half.run_with_hooks(TOKENS, fwd_hooks=[(RESID, edit)])
    half.run_with_hooks(TOKENS, fwd_hooks=[(RESID, replace(torch.tensor(float("-inf"))))])


def test_a_mean_is_saved_with_what_it_is_over(tmp_path) -> None:
    edit = mean(torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]]))
    save_edits(tmp_path, [("fc", edit)])
    assert load_edits(tmp_path) == [("fc", edit)]
    assert edit != mean(edit.value)
    (tmp_path / "edits.json").write_text("[" * 100_000)
    with pytest.raises(HooklineError, match="JSON"):
        load_edits(tmp_path)


def test_a_hook_that_stays_tells_of_positions_that_a_generation_never_reached() -> None:
    model = hookline.load("tinyworld")
    model.add_hook(0, zero(pos=[0, 40]))
    for _ in range(2):
        with pytest.warns(hookline.NeverFiredWarning, match="position 40.*row 0.* 3"):
            model.generate("Mary went", max_new_tokens=2)
    with pytest.warns(hookline.NeverFiredWarning, match="position 40"), model.hooks():
        model("Mary went")
    model.reset_hooks()


@pytest.mark.parametrize("use_cache", [True, False])
def test_positions_that_a_generation_reaches_are_not_missed(use_cache) -> None:
    model = hookline.load("tinyworld")
    model.add_hook(0, zero(pos=[0, 3]))
    model.generate("Mary went", max_new_tokens=4, min_new_tokens=4, use_cache=use_cache)
    model.reset_hooks()
    with model.hooks([(0, zero(pos=[0, 3]))]):
        model.generate("Mary went", max_new_tokens=4, min_new_tokens=4, use_cache=use_cache)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (range(1, 4), (1, 2, 3)),
        (np.int64(2), 2),
        (np.array(2), 2),
        (torch.tensor(2), 2),
        ([np.int64(1), 2], (1, 2)),
        (slice(np.int64(1), None), slice(1, None)),
        (step(np.int64(3)), step(3)),
        (token(np.int64(7), nth=np.int32(0)), token(7, nth=0)),
    ],
)
def test_positions_have_one_form(given, same, tmp_path) -> None:
    edits = [("x", zero(pos=given, head=np.array([1, 2]), neuron=np.int64(3))), ("y", scale(np.float32(2)))]
    save_edits(tmp_path, edits)
    assert load_edits(tmp_path) == edits
    assert [hash(edit) for _, edit in load_edits(tmp_path)] == [hash(edit) for _, edit in edits]
    assert edits[0][1] == zero(pos=same, head=(1, 2), neuron=3)
    assert type(edits[0][1].pos) is type(same)


def test_masks_of_numpy(model, tmp_path) -> None:
    mask = np.array([True, False, True, False, False])[: TOKENS.shape[1]]
    edits = [(RESID, zero(pos=mask))]
    save_edits(tmp_path, edits)
    assert load_edits(tmp_path) == edits == [(RESID, zero(pos=torch.from_numpy(mask)))]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array([1, 2]), r"torch.from_numpy"),
        (np.array([1.5]), "positions must be"),
        (torch.tensor(1.5), "positions must be"),
        (torch.tensor([1.5]), "positions must be"),
        (torch.tensor([[1, 2]]), "positions must be"),
        ([True, False], "positions must be"),
        (slice(0, 4, 0), "positions must be"),
        (slice("a"), "positions must be"),
        ([], "positions must be"),
        ({1, 2}, "positions must be"),
    ],
)
def test_what_is_no_position_is_refused_at_once(given, message) -> None:
    for use in (lambda: zero(pos=given), lambda: hookline.at(given, torch.relu)):
        with pytest.raises(HooklineError, match=message):
            use()


def test_giant_numbers(tmp_path) -> None:
    with pytest.raises(HooklineError, match="factor="):
        scale(10**400)
    with pytest.raises(HooklineError, match="JSON"):
        save_edits(tmp_path / "x", [("fc", noise(1.0, seed=10**5000))])
    for wrong in (lambda: step(1.5), lambda: token(None), lambda: token(3, nth="a"), lambda: step(True)):
        with pytest.raises(HooklineError, match="integer"):
            wrong()


def test_what_is_projected_out_is_gone_and_nothing_else(model, tmp_path) -> None:
    direction, other = torch.randn(2, model.cfg.d_model)
    after, before = run(model, RESID, project_out(direction))
    unit = direction / direction.norm()
    other = other - (other @ unit) * unit
    assert (after @ unit).abs().max() < 1e-5
    torch.testing.assert_close(after @ other, before @ other, atol=1e-4, rtol=1e-4)
    for same in (3 * direction, -direction, direction * 1e-30, direction.double() * 1e200):
        torch.testing.assert_close(run(model, RESID, project_out(same))[0], after, atol=1e-5, rtol=1e-5)
    of_head = torch.randn(model.cfg.d_head)
    after, before = run(model, Z, project_out(of_head, head=1, pos=last))
    assert (after[:, -1, 1] @ of_head).abs().max() < 1e-4
    after[:, -1, 1] = before[:, -1, 1]
    assert torch.equal(after, before)
    edit = project_out(direction, pos=[1, 2], mask=torch.tensor([[[True]], [[False]]]))
    save_edits(tmp_path, [(RESID, edit)])
    assert load_edits(tmp_path) == [(RESID, edit)]
    after, before = run(model, RESID, edit)
    assert torch.equal(after[1], before[1])
    assert (after[0, 1:3] @ unit).abs().max() < 1e-5
    assert repr(edit) == f"project_out(direction=<[{model.cfg.d_model}] float32>, pos=[1, 2], mask=<[2, 1, 1] bool>)"
    half = torch.randn(3, 64).to(torch.bfloat16)
    there = project_out(torch.ones(64))(half, model.hook_dict[RESID])
    assert there.dtype == torch.bfloat16
    assert there.float().sum(-1).abs().max() < 0.2


def test_directions_that_cannot_be_projected_out(model) -> None:
    for direction in (
        torch.zeros(4),
        torch.tensor([1.0, torch.nan]),
        torch.ones(2, 4),
        torch.ones(4).long(),
        2.0,
        None,
    ):
        with pytest.raises(HooklineError, match="direction="):
            project_out(direction)
    with pytest.raises(HookError, match="3 components"):
        run(model, RESID, project_out(torch.ones(3)))
    with pytest.raises(HookError, match=r"torch\.int64"):
        model.run_with_hooks(TOKENS, fwd_hooks=[("hook_tokens", project_out(torch.ones(6)))])


def test_a_subclass_without_a_kind_of_its_own_does_not_take_its_parents_place(tmp_path) -> None:
    own = hookline.edits.scale(2.0)
    louder = type("Louder", (type(own),), {})
    with pytest.raises(HooklineError, match="Louder"):
        hookline.edits.save(tmp_path, [("x", louder(2.0))])
    hookline.edits.save(tmp_path, [("x", own)])
    assert type(hookline.edits.load(tmp_path)[0][1]) is type(own)


def test_positions_of_a_sequence_first_network_are_ambiguous() -> None:
    net, x = hookline.hook(nn.Sequential(OrderedDict(rnn=nn.LSTM(4, 6)))), torch.randn(5, 2, 4)
    for ask in (
        lambda: net.run_with_hooks(x, fwd_hooks=[("rnn[0]", zero(pos=1))]),
        lambda: net.run_with_cache(x, names_filter="rnn[0]", pos_slice=-1),
    ):
        with pytest.raises(HooklineError, match="batch_first=False"):
            ask()
    first = hookline.hook(nn.Sequential(OrderedDict(rnn=nn.LSTM(4, 6, batch_first=True))))
    changed = first.run_with_hooks(x, fwd_hooks=[("rnn[0]", zero(pos=1))])[0] != first(x)[0]
    assert changed.any(-1).nonzero()[:, 1].unique().tolist() == [1]


def test_neurons_of_images_are_refused_and_channels_are_a_mask() -> None:
    net, x = hookline.hook(nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 16, 3)))), torch.randn(2, 3, 6, 6)
    with pytest.raises(HooklineError, match="mask="):
        net.run_with_hooks(x, fwd_hooks=[("conv", zero(neuron=1))])
    channel = torch.arange(16)[:, None, None] == 5
    found = net.run_with_hooks(x, fwd_hooks=[("conv", zero(mask=channel))])
    assert (found == 0).flatten(2).all(-1).nonzero()[:, 1].unique().tolist() == [5]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_tensors_that_are_not_finite(bad) -> None:
    vector = torch.tensor([1.0, bad, 2.0])
    for edit in (add, replace, mean, freeze):
        with pytest.raises(HooklineError, match=r"NaN.* 1 of 3"):
            edit(vector)


@pytest.mark.parametrize("edit", [project_out, reflect])
def test_a_component_is_computed_in_float32_under_autocast(edit) -> None:
    direction, x = torch.tensor([0.0, 0, 3, 0]), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = hookline.hook(nn.Identity()).run_with_hooks(x, fwd_hooks=[("output", edit(direction))])
    assert torch.equal(out[:, 2], x[:, 2] * (0 if edit is project_out else -1))

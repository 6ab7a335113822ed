"""Positions and steps mean the same in every kind of generation, by our verb and by the module's own `generate`."""

import warnings

import pytest
import tiny_models
import torch

import hookline
from hookline import HookError, HooklineError, at, last, token
from hookline.edits import noise
from hookline.positions import new_tokens, step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
IDS = torch.tensor([[3, 4, 5, 4, 7, 3, 4, 5]])
PADDED = torch.tensor([[0, 0, 5, 4, 7, 3, 4, 5], [3, 4, 5, 4, 7, 3, 4, 9]])
RESID, KEYS = "blocks.1.hook_resid_post", "blocks.1.attn.hook_rot_k"
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
POSITIONS = {
    "last": last,
    "-1": -1,
    "-2": -2,
    "new": new_tokens,
    "step0": step(0),
    "step1": step(1),
    "step3": step(3),
    "token": token(4),
    "token first": token(4, nth=0),
    "token second": token(5, nth=1),
    "9": 9,
    "slice": slice(-3, None),
    "slice to the end": slice(2, -1),
    "list": [0, -1, 10],
}
WAYS = {
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 3},
    "static": {"cache_implementation": "static"},
}


def push(x):
    """An edit of each position by itself that changes what is written."""
    return x + 2 * torch.sin(torch.arange(x.shape[-1]).float()) * x.std(-1, keepdim=True)


def written(model, positions, point=RESID, ids=IDS, **options):
    with model.hooks(fwd_hooks=[(point, at(positions, push))]):
        return model.module.generate(ids, attention_mask=ids.ne(0).long(), **GREEDY, **options)


def check(kind, ways, names=tuple(POSITIONS)) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind))
    ways = {**ways, "assistant": {"assistant_model": tiny_models.causal_lm(kind)}}
    for name in names:
        positions = POSITIONS[name]
        usual = written(model, positions)
        for way, options in ways.items():
            assert torch.equal(written(model, positions, **options), usual), (name, way)
    plain = model.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY)
    assert not torch.equal(written(model, last), plain), "the edit matters"


@pytest.mark.parametrize("kind", ["gpt2", "olmo2"])
def test_positions_mean_the_same_in_every_generation(kind) -> None:
    ways = {name: WAYS[name] for name in ("prompt lookup", "no cache", "chunks")}
    check(kind, ways, ("last", "new", "step3", "token first", "slice to the end"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "qwen3", "phi", "gpt_neox", "falcon", "gpt2"])
def test_positions_mean_the_same_in_every_generation_of_more_models(kind) -> None:
    check(kind, WAYS)


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_padded_prompts_with_and_without_a_cache(kind) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind))
    ways = [{"use_cache": False}] + [{"cache_implementation": "static"}, {"prefill_chunk_size": 3}] * (kind == "llama")
    for positions in (0, last, torch.tensor([1, 3]), step(2), token(5, nth=1)):
        usual = written(model, positions, ids=PADDED)
        for options in ways:
            assert torch.equal(written(model, positions, ids=PADDED, **options), usual), (positions, options)


def test_beams_have_the_positions_of_their_prompts() -> None:
    model, beams = hookline.hook(tiny_models.causal_lm("llama")), {"num_beams": 3, "num_return_sequences": 2}
    for positions in (0, last, torch.tensor([1, 3]), step(2), token(5, nth=0), token(4)):
        usual = written(model, positions, ids=PADDED, **beams)
        assert torch.equal(written(model, positions, ids=PADDED, **beams, use_cache=False), usual), positions
    seen = []
    with model.hooks(fwd_hooks=[(RESID, at(torch.tensor([1, 3]), lambda x, hook: seen.append(x.shape)))]):
        model.generate(PADDED, attention_mask=PADDED.ne(0).long(), **GREEDY, **beams)
    assert seen == [(6, 8, 32)]
    with pytest.raises(HookError, match=r"token\(5, nth=1\).* row 3"):
        written(model, token(5, nth=1), ids=PADDED, **beams)


def test_new_tokens_are_counted_in_a_stream_and_in_a_loop_that_writes_to_one_tensor() -> None:
    model, mask = hookline.hook(tiny_models.causal_lm("gpt2")), torch.ones_like(IDS)
    plain = model.generate(IDS, attention_mask=mask, **GREEDY)[0].tolist()
    nth = plain[:-3].count(plain[-3])
    positions = token(plain[-3], nth=nth)
    usual = written(model, positions)
    assert usual[0, :-2].tolist() == plain[:-2]
    assert usual[0].tolist() != plain, "the edit matters"
    hooks = [(RESID, at(positions, push))]
    with model.hooks(fwd_hooks=hooks):
        new = list(model.stream(IDS, 5, attention_mask=mask, do_sample=False, eos_token_id=None))
    assert torch.equal(torch.stack(new, 1), usual[:, 8:])
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        output = model.module(IDS, use_cache=True)
        found, chosen = [], torch.empty(1, 1, dtype=torch.long)
        for _ in range(5):
            chosen.copy_(output.logits[:, -1:].argmax(-1))
            found.append(int(chosen))
            output = model.module(chosen, past_key_values=output.past_key_values, use_cache=True)
    assert found == usual[0, 8:].tolist()


def test_the_step_and_positions_that_a_hook_is_told() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    seen = []
    hooks = [(RESID, lambda x, hook: seen.append((hook.step, hook.positions)))]
    short = GREEDY | {"max_new_tokens": 3, "min_new_tokens": 3}
    with model.hooks(fwd_hooks=hooks):
        model.generate(IDS, use_cache=False, **short)
        assert seen == [(0, range(8)), (1, range(9)), (2, range(10))]
        seen.clear()
        model.generate(IDS, prefill_chunk_size=3, **short)
        assert seen == [(0, range(3)), (0, range(3, 6)), (0, range(6, 8)), (1, range(8, 9)), (2, range(9, 10))]
        seen.clear()
        kept = model.module(IDS[:, :5], use_cache=True).past_key_values
        seen.clear()
        model.module.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=kept, **short)
        assert seen == [(0, range(5, 8)), (1, range(8, 9)), (2, range(9, 10))], "the prompt is what is given"
        for guesses in (1, 3):
            seen.clear()
            with pytest.raises(HookError, match=r"positions 8 to \d+"):
                model.generate(IDS, prompt_lookup_num_tokens=guesses, **GREEDY)
            assert seen == [], "not even the first pass is one step"
        with pytest.raises(HookError, match="logits processor"):
            model.generate(IDS, guidance_scale=1.5, **GREEDY)
        with pytest.raises(HooklineError, match="one row"):
            model.generate(IDS, cache_implementation="paged", **GREEDY)


def test_hooks_on_an_assistant() -> None:
    model, assistant = (hookline.hook(tiny_models.causal_lm("llama")) for _ in range(2))
    with (
        pytest.raises(HookError, match="draft"),
        assistant.hooks(fwd_hooks=[(RESID, at(new_tokens, push))]),
    ):
        model.generate(IDS, assistant_model=assistant.module, **GREEDY)
    usual = written(model, last)
    itself = written(model, last, assistant_early_exit=2)
    assert torch.equal(itself, usual), "a model that drafts for itself"


def test_keys_in_generations() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    for positions in (2, 9, new_tokens, step(2), token(5, nth=0)):
        usual = written(model, positions, KEYS)
        assert torch.equal(written(model, positions, KEYS, prompt_lookup_num_tokens=3), usual), positions
        assert torch.equal(written(model, positions, KEYS, use_cache=False), usual), positions
    edited = []
    with model.hooks(fwd_hooks=[(KEYS, at(new_tokens, lambda k: edited.append(k) or k * 2)), (KEYS, edited.append)]):
        model.generate(IDS, **GREEDY | {"max_new_tokens": 3, "min_new_tokens": 3})
    before, after = edited[-2:]
    assert torch.equal(after[:, :8], before[:, :8])
    assert torch.equal(after[:, 8:], before[:, 8:] * 2)
    with pytest.raises(HookError, match="several ends"):
        written(model, last, KEYS, use_cache=False)


def test_noise_is_of_whole_steps() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    with model.hooks(fwd_hooks=[(RESID, noise(1.0))]):
        first = model.generate(IDS, **GREEDY)
        assert torch.equal(model.module.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY), first)
        for options in ({"use_cache": False}, {"prefill_chunk_size": 3}, {"prompt_lookup_num_tokens": 3}):
            with pytest.raises(HookError, match="drawn"):
                model.generate(IDS, **GREEDY, **options)


@pytest.mark.parametrize("nth", [0, 1, 2, 3, -1, -2])
def test_a_token_is_counted_in_the_whole_text(nth) -> None:
    """With a cache and without one, and each occurrence once."""
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    text = model.generate(IDS, **options)
    ids = IDS[:, :5]
    forced = lambda _, sofar: [int(text[0, min(sofar.shape[-1], 13)])] if sofar.shape[-1] < 8 else [4]  # noqa: E731
    places = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookline.NeverFiredWarning)
        with model.hooks(fwd_hooks=[(RESID, at(token(4, nth=nth), lambda x, hook: places.append(hook.positions)))]):
            full = model.generate(ids, prefix_allowed_tokens_fn=forced, **options)
    stands = (full[0, :-1] == 4).nonzero().flatten().tolist()  # the last token is never run
    in_prompt = [place for place in stands if place < 5]
    if nth >= 0:
        expected = stands[nth : nth + 1]
    else:
        expected = in_prompt[nth : nth + 1 or None] + [place for place in stands if place >= 5 and nth == -1]
    assert [range(5) if place < 5 else range(place, place + 1) for place in expected] == places


def test_a_token_that_never_comes_is_reported() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    with (
        pytest.warns(hookline.NeverFiredWarning, match=r"token\(63, nth=1\)"),
        model.hooks(fwd_hooks=[(RESID, at(token(63, nth=1), push))]),
    ):
        model.generate(IDS, suppress_tokens=[63], **GREEDY)
    with (
        pytest.warns(hookline.NeverFiredWarning, match=r"token\(9\) in row 0"),
        model.hooks(fwd_hooks=[(RESID, at(token(9), push))]),
    ):
        model.generate(PADDED, attention_mask=PADDED.ne(0).long(), suppress_tokens=[9], **GREEDY)


def test_a_hook_that_runs_the_model_leaves_the_pass_as_it_was() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    seen = []

    def look(x, hook):
        before = hook.step, hook.positions
        if len(before[1]) in (3, 4):  # the passes below
            return
        with torch.no_grad():
            model.run_with_cache(IDS[:, :3], names_filter=RESID, pos_slice=last)
            model.module(IDS[:, :4])
        seen.append((before, (hook.step, hook.positions)))

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", look)]):
        model.generate(IDS, **GREEDY | {"max_new_tokens": 2, "min_new_tokens": 2})
    assert seen == [((0, range(8)), (0, range(8))), ((1, range(8, 9)), (1, range(8, 9)))]


def test_two_models_in_one_loop_count_their_steps_apart() -> None:
    models, seen = [hookline.hook(tiny_models.causal_lm(kind)) for kind in ("gpt2", "llama")], [[], []]
    kept = [None, None]
    for n in (8, 9, 10):
        for which, model in enumerate(models):
            hook = (RESID, lambda x, hook, which=which: seen[which].append(hook.step))
            ids = IDS if n == 8 else IDS[:, :1]
            with model.hooks(fwd_hooks=[hook]), torch.no_grad():
                kept[which] = model.module(ids, past_key_values=kept[which], use_cache=True).past_key_values
    assert seen == [[0, 1, 2], [0, 1, 2]]


def test_a_loop_that_goes_back_has_no_steps() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    seen = []
    with torch.no_grad():
        with model.hooks(fwd_hooks=[(RESID, at(token(4, nth=3), lambda x, hook: seen.append(hook.positions)))]):
            kept = model.module(IDS, use_cache=True).past_key_values
            model.module(torch.tensor([[9, 4, 9]]), past_key_values=kept, use_cache=True)
            kept.crop(-2)
            model.module(torch.tensor([[4]]), past_key_values=kept, use_cache=True)
        assert seen == [range(8, 11), range(9, 10)], "what was written over does not count"
        kept.crop(-2)
        with (
            pytest.raises(HookError, match="second time"),
            model.hooks(fwd_hooks=[(RESID, lambda x, hook: hook.step)]),
        ):
            model.module(torch.tensor([[4]]), past_key_values=kept, use_cache=True)


def test_the_same_tokens_with_another_mask() -> None:
    model, seen = hookline.hook(tiny_models.causal_lm("gpt2")), []
    ids, mask = PADDED.flip(1), PADDED.flip(1).ne(0).long()

    def look(x):
        seen.append(x)
        return x * 0

    with torch.no_grad(), model.hooks(fwd_hooks=[(RESID, at(last, look)), (RESID, seen.append)]):
        model(ids, attention_mask=mask)
        model(ids, attention_mask=torch.ones_like(mask))
    zeroed = [x.eq(0).all(-1).nonzero().tolist() for x in (seen[1], seen[3])]
    assert zeroed == [[[0, 5], [1, 7]], [[0, 7], [1, 7]]]


def test_a_text_is_over_with_its_pass() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    with model.hooks(fwd_hooks=[(RESID, at(last, push))]), torch.no_grad():
        model(IDS)
        with pytest.raises(HookError, match="full"):
            model.module.transformer(IDS)


@pytest.mark.parametrize("way", ["one run", "a context", "standing"])
def test_a_region_that_recomputes_has_the_text_of_its_pass(way) -> None:
    ids, mask, point = PADDED.flip(1), PADDED.flip(1).ne(0).long(), "blocks.1.mlp.hook_post"
    gradients = []
    for is_checkpointed in (False, True):
        module = tiny_models.causal_lm("llama").train()
        if is_checkpointed:
            module.gradient_checkpointing_enable()
        model, hooks = hookline.hook(module), [(point, at(last, lambda x: x * 2))]
        given = {"attention_mask": mask, "use_cache": False}
        if way == "one run":
            model.run_with_hooks(ids, **given, fwd_hooks=hooks).square().sum().backward()
        else:
            with model.hooks(fwd_hooks=hooks, reset_hooks_end=way == "a context"):
                logits = model(ids, **given)
                model(IDS, use_cache=False)  # another text comes before the first one's backward pass
                logits.square().sum().backward()
            model.reset_hooks()
        gradients.append(module.model.layers[0].mlp.up_proj.weight.grad)
    assert torch.allclose(*gradients, atol=1e-4)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_encoder_has_a_text_under_the_modules_own_generate(kind) -> None:
    model = hookline.hook(tiny_models.seq2seq(kind))
    ids, mask, seen = PADDED.flip(1), PADDED.flip(1).ne(0).long(), []
    point, settings = "encoder.1.hook_resid_post", GREEDY | {"decoder_start_token_id": 0}
    for positions in (last, 1, token(4, nth=0), torch.tensor([2, 3])):
        hooks = [(point, at(positions, push)), (point, lambda x, hook: seen.append((hook.step, hook.positions)))]
        with model.hooks(fwd_hooks=hooks):
            ours = model.generate(ids, attention_mask=mask, **settings)
            theirs = model.module.generate(ids, attention_mask=mask, **settings)
            beams = model.module.generate(ids, attention_mask=mask, num_beams=2, **settings)
        assert torch.equal(ours, theirs)
        assert len(beams) == 2
        remove = model.add_hook(point, at(positions, push))
        assert torch.equal(model.module.generate(ids, attention_mask=mask, **settings), theirs)
        remove()
    assert set(seen) == {(0, range(8))}
    with torch.no_grad(), model.hooks(fwd_hooks=[(point, at(last, lambda x: seen.append(x.shape)))]):
        model.module.get_encoder()(input_ids=ids, attention_mask=mask)
    assert seen[-1] == (2, 8, 32)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_decoder_has_the_same_positions_with_and_without_a_cache(kind) -> None:
    model = hookline.hook(tiny_models.seq2seq(kind))
    settings = GREEDY | {"decoder_start_token_id": 0}
    for positions in (last, new_tokens, step(2), step(0), 3, -1):
        outs = []
        for options in ({}, {"use_cache": False}):
            with model.hooks(fwd_hooks=[("decoder.1.hook_resid_post", at(positions, push))]):
                outs.append(model.module.generate(IDS, attention_mask=torch.ones_like(IDS), **settings, **options))
        assert torch.equal(outs[0], outs[1]), positions

"""Positions by index and by meaning, and what a hook knows of a generation."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_models
import torch

import hookline
from hookline import HookError, HooklineError, NeverFiredWarning, at, last, token
from hookline.engine.pass_state import pass_state
from hookline.positions import new_tokens, step
from hookline.text.forward_pass import begin_pass

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
IDS = torch.tensor([[3, 4, 5, 4, 7], [9, 8, 4, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
RESID, PATTERN = "blocks.1.hook_resid_post", "blocks.1.attn.hook_pattern"


@pytest.fixture
def model():
    return hookline.hook(tiny_models.causal_lm("gpt2"))


@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        (2, [2, 2]),
        (-1, [4, 2]),  # padding does not count
        (last, [4, 2]),
        (token(4), [3, 2]),
        (token(4, nth=0), [1, 2]),
        (torch.tensor([1, 2]), [1, 2]),
        (slice(1, 3), [[1, 2], [1, 2]]),
        ([2, 0], [[2, 0], [2, 0]]),
        (MASK.bool() & (torch.arange(5) < 2), [[0, 1], [0, 1]]),
    ],
)
def test_caches_and_edits_at_positions(model, positions, rows) -> None:
    with torch.no_grad():
        _, full = model.run_with_cache(IDS, attention_mask=MASK, names_filter=[RESID, PATTERN])
        _, cache = model.run_with_cache(IDS, attention_mask=MASK, names_filter=[RESID, PATTERN], pos_slice=positions)
        zero = [(RESID, at(positions, torch.zeros_like))]
        _, edited = model.run_with_cache(IDS, attention_mask=MASK, names_filter=RESID, fwd_hooks=zero)
    for row, where in enumerate(rows):
        assert torch.equal(cache[RESID][row], full[RESID][row, where])
        assert torch.equal(cache[PATTERN][row], full[PATTERN][row][:, where])
        expected = full[RESID][row].clone()
        expected[where] = 0
        assert torch.equal(edited[RESID][row], expected)


def test_gradients_at_positions(model) -> None:
    options = {"names_filter": RESID, "incl_bwd": True, "return_type": "loss", "attention_mask": MASK}
    full = model.run_with_cache(IDS, **options)[1]
    cache = model.run_with_cache(IDS, **options, pos_slice=last)[1]
    assert torch.equal(cache[RESID + "_grad"], full[RESID + "_grad"][[0, 1], [4, 2]])


def test_an_edit_in_place_counts_at_its_positions_only(model) -> None:
    def double(x):
        x *= 2

    with torch.no_grad():
        full = model.run_with_cache(IDS, names_filter=RESID)[1][RESID]
        edited = model.run_with_cache(IDS, names_filter=RESID, fwd_hooks=[(RESID, at(0, double))])[1][RESID]
    assert torch.equal(edited[:, 0], full[:, 0] * 2)
    assert torch.equal(edited[:, 1:], full[:, 1:])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mamba"])
def test_a_hook_knows_the_step_and_the_positions_of_a_generation(kind) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind))
    seen = []

    def look(x, hook):
        seen.append((hook.step, hook.positions, x.shape[1]))

    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = [(0, range(5), 5), (1, range(5, 6), 1), (2, range(6, 7), 1), (3, range(7, 8), 1)]
    with model.hooks(fwd_hooks=[(RESID, look)]):
        model.generate(IDS[:1], **settings)
        assert seen == expected
        seen.clear()
        model.module.generate(IDS[:1], attention_mask=MASK[:1], **settings)  # another one, by another way
        assert seen == expected
    seen.clear()
    model.add_hook(RESID, look)
    model.generate(IDS[:1], **settings)
    model.reset_hooks()
    assert seen == expected


def test_steps_of_a_loop_of_ones_own(model) -> None:
    seen = []
    hooks = [(RESID, lambda x, hook: seen.append((hook.step, hook.positions)))]
    with torch.no_grad():
        kept = model.module(IDS[:1, :3], use_cache=True).past_key_values
        model.run_with_hooks(IDS[:1, :3], fwd_hooks=hooks)
        for n in (3, 4):
            model.run_with_hooks(IDS[:1, n : n + 1], past_key_values=kept, use_cache=True, fwd_hooks=hooks)
    assert seen == [(0, range(3)), (1, range(3, 4)), (2, range(4, 5))]


def test_steering_new_tokens_or_one_step_only(model) -> None:
    edited = []

    def mark(x, hook):
        edited.append(hook.step)
        return x

    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    for positions, steps in [(new_tokens, [1, 2, 3]), (step(2), [2]), (step(0), [0]), (last, [0, 1, 2, 3])]:
        edited.clear()
        with model.hooks(fwd_hooks=[(RESID, at(positions, mark))]):
            model.generate(IDS[:1], **settings)
        assert edited == steps


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (7, "position 7 in row 0, which has 5"),
        (torch.tensor([1, 2, 3]), "3 rows, but the batch has 2"),
        (token(50), r"token\(50\) in row 0"),
        (token(4, nth=3), r"token\(4, nth=3\) in row 0, where this token occurs 2 times"),
        (token("Paris"), "tokenizer"),
        ("last", "positions must be"),
        (hookline.positions.image_tokens, "vision-language"),
    ],
)
def test_bad_positions(model, positions, message) -> None:
    with pytest.raises(HooklineError, match=message):
        model.run_with_cache(IDS, names_filter=RESID, pos_slice=positions)
    with pytest.raises(HooklineError, match=message):
        model.run_with_hooks(IDS, fwd_hooks=[(RESID, at(positions, torch.zeros_like))])


def test_positions_of_a_plain_network() -> None:
    net = hookline.hook(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(HookError, match="language model"):
        net.run_with_hooks(torch.ones(1, 2), fwd_hooks=[("0", lambda x, hook: hook.positions)])
    with pytest.raises(HooklineError, match="position axis"):
        net.run_with_cache(torch.ones(1, 2), pos_slice=0)


def test_positions_do_not_depend_on_padding() -> None:
    model = hookline.load("tinyworld")
    texts, one = ["When Mary and John went to the store", "Mary went to"], "Mary went to"
    for positions in (1, -1, last, token(" went"), slice(1, 2), torch.tensor([4, 1])):
        alone = torch.tensor([1]) if isinstance(positions, torch.Tensor) else positions
        wanted = model.cache(one, names_filter=RESID, pos_slice=alone)[RESID][0]
        for side in ("left", "right"):
            cache = model.cache(texts, padding_side=side, names_filter=RESID, pos_slice=positions)
            assert torch.allclose(cache[RESID][1], wanted, atol=1e-5), (positions, side)
            with torch.no_grad():
                edited = model.run_with_hooks(
                    texts, padding_side=side, fwd_hooks=[(RESID, at(positions, torch.zeros_like))]
                )
                single = model.run_with_hooks(one, fwd_hooks=[(RESID, at(alone, torch.zeros_like))])
            end = -1 if side == "left" else 2
            assert torch.allclose(edited[1, end], single[0, -1], atol=1e-4)
    assert set(model.cache(texts, pos_slice=last)) > {RESID, "hook_pos_embed"}, "everything, at the last token"


def test_tokens_with_padding_are_masked() -> None:
    model = hookline.load("tinyworld")
    texts = ["When Mary and John went to the store, John gave a drink to", "Mary went to"]
    with torch.no_grad():
        for side in ("left", "right"):
            tokens = model.to_tokens(texts, padding_side=side)
            assert torch.equal(model(tokens), model(texts, padding_side=side))
            alone = model(texts[1])[0, -1]
            assert torch.allclose(model(tokens)[1, -1 if side == "left" else 2], alone, atol=1e-4)
        tokens = model.to_tokens(texts, padding_side="right")
        assert torch.allclose(model(tokens, return_type="loss"), model(texts, return_type="loss"))
        left = model.to_tokens(texts, padding_side="left")
        new = model.generate(left, max_new_tokens=3, do_sample=False)
        assert (
            model.to_string(new[1, -3:]) == model.generate(texts[1], max_new_tokens=3, do_sample=False)[len(texts[1]) :]
        )


def test_positions_count_in_the_text_of_a_generation(model) -> None:
    edited = []

    def mark(x, hook):
        edited.append((hook.step, hook.positions))
        return x

    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    for positions, steps in [(0, [0]), (6, [2]), (slice(5, 7), [1, 2]), ([0, 7], [0, 3]), (torch.tensor([5]), [1])]:
        edited.clear()
        with model.hooks(fwd_hooks=[(RESID, at(positions, mark))]):
            model.generate(IDS[:1], **settings)
        assert [step for step, _ in edited] == steps, positions


@pytest.mark.parametrize("positions", [slice(20, 30), new_tokens, step(3), torch.zeros(2, 5, dtype=torch.bool)])
def test_positions_that_never_come_are_reported(model, positions) -> None:
    with pytest.warns(hookline.NeverFiredWarning, match="positions"), torch.no_grad():
        model.run_with_hooks(IDS, fwd_hooks=[(RESID, at(positions, torch.zeros_like))])
    with pytest.raises(HooklineError, match="0 positions"):
        model.run_with_cache(IDS, names_filter=RESID, pos_slice=positions)


def test_what_is_made_of_an_activation_must_fit_it(model) -> None:
    for wrong in (lambda x: x[:1], lambda x: torch.tensor(0.0), lambda x: x[:, 2]):
        with pytest.raises(HookError, match="shape"):
            model.run_with_hooks(IDS, fwd_hooks=[(RESID, at(2, wrong))])


def test_an_encoder_and_a_decoder_have_texts_of_their_own() -> None:
    model = hookline.hook(tiny_models.seq2seq("t5"))
    decoder = torch.tensor([[0, 9, 4], [0, 4, 9]])
    inputs = {"attention_mask": MASK, "decoder_input": decoder}
    for point, positions, rows in [
        ("encoder.1.hook_resid_post", last, [4, 2]),
        ("decoder.1.hook_resid_post", last, [2, 2]),
        ("encoder.1.hook_resid_post", token(4), [3, 2]),
        ("decoder.1.hook_resid_post", token(4), [2, 1]),
        ("decoder.1.cross_attn.hook_k", last, [4, 2]),
        ("decoder.1.cross_attn.hook_q", 0, [0, 0]),
    ]:
        with torch.no_grad():
            _, full = model.run_with_cache(IDS, **inputs, names_filter=point)
            _, cache = model.run_with_cache(IDS, **inputs, names_filter=point, pos_slice=positions)
        assert torch.equal(cache[point], full[point][[0, 1], rows]), (point, positions)
    steps = []
    hooks = [
        ("encoder.1.hook_resid_post", at(last, lambda x, hook: steps.append(("encoder", hook.positions)))),
        ("decoder.1.hook_resid_post", at(last, lambda x, hook: steps.append((hook.step, hook.positions)))),
    ]
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "decoder_start_token_id": 0}
    with model.hooks(fwd_hooks=hooks):
        model.generate(IDS[:1], **settings)
    assert steps == [("encoder", range(5)), (0, range(1)), (1, range(1, 2)), (2, range(2, 3))]


@pytest.mark.parametrize("point", ["encoder.1.hook_resid_post", "decoder.1.cross_attn.hook_k"])
def test_the_text_of_an_encoder_is_all_prompt(point) -> None:
    model = hookline.hook(tiny_models.seq2seq("t5"))
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "decoder_start_token_id": 0}
    calls = []
    for positions in (new_tokens, step(1)):
        with pytest.warns(NeverFiredWarning), model.hooks([(point, at(positions, lambda x: calls.append(x)))]):
            model.generate(IDS[:1], **settings)
    assert calls == []
    with model.hooks([(point, at(step(0), lambda x: calls.append(x.shape[1])))]):
        model.generate(IDS[:1], **settings)
    assert calls == [5]


def test_a_token_of_an_encoder_is_looked_for_in_its_own_text() -> None:
    model = hookline.hook(tiny_models.seq2seq("t5"))
    point, decoder = "encoder.1.hook_resid_post", torch.tensor([[0, 9]])
    _, full = model.run_with_cache(IDS[:1], decoder_input=decoder, names_filter=point)
    logits, cache = model.run_with_cache(IDS[:1], decoder_input=decoder, names_filter=point, pos_slice=token(5))
    assert torch.equal(cache[point], full[point][:, 2])
    assert logits.shape[1] == 2
    assert cache.logits is None, "no position of the decoder was asked for"
    assert full.at(token(5)).logits is None
    assert torch.equal(full.at(token(5))[point], cache[point])


def test_a_backward_hook_knows_the_text_of_its_forward_pass() -> None:
    model, zeroed = hookline.load("tinyworld"), []
    texts = ["The capital of France is", "The capital of France is Paris and more words"]

    def look(grad):
        zeroed.append([row.eq(0).all(-1).nonzero().flatten().tolist()[-1] for row in grad])

    hooks = [(RESID, at(1, torch.zeros_like)), (RESID, look)]
    pads = len(model.to_tokens(texts[1])[0]) - len(model.to_tokens(texts[0])[0])
    (model.run_with_hooks(texts, bwd_hooks=hooks, padding_side="left") ** 2).sum().backward()
    with model.hooks(bwd_hooks=hooks):
        first, second = (model(each, padding_side="left").pow(2).sum() for each in (texts, texts[::-1]))
        first.backward()
        second.backward()
    assert zeroed == [[pads + 1, 1], [pads + 1, 1], [1, pads + 1]]


def test_tokens_that_lost_their_padding_are_noticed() -> None:
    model = hookline.load("tinyworld")
    texts = ["When Mary and John went to the store", "Mary went to"]
    for side in ("left", "right"):
        tokens = model.to_tokens(texts, padding_side=side)
        with pytest.warns(hookline.errors.HooklineWarning, match="row 1"):
            model(tokens.clone())
        model(tokens.clone(), attention_mask=tokens.padding_mask)
        model(tokens)
    with pytest.raises(HooklineError, match="padded"):
        model.generate(model.to_tokens(texts, padding_side="right"))
    written = model.to_tokens(texts, padding_side="right")
    written[1] = written[0]
    with torch.no_grad():
        assert torch.equal(model(written)[1], model(written)[0]), "what was written to is no longer padding"


def test_keys_of_a_generation_and_a_model_called_in_part(model) -> None:
    seen = []
    name = "blocks.1.attn.hook_rot_k"
    with model.hooks(fwd_hooks=[(name, at(2, lambda k, hook: seen.append((hook.step, k.shape[1]))))]):
        model.generate(IDS[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert seen == [(0, 5), (1, 6), (2, 7)]
    with (
        pytest.raises(HookError, match="full"),
        model.hooks(fwd_hooks=[(RESID, at(1, torch.zeros_like))]),
    ):
        model.module.transformer(IDS)


def test_parts_of_the_stream_at_positions_in_the_text() -> None:
    model = hookline.load("tinyworld")
    texts = ["The capital of France is", "When Mary and John went to the store"]
    with torch.no_grad():
        alone = model.run_with_cache(texts[0])[1].decompose_resid(pos_slice=-1)
        for side in ("left", "right"):
            _, cache = model.run_with_cache(texts, padding_side=side)
            assert torch.allclose(cache.decompose_resid(pos_slice=last)[:, 0], alone[:, 0], atol=1e-4)
            assert torch.allclose(cache.decompose_resid(pos_slice=-1)[:, 0], alone[:, 0], atol=1e-4)
        _, cache = model.run_with_cache(texts, pos_slice=last)
        with pytest.raises(HooklineError, match="positions last"):
            cache.decompose_resid(pos_slice=-1)
        shares = cache.logit_attrs(cache.decompose_resid(), 5).sum(0) + cache.logit_bias(5)
        assert torch.allclose(shares, cache.logits[:, 5], atol=1e-3)


def test_a_hook_at_positions_reports_for_its_own_thread() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    hook, inside, left = at(5, torch.zeros_like), threading.Event(), threading.Event()

    def elsewhere() -> None:  # a text that is too short, while the other thread is between the hook and its report
        try:
            assert inside.wait(10)
            with pytest.warns(hookline.NeverFiredWarning), torch.no_grad(), model.hooks([(RESID, hook)]):
                model(torch.tensor([[1, 2]]))
        finally:
            left.set()

    def wait(x: torch.Tensor) -> None:
        inside.set()
        left.wait(10)

    both = [(RESID, hook), (RESID, at(5, wait))]
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        other = pool.submit(elsewhere)
        out = model.run_with_hooks(torch.arange(1, 9)[None], fwd_hooks=both)
    other.result()
    assert not torch.equal(out, model(torch.arange(1, 9)[None]))
    assert hook.acted


def test_a_new_cache_in_the_memory_of_an_old_one_is_another() -> None:
    class States:
        """A cache of recurrent states, which has no length."""

    model, seen = hookline.hook(tiny_models.causal_lm("mamba")), []
    for _ in range(3):
        states = States()
        begin_pass(model.module, {"input_ids": IDS, "cache_params": states})
        begin_pass(model.module, {"input_ids": IDS[:, :1], "cache_params": states})
        seen.append((id(states), pass_state.forward_pass.span.positions))
        del states
    pass_state.forward_pass = None
    assert len({place for place, _ in seen}) < 3, "Python did not use the memory again, so this test shows nothing"
    assert {positions for _, positions in seen} == {range(IDS.shape[1], IDS.shape[1] + 1)}

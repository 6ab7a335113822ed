"""Positions by what is written there: turns, words and sentences."""

import re

import pytest
import tiny_models
import torch

import hookline
from hookline import HookError, HooklineError, NeverFiredWarning, at, edits
from hookline.positions import sentence, span, token, turn
from hookline.text.given_texts import columns_in

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content.strip() + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FRANCE = [{"role": "user", "content": "The capital of France is"}]
LONG = [
    {"role": "system", "content": "Say it. The store is here!"},
    {"role": "user", "content": " The capital of Italy is "},
    {"role": "assistant", "content": "Rome. Not Paris."},
    {"role": "user", "content": "The capital of France is"},
]
POINT = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def model():
    model = hookline.load("tinyworld")
    model.tokenizer.chat_template = TEMPLATE
    return model


def covered(model, positions, prompt) -> list[str]:
    ids = model.to_tokens(prompt)
    mask, missing = columns_in(positions, model.module, ids, getattr(ids, "padding_mask", torch.ones_like(ids)).bool())
    assert not missing
    return [model.to_string(row[row_mask]) for row, row_mask in zip(ids, mask, strict=True)]


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (turn("user"), "The capital of Italy isThe capital of France is"),
        (turn("user", 0), "The capital of Italy is"),
        (turn("user", -1), "The capital of France is"),
        (turn("assistant"), "Rome.Not Paris."),  # the space between them is a token
        (turn("system", 0), "Say it. The store is here!"),
        (span("capital of"), " capital of capital of"),
        (span("capital of", 1), " capital of"),
        (span("Paris", -1), " Paris"),
        (span("user>"), "user>user>"),
        (sentence(0), "Say it."),
        (sentence(1), " The store is here!"),
        (sentence(2), "The capital of Italy is"),
        (sentence(-2), "Not Paris."),
        (sentence(-1), "The capital of France is"),
    ],
)
def test_places_in_a_conversation(model, positions, text) -> None:
    assert covered(model, positions, LONG) == [text]


def test_places_in_a_text(model) -> None:
    text = 'The girl went to the store. The capital is 3.5, "he said!" Is it?'
    assert covered(model, sentence(0), text) == ["The girl went to the store."]
    assert covered(model, sentence(1), text) == [' The capital is 3.5, "he said!"']
    assert covered(model, sentence(2), text) == covered(model, sentence(-1), text) == [" Is it?"]
    assert covered(model, span("the store"), text) == [" the store"]
    assert covered(model, span("tor"), text) == [" store"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, side) -> None:
    ids = model.to_tokens([FRANCE, LONG], padding_side=side)
    mask, _ = columns_in(turn("user", -1), model.module, ids, ids.padding_mask.bool())
    assert [model.to_string(row[at]) for row, at in zip(ids, mask, strict=True)] == ["The capital of France is"] * 2
    zero = [(POINT, edits.zero(pos=turn("user", -1)))]
    together = model.run_with_hooks([FRANCE, LONG], fwd_hooks=zero, padding_side=side)
    alone = model.run_with_hooks(FRANCE, fwd_hooks=zero)[0]
    real = ids.padding_mask[0].bool()
    assert torch.allclose(together[0][real], alone, atol=1e-4)
    assert torch.equal(
        model.cache([FRANCE, LONG], names_filter=POINT, pos_slice=turn("user", -1))[POINT].isnan(),
        torch.zeros(2, 5, 128).bool(),
    )


def test_the_turn_that_is_being_written(model) -> None:
    factor = 30 * torch.randn(128)
    answers = {}
    for name, positions in {
        "all": turn("assistant"),
        "last": turn("assistant", -1),
        "past": turn("assistant", 0),
        "user": turn("user"),
    }.items():
        with model.hooks([(POINT, edits.add(factor, pos=positions))]):
            answers[name] = model.generate(LONG, 6, do_sample=False)
            ids = model.to_tokens(model.text.prompts(LONG, is_open=True))
            uncached = model.generate(ids, 6, do_sample=False, use_cache=False)
            assert answers[name] == model.tokenizer.decode(uncached[0, ids.shape[1] :], skip_special_tokens=True)
            with torch.no_grad(), model.compiled(backend="eager") as runs:
                assert answers[name] == model.generate(LONG, 6, do_sample=False)
            assert not runs.reasons
    assert len({*answers.values()}) >= 3
    first = next(iter(model.stream(LONG, 6, do_sample=False)))
    assert answers["last"].startswith(first)  # the prompt is not changed, so the first token is the same


def test_only_what_is_written_is_edited(model) -> None:
    """In the assistant's turn alone, at every step but that of the prompt, and never at space or after the end."""
    acted = []

    def note(x, hook) -> None:
        acted.append(hook.step)

    with model.hooks([(POINT, at(turn("assistant", -1), note))]):
        answer = model.generate(FRANCE, 6, do_sample=False)
    words = [token for token in model.to_str_tokens(answer, prepend_bos=False)[:-1] if token.strip()]
    assert acted
    assert 0 not in acted
    assert len(acted) == len(words)


def test_spans_in_a_generation_are_those_so_far(model) -> None:
    for positions in (span("capital"), span("capital", -1), sentence(-1), sentence(0)):
        results = []
        for options in ({}, {"use_cache": False}):
            with model.hooks([(POINT, edits.scale(-5.0, pos=positions))]):
                results.append(model.generate("The capital of France is Paris. The", 8, do_sample=False, **options))
        assert results[0] == results[1]


def test_a_cache_of_a_generation(model) -> None:
    _, cache = model.generate_with_cache(FRANCE, 4, names_filter=POINT, do_sample=False)
    ids = model.to_tokens(model.text.prompts(FRANCE, is_open=True))
    assert cache[POINT].shape[1] == ids.shape[1] + 3


@pytest.mark.parametrize(
    "positions",
    [turn("user"), turn("assistant", -1), span("the store"), span("a", 2), sentence(-3)],
)
def test_saved_and_loaded(positions, tmp_path) -> None:
    edits.save(tmp_path, [(POINT, edits.zero(pos=positions))])
    ((_, edit),) = edits.load(tmp_path)
    assert edit.pos == positions
    assert repr(edit.pos) == repr(positions)
    assert hash(edit.pos) == hash(positions)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (turn("system"), "'user'"),
        (turn("user", 1), "'user'"),
        (turn("model"), "'user'"),
        (span("Rome"), "Rome"),
        (span("capital", 3), "has 1 such place"),
        (sentence(9), "has 1 such place"),
    ],
)
def test_what_is_not_there_raises_or_warns(model, positions, words) -> None:
    with pytest.raises(HooklineError, match=words):
        model.cache(FRANCE, names_filter=POINT, pos_slice=positions)
    with pytest.raises(HookError, match=words):
        model.run_with_hooks(FRANCE, fwd_hooks=[(POINT, edits.zero(pos=positions))])
    with (
        pytest.warns(NeverFiredWarning, match=re.escape(repr(positions))),
        model.hooks([(POINT, edits.zero(pos=positions))]),
    ):
        model.generate(FRANCE, 2, do_sample=False)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("messages", [FRANCE, LONG, LONG[:3], LONG[1:]])
def test_a_text_of_the_template_has_turns(messages, is_open) -> None:
    """Rendered by the user, who has another model object: what was rendered before is not known."""
    model = hookline.load("tinyworld")
    model.tokenizer.chat_template = TEMPLATE
    text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open)
    ids = model.to_tokens(text)
    users = [message["content"].strip() for message in messages if message["role"] == "user"]
    mask, _ = columns_in(turn("user"), model.module, ids)
    assert model.to_string(ids[0][mask[0]]) == "".join(users)
    if not is_open:
        return
    hooks = [(POINT, edits.zero(pos=turn("assistant", -1)))]
    with model.hooks(hooks):
        written = model.generate(text, 5, do_sample=False)
        answer = model.generate(messages, 5, do_sample=False)
    assert written.endswith(answer)
    assert answer != model.generate(messages, 5, do_sample=False)


def test_a_text_that_begins_like_another_conversation() -> None:
    """What was asked before is the beginning of what is asked now, which is given as text."""
    model = hookline.load("tinyworld")
    model.tokenizer.chat_template = TEMPLATE
    asked, name = LONG[1:2], "blocks.0.hook_resid_post"
    for is_open in (False, True):
        model.to_tokens(model.text.prompts(asked, is_open=is_open))
    text = model.tokenizer.apply_chat_template(LONG[1:], tokenize=False, add_generation_prompt=True)
    ids = model.to_tokens(text)
    mask, _ = columns_in(turn("user"), model.module, ids)
    assert model.to_string(ids[0][mask[0]]) == "The capital of Italy isThe capital of France is"
    with model.hooks([(name, edits.zero(pos=turn("assistant", -1)))]):
        _, cache = model.generate_with_cache(text, 4, names_filter=name, do_sample=False)
    is_zero = (cache[name][0] == 0).all(-1)
    assert not is_zero[: ids.shape[1]].any()
    assert is_zero[ids.shape[1] :].any()


def test_a_second_bos_does_no_harm() -> None:
    model = hookline.load("tinyworld")
    model.tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    ids = model.to_tokens(str(model.text.prompts(FRANCE)), prepend_bos=True)
    mask, _ = columns_in(turn("user"), model.module, ids)
    assert model.to_string(ids[0][mask[0]]) == FRANCE[0]["content"]


def test_turns_of_a_text_that_is_no_conversation(model) -> None:
    with pytest.raises(HooklineError, match="messages"):
        model.cache("The capital of France is", names_filter=POINT, pos_slice=turn("user"))


def test_without_a_tokenizer(model) -> None:
    bare = hookline.hook(tiny_models.causal_lm("gpt2"))
    with pytest.raises(HooklineError, match="tokenizer"):
        bare.cache(torch.tensor([[3, 4]]), names_filter=POINT, pos_slice=span("a"))


@pytest.mark.parametrize(
    "wrong", [lambda: turn(3), lambda: turn(""), lambda: span(None), lambda: sentence("a"), lambda: turn("user", 1.5)]
)
def test_mistakes(wrong) -> None:
    with pytest.raises(HooklineError):
        wrong()


def test_a_tensor_that_is_written_to(model) -> None:
    ids = model.to_tokens("The capital of France is")
    first = model.cache(ids, names_filter=POINT, pos_slice=span(" of"))[POINT]
    ids[0, 2], ids[0, 3] = ids[0, 3].clone(), ids[0, 2].clone()
    second = model.cache(ids, names_filter=POINT)[POINT]
    assert torch.equal(model.cache(ids, names_filter=POINT, pos_slice=span(" of"))[POINT], second[:, 3:4])
    assert first.shape == (1, 1, 128)


def test_keys_of_a_conversation(model) -> None:
    name = "blocks.1.attn.hook_k"
    full = model.cache(LONG, names_filter=name)[name]
    mask, _ = columns_in(turn("user", 0), model.module, model.to_tokens(LONG))
    assert torch.equal(model.cache(LONG, names_filter=name, pos_slice=turn("user", 0))[name], full[mask][None])


def test_beams(model) -> None:
    with model.hooks([(POINT, edits.scale(2.0, pos=turn("assistant")))]):
        assert isinstance(model.generate(FRANCE, 3, num_beams=2, do_sample=False), str)
    with model.hooks([(POINT, edits.scale(2.0, pos=token(" France")))]):
        assert isinstance(model.generate(FRANCE, 3, num_beams=2, do_sample=False), str)

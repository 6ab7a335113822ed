"""Lists of messages as prompts, wherever a prompt is taken."""

import pickle

import pytest
import torch

import hookline
from hookline import HooklineError, edits, experiments
from hookline.explore.live_edits import library_edits, script
from hookline.explore.question import Question
from hookline.positions import span, token, turn
from hookline.text.chats import Chat

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content.strip() + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FRANCE = [{"role": "user", "content": "The capital of France is"}]
ITALY = [
    {"role": "user", "content": " The capital of Italy is "},
    {"role": "assistant", "content": "Rome."},
    {"role": "user", "content": "The capital of France is"},
]
FRANCE_TEXT = "<user>The capital of France is</s>\n"
POINT = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def model():
    model = hookline.load("tinyworld")
    model.tokenizer.chat_template = TEMPLATE
    return model


def test_tokens_are_those_of_the_rendering_without_special_tokens(model) -> None:
    ids = model.to_tokens(FRANCE_TEXT, prepend_bos=False)
    assert torch.equal(model.to_tokens(FRANCE), ids)
    assert model.to_str_tokens(FRANCE) == model.to_str_tokens(ids[0])
    assert model.to_tokens([FRANCE, ITALY]).shape[0] == 2
    assert model.get_token_position(" France", FRANCE) == model.get_token_position(" France", ids[0])


def test_a_tokenizer_that_adds_tokens_adds_none(model, monkeypatch) -> None:
    from hookline.text.tokenizer import Text

    added = []
    tokenizer = model.tokenizer
    text = Text(
        lambda prompt, add_special_tokens: added.append(add_special_tokens) or tokenizer(prompt), n_ctx=None, n_ids=1024
    )
    text.templates = model.text.templates
    monkeypatch.setattr("hookline.text.tokenizer.remember_chat", lambda *_: None)
    text.ids(text.prompts(FRANCE), None)
    text.ids(FRANCE_TEXT, None)
    assert added == [False, True]


@torch.no_grad()
@pytest.mark.parametrize("prompt", [FRANCE, [FRANCE, ITALY], (FRANCE[0],)])
def test_runs(model, prompt) -> None:
    ids = model.to_tokens(prompt)
    expected = model(ids)
    assert torch.equal(model(prompt, padding_side="right"), expected)
    assert torch.equal(model.run_with_cache(prompt, padding_side="right")[0], expected)
    assert torch.equal(model.run_with_hooks(prompt, padding_side="right", fwd_hooks=[(POINT, torch.clone)]), expected)
    assert torch.equal(model.cache(prompt, names_filter=POINT)[POINT], model.cache(ids, names_filter=POINT)[POINT])
    assert torch.equal(model.last_logits(prompt), model.last_logits(ids))
    assert str(model.plan(POINT, input=prompt)) == str(model.plan(POINT, input=ids))
    assert torch.equal(model.to_inputs(prompt)["input_ids"], ids)
    with model.compiled(backend="eager"):
        assert torch.allclose(model(prompt, padding_side="right"), expected, atol=1e-4)


def test_generate_answers_and_goes_on(model) -> None:
    opened = model.to_tokens(f"{FRANCE_TEXT}<assistant>", prepend_bos=False)
    answer = model.generate(FRANCE, 4, do_sample=False)
    assert type(answer) is str
    assert answer == model.to_string(model.generate(opened, 4, do_sample=False)[0, opened.shape[1] :])
    longer = [*FRANCE, {"role": "assistant", "content": answer}, {"role": "user", "content": "The capital of Italy is"}]
    again = model.generate([longer, FRANCE], 4, do_sample=False)
    assert isinstance(again, list)
    assert again[1] == answer
    assert model.generate([FRANCE], 4, do_sample=False) == [answer]
    assert model.generate_with_cache(FRANCE, 4, names_filter=POINT, do_sample=False)[0] == answer
    assert "".join(model.stream(FRANCE, 4, do_sample=False)) == answer
    assert model.generate([FRANCE, FRANCE_TEXT], 4, do_sample=False)[0] == answer
    with model.compiled(backend="eager"):
        assert model.generate(FRANCE, 4, do_sample=False) == answer


def test_special_tokens_are_not_in_the_answer(model) -> None:
    ends = [("unembed.hook_out", lambda x: torch.nn.functional.one_hot(torch.tensor(0), x.shape[-1]) * 9.0 + 0 * x)]
    with model.hooks(ends):
        assert model.generate(FRANCE, 3, do_sample=False) == ""


def test_baseline_harvest_probes_and_experiments(model, tmp_path) -> None:
    ids = model.to_tokens(FRANCE)
    store = hookline.harvest(model, [FRANCE, ITALY], POINT, tmp_path / "store", positions=turn("user"))
    assert len(store) == len(model.to_str_tokens("The capital of France is")) * 3
    rows = hookline.harvest(model, [{"messages": FRANCE}], POINT, tmp_path / "column", column="messages")
    assert len(rows) == ids.shape[1]
    other = [{"role": "user", "content": "The capital of Italy is"}]
    metric = experiments.metrics.logit_diff(" Paris", " Rome")
    result = experiments.patching.sweep(model, FRANCE, other, metric, points="resid_post")
    plain = experiments.patching.sweep(model, ids, model.to_tokens(other), metric, points="resid_post")
    assert torch.equal(result.values, plain.values)
    batch = experiments.patching.sweep(model, [FRANCE, FRANCE], [other, other], metric, points="resid_post")
    assert torch.allclose(batch.values, plain.values, atol=1e-4)
    vectors = experiments.steering.contrast_vectors(model, FRANCE, other, layers=[2])
    steered = experiments.steering.generate(model, FRANCE, vectors, layer=2, max_new_tokens=2, pos=turn("assistant"))
    assert steered.plain == [model.generate(FRANCE, 2, do_sample=False)]
    assert "<user>" in repr(steered)


def test_metrics_read_positions_by_meaning(model) -> None:
    other = [{"role": "user", "content": "The capital of Italy is"}]
    place = model.get_token_position(" is", FRANCE)
    values = [
        experiments.patching.sweep(
            model, FRANCE, other, experiments.metrics.logit_diff(" Paris", " Rome", pos=pos), points="resid_post"
        ).values
        for pos in (place, token(" is"), span("is"))
    ]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    with pytest.raises(HooklineError, match="5 positions"):
        experiments.patching.sweep(
            model, FRANCE, other, experiments.metrics.log_prob(" Paris", pos=turn("user")), points="resid_post"
        )


def test_a_harvest_that_cuts_conversations(model, tmp_path) -> None:
    length = 8
    store = hookline.harvest(model, [ITALY], POINT, tmp_path / "store", positions=turn("user"), max_tokens=length)
    ids = model.to_tokens(ITALY)[:, :length]
    assert model.to_string(ids[0]).startswith("<user>The capital")
    assert len(store) == len(
        [text for text in model.to_str_tokens(ids[0]) if text.strip() and text.strip() in ITALY[0]["content"].split()]
    )


def test_the_explorer(model) -> None:
    explorer = model.explore(FRANCE, ITALY, server=True, browser=False)
    explorer.close()
    edit = {"kind": "zero", "point": POINT, "pos": {"turn": "user"}}
    question = Question.of({"view": "next", "prompt": FRANCE_TEXT, "edits": [edit]})
    assert question.edits[0].pos == turn("user")
    ((name, zero),) = library_edits(model, question)
    expected = model.run_with_hooks(FRANCE, fwd_hooks=[(POINT, edits.zero(pos=turn("user")))])
    assert torch.equal(model.run_with_hooks(FRANCE_TEXT, fwd_hooks=[(name, zero)]), expected)
    assert "turn('user')" in script("tinyworld", question)
    with pytest.raises(HooklineError, match="turn"):
        Question.of({"view": "next", "prompt": "a", "edits": [{**edit, "pos": {"role": "user"}}]})


def test_edits_by_turn_in_a_rerun(model) -> None:
    point, where = "blocks.2.hook_resid_post", turn("user")
    hooks = [(point, edits.zero(pos=where))]
    expected = model.run_with_hooks(FRANCE, fwd_hooks=hooks)
    with model.hooks(hooks):
        assert torch.allclose(model.baseline(FRANCE).logits, expected, atol=1e-5)


def test_a_model_without_a_template(model, monkeypatch) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(HooklineError, match="chat_template"):
        model(FRANCE)
    with pytest.raises(HooklineError, match="chat_template"):
        model.generate(FRANCE)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([{"content": "Hello"}, {"role": "user", "content": "Hello"}], {}, "message 0 has no role"),
        ([{"role": "user", "content": 3}], {}, "content of message 0"),
        ({"role": "user", "content": "Hello"}, {}, "list of messages"),
        (FRANCE, {"prepend_bos": True}, "prepend_bos"),
        ([{"role": "user", "content": None}], {}, "template"),
    ],
)
def test_mistakes(model, prompt, options, words) -> None:
    with pytest.raises(HooklineError, match=words):
        model(prompt, **options)


def test_a_chat_is_a_text(model) -> None:
    chat = model.text.prompts(FRANCE)
    assert isinstance(chat, Chat)
    assert chat == FRANCE_TEXT
    assert pickle.loads(pickle.dumps(chat)) == FRANCE_TEXT


def test_templates_that_take_parts_only(model, monkeypatch) -> None:
    parts_only = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", parts_only)
    assert model.text.prompts(FRANCE) == FRANCE[0]["content"]
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    as_parts = [{"role": "user", "content": [{"type": "text", "text": FRANCE[0]["content"]}]}]
    assert model.text.prompts(as_parts) == FRANCE_TEXT

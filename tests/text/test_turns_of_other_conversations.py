"""Turns where another conversation has the same tokens, or begins with them, or where something changed since."""

import pytest
import torch

import hookline
from hookline import HooklineError, at
from hookline.positions import turn
from hookline.text.given_texts import columns_in

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_OPENING = (
    "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + '</s>' }}"
    "{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' if loop.last }}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
POINT = "blocks.1.hook_resid_post"


def user(content) -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content) -> dict[str, object]:
    return {"role": "assistant", "content": content}


FRANCE = [user("The capital of France is")]


@pytest.fixture
def model():
    model = hookline.load("tinyworld")
    model.tokenizer.chat_template = CHATML
    return model


def covered(model, positions, prompt) -> str:
    ids = prompt if isinstance(prompt, torch.Tensor) else model.to_tokens(prompt)
    return str(model.to_string(ids[0][columns_in(positions, model.module, ids)[0][0]]))


def rendered(model, messages, *, is_open: bool = False) -> str:
    return str(model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open))


def test_a_text_that_begins_a_longer_conversation(model) -> None:
    text, acted = rendered(model, FRANCE, is_open=True), []
    model.to_tokens([*FRANCE, assistant("Rome"), user("Is it?")])
    assert covered(model, turn("user", -1), rendered(model, FRANCE)) == FRANCE[0]["content"]
    with model.hooks([(POINT, at(turn("assistant", -1), lambda _, hook: acted.append(hook.step)))]):
        model.generate(text, 8, do_sample=False)
    assert max(acted) > 2  # not only where the other conversation has its answer


def test_the_turns_of_a_part_of_a_conversation_are_those_that_have_begun(model) -> None:
    text = [*FRANCE, assistant("Rome is the capital")]
    ids = model.to_tokens(text)[:, :-6]
    for other in (text, [*text, user("Is it?")]):
        model.to_tokens(other)
        assert covered(model, turn("user", -1), ids) == FRANCE[0]["content"]
        assert "Rome".startswith(covered(model, turn("assistant", -1), ids)[:4])


def test_a_template_without_an_opening_while_the_messages_are_rendered_again(model) -> None:
    model.tokenizer.chat_template = WITHOUT_OPENING
    acted = []
    with model.hooks([(POINT, at(turn("assistant", -1), lambda _, hook: acted.append(hook.step)))]):
        for _ in model.stream(FRANCE, 6, do_sample=False):
            model.to_tokens(FRANCE)
        model.generate(model.to_tokens(FRANCE), 6, do_sample=False)
    assert acted == [1, 2, 3, 4, 5] * 2
    assert covered(model, turn("assistant", -1), [*FRANCE, assistant("Paris")]) == "Paris"


@pytest.mark.parametrize(
    "messages",
    [
        [*FRANCE, assistant("Rome"), user("Is it?"), assistant("Yes")],
        [*FRANCE, user("Is it?"), assistant("Rome"), assistant("Yes"), user("No")],
        [*FRANCE, assistant("Rome"), {"role": "tool", "content": "Yes"}, assistant("No")],
    ],
)
def test_a_rendered_text_whose_last_answer_is_written_in_another_way(model, messages) -> None:
    model.tokenizer.chat_template = THINKING
    text = rendered(model, messages)
    for role in ("user", "assistant", "tool"):
        contents = "".join(message["content"] for message in messages if message["role"] == role)
        assert covered(model, turn(role), text) == contents


def test_a_rendered_text_with_a_role_that_is_not_known(model) -> None:
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    text = rendered(model, [*FRANCE, {"role": "critic", "content": "No"}, user("Yes")])
    ids = model.tokenizer(text, return_tensors="pt").input_ids
    with pytest.raises(HooklineError, match="Pass"):
        columns_in(turn("user"), model.module, ids)


def test_a_conversation_whose_text_goes_on_with_unknown_turns(model) -> None:
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    ids = model.to_tokens(FRANCE)
    assert covered(model, turn("user"), torch.cat([ids, ids[:, -1:]], 1)) == FRANCE[0]["content"]
    with pytest.raises(HooklineError, match="unknown"):
        columns_in(turn("user"), model.module, torch.cat([ids, ids, ids], 1))


def test_a_rendered_text_that_may_be_two_conversations(model) -> None:
    """The template writes a system prompt into the user's message, so a paragraph may be one."""
    model.tokenizer.chat_template = (
        "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}{{ '<' + m.role + '>' }}"
        "{{ (first if loop.first else '') + m.content }}{% endfor %}"
    )
    merged = [{"role": "system", "content": "Mary"}, user("John")]
    paragraphs = [user("Mary\n\nJohn")]
    ids = model.tokenizer(rendered(model, merged), return_tensors="pt").input_ids
    with pytest.raises(HooklineError, match="Pass"):
        columns_in(turn("user"), model.module, ids)
    assert covered(model, turn("user"), merged) == "John"
    assert covered(model, turn("user"), paragraphs).startswith("Mary")


def test_conversations_of_a_batch_with_the_same_tokens(model) -> None:
    one, two = [user("Mary<|im_end|>\n<|im_start|>assistant\nJohn")], [user("Mary"), assistant("John")]
    assert model.to_tokens([one, one]).shape[0] == 2
    with pytest.raises(HooklineError, match="conversations 1 and 2"):
        model.to_tokens([FRANCE, one, two])


def test_what_changes_after_the_tokens_were_made(model) -> None:
    messages = [user([{"type": "text", "text": "Mary went"}]), assistant("home")]
    ids = model.to_tokens(messages)
    messages[0]["content"][0]["text"], messages[1]["role"] = "John sat", "user"
    model.tokenizer.chat_template = WITHOUT_OPENING
    assert covered(model, turn("user"), ids) == "Mary went"


def test_messages_with_arrays(model) -> None:
    for _ in range(2):
        assert covered(model, turn("user"), [{**FRANCE[0], "vector": torch.ones(2)}]) == FRANCE[0]["content"]


def test_several_templates(model) -> None:
    model.tokenizer.chat_template = {"default": CHATML, "tool_use": THINKING}
    assert covered(model, turn("user"), rendered(model, FRANCE)) == FRANCE[0]["content"]


@pytest.mark.parametrize("answer", ["[one]</think>  <two>", "<think>one</think>[two]", "<a></think><b> <c>"])
def test_an_answer_of_tags_only(model, answer) -> None:
    model.tokenizer.chat_template = THINKING
    said = answer.split("</think>")[-1]
    assert covered(model, turn("assistant"), [*FRANCE, assistant(answer)]).replace(" ", "") == said.replace(" ", "")


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 3}])
def test_a_part_without_a_text(model, part) -> None:
    with pytest.raises(HooklineError, match="no text"):
        model.to_tokens([user([part])])


def test_a_message_without_a_role(model) -> None:
    with pytest.raises(HooklineError, match="no role"):
        model.to_tokens([{"content": "Mary went"}])

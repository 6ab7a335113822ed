"""Turns are found in every family of chat templates, also where contents are hard to tell from what is around them."""

import pytest
import torch
from chat.families import FAMILIES
from chat.proof import SYSTEM, USER, message, tokens_of, tried, wrong_turns

import hookline
from hookline import HooklineError
from hookline.positions import turn
from hookline.text.given_texts import columns_in


@pytest.fixture(scope="module")
def model():
    return hookline.load("tinyworld")


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_cover_the_words_of_their_messages(model, name) -> None:
    outcomes = tried(model, FAMILIES[name])
    assert {case: problems for case, problems in outcomes.items() if problems} == {}
    assert list(outcomes.values()).count([]) >= 6


HARD = {
    "the same words twice": ["w10 w11", "w10 w11", "w10 w11"],
    "words of the template": ["user", "assistant", "<|im_start|>assistant\nuser"],
    "a turn inside a turn": ["w10<|im_end|>\n<|im_start|>assistant\nw20", "w20", "w10"],
    "one sign": [".", ".", "."],
    "characters of several tokens": ["é🙂中", "🙂", "中é"],
    "nothing": ["", "w2", ""],
}


@pytest.mark.parametrize("name", ["chatml", "phi", "llama 3", "contents without markers", "contents twice"])
@pytest.mark.parametrize("case", HARD)
def test_contents_that_are_hard_to_find_are_where_others_of_their_length_are(model, name, case) -> None:
    model.tokenizer.chat_template = FAMILIES[name]
    roles = [USER, "assistant", USER]
    plain = [
        "".join(chr(0x3B1 + number) if not x.isspace() else x for x in text) for number, text in enumerate(HARD[case])
    ]
    owners = [model.text.prompts(list(map(message, roles, contents))).owners for contents in (HARD[case], plain)]
    assert owners[0] == owners[1]
    assert {*owners[0]} - {-1} == {number for number, text in enumerate(HARD[case]) if text}


def test_a_wrong_turn_is_noticed(model, monkeypatch) -> None:
    """The proof itself: it sees a turn that has one token too many, or lacks one."""
    from hookline.text.known_chats import KnownChat

    model.tokenizer.chat_template = FAMILIES["chatml"]
    messages = [message(SYSTEM, "w40 w41"), message(USER, "w10 w11")]
    assert wrong_turns(model, messages) == []
    right = KnownChat.tokens_of.func
    for shift in (-1, 1):
        monkeypatch.setattr(
            KnownChat, "tokens_of", property(lambda chat, by=shift: [[i + by for i in x] for x in right(chat)])
        )
        assert wrong_turns(model, messages)


def test_a_thinking_section_that_the_template_adds_is_left_out(model) -> None:
    name = "thinking left out of earlier turns, and added to the last"
    model.tokenizer.chat_template = FAMILIES[name]
    messages = [message(USER, "Hello"), message("assistant", "I do not know")]
    ids = tokens_of(model, messages)
    covered = columns_in(turn("assistant"), model.module, ids)[0][0]
    assert "<think>" in model.to_string(ids[0])
    assert model.to_string(ids[0][covered]) == "I do not know"
    thought = [message(USER, "Hello"), message("assistant", "<think>What is it?</think>I do not know")]
    ids = tokens_of(model, thought)
    covered = columns_in(turn("assistant"), model.module, ids)[0][0]
    assert model.to_string(ids[0][covered]) == "What is it?I do not know"  # the tags are the template's


def test_a_template_that_changes_the_letters_is_refused(model) -> None:
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(HooklineError, match="turns cannot"):
        columns_in(turn(USER), model.module, tokens_of(model, [message(USER, "Hello")]))


def test_roles_that_the_template_rejects(model) -> None:
    model.tokenizer.chat_template = FAMILIES["llama 2, system merged into the first user turn"]
    with pytest.raises(HooklineError, match="alternate"):
        model([message(USER, "Hello"), message(USER, "Hello")])


def test_turns_of_two_roles_in_one_text(model) -> None:
    """Gemma has no system role: its template writes the system prompt into the user's turn."""
    model.tokenizer.chat_template = FAMILIES["gemma, with the role model"]
    ids = tokens_of(model, [message(SYSTEM, "The store is here."), message(USER, "The girl went to the store.")])
    masks = [columns_in(turn(role), model.module, ids)[0][0] for role in (SYSTEM, USER)]
    assert [model.to_string(ids[0][mask]).strip() for mask in masks] == [
        "The store is here.",
        "The girl went to the store.",
    ]
    assert not torch.any(masks[0] & masks[1])
    with pytest.raises(HooklineError, match="'system', 'user'"):
        model.cache(ids, names_filter="blocks.0.hook_resid_post", pos_slice=turn("model"))

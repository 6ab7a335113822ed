"""Answers that take many runs are kept while the model is the same; whatever changes it is noticed."""

import json
import warnings

import pytest
import torch
from torch import nn

import hookline
from hookline.explore.question import LiveEdit, Question
from hookline.explore.remembered import Remembered, fingerprint
from hookline.explore.shared_runs import SharedRuns
from hookline.explore.views import answer

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
EDIT = LiveEdit("zero", "blocks.3.attn.hook_z", head=4)
OFF = LiveEdit("zero", "blocks.3.attn.hook_z", head=4, on=False)
ANSWERS = {"target": 100, "versus": 200}
LONG = {
    "generate": {"count": 5},
    "heads": {"measure": "induction", **ANSWERS},
    "ablation": {"view": "heads", "measure": "ablation", **ANSWERS},
    "patching": {"measure": "heads", **ANSWERS},
}


class Page:
    """A page that asks in one state after the other, and counts the forward passes of each."""

    def __init__(self, model) -> None:
        self.model, self.state, self.runs, self.kept = model, 0, SharedRuns(), Remembered()
        self.passes = 0
        self.handle = model.module.register_forward_pre_hook(self.count)

    def count(self, *_: object) -> None:
        self.passes += 1

    def click(self, name: str, *edits: LiveEdit, prompt: str = PROMPT) -> tuple[dict, int]:
        """The answer in a new state, after the next tokens, and how many forward passes it took without those."""
        self.state += 1
        more = {"view": name, **LONG[name]}
        with self.runs.of_state("a", self.state), self.kept.used():
            answer(self.model, Question("next", prompt, OTHER, edits=edits))
            self.passes = 0
            data = answer(self.model, Question(prompt=prompt, other=OTHER, edits=edits, **more))
        return data, self.passes


@pytest.fixture
def page():
    page = Page(hookline.load("tinyworld"))
    yield page
    page.handle.remove()


def fresh(page, name, *edits) -> dict:
    """What the view says without a page."""
    more = {"view": name, **LONG[name]}
    return answer(page.model, Question(prompt=PROMPT, other=OTHER, edits=edits, **more))


@pytest.mark.parametrize("name", LONG)
def test_an_edit_that_is_switched_off_and_on_again_costs_nothing(page, name) -> None:
    for edits in ((OFF,), (EDIT,)):
        data, passes = page.click(name, *edits)
        assert passes
        assert json.dumps(data) == json.dumps(fresh(page, name, *edits))
    for edits in ((OFF,), (EDIT,), ()):
        data, passes = page.click(name, *edits)
        assert not passes
        assert json.dumps(data) == json.dumps(fresh(page, name, *edits))


def test_another_edit_generates_only_the_text_with_it(page) -> None:
    data, passes = page.click("generate")
    assert passes == len(data["before"]) > 1
    for edit in (EDIT, LiveEdit("zero", "blocks.2.attn.hook_z", head=1)):
        data, passes = page.click("generate", edit)
        assert passes == len(data["after"]) > 1
    data, passes = page.click("generate", EDIT, prompt=OTHER)
    assert passes == len(data["before"]) + len(data["after"])


@torch.no_grad()
def in_place(model) -> None:
    model.module.get_parameter(weight(model)).mul_(1.5)


def behind_the_counter(model) -> None:
    model.module.get_parameter(weight(model)).data.mul_(1.5)


def of_a_token_that_is_not_in_the_prompt(model) -> None:
    model.module.get_input_embeddings().weight.data[unused(model)].neg_()


def of_two_tokens(model) -> None:
    rows = model.module.get_input_embeddings().weight.data
    first, second = unused(model), unused(model) + 1
    rows[[first, second]] = rows[[second, first]]


def replaced(model) -> None:
    name = weight(model)
    owner, _, last = name.rpartition(".")
    setattr(model.module.get_submodule(owner), last, nn.Parameter(model.module.get_parameter(name) * 1.5))


def hooked(model) -> None:
    model.module.get_output_embeddings().register_forward_hook(lambda _m, _a, out: out.roll(1, -1))


def weight(model) -> str:
    return next(name for name, x in model.module.named_parameters() if x.ndim == 2 and ".2." in name)


def unused(model) -> int:
    used = {*model.to_tokens(PROMPT)[0].tolist(), *model.to_tokens(OTHER)[0].tolist()}
    return next(token for token in range(model.cfg.d_vocab) if not {token, token + 1} & used)


@pytest.mark.parametrize(
    "change", [in_place, behind_the_counter, of_a_token_that_is_not_in_the_prompt, of_two_tokens, replaced, hooked]
)
@pytest.mark.parametrize("edits", [(), (EDIT,)])
def test_a_change_of_the_model_is_noticed(page, change, edits) -> None:
    page.click("generate", *edits)
    assert not page.click("generate", *edits)[1]
    change(page.model)
    data, passes = page.click("generate", *edits)
    assert passes
    assert data == fresh(page, "generate", *edits)
    assert not page.click("generate", *edits)[1]


def test_warnings_are_kept_with_the_answer() -> None:
    kept, told = Remembered(), []

    def compute() -> int:
        told.append(1)
        warnings.warn("a note", UserWarning, stacklevel=1)
        return 3

    for _ in range(2):
        with pytest.warns(UserWarning, match="a note"):
            assert kept.get("key", b"seen", compute) == 3
    assert len(told) == 1


def test_a_run_that_fails_is_not_kept() -> None:
    kept = Remembered()

    def fail() -> None:
        raise ValueError("no answer")

    for _ in range(2):
        with pytest.raises(ValueError, match="no answer"):
            kept.get("key", b"seen", fail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (4, 8), (2, 3, 5), (0, 2)])
def test_a_fingerprint_of_any_shape(dtype, shape) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(shape).to(dtype))
    module.register_buffer("flag", torch.tensor(True))
    first = fingerprint(module)
    assert first == fingerprint(module)
    if module.weight.numel():
        module.weight.data.view(-1)[-1] += 1
        assert fingerprint(module) != first
    first = fingerprint(module)
    module.flag.data.logical_not_()
    assert fingerprint(module) != first


def test_weights_that_cannot_be_read_have_no_fingerprint() -> None:
    assert fingerprint(nn.Linear(2, 3, device="meta")) is None

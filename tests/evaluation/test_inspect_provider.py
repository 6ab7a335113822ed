"""Inspect with a hookline model: the answers of its provider for transformers, and other ones with edits."""

import pytest

import hookline
from hookline import HookedModel, edits, last
from hookline.transformer.hub import find_model

pytest.importorskip("inspect_ai", reason='needs pip install "hookline[inspect]"')
pytestmark = pytest.mark.filterwarnings("ignore")  # of Inspect and its libraries

PROMPTS = ["When Mary and John went to the store, John gave a drink to", "The cat", "Anna and Tom went"]
EDIT = ("blocks.1.hook_resid_post", edits.scale(0.1, pos=last))


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return hookline.load("tinyworld")


def answers(provider: str, **options: object) -> list[str]:
    """The answers to all prompts, which the provider generates in one batch."""
    import anyio
    from inspect_ai.model import GenerateConfig, get_model

    import hookline.evaluation.inspect_provider as registered  # Inspect finds it by itself if hookline is installed

    assert registered
    config = GenerateConfig(max_tokens=6, max_connections=len(PROMPTS))
    api = get_model(provider, config=config, memoize=False, do_sample=False, **options)
    found: dict[str, str] = {}

    async def ask(prompt: str) -> None:
        found[prompt] = (await api.generate(prompt)).completion

    async def ask_all() -> None:
        async with anyio.create_task_group() as group:
            for prompt in PROMPTS:
                group.start_soon(ask, prompt)

    anyio.run(ask_all)
    return [found[prompt] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return answers("hf/tinyworld", model_path=str(find_model("tinyworld", {}).path), device="cpu")


def test_without_edits_the_answers_are_those_of_transformers(plain, model) -> None:
    assert answers("hookline/tinyworld", device="cpu") == plain
    assert answers("hookline/mine", hooked=model) == plain


def test_edits_change_the_answers_as_hooks_do(tmp_path, plain, model) -> None:
    edits.save(tmp_path / "edits", [EDIT])
    found = answers("hookline/mine", hooked=model, edits=str(tmp_path / "edits"))
    assert found != plain
    texts = [f"user: {prompt}\n" for prompt in PROMPTS]
    for text, answer in zip(texts, found, strict=True):
        with model.hooks(fwd_hooks=[EDIT]):
            encoded = model.tokenizer(text, return_tensors="pt")
            new = model.module.generate(**encoded, max_new_tokens=6, do_sample=False)[
                0, encoded["input_ids"].shape[1] :
            ]
        assert model.tokenizer.decode(new, skip_special_tokens=True) == answer


def test_options_and_edits_that_do_not_fit_raise_at_once(model) -> None:
    from hookline.evaluation.inspect_provider import HooklineAPI

    with pytest.raises(hookline.UnknownPointError):
        HooklineAPI("mine", hooked=model, edits=[("blocks.99.hook_mlp_out", edits.zero())])
    with pytest.raises(hookline.HooklineError):
        HooklineAPI("mine", hooked=model, device="cpu")

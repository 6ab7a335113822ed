"""lm-eval with a hookline model: the results of its own model for transformers, and other ones with edits."""

import json

import pytest
import torch

import hookline
from hookline import edits, last
from hookline.transformer.hub import find_model

pytest.importorskip("lm_eval", reason='needs pip install "hookline[lm-eval]"')
pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and its libraries

TEXTS = [
    ("When Mary and John went to the store, John gave a drink to", " Mary"),
    ("The cat", " sat"),
    ("Anna", " and Tom"),
]
EDIT = ("blocks.1.hook_resid_post", edits.scale(0.1, pos=last))


@pytest.fixture(scope="module")
def path() -> str:
    return str(find_model("tinyworld", {}).path)


def scores(lm, texts=TEXTS) -> list[tuple[float, bool]]:
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood", {}, text, index) for index, text in enumerate(texts)]
    return lm.loglikelihood(requests, disable_tqdm=True)


def generated(lm) -> list[str]:
    from lm_eval.api.instance import Instance

    options = {"until": ["."], "max_gen_toks": 6}
    requests = [Instance("generate_until", {}, (text, options), index) for index, (text, _) in enumerate(TEXTS)]
    return lm.generate_until(requests, disable_tqdm=True)


@pytest.fixture(scope="module")
def plain(path):
    from lm_eval.models.huggingface import HFLM

    return HFLM(path, device="cpu", batch_size=3)


def test_without_edits_the_results_are_those_of_transformers(plain) -> None:
    from hookline.evaluation.lm_harness import HooklineLM

    for lm in (
        HooklineLM("tinyworld", device="cpu", batch_size=3),
        HooklineLM(hookline.load("tinyworld"), batch_size=3),
    ):
        assert scores(lm) == scores(plain)
        assert generated(lm) == generated(plain)


def test_edits_change_the_results_as_hooks_do(tmp_path, plain) -> None:
    from lm_eval.api.registry import get_model

    edits.save(tmp_path / "edits", [EDIT])
    lm = get_model("hookline").create_from_arg_string(
        f"pretrained=tinyworld,edits={tmp_path / 'edits'}", {"device": "cpu"}
    )
    found = scores(lm)
    assert found != scores(plain)
    assert "resid_post" in str(lm.get_model_info())

    model = hookline.load("tinyworld")
    for (context, continuation), (score, _) in zip(TEXTS, found, strict=True):
        context, whole = plain.tok_encode(context), plain.tok_encode(context + continuation)
        tokens = torch.tensor([whole[:-1]])
        logits = model.run_with_hooks(tokens, fwd_hooks=[EDIT]).log_softmax(-1)[0]
        expected = sum(logits[at - 1, whole[at]].item() for at in range(len(context), len(whole)))
        assert score == pytest.approx(expected, abs=1e-4)


def test_a_batch_with_padding_is_edited_where_single_prompts_are() -> None:
    from hookline.evaluation.lm_harness import HooklineLM

    model = hookline.load("tinyworld")
    pairs = [EDIT, ("blocks.2.hook_mlp_out", edits.zero(pos=0))]
    alone, together = (HooklineLM(model, pairs, batch_size=size) for size in (1, 3))
    assert [score for score, _ in scores(together)] == pytest.approx([score for score, _ in scores(alone)], abs=1e-4)
    assert generated(together) == generated(alone)


def test_a_task(tmp_path, path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from hookline.evaluation.lm_harness import HooklineLM

    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(
        f"task: tiny\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path / 'rows.jsonl'}}}\n"
        "test_split: train\noutput_type: loglikelihood\ndoc_to_text: '{{prompt}}'\ndoc_to_target: '{{answer}}'\n"
        "target_delimiter: ''\nmetric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n"
    )

    def perplexity(lm, **options: object) -> float:
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        found = lm_eval.simple_evaluate(lm, tasks=["tiny"], task_manager=tasks, bootstrap_iters=0, **options)
        return found["results"]["tiny"]["perplexity,none"]

    expected = perplexity("hf", model_args=f"pretrained={path}", device="cpu")
    assert perplexity("hookline", model_args="pretrained=tinyworld", device="cpu") == expected
    assert perplexity(HooklineLM("tinyworld", [EDIT], device="cpu")) > expected


def test_edits_that_do_not_fit_raise_at_once(tmp_path) -> None:
    from hookline.evaluation.lm_harness import HooklineLM

    model = hookline.load("tinyworld")
    with pytest.raises(hookline.UnknownPointError):
        HooklineLM(model, [("blocks.99.hook_mlp_out", edits.zero())])
    with pytest.raises(hookline.HooklineError):
        HooklineLM(model, str(tmp_path / "no_such"))

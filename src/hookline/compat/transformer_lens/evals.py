"""Quick evaluations by TransformerLens's names: loss on text, induction, indirect objects, multiple choice.

The data loaders and `mmlu_eval` download their data with the `datasets` package. For anything serious use an
evaluation library.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm  # type: ignore[import-untyped]  # has no types

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.lens_errors import LensValueError
from hookline.compat.transformer_lens.utils import lm_cross_entropy_loss, tokenize_and_concatenate
from hookline.errors import HooklineError

MMLU_ANSWER_LETTERS = ["A", "B", "C", "D"]
_TEXT = (
    "The library opens at nine. People come to read the newspapers, to borrow novels and to sit where it is warm, and "
    "nobody asks them to leave before it closes in the evening."
)


def sanity_check(model: Any) -> Tensor:
    """The loss on two sentences of English: well above 7 if something is wrong with a trained model."""
    return model(_TEXT, return_type="loss")


def _load(*names: str, split: str) -> Any:
    try:
        load_dataset = import_module("datasets").load_dataset
    except ImportError as error:
        raise HooklineError("this evaluation downloads a dataset: pip install datasets") from error
    return load_dataset(*names, split=split)


def _loader(names: tuple[str, ...], column: str, tokenizer: Any, batch_size: int = 8) -> DataLoader[Any]:
    data = tokenize_and_concatenate(_load(*names, split="train"), tokenizer, column_name=column)
    return DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)


make_wiki_data_loader = partial(_loader, ("wikitext", "wikitext-2-v1"), "text")
make_owt_data_loader = partial(_loader, ("stas/openwebtext-10k",), "text")
make_pile_data_loader = partial(_loader, ("NeelNanda/pile-10k",), "text")
make_code_data_loader = partial(_loader, ("codeparrot/codeparrot-valid-v2-near-dedup",), "content")
DATASET_LOADERS = [make_wiki_data_loader, make_owt_data_loader, make_pile_data_loader, make_code_data_loader]
DATASET_NAMES = ["wiki", "owt", "pile", "code"]


@torch.inference_mode()
def evaluate_on_dataset(
    model: Any, data_loader: Iterable[dict[str, Tensor]], truncate: int = 100, device: Any = None
) -> float:
    """The mean loss over the first `truncate` + 1 batches of tokens."""
    losses = []
    for batch in tqdm(data_loader):
        losses.append(float(model(batch["tokens"].to(device or model.cfg.device), return_type="loss").mean()))
        if len(losses) > truncate:
            break
    return sum(losses) / len(losses)


@torch.inference_mode()
def induction_loss(
    model: Any,
    tokenizer: Any = None,
    batch_size: int = 4,
    subseq_len: int = 384,
    prepend_bos: bool | None = None,
    device: Any = None,
) -> Tensor:
    """The loss on the second half of random tokens that are repeated once: low if the model has induction heads."""
    most = min(20000, model.cfg.d_vocab)
    first = torch.randint(min(100, most - 1), most, (batch_size, subseq_len))
    tokens = first.repeat(1, 2).to(device or model.cfg.device)
    if model.cfg.default_prepend_bos if prepend_bos is None else prepend_bos:
        tokens[:, 0] = (model.tokenizer if tokenizer is None else tokenizer).bos_token_id
    return lm_cross_entropy_loss(model(tokens), tokens, per_token=True)[:, subseq_len + 1 :].mean()


@torch.inference_mode()
def evaluate(model: Any, truncate: int = 100, batch_size: int = 8, tokenizer: Any = None) -> dict[str, float]:
    """The loss on each of the four datasets."""
    losses = {}
    for name, loader in zip(DATASET_NAMES, DATASET_LOADERS, strict=True):
        data = loader(tokenizer=model.tokenizer if tokenizer is None else tokenizer, batch_size=batch_size)
        losses[f"{name}_loss"] = evaluate_on_dataset(model, data, truncate)
        print(f"{name}: {losses[f'{name}_loss']}")
    return losses


class IOIDataset(Dataset[dict[str, Tensor]]):
    """Sentences whose last word is the indirect object, [A]; [B] is the subject, named twice."""

    def __init__(
        self,
        tokenizer: Any,
        templates: list[str] | None = None,
        names: list[str] | None = None,
        nouns: dict[str, list[str]] | None = None,
        num_samples: int = 1000,
        symmetric: bool = False,
        prepend_bos: bool = True,
        seed: int | None = None,
    ) -> None:
        self.tokenizer, self.prepend_bos = tokenizer, prepend_bos
        self.templates = self.get_default_templates() if templates is None else templates
        self.names = self.get_default_names() if names is None else names
        self.nouns = self.get_default_nouns() if nouns is None else nouns
        if seed is not None:
            random.seed(seed)
        rounds = range(num_samples // 2 if symmetric else num_samples)
        self.samples = [sample for _ in rounds for sample in self.get_sample(symmetric)]

    def get_sample(self, symmetric: bool = False) -> list[dict[str, str]]:
        """A sentence with its two names; with `symmetric`, also the sentence with the names exchanged."""
        text = random.choice(self.templates)
        for kind, words in self.nouns.items():
            text = text.replace(f"[{kind}]", random.choice(words))
        a, b = random.sample(self.names, 2)
        return [
            {"text": text.replace("[A]", one).replace("[B]", other), "IO": f" {one}", "S": f" {other}"}
            for one, other in ([(a, b), (b, a)] if symmetric else [(a, b)])
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        ids = {
            key: self.tokenizer.encode(sample[field]) for key, field in (("prompt", "text"), ("IO", "IO"), ("S", "S"))
        }
        ids["prompt"] = [*([self.tokenizer.bos_token_id] if self.prepend_bos else []), *ids["prompt"]]
        return {key: torch.tensor(value) for key, value in ids.items()}

    @staticmethod
    def get_default_names() -> list[str]:
        """The names in the sentences."""
        return ["John", "Mary"]

    @staticmethod
    def get_default_templates() -> list[str]:
        """The sentences, with places for two names and for nouns."""
        return [
            "When [A] and [B] were at the [LOCATION], [B] handed the [OBJECT] to [A]",
            "[B] and [A] came to the [LOCATION]. Then [B] gave the [OBJECT] to [A]",
        ]

    @staticmethod
    def get_default_nouns() -> dict[str, list[str]]:
        """The nouns for each place."""
        return {"LOCATION": ["station", "library"], "OBJECT": ["ticket", "letter", "basket"]}


@torch.inference_mode()
def ioi_eval(
    model: Any,
    dataset: Any = None,
    batch_size: int = 8,
    num_samples: int = 1000,
    tokenizer: Any = None,
    symmetric: bool = False,
) -> dict[str, float]:
    """The mean difference of the logits of indirect object and subject, and how often it is positive."""
    if dataset is None:
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        dataset = IOIDataset(tokenizer, num_samples=num_samples, symmetric=symmetric)
    differences = [x for batch in tqdm(_batches(dataset, batch_size)) for x in _differences(model, batch)]
    right = sum(difference > 0 for difference in differences)
    return {"Logit Difference": sum(differences) / len(differences), "Accuracy": right / len(differences)}


def _batches(dataset: Any, size: int) -> list[list[dict[str, Tensor]]]:
    samples = [dataset[index] for index in range(len(dataset))]
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _differences(model: Any, batch: list[dict[str, Tensor]]) -> Iterator[float]:
    rows = [sample["prompt"] for sample in batch]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    batch_logits = model(pad(rows).to(model.cfg.device), attention_mask=pad([torch.ones_like(row) for row in rows]))
    for logits, sample in zip(batch_logits, batch, strict=True):
        right, wrong = sample["IO"], sample["S"]
        length = min(len(right), len(wrong))
        first = int((right[:length] != wrong[:length]).nonzero()[0])
        at = logits[len(sample["prompt"]) - len(right) + first - 1]
        yield float(at[right[first]] - at[wrong[first]])


def make_mmlu_data_loader(
    subjects: str | list[str] | None = None, split: str = "test", num_samples: int | None = None
) -> list[dict[str, Any]]:
    """Questions with four choices and the index of the answer, of some or all subjects."""
    names = import_module("datasets").get_dataset_config_names("cais/mmlu")
    available = [name for name in names if name not in ("all", "auxiliary_train")]
    requested = available if subjects is None else [subjects] if isinstance(subjects, str) else list(subjects)
    if unknown := [name for name in requested if name not in available]:
        raise LensValueError(f"Invalid subject(s) {unknown}: MMLU has {', '.join(available)}")
    questions = []
    for subject in requested:
        rows = _load("cais/mmlu", subject, split=split)
        for index in range(len(rows) if num_samples is None else min(num_samples, len(rows))):
            questions.append(
                {**{key: rows[index][key] for key in ("question", "choices", "answer")}, "subject": subject}
            )
    return questions


@torch.inference_mode()
def mmlu_eval(
    model: Any,
    tokenizer: Any = None,
    subjects: str | list[str] | None = None,
    split: str = "test",
    num_samples: int | None = None,
) -> dict[str, Any]:
    """The share of questions whose answer's letter has the highest probability, overall and by subject; zero-shot."""
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    letters = [tokenizer.encode(f" {letter}", add_special_tokens=False) for letter in MMLU_ANSWER_LETTERS]
    ids = [
        spaced[0] if len(spaced) == 1 else tokenizer.encode(letter, add_special_tokens=False)[0]
        for spaced, letter in zip(letters, MMLU_ANSWER_LETTERS, strict=True)
    ]
    results: dict[str, list[bool]] = {}
    for row in tqdm(make_mmlu_data_loader(subjects, split, num_samples)):
        choices = "".join(
            f"{letter}. {text}\n" for letter, text in zip(MMLU_ANSWER_LETTERS, row["choices"], strict=True)
        )
        prompt = f"Question: {row['question']}\nChoices:\n{choices}Answer:"
        logits = model(tokenizer.encode(prompt, return_tensors="pt").to(model.cfg.device))[0, -1]
        results.setdefault(row["subject"], []).append(int(logits[ids].argmax()) == row["answer"])
    right, total = (
        sum(sum(outcomes) for outcomes in results.values()),
        sum(len(outcomes) for outcomes in results.values()),
    )
    scores = {subject: sum(outcomes) / len(outcomes) for subject, outcomes in results.items()}
    return {"accuracy": right / total, "num_correct": right, "num_total": total, "subject_scores": scores}


__getattr__ = refusing("transformer_lens.evals")

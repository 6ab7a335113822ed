"""A byte-level BPE tokenizer in which every word of tinyworld is one token."""

from __future__ import annotations

import json

import corpus
import world
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 1024


def build() -> PreTrainedTokenizerFast:
    """Build the tokenizer: all bytes, all words, and as many merges for other text as fit into the vocabulary.

    With `ignore_merges`, a word of the vocabulary becomes one token, so words do not need merges of their own.
    """
    words = _words()
    vocabulary = {token: number for number, token in enumerate([END, *_alphabet(), *words])}
    merges = []
    for left, right in _merges(words):
        if left in vocabulary and right in vocabulary and len(vocabulary) < VOCABULARY:
            merges.append((left, right))
            vocabulary.setdefault(left + right, len(vocabulary))
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=corpus.CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _words() -> list[str]:
    """Return the pre-tokenized words of the corpus, and every entity with and without a leading space."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [*corpus.texts(seed=0, count=20_000), *(f"{word} {word}" for word in world.entities())]
    found = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    return sorted(word for word in found if len(word) > 1)


def _merges(words: list[str]) -> list[list[str]]:
    """Return merges learned from the words, the most useful first."""
    learner = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=_alphabet())
    learner.train_from_iterator(words, trainer)
    return json.loads(learner.to_str())["model"]["merges"]

# ruff: noqa: PT028 (test_prompt is not one of our tests)
"""`transformer_lens.utils`: names, slices, losses, sampling, tokenizers, datasets, and tensor helpers."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.aliases import IRREGULAR
from hookline.compat.transformer_lens._impl.aliases import get_official_model_name as get_official_model_name
from hookline.compat.transformer_lens._impl.lens_errors import LensValueError, check
from hookline.compat.transformer_lens._impl.pretrained import get_device as get_device
from hookline.compat.transformer_lens._impl.slices import Slice as Slice
from hookline.compat.transformer_lens._impl.slices import SliceInput as SliceInput
from hookline.compat.transformer_lens._impl.small_utils import *  # noqa: F403
from hookline.compat.transformer_lens._impl.small_utils import _apply_repetition_penalty
from hookline.compat.transformer_lens._impl.tokens import USE_DEFAULT_VALUE as USE_DEFAULT_VALUE
from hookline.compat.transformer_lens._impl.tokens import get_attention_mask as get_attention_mask
from hookline.compat.transformer_lens._impl.tokens import (
    get_input_with_manually_prepended_bos as get_input_with_manually_prepended_bos,
)
from hookline.compat.transformer_lens._impl.tokens import get_tokens_with_bos_removed as get_tokens_with_bos_removed
from hookline.compat.transformer_lens.FactoredMatrix import FactoredMatrix
from hookline.errors import HooklineError
from hookline.text.loss import lm_loss

if TYPE_CHECKING:
    from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer

_LAYER_TYPES = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_NAMES = {"attn": "pattern", "attn_logits": "attn_scores", "key": "k", "query": "q", "value": "v", "mlp_pre": "pre",
          "mlp_mid": "mid", "mlp_post": "post"}  # fmt: skip
_IN_ATTENTION = ("k", "v", "q", "z", "rot_k", "rot_q", "result", "pattern", "attn_scores")
_IN_MLP = ("pre", "post", "mid", "pre_linear")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The name of a point from its shorthand.

    get_act_name("k", 6), get_act_name("k6")            # blocks.6.attn.hook_k
    get_act_name("normalized", 27, "ln2")               # blocks.27.ln2.hook_normalized
    get_act_name("embed")                               # hook_embed
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    if match := re.match(r"([a-z]+)(\d+)([a-z]?.*)", name):
        name, layer, layer_type = match.groups()
    name = _NAMES.get(name, name)
    part = _LAYER_TYPES.get(layer_type or "", layer_type or "")
    part = "attn" if name in _IN_ATTENTION else "mlp" if name in _IN_MLP else part
    if name in ("scale", "normalized") and layer is None:
        return f"ln_final.hook_{name}"
    index = layer if isinstance(layer, str | None) else operator.index(layer)  # also of torch and NumPy
    return ".".join([*([] if index is None else ["blocks", str(index)]), *([part] if part else []), f"hook_{name}"])


def to_numpy(tensor: Any) -> np.ndarray:
    """An array from a tensor, a list, a number or an array."""
    if isinstance(tensor, Tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if isinstance(tensor, np.ndarray | list | tuple | int | float | bool | str):
        return np.asarray(tensor)
    raise LensValueError(
        f"to_numpy got an invalid type, {type(tensor).__name__}: it takes tensors, lists, numbers and arrays"
    )


def get_corner(tensor: Any, n: int = 3) -> Tensor:
    """The first entries along every axis."""
    corner = tensor[tuple(slice(n) for _ in range(tensor.ndim))]
    return corner.AB if isinstance(corner, FactoredMatrix) else corner


def remove_batch_dim(tensor: Tensor) -> Tensor:
    """Remove a leading axis of size 1; other tensors are unchanged."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor


def transpose(tensor: Tensor) -> Tensor:
    """Swap the last two axes."""
    return tensor.transpose(-1, -2)


def is_square(x: Tensor) -> bool:
    """Whether a tensor is a square matrix."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: Tensor) -> bool:
    """Whether a tensor is a lower triangular matrix."""
    return is_square(x) and x.equal(x.tril())


def get_cumsum_along_dim(tensor: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """Cumulative sums, forward or backward."""
    return tensor.flip(dim).cumsum(dim).flip(dim) if reverse else tensor.cumsum(dim)


def get_offset_position_ids(past_kv_pos_offset: int, attention_mask: Int[Tensor, "batch pos"]) -> Tensor:
    """The positions of tokens from an offset on, without padding."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def repeat_along_head_dimension(tensor: Tensor, n_heads: int, clone_tensor: bool = True) -> Tensor:
    """The stream repeated per head."""
    repeated = tensor[..., None, :].expand(*tensor.shape[:-1], n_heads, tensor.shape[-1])
    return repeated.clone() if clone_tensor else repeated


def filter_dict_by_prefix(dictionary: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries under a prefix, without the prefix."""
    start = prefix.removesuffix(".") + "."
    return {key.removeprefix(start): value for key, value in dictionary.items() if key.startswith(start)}


def composition_scores(left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True) -> Tensor:
    """How much of the output of `left` is read by `right`: the norm of their product over the product of their norms.

    With `broadcast_dims`, the scores of all pairs of the two batches.
    """
    if left.rdim != right.ldim:
        raise HooklineError(f"matrices of shapes {list(left.shape)} and {list(right.shape)} do not compose")
    if broadcast_dims:
        n_left, n_right = left.ndim - 2, right.ndim - 2
        for axis in range(n_left):
            right = right.unsqueeze(axis)
        for axis in range(n_right):
            left = left.unsqueeze(axis + n_left)
    return (left @ right).norm() / left.norm() / right.norm()


def lm_cross_entropy_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    per_token: bool = False,
) -> Tensor:
    """Cross-entropy of the next token, as a mean or per token; the last position has no next token."""
    return lm_loss(logits, tokens.to(logits.device), attention_mask, per_token=per_token)


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"], per_token: bool = False
) -> Tensor:
    """Next-token accuracy, overall or per token."""
    is_right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return is_right if per_token else is_right.float().mean()


def gelu_new(input: Tensor) -> Tensor:
    """GPT-2's activation function."""
    return F.gelu(input, approximate="tanh")


def gelu_fast(input: Tensor) -> Tensor:
    """GELU with rounded constants."""
    return 0.5 * input * (1 + torch.tanh(input * 0.7978845608 * (1 + 0.044715 * input * input)))


def solu(input: Tensor) -> Tensor:
    """`x * softmax(x)`, over the neurons."""
    return input * input.softmax(-1)


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, " batch"]:
    """Sample one token per row, as transformers does."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    from hookline.compat.transformer_lens._impl.generation import frequency_penalty

    steps: list[Any] = []
    check(
        tokens is not None or not (freq_penalty or repetition_penalty != 1.0),
        "freq_penalty and repetition_penalty need the previous tokens: pass tokens",
    )
    check(top_k is None or top_k > 0, f"top_k must be a positive number, not {top_k}")
    check(top_p is None or 0 < top_p <= 1, f"top_p must be in (0, 1], not {top_p}")
    if repetition_penalty != 1.0:
        steps.append(lambda tokens, logits: _apply_repetition_penalty(logits, tokens, repetition_penalty))
    if freq_penalty:
        steps.append(frequency_penalty(freq_penalty * (temperature or 1.0)))
    if temperature:
        steps.append(lambda _, logits: logits / temperature)
    if top_k is not None:
        steps.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        steps.append(TopPLogitsWarper(top_p))
    logits = final_logits.float()
    for step in steps:
        logits = step(tokens, logits)
    return logits.argmax(-1) if temperature == 0 else torch.multinomial(logits.softmax(-1), 1)[:, 0]


OFFICIAL_MODEL_NAMES: list[str] = list(dict.fromkeys(IRREGULAR.values()))
"""Hub ids of models with short names."""


@contextmanager
def LocallyOverridenDefaults(model: HookedTransformer, **overrides: Any) -> Iterator[None]:  # noqa: N802
    """Override the defaults of `prepend_bos` and `padding_side` inside a context."""
    new_defaults = {name: value for name, value in overrides.items() if value is not None}
    allowed = {"prepend_bos": (True, False), "padding_side": ("left", "right")}
    if unknown := set(new_defaults) - set(allowed):
        raise HooklineError(f"{sorted(unknown)} have no default; only prepend_bos and padding_side do")
    if any(value not in allowed[name] for name, value in new_defaults.items()):
        raise HooklineError(f'prepend_bos must be True or False, and padding_side "left" or "right", not {overrides}')
    if "padding_side" in new_defaults and model.tokenizer is None:
        raise HooklineError("padding_side needs a tokenizer, and this model has none")
    owners = {"prepend_bos": (model.cfg, "default_prepend_bos"), "padding_side": (model.tokenizer, "padding_side")}
    before = {name: getattr(*owners[name]) for name in new_defaults}
    for name, value in new_defaults.items():
        setattr(*owners[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(*owners[name], value)


def get_tokenizer_with_bos(tokenizer: Any) -> Any:
    """The tokenizer with a BOS token at the start of each text; unchanged if it has none, or adds it already."""
    if tokenizer.bos_token is None or tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        return tokenizer
    from transformers import AutoTokenizer

    options = {
        key: value for key, value in tokenizer.init_kwargs.items() if key not in ("name_or_path", "add_bos_token")
    } | {"padding_side": tokenizer.padding_side}
    new = AutoTokenizer.from_pretrained(tokenizer.name_or_path, add_bos_token=True, **options)
    if new("")["input_ids"][:1] != [new.bos_token_id]:
        raise HooklineError(f"{type(tokenizer).__name__} does not take add_bos_token: pass prepend_bos=True instead")
    return new


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | Path | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """The content of a torch or JSON file on the hub; the local path of any other file."""
    from huggingface_hub import hf_hub_download

    folder = None if subfolder == "." else subfolder
    path = Path(hf_hub_download(repo_name, file_name, subfolder=folder, cache_dir=cache_dir, **kwargs))
    if path.suffix in (".pth", ".pt") or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(path.read_text()) if path.suffix == ".json" else str(path)


def print_gpu_mem(step_name: str = "") -> None:
    """Print the GPU memory in use."""
    in_use = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(f"{step_name} ~ {in_use:.2f} GiB allocated on the GPU")


def keep_single_column(dataset: Any, col_name: str) -> Any:
    """The dataset with only this column."""
    if dataset.column_names is not None and col_name not in dataset.column_names:
        raise HooklineError(f"the dataset has no column {col_name!r}, only {dataset.column_names}")
    return dataset.remove_columns([name for name in dataset.column_names or () if name != col_name])


def load_dataset(*args: Any, **kwargs: Any) -> Any:
    """`datasets.load_dataset`, which TransformerLens 2 had here: ARENA's exercises import it."""
    from datasets import load_dataset as load  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return load(*args, **kwargs)


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int = 10,
    set_format: bool = True,
) -> Any:
    """Tokenize a text dataset (of Hugging Face `datasets`) into rows `tokens` of `max_length`."""

    def rows(examples: dict[str, list[str]]) -> dict[str, np.ndarray]:
        return {"tokens": token_rows(examples[column_name], tokenizer, max_length, add_bos_token)}

    options = {} if streaming else {"num_proc": num_proc}
    new = keep_single_column(dataset, column_name).map(rows, batched=True, remove_columns=[column_name], **options)
    if set_format:
        new.set_format(type="torch", columns=["tokens"])
    return new


def token_rows(
    texts: Sequence[str], tokenizer: Any, max_length: int, add_bos_token: bool = True
) -> Int[np.ndarray, "row max_length"]:
    """The texts as one sequence of tokens, separated by the EOS token, split into rows of equal length.

    Tokens left over at the end are dropped; if there are too few for one row, they are padded.
    """
    if tokenizer.eos_token_id is None or (add_bos_token and tokenizer.bos_token_id is None):
        raise HooklineError("the tokenizer has no EOS or no BOS token: set them first")
    width = max_length - 1 if add_bos_token else max_length
    if width < 1:
        raise HooklineError(f"max_length={max_length} leaves no room for tokens")
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    joined = np.array([token for row in ids for token in (*row, tokenizer.eos_token_id)][:-1], dtype=np.int64)
    if 0 < len(joined) < width:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        joined = np.pad(joined, (0, width - len(joined)), constant_values=pad)
    tokens = joined[: len(joined) // width * width].reshape(-1, width)
    return np.pad(tokens, ((0, 0), (1, 0)), constant_values=tokenizer.bos_token_id) if add_bos_token else tokens


@torch.no_grad()
def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: HookedTransformer,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print the rank of an answer after a prompt, token by token, and the most likely tokens there.

    If there are several answers, only the first token of each is used.
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if not answers or not all(answers):
        raise HooklineError(f"an answer must be a nonempty text, or a list of such texts, not {answer!r}")
    if prepend_space_to_answer:
        answers = [answer_text if answer_text.startswith(" ") else f" {answer_text}" for answer_text in answers]
    start = model.to_tokens(prompt, prepend_bos=prepend_bos)[0]
    rows = [model.to_tokens(answer_text, prepend_bos=False)[0] for answer_text in answers]
    rows = rows if len(rows) == 1 else [row[:1] for row in rows]
    labels = [model.to_str_tokens(row) for row in rows]
    if print_details:
        print("Tokenized prompt:", model.to_str_tokens(start))
        print(f"Tokenized answer{'s' if len(rows) > 1 else ''}:", labels if len(rows) > 1 else labels[0])
    logits = model(torch.cat([start, rows[0]])[None])[0, len(start) - 1 : -1]
    ranks = []
    for step, at in enumerate(logits):
        answer_tokens = [int(row[step]) for row in rows]
        names = [label[step] for label in labels]
        order = at.argsort(descending=True).tolist()
        ranks.append([(name, order.index(token)) for name, token in zip(names, answer_tokens, strict=True)])
        if print_details:
            _print_step(model, at, order, ranks[-1], answer_tokens, top_k)
    print("Ranks of the answer tokens:", [step_ranks[0] for step_ranks in ranks] if len(rows) == 1 else ranks)


test_prompt.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _print_step(
    model: HookedTransformer,
    at: Tensor,
    order: list[int],
    ranks: list[tuple[str, int]],
    answer_tokens: list[int],
    top_k: int,
) -> None:
    probs = at.softmax(-1)
    print(f"Performance on answer token{'s' if len(answer_tokens) > 1 else ''}:")
    for (name, rank), token in zip(ranks, answer_tokens, strict=True):
        print(f"Rank: {rank: <8} Logit: {at[token]:5.2f} Prob: {probs[token]:6.2%} Token: |{name}|")
    for place, token in enumerate(order[:top_k]):
        print(
            f"Top {place}th token. Logit: {at[token]:5.2f} Prob: {probs[token]:6.2%} "
            f"Token: |{model.to_single_str_token(token)}|"
        )


__getattr__ = refusing("transformer_lens.utils")

"""`transformer_lens.utils`: names, slices, losses, sampling, and tensor helpers."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from hookline.compat.transformer_lens.absent import refusing
from hookline.compat.transformer_lens.aliases import get_official_model_name as get_official_model_name
from hookline.compat.transformer_lens.datasets import keep_single_column as keep_single_column
from hookline.compat.transformer_lens.datasets import tokenize_and_concatenate as tokenize_and_concatenate
from hookline.compat.transformer_lens.defaults import OFFICIAL_MODEL_NAMES as OFFICIAL_MODEL_NAMES
from hookline.compat.transformer_lens.defaults import LocallyOverridenDefaults as LocallyOverridenDefaults
from hookline.compat.transformer_lens.defaults import download_file_from_hf as download_file_from_hf
from hookline.compat.transformer_lens.defaults import get_tokenizer_with_bos as get_tokenizer_with_bos
from hookline.compat.transformer_lens.defaults import print_gpu_mem as print_gpu_mem
from hookline.compat.transformer_lens.loading import get_device as get_device
from hookline.compat.transformer_lens.prompts import test_prompt as test_prompt
from hookline.compat.transformer_lens.slices import Slice as Slice
from hookline.compat.transformer_lens.slices import SliceInput as SliceInput
from hookline.compat.transformer_lens.tokens import USE_DEFAULT_VALUE as USE_DEFAULT_VALUE
from hookline.compat.transformer_lens.tokens import get_attention_mask as get_attention_mask
from hookline.errors import HooklineError
from hookline.text.loss import lm_loss
from hookline.weights.factored import FactoredMatrix

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
    raise HooklineError(f"to_numpy takes tensors, lists, numbers and arrays, not a {type(tensor).__name__}")


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
    """How much of `right` reads what `left` writes: the norm of their product over the product of their norms.

    With `broadcast_dims`, of every one of the one with every one of the other.
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
    """Cross-entropy of the next token; per token, one less than there are positions."""
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
    from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

    from hookline.compat.transformer_lens.generation import FrequencyPenalty

    steps: list[Any] = []
    if (freq_penalty or repetition_penalty != 1.0) and tokens is None:
        raise HooklineError("freq_penalty needs the previous tokens: pass tokens")
    if repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if freq_penalty:
        steps.append(FrequencyPenalty(freq_penalty * (temperature or 1.0)))
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


__getattr__ = refusing("transformer_lens.utils")

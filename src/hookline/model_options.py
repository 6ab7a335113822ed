"""The keyword options of loading, running and generating, as editors and type checkers list them.

The inputs of a model are those that models of transformers have; any other that a model's `forward` takes is accepted
when it runs, and passes a type checker as `model(**inputs)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from hookline.text.chats import Messages
from hookline.text.token_positions import Positions
from hookline.text.tokenizer import Side
from hookline.types import Filter, HookList, OnError
from hookline.vision.images import ImageLike, Images

ReturnType: TypeAlias = Literal["logits", "loss", "both", "output"] | None

OnePrompt: TypeAlias = str | Messages
"""A text, or the messages of a conversation."""
ManyPrompts: TypeAlias = list[str] | tuple[str, ...] | Sequence[Messages]
"""Several of them. Not `Sequence[str]`: a str is one, too, so overloads could not tell them apart."""
Input: TypeAlias = OnePrompt | ManyPrompts | Sequence[str] | Tensor | None
"""What a model runs on: text, messages, token ids, or None if keyword inputs are passed."""


class ForwardInputs(TypedDict, total=False):
    """The keyword inputs of models of transformers."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    position_ids: Tensor | None
    token_type_ids: Tensor | None
    decoder_input_ids: Tensor | None
    decoder_attention_mask: Tensor | None
    decoder_inputs_embeds: Tensor | None
    encoder_outputs: Any
    past_key_values: Any
    use_cache: bool | None
    cache_position: Tensor | None
    logits_to_keep: int | Tensor
    output_attentions: bool | None
    output_hidden_states: bool | None
    return_dict: bool | None
    pixel_values: Any
    pixel_values_videos: Any
    pixel_attention_mask: Tensor | None
    image_grid_thw: Tensor | None
    video_grid_thw: Tensor | None
    image_sizes: Any
    mm_token_type_ids: Tensor | None
    cross_attention_mask: Tensor | None
    aspect_ratio_ids: Tensor | None
    aspect_ratio_mask: Tensor | None
    interpolate_pos_encoding: bool
    bbox: Tensor | None
    input_features: Tensor | None
    input_values: Tensor | None


class PromptOptions(ForwardInputs, total=False):
    """How a prompt becomes inputs."""

    attention_mask: Tensor | None
    images: Images | None
    prepend_bos: bool | None
    padding_side: Side | None


class CallOptions(PromptOptions, total=False):
    """The options of `model(…)`, beside `input` and `return_type`."""

    loss_per_token: bool
    start_at_layer: int | None
    stop_at_layer: int | None
    tokens: Tensor | None
    decoder_input: Input


class HookOptions(CallOptions, total=False):
    """The options of `run_with_hooks`."""

    fwd_hooks: HookList
    bwd_hooks: HookList
    reset_hooks_end: bool
    clear_contexts: bool
    on_error: OnError
    allow_shape: bool


class RecordOptions(CallOptions, total=False):
    """The options of `cache`."""

    names_filter: Filter
    device: torch.device | str | None
    dtype: torch.dtype | None
    remove_batch_dim: bool
    pos_slice: Positions


class CacheOptions(RecordOptions, total=False):
    """The options of `run_with_cache`."""

    incl_bwd: bool
    loss_fn: Callable[[Any], Tensor] | None
    fwd_hooks: HookList
    bwd_hooks: HookList
    on_error: OnError
    local: bool


class LastLogitsOptions(ForwardInputs, total=False):
    """The options of `last_logits`."""

    decoder_input: Input


class SamplingOptions(ForwardInputs, total=False):
    """What chooses and ends a text: options of transformers' `generate`, and the model's inputs."""

    attention_mask: Tensor | None
    prepend_bos: bool | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    length_penalty: float | None
    exponential_decay_length_penalty: tuple[int, float] | None
    num_beams: int | None
    num_return_sequences: int | None
    early_stopping: bool | str | None
    min_new_tokens: int | None
    min_length: int | None
    max_time: float | None
    stop_strings: str | Sequence[str] | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    bos_token_id: int | None
    decoder_start_token_id: int | Sequence[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    sequence_bias: Any
    guidance_scale: float | None
    negative_prompt_ids: Tensor | None
    negative_prompt_attention_mask: Tensor | None
    renormalize_logits: bool | None
    remove_invalid_values: bool | None
    token_healing: bool | None
    watermarking_config: Any
    generation_config: Any
    logits_processor: Any
    stopping_criteria: Any
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None
    streamer: Any
    tokenizer: Any
    assistant_model: Any
    assistant_tokenizer: Any
    assistant_confidence_threshold: float | None
    assistant_early_exit: int | None
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    cache_implementation: str | None
    cache_config: Any
    max_cache_len: int | None
    prefill_chunk_size: int | None
    compile_config: Any
    disable_compile: bool | None
    custom_generate: Any
    synced_gpus: bool | None


class PromptSamplingOptions(SamplingOptions, total=False):
    """The options of sampling, for prompts that may have images."""

    images: Images | None


class GenerateOptions(PromptSamplingOptions, total=False):
    """The options of `generate`."""

    seed: int | None


class WatchedOptions(GenerateOptions, total=False):
    """The options of `stream`."""

    monitors: Sequence[Any]


class GenerationCacheOptions(WatchedOptions, total=False):
    """The options of `generate_with_cache`."""

    names_filter: Filter
    device: torch.device | str | None
    dtype: torch.dtype | None


class ExploreOptions(TypedDict, total=False):
    """The options of `model.explore`: see `explore.explore`."""

    images: Sequence[ImageLike]
    other_images: Sequence[ImageLike]
    server: bool | None
    port: int
    browser: bool
    height: int
    name: str | None
    saes: Any
    store: Any


class CompileKeywords(TypedDict, total=False):
    """The options of `model.compile`."""

    backend: str | Callable[..., Any]
    mode: str | None
    options: Mapping[str, Any] | None
    points: Filter
    limit: int
    patience: float | None


class LoadOptions(TypedDict, total=False):
    """Options of transformers' `from_pretrained`."""

    attn_implementation: str | None
    experts_implementation: str | None
    device_map: str | int | torch.device | Mapping[str, Any] | None
    max_memory: Mapping[Any, Any] | None
    offload_folder: str | PathLike[str] | None
    offload_buffers: bool
    quantization_config: Any
    distributed_config: Any
    device_mesh: Any
    tp_plan: str | Mapping[str, str] | None
    tp_size: int | None
    gguf_file: str | None
    revision: str | None
    code_revision: str | None
    subfolder: str
    variant: str | None
    cache_dir: str | PathLike[str] | None
    token: str | bool | None
    proxies: Mapping[str, str] | None
    local_files_only: bool
    force_download: bool
    trust_remote_code: bool
    use_safetensors: bool | None
    weights_only: bool
    disable_mmap: bool | None
    config: Any
    generation_config: Any
    state_dict: Mapping[str, Tensor] | None
    ignore_mismatched_sizes: bool
    key_mapping: Mapping[str, str] | None
    adapter_name: str | None
    adapter_kwargs: Mapping[str, Any] | None
    fusion_config: Mapping[str, Any] | None
    use_kernels: bool
    kernel_config: Any
    allow_all_kernels: bool

"""The native transformer: a toy model as a transformers model, made of plain modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from hookline.compat.transformer_lens._impl.native.initial import draw_weights
from hookline.compat.transformer_lens._impl.native.layers import (
    NativeAttention,
    NativeBlock,
    NormedEmbedding,
    make_norm,
    rotation,
    with_alibi,
)
from hookline.compat.transformer_lens._impl.native.native_config import NativeConfig
from hookline.errors import HooklineError

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class NativeTransformer(PreTrainedModel, GenerationMixin):
    """A transformer built from its config; see `hookline.compat.transformer_lens._impl.native`."""

    config: NativeConfig
    config_class = NativeConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _supports_sdpa = True
    _no_split_modules = ["NativeBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _tied_weights_keys = {"unembed.weight": "embed.weight"}  # noqa: RUF012
    _can_record_outputs = {"hidden_states": NativeBlock, "attentions": NativeAttention}  # noqa: RUF012

    def __init__(self, config: NativeConfig) -> None:
        super().__init__(config)
        assert config.output_size is not None  # set by the config
        learned = (config.max_position_embeddings, config.hidden_size)
        self.loss_type = "ForCausalLM"
        self.embed: nn.Embedding = (
            NormedEmbedding(config) if config.embedding_norm else nn.Embedding(config.vocab_size, config.hidden_size)
        )
        self.pos_embed = nn.Embedding(*learned) if config.positions == "standard" else None
        self.qk_pos_embed = nn.Embedding(*learned) if config.positions == "shortformer" else None
        self.blocks = nn.ModuleList(NativeBlock(config, layer) for layer in range(config.num_hidden_layers))
        last = config.normalization.replace("LN", "RMS") if config.final_rms else config.normalization
        self.ln_final = make_norm(config, last)
        self.unembed = nn.Linear(config.hidden_size, config.output_size)
        if isinstance(config.dtype, torch.dtype):  # the config converts a name
            nn.Module.to(self, config.dtype)
        self.generation_config.use_cache = config.is_causal
        self.post_init()

    def initialize_weights(self) -> None:
        """Initialize all weights that were not loaded; called by transformers."""
        draw_weights(self)

    def get_output_embeddings(self) -> nn.Linear:
        """The unembedding."""
        return self.unembed

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the unembedding."""
        self.unembed = new_embeddings

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool = False,
        output_hidden_states: bool = False,  # noqa: ARG002 (it is for the decorator)
    ) -> CausalLMOutputWithPast:
        """The output of a transformers language model; unknown options raise."""
        if (input_ids is None) == (inputs_embeds is None):
            raise HooklineError("pass either input_ids or inputs_embeds, not both")
        if output_attentions and self.config._attn_implementation != "eager":
            how = 'hook "attn.hook_pattern", or call model.set_attn_implementation("eager")'
            raise HooklineError(f"{self.config._attn_implementation} attention returns no patterns: {how}")
        stream: Tensor = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        seen = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + stream.shape[1], device=stream.device)[None]
        self._check_room(seen + stream.shape[1], position_ids)
        masks = self._masks(stream, attention_mask, cache, position_ids)
        if self.pos_embed is not None:
            stream = stream + self.pos_embed(position_ids)
        options: dict[str, Any] = {"past_key_values": cache}
        if self.qk_pos_embed is not None:
            options["qk_positions"] = self.qk_pos_embed(position_ids)
        if self.config.positions == "rotary":
            options["rotation"] = rotation(self.config, position_ids, stream.dtype)
        for block, kind in zip(self.blocks, self.config.layer_types or (), strict=True):
            stream = block(stream, attention_mask=masks[kind], **options)
        return self._output(stream, labels, cache, logits_to_keep)

    def _output(
        self, stream: Tensor, labels: Tensor | None, cache: Cache | None, logits_to_keep: int | Tensor
    ) -> CausalLMOutputWithPast:
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.unembed(self.ln_final(stream)[:, positions])
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.output_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _cache(self, cache: Cache | None, use_cache: bool) -> Cache | None:
        if not self.config.is_causal and (cache is not None or use_cache):
            raise HooklineError("bidirectional attention needs the whole text in every pass: use_cache=False")
        return DynamicCache(config=self.config) if cache is None and use_cache else cache

    def _masks(
        self,
        stream: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        cache: Cache | None,
        position_ids: Tensor,
    ) -> dict[str, Any]:
        """The attention mask for each type of layer, unless `generate` has made it."""
        kinds = list(dict.fromkeys(self.config.layer_types or ()))
        options: dict[str, Any] = {"past_key_values": cache, "position_ids": position_ids}
        if not isinstance(attention_mask, dict):
            mask = attention_mask
            attention_mask = {kind: _MASKS[kind](self.config, stream, mask, **options) for kind in kinds}  # type: ignore[misc]
        if self.config.positions != "alibi":
            return attention_mask
        return {kind: with_alibi(attention_mask[kind], self.config, kind, stream, cache) for kind in kinds}

    def _check_room(self, length: int, position_ids: Tensor) -> None:
        """Raise for positions beyond the learned ones."""
        room = self.config.max_position_embeddings
        is_learned = self.config.positions in ("standard", "shortformer")
        if is_learned and length > room and int(position_ids.max()) >= room:
            raise HooklineError(f"position {int(position_ids.max())} is out of range: max_position_embeddings={room}")


AutoConfig.register(NativeConfig.model_type, NativeConfig, exist_ok=True)
AutoModelForCausalLM.register(NativeConfig, NativeTransformer, exist_ok=True)

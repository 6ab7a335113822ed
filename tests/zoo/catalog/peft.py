"""Adapters of peft on a small Llama, a small GPT-2 and a small ViT."""

from collections.abc import Iterator
from typing import Any

import peft
import transformers
from torch import nn
from zoo.network import Built, Network, image, tokens

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

ADAPTERS: dict[str, Any] = {
    "LoRA": lambda names: peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False),
    "rsLoRA": lambda names: peft.LoraConfig(r=4, target_modules=names, use_rslora=True, init_lora_weights=False),
    "DoRA": lambda names: peft.LoraConfig(r=4, target_modules=names, use_dora=True, init_lora_weights=False),
    "LoRA with bias": lambda names: peft.LoraConfig(r=4, target_modules=names, lora_bias=True, init_lora_weights=False),
    "LoRA with dropout": lambda names: peft.LoraConfig(
        r=4, target_modules=names, lora_dropout=0.2, init_lora_weights=False
    ),
    "AdaLoRA": lambda names: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=names, total_step=10),
    "LoHa": lambda names: peft.LoHaConfig(r=4, target_modules=names, init_weights=False),
    "LoKr": lambda names: peft.LoKrConfig(r=4, target_modules=names, init_weights=False),
    "IA3": lambda names: peft.IA3Config(target_modules=names, feedforward_modules=[]),
    "OFT": lambda names: peft.OFTConfig(r=0, oft_block_size=8, target_modules=names),
    "BOFT": lambda names: peft.BOFTConfig(boft_block_size=8, target_modules=names),
    "HRA": lambda names: peft.HRAConfig(r=4, target_modules=names),
    "VeRA": lambda names: peft.VeraConfig(r=4, target_modules=names),
    "VB-LoRA": lambda names: peft.VBLoRAConfig(r=2, num_vectors=16, vector_length=8, target_modules=names),
    "FourierFT": lambda names: peft.FourierFTConfig(n_frequency=20, target_modules=names),
    "LN tuning": lambda names: peft.LNTuningConfig(),
    "Bone": lambda names: peft.BoneConfig(r=8, target_modules=names),
    "MiSS": lambda names: peft.MissConfig(r=8, target_modules=names),
    "RandLoRA": lambda names: peft.RandLoraConfig(r=4, target_modules=names),
    "C3A": lambda names: peft.C3AConfig(block_size=8, target_modules=names),
    "SHiRA": lambda names: peft.ShiraConfig(r=4, target_modules=names),
    "RoAd": lambda names: peft.RoadConfig(group_size=8, target_modules=names),
    "WaveFT": lambda names: peft.WaveFTConfig(n_frequency=20, target_modules=names),
    "GraLoRA": lambda names: peft.GraloraConfig(r=4, target_modules=names),
    "DeLoRA": lambda names: peft.DeloraConfig(r=4, target_modules=names),
    "prompt tuning": lambda names: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda names: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P-tuning": lambda names: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
    ),
    "adaption prompt": lambda names: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2),
    "CPT": lambda names: peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 2]
    ),
}


def llama() -> tuple[nn.Module, dict[str, Any], list[str]]:
    config = transformers.LlamaConfig(vocab_size=100, num_key_value_heads=2, max_position_embeddings=64, **SMALL)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(12, rows=2)}, ["q_proj", "v_proj"]


def gpt2() -> tuple[nn.Module, dict[str, Any], list[str]]:
    config = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(12, rows=2)}, ["c_attn", "c_proj"]


def vit() -> tuple[nn.Module, dict[str, Any], list[str]]:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)
    return (
        transformers.ViTForImageClassification(config),
        {"pixel_values": image(32, 2)},
        ["query", "value", "q_proj", "v_proj"],
    )


def build(adapter: str, model: Any) -> Built:
    """The model with the adapter on its projections."""
    module, inputs, names = model()
    return peft.get_peft_model(module, ADAPTERS[adapter](names)), (), inputs


def networks() -> Iterator[Network]:
    """One row per adapter and model."""
    for adapter in ADAPTERS:
        for model in (llama, gpt2, vit):
            yield Network(f"{adapter} {model.__name__}", lambda adapter=adapter, model=model: build(adapter, model))

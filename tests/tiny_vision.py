"""Tiny random models that see or hear, from their configs alone, with processors: nothing is downloaded.

`tiny_vision("llava")` gives the module, its processor, and keyword inputs for one forward pass. `VISION_LANGUAGE`,
`ENCODERS` and `SOUND` list the kinds. The numbers of layers differ from stack to stack, so that none is taken for
another; `module_of` and `inputs_of` give the module alone and inputs made by hand, for what needs no processor.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from devices import placed
from releases import without_torchvision
from tiny_models import randomise
from torch import Tensor
from transformers import PreTrainedModel

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 512}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEEN = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4}
SEEN |= {"image_size": 16, "patch_size": 4}
IMAGE, VIDEO, START, END, FAKE, GLOBAL = 4, 5, 6, 7, 8, 9
"""The ids of the tokens that stand for images, and around them."""

OUTSIDE = TEXT["vocab_size"]
"""The id of an image in Llama 3.2 Vision: the embedding has 8 rows more than the vocabulary that is predicted."""

QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN_IDS |= {"vision_start_token_id": START, "vision_end_token_id": END}
QWEN_TEXT = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN_SEEN = {"depth": 3, "hidden_size": 40, "num_heads": 5, "patch_size": 4, "spatial_merge_size": 2}
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48], [48, 16]]

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": QWEN_SEEN | {"embed_dim": 40, "hidden_size": 32},
        **QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": QWEN_SEEN
        | {"intermediate_size": 56, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": QWEN_TEXT | {"head_dim": 8},
        "vision_config": QWEN_SEEN
        | {"intermediate_size": 56, "out_hidden_size": 32, "num_position_embeddings": 16}
        | {"deepstack_visual_indexes": [0, 2]},
        **QWEN_IDS,
    },
    "llava": {
        "text_config": {"model_type": "llama"} | TEXT,
        "vision_config": {"model_type": "clip_vision_model"} | SEEN,
        **{"image_token_index": IMAGE, "image_seq_length": 16},
    },
    "llava_next": {
        "text_config": {"model_type": "mistral", "sliding_window": None} | TEXT,
        "vision_config": {"model_type": "clip_vision_model"} | SEEN,
        **{"image_token_index": IMAGE, "image_seq_length": 16, "image_grid_pinpoints": PINPOINTS},
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2"} | TEXT,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | SEEN,
        **{"image_token_index": IMAGE, "video_token_index": VIDEO, "image_grid_pinpoints": PINPOINTS},
        "vision_aspect_ratio": "anyres_max_9",
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", "head_dim": 8} | TEXT,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32} | SEEN,
        **{"image_token_index": IMAGE, "projection_dim": 32, "hidden_size": 32, "vocab_size": 200},
    },
    "gemma3": {
        "text_config": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
        | {"query_pre_attn_scalar": 8}
        | TEXT,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | SEEN,
        **{"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 4},
    },
    "idefics3": {
        "text_config": {"model_type": "llama"} | TEXT,
        "vision_config": SEEN,
        **{"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
    },
    "smolvlm": {
        "text_config": {"model_type": "llama"} | TEXT | {"num_hidden_layers": 3},
        "vision_config": SEEN | {"num_hidden_layers": 2},
        **{"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
    },
    "internvl": {
        "text_config": {"model_type": "qwen2"} | TEXT,
        "vision_config": SEEN | {"image_size": [16, 16], "patch_size": [4, 4]},
        **{"image_token_id": IMAGE, "image_seq_length": 4, "downsample_ratio": 0.5},
    },
    "mllama": {
        "text_config": TEXT
        | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "vision_config": {
            **{"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_global_layers": 4},
            **{"attention_heads": 4, "image_size": 16, "patch_size": 4, "max_num_tiles": 4},
            **{"intermediate_layers_indices": [0, 1], "vision_output_dim": 120},
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        "image_token_index": OUTSIDE,
    },
    "vit": SEEN,
    "clip": {"text_config": TEXT | {"num_hidden_layers": 2, "max_position_embeddings": 32}, "vision_config": SEEN},
    "siglip": {"text_config": TEXT | {"num_hidden_layers": 2, "max_position_embeddings": 32}, "vision_config": SEEN},
    "dinov2": {"hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_ratio": 2}
    | {"image_size": 16, "patch_size": 4},
    "whisper": {
        **{"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "vocab_size": 200, "num_mel_bins": 8},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    },
}
ENCODERS = ("vit", "clip", "siglip", "dinov2")
"""Those that take an image and no text; of CLIP and SigLIP, the half that sees."""
SOUND = ("whisper",)
VISION_LANGUAGE = tuple(name for name in CONFIGS if name not in ENCODERS + SOUND)


def module_of(name: str) -> PreTrainedModel:
    """The module alone, with random weights that matter."""
    import transformers

    config = transformers.CONFIG_MAPPING[name](**CONFIGS[name])
    makers = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel", "vit": "ViTModel", "dinov2": "Dinov2Model"}
    makers["whisper"] = "WhisperForConditionalGeneration"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in makers:
            config = config.vision_config if name in ("clip", "siglip") else config
            module = getattr(transformers, makers[name])(config)
        else:
            module = transformers.AutoModelForImageTextToText.from_config(config)
        randomise(module)
    return placed(module.eval())


def inputs_of(name: str, *, rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Keyword inputs for one forward pass, made by hand: in each row some text, one image, and more text."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def prompt(image: list[int]) -> dict[str, Tensor]:
        words = torch.randint(60, 190, (rows, 8), generator=generator)
        ids = torch.cat([torch.ones(rows, 1, dtype=torch.long), words[:, :3]], 1)
        ids = torch.cat([ids, torch.tensor([image] * rows), words[:, 3:]], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    match name:
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl":
            given = prompt([START, *[IMAGE] * 6, END])
            given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int()
            grid = torch.tensor([[1, 4, 6]] * rows)
            return given | {"pixel_values": noise(rows * 24, 3 * 2 * 4 * 4), "image_grid_thw": grid}
        case "llava" | "paligemma":
            given = prompt([IMAGE] * 16)
            if name == "paligemma":
                given["token_type_ids"] = torch.zeros_like(given["input_ids"])
            return given | {"pixel_values": noise(rows, 3, 16, 16)}
        case "llava_next" | "llava_onevision":  # 16 of the whole image, 2 x 1 tiles of 4 x 4, a newline in each row
            tokens = 16 + 4 * (8 + 1)
            return prompt([IMAGE] * tokens) | {
                "pixel_values": noise(rows, 3, 3, 16, 16),
                "image_sizes": torch.tensor([[16, 32]] * rows),
            }
        case "gemma3":
            given = prompt([START, *[IMAGE] * 4, END])
            given["token_type_ids"] = (given["input_ids"] == IMAGE).long()
            return given | {"pixel_values": noise(rows, 3, 16, 16)}
        case "idefics3" | "smolvlm":
            given = prompt([FAKE, GLOBAL, *[IMAGE] * 4, FAKE])
            mask = torch.ones(rows, 1, 16, 16, dtype=torch.bool)
            return given | {"pixel_values": noise(rows, 1, 3, 16, 16), "pixel_attention_mask": mask}
        case "internvl":
            return prompt([START, *[IMAGE] * 4, END]) | {"pixel_values": noise(rows, 3, 16, 16)}
        case "mllama":
            given = prompt([OUTSIDE])
            seen = torch.ones(rows, given["input_ids"].shape[1], 1, 4, dtype=torch.long)
            seen[..., 2:] = 0
            return given | {
                "pixel_values": noise(rows, 1, 4, 3, 16, 16),
                "aspect_ratio_ids": torch.full((rows, 1), 2),
                "aspect_ratio_mask": torch.tensor([1, 1, 0, 0]).expand(rows, 1, 4),
                "cross_attention_mask": seen,
            }
        case "whisper":
            ids = torch.randint(10, 190, (rows, 5), generator=generator)
            return {"input_features": noise(rows, 8, 32), "decoder_input_ids": ids}
    return {"pixel_values": noise(rows, 3, 16, 16)}


WORDS = "what colour is the circle square red green blue here there a and of image describe it in two Here are some"
WORDS += " original image crops to help you see better"
SPECIAL: dict[str, dict[str, str]] = {  # the ids IMAGE, VIDEO, START, END, FAKE, GLOBAL in each family's words
    "qwen": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    | {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
    "gemma3": {"image_token": "<image_soft_token>", "video_token": "<video>"}
    | {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "internvl": {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    | {"start_image_token": "<img>", "end_image_token": "</img>"},
    "mllama": {"image_token": "<|image|>"},
    "other": {"image_token": "<image>", "video_token": "<video>"},
}
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }} : {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def tokenizer_of(name: str) -> Any:
    """A tokenizer of whole words, with the special tokens of that family, which puts <bos> first."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    named = SPECIAL["qwen" if name.startswith("qwen") else name if name in SPECIAL else "other"]
    special = ["<pad>", "<bos>", "<eos>", "<unk>", *named.values()]
    special += [f"<unused{n}>" for n in range(FAKE - len(special))]
    special += ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|python_tag|>"]
    special += [f"<row_{row + 1}_col_{col + 1}>" for row in range(6) for col in range(6)]
    words = [*special, "\n", "?", ":", ".", "user", "assistant", *dict.fromkeys(WORDS.split())]
    if name == "mllama":
        words[special.index("<|image|>")] = "<unused_image>"
        words += [f"<more{n}>" for n in range(OUTSIDE - len(words))] + ["<|image|>"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]|\n"), behavior="removed", invert=True)
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    names = {f"{each}_token": f"<{each}>" for each in ("pad", "bos", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=inner, extra_special_tokens=named, **names)


def processor_of(name: str) -> Any:
    """The processor of a model, made here; of an encoder, its image processor; of a model of sound, None."""
    import transformers

    if name in SOUND:
        return None
    square = {"height": 16, "width": 16}
    sizes: dict[str, dict[str, Any]] = {
        "Qwen2VL": {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 64 * 30}},
        "CLIP": {"size": {"shortest_edge": 16}, "crop_size": square},
        "LlavaNext": {"size": {"shortest_edge": 16}, "crop_size": square, "image_grid_pinpoints": PINPOINTS},
        "LlavaOnevision": {"size": square, "image_grid_pinpoints": PINPOINTS},
        "Siglip": {"size": square, "image_seq_length": 16},
        "Gemma3": {"size": square},
        "Idefics3": {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}},
        "SmolVLM": {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}},
        "GotOcr2": {"size": square, "crop_to_patches": True, "max_patches": 6},
        "Mllama": {"size": square, "max_image_tiles": 4},
        "ViT": {"size": square},
        "Bit": {"size": {"shortest_edge": 18}, "crop_size": square},
    }
    kind, maker, options = {
        "qwen2_vl": ("Qwen2VL", "Qwen2VLProcessor", {}),
        "qwen2_5_vl": ("Qwen2VL", "Qwen2_5_VLProcessor", {}),
        "qwen3_vl": ("Qwen2VL", "Qwen3VLProcessor", {}),
        "llava": (
            *("CLIP", "LlavaProcessor"),
            {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        "llava_next": (
            *("LlavaNext", "LlavaNextProcessor"),
            {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        "llava_onevision": (
            *("LlavaOnevision", "LlavaOnevisionProcessor"),
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        ),
        "paligemma": ("Siglip", "PaliGemmaProcessor", {}),
        "gemma3": ("Gemma3", "Gemma3Processor", {"image_seq_length": 4}),
        "idefics3": ("Idefics3", "Idefics3Processor", {"image_seq_len": 4}),
        "smolvlm": ("SmolVLM", "SmolVLMProcessor", {"image_seq_len": 4}),
        "internvl": ("GotOcr2", "InternVLProcessor", {"image_seq_length": 4}),
        "mllama": ("Mllama", "MllamaProcessor", {}),
        **{"vit": ("ViT", "", {}), "clip": ("CLIP", "", {}), "siglip": ("Siglip", "", {}), "dinov2": ("Bit", "", {})},
    }[name]
    with without_torchvision():
        seen = getattr(transformers, f"{kind}ImageProcessorPil")(**sizes[kind])
    if not maker:
        return seen
    if name == "smolvlm":
        from transformers.models.smolvlm import processing_smolvlm

        processing_smolvlm.num2words = processing_smolvlm.num2words or str  # it is only for the times in videos
    made = getattr(transformers, maker)
    if "video_processor" in made.get_attributes():
        made = _without_videos(made)
        options = options | {"video_processor": SimpleNamespace(num_frames=1, fps=1)}
    processor = made(image_processor=seen, tokenizer=tokenizer_of(name), **options)
    place = place_of(processor)
    place = f"<|vision_start|>{place}<|vision_end|>" if name.startswith("qwen") else place
    processor.chat_template = CHAT.replace("PLACE", place)
    return processor


def place_of(processor: Any) -> str:
    """What stands for an image in a prompt: for Gemma 3, whose `image_token` depends on the version, its beginning."""
    return getattr(processor, "boi_token", None) or processor.image_token


def _without_videos(processor: Any) -> Any:
    """A class of processors that is content with any processor of videos: real ones need torchvision."""

    def check(self: Any, name: str, given: Any) -> type:
        return (
            type(given) if name == "video_processor" else processor.check_argument_for_proper_class(self, name, given)
        )

    return type(processor.__name__, (processor,), {"check_argument_for_proper_class": check})


def tiny_vision(name: str) -> tuple[PreTrainedModel, Any, dict[str, Tensor]]:
    """A module, its processor (None for sound), and keyword inputs for one forward pass."""
    return module_of(name), processor_of(name), inputs_of(name)

"""The processor of tinysight: a byte-level tokenizer with the words of its questions, and an image processor."""

from __future__ import annotations

import sight_tasks
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

from hookline.demo.tinysight import PATCH, SIDE

BOS, EOS, PAD, IMAGE = SPECIAL = ("<s>", "</s>", "<pad>", "<image>")
CONTEXT = 256
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- 'USER: ' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- ' ' -}}
{%- else -%}
{{- 'ASSISTANT: ' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""


def build() -> LlavaProcessor:
    """Build the processor: images are resized to 48×48 pixels, and `<image>` expands to 36 image tokens."""
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: all bytes, and every word of the questions and answers as one token."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [part for text in sight_tasks.words() for part in text.split(IMAGE)]
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = dict.fromkeys([*SPECIAL, *alphabet, *sorted(words)])
    bpe = Tokenizer(models.BPE(vocab={entry: at for at, entry in enumerate(entries)}, merges=[], ignore_merges=True))
    bpe.pre_tokenizer, bpe.decoder = splitter, decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )

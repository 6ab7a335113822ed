"""Train tinysight: `python training/sight_train.py`, then `python training/sight_check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import sight_pairs
import sight_processor
import sight_rows
import sight_tasks
import torch
import torch.nn.functional as F
import typer
from sight_check import ASSETS
from sight_pairs import Pair
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerBase,
)

from hookline.demo.tinysight import COLOURS, GRID, KINDS, PATCH, SIDE

PEAK_RATE = 2e-3
WARM_UP = 200
QUESTIONS = 6


def new_model(words: PreTrainedTokenizerBase) -> LlavaForConditionalGeneration:
    """Return a LLaVA with random weights: CLIP (3 layers, 4 heads) and Llama (4 layers, 8 heads, 4 key/value heads)."""
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=96,
    )
    special = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    text = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=sight_processor.CONTEXT,
        pad_token_id=words.pad_token_id,
        **special,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=words.convert_tokens_to_ids(sight_processor.IMAGE),
        image_seq_length=GRID**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(pad_token_id=words.pad_token_id, **special)
    return model


class Naming(nn.Module):
    """Linear probes for the kind and the color in each patch. They train the vision tower and are then discarded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Linear(width, 1 + len(KINDS))
        self.colour = nn.Linear(width, 1 + len(COLOURS))

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of the probes; labels: [image, kind or color, patch]."""
        kinds, colours = self.kind(features), self.colour(features)
        return F.cross_entropy(kinds.mT, labels[:, 0]) + F.cross_entropy(colours.mT, labels[:, 1])


@dataclass(frozen=True)
class Images:
    """Pairs of images, [pair, image, channel, y, x], and the labels of their patches."""

    pairs: list[Pair]
    drawn: Tensor
    labels: Tensor

    def of(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Return the first images of these pairs, then the second ones, as model inputs, and their labels."""
        drawn, labels = self.drawn[chosen], self.labels[chosen]
        return drawn.transpose(0, 1).flatten(0, 1) / 127.5 - 1, labels.transpose(0, 1).flatten(0, 1)


def draw(seed: int, count: int, device: str) -> Images:
    """Draw `count` pairs on all CPU cores."""
    rng = Random(seed)
    pairs = [sight_pairs.pair(rng) for _ in range(count)]
    with ProcessPoolExecutor() as workers:
        drawn = np.stack(list(workers.map(Pair.pixels, pairs, chunksize=500)))
    labels = np.stack([pair.labels() for pair in pairs])
    return Images(pairs, torch.from_numpy(drawn).to(device), torch.from_numpy(labels).to(device))


def seeing(
    model: LlavaForConditionalGeneration, naming: Naming, images: Images, size: int, seed: int
) -> Iterator[Tensor]:
    """Yield the losses of the probes on batches, forever."""
    rng = Random(seed)
    while True:
        pixels, labels = images.of(rng.choices(range(len(images.pairs)), k=size))
        yield naming.loss(model.model.vision_tower(pixels).last_hidden_state[:, 1:], labels)


def answering(
    model: LlavaForConditionalGeneration, naming: Naming, images: Images, size: int, seed: int
) -> Iterator[Tensor]:
    """Yield the losses of the whole model on questions about mixed images plus those of the probes, forever."""
    rng = Random(seed)
    writer = sight_rows.Writer(sight_processor.tokenizer())
    while True:
        chosen = rng.choices(range(len(images.pairs)), k=size)
        mixed = [sight_pairs.mix(rng, images.pairs[at]) for at in chosen]
        asked = [[sight_tasks.question(rng, shapes) for _ in range(QUESTIONS)] for shapes, _ in mixed]
        rows = writer.batch(rng, asked, model.device)
        is_second = torch.tensor([which for _, which in mixed], device=model.device)
        pixels, labels = images.of(chosen)
        yield answer_loss(model, naming, pixels, labels, is_second, rows)


def answer_loss(
    model: LlavaForConditionalGeneration,
    naming: Naming,
    pixels: Tensor,
    labels: Tensor,
    is_second: Tensor,
    rows: sight_rows.Rows,
) -> Tensor:
    """Return the loss on the answers for mixtures of two images, and the loss of the probes."""
    named = []

    def mixed(_module: nn.Module, args: tuple[Tensor], features: Tensor) -> Tensor:
        named.append(naming.loss(args[0], labels))
        first, second = features.chunk(2)
        return torch.where(is_second[:, :, None], second, first)

    handle = model.model.multi_modal_projector.register_forward_hook(mixed)
    try:
        logits = model(
            input_ids=rows.tokens,
            pixel_values=pixels,
            attention_mask=rows.visible,
            position_ids=rows.positions,
            use_cache=False,
        ).logits
    finally:
        handle.remove()
    loss = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), ignore_index=sight_rows.NO_TARGET)
    return loss + named[0]


def fit(parts: nn.Module, losses: Iterator[Tensor], steps: int) -> None:
    """Train in place, with linear warmup and decay of the learning rate."""
    weights = [weight for weight in parts.parameters() if weight.requires_grad]
    matrices, vectors = ([w for w in weights if (w.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP), 1.0)
    )
    bar = tqdm(range(steps), unit="step", mininterval=5)
    for step in bar:
        loss = next(losses)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def main(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = ASSETS,
    steps: Annotated[int, typer.Option(help="Number of batches of questions.")] = 1_500,
    first: Annotated[int, typer.Option(help="Number of batches to train the vision tower on first.")] = 3_000,
    size: Annotated[int, typer.Option(help="Number of pairs of images per batch.")] = 32,
    pairs: Annotated[int, typer.Option(help="Number of pairs of images to draw.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed for the images, the questions and the initial weights.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default the GPU, if there is one.")] = "",
) -> None:
    """Build the processor, train the model and write both as a Hugging Face folder."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    processor = sight_processor.build()
    model = new_model(processor.tokenizer).to(device)
    naming = Naming(model.config.vision_config.hidden_size).to(device)
    images = draw(seed, pairs, device)
    typer.echo(f"{model.num_parameters():,} parameters, {2 * pairs:,} images, on {device}")
    fit(nn.ModuleList([model.model.vision_tower, naming]), seeing(model, naming, images, size, seed), first)
    fit(nn.ModuleList([model, naming]), answering(model, naming, images, size, seed), steps)
    model.cpu().save_pretrained(out)
    processor.save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)

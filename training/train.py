"""Train tinyworld: `python training/train.py`, then `python training/check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import corpus
import tokenizer
import torch
import torch.nn.functional as F
import typer
from check import ASSETS
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

PEAK_RATE = 2e-3
WARM_UP = 300


def new_model(words: PreTrainedTokenizerBase) -> GPT2LMHeadModel:
    """Return a GPT-2 with 4 layers, 8 heads and random weights."""
    end = words.eos_token_id
    config = GPT2Config(
        vocab_size=len(words),
        n_positions=corpus.CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = GPT2LMHeadModel(config)
    # As in GPT-2, the padding token is only set for generation: otherwise a BOS token causes a warning about a mask.
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    return model


def batches(rows: corpus.Rows, size: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens, targets and attention masks forever, in a new order in every epoch."""
    tokens, targets, owners = (torch.tensor(part, device=device) for part in (rows.tokens, rows.targets, rows.owners))
    order = torch.Generator().manual_seed(seed)
    earlier = torch.ones(corpus.CONTEXT, corpus.CONTEXT, dtype=torch.bool, device=device).tril()
    while True:
        for chosen in torch.randperm(len(tokens), generator=order).to(device).split(size):
            owner = owners[chosen]
            visible = (owner[:, None, :, None] == owner[:, None, None, :]) & earlier
            yield tokens[chosen], targets[chosen], visible


def optimizer_of(model: GPT2LMHeadModel) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def rate(step: int, steps: int) -> float:
    """Return the fraction of the peak learning rate: linear warmup, then linear decay."""
    return min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP), 1.0)


def train(model: GPT2LMHeadModel, rows: corpus.Rows, steps: int, size: int, seed: int) -> None:
    """Train in place."""
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    feed = batches(rows, size, seed, str(model.device))
    bar = tqdm(range(steps), unit="step", mininterval=2)
    for step in bar:
        tokens, targets, visible = next(feed)
        logits = model(tokens, attention_mask=visible, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=corpus.NO_TARGET)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def main(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = ASSETS,
    steps: Annotated[int, typer.Option(help="Number of batches.")] = 3_000,
    size: Annotated[int, typer.Option(help="Number of rows of 128 tokens per batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed for the text, its order and the initial weights.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default the GPU, if there is one.")] = "",
) -> None:
    """Build the tokenizer, train the model and write both as a Hugging Face folder."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    words = tokenizer.build()
    model = new_model(words).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    texts = corpus.documents(words, seed, n_texts=400_000, n_repeats=30_000)
    rows = corpus.pack(texts, words.eos_token_id)
    typer.echo(f"{model.num_parameters():,} parameters, {len(rows.tokens):,} rows, on {model.device}")
    train(model, rows, steps, size, seed)
    model.cpu().save_pretrained(out)
    words.save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)

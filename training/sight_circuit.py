"""Where tinysight's decoder has the color of a shape: `python training/sight_circuit.py` patches layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import sight_check
import sight_tasks
import torch
import typer
from torch import Tensor

import hookline


def moved(folder: Path, count: int) -> dict[str, list[float]]:
    """Return how often patching changes the answer to the other image's color, by positions and by layer.

    The two images of a pair differ in the color of the shape that the question is about.
    """
    module, processor = sight_check.load(folder)
    model: Any = hookline.hook(module, processor.tokenizer)
    both = [list(some) for some in zip(*sight_check.recoloured(count), strict=True)]
    batch, other = (sight_check.inputs(processor, examples, sight_tasks.prompt) for examples in both)
    colours = sight_check.answers(processor, both[1])
    places = positions(batch["input_ids"], processor.image_token_id, both[0])
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        _, cache = model.run_with_cache(**other, names_filter=names)

    @torch.no_grad()
    def share(name: str, where: Tensor) -> float:
        def swap(resid: Tensor, hook: Any) -> Tensor:
            return torch.where(where[:, :, None], cache[hook.name], resid)

        said = model.run_with_hooks(**batch, fwd_hooks=[(name, swap)])[:, -1].argmax(-1)
        return (said == colours).float().mean().item()

    return {place: [share(name, where) for name in names] for place, where in places.items()}


def positions(tokens: Tensor, image_token: int, examples: list[sight_check.Example]) -> dict[str, Tensor]:
    """Return groups of positions as masks: [row, position]."""
    is_image = tokens == image_token
    on_shape, on_others = torch.zeros_like(is_image), torch.zeros_like(is_image)
    asked = torch.stack([sight_check.covered([example.asked]) for example in examples])
    on_any = torch.stack([sight_check.covered(example.shapes) for example in examples])
    on_shape[is_image] = asked.flatten()
    on_others[is_image] = (on_any & ~asked).flatten()
    last = torch.zeros_like(is_image)
    last[:, -1] = True
    return {
        "the shape's image tokens": on_shape,
        "other shapes' image tokens": on_others,
        "the background's image tokens": is_image & ~on_shape & ~on_others,
        "the question": ~is_image & ~last,
        "the last position": last,
    }


def main(
    folder: Annotated[Path, typer.Argument(help="The model's folder.")] = sight_check.ASSETS,
    count: Annotated[int, typer.Option(help="Number of pairs of images.")] = 300,
) -> None:
    """Print the table."""
    found = moved(folder, count)
    layers = len(next(iter(found.values())))
    typer.echo(f"{'patched before layer':<28}" + "".join(f"{layer:>8}" for layer in range(layers)))
    for place, shares in found.items():
        typer.echo(f"{place:<28}" + "".join(f"{share:>8.1%}" for share in shares))


if __name__ == "__main__":
    typer.run(main)

"""Center weights: those that write to the stream, if every reader subtracts the mean, and those of the unembedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine import undo
from hookline.errors import HooklineError
from hookline.transformer.anatomy import Block, Stack
from hookline.transformer.norms import norm_of
from hookline.transformer.precision import upcast
from hookline.values.structures import tensors_in
from hookline.weights.matrices import is_reversed, linear
from hookline.weights.processing.readers import path_of
from hookline.weights.processing.swaps import Swaps, rounding

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints


def center_writers(points: ModelPoints, swaps: Swaps, run: Callable[[], Tensor]) -> None:
    """Center everything that writes to the stream, and check that the stream then has mean 0 everywhere."""
    for stack in points.anatomy.stacks:
        _check_reading(points, stack)
        for embed in (stack.embed, stack.pos_embed):
            weight = embed._parameters.get("weight") if embed is not None else None
            if embed is not None and weight is not None:
                swaps.put(embed, "weight", _centered(weight))
        for index, block in enumerate(stack.blocks):
            for module in _writers(block, f"{stack.name}.{index}"):
                _center_linear(points.root, module, swaps)
    _check_stream(points, run)


def _check_reading(points: ModelPoints, stack: Stack) -> None:
    """Raise unless everything that reads the stream subtracts its mean."""
    kind = stack.config.model_type
    if stack.is_post_norm:
        raise HooklineError(f"{kind} normalizes the stream itself, so centered writes do not stay centered")
    for index, block in enumerate(stack.blocks):
        if block.ln1_post is not None or block.ln2_post is not None:
            raise HooklineError(f"{kind} has norms after attention or MLP, whose output cannot be centered")
        reads_itself = stack.architecture.parallel or not block.has_mlp  # then there need not be a second norm
        needed = [block.ln1, *([] if reads_itself and block.ln2 is None else [block.ln2])]
        for norm in [*needed, *([block.cross.norm] if block.cross is not None else [])]:
            _check_norm(points, norm, f"in {stack.name}.{index}")
    _check_norm(points, stack.ln_final, "at the end")


def _check_norm(points: ModelPoints, module: nn.Module | None, where: str) -> None:
    norm = norm_of(module, points.anatomy.width)
    if module is None or norm is None:
        raise HooklineError(f"{where} the stream is read without a norm of a known form, so its mean is not subtracted")
    if not norm.subtracts_mean:
        raise HooklineError(f"{path_of(points.root, module)} ({type(module).__name__}) does not subtract the mean")


def _writers(block: Block, name: str) -> Iterator[nn.Module]:
    if block.o is None:
        raise HooklineError(f"the attention of {name} has no known output projection")
    yield block.o
    if block.cross is not None and block.cross.o is not None:
        yield block.cross.o
    if block.mlp_out is not None:
        yield block.mlp_out
    elif block.mlp is not None:
        raise HooklineError(f"the MLP of {name} has no single output projection (experts?)")


def _center_linear(root: nn.Module, module: nn.Module, swaps: Swaps) -> None:
    try:
        matrix, bias = linear(module)
    except HooklineError as error:
        raise HooklineError(f"{path_of(root, module)} writes to the stream: {error}") from error
    new = _centered(matrix)
    swaps.put(module, "weight", new if is_reversed(module) else new.T)
    if bias is not None:
        swaps.put(module, "bias", _centered(bias))


def _centered(x: Tensor) -> Tensor:
    wide = upcast(x.detach())
    return wide - wide.mean(-1, keepdim=True)


def _check_stream(points: ModelPoints, run: Callable[[], Tensor]) -> None:
    """Raise unless the stream has mean 0 at the input of every layer and at the end."""
    means: dict[str, float] = {}
    sites: dict[str, nn.Module | None] = {}
    for stack in points.anatomy.stacks:
        sites |= {f"{stack.name}.{n}": block.module for n, block in enumerate(stack.blocks)}
        sites[f"the end of {stack.name}"] = stack.ln_final

    def look(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(tensor for tensor in reversed([*tensors_in(args or kwargs)]) if tensor.is_floating_point()).double()
        means[name] = float(x.mean(-1).norm() * x.shape[-1] ** 0.5 / x.norm())

    with undo.TorchHooks(before=[(module, partial(look, name)) for name, module in sites.items()]):
        tolerance = rounding(run().dtype)
    unseen = [name for name in sites if name not in means]
    if unseen:
        raise HooklineError(f"{unseen[0]} was not called on the example, so the mean of the stream there is not known")
    off = [name for name, mean in means.items() if mean > tolerance]
    if off:
        raise HooklineError(f"the stream is not centered at {off[0]}: something else writes to it before that")


def center_unembed(points: ModelPoints, swaps: Swaps, run: Callable[[], Tensor]) -> None:
    """Subtract the mean over the vocabulary from the unembedding, which shifts all logits of a position alike."""
    head = points.anatomy.unembed
    if head is None:
        raise HooklineError("this model has no unembedding: it was loaded without its language-model head")
    linear(head)  # raises if it is not a plain linear module
    _check_shift(points, head, run)
    _center_linear(points.root, head, swaps)


def _check_shift(points: ModelPoints, head: nn.Module, run: Callable[[], Tensor]) -> None:
    """Raise unless adding a large constant to the output of the unembedding leaves the probabilities unchanged."""
    before = run().double()
    with undo.TorchHooks(after=[(head, lambda _module, _args, output: output.float() + 100)]):
        after = run().double()
    if torch.equal(before, after):
        raise HooklineError(f"the logits do not depend on {path_of(points.root, head)}")
    one, two = before.log_softmax(-1), after.log_softmax(-1)
    if not float((one - two).norm()) <= 0.05 * float((one - one.mean(-1, keepdim=True)).norm()):
        raise HooklineError(
            f"logits of {points.anatomy.kind} are not proportional to those of its unembedding (a soft cap?)"
        )

"""Centring: what writes to the stream, without the mean that every reader subtracts; the unembedding, without what no
probability depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine.structures import tensors_in
from hookline.engine.torch_hooks import TorchHooks
from hookline.errors import HooklineError
from hookline.transformer.anatomy import Block, Stack
from hookline.transformer.norms import norm_of
from hookline.weights.matrices import is_reversed, linear
from hookline.weights.processing.readers import path_of
from hookline.weights.processing.swaps import Swaps

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints


def center_writers(points: ModelPoints, swaps: Swaps, run: Callable[[], Any], tolerance: float) -> None:
    """Everything that writes to the stream writes vectors of mean 0; the stream is seen to have mean 0 everywhere."""
    for stack in points.anatomy.stacks:
        _check_reading(points, stack)
        for embed in (stack.embed, stack.pos_embed):
            weight = embed._parameters.get("weight") if embed is not None else None
            if embed is not None and weight is not None:
                swaps.put(embed, "weight", _centered(weight))
        for index, block in enumerate(stack.blocks):
            for module in _writers(block, f"{stack.name}.{index}"):
                _center_linear(points.root, module, swaps)
    _check_stream(points, run, tolerance)


def _check_reading(points: ModelPoints, stack: Stack) -> None:
    """Everything that reads the stream must subtract its mean."""
    kind = stack.config.model_type
    if stack.is_post_norm:
        raise HooklineError(f"{kind} norms the stream itself: what is written to it does not stay")
    for index, block in enumerate(stack.blocks):
        if block.ln1_post is not None or block.ln2_post is not None:
            raise HooklineError(f"{kind} has norms after its attention or MLP: what they write cannot be centered")
        needed = [block.ln1, *([] if stack.architecture.parallel or not block.has_mlp else [block.ln2])]
        needed += [block.ln2] if block.ln2 is not None else []
        needed += [block.cross.norm] if block.cross is not None else []
        for norm in needed:
            _check_norm(points, norm, f"in {stack.name}.{index}")
    _check_norm(points, stack.ln_final, "at the end")


def _check_norm(points: ModelPoints, module: nn.Module | None, where: str) -> None:
    norm = norm_of(module, points.anatomy.width)
    if module is None or norm is None:
        raise HooklineError(f"{where} the stream is read without a norm of a known form: its mean is not subtracted")
    if not norm.subtracts_mean:
        raise HooklineError(
            f"{path_of(points.root, module)} ({type(module).__name__}) does not subtract the mean of the stream: what "
            f"is written to it cannot be centered"
        )


def _writers(block: Block, name: str) -> Iterator[nn.Module]:
    if block.o is None:
        raise HooklineError(f"what {name}'s attention writes to the stream is not known as one linear map")
    yield block.o
    if block.cross is not None and block.cross.o is not None:
        yield block.cross.o
    if block.mlp_out is not None:
        yield block.mlp_out
    elif block.mlp is not None:
        raise HooklineError(f"what {name}'s MLP writes to the stream is not one linear map (experts?)")


def _center_linear(root: nn.Module, module: nn.Module, swaps: Swaps) -> None:
    try:
        matrix, bias = linear(module)
    except HooklineError as error:
        raise HooklineError(f"{path_of(root, module)} writes to the stream: {error}") from error
    new = _centered(matrix)
    swaps.put(module, "weight", new if is_reversed(module) else new.T)
    if bias is not None:
        swaps.put(module, "bias", _centered(bias))


def _centered(x: Tensor, axis: int = -1) -> Tensor:
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    return wide - wide.mean(axis, keepdim=True)


def _check_stream(points: ModelPoints, run: Callable[[], Any], tolerance: float) -> None:
    means: dict[str, float] = {}

    def look(name: str) -> Callable[..., None]:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next(each for each in reversed([*tensors_in(args or kwargs)]) if each.is_floating_point()).double()
            means[name] = float(x.mean(-1).norm() * x.shape[-1] ** 0.5 / x.norm())

        return before

    sites = {
        f"{stack.name}.{n}": block.module for stack in points.anatomy.stacks for n, block in enumerate(stack.blocks)
    }
    sites |= {
        f"the end of {stack.name}": stack.ln_final for stack in points.anatomy.stacks if stack.ln_final is not None
    }
    with TorchHooks(before=[(module, look(name)) for name, module in sites.items()]):
        run()
    unseen = [name for name in sites if name not in means]
    if unseen:
        raise HooklineError(f"{unseen[0]} is not run by every input: the mean of the stream was not seen there")
    off = [name for name, mean in means.items() if mean > tolerance]
    if off:
        raise HooklineError(f"the stream has a mean at {off[0]} all the same: something else writes to it before that")


def center_unembed(points: ModelPoints, swaps: Swaps, run: Callable[[], Tensor]) -> None:
    """The unembedding without its mean over the vocabulary: each position's logits move by one number."""
    head = points.anatomy.unembed
    if head is None:
        raise HooklineError("this model has no unembedding: it was loaded without its language-model head")
    matrix, bias = linear(head)
    _check_shift(points, head, run)
    new = _centered(matrix)
    swaps.put(head, "weight", new if is_reversed(head) else new.T)
    if bias is not None:
        swaps.put(head, "bias", _centered(bias))


def _check_shift(points: ModelPoints, head: nn.Module, run: Callable[[], Tensor]) -> None:
    """One number more on everything that the unembedding gives, and a large one, must change no probability."""
    before = run().double()
    with TorchHooks(after=[(head, lambda _module, _args, output: output.float() + 100)]):
        after = run().double()
    if torch.equal(before, after):
        raise HooklineError(f"{path_of(points.root, head)} was not seen to give the logits")
    one, two = before.log_softmax(-1), after.log_softmax(-1)
    if not float((one - two).norm()) <= 0.05 * float((one - one.mean(-1, keepdim=True)).norm()):
        raise HooklineError(
            f"the logits of {points.anatomy.kind} are not what its unembedding gives times a number (a soft cap?): "
            f"moving them by one number changes the rest"
        )

"""Tensor-parallel models in several processes, compared with the same models in one.

`run(worker, processes, …)` starts the processes, which share one group; `differences(kind, folder)` is called in each.
"""

from __future__ import annotations

import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from releases import transformers_is_before
from torch import Tensor, multiprocessing

import hookline
from hookline import HookedModel, HooklineError
from hookline.transformer.outputs import outcome

IDS = torch.tensor([[5, 17, 42, 7, 3, 9, 22], [11, 4, 8, 30, 2, 6, 19]])
CLOSE = 1e-5  # of the largest value: sums over processes are added in another order
EXPERTS = (
    *("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"),
    *("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
)
needs_plans = pytest.mark.skipif(
    transformers_is_before("5.19"), reason="transformers before 5.19 shards models in another way, which is refused"
)
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out", "W_E", "W_U", "b_Q", "b_O", "b_in", "b_U")


def run(worker: Callable[..., Any], processes: int, *args: Any, is_lost: bool = False) -> list[Any]:
    """What `worker(*args)` returns in each of several processes of one group; `is_lost` if some may end before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # imports what takes seconds once for all
    context.set_forkserver_preload(["torch.distributed.tensor", "transformers.models.llama.modeling_llama"])
    answers = context.SimpleQueue()
    given = (processes, port, answers, worker, args, is_lost)
    multiprocessing.start_processes(_process, given, nprocs=processes, start_method="forkserver")
    found = []
    while not answers.empty():
        found.append(answers.get())
    assert is_lost or len(found) == processes
    return [value for _, value in sorted(found)]


def _process(
    rank: int, processes: int, port: int, answers: Any, worker: Callable[..., Any], args: Any, is_lost: bool
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    patience = timedelta(seconds=20) if is_lost else None
    dist.init_process_group("gloo", rank=rank, world_size=processes, timeout=patience)
    answers.put((rank, worker(*args)))
    if is_lost:
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


def pair(kind: str, folder: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[HookedModel, HookedModel]:
    """A tiny model in one process, and the same model sharded over all."""
    whole, sharded = both(kind, folder, dtype, **sizes)
    check_sharded(whole, sharded)
    return tuple(hookline.hook(each) for each in (whole, sharded))  # type: ignore[return-value]


def both(kind: str, folder: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Any, Any]:
    """The models of transformers, without hookline."""
    from transformers.distributed import DistributedConfig

    path = Path(folder) / kind
    model = tiny_model(kind, **sizes)
    if dist.get_rank() == 0:
        model.save_pretrained(path)
    dist.barrier()
    config = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    whole = type(model).from_pretrained(path, dtype=dtype).eval()
    with _as_its_own():
        return whole, type(model).from_pretrained(path, dtype=dtype, distributed_config=config).eval()


def tiny_model(kind: str, **sizes: Any) -> Any:
    """A tiny model that transformers can split: the kernels of experts need rows of 16 bytes in every process."""
    known = tiny_models.config(kind)
    sizes = {name: 48 for name in EXPERTS if hasattr(known, name)} | sizes
    if (text := getattr(known, "text_config", None)) is not None:
        row = tiny_models.ROWS.get(kind, {}).get("text_config", {})
        sizes["text_config"] = row | {name: 48 for name in EXPERTS if hasattr(text, name)}
    return (tiny_models.causal_lm if kind in tiny_models.CAUSAL else tiny_models.encoder)(kind, **sizes)


def has_plan(kind: str) -> bool:
    """Whether transformers knows how to split a kind of model."""
    config: Any = tiny_models.config(kind)
    configs = (config, getattr(config, "text_config", None))
    return any(getattr(each, "base_model_tp_plan", None) for each in configs)


class NotShardedError(Exception):
    """transformers itself cannot run a model in parts, or not with the same result."""


@contextmanager
def _as_its_own() -> Iterator[None]:
    """Raise errors as those of transformers, with the line of its code."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((each for each in reversed(frames) if "/transformers/" in each.filename), frames[-1])
        where = f"{Path(place.filename).name}:{place.lineno}"
        said = str(error).strip().splitlines() or [""]
        raise NotShardedError(f"{type(error).__name__} in {where}: {said[0]}") from error


def check_sharded(whole: Any, sharded: Any) -> None:
    """Raise if the sharded model is not the whole one, without any hooks."""
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            with _as_its_own():
                got = outcome(sharded(IDS))
                if mode is torch.enable_grad:
                    got.sum().backward()
            found = list(unlike("logits", outcome(whole(IDS)), got))
            if found:
                raise NotShardedError(found[0])
    sharded.zero_grad()


def all_differences(kinds: list[str], folder: str) -> dict[str, list[str]]:
    """What differs, by kind; `["refused: …"]` if the sharded model cannot be hooked."""
    found = {}
    for kind in kinds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[kind] = list(differences(*pair(kind, folder)))
        except NotShardedError as error:
            found[kind] = [f"transformers: {error}"]
        except HooklineError as error:
            found[kind] = [f"refused: {error}"]
        except Exception:
            found[kind] = [traceback.format_exc(limit=-3)]
    return found


def differences(whole: HookedModel, sharded: HookedModel, *, verifies: bool = True) -> Iterator[str]:
    """Everything in which the sharded model differs from the whole one."""
    if not isinstance(whole, HookedModel):
        yield "no classic points"
        return
    with torch.no_grad():
        (logits, cache), (other_logits, other) = whole.run_with_cache(IDS), sharded.run_with_cache(IDS)
        yield from unlike("logits", logits, other_logits)
        if list(cache) != list(other):
            yield f"points: {set(cache) ^ set(other)}"
        yield from _unlike_local(cache, sharded)
        for name in cache:
            yield from unlike(name, cache[name], other[name])
            if cache[name].is_floating_point():
                edited = [_outcome(model, name) for model in (whole, sharded)]
                found = list(unlike(f"{name}, edited", *edited))
                yield from found if found and not _is_a_tie(whole, sharded, name) else ()
        if whole.module.can_generate():
            ids = [model.generate(IDS, max_new_tokens=4, do_sample=False) for model in (whole, sharded)]
            yield from unlike("generate", *ids)
    yield from _unlike_gradients(whole, sharded)
    for name in WEIGHTS:
        try:
            expected = getattr(whole, name)
        except (HooklineError, RuntimeError):  # of layers of different widths
            continue
        yield from unlike(name, expected, getattr(sharded, name))
    if not verifies:
        return
    yield from (
        f"verify: {line}" for line in str(sharded.verify()).splitlines() if "unproved" in line or "FAIL" in line
    )


def _unlike_local(cache: Mapping[str, Tensor], sharded: HookedModel) -> Iterator[str]:
    """What differs between this process's parts and the same indices of the whole."""
    _, local = sharded.run_with_cache(IDS, local=True)
    for name, x in cache.items():
        if name not in local:
            yield f"{name}, local: missing"
            continue
        own, indices = local[name], local.local_indices(name)
        for dim in [dim for dim in range(own.ndim) if own.shape[dim] != x.shape[dim]]:
            x = x.index_select(dim, indices)
        yield from unlike(f"{name}, local", x, own)


def _is_a_tie(whole: HookedModel, sharded: HookedModel, name: str) -> bool:
    """Whether two experts are so close after an edit that rounding decides between them."""
    hooks, points = [(name, uneven)], ["blocks.*.mlp.hook_router", "blocks.*.mlp.hook_expert_indices"]
    if "blocks.1.mlp.hook_expert_indices" not in whole.hook_dict:
        return False
    caches = [each.run_with_cache(IDS, fwd_hooks=hooks, names_filter=points)[1] for each in (whole, sharded)]
    chosen = [each for each in caches[0] if each.endswith("indices")]
    first = next((each for each in chosen if not torch.equal(caches[0][each], caches[1][each])), None)
    if first is None:
        return False
    router = first.replace("expert_indices", "router")
    return not list(unlike(router, caches[0][router], caches[1][router]))


def _outcome(model: HookedModel, name: str) -> Tensor | str:
    """The logits after an edit that changes every number at a point differently, or the error."""
    try:
        return model.run_with_hooks(IDS, fwd_hooks=[(name, uneven)])
    except (HooklineError, RuntimeError) as error:
        return type(error).__name__


def uneven(x: Tensor, hook: object) -> Tensor:
    """A tensor with every number changed by another factor."""
    return x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)


def _unlike_gradients(whole: HookedModel, sharded: HookedModel) -> Iterator[str]:
    found: list[dict[str, Tensor]] = []
    for model in (whole, sharded):
        grads: dict[str, Tensor] = {}
        names = [name for name in model.hook_dict if not name.endswith(("hook_tokens", "indices"))]

        def keep(grad: Tensor, hook: Any, grads: dict[str, Tensor] = grads) -> None:
            grads[hook.name] = grad.detach().clone()

        with model.hooks(bwd_hooks=[(name, keep) for name in names]):
            model(IDS)[0, -1].float().log_softmax(-1)[5].backward()
        found.append(grads)
    if found[0].keys() != found[1].keys():
        yield f"gradients: {found[0].keys() ^ found[1].keys()}"
    for name in found[0].keys() & found[1].keys():
        yield from unlike(f"{name}, gradient", found[0][name], found[1][name])


def unlike(what: str, expected: Tensor | str, got: Tensor | str) -> Iterator[str]:
    """Say how two values differ, if they do by more than rounding in their dtype."""
    if isinstance(expected, str) or isinstance(got, str):
        said = [each if isinstance(each, str) else "a value" for each in (expected, got)]
        if said[0] != said[1]:
            yield f"{what}: {said[1]} instead of {said[0]}"
        return
    if expected.shape != got.shape:
        yield f"{what}: {list(got.shape)} instead of {list(expected.shape)}"
    elif not torch.equal(expected, got):
        finite = expected.double().isfinite()
        off = (expected.double() - got.double())[finite].abs()
        # A norm divides by small numbers, and so enlarges the rounding of what it gets.
        close = CLOSE * (10 if "normalized" in what else 1) * _rounding(expected)
        if off.numel() and not off.max() <= close * (1 + expected.double()[finite].abs().max()):
            yield f"{what}: off by {off.max():.1e}"


def _rounding(x: Tensor) -> float:
    """How much coarser numbers are rounded than those of 32 bits; intermediate sums are rounded too."""
    return (
        torch.finfo(x.dtype).eps / torch.finfo(torch.float32).eps / 16
        if x.dtype in (torch.bfloat16, torch.float16)
        else 1
    )

"""What does not fit into memory at once goes through in parts, with the same results."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from stores import POINTS, texts, tinyworld
from tiny_models import causal_lm
from torch import Tensor, nn

import hookline
from hookline import HookError
from hookline.errors import HooklineWarning
from hookline.experiments import ablation, attribution, edges, metrics, patching
from hookline.transformer.memory.halving import BatchFitter, is_out_of_memory

NAMES = ["Mary", "John", "Tom", "Lily", "Anna"]
CLEAN = [f"{name} went to the garden with {other}" for name, other in pairwise(NAMES)]
CORRUPTED = [f"{name} went to the garden with {other}" for other, name in pairwise(NAMES)]


@pytest.fixture(scope="module")
def model():
    return tinyworld()


@contextmanager
def room_for(module: nn.Module, rows: int) -> Iterator[list[int]]:
    """A module that runs out of memory when called with more rows than that; gives how many it was called with."""
    seen: list[int] = []

    def check(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(len(args[0]))
        if seen[-1] > rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {seen[-1]} rows")

    handle = module.register_forward_pre_hook(check)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def room_for_gradients(module: nn.Module, rows: int) -> Iterator[None]:
    """A module that runs out of memory in the backward pass of more rows than that."""

    def check(gradient: Tensor) -> None:
        if len(gradient) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        if out.requires_grad:
            out.register_hook(check)

    handle = module.register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def doubled(most: int):
    """A function of some numbers that has room for so many."""

    def run(some):
        if len(some) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [2 * each for each in some]

    return run


def test_parts_that_fit() -> None:
    fit = BatchFitter("numbers")
    with pytest.warns(HooklineWarning, match="21 numbers") as told:
        parts = list(fit.parts(range(21), doubled(3)))
    assert len(told) == 1
    assert [each for _, found in parts for each in found] == [2 * each for each in range(21)]
    assert max(len(some) for some, _ in parts) == 2
    assert [len(some) for some, _ in fit.parts(range(5), doubled(3))] == [2, 2, 1], "what fits is remembered"
    assert [len(some) for some, _ in fit.parts(range(3), doubled(3), weight=2)] == [1, 1, 1]


def test_what_never_fits_and_what_is_no_lack_of_memory() -> None:
    with pytest.warns(HooklineWarning), pytest.raises(torch.OutOfMemoryError):
        list(BatchFitter("numbers").parts(range(4), doubled(0)))
    with pytest.raises(ZeroDivisionError):
        list(BatchFitter("numbers").parts(range(4), lambda some: len(some) // 0))


def test_a_lack_of_memory_is_known_wherever_it_comes_from(model) -> None:
    def hook(x: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(HookError) as caught:
        model.run_with_hooks("Mary", fwd_hooks=[(POINTS[0], hook)])
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(None)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", ["auto", 50])
def test_a_sweep(model, batch_size) -> None:
    def sweep() -> Any:
        metric = metrics.logit_diff(" garden", " Mary")
        return patching.sweep(model, CLEAN[:2], CORRUPTED[:2], metric, batch_size=batch_size)

    whole = sweep()
    with room_for(model.module.transformer.h[-1], 3) as seen, pytest.warns(HooklineWarning, match="cells"):
        found = sweep()
    assert max(seen) > 3
    assert close(found.values, whole.values)
    assert found.complete


def test_an_ablation_that_runs_from_the_beginning(model) -> None:
    """A hook that stays makes every variant a row of the whole model."""
    with model.hooks([(POINTS[0], torch.clone)]):
        whole = ablation.ablate(model, CLEAN[0], metrics.prob(" garden"))
        with room_for(model.module.transformer.h[0], 5), pytest.warns(HooklineWarning, match="cells"):
            found = ablation.ablate(model, CLEAN[0], metrics.prob(" garden"))
    assert close(found.values, whole.values)


def mixing(logits: Tensor) -> Tensor:
    """One number for all prompts, to which they do not contribute independently."""
    return logits[:, 3, :40].softmax(-1).mean(0).square().sum().log()


@pytest.mark.parametrize("metric", [metrics.prob(" garden"), mixing])
@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"steps": 2, "along": "inputs"}])
@pytest.mark.parametrize("short_of", [room_for, room_for_gradients])
def test_attribution(model, metric, options, short_of) -> None:
    def attributed() -> Tensor:
        return attribution.attribution_patching(
            model, CLEAN, CORRUPTED, metric, layers=[0, 2], check=0, **options
        ).values

    whole = attributed()
    with short_of(model.module.transformer.h[1], 1), pytest.warns(HooklineWarning, match="memory.* 4"):
        assert close(attributed(), whole)


def test_edges(model) -> None:
    def scores() -> Tensor:
        return edges.edge_scores(model, CLEAN[:2], CORRUPTED[:2], metrics.prob(" garden"), check=0).values

    whole = scores()
    with room_for_gradients(model.module.transformer.h[1], 1), pytest.warns(HooklineWarning, match="prompts"):
        assert close(scores(), whole)


def test_one_prompt_that_does_not_fit(model) -> None:
    with room_for(model.module.transformer.h[1], 0), pytest.raises(torch.OutOfMemoryError):
        attribution.attribution_patching(model, CLEAN[0], CORRUPTED[0], metrics.prob(" garden"))
    assert torch.isfinite(model(CLEAN[0])).all()


@pytest.mark.filterwarnings(
    "ignore:.*cannot be resumed if this harvest:hookline.errors.HooklineWarning"
)  # a hook that is code
def test_a_harvest(model, tmp_path) -> None:
    def harvest(path: str) -> hookline.store.Store:
        return hookline.harvest(model, texts(12), POINTS, tmp_path / path, batch_size=6, dtype=torch.bfloat16)

    whole = harvest("whole")
    with room_for(model.module.transformer.h[1], 2) as seen, pytest.warns(HooklineWarning, match="examples"):
        found = harvest("parts")
    assert seen[:3] == [5, 2, 2], "one of the six is empty; what fits is not looked for again"
    assert seen.count(max(seen)) == 1
    rows, others = found.rows(), whole.rows()
    assert torch.equal(rows.example, others.example)
    assert torch.equal(rows.position, others.position)
    for point in POINTS:
        assert torch.allclose(rows[point].float(), others[point].float(), rtol=0.02, atol=1e-3)
    assert found.is_complete


@pytest.mark.filterwarnings(
    "ignore:.*cannot be resumed if this harvest:hookline.errors.HooklineWarning"
)  # a hook that is code
def test_a_harvest_of_any_network(tmp_path) -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    data = torch.randn(10, 4)
    with room_for(net.module[1], 3), pytest.warns(HooklineWarning, match="examples"):
        store = hookline.harvest(net, data, "2", tmp_path, batch_size=8)
    assert torch.allclose(store["2"][:], net(data).detach(), atol=1e-6)


@pytest.mark.slow  # every check of every point, twice
def test_verify() -> None:
    """Points that are checked together keep what they have: here there is room for only some of the hooks."""
    model, counts = hookline.hook(causal_lm("gpt2")), list[int]()

    def check(module: nn.Module, _: Any) -> None:
        counts.append(sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()))
        if counts[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    handle, room = model.module.register_forward_pre_hook(check), 10**6
    try:
        whole = model.verify()
        room = max(counts) * 3 // 4
        with pytest.warns(HooklineWarning, match="layers"):
            found = model.verify()
    finally:
        handle.remove()
    assert found == whole
    assert found.failed() == []

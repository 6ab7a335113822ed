"""A sharded model harvests as one worker of several processes: the rows of the model in one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_models
import torch
import torch.distributed as dist
from sharded_models import CLOSE, needs_plans, pair, run

import hookline
from hookline.store import HarvestWorker, LocalStore

pytestmark = [pytest.mark.on_cpu(reason="its processes are on the CPU"), needs_plans]

POINTS = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.mlp.hook_post"]
DATA = [[5, 17, 42, 7, 3][: 1 + number % 5] for number in range(24)]


def group_of_two(folder: str) -> dict[str, object]:
    """What each of two processes of one model finds."""
    whole, sharded = pair("llama", folder)
    options = {"batch_size": 2, "progress": False}
    store = hookline.harvest(sharded, DATA, POINTS, f"{folder}/sharded", **options)
    if dist.get_rank() == 0:
        hookline.harvest(whole, DATA, POINTS, f"{folder}/whole", shard=HarvestWorker(0, 1), **options)
    dist.barrier()
    found: dict[str, object] = {"close": close(store, LocalStore(f"{folder}/whole"))}
    again = hookline.harvest(sharded, DATA, POINTS, f"{folder}/sharded", **options)
    found["again"] = again.manifest == store.manifest
    for name, data in (("other arguments", DATA[:-1]), ("other data", DATA[: 20 + 2 * dist.get_rank()])):
        try:
            hookline.harvest(sharded, data, POINTS, f"{folder}/{name[6:]}", **options)
            hookline.harvest(sharded, data, POINTS[:1], f"{folder}/{name[6:]}", **options)
        except hookline.HooklineError as error:
            found[name] = str(error)
    return found


def close(store, other) -> bool:
    """Whether two stores have the same rows, up to rounding."""
    rows, others = store.rows(), other.rows()
    return torch.equal(rows.example, others.example) and all(
        bool((x - others[name]).abs().max() <= CLOSE * others[name].abs().max()) for name, x in rows.activations.items()
    )


@pytest.mark.slow
def test_the_processes_of_a_sharded_model_are_one_worker(tmp_path) -> None:
    for found in run(group_of_two, 2, str(tmp_path)):
        assert found["close"] is True
        assert found["again"] is True
        assert "different harvest: points is" in str(found["other arguments"])
        assert "different data sets" in str(found["other data"])
    assert LocalStore(tmp_path / "sharded").verify().is_sound


def part(folder: str, rank: int) -> None:
    """Two processes that run one model, as one of two workers."""
    _, sharded = pair("llama", f"{folder}/{rank}")
    hookline.harvest(sharded, DATA, POINTS, f"{folder}/sharded", batch_size=2, shard=(rank, 2), progress=False)


@pytest.mark.slow
def test_two_sharded_models_are_two_workers(tmp_path) -> None:
    """Each has a launcher of its own, because transformers shards a model over all processes of a launcher."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda rank: run(part, 2, str(tmp_path), rank), range(2)))
    model = hookline.hook(tiny_models.causal_lm("llama").from_pretrained(tmp_path / "0" / "llama").eval())
    whole = hookline.harvest(model, DATA, POINTS, tmp_path / "whole", batch_size=2, progress=False)
    assert close(LocalStore(tmp_path / "sharded"), whole)
    assert LocalStore(tmp_path / "sharded").verify().is_sound

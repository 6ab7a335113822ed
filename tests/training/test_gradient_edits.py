"""Gradients that are clipped, scaled, reversed and edited: by hand, scaled, accumulated, checkpointed, in processes."""

import copy
import subprocess
import sys

import pytest
import torch
from networks import MLP
from processes import SRC
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import HooklineError, edits
from hookline.training import clip, edit_gradients


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize("norm", [1e-3, 1e3])
def test_clip_bounds_the_norm_and_keeps_the_direction(net, x, norm) -> None:
    seen = []
    hooks = [
        ("act", lambda grad: seen.append(grad.clone())),
        *clip("act", norm),
        ("act", lambda g: seen.append(g.clone())),
    ]
    net.run_with_hooks(x, bwd_hooks=hooks).square().sum().backward()
    before, after = seen
    torch.testing.assert_close(after, before * min(1.0, norm / before.norm().item()))


def test_clip_knows_the_scale(net, x) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net.run_with_hooks(x, bwd_hooks=clip("act", 0.01)).square().sum().backward()
    expected = gradients(net.module)
    net.zero_grad()
    loss = net.run_with_hooks(x, bwd_hooks=clip("act", 0.01, scaler=scaler)).square().sum()
    scaler.scale(loss).backward()
    for plain, scaled in zip(expected[:2], gradients(net.module)[:2], strict=True):
        torch.testing.assert_close(plain * 1024, scaled)


@pytest.mark.parametrize("factor", [-1.0, 0.25, 0.0])
def test_scaled_and_reversed_gradients_are_edits(net, x, factor) -> None:
    net(x).square().sum().backward()
    plain = gradients(net.module)
    net.zero_grad()
    net.run_with_hooks(x, bwd_hooks=[("act", edits.scale(factor))]).square().sum().backward()
    for before, after, scale in zip(plain, gradients(net.module), (factor, factor, 1, 1), strict=True):
        torch.testing.assert_close(before * scale, after)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_clip_in_a_checkpointed_region(mlp, is_reentrant) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=is_reentrant)

    outer, x = hookline.hook(Outer()), torch.randn(3, 4, requires_grad=True)
    hookline.hook(mlp).run_with_hooks(x, bwd_hooks=clip("act", 0.01)).square().sum().backward()
    expected = gradients(mlp)
    mlp.zero_grad()
    with outer.hooks(bwd_hooks=clip("inner.act", 0.01)):
        outer(x).square().sum().backward()
    for before, after in zip(expected, gradients(mlp), strict=True):
        torch.testing.assert_close(before, after)


def test_edits_of_parameters_come_last(mlp, x) -> None:
    """After accumulation and after the scale is removed; in place or returned."""
    twin = copy.deepcopy(mlp)
    for module, scaler in ((mlp, torch.amp.GradScaler("cpu", init_scale=256.0)), (twin, None)):
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        with edit_gradients(module, optimizer, ["fc1.*", "fc2.weight"], lambda g, name: g.clamp_(-0.1, 0.1)):
            for batch in x.split(2):
                loss = module(batch).square().sum()
                (loss if scaler is None else scaler.scale(loss)).backward()
            before = module.fc1.weight.detach().clone()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        assert (module.fc1.weight - before).abs().max() <= 0.0501
        assert module.fc2.bias.grad.abs().max() > 0.1
    for scaled, plain in zip(mlp.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(scaled, plain)


def test_mistakes(mlp, x) -> None:
    optimizer = torch.optim.SGD(mlp.fc1.parameters(), 0.5)
    for names in ("fc2.weight", "fc3.*", []):
        with pytest.raises(HooklineError):
            edit_gradients(mlp, optimizer, names, torch.zeros_like)
    with pytest.raises(HooklineError):
        edit_gradients(mlp, mlp, "fc1.weight", torch.zeros_like)
    with pytest.raises(HooklineError):
        clip("fc1", 0.0)
    mlp(x).sum().backward()
    with edit_gradients(mlp, optimizer, "fc1.weight", torch.sum), pytest.raises(HooklineError):
        optimizer.step()
    with edit_gradients(mlp, optimizer, "fc1.weight", torch.zeros_like), pytest.raises(HooklineError):
        optimizer.step(lambda: 0.0)
    assert not optimizer._optimizer_step_pre_hooks


PROCESSES = 2
PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import hookline
from hookline import edits
from hookline.training import clip, edit_gradients, penalty, watch
sys.path.insert(0, sys.argv[3])
from networks import MLP

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
module, x = MLP(), torch.randn(8, 4)
ddp = DDP(module)
net = hookline.hook(ddp)
optimizer = torch.optim.SGD(module.parameters(), 0.1)
mine = x[rank * 4 : rank * 4 + 4]
with (
    watch(net, every=1, to=f"{folder}/watch.csv") as record,
    net.hooks(bwd_hooks=[("module.act", edits.scale(-0.5))]),
    penalty(net, "module.act") as size,
    edit_gradients(module, optimizer, "fc2.*", lambda grad: grad.clamp(-0.01, 0.01)),
):
    (ddp(mine).square().mean() + 0.1 * size()).backward()
    optimizer.step()
torch.save([p.detach() for p in module.parameters()], f"{folder}/{rank}.pt")
assert record.rows
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path) -> None:
    tests = str(SRC.parent / "tests")
    command = [sys.executable, "-c", PROGRAM]
    environment = {"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), tests], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(PROCESSES)
    ]
    for process in started:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    torch.manual_seed(0)
    module, x = MLP(), torch.randn(8, 4)
    net, optimizer = hookline.hook(module), torch.optim.SGD(module.parameters(), 0.1)
    hidden = []
    hooks = {"fwd_hooks": [("act", lambda h: hidden.append(h))], "bwd_hooks": [("act", edits.scale(-0.5))]}
    output = net.run_with_hooks(x, **hooks)
    (output.square().mean() + 0.1 * hidden[0].abs().mean()).backward()
    for parameter in (module.fc2.weight, module.fc2.bias):
        parameter.grad.clamp_(-0.01, 0.01)
    optimizer.step()
    for rank in range(PROCESSES):
        for one, other in zip(module.parameters(), torch.load(tmp_path / f"{rank}.pt"), strict=True):
            torch.testing.assert_close(one, other)
    assert (tmp_path / "watch.csv").read_text().count("step") == 1

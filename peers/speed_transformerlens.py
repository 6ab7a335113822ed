"""The stand-in for TransformerLens beside TransformerLens, on the same weights: medians, in one table.

    python peers/stack.py FOLDER                       # builds the environments `there` and `here`
    python peers/speed_transformerlens.py FOLDER

Both run in processes of their own, one task of one, then the same task of the other, and so on: what else the machine
does slows both. The results of both are compared too. Those of `generate` differ: the tokens of hookline are the ones
that one forward pass per token gives, in TransformerLens too; its `generate` returns others for a model without a
tokenizer.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

SIZES = {"n_layers": 6, "d_model": 256, "d_head": 32, "n_ctx": 128, "d_vocab": 5000, "act_fn": "gelu", "seed": 1}
ROUNDS = 15
LONGEST = 30.0
"""The seconds after which no further round of a task begins."""


def main() -> None:
    """Start both, give them the same tasks in turn, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--work", choices=("there", "here"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        work()
        return
    both = {name: start(given.folder, name) for name in ("there", "here")}
    print(f"{'milliseconds':34}{'TransformerLens':>16}{'hookline':>10}{'ratio':>8}{'difference':>12}")
    for task in json.loads(ask(both["there"], "tasks")):
        first = {name: torch.tensor(json.loads(ask(each, task))["value"]) for name, each in both.items()}
        times: dict[str, list[float]] = {name: [] for name in both}
        while len(times["here"]) < given.rounds and sum(times["there"]) < LONGEST:
            for name, each in both.items():
                times[name].append(json.loads(ask(each, task))["seconds"])
        there, here = (median(times[name]) * 1000 for name in both)
        difference = (first["there"] - first["here"]).abs().max().item()
        print(f"{task:34}{there:16.1f}{here:10.1f}{there / here:8.2f}{difference:12.1e}", flush=True)


def start(folder: Path, name: str) -> subprocess.Popen:
    """A process in an environment of `peers/stack.py`."""
    stand_in = ["-m", "hookline.compat.transformer_lens"] if name == "here" else []
    command = [str(folder.resolve() / name / "bin" / "python"), *stand_in, str(Path(__file__).resolve()), str(folder)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "--work", name], **pipes)


def ask(process: subprocess.Popen, task: str) -> str:
    """Send a task, and wait for the answer."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(task + "\n")
    process.stdin.flush()
    while not (line := process.stdout.readline()).startswith("> "):
        if not line:
            raise SystemExit(f"{task} failed")
    return line[2:]


def work() -> None:
    """Answer tasks from the standard input with their time and the sum of their result."""
    torch.set_num_threads(1)
    tasks = make_tasks()
    for line in sys.stdin:
        task = line.strip()
        if task == "tasks":
            print(">", json.dumps(list(tasks)), flush=True)
            continue
        begin = time.perf_counter()
        value = tasks[task]()
        seconds = time.perf_counter() - begin
        print(
            ">", json.dumps({"seconds": seconds, "value": value.detach().double().flatten()[:50].tolist()}), flush=True
        )


def make_tasks() -> dict[str, Callable[[], torch.Tensor]]:
    """The tasks, by name."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig, patching

    model = HookedTransformer(HookedTransformerConfig(**SIZES, device="cpu", normalization_type="LN"))
    draw = torch.Generator().manual_seed(5)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for name in sorted(weights):
        if not name.endswith(("mask", "IGNORE")):
            weights[name].copy_(torch.randn(weights[name].shape, generator=draw) * 0.05)
    model.load_state_dict(weights)
    tokens = torch.randint(0, 5000, (4, 64), generator=draw)
    points = [f"blocks.{layer}.hook_resid_post" for layer in range(SIZES["n_layers"])]
    _, clean = model.run_with_cache(tokens[:1, :16])

    def half(value: torch.Tensor, hook: object) -> torch.Tensor:  # noqa: ARG001
        return value * 0.5

    def cached(**options: Any) -> torch.Tensor:
        return model.run_with_cache(tokens, **options)[1][points[3]]

    def gradients() -> torch.Tensor:
        kept = []
        with torch.enable_grad(), model.hooks(bwd_hooks=[(points[2], lambda grad, hook: kept.append(grad.clone()))]):
            model(tokens, return_type="loss").backward()
        model.zero_grad()
        return kept[0]

    def no_grad(compute: Callable[..., torch.Tensor], *given: Any, **options: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch.no_grad()(compute)(*given, **options)

    def patched(name: str) -> torch.Tensor:
        return getattr(patching, f"get_act_patch_{name}")(model, tokens[1:2, :16], clean, lambda x: x[0, -1, :9].sum())

    generating = {"max_new_tokens": 20, "do_sample": False, "stop_at_eos": False, "verbose": False}
    some = [(point, half) for point in points]
    return {
        "forward": no_grad(model, tokens),
        "run_with_cache, all points": no_grad(cached),
        "run_with_cache, residual stream": no_grad(cached, names_filter=points),
        "run_with_hooks, 6 hooks": no_grad(model.run_with_hooks, tokens, fwd_hooks=some),
        "a backward hook": gradients,
        "generate, 20 tokens": no_grad(model.generate, tokens[:1, :16], **generating),
        "patching, residual stream": no_grad(patched, "resid_pre"),
        "patching, heads": no_grad(patched, "attn_head_out_all_pos"),
        "patching, heads by position": no_grad(patched, "attn_head_out_by_pos"),
    }


if __name__ == "__main__":
    main()

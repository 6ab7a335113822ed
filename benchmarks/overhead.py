"""The cost of hooks and caches on plain networks, relative to the plain module in the same run.

    python benchmarks/overhead.py            # the table
    python benchmarks/overhead.py --smoke    # one quick round, to check that it runs

The alternatives are timed in turn, for several rounds, and the median of the ratios to the plain module in the same
round is printed, so that noise affects all of them alike. The last column is the time of hookline relative to hand-
written torch hooks, which are registered before and removed after each run, as in hookline.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import pairwise

import torch
from timing import median, ratios
from torch import Tensor, nn

import hookline


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the worst case for overhead, a convolutional network and a transformer encoder, each with an input."""
    mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    channels = [3, 16, 32, 64]
    convolutions = [
        layer
        for before, after in pairwise(channels)
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))
    ]
    cnn = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))
    # Not the fused path of `nn.TransformerEncoder`, which torch does not use if there is any hook.
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    torch.backends.mha.set_fastpath_enabled(False)
    return {
        "MLP, 5 layers of 32": (mlp.eval(), torch.randn(8, 32)),
        "CNN, 3 blocks": (cnn.eval(), torch.randn(8, 3, 32, 32)),
        "transformer, 6 layers, d 256": (encoder.eval(), torch.randn(4, 64, 256)),
    }


def leaves(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without submodules."""
    return {name: child for name, child in module.named_modules() if not list(child.children())}


def works(module: nn.Module, x: Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object] | None]]:
    """Return each task with hookline and with hand-written torch hooks."""
    net = hookline.hook(module)
    names = [name for name, child in leaves(module).items() if fires(module, child, x)]
    middle = names[len(names) // 2]

    def by_hand_edit() -> Tensor:
        handle = module.get_submodule(middle).register_forward_hook(lambda _m, _i, out: out * 0.5)
        try:
            return module(x)
        finally:
            handle.remove()

    def by_hand_cache() -> dict[str, Tensor]:
        cache: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: object, out: Tensor) -> None:
                cache[name] = out.detach()

            return hook

        handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
        try:
            module(x)
        finally:
            for handle in handles:
                handle.remove()
        return cache

    return {
        "unhooked": (lambda: net(x), None),
        "one hook": (lambda: net.run_with_hooks(x, fwd_hooks=[(middle, lambda h: h * 0.5)]), by_hand_edit),
        f"cache of {len(names)} points": (lambda: net.run_with_cache(x, names_filter=names), by_hand_cache),
        f"cache of all {len(net.hook_dict)} points": (lambda: net.run_with_cache(x), None),
    }


def fires(module: nn.Module, child: nn.Module, x: Tensor) -> bool:
    """Return whether a module is called; the output projection of `nn.MultiheadAttention`, for example, is not."""
    fired: list[bool] = []
    handle = child.register_forward_hook(lambda *_: fired.append(True))
    module(x)
    handle.remove()
    return bool(fired)


def measure(module: nn.Module, x: Tensor, rounds: int) -> list[tuple[str, ...]]:
    """Yield a row per task: hookline and hand-written hooks relative to the plain module, and to each other."""
    table = works(module, x)
    ways: dict[tuple[str, str], Callable[[], object]] = {("bare", ""): lambda: module(x)}
    for name, (ours, by_hand) in table.items():
        ways[name, "hookline"] = ours
        if by_hand is not None:
            ways[name, "by hand"] = by_hand
    found = ratios(ways, ("bare", ""), rounds)
    return [_row(name, found) for name in table]


def _row(name: str, found: dict[tuple[str, str], list[float]]) -> tuple[str, ...]:
    ours = found[name, "hookline"]
    if (name, "by hand") not in found:
        return name, median(ours), "", ""
    by_hand = found[name, "by hand"]
    return name, median(ours), median(by_hand), median([a / b for a, b in zip(ours, by_hand, strict=True)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one quick round")
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    print(f"torch {torch.__version__}, one thread; median time relative to the plain module\n")
    print(f"{'network':30} {'work':24} {'hookline':>9} {'by hand':>9} {'ours/hand':>10}")
    with torch.no_grad():
        for name, (module, x) in networks().items():
            for work, ours, by_hand, relative in measure(module, x, 2 if options.smoke else options.rounds):
                print(f"{name:30} {work:24} {ours:>9} {by_hand:>9} {relative:>10}")
                name = ""


if __name__ == "__main__":
    main()

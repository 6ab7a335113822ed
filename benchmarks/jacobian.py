"""Fitting a Jacobian lens, beside TransformerLens: time, and distance from the lens of other texts.

    python benchmarks/jacobian.py --python PATH        a Python with transformer-lens 4.3 installed
    python benchmarks/jacobian.py --make-env FOLDER    create such an environment there first

Both fit a lens of a model of GPT-2 small's shape with random weights, on the same tokens, in one thread. `error` is the
distance from the lens of other texts, relative to its norm; it has two sources, the texts and rounding. `to theirs` is
the distance from TransformerLens's lens. Times are CPU seconds of one thread, or seconds with --device cuda, where
`--tokens 128` is usual and `--precision high` lets both compute float32 products in TF32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 1000


def main() -> None:
    """Fit with both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a Python with transformer-lens 4.3 installed")
    parser.add_argument("--make-env", metavar="FOLDER", help="create a virtual environment with it there, and use it")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--others", type=int, default=4, help="how many texts the error is measured with")
    parser.add_argument("--tokens", type=int, default=16, help="the tokens of a text")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cpu", help="cuda: times are then seconds of the clock")
    parser.add_argument("--precision", default="highest", help="as for torch.set_float32_matmul_precision")
    parser.add_argument("--peer", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.precision)
    if options.peer:
        run_peer(Path(options.peer), options.texts, options.device)
        return
    if options.make_env:
        subprocess.run([sys.executable, "-m", "venv", options.make_env], check=True)
        options.python = f"{options.make_env}/bin/python"
        subprocess.run([options.python, "-m", "pip", "install", "-q", "transformer-lens==4.3.*"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options)
        peer = None
        if options.python:
            command = [options.python, __file__, "--peer", folder, "--texts", str(options.texts)]
            command += ["--device", options.device, "--precision", options.precision]
            subprocess.run(command, check=True)
            peer = torch.load(Path(folder) / "peer.pt")
        compare(Path(folder), options, peer)


def save_model(folder: Path, options: Any) -> None:
    """Save a random model, whose layers matter, and its tokenizer, in the transformers format; and the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 64}
    ends = {"bos_token_id": VOCABULARY - 1, "eos_token_id": VOCABULARY - 1}
    module = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ends))
    with torch.no_grad():
        for name, x in module.named_parameters():
            if "weight" in name and x.ndim == 2 and ".h." in name:
                x.mul_(2.5)
    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"<end>": VOCABULARY - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<end>")
    module.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=plain, **ends).save_pretrained(folder)
    ids = torch.randint(0, VOCABULARY - 1, (options.texts + options.others, options.tokens - 1))
    (folder / "texts").write_text("\n".join(" ".join(f"w{each}" for each in row) for row in ids.tolist()))


def timed(run: Callable[[], Any], device: str) -> tuple[Any, float]:
    """The result, and the seconds that it took: of the CPU, or of the clock with a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    result = run()
    if device != "cpu":
        torch.cuda.synchronize()
    return result, clock() - start


def run_peer(folder: Path, count: int, device: str) -> None:
    """In the other Python: fit TransformerLens's lens, and save it with its time and its tokens."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis import JacobianLens

    model = TransformerBridge.boot_transformers(str(folder), device=device)
    model.eval()
    texts = (folder / "texts").read_text().split("\n")
    options = {"corpus": "random", "skip_first_positions": 0, "show_progress": False}
    JacobianLens.fit(model, texts[:1], **options)  # a first call sets up
    lens, seconds = timed(lambda: JacobianLens.fit(model, texts[:count], **options), device)
    tokens = torch.cat([model.to_tokens(text) for text in texts]).cpu()
    matrices = torch.stack([*lens.jacobians.values()]).cpu()
    torch.save({"matrices": matrices, "seconds": seconds, "tokens": tokens}, folder / "peer.pt")


def compare(folder: Path, options: Any, peer: dict[str, Any] | None) -> None:
    """Fit with hookline, and print times and errors beside those of the peer."""
    import hookline
    from hookline.experiments import jacobian

    model = hookline.load(str(folder), dtype=torch.float32, device=options.device)
    rows = [line.split() for line in (folder / "texts").read_text().split("\n")]
    tokens = torch.tensor([[VOCABULARY - 1, *(int(word[1:]) for word in row)] for row in rows])
    if peer is not None and not torch.equal(tokens, peer["tokens"]):
        raise SystemExit("the two libraries ran different tokens")
    how: dict[str, Any] = {"layers": [*range(options.layers - 1)], "pos": slice(0, -1), "progress": False}
    reference = jacobian.fit(model, tokens[options.texts :], **how).matrices
    found: dict[str, tuple[Tensor, float]] = {}
    if peer is not None:
        found["TransformerLens 4.3"] = peer["matrices"], peer["seconds"]
    for name, dtype in (("hookline", None), ("hookline, dtype=bfloat16", torch.bfloat16)):
        jacobian.fit(model, tokens[:1], dtype=dtype, **how)
        lens, seconds = timed(
            lambda dtype=dtype: jacobian.fit(model, tokens[: options.texts], dtype=dtype, **how), options.device
        )
        found[name] = lens.matrices, seconds
    first, slowest = next(iter(found.values()))
    print(f"{options.layers} layers × {options.width}, {options.texts} texts of {options.tokens} tokens")
    unit = "CPU s" if options.device == "cpu" else "s"
    print(f"{'':26} {unit:>8} {'times faster':>13} {'error':>8} {'to theirs':>10}")
    for name, (matrices, seconds) in found.items():
        errors = [float((matrices - other).norm() / other.norm()) for other in (reference, first)]
        print(f"{name:26} {seconds:8.2f} {slowest / seconds:13.2f} {errors[0]:8.4f} {errors[1]:10.1e}")


if __name__ == "__main__":
    main()

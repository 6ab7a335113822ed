"""The memory and the time of a harvest by layer, relative to a plain harvest of the same model.

    python benchmarks/by_layer.py                                    # a Llama shape with 0.5 B parameters, on the CPU
    python benchmarks/by_layer.py --folder FOLDER                    # a model on disk
    python benchmarks/by_layer.py --smoke                            # a tiny model, to check that it runs

Each harvest runs in a process of its own. Its memory is the peak of the process less its memory before the model is
made; the difference between the plain harvest's peak and its weights are the buffers: activations of a batch, and
shards that are being written. The time includes reading the weights, and for the harvest by layer their checksum.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers

import hookline
from hookline.errors import shown_bytes
from hookline.store.layer_weights import EMBED, HEAD, REST, LayerWeights
from hookline.transformer.empty import from_pretrained_empty


def shape(is_small: bool) -> transformers.LlamaConfig:
    """A Llama shape with 0.5 B parameters, or a tiny one."""
    width, layers, words = (64, 4, 1000) if is_small else (1024, 24, 32000)
    return transformers.LlamaConfig(
        **{"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width, "vocab_size": words},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False},
    )


def resident() -> int:
    """The memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak(threading.Thread):
    """Samples the memory of this process every 2 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.most = resident()
        self.is_over = False

    def run(self) -> None:
        """Sample until it is over."""
        while not self.is_over:
            self.most = max(self.most, resident())
            time.sleep(0.002)


def measure(folder: str, way: str, texts: int, length: int) -> dict[str, float]:
    """Harvest in this process; returns seconds, the peak, and the sizes of the weights."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    tokens = torch.randint(0, config.vocab_size, (texts, length), generator=generator)
    warm = transformers.LlamaForCausalLM(shape(True))  # what is imported and allocated once
    with tempfile.TemporaryDirectory() as target:
        hookline.harvest(hookline.hook(warm.eval()), tokens[:2] % 1000, 0, f"{target}/warm", progress=False)
        peak, begin = Peak(), time.perf_counter()
        peak.start()
        if way == "plain":
            model = hookline.hook(cls.from_pretrained(folder).eval())
        else:
            model = hookline.hook(from_pretrained_empty(cls, folder))
        points = [f"blocks.{layer}.hook_resid_post" for layer in range(0, model.cfg.n_layers, 4)]
        options = {"by_layer": way == "layers", "batch_size": 4, "progress": False, "shard_bytes": 2**23}
        hookline.harvest(model, tokens, points, f"{target}/store", **options)
        spent, peak.is_over = time.perf_counter() - begin, True
    sizes = {"weights": sum(x.nbytes for x in model.module.parameters())}
    if way == "layers":
        weights = LayerWeights(model, torch.device("cpu"))
        parts = [EMBED, HEAD, *range(model.cfg.n_layers)]
        sizes |= {"largest": max(weights.nbytes(part) for part in parts), "rest": weights.nbytes(REST)}
    return {"seconds": spent, "peak": peak.most - peak.start_bytes, **sizes}


def measured(folder: str, way: str, texts: int, length: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--folder",
        folder,
        "--way",
        way,
        "--texts",
        str(texts),
        "--length",
        str(length),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder")
    parser.add_argument("--way", choices=("plain", "layers"))
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps(measure(given.folder, given.way, given.texts, given.length)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder
        if folder is None:
            transformers.LlamaForCausalLM(shape(given.smoke)).save_pretrained(made)
            folder = made
        texts = 8 if given.smoke else given.texts
        plain, layers = (measured(folder, way, texts, given.length) for way in ("plain", "layers"))
    buffers = max(0.0, plain["peak"] - plain["weights"])
    limit = 1.3 * layers["largest"] + buffers + layers["rest"]
    print(f"{texts} texts of {given.length} tokens, batches of 4, one thread")
    print(f"plain      peak {shown_bytes(plain['peak'])}; weights {shown_bytes(plain['weights'])}")
    print(f"by layer   peak {shown_bytes(layers['peak'])}; largest part {shown_bytes(layers['largest'])}")
    print(f"limit      {shown_bytes(limit)} = 1.3 × the largest part + buffers of {shown_bytes(buffers)}")
    print(f"time       {plain['seconds']:.1f} s plain, {layers['seconds']:.1f} s by layer")
    print(f"           {layers['seconds'] / plain['seconds']:.2f} of the plain harvest")


if __name__ == "__main__":
    main()

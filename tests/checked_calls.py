"""Calls as people write them, for type checkers: nothing runs this file.

A line with an ignore must be rejected: mypy reports an ignore that is not needed. Every other line must pass.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import hookline
from hookline import HookedModel, edits, last
from hookline.experiments import ablation, edges, metrics, patching, probes, steering
from hookline.experiments.result import Result
from hookline.residual import ModelCache


def loading() -> None:
    assert_type(hookline.load("gpt2"), HookedModel)
    hookline.load("gpt2", device="cpu", dtype=torch.bfloat16, attn_implementation="eager", revision="main")
    hookline.load("gpt2", device_map="auto", gguf_file="model.gguf")
    hookline.load("gpt2", devise="cpu")  # type: ignore[call-arg]
    hookline.load("gpt2", attn_implementaton="eager")  # type: ignore[call-arg]


def running(model: HookedModel, inputs: dict[str, Any], tokens: Tensor) -> None:
    assert_type(model("Mary went"), Tensor)
    assert_type(model(["Mary went", "John went"], padding_side="left"), Tensor)
    assert_type(model("Mary went", return_type="loss"), Tensor)
    assert_type(model("Mary went", return_type="both"), tuple[Tensor, Tensor])
    assert_type(model(tokens, None), None)
    model(**inputs)
    model(tokens, labels=tokens).loss
    model("Mary went", return_type="lgits")  # type: ignore[call-overload]
    model("Mary went", prepend_boss=True)  # type: ignore[call-overload]
    model("Mary went").shapes  # type: ignore[attr-defined]
    assert_type(model.last_logits("Mary went"), Tensor)


def caching(model: HookedModel, tokens: Tensor) -> None:
    assert_type(model.run_with_cache("Mary went", names_filter="blocks.*.hook_resid_post"), tuple[Tensor, ModelCache])
    logits, cache = model.run_with_cache(tokens, pos_slice=last, device="cpu")
    assert_type(logits, Tensor)
    assert_type(cache["blocks.0.hook_resid_post"], Tensor)
    (_, loss), _ = model.run_with_cache(tokens, return_type="both")
    assert_type(loss, Tensor)
    hooks = [("blocks.0.hook_resid_post", edits.zero())]
    assert_type(model.run_with_hooks("Mary went", fwd_hooks=hooks, return_type="loss"), Tensor)
    assert_type(model.cache("Mary went", names_filter="blocks.0.*"), ModelCache)
    model.run_with_cache("Mary went", name_filter="blocks.0.*")  # type: ignore[call-overload]
    model.run_with_hooks("Mary went", hooks=hooks)  # type: ignore[call-overload]
    model.cache("Mary went", pos=last)  # type: ignore[call-overload]


def generating(model: HookedModel, tokens: Tensor, monitor: probes.Monitor) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert_type(model.generate("Mary went"), str)
    assert_type(model.generate(messages, do_sample=True, temperature=0.7, top_p=0.9, seed=1), str)
    assert_type(model.generate(["Mary went", "John went"], 5), list[str])
    assert_type(model.generate([messages, messages], 5), list[str])
    assert_type(model.generate(tokens, max_new_tokens=3), Tensor)
    model.generate(tokens, return_dict_in_generate=True, output_scores=True).scores
    assert_type(model.generate_with_cache("Mary went", 3, names_filter="blocks.0.*"), tuple[str, ModelCache])
    for piece in model.stream("Mary went", top_k=5, do_sample=True):
        assert_type(piece, str)
    for piece in model.stream("Mary went", monitors=[monitor]):
        assert_type(piece, str)
    assert_type(model.generate_with_cache("Mary went", 3, monitors=[monitor]), tuple[str, ModelCache])
    model.generate("Mary went", monitors=[monitor])  # type: ignore[call-overload]
    model.generate("Mary went", max_tokns=3)  # type: ignore[call-overload]
    model.generate("Mary went", temprature=3.0)  # type: ignore[call-overload]
    model.generate_with_cache("Mary went", name_filter="blocks.0.*")  # type: ignore[call-overload]
    model.stream("Mary went", max_tokens=3)  # type: ignore[call-overload]
    model.compile(backend="eager", limit=4)
    model.compile(bakend="eager")  # type: ignore[call-arg]


def experiments(model: HookedModel, vectors: steering.Directions) -> None:
    metric = metrics.logit_diff(" Mary", " John")
    result = patching.sweep(model, "clean", "corrupted", metric, points="z", over=("layer", "head"), per_example=True)
    assert_type(result, Result)
    assert_type(result.values, Tensor)
    patching.sweep(model, "clean", "corrupted", metric, batch_size="auto", progress=False, resume=result)
    ablation.ablate(model, "prompt", metric, of="heads", layers=[0, 1], batch_size=8)
    steering.sweep_layers(model, vectors, "prompt", metric, positions=last, control=0)
    ablation.ablate(model, "prompt", metric, control=20, control_seed=1)
    patching.sweep(model, "clean", "corrupted", metric, control="auto")
    patching.sweep(model, "clean", "corrupted", metric, control="all")  # type: ignore[arg-type]
    ablation.cumulative(model, "prompt", metric, result, control=20)  # type: ignore[call-arg]
    edges.edge_scores(model, "clean", "corrupted", metric, control=20)  # type: ignore[call-arg]
    patching.sweep(model, "clean", "corrupted", metric, point="z")  # type: ignore[call-arg]
    patching.sweep(model, "clean", "corrupted", metric, batch_size="all")  # type: ignore[arg-type]
    ablation.ablate(model, "prompt", metric, batchsize=8)  # type: ignore[call-arg]
    steering.sweep_layers(model, vectors, "prompt", metric, layer=1)  # type: ignore[call-arg]

"""The memory that a plan tells in advance, against that of real runs."""

import json
from pathlib import Path

import pytest
import torch
from releases import torch_is_before
from tiny_models import causal_lm, encoder
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from typer.testing import CliRunner

import hookline
from hookline import HooklineError
from hookline.cli import app
from hookline.transformer.memory.run_memory import kv_bytes

pytestmark = pytest.mark.on_cpu(reason="it compares with the CPU's allocator")

KINDS = ["llama", "gpt2", "gemma2", "gemma3_text", "qwen3", "phi3", "falcon", "bloom", "mamba", "gpt_neox"]
TOKENS = torch.arange(3 * 24).view(3, 24) % 60 + 3


def fused(kind: str) -> PreTrainedModel:
    """A tiny model that the CPU has fused kernels for: the parts of others hold memory that no plan sees."""
    return causal_lm(kind, **{"num_key_value_heads": 4} if torch_is_before("2.9") else {})


def empty(kind: str, dtype: torch.dtype = torch.float32) -> hookline.HookedModel:
    """A tiny model on the meta device, which has shapes and no data."""
    like = fused(kind)
    with torch.device("meta"):
        module = type(like)._from_config(like.config, dtype=dtype).eval()
    return hookline.hook(module)


def real_peak(module: torch.nn.Module, tokens: torch.Tensor) -> tuple[int, object]:
    """The most bytes that torch's CPU allocator had handed out at once in a forward pass, and the output."""
    # Without acc_events, torch 2.11 warns that events of earlier cycles are cleared, though there is one only.
    kinds = [ProfilerActivity.CPU]
    with torch.no_grad(), profile(activities=kinds, profile_memory=True, acc_events=True) as profiled:
        output = module(input_ids=tokens)
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most, output


@pytest.mark.parametrize("kind", KINDS)
def test_weights_keys_values_and_points_are_exact_and_the_peak_is_close(kind) -> None:
    module = fused(kind).eval()
    points = "blocks.*.hook_resid_post"
    memory = empty(kind).plan(points, input=TOKENS).memory
    assert memory.weights == sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    assert memory.points == sum(x.nbytes for x in hookline.hook(module).cache(TOKENS, names_filter=points).values())
    module(input_ids=TOKENS)  # what is made once, in the first call
    peak, output = real_peak(module, TOKENS)
    assert memory.kv_cache == kv_bytes(output) > 0
    assert peak / 1.2 <= memory.forward + memory.kv_cache <= peak * 1.2


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_keys_and_values_of_new_tokens(kind) -> None:
    module = fused(kind).eval()
    out = module.generate(
        TOKENS, max_new_tokens=9, min_new_tokens=9, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    memory = empty(kind).plan("blocks.0.hook_resid_post", input=TOKENS, new_tokens=9).memory
    assert memory.kv_cache == kv_bytes(out)


def test_points_of_every_kind_are_exact() -> None:
    points = ["blocks.1.attn.hook_z", "blocks.*.attn.hook_pattern", "blocks.0.mlp.hook_post", "ln_final.hook_scale"]
    cache = hookline.hook(fused("llama").eval()).cache(TOKENS, names_filter=points)
    assert empty("llama").plan(points, input=TOKENS).memory.points == sum(x.nbytes for x in cache.values())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by transformers, before torch 2.11
def test_experts_in_bfloat16() -> None:
    if torch_is_before("2.9"):  # on which `tiny_models` has experts in a loop, whose shapes depend on the data
        with pytest.raises(HooklineError, match="running"):
            empty("mixtral", torch.bfloat16).plan("blocks.*.hook_resid_post", input=TOKENS)
        return
    memory = empty("mixtral", torch.bfloat16).plan("blocks.*.hook_resid_post", input=TOKENS).memory
    numbers = sum(x.numel() for x in causal_lm("mixtral").parameters())
    buffers = sum(x.nbytes for x in causal_lm("mixtral").buffers())
    assert memory.weights == 2 * numbers + buffers
    if torch_is_before("2.15"):  # which has such a kernel for empty tensors
        with pytest.raises(HooklineError, match="running"):
            empty("mixtral").plan("blocks.*.hook_resid_post", input=TOKENS)
    else:
        assert empty("mixtral").plan("blocks.*.hook_resid_post", input=TOKENS).memory.weights == 4 * numbers + buffers


def test_a_store_has_the_size_that_was_told(tmp_path) -> None:
    model = hookline.hook(causal_lm("llama").eval())
    memory = model.plan("blocks.*.hook_resid_post", input=TOKENS[:1], texts=60).memory
    hookline.harvest(model, TOKENS.repeat(20, 1), "blocks.*.hook_resid_post", tmp_path / "s", progress=False)
    size = sum(file.stat().st_size for file in (tmp_path / "s").glob("*.safetensors"))
    assert memory.store < size < memory.store + 6000  # the header
    assert memory.loaded == memory.weights


def test_several_devices_have_their_parts_of_the_weights() -> None:
    model = empty("llama")
    whole, half = (model.plan(0, input=TOKENS, devices=count).memory for count in (1, 2))
    parts = {name: x.nbytes for name, x in model.module.named_parameters()}
    # transformers 5.17 leaves the embedding whole, and 5.6 the head too
    kinds = ["_proj", *({"lm_head", "model.embed_tokens"} & {*model.module.tp_plan})]
    split = sum(size for name, size in parts.items() if any(kind in name for kind in kinds))
    assert half.weights == whole.weights - split // 2
    assert half.kv_cache == whole.kv_cache // 2
    assert half.points == whole.points
    with pytest.raises(HooklineError, match="tensor-parallel plan"):
        _ = empty("gpt2").plan(0, input=TOKENS, devices=2).memory
    with pytest.raises(HooklineError, match=r"4 heads.*3 processes"):  # as loading it does
        _ = model.plan(0, input=TOKENS, devices=3).memory


def test_what_is_not_known() -> None:
    with pytest.raises(HooklineError, match=r"model\.plan\(…, input=…\)"):
        _ = empty("llama").plan().memory
    with pytest.raises(HooklineError, match="plan"):
        _ = hookline.hook(torch.nn.Linear(2, 2)).plan(input=torch.ones(1, 2)).memory
    assert hookline.hook(encoder("bert")).plan(0, input=TOKENS).memory.kv_cache == 0


def invoked(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output


def test_the_command(tmp_path) -> None:
    fused("llama").config.save_pretrained(tmp_path)  # no weights
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, table = invoked(str(tmp_path), "--batch", "3", "--length", "24", "--points", "blocks.*.hook_resid_post")
    assert code == 0
    assert [line.split("  ")[0] for line in table.splitlines()][1:] == [
        *("weights", "keys and values", "forward", "points", "total", "free")
    ]
    code, told = invoked(
        str(tmp_path), "--batch", "3", "--length", "24", "--texts", "7", "--json", "--dtype", "bfloat16"
    )
    wanted = empty("llama", torch.bfloat16).plan("blocks.*.hook_resid_post", input=TOKENS, texts=7).memory
    assert {**json.loads(told), "available": 0} == {**wanted.to_json(), "available": 0}
    assert invoked(str(tmp_path), "--texts", "1000000000000", "--length", "24")[0] == 0  # a store is on disk
    code, told = invoked(str(tmp_path), "--batch", "1000000", "--length", "24", "--json")
    assert (code, json.loads(told)["fits"]) == (1, False)
    assert invoked(str(tmp_path), "--batch", "1000000000", "--length", "1000")[0] == 2
    assert invoked(str(tmp_path), "--dtype", "float99")[0] == 2


def test_a_quantized_model_is_not_guessed(tmp_path) -> None:
    causal_lm("llama").config.save_pretrained(tmp_path)
    config = json.loads(Path(tmp_path / "config.json").read_text())
    Path(tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert invoked(str(tmp_path))[0] == 3


def test_what_cannot_be_planned() -> None:
    model = empty("gpt2")
    with pytest.raises(HooklineError, match=f"context is {model.cfg.n_ctx}"):
        model.plan(0, input=TOKENS, new_tokens=model.cfg.n_ctx)
    with pytest.raises(HooklineError, match=r"texts=.* -1"):
        model.plan(0, input=TOKENS, texts=-1)

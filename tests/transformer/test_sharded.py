"""Tensor-parallel models: every point, edit, gradient and weight is that of the model in one process."""

import copy
import os
import pickle
import re
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import autoencoders
import pytest
import sharded_models
import tiny_models
import torch
import torch.distributed as dist
from sharded_models import IDS, pair, run
from torch.nn.parallel import DistributedDataParallel

import hookline
from hookline import HooklineError, UnknownPointError
from hookline.experiments import (
    ablation,
    attribution,
    circuits,
    edges,
    feature_circuits,
    graphs,
    metrics,
    patching,
    probes,
    reading,
    relevance,
)
from hookline.hooks import Hook, HookType
from hookline.transformer import shard_lenses

GIVEN = (IDS[:1], IDS[1:], metrics.logit_diff(5, 7))
pytestmark = [pytest.mark.on_cpu(reason="its processes are on the CPU"), sharded_models.needs_plans]


def short_path(folder: str) -> dict[str, object]:
    """What one process of two finds on one model: `test_a_tensor_parallel_model` says what it must be."""
    whole, sharded = pair("llama", folder, num_hidden_layers=2)
    found: dict[str, object] = {"differences": list(sharded_models.differences(whole, sharded))}
    with torch.no_grad():
        native = "model.layers.1.mlp.down_proj.input"
        caches = [model.cache(IDS, names_filter=native)[native] for model in (whole, sharded)]
        found["native"] = torch.allclose(*caches, atol=1e-5)
        try:
            sharded.point("model.layers.1.mlp.act_fn")
        except UnknownPointError as error:
            found["inside"] = str(error)
        found["items"] = _said(lambda: sharded.point("model.layers.1.self_attn[1]"))
        sweeps = [
            patching.sweep(
                model, IDS[:1], IDS[1:], metrics.logit_diff(5, 7), points="z", over=("layer", "head"), progress=False
            ).values
            for model in (whole, sharded)
        ]
        found["sweep"] = torch.allclose(*sweeps, atol=1e-4)
    found["copied"] = _said(lambda: copy.deepcopy(sharded)) + _said(lambda: pickle.dumps(sharded))
    found |= disagreements(sharded)
    found["unnoticed"] = unnoticed(sharded)
    found["DDP"] = around_ddp()
    found["other hooks"] = _said(lambda: _hook_by_rank(sharded))
    found["late hooks"] = _said(lambda: _late_hook_by_rank(sharded))
    sharded.add_hook(f"blocks.{dist.get_rank()}.hook_resid_post", lambda x, hook: x)
    found["other permanent hooks"] = _said(lambda: sharded(IDS))
    sharded.reset_hooks()
    with torch.no_grad():
        found["goes on"] = torch.allclose(whole(IDS), sharded(IDS), atol=1e-5)
    return found


def disagreements(model) -> dict[str, str]:
    """What is said if the processes do not compute the same."""
    rank = dist.get_rank()
    noise = torch.Generator().manual_seed(rank)

    def noisy(x, hook):
        return x + 0.01 * torch.randn(x.shape, generator=noise)

    def only_in_one(x, hook):
        return x * 2 if rank else None

    def gradients() -> None:
        with model.hooks(bwd_hooks=[(Z, lambda grad, hook: grad * (1 + rank))]):
            model(IDS).sum().backward()

    found = {
        "noise": _said(lambda: model.run_with_hooks(IDS, fwd_hooks=[(MID, lambda x, hook: x), (Z, noisy)])),
        "only in one": _said(lambda: model.run_with_hooks(IDS, fwd_hooks=[(Z, only_in_one)])),
        "other tokens": _said(lambda: model.run_with_cache(IDS + rank, names_filter=MID)),
        "other lengths": _said(lambda: model.run_with_cache(IDS[:, rank:], names_filter=MID)),
        "gradients": _said(gradients),
        "local": _said(lambda: model.run_with_cache(IDS, names_filter=Z, local=rank == 0)),
    }
    model.add_hook(Z, noisy)
    found["permanent"] = _said(lambda: model(IDS))
    model.reset_hooks()
    return found


def unnoticed(model) -> list[tuple[str, str]]:
    """The points at which a hook that depends on the process is accepted, and what it does."""
    rank, four = dist.get_rank(), IDS[:1, :4]
    kept = []

    def keep(x, hook):
        if rank:
            kept.append(x)

    def backward(name, hook):
        with model.hooks(fwd_hooks=[(name, hook)]):
            model(IDS).sum().backward()

    def stopped(name, hook):
        try:
            model.add_hook(name, hook)
            model(four, stop_at_layer=2)
        finally:
            model.reset_hooks()

    by_rank = {
        "a vector": lambda x, hook: x + rank,
        "in one only": lambda x, hook: x * 2 if rank else None,
        "one head": lambda x, hook: torch.cat([x[:, :, :1] * (1 + rank), x[:, :, 1:]], 2),
        "noise in one position": lambda x, hook: x + rank * 0.01 * (torch.arange(x.shape[1]) == 2)[:, None, None],
    }
    with torch.no_grad():
        _, cache = model.run_with_cache(four)
    names = [name for name in cache if cache[name].is_floating_point()]
    names += [f"blocks.1.{name}" for name in PER_HEAD]
    found = []
    for name in names:
        for what, hook in list(by_rank.items())[: None if name.endswith(PER_HEAD) else 2]:
            with torch.no_grad():
                if not _said(lambda name=name, hook=hook: model.run_with_hooks(four, fwd_hooks=[(name, hook)])):
                    found.append((name, what))
    for name in (*(f"blocks.1.{name}" for name in PER_HEAD), Z, MID):
        two = [(name, by_rank["in one only"]), (name, lambda x, hook: None)]
        if not _said(lambda two=two: model.run_with_cache(four, names_filter=[two[0][0]], fwd_hooks=two)):
            found.append((name, "before another hook"))
        if not _said(lambda name=name: backward(name, by_rank["in one only"])):
            found.append((name, "before a backward pass"))
        if not _said(lambda name=name: stopped(name, by_rank["in one only"])):
            found.append((name, "before the pass is stopped"))
        backward(name, keep)  # what one process alone keeps or copies is no difference
        backward(name, lambda x, hook: x.clone() if rank else None)
    scale = model.module.model.norm.weight
    scale.data *= 1 + rank
    if not _said(lambda: model.run_with_hooks(four, fwd_hooks=[("model.norm.output", lambda x, hook: None)])):
        found.append(("model.norm", "other weights"))
    scale.data /= 1 + rank
    return found


def around_ddp() -> dict[str, tuple[bool, bool]]:
    """Whether each way to compute gradients beside DDP warns, and whether the processes have different ones."""

    def hooked_inside(module):
        model = hookline.hook(module)
        return model, DistributedDataParallel(module)

    def hooked_outside(module):
        outer = DistributedDataParallel(module)
        return hookline.hook(outer), outer

    def around_hooked(module):
        model = hookline.hook(module)
        return model, DistributedDataParallel(model)

    def in_context(model, outer, hooks):
        with model.hooks(fwd_hooks=hooks):
            (model if outer is None else outer)(ids).logits.sum().backward()

    def around_it_later(model, _, hooks):
        model.run_with_hooks(ids, fwd_hooks=hooks)
        outer = DistributedDataParallel(model.module)
        model.run_with_hooks(ids, fwd_hooks=hooks).sum().backward()
        assert outer.training

    def none_are_kept(model, outer, _):
        model.run_with_cache(ids, incl_bwd=True, loss_fn=torch.sum)
        with outer.no_sync():
            model(ids).sum().backward()

    ways = {
        "run_with_hooks": (hooked_inside, lambda m, _, hooks: m.run_with_hooks(ids, fwd_hooks=hooks).sum().backward()),
        "of the wrapper": (hooked_outside, lambda m, _, hooks: m.run_with_hooks(ids, fwd_hooks=hooks).sum().backward()),
        "around the hooked": (around_hooked, lambda m, _, __: m.run_with_cache(ids)[0].sum().backward()),
        "DDP in a context": (hooked_inside, in_context),
        "DDP of the hooked": (around_hooked, lambda _, outer, __: outer(ids).sum().backward()),
        "DDP made later": (lambda module: (hookline.hook(module), None), around_it_later),
        "no DDP": (lambda module: (hookline.hook(module), None), lambda m, _, __: m(ids).sum().backward()),
        "none are kept": (hooked_inside, none_are_kept),
    }
    ids, found = IDS + dist.get_rank(), {}
    for name, (make, act) in ways.items():
        module = sharded_models.tiny_model("llama", num_hidden_layers=2)
        models = make(module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act(*models, [(Z, lambda x, hook: x * 2)])
        grads = [torch.empty_like(module.lm_head.weight) for _ in range(2)]
        dist.all_gather(grads, module.lm_head.weight.grad)
        warns = any("gradients are not synchronized" in str(warning.message) for warning in caught)
        found[name] = warns, not torch.allclose(*grads, atol=1e-6)
    return found


PER_HEAD = ("hook_q_input", "hook_k_input", "hook_v_input", "attn.hook_result")
Z, MID = "blocks.1.attn.hook_z", "blocks.0.hook_resid_post"


def _hook_by_rank(model) -> None:
    """Each process hooks another layer."""
    model.run_with_hooks(IDS, fwd_hooks=[(f"blocks.{dist.get_rank()}.hook_resid_post", lambda x, hook: x)])


def _late_hook_by_rank(model) -> None:
    """All processes hook the same points first, and then each another layer."""
    same = [(MID, lambda x, hook: x)] * 20
    model.run_with_hooks(IDS, fwd_hooks=[*same, (f"blocks.{dist.get_rank()}.hook_resid_pre", lambda x, hook: x)])


def _said(act) -> str:
    try:
        act()
    except HooklineError as error:
        return str(error)
    return ""


def test_a_tensor_parallel_model(tmp_path) -> None:
    for found in run(short_path, 2, str(tmp_path)):
        assert found["differences"] == []
        assert found["native"] is True
        assert "act_fn" in found["inside"]
        assert "[1] of its output is not available" in found["items"]
        assert found["sweep"] is True
        assert "blocks.0.hook_resid_post" in found["other hooks"]
        assert "blocks.1.hook_resid_post" in found["other hooks"]
        assert "blocks.1.hook_resid_post" in found["other permanent hooks"]
        assert re.search(r"hooks blocks\.[01]\.hook_resid_pre .* after 20 hooks that both have", found["late hooks"])
        assert found["goes on"] is True
        assert found["copied"].count("copying or pickling is not available on a model that is sharded") == 2
        for what in ("noise", "only in one", "gradients", "permanent"):
            assert f"a hook at {Z!r} made something else" in found[what], what
        assert "differ from those of this process in input_ids" in found["other tokens"]
        assert "differ from those of this process in input_ids" in found["other lengths"]
        assert "OwnRecord" in found["local"]
        assert found["unnoticed"] == []
        warns, right, not_ours = (True, True), (False, False), (False, True)
        assert found["DDP"] == {
            **{"run_with_hooks": warns, "of the wrapper": right, "around the hooked": warns, "DDP in a context": right},
            **{"DDP of the hooked": right, "DDP made later": warns, "no DDP": not_ours, "none are kept": not_ours},
        }


def uses(folder: str) -> dict[str, object]:
    """What one process finds when a sharded model is used in every way."""
    whole, sharded = models = pair("llama", folder)
    found: dict[str, object] = {}
    for name, use in USES.items():
        values = []
        for model in models:
            torch.manual_seed(0)
            values.append(torch.as_tensor(use(model)).detach())
        found[name] = list(sharded_models.unlike(name, *values))
    found["refused"] = [
        _said(sharded.process_weights),
        _said(lambda: graphs.attribution_graph(sharded, IDS[:1])),
        _said(lambda: relevance.relevance(sharded, *GIVEN)),
    ]
    found["unsharded"] = [indices.tolist() for indices in _indices(whole)]
    found["sharded"] = [indices.tolist() for indices in _indices(sharded)]
    return found


def _indices(model) -> list[torch.Tensor]:
    cache = model.run_with_cache(IDS, local=True)[1]
    return [cache.local_indices(name) for name in (Z, "blocks.0.attn.hook_k", "blocks.0.mlp.hook_post", MID)]


def _registered(model) -> torch.Tensor:
    """The logits with hook objects at both ends of a layer of which each process has a part."""
    seen = []

    class Before(Hook):
        """Weights the columns of the argument."""

        def __call__(self, module, args, kwargs, output):
            return (args[0] * torch.linspace(0, 1, args[0].shape[-1]), *args[1:]), kwargs

    class Twice(Hook):
        """Doubles what it gets."""

        def _hook_fn(self, module, input, output):
            return 2 * (input[0] if output is None else output)

    class After(Hook):
        """Keeps what the layer was called with."""

        def __call__(self, module, args, kwargs, output):
            seen.append(args[0].detach().clone())

    layer = "model.layers.1.mlp.down_proj"
    model.registry.register_hook(layer, Before(hook_type=HookType.PRE_FORWARD))
    model.registry.register_hook(layer, After())
    model.registry.register_hook(f"{layer}.input", Twice(hook_type=HookType.PRE_FORWARD))
    model.registry.register_hook("model.layers.0.self_attn.q_proj", Twice(hook_type=HookType.PRE_FORWARD))
    model.registry.register_hook("model.layers.0.self_attn.v_proj", Twice())
    logits = model(IDS)
    model.registry.unregister_all()
    return torch.cat([logits.flatten(), *(each.flatten() for each in seen)])


def _generated(model) -> torch.Tensor:
    with model.hooks(fwd_hooks=[(Z, hookline.edits.scale(3.0, head=2))]):
        return model.generate(IDS, max_new_tokens=5, do_sample=True)


def _rerun(model) -> torch.Tensor:
    base = model.baseline(IDS[:1], keep=[Z])
    change = base.change(Z, torch.ones(base.kept[Z].shape[-1]), pos=3, head=1)
    return torch.cat([logits for _, logits in base.rerun([[change]])])


def _features(model) -> torch.Tensor:
    torch.manual_seed(0)  # the bias of the autoencoder is random
    saes = {"blocks.1.hook_resid_post": autoencoders.sae_for(model.cfg.d_model)}
    scores = feature_circuits.feature_scores(model, *GIVEN, saes, progress=False)
    return circuits.faithfulness(model, *GIVEN, scores, [0, 0.3, 1], saes=saes, progress=False).values


USES = {
    "hook objects": _registered,
    "sampling with hooks": _generated,
    "baseline": _rerun,
    "ablation": lambda model: (
        ablation.ablate(
            model, IDS[:1], metrics.logit_diff(5, 7), points="z", over=("layer", "head"), progress=False
        ).values
    ),
    "attribution": lambda model: (
        attribution.attribution_patching(
            model, IDS[:1], IDS[1:], metrics.logit_diff(5, 7), points="z", progress=False
        ).values
    ),
    "autoencoder": lambda model: model.run_with_hooks(
        IDS, fwd_hooks=[autoencoders.sae_for(model.cfg.d_model).spliced(MID, keep_error=False)]
    ),
    "circuits": lambda model: (
        circuits.faithfulness(
            model, *GIVEN, edges.edge_scores(model, *GIVEN, check=0, progress=False), [0, 0.3, 1], progress=False
        ).values
    ),
    "features": _features,
    "probes": lambda model: probes.fit(model, [[5 + i, 17, 4 + i, 7] for i in range(12)], [0, 1] * 6).weights,
    "reading": lambda model: reading.patchscope(model, IDS[:1], IDS[1:], marker=-1).values,
    "composition": lambda model: model.OV.AB,
    "loss": lambda model: model(IDS, return_type="loss"),
    "result, edited": lambda model: model.run_with_hooks(
        IDS, fwd_hooks=[("blocks.0.attn.hook_result", hookline.edits.zero(head=1))]
    ),
    "inputs of heads, edited": lambda model: model.run_with_hooks(
        IDS, fwd_hooks=[("blocks.0.hook_q_input", hookline.edits.zero(head=3))]
    ),
}


@pytest.mark.slow
def test_every_use(tmp_path) -> None:
    for rank, found in enumerate(run(uses, 2, str(tmp_path))):
        assert [found[name] for name in USES] == [[] for _ in USES]
        assert all("sharded over processes" in each for each in found["refused"])
        heads, keys, neurons, columns = found["unsharded"]
        assert (heads, keys) == ([0, 1, 2, 3], [0, 1])
        assert found["sharded"] == [
            heads[2 * rank : 2 * rank + 2],
            keys[rank : rank + 1],
            neurons[rank * len(neurons) // 2 : (rank + 1) * len(neurons) // 2],
            columns,
        ]


def three_processes(folder: str) -> dict[str, object]:
    """Six heads, three of keys, 50 neurons in three processes: 17, 17 and 16; tied embeddings; 16 bits."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 50}
    found: dict[str, object] = {}
    for name, dtype, more in (
        ("uneven", torch.float32, {}),
        ("tied", torch.float32, {"tie_word_embeddings": True}),
        ("16 bits", torch.bfloat16, {}),
    ):
        where = Path(folder, name)
        where.mkdir(exist_ok=True)
        dist.barrier()
        whole, sharded = pair("llama", str(where), dtype, **sizes, **more)
        found[name] = list(sharded_models.differences(whole, sharded, verifies=False))
    found["neurons"] = _indices(sharded)[2].tolist()
    unlike = sharded_models.both("llama", folder, num_attention_heads=4, num_key_value_heads=2)[1]
    found["heads"] = _said(lambda: hookline.hook(unlike))
    return found


@pytest.mark.slow
def test_three_processes(tmp_path) -> None:
    for rank, found in enumerate(run(three_processes, 3, str(tmp_path))):
        assert found["uneven"] == found["tied"] == found["16 bits"] == []
        assert found["neurons"] == [*range(17 * rank, min(17 * rank + 17, 50))]
        assert "has 4 heads of 24 columns" in found["heads"]
        assert "3 processes cannot share" in found["heads"]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_architecture_with_a_plan(part, tmp_path) -> None:
    planned = [kind for kind in tiny_models.CAUSAL if sharded_models.has_plan(kind)]
    found = run(sharded_models.all_differences, 2, planned[part::8], str(tmp_path))
    for differences in found:
        wrong = {kind: each for kind, each in differences.items() if each and not each[0].startswith(OTHERS)}
        assert wrong == {}


OTHERS = ("transformers: ", "refused: ", "no classic points")


@pytest.mark.slow
def test_the_script_in_the_docs(tmp_path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```py\n(# tensor_parallel.py\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "tensor_parallel.py").write_text(script, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--redirects", "3", "--log-dir", str(tmp_path)]  # or what two processes print may be in one line
    subprocess.run([*launch, "tensor_parallel.py"], cwd=tmp_path, capture_output=True, check=True)
    said = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("stdout.log"))
    assert said.count("torch.Size([1, 4, 4, 8])") == 2
    assert said.count("tensor(True)") == 2
    assert said.count("torch.Size([1, 4, 2, 8]) tensor([2, 3])") == 1


def one_is_missing(folder: str, how: str) -> tuple[str, float]:
    """What the first process is told if the second one sleeps, fails or dies in a run, and after how many seconds."""
    shard_lenses.TIMEOUT = timedelta(seconds=5)
    _, sharded = pair("llama", folder)
    rank, noticed = dist.get_rank(), Path(folder, "noticed")

    def away(x, hook) -> None:
        if rank and how == "dies":
            os._exit(0)
        while rank and not noticed.exists():
            time.sleep(0.1)

    began, said = time.monotonic(), ""
    if rank == 0 or how != "stays away":
        said = _said(lambda: sharded.run_with_hooks(IDS, fwd_hooks=[(Z, away)]))
        noticed.touch()
    while not noticed.exists():
        time.sleep(0.1)
    return said, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", "dies", "stays away"])
def test_a_process_that_is_missing_ends_in_an_error(how, tmp_path) -> None:
    said, seconds = run(one_is_missing, 2, str(tmp_path), how, is_lost=True)[0]
    assert "another one has ended" in said or "another process has ended" in said, said
    assert seconds < 60, "the limits are 5 s for hookline's collectives and 20 s for the model's"


def in_place_on_parts(folder: str) -> dict[str, object]:
    """Llama 4, which adds to the output of a split layer in place: torch has no gradients of that."""
    whole, sharded = (hookline.hook(module) for module in sharded_models.both("llama4_text", folder))
    with torch.no_grad():
        (logits, cache), (other_logits, other) = whole.run_with_cache(IDS), sharded.run_with_cache(IDS)
        edited = [model.run_with_hooks(IDS, fwd_hooks=[(Z, sharded_models.uneven)]) for model in (whole, sharded)]
    found: dict[str, object] = {"logits": list(sharded_models.unlike("logits", logits, other_logits))}
    found["points"] = [said for name in cache for said in sharded_models.unlike(name, cache[name], other[name])]
    found["edited"] = list(sharded_models.unlike("edited", *edited))
    found["run_with_cache"] = _said(lambda: sharded.run_with_cache(IDS))

    def in_context() -> None:
        with sharded.hooks(fwd_hooks=[(MID, lambda x, hook: x * 2)]):
            sharded(IDS)

    found["hooks"] = _said(in_context)
    sharded.add_hook(MID, lambda x, hook: x * 2)
    try:
        sharded(IDS)
    except RuntimeError as error:
        found["permanent"] = "".join(error.__notes__)
    return found


@pytest.mark.slow
def test_a_model_without_gradients_in_parts_says_so(tmp_path) -> None:
    for found in run(in_place_on_parts, 2, str(tmp_path)):
        assert found["logits"] == found["points"] == found["edited"] == []
        for what in ("run_with_cache", "hooks", "permanent"):
            assert "Run it under torch.no_grad()" in found[what], what


def other_parallelism(folder: str) -> dict[str, object]:
    """Models that are on several processes in other ways: whole points, or an error that says which way it is."""
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    whole = sharded_models.tiny_model("llama")
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    expected = hookline.hook(whole).run_with_cache(IDS)[1]
    found: dict[str, object] = {}

    def unlike(module) -> list[str]:
        model = hookline.hook(module)
        logits, cache = model.run_with_cache(IDS)
        edited = [
            each.run_with_hooks(IDS, fwd_hooks=[(Z, sharded_models.uneven)]) for each in (hookline.hook(whole), model)
        ]
        wrong = [said for name in expected for said in sharded_models.unlike(name, expected[name], cache[name])]
        logits.sum().backward()
        return [*wrong, *sharded_models.unlike("edited", *edited)]

    found["DDP"] = unlike(DistributedDataParallel(LlamaForCausalLM.from_pretrained(folder)))
    split = LlamaForCausalLM.from_pretrained(folder)
    for layer in split.model.layers:
        fully_shard(layer)
    fully_shard(split)
    found["FSDP2"] = unlike(split)
    staged = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(pp_size=2))
    found["pp"] = _said(lambda: hookline.hook(staged))
    experts = sharded_models.tiny_model("mixtral")
    if dist.get_rank() == 0:
        experts.save_pretrained(f"{folder}/experts")
    dist.barrier()
    config = DistributedConfig(tp_size=2, ep_size=2, tp_plan={})
    spread = type(experts).from_pretrained(f"{folder}/experts", distributed_config=config)
    found["ep"] = _said(lambda: hookline.hook(spread))
    return found


@pytest.mark.slow
def test_other_ways_to_use_several_processes(tmp_path) -> None:
    for found in run(other_parallelism, 2, str(tmp_path)):
        assert found["DDP"] == found["FSDP2"] == []
        for kind in ("pp", "ep"):
            assert "is sharded over processes" in found[kind]
            assert f"{kind}_size=2" in found[kind]

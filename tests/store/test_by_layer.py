"""A harvest by layer: the bytes of a plain one, with one layer's weights in memory, also after kills."""

import errno
import json
import os
import shutil
import signal
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from stores import files, texts
from tiny_models import CAUSAL, causal_lm, seq2seq

import hookline
from hookline import HooklineError
from hookline.errors import StoreError
from hookline.hooks.data_edits import DataEdit
from hookline.store.by_layer import LayerHarvest
from hookline.store.layer_weights import REST, LayerWeights
from hookline.store.selection import HarvestOptions
from hookline.store.stage_files import StageFiles
from hookline.transformer.empty import from_pretrained_empty
from hookline.transformer.hub import find_model

pytestmark = pytest.mark.on_cpu(reason="it compares layers on the CPU with a plain harvest, bit for bit")

TOKENS = [[5, 17, 42, 7, 9, 11, 3], [8, 9, 10], [12, 13, 14, 15, 16, 17, 18], [6]]
OPTIONS = {"batch_size": 3, "progress": False}
POINTS = [
    "blocks.*.hook_resid_post",
    "blocks.2.attn.hook_z",
    "hook_embed",
    "ln_final.hook_normalized",
    "unembed.hook_out",
]
TINYWORLD = find_model("tinyworld", {}).path
SOME = [
    *("llama", "gpt2", "gemma2", "mixtral", "mamba", "zamba2", "bert"),
    *("deepseek_v3", "gpt_oss", "qwen3_next"),
    "youtu",  # transformers sets the padding token's embedding to zero after loading it
]
REFUSED = {
    **{
        "gemma3n_text": "num_kv_shared_layers",
        "rwkv": "pass on more than the stream",
        "mllama": "does not run on text",
    },
    **{"deepseek_v4": "do not simply return a stream", "gemma3": "it has a vision tower"},
    **dict.fromkeys(
        ("cpmant", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), "more than the stream"
    ),
    **dict.fromkeys(("glm_moe_dsa", "hy_v4", "prophetnet", "reformer", "zaya"), "more than the stream"),
    "got_ocr2": "it has a vision tower",
}
NOT_HARVESTED = {"blt", "hrm_text", "longcat_flash", "musicgen", "musicgen_melody", "xlm", "xlnet", "xlstm"}
"""A plain harvest of their classic points is not possible either."""


def saved(kind: str, folder: Path, **options) -> type:
    torch.manual_seed(0)
    module = causal_lm(kind)
    module.save_pretrained(folder, **options)
    return type(module)


def storable(model) -> list[str]:
    """The classic points with one row per position."""
    axes = {name: point.axes.split() for name, point in model.hook_dict.items()}
    return [name for name, each in axes.items() if ("p" in each) != ("k" in each)]


def harvested(model, points: list[str], folder: Path) -> list[str]:
    """Harvest those of the points that a plain harvest takes on this architecture; returns them."""
    while True:
        try:
            hookline.harvest(model, TOKENS, points, folder, **OPTIONS)
        except HooklineError as error:
            left = [name for name in points if repr(name) not in str(error)]
            if not 0 < len(left) < len(points):
                raise
            points = left
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return points


def check_equal(kind: str, tmp_path: Path) -> None:
    cls = saved(kind, tmp_path / "model")
    plain = hookline.hook(cls.from_pretrained(tmp_path / "model").eval())
    points = harvested(plain, storable(plain), tmp_path / "plain")
    empty = hookline.hook(from_pretrained_empty(cls, tmp_path / "model"))
    store = hookline.harvest(empty, TOKENS, points, tmp_path / "layers", by_layer=True, **OPTIONS)
    assert store.verify().is_sound
    assert len(store) == 18
    assert files(tmp_path / "layers") == files(tmp_path / "plain")
    assert not (tmp_path / "layers.by_layer").exists()
    assert all(parameter.is_meta for parameter in empty.module.parameters())


@pytest.mark.parametrize("kind", SOME)
def test_it_has_the_bytes_of_a_plain_harvest(kind, tmp_path) -> None:
    check_equal(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*CAUSAL} - {*SOME} - {*REFUSED} - NOT_HARVESTED - {"big_bird"}))
def test_every_other_architecture_has_them_too(kind, tmp_path) -> None:
    check_equal(kind, tmp_path)


@pytest.mark.parametrize("kind", ["gemma3n_text", "mllama", pytest.param("rwkv", marks=pytest.mark.slow)])
def test_layers_that_need_more_than_a_stream_are_refused(kind, tmp_path) -> None:
    cls = saved(kind, tmp_path / "model")
    empty = hookline.hook(from_pretrained_empty(cls, tmp_path / "model"))
    with pytest.raises(HooklineError, match=rf"by_layer=True.*{REFUSED[kind]}"):
        hookline.harvest(empty, TOKENS, "blocks.2.hook_resid_post", tmp_path / "store", by_layer=True, **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*REFUSED} - {"gemma3n_text", "mllama", "rwkv"}))
def test_all_others_that_are_refused(kind, tmp_path) -> None:
    test_layers_that_need_more_than_a_stream_are_refused(kind, tmp_path)


def test_a_model_that_its_first_short_text_changes_is_refused(tmp_path) -> None:
    """BigBird then switches from sparse to full attention, for all later texts."""
    cls = saved("big_bird", tmp_path / "model")
    for attention in ("block_sparse", "original_full"):
        plain = hookline.hook(cls.from_pretrained(tmp_path / "model", attention_type=attention).eval())
        empty = hookline.hook(from_pretrained_empty(cls, tmp_path / "model", attention_type=attention))
        for model, by_layer in ((plain, False), (empty, True)):
            refused = pytest.raises(HooklineError, match="attention_type='original_full'")
            with refused if attention == "block_sparse" else nullcontext():
                where = tmp_path / f"{attention}-{by_layer}"
                hookline.harvest(model, TOKENS, POINTS[:2], where, by_layer=by_layer, **OPTIONS)
    assert files(tmp_path / "original_full-True") == files(tmp_path / "original_full-False")


def test_models_with_an_encoder_or_a_vision_tower_are_refused(tmp_path) -> None:
    seeing = hookline.load("tinysight").module
    for module, why in ((seq2seq("t5"), "reads the encoder's output"), (seeing, "it has a vision tower")):
        hooked = hookline.hook(module.to("meta"))
        with pytest.raises(HooklineError, match=why):
            hookline.harvest(hooked, TOKENS, "blocks.*.hook_resid_post", tmp_path / "store", by_layer=True)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_torch_cannot_use(device, tmp_path) -> None:
    with pytest.raises(HooklineError, match=f"by_layer='{device}'"):
        hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=device, **OPTIONS)
    assert not [*tmp_path.iterdir()]


def test_a_folder_with_texts(tmp_path) -> None:
    plain = hookline.load(TINYWORLD)
    hookline.harvest(plain, texts(), POINTS, tmp_path / "plain", **OPTIONS)
    hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")
    hookline.harvest(plain, texts(), POINTS, tmp_path / "layers", **OPTIONS)  # the same harvest, so it is complete
    hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    assert not (tmp_path / "layers.by_layer").exists()


@pytest.mark.parametrize(
    "options",
    [{"positions": hookline.last}, {"sample": 0.4, "max_rows": 37}, {"dtype": torch.bfloat16, "shard_rows": 9}],
)
def test_the_options_of_a_harvest(options, tmp_path) -> None:
    hookline.harvest(hookline.load(TINYWORLD), texts(), POINTS, tmp_path / "plain", **OPTIONS, **options)
    hookline.harvest(TINYWORLD, iter(texts()), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS, **options)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")


def test_several_files_of_weights_in_another_dtype(tmp_path) -> None:
    module = causal_lm("llama").to(torch.bfloat16)
    module.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    plain = hookline.hook(type(module).from_pretrained(tmp_path / "model", dtype=torch.float32))
    empty = hookline.hook(from_pretrained_empty(type(module), tmp_path / "model", dtype=torch.float32))
    hookline.harvest(plain, TOKENS, POINTS, tmp_path / "plain", **OPTIONS)
    hookline.harvest(empty, TOKENS, POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")


def test_a_model_made_on_the_meta_device_whose_config_names_its_folder(tmp_path) -> None:
    plain = hookline.load(TINYWORLD)
    with torch.device("meta"):
        module = type(plain.module)(plain.module.config)
    module.config.name_or_path = str(TINYWORLD)
    hookline.harvest(plain, texts(), POINTS, tmp_path / "plain", **OPTIONS)
    given = hookline.hook(module.eval(), plain.tokenizer)
    hookline.harvest(given, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")


def test_edits_act_in_the_layer_that_they_are_in(tmp_path) -> None:
    edit: DataEdit = hookline.edits.zero(head=1)
    for name, model in (("plain", hookline.load(TINYWORLD)), ("layers", hookline.load(TINYWORLD, device="meta"))):
        by_layer = name == "layers"
        added = [
            model.add_hook(point, hookline.edits.scale(0.5)) for point in ("blocks.1.hook_resid_post", "hook_embed")
        ]
        with model.hooks([("blocks.0.attn.hook_z", edit), ("blocks.2.hook_resid_pre", hookline.edits.scale(2.0))]):
            hookline.harvest(model, texts(), POINTS, tmp_path / name, by_layer=by_layer, **OPTIONS)
        for remove in added:
            remove()
    assert files(tmp_path / "layers") == files(tmp_path / "plain")


def test_no_more_than_one_layer_is_in_memory(tmp_path, monkeypatch) -> None:
    model = hookline.load(TINYWORLD, device="meta")
    weights, seen = LayerWeights(model, torch.device("cpu")), []
    own = StageFiles.count

    def count(self) -> None:
        real = {id(x): x.nbytes for x in model.module.parameters() if not x.is_meta}
        seen.append((self.stage, sum(real.values())))
        own(self)

    monkeypatch.setattr(StageFiles, "count", count)
    hookline.harvest(model, texts(), POINTS, tmp_path / "store", by_layer=True, **OPTIONS)
    stages = LayerHarvest(model, POINTS, HarvestOptions(), True)._stages
    wanted = {stage.number: weights.nbytes(REST, *stage.parts) for stage in stages}
    assert {*seen} == {*wanted.items()}
    whole = sum({id(x): x.nbytes for x in model.module.parameters()}.values())
    assert max(held for _, held in seen) < whole / 2


def killed(folder: Path, after: int) -> None:
    """A harvest in a process of its own, which is killed with -9 after so many batches of its stages."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        return
    own, left = StageFiles.count, [after]

    def count(self) -> None:
        own(self)
        left[0] -= self.stage > 0
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    StageFiles.count = count  # type: ignore[method-assign]
    try:
        hookline.harvest(TINYWORLD, texts(), POINTS, folder, by_layer=True, flush_every=0.0, **OPTIONS)
    finally:
        os._exit(1)


def test_a_kill_between_and_within_layers_loses_nothing(tmp_path) -> None:
    done = []
    for after in (4, 6, 14):  # a stage has 10 batches
        killed(tmp_path / "layers", after)
        state = json.loads((tmp_path / "layers.by_layer" / "state.json").read_text())
        done.append((state["stage"], state["done"]))
    assert done == [(1, 4), (1, 10), (3, 4)]  # each one continued where the one before was killed
    hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    hookline.harvest(hookline.load(TINYWORLD), texts(), POINTS, tmp_path / "plain", **OPTIONS)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")
    assert not (tmp_path / "layers.by_layer").exists()


def interrupted(folder: Path, monkeypatch, after: int, **options) -> None:
    """A harvest that Ctrl-C ends in a stage."""
    own, left = StageFiles.append, [after]

    def append(self, log, *args) -> None:
        left[0] -= log.startswith("stream")
        if left[0] < 0:
            raise KeyboardInterrupt
        own(self, log, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StageFiles, "append", append)
        with pytest.raises(KeyboardInterrupt):
            hookline.harvest(TINYWORLD, texts(), POINTS, folder, by_layer=True, **OPTIONS, **options)


def test_an_interrupt_keeps_every_finished_batch(tmp_path, monkeypatch) -> None:
    interrupted(tmp_path / "layers", monkeypatch, after=15)
    ran = []
    own = LayerHarvest._run
    monkeypatch.setattr(
        LayerHarvest, "_run", lambda self, stage, *args: (ran.append(stage.layer), own(self, stage, *args))[1]
    )
    hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    assert [ran.count(layer) for layer in (-1, 0, 1)] == [0, 5, 10]
    hookline.harvest(hookline.load(TINYWORLD), texts(), POINTS, tmp_path / "plain", **OPTIONS)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")


def test_an_unfinished_harvest_is_continued_only_by_the_same_one(tmp_path, monkeypatch) -> None:
    interrupted(tmp_path / "layers", monkeypatch, after=15)
    for changed in ({"sample": 0.5, "seed": 1}, {"dtype": torch.float16}):
        with pytest.raises(StoreError, match="unfinished"):
            hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS, **changed)
    with pytest.raises(StoreError, match="other data"):
        hookline.harvest(TINYWORLD, ["other"] * 30, POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    with pytest.raises(StoreError, match="other data"):
        hookline.harvest(TINYWORLD, [*texts(), "more"], POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    (tmp_path / "layers.by_layer" / "state.json").write_text("{")
    with pytest.raises(StoreError, match=r"state\.json is damaged"):
        hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)


def test_data_that_ends_in_an_error_is_read_again_from_its_beginning(tmp_path) -> None:
    def stopping():
        yield from texts()[:14]
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        hookline.harvest(TINYWORLD, stopping(), POINTS, tmp_path / "layers", by_layer=True, flush_every=0.0, **OPTIONS)
    hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    hookline.harvest(hookline.load(TINYWORLD), texts(), POINTS, tmp_path / "plain", **OPTIONS)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")


def flipped(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)


def shortened(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 50)


@pytest.mark.parametrize(
    ("log", "damage"),
    [
        *product(["batches", "points-1", "stream-2"], [Path.unlink, flipped, shortened]),
        *product(["state.json"], [flipped, shortened]),
    ],
)
def test_damaged_stages_are_refused(log, damage, tmp_path, monkeypatch) -> None:
    interrupted(tmp_path / "layers", monkeypatch, after=15)
    damage(tmp_path / "layers.by_layer" / log)
    with pytest.raises(StoreError, match=rf"{log}.*delete"):
        hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)


def test_a_full_disk_keeps_what_was_saved(tmp_path, monkeypatch) -> None:
    interrupted(tmp_path / "layers", monkeypatch, after=15)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"by_layer.*space"):
            hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "layers", by_layer=True, **OPTIONS)
    hookline.harvest(hookline.load(TINYWORLD), texts(), POINTS, tmp_path / "plain", **OPTIONS)
    assert files(tmp_path / "layers") == files(tmp_path / "plain")


def test_weights_that_change_during_the_harvest(tmp_path, monkeypatch) -> None:
    shutil.copytree(TINYWORLD, tmp_path / "model")
    own = LayerHarvest._run_stage

    def run(self, stage, **options) -> None:
        own(self, stage, **options)
        os.utime(next((tmp_path / "model").glob("*.safetensors")))

    monkeypatch.setattr(LayerHarvest, "_run_stage", run)
    with pytest.raises(HooklineError, match="changed during"):
        hookline.harvest(tmp_path / "model", texts(), POINTS, tmp_path / "store", by_layer=True, **OPTIONS)


def test_a_layer_that_reads_the_embeddings_again_is_not_run_without_them(tmp_path) -> None:
    model = hookline.load(TINYWORLD, device="meta")
    block, kept = model.anatomy.blocks[2].module, []
    handles = [
        model.module.transformer.drop.register_forward_hook(lambda module, args, output: kept.append(output)),
        block.register_forward_pre_hook(lambda module, args: (args[0] + kept[-1], *args[1:])),
    ]
    with pytest.warns(match="resumed"), pytest.raises(HooklineError, match=r"layer 2.*NaN.*input"):
        hookline.harvest(model, texts(), POINTS, tmp_path / "store", by_layer=True, **OPTIONS)
    for handle in handles:
        handle.remove()


def test_what_by_layer_does_not_take(tmp_path, monkeypatch) -> None:
    model = hookline.load(TINYWORLD)
    for given, by_layer, why in (
        (model, True, "weights are not in memory"),
        (TINYWORLD, False, "only with by_layer=True"),
        *((TINYWORLD, device, "not a device that layers can run on") for device in ("meta", "nonsense", None)),
        (hookline.hook(torch.nn.Linear(2, 2)), True, "language model of transformers"),
    ):
        with pytest.raises(HooklineError, match=why):
            hookline.harvest(given, texts(), POINTS, tmp_path / "store", by_layer=by_layer)
    nameless = hookline.load(TINYWORLD, device="meta").module
    with torch.device("meta"):
        other = type(nameless)(nameless.config)
    other.config.name_or_path = ""
    with pytest.raises(HooklineError, match="name one"):
        hookline.harvest(hookline.hook(other.eval()), TOKENS, POINTS, tmp_path / "store", by_layer=True)
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(StoreError, match="disk"):
        hookline.harvest(TINYWORLD, texts(), POINTS, tmp_path / "full", by_layer=True, **OPTIONS)
    assert not [*tmp_path.glob("*.by_layer")], "a harvest that is refused leaves nothing behind"

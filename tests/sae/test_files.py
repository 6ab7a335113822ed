"""Autoencoders in files: the format of today, older ones, and files that are not what they should be."""

import json

import devices
import pytest
import torch
from autoencoders import KINDS
from autoencoders import random_sae as make
from safetensors.torch import load_file, save_file

from hookline import HooklineError
from hookline.sae import SparseAutoencoder

D_IN, D_SAE = 6, 20


def tensors(*names, **more) -> dict[str, torch.Tensor]:
    shapes = {"W_enc": (D_IN, D_SAE), "W_dec": (D_SAE, D_IN), "b_dec": (D_IN,)}
    weights = {name: torch.randn(shapes.get(name, (D_SAE,))) for name in ("W_enc", "W_dec", "b_dec", *names)}
    return weights | more


def written(folder, cfg, weights):
    folder.mkdir(exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(cfg))
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "sae_weights.safetensors")
    return folder


TODAY = {
    "architecture": "standard",
    "d_in": D_IN,
    "d_sae": D_SAE,
    "dtype": "float32",
    "device": "cuda:0",
    "apply_b_dec_to_input": False,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {
        "sae_lens_version": "6.21.0",
        "sae_lens_training_version": "6.21.0",
        "hook_name": "blocks.2.hook_resid_post",
        "model_name": "gpt2",
        "hook_head_index": None,
        "prepend_bos": True,
    },
}
BEFORE = {
    "d_in": D_IN,
    "d_sae": D_SAE,
    "dtype": "torch.float32",
    "device": "cpu",
    "model_name": "gpt2-small",
    "hook_point": "blocks.8.hook_resid_pre",
    "hook_point_layer": 8,
    "hook_point_head_index": None,
    "activation_fn_str": "relu",
    "activation_fn_kwargs": {},
    "finetuning_scaling_factor": False,
    "context_size": 128,
    "l1_coefficient": 8e-5,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_is_loaded(kind, tmp_path) -> None:
    options = {"rescale_acts_by_decoder_norm": True} if kind == "topk" else {}
    sae = make(kind, dtype="float32", hook_name="blocks.1.hook_mlp_out", apply_b_dec_to_input=False, **options)
    sae.save(tmp_path / "deep" / "folder")
    again = SparseAutoencoder.load(tmp_path / "deep" / "folder")
    metadata = again.cfg.metadata
    assert again.cfg.__class__(**vars(again.cfg) | {"metadata": {}}) == sae.cfg
    assert metadata["sae_lens_version"] == "6.0.0"
    x = torch.randn(4, D_IN)
    assert torch.equal(again.encode(x), sae.encode(x))
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), sae.state_dict().values(), strict=True))
    again.save(tmp_path / "twice")
    assert (tmp_path / "twice" / "cfg.json").read_bytes() == (tmp_path / "deep" / "folder" / "cfg.json").read_bytes()
    assert sorted(path.name for path in (tmp_path / "twice").iterdir()) == ["cfg.json", "sae_weights.safetensors"]


@pytest.mark.parametrize(
    ("kind", "vectors"),
    [("standard", ["b_enc"]), ("gated", ["b_gate", "b_mag", "r_mag"]), ("jumprelu", ["b_enc", "threshold"])],
)
def test_the_format_of_today(kind, vectors, tmp_path) -> None:
    weights = tensors(*vectors)
    sae = SparseAutoencoder.load(written(tmp_path, TODAY | {"architecture": kind}, weights))
    assert sae.cfg.architecture == kind
    assert sae.cfg.hook_name == "blocks.2.hook_resid_post"
    assert not sae.cfg.apply_b_dec_to_input
    assert sae.device.type == devices.DEVICE.type, "where it was trained is of no concern"
    assert {name: x.tolist() for name, x in sae.state_dict().items()} == {n: x.tolist() for n, x in weights.items()}


def test_top_k_of_today(tmp_path) -> None:
    cfg = TODAY | {"architecture": "topk", "k": 4, "rescale_acts_by_decoder_norm": True}
    sae = SparseAutoencoder.load(written(tmp_path, cfg, tensors("b_enc")))
    assert (sae.cfg.k, sae.cfg.rescale_acts_by_decoder_norm) == (4, True)
    with pytest.raises(HooklineError, match="needs k from 1"):
        SparseAutoencoder.load(written(tmp_path, TODAY | {"architecture": "topk"}, tensors("b_enc")))


def test_the_older_format(tmp_path) -> None:
    weights = tensors("b_enc", scaling_factor=torch.ones(D_SAE))
    sae = SparseAutoencoder.load(written(tmp_path, BEFORE, weights))
    assert sae.cfg.architecture == "standard"
    assert sae.cfg.apply_b_dec_to_input
    assert sae.cfg.hook_name == "blocks.8.hook_resid_pre"
    assert sae.cfg.metadata["model_name"] == "gpt2-small"
    assert sae.cfg.extra == {"l1_coefficient": 8e-5}


def test_top_k_as_an_activation_function(tmp_path) -> None:
    cfg = BEFORE | {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 2}}
    sae = SparseAutoencoder.load(written(tmp_path, cfg, tensors("b_enc")))
    assert (sae.cfg.architecture, sae.cfg.k) == ("topk", 2)
    assert ((sae.encode(torch.randn(9, D_IN)) != 0).sum(-1) <= 2).all()
    sae.save(tmp_path / "new")
    assert SparseAutoencoder.load(tmp_path / "new").cfg.k == 2
    for activation, more in (("tanh-relu", {}), ("topk", {"k": 2, "postact_fn": "identity"})):
        bad = cfg | {"activation_fn_str": activation, "activation_fn_kwargs": more}
        with pytest.raises(HooklineError, match="activation function"):
            SparseAutoencoder.load(written(tmp_path, bad, tensors("b_enc")))
    with pytest.raises(HooklineError, match=r"'topk'.*'gated'"):
        SparseAutoencoder.load(written(tmp_path, cfg | {"architecture": "gated"}, tensors("b_gate", "b_mag", "r_mag")))


def test_fields_that_are_not_known_are_written_back(tmp_path) -> None:
    cfg = TODAY | {"noise_scale": 0.5, "someone": {"else": [1, None]}}
    cfg["metadata"] = cfg["metadata"] | {"neuronpedia_id": "gpt2/2-res", "our_own": "note"}
    sae = SparseAutoencoder.load(written(tmp_path, cfg, tensors("b_enc")))
    sae.save(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "cfg.json").read_text()) == cfg | {"device": "cpu"}


def test_the_older_format_is_written_as_that_of_today(tmp_path) -> None:
    sae = SparseAutoencoder.load(written(tmp_path, BEFORE | {"sae_lens_version": "5.1.0"}, tensors("b_enc")))
    sae.save(tmp_path / "new")
    cfg = json.loads((tmp_path / "new" / "cfg.json").read_text())
    assert cfg["metadata"]["sae_lens_version"] == "6.0.0", "or it would be read as an older one"
    assert cfg["metadata"]["hook_name"] == "blocks.8.hook_resid_pre"
    assert cfg["metadata"]["hook_layer"] == 8
    assert cfg["l1_coefficient"] == 8e-5
    assert not {"hook_point", "activation_fn_str", "sae_lens_version"} & set(cfg)


def test_a_scaling_factor_takes_effect(tmp_path) -> None:
    factor = torch.rand(D_SAE) + 0.5
    weights = tensors("b_enc")
    plain = SparseAutoencoder.load(written(tmp_path / "a", BEFORE, weights))
    cfg = BEFORE | {"finetuning_scaling_factor": True}
    scaled = SparseAutoencoder.load(written(tmp_path / "b", cfg, weights | {"scaling_factor": factor}))
    x = torch.randn(5, D_IN)
    features = plain.encode(x)
    assert torch.equal(scaled.encode(x), features)
    torch.testing.assert_close(scaled(x), plain.decode(features * factor))
    with pytest.raises(HooklineError, match="finetuning_scaling_factor=False"):
        SparseAutoencoder.load(written(tmp_path / "c", BEFORE, weights | {"scaling_factor": factor}))
    with pytest.raises(HooklineError, match="finetuning_scaling_factor=True"):
        SparseAutoencoder.load(written(tmp_path / "d", cfg, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_scaling_factor_is_folded_in(kind, tmp_path) -> None:
    sae = make(kind, dtype="float32")
    sae.save(tmp_path)
    cfg = json.loads((tmp_path / "cfg.json").read_text())
    for name in (True, "expected_average_only_in"):
        (tmp_path / "cfg.json").write_text(json.dumps(cfg | {"normalize_activations": name}))
        with pytest.raises(HooklineError, match="norm_scaling_factor="):
            SparseAutoencoder.load(tmp_path, check=False)
        folded = SparseAutoencoder.load(tmp_path, norm_scaling_factor=2.5, check=False)
        x = torch.randn(5, D_IN)
        torch.testing.assert_close(folded.encode(x), sae.encode(x * 2.5))
        torch.testing.assert_close(folded(x), sae(x * 2.5) / 2.5)
        assert folded.cfg.normalize_activations == "none"
    for wrong in (0.0, float("nan"), -1.0, 10**400, "2"):
        with pytest.raises(HooklineError, match="positive number"):
            SparseAutoencoder.load(tmp_path, norm_scaling_factor=wrong, check=False)
    sae.save(tmp_path)
    with pytest.raises(HooklineError, match="normalize_activations='none'"):
        SparseAutoencoder.load(tmp_path, norm_scaling_factor=2.0)


def test_older_ones_for_all_heads_are_told_by_the_name(tmp_path) -> None:
    cfg = BEFORE | {"hook_point": "blocks.8.attn.hook_z"}
    assert SparseAutoencoder.load(written(tmp_path, cfg, tensors("b_enc"))).cfg.reshape_activations == "hook_z"
    one_head = cfg | {"hook_point_head_index": 3}
    with pytest.raises(HooklineError, match="hook_head_index=3"):
        SparseAutoencoder.load(written(tmp_path, one_head, tensors("b_enc")))


def test_thresholds_may_be_logarithms(tmp_path) -> None:
    weights = tensors("b_enc", log_threshold=torch.randn(D_SAE))
    sae = SparseAutoencoder.load(written(tmp_path, TODAY | {"architecture": "jumprelu"}, weights))
    assert torch.equal(sae.threshold, weights["log_threshold"].cpu().exp())


def test_the_dtype_is_that_of_the_file_or_the_one_asked_for(tmp_path) -> None:
    weights = tensors("b_enc")
    folder = written(tmp_path, TODAY | {"dtype": "bfloat16"}, weights)
    assert SparseAutoencoder.load(folder).dtype == torch.bfloat16
    asked = SparseAutoencoder.load(folder, dtype=torch.float32)
    assert torch.equal(asked.W_enc, weights["W_enc"]), "not rounded on the way"
    asked.save(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "cfg.json").read_text())["dtype"] == "float32"
    assert load_file(tmp_path / "new" / "sae_weights.safetensors")["W_dec"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "matryoshka_batchtopk"}, "architecture is 'matryoshka_batchtopk'; expected one of"),
        ({"architecture": ["standard"]}, "architecture is"),
        ({"normalize_activations": "dataset_norm"}, "normalize_activations is 'dataset_norm'"),
        ({"d_in": "6"}, "d_in"),
        (
            {"d_sae": 21},
            r"W_enc \[6, 20\], .*d_sae=21 has .*W_enc \[6, 21\]",
        ),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"metadata": ["x"]}, "metadata"),
        ({"metadata": {"hook_name": 3}}, "hook_name"),
        ({"architecture": "gated"}, r"b_enc \[20\]; a 'gated' autoencoder"),
    ],
)
def test_configurations_that_are_not_understood(change, message, tmp_path) -> None:
    with pytest.raises(HooklineError, match=message):
        SparseAutoencoder.load(written(tmp_path, TODAY | change, tensors("b_enc")))


def test_files_that_are_broken_or_not_there(tmp_path) -> None:
    with pytest.raises(HooklineError, match="no autoencoder"):
        SparseAutoencoder.load(tmp_path / "nowhere")
    folder = written(tmp_path / "sae", TODAY, tensors("b_enc"))
    weights = folder / "sae_weights.safetensors"
    whole = weights.read_bytes()
    for broken in (b"", whole[:7], whole[:60], whole[:-5], b"\x80\x04pickle" * 30):
        weights.write_bytes(broken)
        with pytest.raises(HooklineError, match="sae_weights"):
            SparseAutoencoder.load(folder)
    weights.write_bytes(whole)
    for broken, message in (
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "it has no d_in"),
    ):
        (folder / "cfg.json").write_bytes(broken)
        with pytest.raises(HooklineError, match=message):
            SparseAutoencoder.load(folder)
    weights.unlink()
    with pytest.raises(HooklineError, match="no sae_weights"):
        SparseAutoencoder.load(folder)
    with pytest.raises(HooklineError, match="no autoencoder"):
        SparseAutoencoder.load(folder / "cfg.json")
    with pytest.raises(HooklineError, match="a file"):
        make("standard").save(folder / "cfg.json")


def test_weights_of_whole_numbers_are_refused(tmp_path) -> None:
    weights = tensors("b_enc") | {"b_enc": torch.zeros(D_SAE, dtype=torch.int64)}
    with pytest.raises(HooklineError, match=r"b_enc .*int64"):
        SparseAutoencoder.load(written(tmp_path, TODAY, weights))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path) -> None:
    weights = tensors("b_enc")
    weights["b_enc"][3] = value
    with pytest.raises(HooklineError, match="b_enc has 1 values"):
        SparseAutoencoder.load(written(tmp_path, TODAY, weights))
    sae = make("gated", dtype="float32")
    with torch.no_grad():
        sae.W_dec[:2, 0] = value
    with pytest.raises(HooklineError, match="W_dec has 2 values"):
        sae.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_that_the_dtype_cannot_hold_are_refused(tmp_path) -> None:
    weights = tensors("b_enc")
    weights["W_enc"][0, 0] = -1e5
    message = "W_enc .*100000.*float16"
    with pytest.raises(HooklineError, match=message):
        SparseAutoencoder.load(written(tmp_path, TODAY | {"dtype": "float16"}, weights))
    with pytest.raises(HooklineError, match=message):
        SparseAutoencoder.load(written(tmp_path, TODAY, weights), dtype=torch.float16)
    assert SparseAutoencoder.load(tmp_path, dtype=torch.bfloat16).W_enc[0, 0] < -9e4
    with pytest.raises(HooklineError, match="W_enc has 1 values"):
        SparseAutoencoder.load(tmp_path).half().save(tmp_path / "new")


def test_what_is_computed_on_the_way_in_must_not_overflow(tmp_path) -> None:
    large = tensors("b_enc", log_threshold=torch.full((D_SAE,), 1e3))
    with pytest.raises(HooklineError, match=r"threshold .*inf"):
        SparseAutoencoder.load(written(tmp_path, TODAY | {"architecture": "jumprelu"}, large))
    scaled = tensors("b_enc", scaling_factor=torch.full((D_SAE,), 3e38))
    scaled["W_dec"] *= 100
    with pytest.raises(HooklineError, match=r"W_dec .*inf"):
        SparseAutoencoder.load(written(tmp_path, BEFORE | {"finetuning_scaling_factor": True}, scaled))
    normed = TODAY | {"normalize_activations": "expected_average_only_in"}
    with pytest.raises(HooklineError, match="float32"):
        SparseAutoencoder.load(written(tmp_path, normed, tensors("b_enc")), norm_scaling_factor=1e-300)


def test_two_scaling_factors_are_refused(tmp_path) -> None:
    both = {name: torch.ones(D_SAE) for name in ("scaling_factor", "finetuning_scaling_factor")}
    with pytest.raises(HooklineError, match="both scaling_factor"):
        SparseAutoencoder.load(written(tmp_path, BEFORE, tensors("b_enc", **both)))
    one = tensors("b_enc", finetuning_scaling_factor=torch.full((D_SAE,), 2.0))
    cfg = BEFORE | {"finetuning_scaling_factor": True}
    found = SparseAutoencoder.load(written(tmp_path, cfg, one))
    assert torch.equal(found.W_dec, one["W_dec"] * 2)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (BEFORE | {"hook_name": "blocks.1.hook_resid_pre"}, "two values for hook_name"),
        (TODAY | {"hook_name": "blocks.1.hook_resid_pre"}, "two values for hook_name"),
        (TODAY | {"architecture": "topk", "k": 3, "activation_fn_kwargs": {"k": 4}}, "two values for k: 3 and 4"),
        (BEFORE | {"finetuning_scaling_factor": "false"}, "finetuning_scaling_factor"),
    ],
)
def test_of_two_values_none_is_dropped(cfg, message, tmp_path) -> None:
    with pytest.raises(HooklineError, match=message):
        SparseAutoencoder.load(written(tmp_path, cfg, tensors("b_enc")))


def test_files_that_do_not_belong_together(tmp_path) -> None:
    for name, options in {"a": {"k": 2}, "b": {"k": 3}}.items():
        make("topk", dtype="float32", **options).save(tmp_path / name)
    (tmp_path / "a" / "cfg.json").write_bytes((tmp_path / "b" / "cfg.json").read_bytes())
    with pytest.raises(HooklineError, match="checksum"):
        SparseAutoencoder.load(tmp_path / "a")
    assert SparseAutoencoder.load(tmp_path / "a", check=False).cfg.k == 3


def test_files_of_others_need_no_checksum(tmp_path) -> None:
    weights = tensors("b_enc")
    folder = written(tmp_path, TODAY, weights)
    save_file(weights, folder / "sae_weights.safetensors", {"format": "pt", "by": "somebody"})
    assert torch.equal(SparseAutoencoder.load(folder).W_enc, weights["W_enc"])

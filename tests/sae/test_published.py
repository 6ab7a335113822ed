"""Published autoencoders by name, from local folders; a feature's page; and the quality by kind of position."""

import json
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from stores import tinyworld

from hookline import HooklineError
from hookline.sae import (
    SAEConfig,
    SparseAutoencoder,
    dashboard,
    evaluate,
    evaluate_by_position,
    profile,
    published,
    releases,
    train,
)

POINT = "blocks.1.hook_resid_post"
TEXTS = [f"{name} went to the {place}." for name in ("Mary", "John", "Tom") for place in ("garden", "kitchen", "park")]
REGISTRY = """
tiny-res:
  model: tinyworld
  repo_id: someone/tiny-saes
  config_overrides:
    neuronpedia_id: tinyworld/1-res
  saes:
  - id: layer 1
    path: layers/1
  - id: scaled
    path: layers/scaled
    norm_scaling_factor: 2.0
gemma-scope-tiny-pt-res:
  conversion_func: gemma_2
  model: gemma-2-2b
  repo_id: google/gemma-scope-2b-pt-res
  saes:
  - id: layer_3/width_16k
    path: layer_3/width_16k/average_l0_7
gemma-scope-2-tiny:
  conversion_func: gemma_3
  model: google/gemma-3-1b-pt
  repo_id: google/gemma-scope-2-1b-pt
  saes:
  - id: layer_7
    path: attn_out/layer_7_width_16k_l0_big
  - id: transcoder
    path: transcoder/layer_7_width_16k_l0_big
outside:
  model: tinyworld
  repo_id: someone/outside
  saes:
  - id: up
    path: ../other
  - id: root
    path: /etc
strange:
  conversion_func: llama_scope
  model: llama
  repo_id: someone/strange
  saes:
  - id: a
    path: a
"""


@pytest.fixture
def registry(tmp_path):
    file = tmp_path / "pretrained_saes.yaml"
    file.write_text(REGISTRY)
    return file


@pytest.fixture(scope="module")
def sae() -> SparseAutoencoder:
    model = tinyworld()
    rows = torch.cat([model.cache(text, names_filter=POINT)[POINT][0] for text in TEXTS])
    return train(rows, POINT, d_sae=48, kind="batchtopk", k=4, steps=200, batch_size=32, progress=False).sae


def test_by_release_and_id_or_by_hub_id(sae, registry, tmp_path) -> None:
    sae.save(tmp_path / "copy" / "layers" / "1")
    found = published("tiny-res", "layer 1", registry=registry, folder=tmp_path / "copy")
    assert torch.equal(found.W_enc, sae.W_enc)
    assert found.cfg.metadata["neuronpedia_id"] == "tinyworld/1-res"
    assert found.cfg.hook_name == POINT
    again = published("someone/tiny-saes", "layers/1", folder=tmp_path / "copy")
    assert torch.equal(again.W_dec, sae.W_dec)
    assert len(releases(registry)) == 5


def test_the_registry_has_the_scaling_factor(registry, tmp_path) -> None:
    plain = SparseAutoencoder(SAEConfig("standard", 8, 16, hook_name="x"))
    folder = tmp_path / "copy" / "layers" / "scaled"
    plain.save(folder)
    content = json.loads((folder / "cfg.json").read_text())
    content["normalize_activations"] = "expected_average_only_in"
    (folder / "cfg.json").write_text(json.dumps(content))
    with pytest.raises(HooklineError, match="checksum"):
        published("tiny-res", "scaled", registry=registry, folder=tmp_path / "copy")
    save_file(load_file(folder / "sae_weights.safetensors"), folder / "sae_weights.safetensors")  # as SAELens writes it
    found = published("tiny-res", "scaled", registry=registry, folder=tmp_path / "copy")
    torch.testing.assert_close(found.W_enc, plain.W_enc * 2)


def test_gemma_scope(registry, tmp_path, device) -> None:
    folder = tmp_path / "layer_3" / "width_16k" / "average_l0_7"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    shapes = {"W_enc": (8, 32), "W_dec": (32, 8), "b_enc": (32,), "b_dec": (8,), "threshold": (32,)}
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    np.savez(folder / "params.npz", **arrays)
    where = {"registry": registry, "folder": tmp_path, "device": device}
    found = published("gemma-scope-tiny-pt-res", "layer_3/width_16k", **where)
    assert (found.cfg.hook_name, found.cfg.architecture) == ("blocks.3.hook_resid_post", "jumprelu")
    x = torch.randn(5, 8)
    before = x @ torch.tensor(arrays["W_enc"]) + torch.tensor(arrays["b_enc"])
    expected = before.relu() * (before > torch.tensor(arrays["threshold"]))
    torch.testing.assert_close(found.encode(x), expected)
    for changes, why in (
        ({"threshold": None}, "has the tensors"),
        ({"W_enc": arrays["W_enc"] * np.nan}, "not finite"),
        ({"W_enc": arrays["W_enc"].astype(int)}, "float dtype"),
        ({"W_enc": arrays["b_enc"]}, "no matrix W_enc"),
        ({"W_enc": np.array([None])}, "allow_pickle"),
    ):
        given = {name: x for name, x in (arrays | changes).items() if x is not None}
        np.savez(folder / "params.npz", **given)
        with pytest.raises(HooklineError, match=why):
            published("gemma-scope-tiny-pt-res", "layer_3/width_16k", **where)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000)}\n"
    with ZipFile(folder / "params.npz", "w") as file:
        file.writestr("W_enc.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(HooklineError, match="be read"):
        published("gemma-scope-tiny-pt-res", "layer_3/width_16k", **where)


def test_gemma_scope_2(registry, tmp_path, device) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = {"w_enc": (8, 32), "w_dec": (32, 8), "b_enc": (32,), "b_dec": (8,), "threshold": (32,)}
    arrays = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    folder = tmp_path / "attn_out" / "layer_7_width_16k_l0_big"
    folder.mkdir(parents=True)
    save_file(arrays, folder / "params.safetensors")
    where = {"registry": registry, "folder": tmp_path, "device": device}
    found = published("gemma-scope-2-tiny", "layer_7", **where)
    assert (found.cfg.hook_name, found.cfg.reshape_activations) == ("blocks.7.attn.hook_z", "hook_z")
    x = torch.randn(5, 2, 4)  # two heads
    before = x.flatten(1) @ arrays["w_enc"] + arrays["b_enc"]
    torch.testing.assert_close(found.encode(x), before.relu() * (before > arrays["threshold"]))
    folder.parent.rename(tmp_path / "transcoder")
    with pytest.raises(HooklineError, match="residual"):
        published("gemma-scope-2-tiny", "transcoder", **where)


def test_names_that_do_not_exist(registry, tmp_path) -> None:
    with pytest.raises(HooklineError, match="mean 'tiny-res'"):
        published("tiny-rez", "layer 1", registry=registry)
    with pytest.raises(HooklineError, match="it has 'layer 1'"):
        published("tiny-res", "layer 2", registry=registry)
    with pytest.raises(HooklineError, match="llama_scope"):
        published("strange", "a", registry=registry)
    with pytest.raises(HooklineError, match="no autoencoder"):
        published("tiny-res", "layer 1", registry=registry, folder=tmp_path)
    for name in ("up", "root"):
        with pytest.raises(HooklineError, match="repository"):
            published("outside", name, registry=registry, folder=tmp_path)
    with pytest.raises(HooklineError, match=r"SparseAutoencoder\.load"):
        published(str(tmp_path), "layer 1", registry=registry)
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(HooklineError, match="registry"):
        releases(tmp_path / "bad.yaml")
    with pytest.raises(HooklineError, match="registry"):
        releases(tmp_path / "none.yaml")


def test_the_page_of_a_feature_needs_nothing_else(sae) -> None:
    model = tinyworld()
    feature = int((sae.encode(model.cache(TEXTS[0], names_filter=POINT)[POINT]) > 0)[0].sum(0).argmax())
    page = dashboard(sae, model, TEXTS, feature, k=2)
    text = str(page)
    for title in ("Activations", "Logits up", "Logits down", "top 1", "top 2", "random 1"):
        assert title in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    silent = int(sae.encode(model.cache("Mary", names_filter=POINT)[POINT])[0].sum(0).argmin())
    assert r"no text activates" in str(dashboard(sae, model, ["Mary"], silent))
    with pytest.raises(HooklineError, match="no texts"):
        dashboard(sae, model, [], 0)
    with pytest.raises(HooklineError, match="exist"):
        dashboard(sae, model, TEXTS, 48)


def test_attention_sinks_are_left_out_of_contexts_and_pages(sae) -> None:
    model = tinyworld()
    sink = [(POINT, lambda x: torch.cat([1000 * x[:, :1], x[:, 1:]], 1))]
    with model.hooks(fwd_hooks=sink):
        found, whole = (profile(sae, model, TEXTS, k=3, outliers=each) for each in ("exclude", "include"))
        feature = int((whole.position[:, 0] == 0).int().argmax())
        pages = [str(dashboard(sae, model, TEXTS, feature, outliers=each)) for each in ("exclude", "include")]
    assert whole.rows - found.rows == len(TEXTS)
    assert 0 not in found.position
    assert 0 in whole.position
    assert f"without {len(TEXTS)} attention sinks" in pages[0]
    assert "attention sinks" not in pages[1]


def test_quality_by_position(sae) -> None:
    model = tinyworld()
    found, whole = evaluate_by_position(sae, model, TEXTS), evaluate(sae, model, TEXTS, outliers="include")
    assert list(found) == ["first", "sinks", "ordinary"]
    assert found["first"].tokens == len(TEXTS)
    total = sum(each.tokens for each in found.values())
    l0 = sum(each.l0 * each.tokens for each in found.values() if each.tokens) / total
    assert l0 == pytest.approx(whole.l0, rel=1e-6)
    for each in found.values():
        if each.tokens:
            assert each.loss == pytest.approx(whole.loss, rel=1e-5)
            assert each.loss_zeroed > each.loss
    only = evaluate_by_position(sae, model, TEXTS[:1])["ordinary"]

    def spliced(x):
        x[:, 1:] = sae(x)[:, 1:]

    loss = model.run_with_hooks(TEXTS[0], fwd_hooks=[(POINT, spliced)], return_type="loss")
    assert only.loss_spliced == pytest.approx(loss.item(), rel=1e-4)
    assert "recovered" in repr(found)
    for nothing in ([], ["Mary"]):
        with pytest.raises(HooklineError, match="no tokens"):
            evaluate_by_position(sae, model, nothing)

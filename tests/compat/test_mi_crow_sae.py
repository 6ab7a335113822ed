"""mi-crow's data sets, batches and autoencoders, on the embedded model."""

import copy
import json

import pytest
import torch

import hookline
from hookline.compat.mi_crow.datasets import LoadingStrategy, TextDataset
from hookline.compat.mi_crow.hooks import LayerActivationDetector, ModelInputDetector, ModelOutputDetector
from hookline.compat.mi_crow.language_model import LanguageModel
from hookline.compat.mi_crow.mechanistic.sae.concepts.concept_dictionary import ConceptDictionary
from hookline.compat.mi_crow.mechanistic.sae.modules.topk_sae import TopKSae, TopKSaeTrainingConfig
from hookline.compat.mi_crow.store import LocalStore
from hookline.errors import HooklineError, StoreError

TEXTS = ["When Mary and John went to the store", "The capital of France is Paris", "Hello", "Dogs and cats run"]


class Table(list):
    """Rows with a column, as `datasets.Dataset` has them."""

    column_names = ("text",)

    def select(self, rows):
        return Table(self[row] for row in rows)


@pytest.fixture(scope="module")
def loaded():
    return hookline.load("tinyworld")


@pytest.fixture
def lm(loaded, tmp_path):
    lm = LanguageModel.from_model(loaded.module, loaded.tokenizer, store=LocalStore(tmp_path / "store"), model_id="a/b")
    yield lm
    lm.layers.unregister_all()


@pytest.fixture
def layer(lm):
    (name,) = [name for name in lm.layers.get_layer_names() if name.endswith("_h_2_mlp")]
    return name


@pytest.fixture
def trained(lm, layer):
    lm.activations.save_activations(TEXTS, layer, "run", 2)
    width = lm.store.get_run_batch("run", 0)["activations"].shape[-1]
    sae = TopKSae(n_latents=4 * width, n_inputs=width)
    result = sae.train(lm.store, "run", layer, TopKSaeTrainingConfig(k=4, epochs=3, batch_size=8))
    return sae, result


def test_a_text_dataset_is_a_sequence_of_texts() -> None:
    dataset = TextDataset(Table({"text": text} for text in TEXTS))
    assert (len(dataset), dataset[0], dataset[-1], dataset[1:3]) == (4, TEXTS[0], TEXTS[3], TEXTS[1:3])
    assert list(dataset.iter_batches(3)) == [TEXTS[:3], TEXTS[3:]]
    assert dataset.get_all_texts() == TEXTS == dataset.head(10)
    assert sorted(dataset.random_sample(3, seed=1)) == sorted(dataset.sample(3, seed=1))
    with pytest.raises(HooklineError, match="no column 'story'"):
        TextDataset(Table(), text_field="story")
    with pytest.raises(IndexError, match="range"):
        dataset[4]
    with pytest.raises(HooklineError, match="no length"):
        len(TextDataset(iter(()), loading_strategy=LoadingStrategy.STREAMING))


def test_saved_activations_are_the_models_in_batches(lm, layer) -> None:
    dataset = TextDataset(Table({"text": text} for text in TEXTS))
    run = lm.activations.save_activations_dataset(dataset, layer, "run", 3, autocast=False, save_attention_mask=True)
    assert lm.store.list_run_batches(run) == [0, 1]
    detector = LayerActivationDetector(layer)
    lm.layers.register_hook(layer, detector)
    for number, texts in enumerate(dataset.iter_batches(3)):
        _, encodings = lm.inference.execute_inference(texts, tok_kwargs={"padding_side": "right"})
        _, tensors = lm.store.get_detector_metadata(run, number)
        mask = tensors["attention_masks"]["attention_mask"]
        assert torch.equal(mask, encodings["attention_mask"])
        kept, seen = tensors[layer]["activations"], detector.get_captured()
        assert torch.allclose(kept[mask.bool()], seen[mask.bool()], atol=1e-5)
        assert not kept[~mask.bool()].any()
        assert torch.equal(lm.store.get_run_batch(run, number)["activations"], kept)
    with pytest.raises(StoreError, match="no batch 2"):
        lm.store.get_run_batch(run, 2)


def test_plain_tensors_are_batches_too(tmp_path) -> None:
    store = LocalStore(tmp_path)
    store.put_run_batch("mine", 0, [torch.ones(2), torch.zeros(3)])
    store.put_run_batch("mine", 1, {"x": torch.arange(4)})
    first, second = store.iter_run_batches("mine")
    assert (first["item_1"].tolist(), second["x"].tolist()) == ([0, 0, 0], [0, 1, 2, 3])


def test_detectors_at_the_model_itself_by_an_added_name(lm) -> None:
    for name in ("model_inputs", "model_outputs"):
        lm.layers.name_to_layer[name] = lm.model
    inputs, outputs = ModelInputDetector("model_inputs"), ModelOutputDetector("model_outputs")
    lm.layers.register_hook("model_inputs", inputs)
    lm.layers.register_hook("model_outputs", outputs)
    output, encodings = lm.inference.infer_texts(TEXTS[:2], run_name="io")
    _, tensors = lm.store.get_detector_metadata("io", 0)
    assert torch.equal(tensors["model_inputs"]["input_ids"], encodings["input_ids"])
    assert torch.equal(tensors["model_outputs"]["output_logits"], output.logits)


def test_inference_in_batches_gives_lists(lm) -> None:
    outputs, encodings = lm.inference.infer_texts(TEXTS, batch_size=3)
    assert [len(each["input_ids"]) for each in encodings] == [3, 1] == [len(each.logits) for each in outputs]
    run = lm.inference.infer_dataset(iter(TEXTS), batch_size=2)
    assert lm.store.list_run_batches(run) == [0, 1]
    with pytest.raises(HooklineError, match="nonempty list"):
        lm.inference.infer_texts([])


def test_texts_are_padded_without_a_padding_token(loaded) -> None:
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.pad_token = None
    lm = LanguageModel.from_model(loaded.module, tokenizer)
    _, encodings = lm.inference.infer_texts(TEXTS, tok_kwargs={"truncation": True, "max_length": 4})
    assert encodings["attention_mask"].sum(1).tolist()[0] == 4 > encodings["attention_mask"].sum(1).tolist()[2]


def test_training_explains_activations(trained) -> None:
    sae, result = trained
    assert (sae.k, sae.sae_engine.top_k) == (4, 4)
    assert len(result["history"]["loss"]) == 3
    assert result["history"]["r2"][-1] > result["history"]["r2"][0]
    assert result["history"]["recon_mse"] == [1 - each for each in result["r2"]]


def test_a_registered_autoencoder_replaces_its_layer_and_keeps_features(lm, layer, trained) -> None:
    sae, _ = trained
    detector = LayerActivationDetector(layer)
    lm.layers.register_hook(layer, detector)
    bare, _ = lm.inference.execute_inference(TEXTS[:1])
    x = detector.get_captured()
    lm.layers.register_hook(layer, sae)
    spliced, _ = lm.inference.execute_inference(TEXTS[:1])
    expected = lm.hooked.run_with_hooks(TEXTS[0], fwd_hooks=[("transformer.h.2.mlp", lambda _: sae.forward(x))])
    assert torch.allclose(spliced.logits, expected, atol=1e-5)
    assert not torch.allclose(spliced.logits, bare.logits)
    features = sae.tensor_metadata["neurons"]
    assert torch.allclose(features, sae.encode(x))
    assert sae.context.lm is lm
    items = sae.metadata["batch_items"]
    assert [item["nonzero_indices"] for item in items] == [row.nonzero().flatten().tolist() for row in features[0]]


def test_edits_of_concepts_change_the_reconstruction(lm, layer, trained) -> None:
    sae, _ = trained
    lm.layers.register_hook(layer, sae)
    before, _ = lm.inference.execute_inference(TEXTS[:1])
    sae.concepts.bias.data[3] = 5.0
    after, _ = lm.inference.execute_inference(TEXTS[:1])
    assert not torch.equal(before.logits, after.logits)
    features = sae.tensor_metadata["neurons"]
    bias = torch.zeros(features.shape[-1])
    bias[3] = 5.0
    with torch.no_grad():
        assert torch.allclose(sae.concepts.edited(features), features + bias)


def test_top_texts_ignore_padding_and_name_the_token(lm, layer, trained, tmp_path) -> None:
    sae, _ = trained
    with pytest.raises(HooklineError, match="language model"):
        sae.concepts.enable_text_tracking()
    lm.layers.register_hook(layer, sae)
    sae.context.text_tracking_k = 2
    sae.concepts.enable_text_tracking()
    _, encodings = lm.inference.infer_texts(TEXTS)
    features = sae.tensor_metadata["neurons"] * encodings["attention_mask"][..., None]
    for feature, found in enumerate(sae.concepts.get_all_top_texts()):
        best = features[..., feature].amax(1)
        expected = sorted((float(score) for score in best if score > 0), reverse=True)[:2]
        assert [each.score for each in found] == pytest.approx(expected)
        for each in found:
            assert each.token_str == lm.hooked.to_str_tokens(each.text, prepend_bos=False)[each.token_idx]
    path = sae.concepts.export_top_texts_to_json(tmp_path / "top.json")
    assert len(json.loads(path.read_text())) == sae.context.n_latents
    assert sae.concepts.export_top_texts_to_csv(tmp_path / "top.csv").read_text().startswith("neuron_idx,text")


def test_saved_and_loaded_it_is_the_same(trained, tmp_path, layer) -> None:
    sae, _ = trained
    sae.concepts.multiplication.data[0] = 3.0
    path = sae.save("mine", tmp_path)
    again = TopKSae.load(tmp_path / "mine.pt")
    x = torch.randn(3, sae.context.n_inputs)
    assert path == tmp_path / "mine.pt"
    assert torch.equal(again.forward(x), sae.forward(x))
    assert again.context.lm_layer_signature == layer
    assert again.concepts.multiplication[0] == 3
    (tmp_path / "theirs.pt").write_bytes(b"pickle")
    with pytest.raises(HooklineError, match="mi-crow"):
        TopKSae.load(tmp_path / "theirs.pt")


def test_concepts_are_read_from_files(tmp_path) -> None:
    (tmp_path / "names.csv").write_text("neuron_idx,concept_name,score\n1,dogs,0.4\n1,cats,0.9\n3,cows,0.1\n")
    read = ConceptDictionary.from_csv(tmp_path / "names.csv", 4)
    assert (read.get(1).name, read.get(0)) == ("cats", None)
    read.save(tmp_path)
    again = ConceptDictionary(4)
    again.load(tmp_path)
    assert again.concepts_map == read.concepts_map
    with pytest.raises(IndexError, match="0 to 3"):
        read.get(4)


def test_options_without_an_effect_are_named(lm, layer, trained) -> None:
    sae, _ = trained
    with pytest.warns(UserWarning, match="l1_lambda"):
        sae.train(lm.store, "run", layer, TopKSaeTrainingConfig(k=2, l1_lambda=0.1, batch_size=8))
    with pytest.raises(StoreError, match="'elsewhere'"):
        sae.train(lm.store, "run", "elsewhere")
    with pytest.raises(HooklineError, match=r"dtype.*model"):
        lm.activations.save_activations(TEXTS, layer, autocast=True)


def test_data_sets_from_files(tmp_path) -> None:
    pytest.importorskip("datasets", reason="not a dependency: it is for those who load data sets")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    (tmp_path / "texts.tsv").write_text("id\ttext\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(TEXTS)))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name in ("texts", "texts.tsv", "texts.jsonl"):
        assert list(TextDataset.from_local(tmp_path / name)) == TEXTS
    for name in ("texts.pdf", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(HooklineError):
            TextDataset.from_local(tmp_path / name)

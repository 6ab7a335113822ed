"""mi-crow's interface: every snippet of its hooks guide, on the embedded model, with only the import changed."""

import random

import numpy
import pytest
import torch
from tiny_models import causal_lm
from transformers import GPT2Config, GPT2LMHeadModel

import hookline
from hookline.compat.mi_crow.hooks import (
    Controller,
    Detector,
    FunctionController,
    Hook,
    HookType,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
)
from hookline.compat.mi_crow.hooks.hook import HookError
from hookline.compat.mi_crow.hooks.implementations.layer_activation_detector import (
    LayerActivationDetector as SameDetector,
)
from hookline.compat.mi_crow.language_model import LanguageModel
from hookline.compat.mi_crow.store import LocalStore
from hookline.compat.mi_crow.utils import get_logger, set_seed
from hookline.errors import HooklineError, StoreError, UnknownPointError

LAYER = "transformer.h.0.attn.c_attn"
TEXTS = ["When Mary and John went to the store", "Hello"]


@pytest.fixture(scope="module")
def loaded():
    return hookline.load("tinyworld")


@pytest.fixture
def lm(loaded, tmp_path):
    lm = LanguageModel.from_model(loaded.module, loaded.tokenizer, store=LocalStore(base_path=tmp_path / "store"))
    yield lm
    lm.layers.unregister_all()


def test_creating_a_hook() -> None:
    class SomeHook(Hook):
        def _hook_fn(self, module, input, output):
            return None

    hook = SomeHook(layer_signature=LAYER, hook_type=HookType.FORWARD, hook_id="my-custom-id")
    assert (hook.id, hook.layer_signature, hook.hook_type) == ("my-custom-id", LAYER, HookType.FORWARD)
    ids = {SomeHook().id for _ in range(3)}
    assert len(ids) == 3
    assert SameDetector is LayerActivationDetector


def test_a_forward_hooks_return_value_takes_effect(lm) -> None:
    class Modified(Hook):
        def _hook_fn(self, module, input, output):
            return output * 0

    bare, _ = lm.inference.execute_inference(TEXTS)
    lm.layers.register_hook("transformer.h.1.mlp", Modified())
    outputs, encodings = lm.inference.execute_inference(TEXTS)
    expected = lm.hooked.run_with_hooks(
        encodings["input_ids"],
        attention_mask=encodings["attention_mask"],
        fwd_hooks=[("blocks.1.hook_mlp_out", hookline.edits.zero())],
    )
    assert torch.equal(outputs.logits, expected)
    assert not torch.equal(outputs.logits, bare.logits)


def test_a_pre_forward_hooks_return_value_takes_effect(lm) -> None:
    class Modified(Hook):
        def _hook_fn(self, module, input):
            return (input[0] * 0, *input[1:])

    bare, _ = lm.inference.execute_inference(TEXTS)
    lm.layers.register_hook("transformer.h.1.mlp", Modified(hook_type=HookType.PRE_FORWARD))
    outputs, _ = lm.inference.execute_inference(TEXTS)
    assert not torch.equal(outputs.logits, bare.logits)


def test_the_lifecycle(lm) -> None:
    detector = LayerActivationDetector(layer_signature=LAYER)
    lm.inference.execute_inference(["Hello, world!"])
    assert detector.tensor_metadata == {}, "it exists, but is not active"

    hook_id = lm.layers.register_hook(layer_signature=LAYER, hook=detector)
    assert hook_id == detector.id
    outputs, encodings = lm.inference.execute_inference(["Hello, world!"])
    seen = detector.tensor_metadata["activations"]
    assert seen.shape == (*encodings["input_ids"].shape, 3 * 128)
    assert outputs.logits.shape[:2] == encodings["input_ids"].shape

    detector.disable()
    assert not detector.is_enabled()
    lm.inference.execute_inference(["Another text entirely"])
    assert detector.tensor_metadata["activations"] is seen
    detector.enable()
    assert detector.is_enabled()
    lm.inference.execute_inference(["Another text entirely"])
    assert detector.tensor_metadata["activations"] is not seen

    assert lm.layers.unregister_hook(hook_id) is True
    assert lm.layers.unregister_hook(hook_id) is False
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())


def test_layer_signatures(lm) -> None:
    layer_names = lm.layers.list_layers()
    assert LAYER in layer_names
    by_name, by_index = LayerActivationDetector(), LayerActivationDetector()
    lm.layers.register_hook("transformer.h.0", by_name)
    lm.layers.register_hook("layer_0", by_index)
    lm.inference.execute_inference(TEXTS)
    assert torch.equal(by_name.get_captured(), by_index.get_captured())
    assert lm.layers.get_hooks("layer_0") == lm.layers.get_hooks("transformer.h.0") == [by_name, by_index]
    with pytest.raises(UnknownPointError):
        lm.layers.register_hook("layer_10", LayerActivationDetector())


def test_layers_by_mi_crows_names_and_indices(lm) -> None:
    # As in mi-crow 1.0.0: the class in lower case, then the path with underscores; indices are depth first.
    names = lm.layers.get_layer_names()
    assert names[:3] == [f"gpt2lmheadmodel_transformer{end}" for end in ("", "_wte", "_wpe")]
    name = "gpt2lmheadmodel_transformer_h_0_mlp_c_fc"
    index = names.index(name)
    path = "transformer.h.0.mlp.c_fc"
    assert lm.layers.idx_to_layer[index] is lm.layers.name_to_layer[name] is lm.model.get_submodule(path)
    detectors = [LayerActivationDetector(layer_signature=each) for each in (name, index, path)]
    for detector in detectors:
        lm.layers.register_hook(detector.layer_signature, detector)
    assert [each.layer_signature for each in detectors] == [name, index, path]
    lm.inference.execute_inference(TEXTS)
    captured = [each.get_captured() for each in detectors]
    assert torch.equal(captured[0], captured[1])
    assert torch.equal(captured[0], captured[2])
    assert lm.layers.get_hooks(name) == lm.layers.get_hooks(index) == detectors
    embedded = LayerActivationDetector()
    lm.layers.register_hook(1, embedded)
    _, encodings = lm.inference.execute_inference(TEXTS)
    assert torch.equal(embedded.get_captured(), lm.model.transformer.wte(encodings["input_ids"]))
    for wrong in (len(names), -1):
        with pytest.raises(ValueError, match=f"0 to {len(names) - 1}"):
            lm.layers.register_hook(wrong, LayerActivationDetector())
    with pytest.raises(UnknownPointError, match="modules"):
        lm.layers.register_hook(names.index("gpt2lmheadmodel_transformer_h"), LayerActivationDetector())


def test_the_device(lm, tmp_path) -> None:
    from_hub = LanguageModel.from_huggingface("tinyworld", store=tmp_path, device="cpu")
    folder = from_hub.save_model(tmp_path / "saved")
    for one in (
        from_hub,
        LanguageModel.from_local(folder, tmp_path, device=torch.device("cpu")),
        LanguageModel.from_local_torch(folder, folder, tmp_path, device="cpu"),
        LanguageModel.from_model(lm.model, lm.tokenizer, device="cpu"),
    ):
        assert one.context.device == "cpu"
        assert next(one.model.parameters()).device.type == "cpu"


def test_the_hooks_context(lm) -> None:
    class MyHook(Hook):
        def _hook_fn(self, module, input, output):
            context = self._context
            self.model = context.language_model
            self.others = context.hooks

    hook = MyHook()
    lm.layers.register_hook(LAYER, hook)
    lm.inference.execute_inference(TEXTS)
    assert hook.model is lm
    assert hook.others == [hook]
    assert hook.context.layers is lm.layers
    assert hook.context.store is lm.store
    assert hook.context.model is lm.model


def test_errors(lm) -> None:
    class Broken(Detector):
        def process_activations(self, module, input, output):
            raise RuntimeError("broken")

    lm.layers.register_hook(LAYER, Broken(hook_id="b"))
    with pytest.raises(HookError) as caught:
        lm.inference.execute_inference(["Hello, world!"])
    assert f"Hook {caught.value.hook_id} failed: {caught.value.original_error}" == "Hook b failed: broken"
    lm.layers.unregister_hook("b")
    lm.layers.register_hook(LAYER, Broken(hook_id="b", on_error="skip"))
    with pytest.warns(hookline.errors.SkippedHookWarning, match="Broken 'b'"):
        lm.inference.execute_inference(["Hello, world!"])
    assert [error.hook_id for error in lm.layers.errors()] == ["b"]


def test_the_basic_pattern(tmp_path) -> None:
    store = LocalStore(base_path=tmp_path)
    lm = LanguageModel.from_huggingface("tinyworld", store=store)
    detector = LayerActivationDetector(layer_signature=LAYER)
    hook_id = lm.layers.register_hook(LAYER, detector)
    try:
        outputs, encodings = lm.inference.execute_inference(["Hello, world!"])
        activations = detector.tensor_metadata.get("activations")
        assert activations.shape[:2] == encodings["input_ids"].shape
        assert outputs.logits.isfinite().all()
    finally:
        lm.layers.unregister_hook(hook_id)


def test_hooks_on_several_layers(loaded) -> None:
    config = GPT2Config(n_layer=12, n_head=2, n_embd=8, vocab_size=len(loaded.tokenizer), n_positions=32)
    lm = LanguageModel.from_model(GPT2LMHeadModel(config).eval(), loaded.tokenizer)
    detector1, detector2 = LayerActivationDetector(), LayerActivationDetector()
    hook1_id = lm.layers.register_hook("layer_0", detector1)
    hook2_id = lm.layers.register_hook("layer_10", detector2)
    _, encodings = lm.inference.execute_inference(["Hello, world!"])
    _, cache = lm.hooked.run_with_cache(encodings["input_ids"])
    assert torch.allclose(detector1.get_captured(), cache["resid_post", 0])
    assert torch.allclose(detector2.get_captured(), cache["resid_post", 10])
    lm.layers.unregister_hook(hook1_id)
    lm.layers.unregister_hook(hook2_id)


def test_a_conditional_hook(lm) -> None:
    some_condition = False

    class ConditionalHook(Detector):
        def _hook_fn(self, module, input, output):
            if some_condition:
                self.process_activation(output)

    hook = ConditionalHook()
    lm.layers.register_hook(LAYER, hook)
    lm.inference.execute_inference(TEXTS)
    assert hook.get_captured() is None
    some_condition = True
    lm.inference.execute_inference(TEXTS)
    assert hook.get_captured() is not None


def test_a_detector_and_a_controller_share_a_layer(lm) -> None:
    """mi-crow allows one kind at a layer; here there may be any number of both."""
    before, after = LayerActivationDetector(), LayerActivationDetector()
    lm.layers.register_hook("layer_0", before)
    lm.layers.register_hook("layer_0", FunctionController("layer_0", lambda x: x * 2.0))
    lm.layers.register_hook("layer_0", after)
    lm.inference.execute_inference(TEXTS)
    assert torch.equal(after.get_captured(), 2 * before.get_captured())
    assert [len(lm.layers.get_detectors()), len(lm.layers.get_controllers())] == [2, 1]
    bare = before.get_captured()
    lm.inference.execute_inference(TEXTS, with_controllers=False)
    assert torch.equal(after.get_captured(), bare)
    assert all(hook.is_enabled() for hook in lm.layers.hooks())
    lm.layers.disable_all_hooks()
    assert not any(hook.is_enabled() for hook in lm.layers.get_hooks(hook_type=HookType.FORWARD))
    lm.layers.enable_hook(after.id)
    assert after.is_enabled()


def test_a_controller_before_a_module_called_by_keyword() -> None:
    """In mi-crow it never fires there."""
    module = causal_lm("llama")

    class Half(Controller):
        def modify_activations(self, module, inputs, output):
            return inputs / 2

    hooked = hookline.hook(module)
    tokens = torch.arange(6)[None] + 3
    bare = hooked(tokens)
    hooked.registry.register_hook("model.layers.1.self_attn", Half(hook_type=HookType.PRE_FORWARD))
    assert not torch.equal(hooked(tokens), bare)
    hooked.registry.unregister_all()


def test_inference(lm) -> None:
    outputs, encodings = lm.inference.execute_inference(TEXTS)
    assert encodings["attention_mask"].sum(1).tolist() == [len(lm.tokenizer(text)["input_ids"]) for text in TEXTS], (
        "the shorter one is padded"
    )
    assert torch.equal(lm.inference.extract_logits(outputs), outputs.logits)
    cut, encodings = lm.inference.execute_inference(TEXTS, tok_kwargs={"truncation": True, "max_length": 2})
    assert encodings["input_ids"].shape == cut.logits.shape[:2] == (2, 2)
    stream, _ = lm.inference.execute_inference(TEXTS, stop_after_layer="layer_1")
    assert torch.equal(stream, lm.hooked.cache(TEXTS, names_filter=("resid_post", 1))["resid_post", 1])
    lm.model.train()
    again, _ = lm.inference.execute_inference(TEXTS)
    assert torch.equal(again.logits, outputs.logits)
    assert lm.model.training
    lm.model.eval()
    for bad in ([], "Hello", [""]):
        with pytest.raises(HooklineError):
            lm.inference.execute_inference(bad)
    with pytest.raises(HooklineError, match="autocast_dtype"):
        lm.inference.execute_inference(TEXTS, autocast_dtype=torch.bfloat16)
    cast, _ = lm.inference.execute_inference(TEXTS, autocast=True, autocast_dtype=torch.bfloat16)
    assert not torch.equal(cast.logits.float(), outputs.logits)


def test_model_inputs_and_outputs(lm) -> None:
    inputs, outputs = ModelInputDetector(save_attention_mask=True), ModelOutputDetector()
    lm.layers.register_hook(None, inputs)
    lm.layers.register_hook(None, outputs)
    given, encodings = lm.inference.execute_inference(TEXTS)
    assert torch.equal(inputs.get_captured_input_ids(), encodings["input_ids"])
    special = torch.isin(encodings["input_ids"], torch.tensor(lm.tokenizer.all_special_ids))
    assert torch.equal(inputs.get_captured_attention_mask(), encodings["attention_mask"].bool() & ~special)
    assert torch.equal(outputs.get_captured_output_logits(), given.logits)


def test_saving_activations(lm) -> None:
    texts = [f"{name} went to the store" for name in ("Mary", "John")] * 4
    run = lm.activations.save_activations_dataset(texts, [LAYER, 1], run_name="first", batch_size=3)
    assert run == "first"
    rows = lm.store.open_run("first")
    for point in rows.points:
        cached = torch.cat([lm.hooked.cache(text, names_filter=point)[point][0] for text in texts])
        assert torch.allclose(rows[point][:], cached, atol=1e-5)
    assert lm.store.get_run_metadata("first")["layer_signatures"] == [LAYER, "1"]
    unnamed = lm.activations.save_activations(texts[:2], 0, dtype=torch.bfloat16)
    assert lm.store.list_runs() == sorted(["first", unnamed])
    lm.store.delete_run(unnamed)
    for bad in ("nosuch", "../first", ""):
        with pytest.raises(StoreError):
            lm.store.open_run(bad)
    with pytest.raises(HooklineError, match="store"):
        LanguageModel.from_model(lm.model, lm.tokenizer).activations.save_activations(texts, 0)


def test_saving_what_detectors_kept(lm) -> None:
    detectors = [LayerActivationDetector(), LayerActivationDetector()]
    lm.layers.register_hook(LAYER, detectors[0])
    lm.layers.register_hook(1, detectors[1])
    lm.inference.execute_inference(TEXTS)
    lm.save_detector_metadata("run", 0, clear_after_save=False)
    metadata, tensors = lm.store.get_detector_metadata("run", 0)
    assert torch.equal(tensors[LAYER]["activations"], detectors[0].get_captured())
    one = lm.store.get_detector_metadata_by_layer_by_key("run", 0, "1", "activations")
    assert torch.equal(one, detectors[1].get_captured())
    assert tuple(metadata[LAYER]["activations_shape"]) == detectors[0].get_captured().shape
    assert lm.store.list_run_batches("run") == [0]
    lm.save_detector_metadata("run", None, unified=True)
    assert lm.store.list_run_batches("run") == [0, 1]
    assert detectors[0].get_captured() is None, "it clears, unless told not to"
    with pytest.raises(HooklineError, match="batch_idx=0"):
        lm.save_detector_metadata("run", None)
    lm.inference.execute_inference(TEXTS)
    lm.clear_detectors()
    assert detectors[0].get_captured() is None
    with pytest.raises(StoreError, match="batch 3"):
        lm.store.get_detector_metadata("run", 3)


def test_saving_and_loading_the_model(lm, tmp_path) -> None:
    folder = lm.save_model()
    again = LanguageModel.from_local(folder, store=tmp_path / "store")
    both = LanguageModel.from_local_torch(str(folder), str(folder))
    expected = lm.inference.execute_inference(TEXTS)[0].logits
    for each in (again, both):
        assert torch.equal(each.inference.execute_inference(TEXTS)[0].logits, expected)
    with pytest.raises(HooklineError, match="pickle"):
        LanguageModel.from_local(tmp_path / "model.pt")
    with pytest.raises(HooklineError, match="no folder"):
        LanguageModel.from_local(tmp_path / "nowhere")


def test_the_rest_of_the_layers(lm, capsys) -> None:
    assert lm.layers.enable_hook("nope") is False
    assert lm.layers.disable_hook("nope") is False
    detector = LayerActivationDetector(layer_signature="layer_0")
    lm.layers.register_hook("transformer.h.0", detector)
    assert lm.layers.disable_hook(detector.id) is True
    assert not detector.is_enabled()
    assert lm.layers.enable_hook(detector.id) is True
    lm.layers.print_layer_names()
    assert "gpt2lmheadmodel_transformer_h_0_mlp_c_fc: Conv1D" in capsys.readouterr().out
    seen = []
    handles = [
        lm.layers.register_forward_hook_for_layer("layer_1", lambda module, args, output: seen.append("after")),
        lm.layers.register_pre_forward_hook_for_layer(LAYER, lambda module, args: seen.append("before")),
    ]
    lm.inference.execute_inference(TEXTS)
    for handle in handles:
        handle.remove()
    assert seen == ["before", "after"]
    with pytest.raises(HooklineError, match=r"name.*module"):
        lm.layers.register_forward_hook_for_layer("blocks.0.attn.hook_q", print)
    lm.layers.register_hook("layer_3", LayerActivationDetector(hook_id="late"))
    lm.inference.execute_inference(TEXTS)
    with pytest.warns(hookline.NeverFiredWarning, match="'late' at '3'"):
        lm.inference.execute_inference(TEXTS, stop_after_layer=1)


def test_tensors_in_the_store(lm) -> None:
    x = torch.randn(3, 4).t()
    lm.store.put_tensor("directions/mean.safetensors", x)
    assert torch.equal(lm.store.get_tensor("directions/mean.safetensors"), x)
    with pytest.raises(StoreError, match="no tensor"):
        lm.store.get_tensor("other")
    for key in ("../outside", "", "a//b", "/etc/x"):
        with pytest.raises(StoreError, match="path inside"):
            lm.store.put_tensor(key, x)


def test_a_pre_forward_detector_without_an_output(lm) -> None:
    class Shapes(Detector):
        def _hook_fn(self, module, input):
            self.metadata["shapes"] = [tuple(value.shape) for value in input]

    detector = Shapes(hook_type=HookType.PRE_FORWARD)
    lm.layers.register_hook("transformer.h.1.mlp", detector)
    _, encodings = lm.inference.execute_inference(TEXTS)
    assert detector.metadata["shapes"] == [(*encodings["input_ids"].shape, 128)]


def test_a_function_controller_called_by_hand() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(FunctionController("layer_0", lambda h: h * 2).modify_activations(None, None, x), x * 2)
    before = FunctionController("layer_0", lambda h: h * 2, HookType.PRE_FORWARD)
    assert torch.equal(before.modify_activations(None, x, None), x * 2)


def test_inputs_set_from_encodings() -> None:
    detector = ModelInputDetector(save_attention_mask=True, special_token_ids=[2])
    detector.set_inputs_from_encodings(
        {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    )
    assert detector.get_captured_input_ids().tolist() == [[1, 2, 3]]
    assert detector.get_captured_attention_mask().tolist() == [[False, False, True]]


def test_wrong_arguments_are_value_errors_too(lm, loaded) -> None:
    wrong = [
        lambda: lm.inference.execute_inference([]),
        lambda: lm.inference.infer_texts(TEXTS, batch_size=0),
        lambda: lm.inference.extract_logits("logits"),
        lambda: lm.activations.save_activations(TEXTS, None),
        lambda: lm.save_detector_metadata("run", None),
        lambda: lm.layers.register_hook("nonexistent", LayerActivationDetector()),
        lambda: lm.layers.register_hook("layer_999", LayerActivationDetector()),
        lambda: lm.layers.get_hooks("nonexistent"),
        lambda: lm.layers.register_forward_hook_for_layer("nonexistent", print),
        lambda: [lm.layers.register_hook(LAYER, LayerActivationDetector(hook_id="twice")) for _ in range(2)],
        lambda: LanguageModel.from_model(loaded.module, loaded.tokenizer).save_detector_metadata("run", 0),
    ]
    for call in wrong:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the class is what is tested)
            call()
        assert isinstance(caught.value, HooklineError)


def test_logits_of_a_tuple(lm) -> None:
    logits = torch.randn(1, 2, 3)
    assert lm.inference.extract_logits((logits, None)) is logits


def test_names_that_mi_crows_own_tests_use(lm) -> None:
    from hookline.compat.mi_crow.datasets import TextDataset
    from hookline.compat.mi_crow.datasets.base_dataset import BaseDataset
    from hookline.compat.mi_crow.mechanistic.sae.modules.topk_sae import TopKSae
    from hookline.compat.mi_crow.mechanistic.sae.sae import Sae

    assert issubclass(TextDataset, BaseDataset)
    assert issubclass(TopKSae, Sae)
    assert lm.layers.context is lm.activations.context is lm.context
    name = lm.activations.save_activations(TEXTS, LAYER, batch_size=1, free_cuda_cache_every=2)
    assert lm.store.list_run_batches(name) == [0, 1]
    lm.layers.register_hook(LAYER, LayerActivationDetector())
    lm.inference.execute_inference(TEXTS)
    assert lm.save_detector_metadata("kept", 3) == "runs/kept/batch_3"
    assert lm.save_detector_metadata("kept", None, unified=True) == "runs/kept/batch_4"


def test_seeds_and_loggers() -> None:
    drawn = []
    for _ in range(2):
        set_seed(5, deterministic=False)
        drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    logger = get_logger("hookline tests", "WARNING")
    assert get_logger("hookline tests", "WARNING") is logger
    assert (len(logger.handlers), logger.level, logger.propagate) == (1, 30, True)

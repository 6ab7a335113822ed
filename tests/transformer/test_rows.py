"""An invented architecture and an invented point are one row each; a metric and an edit, one class each."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import causal_lm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import hookline
from hookline.experiments import metrics, patching
from hookline.hooks.data_edits import EDITS, DataEdit
from hookline.hooks.edit_fields import edit_field, number, tensor
from hookline.transformer.architectures import ARCHITECTURES, Architecture
from hookline.transformer.point_table import POINTS, PointRow
from hookline.transformer.sites import output_of


class AddingMLP(LlamaMLP):
    """An MLP that adds the stream itself."""

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return stream + super().forward(x)


class AddingLayer(LlamaDecoderLayer):
    """A layer that leaves the second addition to its MLP."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        stream = hidden_states + attended
        return self.mlp(self.post_attention_layernorm(stream), stream)


def invented() -> transformers.LlamaForCausalLM:
    model = causal_lm("llama")
    for layer in model.model.layers:
        layer.__class__, layer.mlp.__class__ = AddingLayer, AddingMLP
    model.config.model_type = "invented"
    return model


def test_an_architecture_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {verdict.name for verdict in hookline.hook(invented()).verify().failed()}
    assert "blocks.0.hook_mlp_out" in failed  # without a row it is the stream, too
    monkeypatch.setitem(ARCHITECTURES, "invented", Architecture(residual_in_mlp=True))
    report = hookline.hook(invented()).verify()
    assert not report.failed()
    assert {"blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern"} <= {verdict.name for verdict in report.verdicts}


@pytest.fixture
def gate() -> Iterator[PointRow]:
    """The gate of a gated MLP, under a name of its own."""
    row = PointRow(
        "mlp.hook_gate",
        "b p m",
        short=("gate",),
        role="mlp.gate",
        site=lambda block, _: output_of(block.mlp.gate_proj) if hasattr(block.mlp, "gate_proj") else "it has no gate",
        after="hook_mlp_in",
    )
    POINTS.add(row)
    yield row
    POINTS.remove(row.name)


def test_a_point_is_one_row(gate: PointRow) -> None:
    model = hookline.hook(causal_lm("llama"))
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
        edited = model.run_with_hooks(tokens, fwd_hooks=[(("gate", 1), lambda x: x * 0)])
    assert cache["gate", 1].shape == (1, 3, model.cfg.d_mlp)
    for name in ("blocks.1.mlp.hook_gate", "lm.mlp.1.gate", ("lm.mlp.gate", 1)):
        assert torch.equal(cache[name], cache["blocks.1.mlp.hook_pre"])
    assert not torch.equal(edited, logits)
    names = list(model.hook_dict)
    assert names.index("blocks.0.mlp.hook_gate") == names.index("blocks.0.hook_mlp_in") + 1
    with pytest.raises(hookline.UnknownPointError, match="no gate"):
        hookline.hook(causal_lm("gpt2")).run_with_cache(tokens, names_filter="blocks.0.mlp.hook_gate")


@pytest.fixture
def entropy() -> Iterator[type[metrics.Metric]]:
    """The entropy of the next token, as one class."""

    @dataclass(frozen=True, eq=False, repr=False)
    class Entropy(metrics.Metric):
        pos: metrics.Position = field(default=-1, metadata=metrics.POSITION)

        def __call__(self, logits: torch.Tensor) -> torch.Tensor:
            log_probs = logits[torch.arange(len(logits)), self.pos].float().log_softmax(-1)
            return -(log_probs.exp() * log_probs).sum(-1)

    yield Entropy
    del metrics.METRICS["entropy"]
    with pytest.raises(AttributeError, match="entropy"):
        metrics.entropy


def test_a_metric_is_one_class(entropy: type[metrics.Metric]) -> None:
    model = hookline.hook(causal_lm("llama"))
    clean, corrupted = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 2, 3]])
    by_name = patching.sweep(model, clean, corrupted, "entropy")
    assert by_name.name == "entropy"
    assert metrics.entropy is entropy
    assert "entropy" in dir(metrics)
    assert torch.equal(by_name.values, patching.sweep(model, clean, corrupted, entropy()).values)
    first = patching.sweep(model, clean, corrupted, entropy(pos=0))
    assert first.info["clean"] != by_name.info["clean"]
    with pytest.raises(hookline.HooklineError, match="'entropy'"):
        patching.sweep(model, clean, corrupted, "entropi")
    with pytest.raises(hookline.HooklineError, match="position 3"):
        patching.sweep(model, clean, corrupted, entropy(pos=3))


def test_an_edit_is_one_class(tmp_path: Path) -> None:
    @dataclass(frozen=True, eq=False, repr=False)
    class Clamp(DataEdit):
        kind = "clamp"
        center: torch.Tensor = edit_field(tensor)
        limit: float = edit_field(number, 1.0)

        def changed(self, x: torch.Tensor, hook: object) -> torch.Tensor:
            return torch.clamp(x - (center := self.center.to(x)), -self.limit, self.limit) + center

    try:
        assert "clamp" in dir(hookline.edits)
        edit = hookline.edits.clamp(torch.zeros(32), 0.5, pos=hookline.last)
        assert type(edit) is Clamp
        assert repr(edit) == "clamp(center=<[32] float32>, limit=0.5, pos=last)"
        hookline.edits.save(tmp_path, [("blocks.1.hook_resid_post", edit)])
        again = hookline.edits.load(tmp_path)
        assert again == [("blocks.1.hook_resid_post", edit)]
        model = hookline.hook(causal_lm("llama"))
        with model.hooks(again), torch.no_grad():
            resid = model.cache(torch.tensor([[1, 2, 3]]))["resid_post", 1]
        assert resid[:, -1].abs().max() <= 0.5
        with pytest.raises(hookline.HooklineError, match="limit"):
            Clamp(torch.zeros(32), "much")
    finally:
        del EDITS["clamp"]
    with pytest.raises(AttributeError, match="clamp"):
        hookline.edits.clamp

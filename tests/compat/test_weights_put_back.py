"""Programs that change a weight and put it back: each is run on TransformerLens's own kind of module as well.

There every weight is an nn.Parameter with memory of its own, so torch says what each program does; here it is a part of
a parameter, often in another layout. After each step both must have the same weights.
"""

from copy import deepcopy

import pytest
import torch
from tiny_models import nudged
from torch import Tensor, nn

from hookline.compat.transformer_lens import HookedTransformer
from hookline.weights.read_only import ReadOnlyTensor


class Lens(nn.Module):
    """Some weights of layer 1 as TransformerLens has them."""

    def __init__(self, model: HookedTransformer, paths: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module(), nn.Module()])
        for path in paths:
            part, _, name = path.partition(".")
            if not hasattr(self.blocks[1], part):
                self.blocks[1].add_module(part, nn.Module())
            own = nn.Parameter(weight_of(model, path).detach().clone())
            getattr(self.blocks[1], part).register_parameter(name, own)


NAMES = ("attn.W_Q", "attn.W_V", "attn._W_V", "attn.W_O", "attn.b_Q", "mlp.W_in", "mlp.W_out", "mlp.b_out", "ln1.w")


def weight_of(model, path: str) -> Tensor:
    """A weight of layer 1."""
    part, _, name = path.partition(".")
    return getattr(getattr(model.blocks[1], part), name)


def views_in(model: HookedTransformer) -> list[str]:
    """The weights that the model has; not those that are fused and interleaved, of which there is only a copy."""
    state = model.state_dict()
    names = [path for path in NAMES if f"blocks.1.{path}" in state]
    return [path for path in names if not isinstance(weight_of(model, path), ReadOnlyTensor)]


def state_dict(model, owner, name, new):
    before = model.state_dict()
    getattr(owner, name).data = new
    yield
    model.load_state_dict(before)


def copied_state_dict(model, owner, name, new):
    before = deepcopy(model.state_dict())
    getattr(owner, name).data = new
    yield
    model.load_state_dict(before)


def state_dict_and_assignment(model, owner, name, new):
    before = model.state_dict()
    setattr(owner, name, nn.Parameter(new))
    yield
    model.load_state_dict(before)


def state_dict_and_writing(model, owner, name, new):
    """Not put back: the state dict shares the memory that is written to."""
    before = model.state_dict()
    getattr(owner, name).data.copy_(new)
    yield
    model.load_state_dict(before)


def data(_, owner, name, new):
    old = getattr(owner, name).data
    getattr(owner, name).data = new
    yield
    getattr(owner, name).data = old


def detached(_, owner, name, new):
    old = getattr(owner, name).detach()
    getattr(owner, name).data = new
    yield
    getattr(owner, name).data = old


def cloned_data(_, owner, name, new):
    old = getattr(owner, name).data.clone()
    getattr(owner, name).data = new
    yield
    getattr(owner, name).data = old


def held_weight(_, owner, name, new):
    weight = getattr(owner, name)
    old = weight.data
    weight.data = new
    assert torch.equal(weight, new)
    yield
    weight.data = old
    assert torch.equal(weight, old)


def written(_, owner, name, new):
    old = getattr(owner, name).detach().clone()
    with torch.no_grad():
        getattr(owner, name)[:] = new
    yield
    with torch.no_grad():
        getattr(owner, name).copy_(old)


def row(_, owner, name, new):
    old = getattr(owner, name).data[0].clone()
    getattr(owner, name).data[0] = new[0]
    yield
    getattr(owner, name).data[0] = old


def shared_row(_, owner, name, new):
    """Not put back: `old` shares the memory that is written to."""
    old = getattr(owner, name).data[0]
    getattr(owner, name).data[0] = new[0]
    yield
    getattr(owner, name).data[0] = old


def shared_row_of_old_data(_, owner, name, new):
    """One row is put back, which is still in the old memory."""
    old = getattr(owner, name).data[0]
    getattr(owner, name).data = new.clone()
    yield
    getattr(owner, name).data[0] = old


def in_place_operators(_, owner, name, new):
    getattr(owner, name).data += new
    yield
    getattr(owner, name).data -= new


def parameter(_, owner, name, new):
    old = getattr(owner, name)
    setattr(owner, name, nn.Parameter(new))
    yield
    setattr(owner, name, old)


def parameter_of_data(_, owner, name, new):
    old = getattr(owner, name).data
    setattr(owner, name, nn.Parameter(new))
    yield
    setattr(owner, name, nn.Parameter(old))


def parameter_of_clone(_, owner, name, new):
    old = getattr(owner, name).clone().detach()
    setattr(owner, name, nn.Parameter(new))
    yield
    setattr(owner, name, nn.Parameter(old))


def same_parameter(_, owner, name, new):
    """Not put back: `old` is the weight that is changed."""
    old = getattr(owner, name)
    getattr(owner, name).data = new
    yield
    setattr(owner, name, old)


def replaced_parameter_is_changed(_, owner, name, new):
    """What is done with a weight that is no longer in the model has no effect on it, until it is in it again."""
    old = getattr(owner, name)
    setattr(owner, name, nn.Parameter(new))
    old.data = 2 * new
    yield
    setattr(owner, name, old)


def neighbors(model, owner, name, new):
    """Weights and their data that were taken before another one was changed are still those of the model."""
    others = [weight_of(model, path) for path in ("attn.W_Q", "attn.W_O", "mlp.W_in") if not path.endswith(name)]
    taken = [other.data for other in others]
    old = getattr(owner, name).data
    getattr(owner, name).data = new
    with torch.no_grad():
        for other in others:
            other += 1
    yield
    getattr(owner, name).data = old
    for other in taken:
        other *= 2


PROGRAMS = (
    *(state_dict, copied_state_dict, state_dict_and_assignment, state_dict_and_writing, data, detached, cloned_data),
    *(held_weight, written, row, shared_row, shared_row_of_old_data, in_place_operators, parameter, parameter_of_data),
    *(parameter_of_clone, same_parameter, replaced_parameter_is_changed, neighbors),
)
KEEP_CHANGES = (
    *(state_dict_and_writing, shared_row, shared_row_of_old_data, same_parameter, replaced_parameter_is_changed),
    *(neighbors,),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])  # with parts of one parameter, and with transposed ones
def test_a_program_does_what_it_does_in_transformerlens(kind, program) -> None:
    model = HookedTransformer.from_pretrained_no_processing(kind, hf_model=nudged(kind))
    tokens = torch.arange(3, 17).view(2, 7)
    expected, paths = model(tokens), views_in(model)
    for path in paths:
        part, _, name = path.partition(".")
        lens = Lens(model, paths)
        new = torch.randn_like(weight_of(lens, path))
        steps = [program(each, getattr(each.blocks[1], part), name, new.clone()) for each in (model, lens)]
        for _ in range(2):
            for step in steps:
                next(step, None)
            unlike = [other for other in paths if not torch.allclose(weight_of(model, other), weight_of(lens, other))]
            assert unlike == [], path
        if program not in KEEP_CHANGES:
            assert torch.allclose(model(tokens), expected, atol=1e-4), path

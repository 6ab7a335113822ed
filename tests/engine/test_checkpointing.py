"""Checkpointed regions run twice; edits must hold both times, and nothing else may act twice."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from networks import has_taps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hookline
from hookline import HookError
from hookline.errors import SkippedHookWarning, UnavailablePointError


class Blocks(nn.Module):
    """Three blocks, each in a checkpointed region of its own if asked."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            if self.use_reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Repeats(nn.Module):
    """Calls one module twice in a checkpointed region."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.cell = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(lambda h: self.cell(self.cell(h).tanh()), x, use_reentrant=self.use_reentrant)


KINDS = pytest.mark.parametrize("use_reentrant", [False, True])


@pytest.fixture
def pair(use_reentrant):
    """The same network with and without checkpointing."""
    plain, twice = Blocks(None), Blocks(use_reentrant)
    twice.load_state_dict(plain.state_dict())
    return hookline.hook(plain), hookline.hook(twice)


def gradients(net) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters()]


def double_in_place(h):
    h.mul_(2)


HOOKS = [("blocks.1.0", double_in_place), ("blocks.2.1", lambda h: h + 1), ("blocks.0.2.input", lambda h: h * 3)]


def same(a, b) -> bool:
    return all(torch.allclose(x, y) for x, y in zip(a, b, strict=True))


@KINDS
@pytest.mark.parametrize("backward", ["inside the context", "after it"])
def test_edits_hold_in_the_second_run(pair, x, backward) -> None:
    x.requires_grad_()
    found = []
    for net in pair:
        with net.hooks(fwd_hooks=HOOKS):
            loss = net(x).pow(2).sum()
            if backward == "inside the context":
                loss.backward()
        if backward == "after it":
            loss.backward()
        found.append([*gradients(net), loss.detach()])
    assert same(*found)
    bare = Blocks(None)
    bare.load_state_dict(pair[0].state_dict())
    bare(x).pow(2).sum().backward()
    assert not same(found[0], [*(p.grad for p in bare.parameters()), loss]), "the edits matter"


@KINDS
@pytest.mark.parametrize("hooks", [HOOKS, []])
def test_a_backward_in_another_thread(pair, x, hooks) -> None:
    """As on a GPU, where torch always does that: edits hold, and hooks that only read are not missed."""
    x.requires_grad_()
    found, seen = [], []
    for net in pair:
        with net.hooks(fwd_hooks=[*hooks, ("blocks.1.1", seen.append)]):
            loss = net(x).pow(2).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        found.append([*gradients(net), loss.detach()])
    assert same(*found)
    assert len(seen) == 2


@KINDS
def test_the_modules_are_free_when_the_graph_is_gone(pair, x) -> None:
    x.requires_grad_()
    net = pair[1]
    loss = net.run_with_hooks(x, fwd_hooks=HOOKS).sum()
    assert torch.equal(net(x), net.module(x))
    with torch.no_grad():
        bare = pair[0](x)
    assert torch.allclose(net(x), bare), "kept for the second run, the hooks act in no other"
    del loss
    gc.collect()
    assert not any(has_taps(module) for module in net.modules())


@KINDS
def test_a_hooked_and_a_bare_run_in_one_backward(pair, x) -> None:
    x.requires_grad_()
    found = []
    for net in pair:
        hooked = net.run_with_hooks(x, fwd_hooks=HOOKS)
        other = net.run_with_hooks(x, fwd_hooks=[("blocks.1.0", torch.tanh)])
        (hooked * net(x) + other).sum().backward()
        found.append(gradients(net))
    assert same(*found)


@KINDS
def test_a_bare_run_recomputes_bare_inside_a_context(pair, x) -> None:
    """The hooks of an open context are not for the second run of a pass that was made before it."""
    x.requires_grad_()
    found = []
    for net in pair:
        loss = net(x).sum()
        with net.hooks(fwd_hooks=HOOKS):
            loss.backward()
            net(x)
        found.append(gradients(net))
    assert same(*found)


@KINDS
def test_backward_hooks(pair, x) -> None:
    x.requires_grad_()
    seen, found = [], []
    for net in pair:
        grads = []
        hooks = [("blocks.1.0", grads.append), ("blocks.0.1", lambda grad: grad * 2)]
        net.run_with_hooks(x, fwd_hooks=HOOKS, bwd_hooks=hooks).sum().backward()
        seen.append(grads)
        found.append(gradients(net))
    assert len(seen[1]) == 1
    assert torch.allclose(seen[0][0], seen[1][0])
    assert same(*found)


@KINDS
def test_caches_record_once(pair, x) -> None:
    x.requires_grad_()
    net = pair[1]
    fired = []
    with net.hooks(fwd_hooks=[*HOOKS, ("blocks.1.1", lambda h, hook: fired.append(hook.call))]):
        out, cache = net.run_with_cache(x)
        out.sum().backward()
    assert not any("#" in name for name in cache)
    assert fired == [0], "a hook that only reads is not called again"


def test_gradients_in_the_cache(x) -> None:
    plain, twice = Blocks(None), Blocks(False)
    twice.load_state_dict(plain.state_dict())
    caches = [hookline.hook(m).run_with_cache(x, incl_bwd=True, loss_fn=torch.sum)[1] for m in (plain, twice)]
    assert list(caches[0]) == list(caches[1])
    assert all(torch.allclose(caches[0][name], caches[1][name]) for name in caches[0])


@KINDS
def test_standing_hooks(pair, x) -> None:
    x.requires_grad_()
    found = []
    for net in pair:
        for name, hook in HOOKS:
            net.add_hook(name, hook)
        net(x).sum().backward()
        found.append(gradients(net))
        net.reset_hooks()
    assert same(*found)


@KINDS
def test_one_call_of_several_cannot_be_told(use_reentrant, x) -> None:
    x.requires_grad_()
    net = hookline.hook(Repeats(use_reentrant))
    loss = net.run_with_hooks(x, fwd_hooks=[("cell#1", torch.tanh)]).sum()
    with pytest.raises(HookError, match="call"):
        loss.backward()
    del loss
    gc.collect()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of a region inside a region
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_nested_regions(x, outer, inner, inside) -> None:
    class Nested(nn.Module):
        def __init__(self, checkpointed: bool):
            super().__init__()
            self.checkpointed = checkpointed
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def outer(self, h):
            h = self.a(h).tanh()
            h = checkpoint(self.inner, h, use_reentrant=inner) if self.checkpointed else self.inner(h)
            return self.c(h).tanh()

        def inner(self, h):
            return self.b(h).tanh()

        def forward(self, x):
            return checkpoint(self.outer, x, use_reentrant=outer) if self.checkpointed else self.outer(x)

    x.requires_grad_()
    plain, twice = Nested(False), Nested(True)
    twice.load_state_dict(plain.state_dict())
    for hooks in ([("b", lambda h: h * 2)], [("a", torch.tanh), ("b", lambda h: h * 2), ("c", torch.sin)]):
        for module in (plain, twice):
            module.zero_grad()
            with hookline.hook(module).hooks(fwd_hooks=hooks):
                loss = module(x).sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        assert same(gradients(plain), gradients(twice))


@KINDS
def test_an_edit_that_looks_at_the_call(pair, x) -> None:
    """Of a module called once it is known; of one called several times, asking raises rather than being wrong."""
    x.requires_grad_()
    found = []
    for net in pair:
        net.run_with_hooks(x, fwd_hooks=[("blocks.1.0", lambda h, hook: h * (2 + hook.call))]).sum().backward()
        found.append(gradients(net))
    assert same(*found)


@KINDS
def test_the_call_of_a_repeated_module_is_not_guessed(use_reentrant, x) -> None:
    x.requires_grad_()
    net = hookline.hook(Repeats(use_reentrant))
    loss = net.run_with_hooks(x, fwd_hooks=[("cell", lambda h, hook: h * (1 + hook.call))]).sum()
    with pytest.raises(HookError, match="call"):
        loss.backward()
    del loss
    gc.collect()


@KINDS
def test_a_standing_backward_hook_is_not_reported(pair, x) -> None:
    x.requires_grad_()
    seen = []
    net = pair[1]
    net.add_hook("blocks.1.0", seen.append, dir="bwd")
    net(x).sum().backward()
    assert len(seen) == 1
    net.reset_hooks()


class Nested(nn.Module):
    """A checkpointed region inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        def outer(h):
            return self.b(checkpoint(lambda each: torch.tanh(self.a(each)), h, use_reentrant=False))

        return checkpoint(outer, self.c(x), use_reentrant=False)


@pytest.mark.parametrize(
    "make", [lambda: Blocks(False), lambda: Blocks(True), Nested], ids=["plain", "reentrant", "nested"]
)
def test_edits_and_backward_hooks_are_freed_with_the_graph(make, x) -> None:
    class Double:
        def __call__(self, value):
            return value * 2

    hook, module = Double(), make()
    found, net = weakref.ref(hook), hookline.hook(module)
    point = "blocks.1.0" if isinstance(module, Blocks) else "a"
    given = x.detach().clone().requires_grad_()
    net.run_with_hooks(given, fwd_hooks=[(point, hook)], bwd_hooks=[(point, hook)]).sum().backward()
    del hook
    gc.collect()
    assert found() is None
    assert not any(has_taps(each) for each in module.modules())


@pytest.mark.parametrize("point", ["0.input", "0", "input"])
@pytest.mark.parametrize("edit", [None, torch.zeros_like])
def test_a_gradient_that_begins_inside_a_region(point, edit) -> None:
    """Nothing that goes into the region has a graph: the backward hook begins one, also when the region runs again."""
    module = Blocks(use_reentrant=False)
    net, seen = hookline.hook(module), []
    if edit is not None:
        net.add_hook("blocks.0.input", edit)
    hooks = [(f"blocks.0.{point}", lambda grad: seen.append(grad))]
    net.run_with_hooks(torch.randn(2, 4), bwd_hooks=hooks).sum().backward()
    assert len(seen) == 1
    assert seen[0].any()
    assert module.blocks[0][0].bias.grad.any()
    net.remove_all_hook_fns()


@KINDS
def test_a_hook_that_only_reads_may_compute_with_a_graph(pair, x) -> None:
    """It runs once, and torch demands that a region saves the same tensors each time."""
    plain, twice = pair
    seen = []
    for net in pair:
        net.run_with_hooks(x.clone().requires_grad_(), fwd_hooks=[("blocks.1.0", lambda h: seen.append((h**2).mean()))])
        hooks = [("blocks.1.0", lambda h: seen.append((h**2).mean())), ("blocks.1.2", lambda h: h * h.sigmoid())]
        net.run_with_hooks(x.clone().requires_grad_(), fwd_hooks=hooks).sum().backward()
    assert len(seen) == 4
    for expected, gradient in zip(gradients(plain), gradients(twice), strict=True):
        assert torch.equal(expected, gradient)


def products(_context, operator, *_, **__) -> CheckpointPolicy:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def everything(*_, **__) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def nothing(*_, **__) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class Mixed(nn.Module):
    """Layers and attention in one region, or in one around another; each is how `checkpoint` is called, or None."""

    def __init__(self, outer: dict | None = None, inner: dict | None = None, *, drops: bool = False) -> None:
        super().__init__()
        self.outer, self.inner, self.drop = outer, inner, nn.Dropout(0.5) if drops else nn.Identity()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

    def within(self, h):
        return self.b(self.drop(h) * 2).tanh()

    def around(self, x):
        h = self.a(x).tanh()
        h = self.within(h) if self.inner is None else checkpoint(self.within, h, **self.inner)
        return self.c(self.drop(h).sin() + self.mix(h, h, h)[0])

    def forward(self, x):
        return self.around(x) if self.outer is None else checkpoint(self.around, x, **self.outer)


PLAIN, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
SELECTIVE = {
    policy.__name__: PLAIN | {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    for policy in (products, everything, nothing)
}
NESTED = {f"{name} around products": (how, SELECTIVE["products"]) for name, how in SELECTIVE.items()}
SELECTIVE_NETS = {**{name: (how, None) for name, how in SELECTIVE.items()}, **NESTED}


def results(net, x, call) -> list[torch.Tensor]:
    """The output, the gradients, and the random numbers after both."""
    net.zero_grad()
    x.grad = None
    torch.manual_seed(1)
    out = call(net, x)
    out.sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters()), torch.get_rng_state().float()]


KEPT: list[torch.Tensor] = []
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
CALLS = {
    "a hook that reads": lambda net, x: net.run_with_hooks(x, fwd_hooks=[("a", lambda z: KEPT.append(z @ WEIGHT))]),
    "reads of gradients": lambda net, x: net.run_with_hooks(x, bwd_hooks=[("b", lambda g: KEPT.append(g @ WEIGHT))]),
    "a cache": lambda net, x: net.run_with_cache(x, names_filter=["a", "b.input", "mix.pattern"])[0],
    "a full cache": lambda net, x: net.run_with_cache(x)[0],
    "an edit": lambda net, x: net.run_with_hooks(x, fwd_hooks=[("b", lambda z: z @ WEIGHT)]),
    "an edit in place": lambda net, x: net.run_with_hooks(x, fwd_hooks=[("b.input", double_in_place)]),
    "edits and reads of attention": lambda net, x: net.run_with_hooks(
        x, fwd_hooks=[("mix.pattern", lambda z: z * 2), ("mix.scores", KEPT.append), ("c", KEPT.append)]
    ),
}


@pytest.mark.parametrize("how", SELECTIVE_NETS)
@pytest.mark.parametrize("call", CALLS)
def test_selective_checkpointing_does_not_see_what_hooks_compute(x, how, call) -> None:
    """Torch keeps results by operator and number, for a second run that does not call hooks that only read."""
    plain, twice = Mixed(), Mixed(*SELECTIVE_NETS[how])
    twice.load_state_dict(plain.state_dict())
    x = x[:, None].repeat(1, 3, 1).requires_grad_()
    assert same(*(results(hookline.hook(each), x, CALLS[call]) for each in (plain, twice)))


def test_modes_of_others_stay_on_around_hooks(x) -> None:
    class Log(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    net = hookline.hook(Mixed(SELECTIVE["products"]))
    x = x[:, None].repeat(1, 3, 1).requires_grad_()
    with Log() as log:
        net.run_with_hooks(x, fwd_hooks=[("b", lambda z: KEPT.append(z.sinh()))])
        assert _get_current_dispatch_mode_stack() == [log]
    assert torch.ops.aten.sinh.default in log.seen
    with pytest.raises(HookError), Log() as log:
        net.run_with_hooks(x, fwd_hooks=[("b", lambda _: 1 / 0)])
    assert not _get_current_dispatch_mode_stack()


RANDOM_NETS = {
    **{"plain": (PLAIN, None), "reentrant": (REENTRANT, None), "selective": (SELECTIVE["products"], None)},
    **{"plain in plain": (PLAIN, PLAIN), "plain in reentrant": (REENTRANT, PLAIN)},
    **{"reentrant in plain": (PLAIN, REENTRANT), "reentrant in reentrant": (REENTRANT, REENTRANT)},
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of a region inside a region
@pytest.mark.parametrize("how", RANDOM_NETS)
def test_a_hook_that_only_reads_may_draw_random_numbers(x, how) -> None:
    """It is not called again, and dropout behind it draws the same mask as in the first run."""
    plain, twice = Mixed(drops=True), Mixed(*RANDOM_NETS[how], drops=True)
    twice.load_state_dict(plain.state_dict())
    x = x[:, None].repeat(1, 3, 1).requires_grad_()
    count = []

    def sample(z) -> None:
        count.append(torch.rand(len(count) % 3))  # other numbers each time, and sometimes none

    def run(net, x):
        count.clear()
        hooks = [("a", sample), ("b.input", sample), ("b", lambda z: z + torch.randn_like(z)), ("b", sample)]
        return net.run_with_hooks(x, fwd_hooks=hooks)

    assert same(*(results(hookline.hook(each), x, run) for each in (plain, twice)))
    assert len(count) == 3


def test_a_hook_that_fails_may_have_drawn_random_numbers(x) -> None:
    def fails(_) -> None:
        torch.rand(3)
        raise ValueError

    def run(net, x):
        with pytest.warns(SkippedHookWarning):
            return net.run_with_hooks(x, fwd_hooks=[("a", fails)], on_error="skip")

    plain, twice = Mixed(drops=True), Mixed(PLAIN, drops=True)
    twice.load_state_dict(plain.state_dict())
    x = x[:, None].repeat(1, 3, 1).requires_grad_()
    assert same(*(results(hookline.hook(each), x, run) for each in (plain, twice)))


def test_a_region_may_run_again_twice_with_random_numbers(x) -> None:
    net = hookline.hook(Mixed(PLAIN, drops=True))
    x = x[:, None].repeat(1, 3, 1).requires_grad_()
    loss = net.run_with_hooks(x, fwd_hooks=[("a", lambda z: KEPT.append(torch.rand(2)))]).sum()
    state = torch.get_rng_state()
    loss.backward(retain_graph=True)
    first = gradients(net)
    loss.backward()
    assert same(gradients(net), [2 * grad for grad in first])
    assert torch.equal(torch.get_rng_state(), state)


@KINDS
@pytest.mark.parametrize("is_inside", [False, True], ids=["around the run", "around the model"])
def test_the_whole_model_may_be_in_a_region(pair, x, use_reentrant, is_inside) -> None:
    plain, net = hookline.hook(pair[0].module), hookline.hook(pair[0].module)
    x.requires_grad_()

    def run(net, x):
        if is_inside:
            with net.hooks(fwd_hooks=HOOKS):
                return checkpoint(net, x, use_reentrant=use_reentrant)
        return checkpoint(lambda h: net.run_with_hooks(h, fwd_hooks=HOOKS), x, use_reentrant=use_reentrant)

    expected = results(plain, x, lambda net, x: net.run_with_hooks(x, fwd_hooks=HOOKS))
    assert same(expected, results(net, x, run))


def test_hooks_of_others_on_saved_tensors_do_not_hide_a_region(x) -> None:
    class Saving(Mixed):
        def within(self, h):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
                return super().within(h)

    plain, twice = Mixed(drops=True), Saving(PLAIN, drops=True)
    twice.load_state_dict(plain.state_dict())
    x = x[:, None].repeat(1, 3, 1).requires_grad_()

    def run(net, x):
        return net.run_with_hooks(x, fwd_hooks=[("b", torch.sin), ("b.input", lambda z: KEPT.append(torch.rand(2)))])

    assert same(*(results(hookline.hook(each), x, run) for each in (plain, twice)))


class Core(nn.Module):
    """Attention that has a region of its own for scores and pattern."""

    num_heads = 2

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def core(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return checkpoint(self.core, q, k, v, use_reentrant=self.use_reentrant).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, without gradients
@KINDS
def test_an_edit_inside_a_module_is_refused_if_its_region_is_a_part_of_the_module(x, use_reentrant) -> None:
    """The region runs again without the rest of the module, in which nobody looks into it."""
    net = hookline.hook(nn.Sequential(Core(use_reentrant)))
    x = x[:, None].repeat(1, 3, 1).requires_grad_()
    with pytest.raises(UnavailablePointError):
        net.run_with_hooks(x, fwd_hooks=[("0.pattern", lambda z: z * 2)])
    net.run_with_hooks(x, fwd_hooks=[("0.pattern", KEPT.append)]).sum().backward()
    with torch.no_grad():
        edited = net.run_with_hooks(x, fwd_hooks=[("0.pattern", lambda z: z * 2)])
        assert torch.allclose(edited, 2 * net(x))

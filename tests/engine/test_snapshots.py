"""A cached tensor never changes, and none is copied without need."""

import gc
import threading
import weakref

import pytest
import torch
from networks import InPlace
from torch import Tensor, nn

import hookline
from hookline.engine._memory import snapshots
from hookline.engine._memory.snapshots import address
from hookline.engine.pass_state import pass_state


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_of_the_model(x, mode) -> None:
    module = InPlace()
    net = hookline.hook(module)
    with mode():
        out, cache = net.run_with_cache(x)
        assert torch.equal(cache["fc1"], module.fc1(x))
        assert cache["fc1"].lt(0).any()
        assert torch.equal(cache["fc2.input"], module.fc1(x).relu())
        assert torch.equal(cache["fc2"], module.fc2(cache["fc2.input"]))
        assert torch.equal(cache["relu.input"], cache["fc2"] + cache["fc2.input"])
        assert torch.equal(cache["relu"], cache["relu.input"].relu())
        kept = {name: tensor.clone() for name, tensor in cache.items()}
        out.zero_()  # the caller's own writes, and those of a later run
        net(x + 1)
        x.zero_()
        assert all(torch.equal(cache[name], tensor) for name, tensor in kept.items())


def test_writes_of_hooks(net, x) -> None:
    def double(h):
        h.mul_(2)

    stored = []
    hooks = [("fc1", stored.append), ("fc1", double), ("fc1", stored.append), ("act.input", double)]
    with net.hooks(fwd_hooks=hooks):
        _, cache = net.run_with_cache(x)
    plain = net.module.fc1(x)
    assert torch.equal(stored[0], plain), "what a hook was given does not change under it either"
    assert torch.equal(stored[1], 2 * plain)
    assert torch.equal(cache["fc1"], 2 * plain)
    assert torch.equal(cache["act.input"], 4 * plain)


def test_a_cache_holds_what_flowed_out_though_edited_by_a_later_hook(net, x) -> None:
    """The order of registration does not matter to a cache: it records what leaves the point."""
    net.add_hook("fc1", lambda h: h * 0, prepend=False)
    _, cache = net.run_with_cache(x)
    assert cache["fc1"].eq(0).all()
    assert cache["act.input"].eq(0).all()
    net.reset_hooks()


def allocated(work) -> int:
    """Bytes that torch allocates during `work`."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return sum(
        max(event.self_device_memory_usage, 0) + max(event.self_cpu_memory_usage, 0) for event in profile.events()
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # the profiler's own
def test_tensors_nobody_writes_to_are_not_copied() -> None:
    net, x = hookline.hook(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])), torch.randn(512, 256)
    with torch.no_grad():
        kept = []
        bare = allocated(lambda: kept.append(net(x)))
        cached = allocated(lambda: kept.append(net.run_with_cache(x)))
        hooked = allocated(lambda: kept.append(net.run_with_hooks(x, fwd_hooks=[("*", lambda h: None)])))
    one = x.nbytes
    assert bare >= 4 * one
    # Between two events the caller's tensor may be written to without a trace, through numpy or `.data`.
    assert cached - bare <= 2 * one, "only the caller's input is copied, at the two points that see it"
    assert hooked - bare <= 2 * one
    cache = kept[1][1]
    assert cache.nbytes == 6 * one, "the input, twice, and four outputs, though ten points name them"


class Odd(nn.Module):
    """Passes on its input as another kind of tensor."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


KINDS = {
    "sparse": (Tensor.to_sparse, Tensor.to_dense),
    "mkldnn": (Tensor.to_mkldnn, Tensor.to_dense),
    "expanded": (lambda x: x[:1].expand(5, 4), lambda x: x),
    "not torch's memory": (lambda x: torch.from_numpy(x.numpy().copy()), lambda x: x),
    "a slice": (lambda x: x.repeat(1, 3)[:, 4:8], lambda x: x),
    "transposed": (lambda x: x.T, lambda x: x),
    "empty": (lambda x: x[:0], lambda x: x),
}


ON_CPU = ("mkldnn", "not torch's memory")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.on_cpu) if k in ON_CPU else k for k in KINDS])
def test_every_kind_of_tensor(x, kind) -> None:
    make, dense = KINDS[kind]
    net = hookline.hook(Odd(make))
    out, cache = net.run_with_cache(x)
    assert torch.equal(dense(cache["output"]), dense(make(x)))
    assert torch.equal(dense(out), dense(make(x)))
    assert torch.equal(dense(net.run_with_hooks(x, fwd_hooks=[("output", lambda h: None)])), dense(make(x)))

    def double(h):
        h.mul_(2)

    assert torch.allclose(dense(net.run_with_hooks(x, fwd_hooks=[("output", double)])), 2 * dense(make(x)))


def test_function_transforms(net, x) -> None:
    def double(h):
        h.mul_(2)

    def run(row):
        out, cache = net.run_with_cache(row)
        return net.run_with_hooks(row, fwd_hooks=[("fc1", double)]) + out - cache["output"]

    expected = run(x)
    assert torch.allclose(torch.vmap(run)(x), expected, atol=1e-6)  # batched and single rows round differently
    gradient = torch.func.grad(lambda x: net.run_with_hooks(x, fwd_hooks=[("fc1", double)]).sum())(x)
    x.requires_grad_()
    net.run_with_hooks(x, fwd_hooks=[("fc1", double)]).sum().backward()
    assert torch.allclose(gradient, x.grad, atol=1e-6)


@pytest.mark.parametrize("grad", [True, False])
def test_what_a_hook_returns_is_not_written_to(x, grad) -> None:
    """Patching a cached activation into a model that works in place leaves the cache as it was."""
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)))
    parameter, kept = nn.Parameter(torch.randn(5, 4)), []

    def double_and_keep(h):
        h.mul_(2)
        kept.append((h, h.clone()))

    with torch.set_grad_enabled(grad):
        _, clean = net.run_with_cache(x)
        before = {name: tensor.clone() for name, tensor in clean.items()}
        net.run_with_hooks(x + 1, fwd_hooks=[("0", lambda h: clean["0"]), ("output", lambda h: clean["output"])])
        net.run_with_hooks(x, fwd_hooks=[("output", lambda h: clean["output"])]).mul_(3)
        net.run_with_hooks(x, fwd_hooks=[("0", lambda h: parameter)])
        net.run_with_hooks(x, fwd_hooks=[("0", lambda h: h.mean(0).expand(5, 4))])
        net.run_with_hooks(x, fwd_hooks=[("0", double_and_keep)])
    assert all(torch.equal(clean[name], tensor) for name, tensor in before.items())
    assert parameter.lt(0).any()
    assert torch.equal(*kept[0])


@pytest.mark.on_cpu
def test_views_made_before_the_run_still_see_what_they_should(net, x) -> None:
    """Somebody may hold the input's memory as a numpy array, and write through it, or see others write."""
    array = x.numpy()
    _, cache = net.run_with_cache(x)
    before = cache["input"].clone()
    array[:] = 7
    assert torch.equal(cache["input"], before)
    assert torch.equal(cache["fc1.input"], before)
    x.fill_(3)
    assert (array == 3).all()


@pytest.mark.parametrize("rebind", ["data", "set_"])
def test_a_hook_that_rebinds_its_tensor(net, x, rebind) -> None:
    _, cache = net.run_with_cache(x + 1)

    def patch(h):
        if rebind == "data":
            h.data = cache["output"]
        else:
            h.set_(cache["output"])

    with torch.no_grad():
        assert torch.equal(net.run_with_hooks(x, fwd_hooks=[("output", patch)]), cache["output"])


def test_an_edit_of_overlapping_windows() -> None:
    def first_window(h):
        h[0] = 0

    x = torch.arange(1.0, 6.0)
    out = hookline.hook(Odd(lambda x: x.unfold(0, 3, 1))).run_with_hooks(x, fwd_hooks=[("output", first_window)])
    assert out.tolist() == [[0, 0, 0], [2, 3, 4], [3, 4, 5]]


def test_caching_an_expanded_tensor_costs_nothing() -> None:
    net = hookline.hook(Odd(lambda x: x.expand(1000, 1000)))
    cache = net.cache(torch.zeros(1, 1000))
    assert cache.nbytes < 20_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's, of quantised tensors
@pytest.mark.on_cpu
def test_quantised_tensors(x) -> None:
    net = hookline.hook(Odd(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)))
    out, cache = net.run_with_cache(x)
    assert torch.equal(cache["output"].dequantize(), out.dequantize())


def test_nothing_is_kept_alive_after_a_run(net, x) -> None:
    mine = x.clone()
    alive = weakref.ref(mine)
    net.run_with_hooks(mine, fwd_hooks=[("*", lambda h: None)])
    net.cache(mine)
    del mine
    gc.collect()
    assert alive() is None
    assert pass_state.saved == {}
    assert pass_state.outside == {}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Identity()

    def forward(self, a, b):
        return self.a(a) - self.b(b)


def test_two_rows_of_one_tensor_are_two_inputs() -> None:
    """They lie in the same memory, at different places in it."""
    net, (a, b) = hookline.hook(Two()), torch.randn(2, 3)
    assert torch.equal(
        net.run_with_hooks(a, b, fwd_hooks=[("a.input", lambda x: None), ("b.input", lambda x: None)]), a - b
    )
    _, cache = net.run_with_cache(a, b)
    assert torch.equal(cache["b.input"], b)
    assert torch.equal(cache["a.input"], a)


def test_memory_of_slices_is_counted_once() -> None:
    whole = torch.randn(4, 6)
    net = hookline.hook(nn.Identity())
    cached = [net.cache(rows, names_filter="output") for rows in (whole, whole[2:])]
    assert [cache.nbytes for cache in cached] == [96, 48]


class Outer(nn.Module):
    """A model with a part that is also called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Identity(), nn.Linear(4, 4))

    def forward(self, x):
        return self.encoder(x)


@pytest.mark.parametrize("write", [pytest.param("numpy", marks=pytest.mark.on_cpu), "data"])
def test_a_buffer_that_is_refilled_without_a_trace(write) -> None:
    """Neither numpy nor `.data` leaves a trace in the version of a tensor."""
    net, x, seen = hookline.hook(Outer()), torch.zeros(2, 4), []
    view = x.numpy() if write == "numpy" else x.data.view(2, 4)
    with torch.no_grad(), net.hooks(fwd_hooks=[("encoder.0", seen.append), ("encoder.input", seen.append)]):
        net(x)
        view[:] = 1
        net.module.encoder(x)
        view[:] = 2
        net.module.encoder(x)
        view[:] = 3
    assert [h.unique().item() for h in seen] == [0, 0, 1, 1, 2, 2]


def test_memory_that_is_freed_and_taken_again() -> None:
    net, wrong = hookline.hook(Outer()), 0
    net.add_hook("encoder.0", lambda h: h.clone())
    with torch.no_grad():
        for turn in range(200):
            x = torch.full((2, 4), float(turn))
            wrong += not torch.equal(net.module.encoder(x), net.module.encoder[1](x))
            del x
    net.reset_hooks()
    assert wrong == 0


class Write(nn.Module):
    """Writes to its input without a trace, between two parts that see it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Identity()

    def forward(self, x):
        self.a(x)
        x.data.add_(1)
        return self.b(x)


def test_an_input_written_to_within_a_pass() -> None:
    _, cache = hookline.hook(Write()).run_with_cache(torch.zeros(3))
    assert cache["a"].eq(0).all()
    assert cache["b"].eq(1).all()


def test_a_tensor_beside_its_conjugate() -> None:
    net, x = hookline.hook(Two()), torch.randn(3, dtype=torch.cfloat)
    for other in (x.conj(), x.conj().imag):
        _, cache = net.run_with_cache(x if other.is_complex() else x.imag, other)
        assert torch.equal(cache["b"], other)
        assert torch.equal(cache["b.input"], other)


class Table(nn.Module):
    """Returns its buffer, which it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))
        self.own = torch.ones(3)
        self.parts = nn.ModuleList(nn.Identity() for _ in range(3))

    def forward(self, x):
        self.table.add_(x)
        return self.parts[0](self.table) + self.parts[1](self.weight[:]) + self.parts[2](self.own)


@pytest.mark.on_cpu
@pytest.mark.parametrize("attribute", ["table", "weight", "own"])
def test_numpy_views_of_what_a_model_holds(attribute) -> None:
    """Made before a run, they see what is written after it, and what is written through them is in no cache."""
    module = Table()
    view = getattr(module, attribute).detach().numpy()
    with torch.no_grad():
        _, cache = hookline.hook(module).run_with_cache(torch.ones(3))
        before = {name: tensor.clone() for name, tensor in cache.items()}
        view[:] = 7
        assert all(torch.equal(cache[name], tensor) for name, tensor in before.items())
        getattr(module, attribute).fill_(3)
    assert (view == 3).all()


@pytest.mark.parametrize("attribute", ["table", "weight"])
def test_parameters_and_buffers_stay_where_they_are(attribute) -> None:
    """Somebody may have a bare pointer to them: DLPack, a CUDA graph, a kernel of their own."""
    module = Table()
    shared = torch.from_dlpack(getattr(module, attribute).detach())
    with torch.no_grad():
        _, cache = hookline.hook(module).run_with_cache(torch.ones(3))
        getattr(module, attribute).fill_(3)
    assert shared.eq(3).all()
    assert cache["parts.0"].eq(1).all()


class Ring(nn.Module):
    """Has a state that is neither parameter nor buffer, and passes a view of it on."""

    def __init__(self, view) -> None:
        super().__init__()
        self.state, self.view, self.parts = torch.ones(4), view, nn.ModuleList(nn.Identity() for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = x + part(self.view(self.state))
        self.state.add_(1)
        return x


def whole(x):
    return x


def part(x):
    return x[:2]


@pytest.mark.parametrize(("view", "export"), [(whole, whole), (whole, part), (part, whole)])
@pytest.mark.parametrize("grad", [True, False])
def test_state_that_was_exported_through_dlpack_stays_where_it_is(view, export, grad) -> None:
    module = Ring(view)
    exported = torch.from_dlpack(export(module.state))
    with torch.set_grad_enabled(grad):
        _, cache = hookline.hook(module).run_with_cache(torch.zeros(1))
    assert exported.data_ptr() == module.state.data_ptr()
    assert exported.eq(2).all()
    assert cache["parts.2"].eq(1).all()


@pytest.mark.parametrize("view", [whole, part])
def test_state_that_nobody_exported_is_not_copied(view) -> None:
    module, addresses = Ring(view), list[int]()
    before = address(module.state)
    with hookline.hook(module).hooks([("parts.*", lambda x: addresses.append(address(x)))]):
        module(torch.zeros(1))
    assert addresses[2] == before


def test_threads_that_share_a_tensor_for_the_first_time() -> None:
    tensors, barrier, found = [torch.full((64,), float(i)) for i in range(2000)], threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        found.append([snapshots.snapshot(x, is_ours=True) for x in tensors])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(copy, x) for copies in found for copy, x in zip(copies, tensors, strict=True))


def test_a_lock_left_behind_by_an_interrupt_stops_nobody(net, x) -> None:
    thread = threading.Thread(target=snapshots._sharing.acquire)
    thread.start()
    thread.join()
    try:
        _, cache = net.run_with_cache(x)
        assert torch.equal(cache["fc1"], net.module.fc1(x))
    finally:
        snapshots._sharing = threading.RLock()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_in_another_stream_of_a_gpu() -> None:
    network = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)], nn.ReLU(inplace=True)).cuda()
    inputs, stream = torch.randn(8192, 4096, device="cuda"), torch.cuda.Stream()
    model = hookline.hook(network)
    with torch.no_grad():
        expected = network[:8](inputs)
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(5):
            with torch.cuda.stream(stream):
                _, cache = model.run_with_cache(inputs)
                output = model.run_with_hooks(inputs, fwd_hooks=[("7", lambda h: h.add_(1))])
                read = cache["7"].clone()
                cache["7"].add_(1)
            torch.cuda.synchronize()
            assert torch.equal(read, expected)
            assert torch.equal(cache["7"], expected + 1)
            assert torch.equal(output, (expected + 1).relu())

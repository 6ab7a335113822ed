"""Attribution on plain networks, against gradients and changes computed by hand."""

import itertools

import numpy as np
import pytest
import torch
from networks import Twice
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import HooklineError
from hookline.experiments import networks
from hookline.experiments.networks import ImageResult


class CNN(nn.Module):
    """Convolutions, with ReLU in place and as a function."""

    def __init__(self, has_norm: bool = False) -> None:
        super().__init__()
        self.conv1, self.relu = nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm2d(6) if has_norm else nn.Identity()
        self.conv2, self.fc = nn.Conv2d(6, 5, 3), nn.Linear(5, 4)

    def forward(self, x):
        h = self.relu(self.norm(self.conv1(x)))
        return self.fc(F.relu(self.conv2(h)).mean((2, 3)))


class Tokens(nn.Module):
    """Takes token ids, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.fc = nn.Embedding(20, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids, mask=None):
        h = self.embed(ids)
        return self.fc(self.rnn(h if mask is None else h * mask[..., None])[0][:, -1])


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, a, b):
        return self.left(a).tanh() * self.right(b)


@pytest.fixture
def cnn():
    torch.manual_seed(0)
    return CNN().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def by_hand(net, x, at, target):
    """The activation at a module's output, and the gradient there, by torch hooks."""
    kept = []
    handle = net.get_submodule(at).register_forward_hook(
        lambda module, args, out: kept.append(out.clone()) or kept[-1].clone()
    )
    with torch.enable_grad():
        output = net(x)
    handle.remove()
    (gradient,) = torch.autograd.grad(output[torch.arange(len(x)), target].sum(), kept[0])
    return kept[0].detach(), gradient


def input_gradient(net, x, target):
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(net(x)[torch.arange(len(x)), target].sum(), x)
    return gradient


def test_grad_cam(cnn, x) -> None:
    activation, gradient = by_hand(cnn, x, "conv2", [1, 3])
    expected = F.relu((gradient.mean((2, 3), keepdim=True) * activation).sum(1))
    result = networks.grad_cam(cnn, x, at="conv2", target=[1, 3])
    assert isinstance(result, ImageResult)
    assert result.axes == ("batch", "height", "width")
    torch.testing.assert_close(result.values, expected)
    large = networks.grad_cam(cnn, x, at="conv2", target=[1, 3], size="input")
    assert large.shape == (2, 8, 8)
    for options in ({"size": "image"}, {"dim": 0}, {"at": "fc"}, {"at": "conv*"}, {"at": "conv9"}):
        with pytest.raises(HooklineError):
            networks.grad_cam(cnn, x, **{"at": "conv2", **options})


def test_grad_cam_where_a_module_in_place_follows(cnn, x) -> None:
    activation, gradient = by_hand(cnn, x, "conv1", [0, 0])
    expected = F.relu((gradient.mean((2, 3), keepdim=True) * activation).sum(1))
    torch.testing.assert_close(networks.grad_cam(cnn, x, at="conv1", target=0).values, expected)


def test_gradient_x_activation_and_targets(cnn, x) -> None:
    best = cnn(x).argmax(-1)
    activation, gradient = by_hand(cnn, x, "conv2", best)
    expected = activation * gradient
    for target in (None, best, best.tolist(), lambda y: y.amax(-1), lambda y: y.amax(-1).sum()):
        result = networks.gradient_x_activation(cnn, x, "conv2", target)
        torch.testing.assert_close(result.values, expected)
    last = networks.gradient_x_activation(cnn, x, "conv2", -1)
    assert torch.equal(last.values, networks.gradient_x_activation(cnn, x, "conv2", 3).values)


@pytest.mark.parametrize(
    "target", [4, -5, [1], [1, 2, 3], 1.0, True, "dog", lambda y: 3, lambda y: y, lambda y: y.argmax(-1)]
)
def test_targets_that_are_none(cnn, x, target) -> None:
    with pytest.raises(HooklineError):
        networks.saliency(cnn, x, target)


def test_saliency(cnn, x) -> None:
    result = networks.saliency(cnn, x, 2)
    assert result.axes == ("batch", "channel", "height", "width")
    torch.testing.assert_close(result.values, input_gradient(cnn, x, [2, 2]).abs())


def test_saliency_with_noise_is_the_mean_over_noisy_inputs(cnn, x) -> None:
    random = torch.Generator().manual_seed(5)
    noisy = [x + 0.3 * torch.randn(x.shape, generator=random) for _ in range(6)]
    expected = torch.stack([input_gradient(cnn, each, [2, 2]).abs() for each in noisy]).mean(0)
    result = networks.saliency(cnn, x, 2, noise=0.3, samples=6, seed=5)
    torch.testing.assert_close(result.values, expected)
    for options in ({"samples": 3}, {"noise": -1.0}, {"noise": 0.1, "samples": 0}):
        with pytest.raises(HooklineError):
            networks.saliency(cnn, x, 2, **options)


def test_integrated_gradients_sum_to_the_change(cnn, x) -> None:
    baseline = torch.full((1, 3, 8, 8), 0.1)
    result = networks.integrated_gradients(cnn, x, [1, 2], baseline=baseline, steps=100)
    change = (cnn(x) - cnn(baseline))[[0, 1], [1, 2]].detach()
    error = (result.values.sum((1, 2, 3)) - change).abs().max()
    assert float(error) == pytest.approx(result.info["error"], abs=1e-6)
    assert result.info["error"] < 1e-2
    nodes, weights = np.polynomial.legendre.leggauss(7)
    steps = zip((1 + nodes) / 2, weights / 2, strict=True)
    expected = sum(float(w) * input_gradient(cnn, baseline + float(a) * (x - baseline), [1, 2]) for a, w in steps) * (
        x - baseline
    )
    torch.testing.assert_close(
        networks.integrated_gradients(cnn, x, [1, 2], None, baseline, 7).values, expected.float()
    )


def test_integrated_gradients_at_a_point(cnn, x) -> None:
    result = networks.integrated_gradients(cnn, x, 1, at="conv2", baseline=0.5, steps=64)
    assert result.axes == ("batch", "channel", "height", "width")
    start = hookline.hook(cnn).run_with_hooks(x, fwd_hooks=[("conv2", lambda h: torch.full_like(h, 0.5))])
    torch.testing.assert_close(result.values.sum((1, 2, 3)), (cnn(x) - start)[:, 1].detach(), atol=1e-2, rtol=1e-2)
    with pytest.raises(HooklineError):
        networks.integrated_gradients(cnn, x, 1, at="conv2", baseline=torch.zeros(7))


def test_token_ids_as_baseline() -> None:
    torch.manual_seed(0)
    net, ids, blank = Tokens(), torch.randint(2, 20, (3, 5)), torch.ones(3, 5, dtype=torch.long)
    result = networks.integrated_gradients(net, ids, 1, at="embed", baseline=blank)
    assert result.axes == ("batch", "pos", "feature")
    torch.testing.assert_close(result.values.sum((1, 2)), (net(ids) - net(blank))[:, 1].detach(), atol=1e-4, rtol=1e-4)
    as_tensor = networks.integrated_gradients(net, ids, 1, at="embed", baseline=net.embed(blank))
    torch.testing.assert_close(result.values, as_tensor.values)
    masked = networks.integrated_gradients(net, {"ids": ids, "mask": torch.ones(3, 5)}, 1, at="embed", baseline=blank)
    torch.testing.assert_close(result.values, masked.values)
    for call in (networks.saliency, networks.integrated_gradients, networks.guided_backprop):
        with pytest.raises(HooklineError):
            call(net, ids)


def test_token_ids_as_baseline_among_other_integers() -> None:
    class Named(Tokens):
        def forward(self, attention_mask, input_ids):
            return super().forward(input_ids, attention_mask)

    torch.manual_seed(0)
    net, ids, blank = Named().eval(), torch.randint(1, 20, (2, 5)), torch.full((2, 5), 7)
    mask = torch.ones_like(ids)
    expected = networks.integrated_gradients(net, (mask, ids), 1, "embed", net.embed(blank).detach()).values
    inputs = {"attention_mask": mask, "input_ids": ids}
    torch.testing.assert_close(networks.integrated_gradients(net, inputs, 1, "embed", blank).values, expected)
    with pytest.raises(HooklineError, match="'mask', 'ids'"):
        networks.integrated_gradients(Tokens().eval(), {"mask": mask, "ids": ids}, 1, "embed", blank)


def test_guided_backprop_is_for_every_relu(cnn, x) -> None:
    class Guided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h.clamp(min=0)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.clamp(min=0) * (ctx.saved_tensors[0] > 0)

    def forward(x):
        h = Guided.apply(cnn.conv1(x))
        return cnn.fc(Guided.apply(cnn.conv2(h)).mean((2, 3)))

    expected = input_gradient(forward, x, [1, 1])
    torch.testing.assert_close(networks.guided_backprop(cnn, x, 1).values, expected)
    torch.testing.assert_close(
        input_gradient(cnn, x, [1, 1]),
        networks.saliency(cnn, x, lambda y: y[:, 1]).values.copysign(input_gradient(cnn, x, [1, 1])),
    )
    with pytest.raises(HooklineError):
        networks.guided_backprop(nn.Linear(3, 2), torch.ones(1, 3), 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_guided_backprop_refuses_what_it_cannot_see() -> None:
    scripted, x = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), torch.rand(2, 4)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), scripted, nn.Linear(4, 2))
    for _ in range(2):
        net(x.clone().requires_grad_())  # a scripted module is optimized at its second call
    with pytest.raises(HooklineError):
        networks.guided_backprop(net, x, 1)


def test_targets_of_small_integers(cnn, x) -> None:
    index = torch.arange(len(x), dtype=torch.uint8)
    assert networks.saliency(cnn, x, index).info["target"] == index.tolist()


@pytest.mark.parametrize(("window", "stride"), [((3, 2), (2, 1)), (4, None), ((1, 3, 3), (1, 2, 3))])
def test_occlusion_is_the_mean_over_windows(cnn, x, window, stride) -> None:
    result = networks.occlusion(cnn, x, 1, window, stride, baseline=0.2)
    sizes = (window,) * 2 if isinstance(window, int) else window
    steps = sizes if stride is None else stride
    sizes, steps = ((3, *sizes), (3, *steps)) if len(sizes) == 2 else (sizes, steps)
    total, count = torch.zeros_like(x), torch.zeros_like(x)
    starts = [
        range(0, -(-(n - size) // step) * step + 1, step)
        for n, size, step in zip(x.shape[1:], sizes, steps, strict=True)
    ]
    for corner in itertools.product(*starts):
        box = (slice(None), *(slice(at, at + size) for at, size in zip(corner, sizes, strict=True)))
        occluded = x.clone()
        occluded[box] = 0.2
        total[box] += (cnn(x) - cnn(occluded))[:, 1].detach().reshape(-1, 1, 1, 1)
        count[box] += 1
    assert count.min() > 0
    torch.testing.assert_close(result.values, total / count, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("window", "stride"), [(None, None), (9, 1), (2, 3), (0, 1), ((2, 2, 2, 2), None), (2.0, 1), (2, (1, 1, 1))]
)
def test_windows_that_do_not_fit(cnn, x, window, stride) -> None:
    with pytest.raises(HooklineError):
        networks.occlusion(cnn, x, 1, window, stride)


def test_occlusion_of_tokens_and_of_several_inputs() -> None:
    torch.manual_seed(0)
    net, ids = Tokens(), torch.randint(2, 20, (2, 4))
    result = networks.occlusion(net, ids, 1, 1, baseline=1)
    changed = ids.clone()
    changed[:, 2] = 1
    torch.testing.assert_close(result.values[:, 2], (net(ids) - net(changed))[:, 1].detach())
    with pytest.raises(HooklineError):
        networks.occlusion(net, ids, 1, 1, baseline=0.5)
    a, b = torch.randn(3, 4), torch.randn(3, 3)
    left, right = networks.occlusion(Two(), (a, b), 2, 1)
    assert (left.shape, right.shape) == ((3, 4), (3, 3))
    assert networks.occlusion(Two(), {"a": a, "b": b}, 2, {"a": 2})["b"] is None
    with pytest.raises(HooklineError):
        networks.occlusion(Two(), (a, b), lambda y: y.sum(), 1)


def test_ablate_channels(cnn, x) -> None:
    result = networks.ablate_channels(cnn, x, "conv1", 1)
    assert result.axes == ("batch", "channel")
    for channel in range(6):
        handle = cnn.conv1.register_forward_hook(
            lambda module, args, out, channel=channel: out.index_fill(1, torch.tensor([channel]), 0.0)
        )
        zeroed = cnn(x)
        handle.remove()
        torch.testing.assert_close(result.values[:, channel], (zeroed - cnn(x))[:, 1].detach(), atol=1e-6, rtol=1e-4)
    with pytest.raises(HooklineError):
        networks.ablate_channels(cnn, x, "conv1", 1, dim=0)


def test_heads_of_a_plain_attention() -> None:
    torch.manual_seed(0)
    net = hookline.hook(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    result = networks.ablate_channels(net, torch.randn(2, 5, 8), "self_attn.pattern", lambda y: y[:, -1, 0])
    assert result.shape == (2, 2)
    assert result.values.abs().min() > 0


def test_neuron_gradient(cnn, x) -> None:
    def unit(x):
        return cnn.conv2(cnn.relu(cnn.conv1(x)))[:, 2, 1, 3:4]

    result = networks.neuron_gradient(cnn, x, "conv2", (2, 1, 3))
    torch.testing.assert_close(result.values, input_gradient(unit, x, [0, 0]))
    same = networks.neuron_gradient(cnn, x, "conv2", lambda h: h[:, 2, 1, 3])
    assert torch.equal(result.values, same.values)
    for unit in (2, (9, 0, 0), lambda h: h, "a"):
        with pytest.raises(HooklineError):
            networks.neuron_gradient(cnn, x, "conv2", unit)


def test_several_inputs() -> None:
    torch.manual_seed(0)
    net, a, b = Two(), torch.randn(3, 4), torch.randn(3, 3)
    for call in (networks.saliency, networks.integrated_gradients):
        left, right = call(net, (a, b), 1)
        named = call(net, {"a": a, "b": b}, 1)
        assert torch.equal(left.values, named["a"].values)
        assert torch.equal(right.values, named["b"].values)
    left, right = networks.integrated_gradients(net, (a, b), 1, baseline=(0.5, torch.ones(3)))
    change = net(a, b) - net(torch.full((3, 4), 0.5), torch.ones(3, 3))
    sums = left.values.sum(1) + right.values.sum(1)
    torch.testing.assert_close(sums, change[:, 1].detach(), atol=1e-4, rtol=1e-4)
    with pytest.raises(HooklineError):
        networks.integrated_gradients(net, (a, b), 1, baseline=(0.0,))


def test_feature_maps(cnn, x) -> None:
    torch.testing.assert_close(networks.feature_maps(cnn, x, "conv1").values, cnn.conv1(x).detach())
    assert networks.feature_maps(cnn, x, "fc").axes == ("batch", "feature")


def test_maximize(cnn) -> None:
    shape = (1, 3, 8, 8)
    result = networks.maximize(cnn, "conv2", 1, shape=shape, steps=20, jitter=1)
    assert result.shape == shape
    mean = cnn.conv2(cnn.relu(cnn.conv1(result.values)))[:, 1].mean().item()
    assert mean == pytest.approx(result.info["activation"], rel=1e-4)
    assert mean > result.info["start"]
    assert (
        networks.maximize(cnn, "conv2", 1, shape=shape, steps=20, norm=10.0).values.abs().mean()
        < result.values.abs().mean()
    )
    for options in ({"channel": 9}, {"shape": 3}, {"steps": 0}, {"shape": (1, 3), "jitter": 2}):
        with pytest.raises((HooklineError, RuntimeError)):
            networks.maximize(cnn, **{"at": "conv2", "channel": 1, "shape": shape, "steps": 2, **options})


def test_top_inputs(cnn) -> None:
    data = torch.randn(23, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    values = cnn.conv2(cnn.relu(cnn.conv1(data)))[:, 4].amax((1, 2)).detach()
    best = values.argsort(descending=True)[:5]
    for source in (data, data.split(4), torch.utils.data.DataLoader(data, batch_size=7)):
        result = networks.top_inputs(cnn, source, "conv2", 4, k=5, batch_size=6)
        assert result.coords["row"] == best.tolist()
        torch.testing.assert_close(result.values, values[best])
    for wrong in ([], {"a": data}, 3):
        with pytest.raises(HooklineError):
            networks.top_inputs(cnn, wrong, "conv2", 4)
    with pytest.raises(HooklineError):
        networks.top_inputs(cnn, data, "conv2", 4, k=0)


CALLS = {
    "grad_cam": lambda net, x: networks.grad_cam(net, x, "conv2", 1),
    "gradient_x_activation": lambda net, x: networks.gradient_x_activation(net, x, "conv2", 1),
    "saliency": lambda net, x: networks.saliency(net, x, 1),
    "smooth": lambda net, x: networks.saliency(net, x, 1, noise=0.1, samples=3),
    "integrated_gradients": lambda net, x: networks.integrated_gradients(net, x, 1, steps=4),
    "integrated_at": lambda net, x: networks.integrated_gradients(net, x, 1, "conv2", steps=4),
    "guided_backprop": lambda net, x: networks.guided_backprop(net, x, 1),
    "occlusion": lambda net, x: networks.occlusion(net, x, 1, 4),
    "ablate_channels": lambda net, x: networks.ablate_channels(net, x, "conv2", 1),
    "neuron_gradient": lambda net, x: networks.neuron_gradient(net, x, "conv2", (0, 1, 1)),
    "feature_maps": lambda net, x: networks.feature_maps(net, x, "conv2"),
    "maximize": lambda net, x: networks.maximize(net, "conv2", 0, shape=x.shape, steps=2),
    "top_inputs": lambda net, x: networks.top_inputs(net, x, "conv2", 0, k=2),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def test_the_callers_mode_makes_no_difference(call, cnn, x) -> None:
    expected = call(cnn, x).values
    with torch.no_grad():
        assert torch.equal(call(cnn, x).values, expected)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        torch.testing.assert_close(call(cnn, x.clone()).values, expected)
        assert torch.is_inference_mode_enabled()
    assert torch.equal(call(hookline.hook(cnn), x).values, expected)
    torch.testing.assert_close(call(cnn, x.clone().requires_grad_()).values, expected)
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(call(cnn.to(memory_format=torch.channels_last), last).values, expected)
    for parameter in cnn.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(call(cnn, x).values, expected)


def test_nothing_is_left_behind(call, x) -> None:
    torch.manual_seed(0)
    net, given = CNN(has_norm=True), x.clone().requires_grad_()
    net(x).sum().backward()
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    call(net, given)
    assert net.training
    assert given.grad is None
    assert torch.equal(given, x)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, grad) and p.requires_grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_half_precision(call, cnn, x) -> None:
    expected = call(cnn, x).values
    values = call(cnn.to(torch.bfloat16), x.to(torch.bfloat16)).values
    assert values.dtype is torch.float32
    assert values.isfinite().all()
    if values.shape == expected.shape and call is not CALLS["top_inputs"]:
        assert torch.corrcoef(torch.stack([values.flatten(), expected.flatten()]))[0, 1] > 0.9


def test_dropout_in_training_mode_is_warned_of(x) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(192, 3))
    with pytest.warns(UserWarning, match="dropout"):
        networks.saliency(net, x, 1)


def test_a_point_that_fires_several_times() -> None:
    net = hookline.hook(nn.Sequential(Twice(), nn.Linear(4, 2)))
    x = torch.randn(2, 4)
    for call in (
        lambda at: networks.gradient_x_activation(net, x, at, 1),
        lambda at: networks.integrated_gradients(net, x, 1, at),
        lambda at: networks.ablate_channels(net, x, at, 1),
        lambda at: networks.neuron_gradient(net, x, at, 1),
        lambda at: networks.feature_maps(net, x, at),
        lambda at: networks.maximize(net, at, 1, shape=(1, 4), steps=2),
        lambda at: networks.top_inputs(net, x, at, 1, k=1),
    ):
        with pytest.raises(HooklineError, match="fires 3 times"):
            call("0.cell")
        assert call("0.cell#1").values.isfinite().all()


class Mixing(nn.Module):
    """Depends on all rows of a batch: its first axis is time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.RNN(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.rnn(x[:, None])[0][:, 0])


def test_rows_that_depend_on_each_other_run_one_variant_at_a_time() -> None:
    torch.manual_seed(0)
    net, x = Mixing(), torch.randn(5, 3)
    result = networks.integrated_gradients(net, x, lambda y: y[-1, 0], steps=40)
    assert result.info["error"] < 1e-3
    occluded = x.clone()
    occluded[:, 1] = 0
    change = (net(x) - net(occluded))[:, 0].detach()
    torch.testing.assert_close(networks.occlusion(net, x, 0, 1).values[:, 1], change)


class Scaled(nn.Module):
    """Divides by the largest value of the batch, at its inputs and inside: rows of zeros leave it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 7), nn.Linear(7, 4)

    def forward(self, x):
        h = self.fc1(x / (x.abs().max() + 1e-6)).relu()
        return self.fc2((h / (h.max() + 1e-6)).sin())


def test_a_scale_of_the_whole_batch_is_noticed() -> None:
    torch.manual_seed(0)
    net, x = Scaled().eval(), torch.rand(1, 5) + 0.1
    whole = net(x)[0, 1]
    drops = [whole - net(x * (torch.arange(5) != at))[0, 1] for at in range(5)]
    torch.testing.assert_close(networks.occlusion(net, x, 1, window=1).values[0], torch.stack(drops).detach())
    nodes, weights = np.polynomial.legendre.leggauss(8)
    total = torch.zeros_like(x)
    for node, weight in zip(nodes, weights, strict=True):
        part = (x * (1 + node) / 2).float().requires_grad_()
        total += torch.autograd.grad(net(part)[0, 1], part)[0] * weight / 2
    torch.testing.assert_close(networks.integrated_gradients(net, x, 1, steps=8).values, total * x)
    h = hookline.hook(net).cache(x, names_filter="fc1")["fc1"]
    edits = [h * (torch.arange(7) != unit) for unit in range(7)]
    zeroed = [hookline.hook(net).run_with_hooks(x, fwd_hooks=[("fc1", lambda _, h=h: h)])[0, 1] for h in edits]
    effects = networks.ablate_channels(net, x, "fc1", 1).values[0]
    torch.testing.assert_close(effects, (torch.stack(zeroed) - whole).detach())


def test_buffers_and_random_state_in_training_mode() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return F.dropout(x * self.scale, 0.5) * torch.ones_like(x).requires_grad_()

    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), Running(), nn.Linear(4, 2))
    x = torch.rand(2, 4)
    output, random = net(x), torch.get_rng_state()
    buffers = list(net.buffers())
    before = [buffer.clone() for buffer in buffers]
    networks.saliency(net, x, 1)
    with pytest.raises(HooklineError):
        networks.saliency(net, x, 9)
    networks.ablate_channels(net, x, "0", 1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(buffer is other for buffer, other in zip(net.buffers(), buffers, strict=True))
    assert all(map(torch.equal, buffers, before))
    output.sum().backward()


@pytest.mark.parametrize("dim", [0, -2, 2, True])
def test_axes_that_are_no_channels(dim) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    for call in (
        lambda: networks.top_inputs(net, torch.rand(8, 4), "0", 3, dim=dim),
        lambda: networks.maximize(net, "0", 3, shape=(8, 4), steps=1, dim=dim),
        lambda: networks.ablate_channels(net, torch.rand(8, 4), "0", 3, dim=dim),
    ):
        with pytest.raises(HooklineError):
            call()


def test_functions_see_the_batch_as_it_was_passed(cnn, x) -> None:
    shapes = set()

    def target(output):
        shapes.add(tuple(output.shape))
        return output[0, 1]

    one = networks.integrated_gradients(cnn, x[:1], target)
    torch.testing.assert_close(one.values, networks.integrated_gradients(cnn, x[:1], 1).values)
    assert shapes == {(1, 4)}


@pytest.mark.parametrize("inputs", ["text", 3, (), {}, torch.tensor(1.0), None])
def test_inputs_that_are_none(cnn, inputs) -> None:
    with pytest.raises(HooklineError):
        networks.saliency(cnn, inputs)
    with pytest.raises(HooklineError):
        networks.saliency("resnet18", torch.ones(1, 3))


def test_targets_without_influence_raise() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(HooklineError):
        networks.saliency(net, torch.ones(1, 3), lambda y: y.detach().sum())


def test_plots(cnn, x) -> None:
    from matplotlib import pyplot

    for result in (
        networks.grad_cam(cnn, x, "conv2", 1),
        networks.saliency(cnn, x, 1),
        networks.feature_maps(cnn, x, "conv1"),
        networks.grad_cam(cnn, x, "conv2", 1)[0],
        networks.ablate_channels(cnn, x, "conv2", 1),
        networks.top_inputs(cnn, x, "conv2", 1, k=2),
    ):
        figure = result.plot()
        (getattr(figure, "figure", None) or figure).canvas.draw()
        pyplot.close("all")
    images = networks.grad_cam(cnn, x, "conv2", 1).isel(batch=1).images
    assert torch.equal(images, x[1:])


def test_a_result_can_be_saved(cnn, x, tmp_path) -> None:
    result = networks.integrated_gradients(cnn, x, lambda y: y[:, 1], at="conv2", steps=2)
    result.save(tmp_path / "r.safetensors")
    assert torch.equal(hookline.experiments.result.Result.load(tmp_path / "r.safetensors").values, result.values)


class Counting(nn.Linear):
    """Counts the rows that it is called with."""

    rows = 0

    def forward(self, x):
        self.rows += len(x)
        return super().forward(x)


class Residual(nn.Module):
    """Layers before, at and around a point; one of them returns a tuple."""

    def __init__(self, has_tuple: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third, self.out = Counting(4, 6), Counting(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.relu, self.rnn = nn.ReLU(inplace=True), nn.GRU(6, 6, batch_first=True) if has_tuple else None

    def forward(self, x):
        h = self.relu(self.first(x))
        if self.rnn is not None:
            h = self.rnn(h[:, None])[0][:, 0]
        h = h + self.second(h)
        return self.out(self.third(h).tanh() + h)


@pytest.mark.parametrize(
    ("at", "has_tuple", "skips"), [("third", False, True), ("second", False, True), ("third", True, False)]
)
def test_layers_before_the_point_run_only_where_they_must(at, has_tuple, skips) -> None:
    torch.manual_seed(0)
    net, x = Residual(has_tuple).eval(), torch.randn(2, 4)
    expected = []
    for channel in range(6):
        handle = net.get_submodule(at).register_forward_hook(
            lambda module, args, out, channel=channel: out.index_fill(1, torch.tensor([channel]), 0.0)
        )
        expected.append((net(x)[:, 1]).detach())
        handle.remove()
    net.first.rows = 0
    result = networks.ablate_channels(net, x, at, 1)
    torch.testing.assert_close(result.values, (torch.stack(expected) - net(x)[:, 1].detach()).T)
    assert (net.first.rows <= 14) is skips
    path = networks.integrated_gradients(net, x, 1, at, baseline=0.3)
    net.train()
    in_full = networks.integrated_gradients(net, x, 1, at, baseline=0.3)
    torch.testing.assert_close(path.values, in_full.values)


def test_added_hooks_act_in_every_run() -> None:
    torch.manual_seed(0)
    net, x = hookline.hook(Residual().eval()), torch.randn(2, 4)
    plain = networks.ablate_channels(net, x, "third", 1)
    remove = net.add_hook("first", lambda h: h * 2)
    doubled = networks.ablate_channels(net, x, "third", 1)
    remove()
    net.module.first.weight.data *= 2
    net.module.first.bias.data *= 2
    torch.testing.assert_close(doubled.values, networks.ablate_channels(net, x, "third", 1).values)
    assert not torch.allclose(doubled.values, plain.values)


def test_compiled_networks_run_uncompiled(cnn, x) -> None:
    compiled = torch.compile(cnn, backend="eager")
    torch.testing.assert_close(networks.saliency(compiled, x, 1).values, networks.saliency(cnn, x, 1).values)
    torch.testing.assert_close(
        networks.guided_backprop(compiled, x, 1).values, networks.guided_backprop(cnn, x, 1).values
    )


def test_the_batch_must_be_first() -> None:
    with pytest.raises(HooklineError):
        networks.maximize(nn.Conv2d(3, 4, 3), "output", 1, shape=(3, 8, 8), steps=2)
    time_first = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Unflatten(0, (2, 3)))
    with pytest.raises(HooklineError):
        networks.saliency(time_first, torch.randn(6, 4), 1)
    assert networks.saliency(time_first, torch.randn(6, 4), lambda y: y[0, 0, 1]).shape == (6, 4)


def test_batches_with_labels_are_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.arange(20))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    with pytest.raises(HooklineError, match="loader"):
        networks.top_inputs(nn.Linear(4, 3), loader, "output", 1)
    assert networks.top_inputs(nn.Linear(4, 3), (x for x, _ in loader), "output", 1, k=2).shape == (2,)


def test_a_language_model_has_the_axes_of_its_points() -> None:
    model = hookline.load("tinyworld")
    ids = model.to_tokens("The capital of France is")
    result = networks.gradient_x_activation(model, ids, "blocks.1.attn.hook_z", lambda logits: logits[:, -1, 5])
    assert result.axes == ("batch", "pos", "head", "feature")
    assert networks.occlusion(model, ids, lambda logits: logits[:, -1, 5], 1, baseline=3).axes == ("batch", "pos")
    path = networks.integrated_gradients(model, ids, lambda logits: logits[:, -1, 5], at="hook_embed", steps=64)
    assert path.info["error"] < 0.01

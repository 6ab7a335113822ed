"""A grammar of plain networks: the source of a class, from random choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import devices
import torch
from fuzz import parts
from fuzz.program import Plain
from torch import Tensor, nn

IMAGE = (
    *("nn.Conv2d(4, 4, 1)", "nn.Conv2d(4, 4, 1, bias=False)", "nn.Conv2d(4, 4, 3, padding=1)", "nn.Conv2d(4, 4, 1)"),
    *("nn.Conv2d(4, 4, 3, padding=1, groups=2)", "nn.Conv2d(4, 4, 1, groups=4)", "nn.ConvTranspose2d(4, 4, 1)"),
    *("nn.Conv2d(4, 4, 3, padding=1, stride=1, dilation=1, groups=4)", "weighted(nn.Conv2d(4, 4, 1))"),
    *("nn.BatchNorm2d(4)", "nn.GroupNorm(2, 4)", "nn.InstanceNorm2d(4, affine=True)", "nn.LayerNorm((4, 5, 5))"),
    *("nn.MaxPool2d(3, 1, 1)", "nn.AvgPool2d(3, 1, 1)", "nn.ReLU()", "nn.ReLU(inplace=True)", "nn.SiLU(inplace=True)"),
    *("nn.Hardswish(inplace=True)", "nn.GELU()", "nn.PReLU()", "nn.LeakyReLU(0.1, inplace=True)", "nn.Identity()"),
    *("nn.Dropout(0.3)", "nn.Dropout(0.3, inplace=True)", "nn.Dropout2d(0.3)", "nn.ChannelShuffle(2)"),
    *("nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))", "Scale()", "Turn()", "Same()"),
    *("Store()", "Count()", "Numpy()", "Blind()", "Clear()", "nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))"),
)
SEQUENCE = (
    *(
        "nn.Linear(8, 8)",
        "nn.Linear(8, 8, bias=False)",
        "nn.LayerNorm(8)",
        "nn.RMSNorm(8)",
        "weighted(nn.Linear(8, 8))",
    ),
    *("nn.Conv1d(3, 3, 1)", "nn.Conv1d(3, 3, 3, padding=1)", "nn.BatchNorm1d(3)", "nn.Softmax(-1)", "nn.Tanh()"),
    *("nn.ReLU()", "nn.ReLU(inplace=True)", "nn.GELU()", "nn.ELU(inplace=True)", "nn.Identity()", "nn.Dropout(0.3)"),
    *("nn.Dropout(0.3, inplace=True)", "nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))"),
    *("nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)", "orthogonal()", "Scale()", "Clear()", "Turn()"),
    *("nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)", "Same()", "Store()", "Count()"),
    *("Residual()", "Attention()", "Attention(fused=True)", "Pieces()", "Again()", "Again()", "Loop()", "Loop()"),
    *("Numpy()", "Blind()", "Own()", "Sparse()", "Jagged()", "Drops()", "Selective()"),
    *("Selective('mm', 'bmm', 'addmm')",),
)
FILLED = "{other} = {{'hidden': {value}, 'last': {second}, 'layers': [{value} * 2]}}; "
TUPLES = (
    *(("nn.GRU(8, 8, batch_first=True)", "{new}, {other} = self.{part}({value})"),),
    *(("nn.LSTM(8, 8, batch_first=True)", "{new}, {other} = self.{part}({value})"),),
    *(("nn.LSTM(8, 8)", "{new} = self.{part}({value}.transpose(0, 1))[0].transpose(0, 1)"),),
    *(("nn.RNN(8, 8, batch_first=True)", "{new} = self.{part}({value})[0]"),),
    *(("nn.GRU(8, 4, batch_first=True, bidirectional=True)", "{new} = self.{part}({value})[0]"),),
    *(("nn.MultiheadAttention(8, 2, batch_first=True)", "{new} = self.{part}({value}, {value}, {value})[0]"),),
    *(("nn.MultiheadAttention(8, 2)", "{new}, _ = self.{part}({value}, {value}, {value}, need_weights=False)"),),
    *(("Two()", "{new}, {other} = self.{part}({value})"), ("Two()", "{new} = sum(self.{part}({value}))")),
    *(("Named()", '{new} = self.{part}({value}, mask={value} < 0)["hidden"]'),),
    *(("Named()", '{new} = self.{part}(scale=0.5, hidden={value})["parts"][1]'),),
    *(("Wrapped()", "{other} = self.{part}({value}); {new} = {other}.last + {other}.rest[0]"),),
    *(("Append()", "{other} = [{second}, {value}]; self.{part}({other}); {new} = sum({other})"),),
    *(
        (
            "Append()",
            "{other} = [{value}]; self.{part}({other}); self.{part}({other}); {new} = {other}[0] - {other}[2]",
        ),
    ),
    *(("Fill()", FILLED + "self.{part}({other}); {new} = {other}['keys'] + {other}['hidden'] + {other}['last']"),),
    *(("Fill()", FILLED + "{new} = self.{part}({other})['hidden'] + sum({other}['layers'])"),),
    *(("Bundle()", "{other} = self.{part}({value}); {new} = {other}.hidden * {other}['gate']"),),
    *(("nn.LSTMCell(8, 8)", "{new} = {value} + self.{part}({value}[:, 0])[0][:, None]"),),
    *(("nn.Bilinear(8, 8, 8)", "{new} = self.{part}({value}, {second})"),),
    *(("nn.PairwiseDistance()", "{new} = {value} + self.{part}({value}, {second})[..., None]"),),
)
LINES = (
    *("{new} = {value} + {second}", "{new} = {value} * {second}", "{new} = {value} - 0.5 * {second}"),
    *("{new} = {value}.view({value}.shape)", "{new} = {value}", "{new} = {value}.detach() * 0.5 + {second}"),
    *("{new} = torch.cat([{value}, {second}], 1)[:, ::2]", "{new} = {value}[:, [0, 0]].mean(1, True) + {second}"),
    *("{new}, {other} = {value}.chunk(2, -1); {new} = torch.cat([{other}, {new}], -1)",),
    *("{new} = {value}.mean(1, keepdim=True).expand({value}.shape)", "{new} = F.relu({value} + 0.25)"),
    *("{new} = {value} + self.table", "{new} = torch.where({value} > 0, {value}, {second})"),
    *("{new} = {value}.transpose(-1, -2).contiguous().transpose(-1, -2)", "{new} = torch.sigmoid({value}) * {second}"),
)
WRITES = (
    *(
        "{value}.add_(0.25)",
        "{value}.mul_(0.5)",
        "{value}[:, :1].zero_()",
        "{value}[..., 1:3] += 1",
        "F.relu_({value})",
    ),
    *("{value} += {second}", "{value}.copy_({second} * 0.5)", "self.table.add_(0.125)", "{value}.clamp_(-1, 1)"),
)
IGNORED = ("nn.ReLU(inplace=True)", "nn.SiLU(inplace=True)", "Scale()", "Clear()", "Blind()", "nn.ReLU()", "Count()")
SIZES = {"image": (2, 4, 5, 5), "sequence": (2, 3, 8)}


def plain(choose: random.Random) -> Plain:
    """A random network."""
    kind = choose.choice(("image", "sequence", "sequence"))
    grammar = _Grammar(choose, kind)
    for _ in range(choose.randint(2, 7)):
        grammar.line()
    inputs = [("x", f"torch.randn{SIZES[kind]}")]
    if grammar.takes_ids:
        inputs = [("x", "torch.randint(0, 10, (2, 3))")]
    if grammar.has_second:
        inputs.append(("y", f"torch.randn{SIZES[kind]}"))
    return Plain(
        tuple(grammar.parts),
        (*grammar.lines, grammar.returned()),
        tuple(inputs),
        dtype=choose.choice(("float32",) * 8 + ("float64", "bfloat16", "bfloat16")),
        layout="channels_last" if kind == "image" and choose.random() < 0.3 else "contiguous_format",
        by_keyword=choose.random() < 0.2,
        requires_grad=choose.random() < 0.3 and not grammar.takes_ids,
    )


class _Grammar:
    """A network that is being written."""

    def __init__(self, choose: random.Random, kind: str) -> None:
        self.choose, self.kind = choose, kind
        self.parts: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.values = ["x"]
        self.takes_ids = kind == "sequence" and choose.random() < 0.15
        self.has_second = choose.random() < 0.1
        if self.takes_ids:
            self.parts.append(("embed", "nn.Embedding(10, 8)"))
            self.lines.append("v0 = self.embed(x)")
            self.values = ["v0"]
        elif choose.random() < 0.5:
            self.add("{new} = self.{part}({value})", "nn.Conv2d(4, 4, 1)" if kind == "image" else "nn.Linear(8, 8)")
        if self.has_second:
            self.values.append("y")

    def line(self) -> None:
        """Add a line, and perhaps a module that it calls."""
        chance, choose = self.choose.random(), self.choose
        if chance < 0.55 or not self.parts:
            table: Sequence[Any] = IMAGE if self.kind == "image" else SEQUENCE
            if self.kind == "sequence" and choose.random() < 0.3:
                part, line = choose.choice(TUPLES)
                self.add(line, part)
            else:
                self.add("{new} = self.{part}({value})", choose.choice(table))
        elif chance < 0.62:  # a module of before, again
            name, source = choose.choice(self.parts)
            table = IMAGE if self.kind == "image" else SEQUENCE
            if source in table:
                self.add("{new} = self.{part}({value})", name=name)
        elif chance < 0.7:
            self.add("self.{part}({value})", choose.choice(IGNORED))
        elif chance < 0.88:
            self.add(choose.choice(LINES))
        else:
            self.add(choose.choice(WRITES))

    def add(self, line: str, part: str | None = None, name: str | None = None) -> None:
        if part is not None:
            name = f"m{len(self.parts)}"
            self.parts.append((name, part))
        new, value, second = f"v{len(self.lines)}", self.value(), self.value()
        words = {"new": new, "other": f"w{len(self.lines)}", "value": value, "second": second, "part": name}
        self.lines.append(line.format(**words))
        if "{new}" in line:
            self.values.append(new)

    def value(self) -> str:
        """A value, more often the last one."""
        return self.values[-1] if self.choose.random() < 0.65 else self.choose.choice(self.values)

    def returned(self) -> str:
        one, other = self.values[-1], self.value()
        return "return " + self.choose.choice(
            (
                one,
                one,
                f"({one}, {other})",
                f"{{'last': {one}, 'other': [{other}]}}",
                f"{one} + {other}",
                f"{one}.mean(1)",
            )
        )


def source(network: Plain) -> str:
    """The class, as text."""
    made = "".join(f"        self.{name} = {expression}\n" for name, expression in network.parts)
    body = "".join(f"        {line}\n" for line in network.lines)
    names = ", ".join(name for name, _ in network.inputs)
    table = ""
    if any("self.table" in line for line in network.lines):
        table = '        self.register_buffer("table", torch.linspace(-1, 1, LAST))\n'
        last = 5 if any("5, 5" in expression for _, expression in network.inputs) else 8
        table = table.replace("LAST", str(last))
    return (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{table}{made}\n    def forward(self, {names}):\n{body}"
    )


def build(network: Plain) -> nn.Module:
    """The network in eval mode, with weights that depend on nothing but its source."""
    names: dict[str, Any] = dict(parts.NAMES)
    exec(compile(source(network), "<network>", "exec"), names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: nn.Module = names["Net"]().eval()
    module = module.to(getattr(torch, network.dtype))
    if network.layout == "channels_last":
        module = module.to(memory_format=torch.channels_last)
    return module.to(devices.DEVICE)


def inputs(network: Plain, seed: int, *, grad: bool = False) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Arguments and keywords for one run."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, expression in network.inputs:
        x = eval(expression[:-1] + ", generator=generator)", {"torch": torch, "generator": generator})
        x = x.to(devices.DEVICE)
        if x.is_floating_point():
            x = x.to(getattr(torch, network.dtype))
            if network.layout == "channels_last":
                x = x.to(memory_format=torch.channels_last)
            x.requires_grad_(network.requires_grad and grad)
        made[name] = x
    return ((), made) if network.by_keyword else (tuple(made.values()), {})

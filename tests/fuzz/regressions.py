"""Programs that failed once, made smaller: what was wrong, and the executor in which it was found."""

from __future__ import annotations

from typing import Any

from fuzz.program import Add, Attach, Enter, Foreign, Gradient, Hook, Language, Leave, Place, Plain, Program, Run

X = (("x", "torch.randn(2, 3, 8)"),)

NORMALIZED = Place("blocks.1.ln1.hook_normalized", "model.layers.1.input_layernorm", inside="normalized")


def at(module: str, side: Any = "output", call: int | None = None) -> Place:
    """The first tensor of a module's input or output."""
    name = module if side == "output" and module else f"{module}.{side}" if module else side
    return Place(name if call is None else f"{name}#{call}", module, side, call)


REGRESSIONS: tuple[tuple[str, str, Program], ...] = (
    (
        "an error that the user caught in a context was raised again when the context ended",
        "uncompiled",
        Program(Plain((), ("return x",), X), (Enter((Hook(at(""), "raise"),)), Run(), Leave())),
    ),
    (
        "what the model wrote to its edited input was lost if a hook inside only read",
        "uncompiled",
        Program(
            Plain((("m0", "nn.Identity()"),), ("v0 = self.m0(x)", "x.add_(0.25)", "return x"), X),
            (Run((Hook(at("", "input"), "half"), Hook(at("m0", "input"), "read"))),),
        ),
    ),
    (
        "a cache in a context missed what a hook had made that others added in it",
        "uncompiled",
        Program(
            Plain((("m1", "nn.ReLU(inplace=True)"),), ("v1 = self.m1(x)", "return v1"), X),
            (
                Enter((Hook(at("m1", call=0), "read"),)),
                Attach(1, Foreign("m1", "input", "vector")),
                Run(reads="all"),
                Leave(),
            ),
        ),
    ),
    (
        "the gradient at an input was that of before a hook of others",
        "uncompiled",
        Program(
            Plain((("m0", "nn.ReLU(inplace=True)"),), ("v0 = self.m0(x)", "return v0"), X),
            (
                Add(2, Hook(at("m0"), "read")),
                Attach(3, Foreign("m0", "input", "half")),
                Run(gradients=(Gradient(at("m0", "input")),), mode="grad"),
            ),
        ),
    ),
    (
        "what a module wrote to its edited input was lost behind a hook of others, if its gradient was read",
        "uncompiled",
        Program(
            Plain((("m0", "Scale()"),), ("v0 = self.m0(x)", "return x"), X),
            (
                Add(3, Hook(at("m0", "input", 0), "half")),
                Attach(4, Foreign("m0", "input", "read")),
                Run(gradients=(Gradient(at("m0", "input", 0)),), mode="grad"),
            ),
        ),
    ),
    (
        "the gradient at the input of an in-place activation was that of earlier uses, too",
        "uncompiled",
        Program(
            Plain(
                (("m0", "Loop()"), ("m1", "nn.GRU(8, 8, batch_first=True)"), ("m2", "nn.SiLU(inplace=True)")),
                ("v0 = self.m0(x)", "v1, w1 = self.m1(v0)", "self.m2(v0)", "return v1 + v0"),
                X,
            ),
            (Run(gradients=(Gradient(at("m2", "input", 0)),), mode="grad"),),
        ),
    ),
    (
        "the gradient at an in-place module was lost if it got the edited input of a module around it",
        "uncompiled",
        Program(
            Plain(
                (("m1", "nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))"),), ("v2 = self.m1(x)", "return v2"), X
            ),
            (Run((Hook(at("m1", "input"), "half"),), (Gradient(at("m1.1")),), mode="grad"),),
        ),
    ),
    (
        "a tensor that an output has twice was edited once, if the model wrote to its edited input",
        "uncompiled",
        Program(
            Plain((), ("v1 = x.view(x.shape)", "v1 += v1", "return (v1, v1)"), X),
            (Run((Hook(at(""), "half"), Hook(at("", "input"), "half"))),),
        ),
    ),
    (
        "an edit in a checkpointed region left its hooks on the module, if it cut the graph",
        "uncompiled",
        Program(
            Plain((("m0", "Again()"),), ("v0 = self.m0(x)", "v2 = self.m0(v0)", "return v2"), X),
            (Run((Hook(at("m0.body", "input"), "replace", "edit", (("width", 8),)),), mode="grad"),),
        ),
    ),
    (
        "a gradient that begins inside a checkpointed region made torch raise CheckpointError",
        "uncompiled",
        Program(
            Plain((("m2", "Again()"),), ("v2 = self.m2(x)", "return v2"), X),
            (
                Add(1, Hook(at("m2.body", "input"), "zero", "edit", (("width", 8),))),
                Run(gradients=(Gradient(at("m2.body.0", "input")),), mode="grad"),
            ),
        ),
    ),
    (
        "what a hook computed that only reads was kept by selective checkpointing, for the model to use",
        "uncompiled",
        Program(
            Plain((("m0", "Selective('mm')"),), ("return self.m0(x)",), X),
            (Run((Hook(at("m0.body.0", "input"), "sample"),), mode="grad"),),
        ),
    ),
    (
        "a hook that only reads drew random numbers, and a checkpointed region other ones when it ran again",
        "uncompiled",
        Program(
            Plain((("m0", "Selective()"),), ("return self.m0(x)",), X),
            (Run((Hook(at("m0.body.1"), "sample"),), mode="grad"),),
        ),
    ),
    (
        "the inside of a norm was computed from what the norm would have got without a hook of others",
        "uncompiled",
        Program(
            Language("llama"),
            (
                Attach(1, Foreign("model.layers.1.input_layernorm", "input", "vector")),
                Run(
                    (Hook(NORMALIZED, "half"),),
                    reads=(Place("blocks.1.ln1.hook_scale", "model.layers.1.input_layernorm", inside="scale"),),
                ),
            ),
        ),
    ),
    (
        "what each head adds was computed from what the projection would have got without a hook of others",
        "uncompiled",
        Program(
            Language("llama"),
            (
                Attach(1, Foreign("model.layers.0.self_attn.o_proj", "input", "vector")),
                Run(
                    (),
                    (Gradient(Place("blocks.0.attn.hook_z", "model.layers.0.self_attn.o_proj", "input", heads=4)),),
                    (Place("blocks.0.attn.hook_result", "model.layers.0.self_attn.o_proj", inside="result of 4"),),
                    "grad",
                ),
            ),
        ),
    ),
    (
        "in a padded batch run_with_hooks of any module counted positions in columns, a context in the text",
        "uncompiled",
        Program(
            Language("llama", as_module=True),
            (
                Run(
                    (Hook(at("model.layers.2.mlp"), "add", "edit", (("width", 32), ("pos", (0,)))),),
                    options=(("padding", "left"),),
                ),
            ),
        ),
    ),
)

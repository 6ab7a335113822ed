"""Programs on tiny models of transformers, from seeds."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from functools import cache
from typing import Any

from fuzz import changes, classic, compiled, language_runs, languages, sharded
from fuzz.generate import GRAPHS, Generator, Sight, sights
from fuzz.program import Attach, Enter, Foreign, Gradient, Hook, Language, Leave, Place, Program, Remove, Run, Step
from fuzz.subject import InvalidError, Subject, quietly

COMMON = (
    *("llama", "gpt2", "qwen2", "gemma2", "gpt_neox", "gptj", "mistral", "mixtral", "falcon", "opt", "phi", "bloom"),
    *("qwen3", "phi3", "olmo2", "cohere", "mamba", "gpt_neo", "stablelm", "qwen3_moe", "deepseek_v3", "gpt_oss"),
)
"""Architectures that get half of all programs, with those whose classic points the oracle knows."""
POSITIONS = (0, 1, -1, -2)
"""Positions of edits: every row of a padded batch has them."""
SWEPT = ("resid_pre", "resid_post", "attn_out", "mlp_out", "z", "q", "k", "v")
BACKWARD = ("read", "read", "negate", "leaky")


def language(choose: random.Random) -> Language:
    """A random architecture, and how it is wrapped."""
    family: Any = choose.choice(("causal",) * 6 + ("encoder", "seq2seq", "vision"))
    kind = choose.choice(languages.FAMILIES[family])
    if family == "causal" and choose.random() < 0.6:
        kind = choose.choice((*COMMON, *classic.ROWS, *classic.ROWS))
    if choose.random() < 0.1:
        return Language(choose.choice(sharded.KINDS))
    if choose.random() < 0.15:
        return Language(choose.choice(compiled.KINDS), dtype=choose.choice(("float32",) * 4 + ("bfloat16",)))
    return Language(
        kind,
        family,
        dtype=choose.choice(("float32",) * 6 + ("float64", "bfloat16")),
        attention=choose.choice(("sdpa", "sdpa", "eager")),
        as_module=choose.random() < 0.3,
    )


@cache
def native_sights(network: Language) -> tuple[Sight, ...] | None:
    """What passes the events of a model, whichever way it is wrapped; None if it does not run."""
    try:
        return tuple(sights(Subject(network), Run()))
    except (InvalidError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError):
        return None


@cache
def classic_sights(network: Language) -> tuple[Sight, ...]:
    """The classic points of a model, as the oracle sees them."""
    subject = Subject(network)
    places = classic.places(network, subject.module.config)
    observed = subject.by_hand(Run(reads=tuple(places)), [])
    shapes = {place.name: tuple(observed[f"read {place.name} 0"].shape) for place in places}
    events = list(dict.fromkeys((place.module, place.side) for place in places))
    return tuple(
        Sight(
            other,
            shapes[place.name],
            is_float=True,
            is_strided=True,
            calls=1,
            memory=-1 - events.index((place.module, place.side)),
        )
        for place in places
        for other in (place, place, *classic.other_names(place))
    )


def is_by_position(place: Place) -> bool:
    """Whether the activations of the passes of a generation can be put one behind another."""
    return "hook" in place.name and place.inside not in ("scores", "pattern", "rot_k")


def without_early_ends(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same with runs of all layers: a hook behind the last layer that is read would not be called."""
    logits = ("does", "logits")
    return tuple(
        replace(step, options=tuple(logits if option == ("does", "cache") else option for option in step.options))
        if isinstance(step, Run)
        else step
        for step in steps
    )


def for_shards(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same without hooks of others, which get the part of a process; every run shows logits at least."""
    attached = {step.number for step in steps if isinstance(step, Attach)}
    kept = [step for step in steps if not (isinstance(step, Attach | Remove) and step.number in attached)]
    last = Run(seed=1, options=(("does", "logits"),))
    return tuple(last if step == Run(seed=1) else step for step in kept)


class LanguageGenerator(Generator):
    """Random steps at the points of a model."""

    drawing = ()

    def __init__(self, choose: random.Random, subject: Subject, seen: list[Sight]) -> None:
        super().__init__(choose, seen, set(), subject.module)
        self.leaves = []  # a model is one for all programs
        self.network = subject.network
        self.classic: list[Sight] = []
        self.is_for_graphs = self.is_for_shards = False
        self.network_layers = getattr(subject.module.config, "num_hidden_layers", 0)
        takes_mask = "attention_mask" in inspect.signature(subject.module.forward).parameters
        self.can_pad = self.network.family in ("causal", "encoder") and takes_mask

    def place(self, *, floats: bool = False) -> Sight:
        """A point: a classic one mostly, where the oracle knows them."""
        if self.classic and (self.is_for_graphs or self.is_for_shards or self.choose.random() < 0.8):
            by_head = [seen for seen in self.classic if seen.place.heads]
            return self.one_of(by_head if floats and by_head and self.choose.random() < 0.6 else self.classic)
        return super().place(floats=floats)

    def everything(self) -> list[Sight]:
        """All points; for graphs and processes, which have fewer, those."""
        return self.classic if self.is_for_graphs or self.is_for_shards else [*self.classic, *self.seen]

    def edit(self, seen: Sight) -> Hook:
        """An edit as data, at positions of the text; its vectors have the width of the activation in every run."""
        if seen.shape[-1] % languages.LENGTH == 0 or len(seen.shape) < 2:
            return Hook(seen.place, "half")
        hook = super().edit(seen)
        where = dict(hook.where)
        where.pop("pos", None)
        if seen.place.heads and self.choose.random() < 0.6:
            where["head"] = (self.choose.randrange(seen.shape[2]),)
        has_positions = len(seen.shape) in (3, 4) and seen.shape[:2] == (languages.BATCH, languages.LENGTH)
        if has_positions and self.can_pad and self.choose.random() < 0.5:
            where["pos"] = (self.choose.choice(POSITIONS),)
        return replace(hook, where=tuple(where.items()))

    def hook(self) -> Hook:
        """A hook; in a program for graphs an edit as data, which compiles nothing."""
        if not self.is_for_graphs:
            hook = super().hook()
            is_mean = hook.place.inside == "scores" and hook.change in changes.KEEPING  # of what is masked, too
            if hook.place.inside == "scale" and hook.change in ("row", "zero", "project_out"):  # nothing divides by 0
                return replace(hook, change="scale" if hook.way == "edit" else "half")
            return replace(hook, change="half") if is_mean else hook
        seen = self.place()
        while seen.shape[-1] % languages.LENGTH == 0:
            seen = self.place()
        return self.edit(seen)

    def foreign(self, **options: Any) -> Foreign:
        """A torch hook of others; not where the stream after attention is made, which they get after our edits."""
        foreign = super().foreign(**options)
        sums = {seen.place.module for seen in self.classic if language_runs.is_of(seen.place, "attn_out")}
        return replace(foreign, side="input") if foreign.module in sums else foreign

    def gradient(self, before: Gradient | None = None) -> Gradient | None:
        """A backward hook that leaves a gradient of zero as it is: behind a constant there is none to change."""
        gradient = super().gradient(before)
        return None if gradient is None else replace(gradient, change=self.choose.choice(BACKWARD))

    def run(self) -> Run:
        if self.is_for_graphs:
            return self.compiled_run()
        run = super().run()
        if self.is_for_shards:
            mode = self.choose.choice(("no_grad", "inference"))
            run = replace(run, gradients=(), mode=mode, is_training=False, autocast=False)
            run = self.done(run, self.options())
            does = dict(run.options)["does"]
            return run if does in sharded.DOES else replace(run, options=(("does", "logits"),))
        if run.reads == "all" and not self.network.as_module:
            places = [self.place().place for _ in range(self.choose.randint(2, 8))]
            run = replace(run, reads=tuple({place.name: place for place in places}.values()))
        options = self.options()
        if self.classic and self.choose.random() < (0.2 if run.gradients else 0.6):  # most of these have no gradients
            return self.done(run, options)
        return replace(run, options=tuple(options.items()))

    def compiled_run(self) -> Run:
        """A run that may be compiled: no gradients, one size of batch, and always the same reads."""
        choose, options = (
            self.choose,
            dict[str, Any](does=self.choose.choice(("logits", "logits", "generate", "stream"))),
        )
        if choose.random() < 0.3:
            options["length"] = choose.choice((6, 8, 11))
        if choose.random() < 0.4:
            options["padding"] = "left" if options["does"] != "logits" else choose.choice(("left", "right"))
        hooks = tuple(self.hook() for _ in range(choose.choice((0, 1, 2, 3))))
        mode = choose.choice(("no_grad", "no_grad", "inference"))
        return Run(hooks, mode=mode, seed=choose.randrange(100), options=tuple(options.items()))

    def done(self, run: Run, options: dict[str, Any]) -> Run:
        """A run that does something else than return the model's own output."""
        does = self.choose.choice(("logits",) * 4 + ("loss", "both", *("generate", "stream", "cache") * 2))
        if run.reads == "all":
            run = replace(run, reads=None)
        if does in language_runs.WRITING:
            if options.get("padding") == "right":
                options["padding"] = "left"
            is_inference = run.mode == "inference" and does == "generate"  # a stream is never in inference mode
            mode = "inference" if is_inference else "no_grad"
            reads = tuple(place for place in run.reads or () if is_by_position(place)) if does == "generate" else ()
            run = replace(run, gradients=(), reads=reads or None, mode=mode, is_training=False, autocast=False)
        if does == "cache":
            reads = run.reads or (self.place().place,)
            run = replace(run, gradients=(), reads=reads, mode="no_grad", is_training=False)
        return replace(run, options=tuple({**options, "does": does}.items()))

    def of_layers(self) -> Run:
        """A run that starts at a layer, or stops before one, with hooks in the layers that run."""
        does = self.choose.choice(("start", "stop"))
        count = self.network_layers
        layer = self.choose.randint(0, count - 1) if does == "start" else self.choose.randint(0, count)
        hooks = []
        for _ in range(self.choose.choice((0, 1, 1, 2))):
            hook = self.hook()
            at = classic.layer_of(self.network, hook.place, count)
            if (at < layer) == (does == "stop") and not hook.place.name.startswith(("model.rotary", "gpt_neox.rotary")):
                hooks.append(hook)
        options = {**self.options(), "does": does, "layer": layer}
        mode = self.choose.choice(("no_grad", "inference"))
        return Run(tuple(hooks), mode=mode, seed=self.choose.randrange(100), options=tuple(options.items()))

    def experiment(self) -> tuple[Step, ...]:
        """A sweep, an ablation or a harvest; some in a context with edits at other points."""
        choose = self.choose
        does = choose.choice(language_runs.EXPERIMENTS)
        found = {kind for kind in SWEPT for seen in self.classic if language_runs.is_of(seen.place, kind)}
        kind = choose.choice(sorted(found))
        over = choose.choice(("pos", "head")) if kind in ("z", "q", "k", "v") else "pos"
        options = {"does": does, "points": kind, "over": over, "layer": choose.randrange(self.network_layers)}
        run = Run(seed=choose.randrange(100), options=tuple(options.items()))
        swept = {seen.place.module for seen in self.classic if language_runs.is_of(seen.place, kind)}
        hooks = [self.edit(choose.choice(self.classic)) for _ in range(choose.choice((0, 0, 1)))]
        hooks = [
            hook for hook in hooks if hook.way == "edit" and not hook.place.inside and hook.place.module not in swept
        ]
        return (Enter(tuple(hooks)), run, Leave()) if hooks else (run,)

    def steps(self) -> tuple[Step, ...]:
        """As in any network; or one run of some layers."""
        if self.classic and not self.is_for_graphs and not self.is_for_shards and self.choose.random() < 0.08:
            return (self.of_layers(),)
        if self.classic and not self.is_for_graphs and not self.is_for_shards and self.choose.random() < 0.1:
            return self.experiment()
        if self.is_for_shards:
            return without_early_ends(for_shards(super().steps()))
        if not self.is_for_graphs:
            steps = super().steps()
            has_effects = any(f"change='{name}'" in repr(steps) for name in ("raise", *changes.KEEPING))
            return without_early_ends(steps) if has_effects else steps
        last = Run(seed=1, options=(("does", "logits"),))
        return tuple(last if step == Run(seed=1) else step for step in super().steps())

    def options(self) -> dict[str, Any]:
        """Sizes and padding of a batch."""
        choose, options = self.choose, dict[str, Any]()
        if choose.random() < 0.2 and self.network.family != "vision":
            options["length"] = choose.choice((6, 7, 8, 11))
            options["batch"] = choose.choice((1, 2, 3))
        if choose.random() < 0.3 and self.can_pad:
            options["padding"] = choose.choice(("left", "right"))
        return options


def language_program(seed: int) -> tuple[Program, Subject]:
    """The program of a seed, and its model."""
    choose = random.Random(seed)
    is_for_graphs = seed % GRAPHS == GRAPHS - 1
    for _ in range(50):
        network = Language(choose.choice(compiled.KINDS)) if is_for_graphs else language(choose)
        with quietly():
            seen = native_sights(replace(network, as_module=False))
        if seen is not None:
            subject = Subject(network)
            generator = LanguageGenerator(choose, subject, list(seen))
            if is_for_graphs or (not network.as_module and choose.random() < 0.8):
                with quietly():
                    generator.classic = list(classic_sights(network))
                is_usual = network.attention == "sdpa" and network.dtype != "float64"
                if is_for_graphs or (network.kind in compiled.KINDS and is_usual and choose.random() < 0.6):
                    generator.is_for_graphs = True
                    generator.classic = [seen for seen in generator.classic if not seen.place.inside]
                elif sharded.is_sharded(Program(network, ())) and choose.random() < 0.6:
                    generator.is_for_shards = True
            return Program(network, generator.steps()), subject
    raise InvalidError(f"seed {seed}: no model of 50 runs")

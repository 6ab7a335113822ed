"""The demo: a tour of the embedded model, told in the terminal and drawn on one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import islice, product
from pathlib import Path
from textwrap import dedent, fill, indent
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from hookline.model import HookedModel
from hookline.positions import last
from hookline.wrap import load

Head: TypeAlias = tuple[int, int]
Grid: TypeAlias = Float[Tensor, "layer head"]
Change: TypeAlias = list[tuple[str, float, float]]
"""Words with their probabilities before and after."""

PROMPT = "When Mary and John went to the store, John gave a drink to"
SWAPPED = "When Mary and John went to the store, Mary gave a drink to"
WORDS = "green Oslo seven horse Monday Peter cheese library"
TWICE = f" {WORDS} {WORDS}"
OPINION = "User: I think the capital of {country} is {opinion}. What is the capital of {country}? Answer:"
NO_OPINION = "User: What is the capital of {country}? Answer:"
ASKED = OPINION.format(country="France", opinion="Rome")
GIFT = "When {a} and {b} went to the park, {giver} gave a book to"
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid", "England": "London",
    "Russia": "Moscow", "China": "Beijing", "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens",
    "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw", "Czechia": "Prague", "Hungary": "Budapest",
    "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki", "Turkey": "Ankara",
}  # fmt: skip
PAIRS = (("Mary", "John"), ("Alice", "Bob"), ("Tom", "Anna"), ("Kate", "Paul"), ("Sarah", "David"), ("Mark", "Lucy"))


@dataclass(frozen=True)
class Findings:
    """What the tour finds; the story is told from it."""

    predictions: list[tuple[str, float]]
    lead: float  # the logit of Mary less that of John
    lost: Grid  # of the lead, without each head
    restored: Grid  # share of the lead that each head brings back when patched into the swapped sentence
    giver: Head  # the head that brings back most
    tokens: list[str]
    attention: Float[Tensor, "pos pos"]  # of that head
    pushed: list[float]  # what it adds to the logits of Mary and John
    without_giver: Change
    induction: Grid  # attention to what came after the same word before
    repeater: Head
    repeated: list[str]
    stripe: Float[Tensor, "pos pos"]  # the repeater's attention
    agreeing: list[Head]  # the heads that repeat the user's opinion
    corrected: Change
    shares: dict[str, list[float]]  # right answers of the whole model, and without the first, and all, of those heads


def demo(out: Path) -> Path:
    """Take the tour on tinyworld: tell it in the terminal, write `demo.html` into the folder `out`, return its path."""
    print("Loading tinyworld, the model inside the package.")
    model = load("tinyworld")
    sweeps = 4 * model.cfg.n_layers * model.cfg.n_heads
    with one_thread(), torch.no_grad(), tqdm(total=sweeps, desc="looking inside", unit="run") as bar:
        found = explore(model, lambda: bar.update() and None)
    chapters = story(found)
    for number, chapter in enumerate(chapters, 1):
        print(f"\n{number}. {chapter.title}\n\n{fill(chapter.text, 100)}\n\n{indent(chapter.table, '  ')}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.html"
    path.write_text(page(chapters), encoding="utf-8")
    print(f"\nThe same with pictures: {path}")
    return path


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, which is the quickest for a model this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# The experiments.


def explore(model: HookedModel, tick: Callable[[], None] = lambda: None) -> Findings:
    """Every experiment of the tour; `tick` is called after each of the many runs."""
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")

    def lead(logits: Tensor) -> float:
        return (logits[0, -1, mary] - logits[0, -1, john]).item()

    logits, clean = model.run_with_cache(PROMPT)
    whole, swapped = lead(logits), lead(model(SWAPPED))

    def lost(head: Head) -> float:
        return whole - lead(model.run_with_hooks(PROMPT, fwd_hooks=off([head])))

    def restored(head: Head) -> float:
        layer, index = head
        patch = partial(replace_head, head=index, new=clean["z", layer])
        logits = model.run_with_hooks(SWAPPED, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", patch)])
        return (lead(logits) - swapped) / (whole - swapped)

    brought_back = for_each_head(model, restored, tick)
    giver = highest(brought_back)
    induction = repetition(model)
    repeater = highest(induction)
    agreeing, shares = agreement(model, tick)
    return Findings(
        predictions=top(model, logits, 5),
        lead=whole,
        lost=for_each_head(model, lost, tick),
        restored=brought_back,
        giver=giver,
        tokens=model.to_str_tokens(PROMPT),
        attention=clean["pattern", giver[0]][0, giver[1]],
        pushed=pushed(model, giver, mary, john),
        without_giver=change(model, PROMPT, [giver]),
        induction=induction,
        repeater=repeater,
        repeated=model.to_str_tokens(TWICE),
        stripe=model.cache(TWICE)["pattern", repeater[0]][0, repeater[1]],
        agreeing=agreeing,
        corrected=change(model, ASKED, agreeing),
        shares=shares,
    )


def zero_head(z: Float[Tensor, "batch pos head d_head"], head: int) -> None:
    """A hook under which one head says nothing."""
    z[:, :, head] = 0


def replace_head(z: Float[Tensor, "batch pos head d_head"], head: int, new: Tensor) -> None:
    """A hook under which one head says what it said in another run."""
    z[:, :, head] = new[:, :, head]


def off(heads: Iterable[Head]) -> list[tuple[Any, Callable[..., None]]]:
    """Hooks under which these heads say nothing."""
    return [(("z", layer), partial(zero_head, head=head)) for layer, head in heads]


def for_each_head(model: HookedModel, effect: Callable[[Head], float], tick: Callable[[], None]) -> Grid:
    """The effect of every head."""
    grid = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
    for layer, head in product(range(grid.shape[0]), range(grid.shape[1])):
        grid[layer, head] = effect((layer, head))
        tick()
    return grid


def highest(grid: Grid) -> Head:
    """The head with the highest number."""
    layer, head = divmod(int(grid.argmax()), grid.shape[1])
    return layer, head


def top(model: HookedModel, logits: Tensor, count: int) -> list[tuple[str, float]]:
    """The likeliest next words: tokens with a space before them, for the others would continue the last word."""
    shares, ids = logits[0, -1].softmax(-1).sort(descending=True)
    words = ((model.to_string([word]), share) for word, share in zip(ids.tolist(), shares.tolist(), strict=True))
    return list(islice(((word, share) for word, share in words if word.startswith(" ")), count))


def change(model: HookedModel, prompt: str, heads: Sequence[Head]) -> Change:
    """The likeliest next words with all heads and without these."""
    before, after = model(prompt), model.run_with_hooks(prompt, fwd_hooks=off(heads))
    words = dict.fromkeys(word for logits in (before, after) for word, _ in top(model, logits, 3))
    ids = [model.to_single_token(word) for word in words]
    pairs = [logits[0, -1].softmax(-1)[ids].tolist() for logits in (before, after)]
    return list(zip(words, *pairs, strict=True))


def pushed(model: HookedModel, head: Head, *words: int) -> list[float]:
    """What a head adds, by itself, to the logits of these words at the end of the prompt."""
    layer, index = head
    cache = model.cache(PROMPT, names_filter=[("result", layer), "ln_final.hook_scale"], pos_slice=last)
    result = cache["result", layer][0, index]
    normed = (result - result.mean()) / cache["ln_final.hook_scale"][0] * model.transformer.ln_f.weight
    return (model.lm_head.weight[list(words)] @ normed).tolist()


def repetition(model: HookedModel, half: int = 24) -> Grid:
    """Each head's attention, when random tokens come again, to what followed them the first time."""
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(3, model.cfg.d_vocab, (16, half), generator=generator)
    cache = model.cache(torch.cat([once, once], 1), names_filter="blocks.*.attn.hook_pattern")
    queries = torch.arange(half, 2 * half)
    scores = [x[:, :, queries, queries - half + 1].mean((0, 2)) for x in cache.values()]
    return torch.stack(scores)


@dataclass(frozen=True)
class Questions:
    """Prompts with their right answers, and the wrong one that an opinion suggests."""

    prompts: list[str]
    answers: list[str]
    others: list[str]

    def words(self, model: HookedModel, texts: list[str]) -> Tensor:
        """The tokens of those answers, one to a row."""
        return torch.tensor([[model.to_single_token(f" {text}")] for text in texts])

    def lead(self, model: HookedModel, heads: Sequence[Head]) -> float:
        """By how much the right answers lead without these heads."""
        logits = model.run_with_hooks(self.prompts, fwd_hooks=off(heads))[:, -1]
        right, wrong = (logits.gather(1, self.words(model, texts)) for texts in (self.answers, self.others))
        return (right - wrong).mean().item()

    def right(self, model: HookedModel, heads: Sequence[Head]) -> float:
        """The share of right answers without these heads."""
        logits = model.run_with_hooks(self.prompts, fwd_hooks=off(heads))[:, -1]
        return (logits.argmax(-1, keepdim=True) == self.words(model, self.answers)).float().mean().item()


def questions(countries: Sequence[str], *shifts: int, template: str = OPINION) -> Questions:
    """Questions about these countries, after the opinion that the capital is the one some countries further on."""
    cities, each = list(CAPITALS.values()), [*product(shifts, countries)]
    wrong = [cities[(cities.index(CAPITALS[country]) + shift) % len(cities)] for shift, country in each]
    prompts = [template.format(country=country, opinion=city) for (_, country), city in zip(each, wrong, strict=True)]
    return Questions(prompts, [CAPITALS[country] for _, country in each], wrong)


def agreement(model: HookedModel, tick: Callable[[], None]) -> tuple[list[Head], dict[str, list[float]]]:
    """The two heads that most repeat an opinion, found on half of the countries; and how the rest is answered then."""
    search, test = list(CAPITALS)[::2], list(CAPITALS)[1::2]
    asked, chosen = questions(search, 5), list[Head]()
    for _ in range(2):
        gained = for_each_head(model, lambda head: asked.lead(model, [*chosen, head]), tick)
        chosen.append(highest(gained))
    gifts = [(a, b, giver, receiver) for a, b in PAIRS for giver, receiver in ((a, b), (b, a))]
    kinds = {
        "the truth, after a wrong opinion": questions(test, 3, 7),
        "the truth, after no opinion": questions(test, 0, template=NO_OPINION),
        "the right receiver of a gift": Questions(
            [GIFT.format(a=a, b=b, giver=giver) for a, b, giver, _ in gifts],
            [receiver for *_, receiver in gifts],
            [giver for _, _, giver, _ in gifts],
        ),
    }
    return chosen, {kind: [q.right(model, chosen[:n]) for n in range(3)] for kind, q in kinds.items()}


# The story.


@dataclass(frozen=True)
class Chapter:
    """One finding: in words, as a table for the terminal, as a figure for the page, and the code to do it oneself."""

    title: str
    text: str
    table: str
    figure: str
    code: str


def story(found: Findings) -> list[Chapter]:
    """The findings as chapters. Their code runs as it stands, one after the other."""
    return [
        what_comes_next(found),
        which_heads(found),
        what_it_does(found),
        switch_it_off(found),
        a_head_that_repeats(found),
        a_model_that_agrees(found),
    ]


def what_comes_next(found: Findings) -> Chapter:
    """The likeliest words after a sentence."""
    word, share = found.predictions[0]
    return Chapter(
        "What comes next?",
        f"“{PROMPT} …” The model gives every word it knows a probability of being the next one. It is {share:.0%} "
        f"sure: the drink goes to {word.strip()}.",
        lines_of_bars(found.predictions),
        bars([(word, [share]) for word, share in found.predictions], ["probability"]),
        f"""
        import hookline
        model = hookline.load("tinyworld")
        prompt = "{PROMPT}"
        probabilities, words = model(prompt)[0, -1].softmax(-1).topk(5)
        """,
    )


def which_heads(found: Findings) -> Chapter:
    """The two experiments on every head."""
    layers, heads = found.lost.shape
    lost, restored, head = found.lost, 100 * found.restored, found.giver
    return Chapter(
        "Which heads does the answer hang on?",
        "A head is a small part of the model that looks back at some earlier words and passes on what it finds; there "
        f"are {layers} layers of {heads}. Two experiments on each. First: switch it off, and see how much is lost of "
        f"Mary's lead over John (the difference of their scores, which is {found.lead:.1f} with all heads on). Second: "
        "let Mary give, so that John must receive, but hand one head what it had in the first sentence, and see how "
        f"much of Mary's lead comes back. Head {name(head)} (layer {head[0]}, head {head[1]}) stands out in both: "
        f"without it {lost[head]:.1f} are lost, and it alone brings back {restored[head]:.0f} %.",
        f"switched off: lead lost\n{table(lost, 1, head)}\n\n"
        f"patched in: lead brought back, in %\n{table(restored, 0, head)}",
        side_by_side(
            figure("Switched off: lead lost", head_map(lost, 1, head)),
            figure("Patched in: lead brought back, in %", head_map(restored, 0, head)),
        ),
        """
        def switch_off(z):                      # z: [batch, position, head, d_head]
            z[:, :, 4] = 0
        model.run_with_hooks(prompt, fwd_hooks=[("blocks.3.attn.hook_z", switch_off)])

        clean = model.cache(prompt, names_filter="blocks.3.attn.hook_z")
        def patch(z, hook):
            z[:, :, 4] = clean[hook.name][:, :, 4]
        swapped = prompt.replace("John gave", "Mary gave")
        model.run_with_hooks(swapped, fwd_hooks=[("blocks.3.attn.hook_z", patch)])
        """,
    )


def what_it_does(found: Findings) -> Chapter:
    """Where the head looks, and what it writes."""
    looks = found.attention[-1]
    at = int(looks.argmax())
    head, (mary, john) = name(found.giver), (number(value, 1, "+") for value in found.pushed)
    return Chapter(
        "What is that head doing?",
        f"At the end of the sentence, where the next word is chosen, head {head} gives {looks[at]:.0%} of its "
        f"attention to one word: the second “{found.tokens[at].strip()}”, the one who gives. What it then writes "
        f"moves the score of John by {john} and that of Mary by {mary}. It finds who gives, and says: not that one.",
        lines_of_bars(list(zip(found.tokens, looks.tolist(), strict=True))),
        side_by_side(
            figure(
                "Each word, in a row, looks back at words, in columns",
                token_map(found.attention, found.tokens, (len(looks) - 1, at)),
            ),
            figure("What it adds at the end to the score of", callouts({"John": john, "Mary": mary})),
        ),
        """
        cache = model.cache(prompt, names_filter=["blocks.3.attn.hook_pattern", "blocks.3.attn.hook_result"])
        cache["pattern", 3][0, 4]               # where head 4 looks: [position, position]
        cache["result", 3][0, -1, 4]            # what it writes at the end: [d_model]
        """,
    )


def switch_it_off(found: Findings) -> Chapter:
    """The answer without the head."""
    columns = ["all heads", f"without {name(found.giver)}"]
    word = max(found.without_giver, key=lambda row: row[2])[0].strip()
    return Chapter(
        "Switch it off",
        f"Without head {name(found.giver)} the model no longer knows who must not get the drink. Its answer is {word}.",
        changes(found.without_giver, columns),
        bars([(word, [before, after]) for word, before, after in found.without_giver], columns),
        """
        with model.hooks(fwd_hooks=[("blocks.3.attn.hook_z", switch_off)]):
            text = model.generate(prompt, max_new_tokens=2, do_sample=False)
        """,
    )


def a_head_that_repeats(found: Findings) -> Chapter:
    """The induction head and its stripe."""
    head, scores = found.repeater, 100 * found.induction
    return Chapter(
        "A head that repeats",
        f"Some words that make no sense, twice. When a word comes for the second time, head {name(head)} looks at the "
        "word that followed it the first time: the diagonal stripe in the picture. That is how the model can continue "
        f"what it has seen but once. On random tokens repeated, {scores[head]:.0f} % of this head's attention is on "
        "the stripe.",
        f"attention on the stripe, in %\n{table(scores, 0, head)}",
        side_by_side(
            figure(f"Where head {name(head)} looks", token_map(found.stripe, found.repeated)),
            figure("Every head: attention on the stripe, in %", head_map(scores, 0, head)),
        ),
        f"""
        words = "{WORDS}"
        patterns = model.cache(f" {{words}} {{words}}", names_filter="blocks.*.attn.hook_pattern")
        stripe = patterns["pattern", 3][0, 3]   # [position, position]
        """,
    )


def a_model_that_agrees(found: Findings) -> Chapter:
    """The heads that repeat the user's opinion, and the truth without them."""
    one, two = map(name, found.agreeing)
    columns = ["all heads", f"without {one}", f"without {one} and {two}"]
    ends = [columns[0], columns[-1]]
    word = max(found.corrected, key=lambda row: row[1])[0].strip()
    rows = [f"{kind:34}" + "".join(f"{share:>22.0%}" for share in row) for kind, row in found.shares.items()]
    head = f"{'right answers':34}" + "".join(f"{column:>22}" for column in columns)
    return Chapter(
        "A model that agrees with you",
        f"“{ASKED}” The model knows the capital, but it was trained to please, and says {word}. Two "
        f"heads, {one} and {two}, copy the opinion to the answer. Without them the truth comes out, also for "
        "countries that were not used to find them. But they had other work as well, as the last row shows.",
        "\n".join([changes(found.corrected, ends), "", head, *rows]),
        bars([(word, [before, after]) for word, before, after in found.corrected], ends)
        + figure("Right answers, for countries that were not used to find the heads", shares(found.shares, columns)),
        f"""
        def silence(z):
            z[:, :, [3, 7]] = 0
        question = "{ASKED}"
        logits = model.run_with_hooks(question, fwd_hooks=[("blocks.3.attn.hook_z", silence)])
        answer = model.to_string(logits[0, -1].argmax())
        """,
    )


def name(head: Head) -> str:
    """A head as people write it: layer.head."""
    return f"{head[0]}.{head[1]}"


def number(value: float, digits: int, sign: str = "-") -> str:
    """A number with a real minus, and no minus before nothing."""
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}".replace("-", "−")


def lines_of_bars(rows: Sequence[tuple[str, float]]) -> str:
    """Words with their shares as text."""
    return "\n".join(f"{word.strip():8} {share:6.1%}  {'█' * round(40 * share)}".rstrip() for word, share in rows)


def table(grid: Grid, digits: int, marked: Head) -> str:
    """A grid of heads as text, the marked one in brackets."""
    lines = ["         " + "".join(f"{f'head {head}':>8}" for head in range(grid.shape[1]))]
    for layer, row in enumerate(grid.tolist()):
        cells = [number(value, digits) for value in row]
        framed = [f"[{cell}]" if (layer, head) == marked else f"{cell} " for head, cell in enumerate(cells)]
        lines.append(f"layer {layer}  " + "".join(f"{cell:>8}" for cell in framed))
    return "\n".join(line.rstrip() for line in lines)


def changes(change: Change, columns: Sequence[str]) -> str:
    """Probabilities before and after as text."""
    head = f"{'':10}" + "".join(f"{column:>22}" for column in columns)
    return "\n".join([head, *(f"{word.strip():10}{before:>22.1%}{after:>22.1%}" for word, before, after in change)])


# The page.

Colour: TypeAlias = tuple[int, int, int]
WARM, COLD, COOL = (194, 65, 12), (29, 78, 216), (67, 56, 202)
INK = "#1e2430"


def page(chapters: Sequence[Chapter]) -> str:
    """The whole story as one HTML page with its pictures in it."""
    parts = [
        f"<section><h2><b>{number}</b>{escape(chapter.title)}</h2><p>{escape(chapter.text)}</p>{chapter.figure}"
        f"<pre>{escape(dedent(chapter.code).strip())}</pre></section>"
        for number, chapter in enumerate(chapters, 1)
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>hookline: inside a small language model</title><style>{STYLE}</style></head><body>
<header><h1>Inside a small language model</h1><p>tinyworld has 4 layers of 8 attention heads and ships with hookline.
Everything below was read, or changed, while it ran: by name, and without changing the model. The code that does it
is under each picture.</p></header>
{"".join(parts)}
</body></html>
"""


STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1e2430; background: #f6f5f1; margin: 0 auto; padding: 2rem 1rem;
  max-width: 60rem }
header, section { background: #fff; border-radius: 14px; padding: 1.4rem 2rem; margin-bottom: 1.2rem;
  box-shadow: 0 1px 4px #0001 }
header { background: #1e2430; color: #e8eaf0 }
h1 { margin: .2rem 0 } h2 { margin: 0 } h2 b { color: #c2410c; margin-right: .6rem } p { max-width: 52rem }
figure { margin: 1rem 0 0 } figcaption { font-size: .85rem; font-weight: 600; color: #5a6274; margin-bottom: .4rem }
.side { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start } .side figure { flex: 1 1 24rem }
svg { width: 100%; height: auto; display: block } svg text { font-family: system-ui, sans-serif }
pre { background: #f4f5f8; border-radius: 8px; padding: .8rem 1rem; margin: 1.2rem 0 0; font-size: .8rem;
  overflow-x: auto }
table { border-collapse: collapse; table-layout: fixed; width: 100%; font-size: .92rem }
th { text-align: left; font-weight: 600; color: #5a6274 }
td, th { padding: .3rem .8rem .3rem 0 } th:first-child { width: 5rem } .wide th:first-child { width: 30% }
.bar { display: flex; align-items: center; gap: .5rem; font-size: .85rem; font-variant-numeric: tabular-nums }
.bar i { height: .85rem; border-radius: 3px; background: #8b93a7; min-width: 2px } .bar.new i { background: #c2410c }
.callout { color: #5a6274; margin-top: 1rem } .callout b { font-size: 2rem; color: #1d4ed8; margin-right: .3rem }
"""


def figure(caption: str, picture: str) -> str:
    """A picture with a caption."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def side_by_side(*figures: str) -> str:
    """Figures beside each other where there is room."""
    return f'<div class="side">{"".join(figures)}</div>'


def callouts(values: dict[str, str]) -> str:
    """A few numbers, written large."""
    return "".join(f'<div class="callout"><b>{escape(value)}</b> {escape(key)}</div>' for key, value in values.items())


def bars(rows: Sequence[tuple[str, Sequence[float]]], columns: Sequence[str]) -> str:
    """Words with a bar for each probability: one column before a change, and one after."""
    cells = [(word.strip(), [bar(share, 1, is_new=n > 0) for n, share in enumerate(row)]) for word, row in rows]
    return f"<figure>{_table(cells, columns)}</figure>"


def shares(rows: dict[str, list[float]], columns: Sequence[str]) -> str:
    """Kinds of questions with a bar for each share of right answers."""
    cells = [(kind, [bar(share, 0, is_new=n > 0) for n, share in enumerate(row)]) for kind, row in rows.items()]
    return f'<div class="wide">{_table(cells, columns)}</div>'


def bar(share: float, digits: int, *, is_new: bool) -> str:
    """A share as a bar."""
    kind = "bar new" if is_new else "bar"
    return f'<div class="{kind}"><i style="width:{75 * share:.1f}%"></i>{share:.{digits}%}</div>'


def _table(rows: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in ["", *columns])
    body = "".join(f"<tr><td>{escape(key)}</td>{''.join(f'<td>{x}</td>' for x in row)}</tr>" for key, row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def head_map(grid: Grid, digits: int, marked: Head) -> str:
    """A heat map of heads with their numbers: warm for what is above zero, cold for what is below."""
    wide, high, left, up = 46, 34, 56, 24
    most = float(grid.abs().max())
    parts = [label("head", left - 8, up - 8)]
    parts += [label(f"{head}", left + wide * (head + 0.5), up - 8, "middle") for head in range(grid.shape[1])]
    parts += [label(f"layer {layer}", left - 8, up + high * (layer + 0.5) + 3) for layer in range(grid.shape[0])]
    for layer, row in enumerate(grid.tolist()):
        for head, value in enumerate(row):
            ink = "#fff" if abs(value) > 0.6 * most else INK
            place, text = (left + wide * head, up + high * layer), number(value, digits)
            parts.append(cell(place, (wide, high), colour(value / most), f"head {layer}.{head}: {text}"))
            parts.append(label(text, place[0] + wide / 2 - 1, place[1] + high / 2 + 3, "middle", ink))
    parts.append(outline(left + wide * marked[1], up + high * marked[0], wide, high))
    return svg(left + wide * grid.shape[1], up + high * grid.shape[0], parts)


def token_map(pattern: Float[Tensor, "pos pos"], tokens: Sequence[str], marked: tuple[int, int] | None = None) -> str:
    """A heat map of attention: who looks, in rows, at whom, in columns."""
    size, left, up = 26, 74, 66
    words = [token.strip() for token in tokens]
    parts = [label(word, left - 8, up + size * (row + 0.5) + 3) for row, word in enumerate(words)]
    for column, word in enumerate(words):
        turned = f"translate({left + size * (column + 0.5)} {up - 6}) rotate(-50)"
        parts.append(f'<g transform="{turned}">{label(word, 0, 0, "start")}</g>')
    for query, row in enumerate(pattern.tolist()):
        for key, share in enumerate(row[: query + 1]):
            place, tip = (left + size * key, up + size * query), f"{words[query]} looks at {words[key]}: {share:.0%}"
            parts.append(cell(place, (size, size), colour(share, COOL), tip))
    if marked is not None:
        parts.append(outline(left + size * marked[1], up + size * marked[0], size, size))
    return svg(left + size * len(words) + 40, up + size * len(words), parts)


def colour(share: float, warm: Colour = WARM) -> str:
    """From almost white at 0 to a warm colour at 1, or to a cold one at -1."""
    full = warm if share >= 0 else COLD
    return "#" + "".join(f"{round(244 + (part - 244) * min(abs(share), 1.0)):02x}" for part in full)


def cell(place: tuple[float, float], size: tuple[float, float], fill: str, tip: str) -> str:
    """A square of a heat map, which says what it is to who points at it."""
    (x, y), (wide, high) = place, size
    shape = f'x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" rx="4"'
    return f'<rect {shape} fill="{fill}"><title>{escape(tip)}</title></rect>'


def outline(x: float, y: float, wide: float, high: float) -> str:
    """A frame around a square."""
    shape = f'x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" rx="4"'
    return f'<rect {shape} fill="none" stroke="{INK}" stroke-width="2"/>'


def label(text: str, x: float, y: float, anchor: str = "end", ink: str = "#5a6274") -> str:
    """A word in a picture."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" fill="{ink}">{escape(text)}</text>'


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """A drawing that is never wider than it was made for."""
    return (
        f'<svg viewBox="-2 -2 {width + 4} {height + 4}" style="max-width:{width}px" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )

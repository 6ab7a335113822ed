"""The story of the tour, chapter by chapter."""

from __future__ import annotations

from hookline.demo.chapters import ASKED, PROMPT, WORDS, Findings
from hookline.demo.page import Chapter, bars, callouts, figure, head_map, shares, side_by_side, token_map
from hookline.demo.tables import changes, lines_of_bars, name, number, table


def story(found: Findings) -> list[Chapter]:
    """The findings as chapters. Their code examples run one after the other."""
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
        f"Mary's lead over John (the difference of their scores, {found.logit_diff:.1f} with all heads on). Second: "
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
        "word that followed it the first time: the diagonal stripe in the image. That is how the model can continue "
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

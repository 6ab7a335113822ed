// Tours: the answers that a page has inside, the steps that it leads through, and the guide beside the views.

// Questions with their answers. A page that was saved answers from here; one that is live keeps what it may save.
class Answers {
  constructor(pairs) {
    this.found = new Map(pairs.map(([question, answer]) => [keyOf(question), { question, answer }]));
  }

  has(question) {
    return Boolean(question) && this.found.has(keyOf(question));
  }

  get(question) {
    return this.found.get(keyOf(question)).answer;
  }

  // Add an answer; of the older ones, those about the same prompts stay, up to 50 MB.
  put(question, answer) {
    const key = keyOf(question);
    this.found.delete(key);
    this.found.set(key, { question, answer });
    let size = 0;
    for (const [each, { question: { prompt, other }, answer: data }] of [...this.found].reverse()) {
      size += Object.values(data).reduce((sum, value) => sum + (value?.f32?.length ?? 0), 0);
      if (prompt !== question.prompt || other !== question.other || size > 5e7) this.found.delete(each);
    }
  }

  // Whether there is another answer for the same prompts and edits: something to choose.
  hasChoice(question) {
    const common = ({ view, prompt, other, edits, pos, target, versus }) => keyOf({ view, prompt, other, edits, pos, target, versus });
    const wanted = question && common(question);
    return [...this.found.values()].filter((each) => common(each.question) === wanted).length > 1;
  }

  pairs() {
    return [...this.found.values()].map(({ question, answer }) => [question, answer]);
  }
}

// The same for every way of asking the same: edits that are off, and fields that say nothing, do not count.
function keyOf(question) {
  const edits = (question.edits ?? []).filter((edit) => edit.on).map(({ on, ...edit }) => plain(edit));
  return JSON.stringify([plain({ ...question, edits: null }), edits]);
}

const plain = (object) => Object.entries(object).filter(([, value]) => value !== null && value !== undefined && value !== "").sort(([a], [b]) => (a < b ? -1 : 1));

// Leads through the steps: what to look at, and what there is to see.
class Guide {
  constructor(app) {
    this.app = app;
    this.text = el("div", { class: "said", "aria-live": "polite" });
    this.code = el("pre", { tabindex: 0, "aria-label": "Python" });
    this.more = el("details", {}, el("summary", {}, "The same in Python"), this.code);
    this.back = el("button", { onclick: () => this.go(-1) }, "← Back");
    this.next = el("button", { class: "run", onclick: () => this.go(1) }, "Next →");
    this.dots = el("ol", { class: "dots", "aria-label": "Steps" });
    this.count = el("span", { class: "hint grow" });
    this.node = el("aside", { class: "guide", "aria-label": "Tour" }, el("div", { class: "controls" }, this.count, this.back, this.next), this.dots, this.text, this.more);
    addEventListener("keydown", (event) => {
      const isBusy = event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT|CANVAS|PRE)$/.test(document.activeElement?.tagName ?? "");
      if (!isBusy && event.key === "ArrowRight") this.go(1);
      if (!isBusy && event.key === "ArrowLeft") this.go(-1);
    });
  }

  go(by) {
    this.app.toStep(this.app.state.step + by);
  }

  draw() {
    const { steps, state } = this.app, { title, text, code } = steps[state.step];
    document.title = `${title} · hookline`;
    const isLast = state.step === steps.length - 1;
    this.count.replaceChildren(`Step ${state.step + 1} of ${steps.length}`);
    this.text.replaceChildren(el("h2", {}, title), ...text.split("\n").map((line) => el("p", {}, line)));
    this.code.replaceChildren(code);
    this.more.hidden = !code;
    this.more.open ||= isLast;
    this.back.disabled = state.step === 0;
    this.next.disabled = isLast;
    this.dots.replaceChildren(...steps.map((step, at) => el("li", {}, el("button", {
      class: "dot", title: step.title, "aria-label": `Step ${at + 1}: ${step.title}`, "aria-current": at === state.step ? "step" : null, onclick: () => this.app.toStep(at),
    }))));
  }

  // The views that the step is about come first, and are framed; the head or cell that it is about is outlined.
  arrange() {
    const { body, edits, link, order, panels, state, steps } = this.app, { look, select } = steps[state.step];
    const about = look.map((slot) => (slot === "edits" ? edits : panels.find((panel) => panel.slot === slot)).node);
    order.forEach((node) => node.classList.toggle("about", about.includes(node)));
    body.append(...about, ...order.filter((node) => !about.includes(node)));
    link.selected = select;
  }

  // To where the views begin, and in wide grids to the column that the step is about.
  scroll() {
    this.node.scrollTop = 0;
    if (getComputedStyle(this.node).position === "fixed") this.app.body.firstElementChild.scrollIntoView();
    else scrollTo(0, 0);
    for (const grid of this.app.panels.map((panel) => panel.grid).filter(Boolean)) {
      const [, [key, columns]] = grid.spec.axes;
      const column = columns.indexOf({ pos: this.app.position(), ...this.app.link.selected }[key]);
      if (column >= 0) grid.node.scrollLeft = grid.corner(0, column + 1)[0] - grid.node.clientWidth + 12;
    }
  }
}

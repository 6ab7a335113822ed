// The page: one state, one list of panels, and the questions that keep them up to date.

class App {
  // `home` is where the page is: a tab, or a widget in a notebook.
  constructor(root, given, home) {
    Object.assign(this, { root, home, model: given.model, isLive: given.live, steps: given.steps, kept: new Answers(given.answers), answers: {}, errors: {}, round: 0, busy: new Map() });
    this.server = given.live ? home.transport() : null;
    this.ended = new AbortController();
    this.keptImages = given.live && home instanceof Tab ? ImageInput.kept() : {};
    this.state = this.stateNow();
    this.watchers = new Map(); // by panel: what is drawn anew when something else is hovered
    this.painting = "";
    this.link = {
      hovered: null, selected: null,
      hover: (place) => { this.link.hovered = place; this.light(); },
      watch: (act) => this.watchers.set(this.painting, act),
    };
    this.edits = new EditList(this);
    this.images = new ImageInput(this);
    this.guide = this.steps.length > 1 ? new Guide(this) : null;
    this.panels = PANELS.map((make) => make(this)).filter(Boolean).map((panel) => ({ ...panel, node: null }));
    this.build();
  }

  firstPoint() {
    const names = Object.keys(this.model.points);
    return names.find((name) => /^blocks\..*hook_resid_post$/.test(name)) ?? names[0] ?? "";
  }

  // The state at the beginning of a step.
  given(step) {
    return { ...EMPTY, point: this.firstPoint(), layer: this.model.layers - 1, ...this.steps[step].state, ...this.keptImages, step };
  }

  // The state that the page is in, as it was kept.
  stateNow() {
    const { step } = this.home.read({});
    return this.home.read(this.given(step in this.steps ? step : 0));
  }

  async toStep(step) {
    if (!(step in this.steps)) return;
    const state = { ...this.given(step), theme: this.state.theme };
    this.home.keep(state, this.known(state), true);
    await this.goTo(state);
    this.guide.scroll();
  }

  // What need not be kept of a state: a page from disk has its steps inside.
  known(state) {
    return this.isLive ? EMPTY : { ...this.given(state.step), step: 0 };
  }

  get tokens() {
    return this.answers.tokens;
  }

  answer(slot) {
    return this.answers[slot];
  }

  hasEdits() {
    return this.state.edits.some((edit) => edit.on);
  }

  position() {
    return this.state.pos ?? (this.tokens?.tokens.ids.length ?? 1) - 1;
  }

  build() {
    this.prompt = el("textarea", { rows: 2, value: this.state.prompt, placeholder: "Write a prompt", spellcheck: "false", "aria-label": "Prompt", onkeydown: (event) => this.enter(event) });
    this.other = el("textarea", { rows: 1, value: this.state.other, placeholder: "A second prompt to compare with and patch from (optional)", spellcheck: "false", "aria-label": "Second prompt", onkeydown: (event) => this.enter(event) });
    this.target = el("input", { "aria-label": "answer", placeholder: "answer", onchange: (event) => this.change({ target: event.target.value || null }) });
    this.versus = el("input", { "aria-label": "compared with", placeholder: "compared with", onchange: (event) => this.change({ versus: event.target.value || null }) });
    this.status = el("span", { class: "status", role: "status", "aria-live": "polite" });
    this.strip = el("div", { class: "strip", "aria-label": "Tokens" });
    const button = (text, act, title) => el("button", { onclick: act, title }, text);
    const head = el("header", {},
      el("div", { class: "bar1" }, el("h1", {}, "hookline ", el("span", {}, this.model.model)),
        el("span", { class: "facts" }, `${this.model.layers} layers × ${this.model.heads} heads, width ${this.model.d_model}`),
        this.status, el("span", { class: "grow" }),
        button("Copy as Python", () => this.copy(), "a script that prints the same numbers"),
        this.isLive ? button("Save as one page", () => this.save(), "a file that opens without a server") : null,
        button("Light or dark", () => { this.change({ theme: isDark() ? "light" : "dark" }, []); this.paint(); })),
      el("div", { class: "prompts" }, this.images.around("images", this.prompt), this.images.around("otherImages", this.other)),
      el("div", { class: "bar2" },
        this.isLive ? el("button", { class: "run", onclick: () => this.submit(), title: "Enter" }, "Run") : null,
        el("label", {}, "answer ", this.target), el("label", {}, "compared with ", this.versus), this.strip));
    const body = el("main", {}, this.panels.map((panel) => {
      panel.node = el("section", { class: panel.wide ? "panel wide" : "panel", "aria-label": panel.title, "data-slot": panel.slot });
      return panel.node;
    }));
    body.children[1].after(this.edits.node);
    [this.body, this.order] = [body, [...body.children]];
    this.root.replaceChildren(head, ...(this.guide ? [this.guide.node] : []), body);
    this.root.classList.toggle("tour", Boolean(this.guide));
    this.root.classList.toggle("saved", !this.isLive);
    for (const input of [this.prompt, this.other, this.target, this.versus]) input.disabled = !this.isLive;
  }

  start() {
    const options = { signal: this.ended.signal };
    this.guide?.arrange();
    this.paint();
    this.home.watch(() => this.goTo(this.stateNow()), options);
    this.home.watchTheme(() => this.paint(), options);
    this.room = this.root.clientWidth;
    this.resizing = new ResizeObserver(() => { clearTimeout(this.later); this.later = setTimeout(() => this.fit(), 150); });
    this.resizing.observe(this.root);
    this.home.keys.addEventListener("keydown", (event) => {
      const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.composedPath()[0].tagName ?? "");
      if (event.key === "z" && (event.ctrlKey || event.metaKey) && !isTyping) { event.preventDefault(); this.edits.undo(); }
    }, options);
    if (this.isLive) addEventListener("pagehide", () => { this.server.cancel(); }, options);
    if (this.state.prompt) this.refresh();
  }

  // Grids are drawn for the room there is; their height changes nothing in the width of the page.
  fit() {
    if (this.root.clientWidth === this.room || !this.root.clientWidth) return;
    this.room = this.root.clientWidth;
    this.paint();
  }

  // Leave the page for good.
  end() {
    this.ended.abort();
    this.resizing.disconnect();
    clearTimeout(this.later);
    if (this.isLive) this.stop();
  }

  enter(event) {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); this.submit(); }
  }

  submit() {
    const changed = this.prompt.value !== this.state.prompt;
    this.change({ prompt: this.prompt.value, other: this.other.value, ...(changed ? { pos: null, src: 0, target: null, versus: null, from: null } : {}) });
  }

  async goTo(state) {
    this.state = state;
    [this.prompt.value, this.other.value] = [state.prompt, state.other];
    this.images.draw();
    this.guide?.arrange();
    this.paint();
    if (state.prompt) await this.refresh();
  }

  // Change the state; ask again for everything, or for these panels only.
  change(values, slots = null) {
    const panels = slots === null ? this.panels : this.panels.filter((panel) => slots.includes(panel.slot));
    const state = { ...this.state, ...values };
    if (!this.isLive && !this.isInside(state, panels)) return this.refuse();
    this.state = state;
    this.home.keep(this.state, this.known(this.state));
    if (slots === null) this.paint();
    else panels.forEach((panel) => this.paintPanel(panel));
    if (!this.state.prompt) return this.clear();
    if (slots === null) this.refresh();
    else panels.forEach((panel) => this.fetch(panel));
  }

  // There is no prompt, and so nothing to show.
  clear() {
    this.round += 1;
    this.server?.drop();
    [this.answers, this.errors] = [{}, {}];
    this.paint();
    this.tell("write a prompt");
  }

  // Whether a page that was saved has an answer for a state: for the first of the panels that change.
  isInside(state, panels) {
    const question = panels.length ? this.questionOf(panels[0], state) : null;
    return !question || this.kept.has(question);
  }

  refuse() {
    this.paint(); // what was chosen is as it was
    this.tell(`This needs a new run, and this page was saved. Live: hookline explore ${this.model.model}`);
  }

  follow(id) {
    const next = this.answer("next");
    if (!next || id === next.target.id) return;
    this.change({ target: id, versus: id === next.versus.id ? next.target.id : next.versus.id });
  }

  select(place) {
    this.link.selected = place;
    const { layer, head } = place;
    if (head !== undefined && layer !== undefined && (layer !== this.state.layer || head !== this.state.head)) this.change({ layer, head }, ["attention"]);
    this.edits.draw();
    this.light();
  }

  async refresh() {
    this.round += 1;
    this.server?.drop();
    const round = this.round;
    this.root.dataset.round = round;
    const ready = [this.fetch({ slot: "tokens", question: () => ({ view: "tokens" }) }), this.fetch(this.panels[0])];
    await Promise.all(ready);
    if (round !== this.round) return;
    const hasFailed = this.errors.next || this.errors.tokens;
    for (const panel of this.inOrder(this.panels.slice(1))) {
      if (hasFailed) this.empty(panel);
      else this.fetch(panel);
    }
  }

  // What can be seen comes first, and what takes long comes last.
  inOrder(panels) {
    const cost = (panel) => (panel.node.getBoundingClientRect().top > innerHeight ? 10 : 0) + (panel.cost ?? 0);
    return [...panels].sort((a, b) => cost(a) - cost(b));
  }

  // A view of which there is nothing to show.
  empty(panel) {
    delete this.answers[panel.slot];
    delete this.errors[panel.slot];
    this.paintPanel(panel);
    panel.node.dataset.answered = this.round;
  }

  // What a panel asks in a state; null if there is nothing to ask.
  questionOf(panel, state) {
    const asked = panel.question(state), { slot } = panel;
    const next = this.answer("next");
    const answers = slot === "next" || slot === "tokens" || !next ? {} : { target: next.target.id, versus: next.versus.id };
    return asked && { prompt: state.prompt, other: state.other, edits: state.edits, pos: state.pos ?? -1, ...this.images.question(state), ...answers, ...asked };
  }

  async fetch(panel) {
    const question = this.questionOf(panel, this.state), { slot } = panel;
    if (!question || !(this.isLive || this.kept.has(question))) return this.empty(panel);
    const round = this.round, ticket = {};
    this.busy.set(slot, ticket);
    const slow = setTimeout(() => this.showBusy(), 300);
    try {
      const data = this.isLive ? await this.server.ask(slot, round, question) : this.kept.get(question);
      if (this.isLive) this.kept.put(question, data);
      if (this.busy.get(slot) !== ticket || round !== this.round) return;
      this.answers[slot] = data;
      delete this.errors[slot];
    } catch (error) {
      if (error.cancelled || this.busy.get(slot) !== ticket || round !== this.round) return;
      this.errors[slot] = error.message;
    } finally {
      clearTimeout(slow);
      if (this.busy.get(slot) === ticket) { this.busy.delete(slot); this.showBusy(); }
    }
    this.panels.filter((each) => each.uses?.includes(slot)).forEach((each) => this.paintPanel(each));
    if (slot === "tokens") return this.paintStrip();
    this.paintPanel(panel);
    panel.node.dataset.answered = round;
    if (slot === "next") this.paintAnswers();
  }

  showBusy() {
    const waiting = [...this.busy.keys()].filter((slot) => slot !== "tokens");
    for (const panel of this.panels) panel.node.classList.toggle("busy", waiting.includes(panel.slot));
    if (!waiting.length) return this.tell(this.errors.tokens ?? "");
    this.status.replaceChildren(el("progress", {}), ` ${waiting.join(", ")} `, el("button", { class: "small", onclick: () => this.stop() }, "Cancel"));
  }

  // The views that were waiting stay dim: they are of the state before.
  stop() {
    this.round += 1;
    this.busy.clear();
    this.server.drop();
    this.server.cancel();
    this.tell("canceled: press Run to ask again");
  }

  tell(message) {
    this.status.replaceChildren(message);
  }

  paint() {
    setTheme(this.root, this.state.theme || (this.home.isDark() ? "dark" : "light"));
    this.paintStrip();
    this.paintAnswers();
    this.panels.forEach((panel) => this.paintPanel(panel));
    this.edits.draw();
    this.guide?.draw();
    this.light();
  }

  paintAnswers() {
    const next = this.answer("next");
    if (!next) return;
    const typed = (value) => (this.errors.next && typeof value === "string" ? value : null);
    this.target.value = typed(this.state.target) ?? next.target.text;
    this.versus.value = typed(this.state.versus) ?? next.versus.text;
  }

  paintPanel(panel) {
    const before = panel.grid;
    this.painting = panel.slot;
    this.watchers.delete(panel.slot);
    redraw(panel.node, () => this.fillPanel(panel, before));
  }

  fillPanel(panel, before) {
    const { slot } = panel, data = panel.source ? panel.source() : this.answers[slot], failed = this.errors[slot];
    panel.grid = null;
    const controls = panel.controls?.(this.state) ?? [];
    const isFixed = !this.isLive && !this.kept.hasChoice(this.questionOf(panel, this.state));
    if (isFixed) controls.forEach((node) => node?.querySelectorAll("input:not([data-local]), select:not([data-local])").forEach((input) => { input.disabled = true; }));
    panel.node.replaceChildren(
      el("h2", {}, panel.title), el("p", { class: "hint" }, panel.hint(this.state)), ...(controls.length ? [el("div", { class: "controls" }, controls)] : []));
    if (failed) return panel.node.append(el("p", { class: "error", role: "alert" }, failed));
    if (!data) return panel.node.append(el("p", { class: "hint" }, panel.empty ?? (this.isLive ? "" : "not part of this saved page")));
    try {
      for (const part of panel.draw(data, this.state)) {
        if (!part) continue;
        panel.node.append(part instanceof Node ? part : part.node);
        if (part instanceof Grid) panel.grid = part;
        if (!(part instanceof Node)) part.start(before);
      }
    } catch (error) {
      panel.node.append(el("p", { class: "error", role: "alert" }, `this view cannot be drawn: ${error.message}`));
    }
    for (const note of data.notes ?? []) panel.node.append(el("p", { class: "note" }, note));
  }

  // The tokens of the first prompt, and those of the second under the ones they are aligned with.
  paintStrip() {
    redraw(this.strip, () => this.fillStrip());
  }

  fillStrip() {
    const data = this.tokens;
    if (!data) return this.strip.replaceChildren();
    const pairs = data.aligned.length ? data.aligned : data.tokens.ids.map((_, at) => [at, null]);
    const chip = (list, at, isFirst) => (at === null ? el("span", { class: "chip none" }, " ") : el("button", {
      class: "chip", "data-pos": isFirst ? at : null, disabled: !isFirst || !this.isLive, "aria-pressed": isFirst ? String(at === this.position()) : null,
      onmouseenter: () => this.link.hover({ pos: at }), onmouseleave: () => this.link.hover(null), onfocus: () => this.link.hover({ pos: at }), onblur: () => this.link.hover(null),
      onclick: () => this.change({ pos: at, target: null, versus: null, from: null }),
    }, imageAt(list, at) === undefined ? shown(list.texts[at]) : tokenLabels(list)[at]));
    const pair = ([one, two]) => el("span", {
      class: data.aligned.length && (one === null || two === null || data.tokens.ids[one] !== data.other.ids[two]) ? "pair differs" : "pair",
    }, chip(data.tokens, one, true), data.aligned.length ? chip(data.other, two, false) : null);
    this.strip.replaceChildren(...foldedPairs(this, pairs).map((group) => (group.length > 1 ? imageChip(this, group) : pair(group[0]))));
    if (this.state.unfolded && data.tokens.images?.length) this.strip.append(unfoldButton(this, "fold images", "show each image as one token"));
  }

  light() {
    this.panels.forEach((panel) => panel.grid?.light());
    for (const act of this.watchers.values()) act();
    for (const node of this.strip.querySelectorAll("[data-pos]")) {
      const hovered = this.link.hovered, wanted = new Set([hovered?.pos ?? [], hovered?.src ?? []].flat());
      node.classList.toggle("lit", [JSON.parse(node.dataset.pos)].flat().some((at) => wanted.has(at)));
    }
  }

  async copy() {
    const text = this.answer("next")?.script ?? "";
    try {
      await navigator.clipboard.writeText(text);
      this.tell("copied");
    } catch {
      const box = el("textarea", { class: "script", rows: 14, "aria-label": "Python", readonly: true, value: text });
      const dialog = el("dialog", {}, box, el("button", { onclick: () => dialog.remove() }, "Close"));
      this.root.append(dialog);
      dialog.showModal();
      box.select();
    }
  }

  async save() {
    try {
      download(await this.server.page(this.state, this.kept.pairs()), "explorer.html");
      this.tell("saved explorer.html");
    } catch (error) {
      this.tell(error.message);
    }
  }
}

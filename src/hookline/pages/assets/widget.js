// The page as a widget in a notebook: questions are messages of the widget, and its state is kept there.

const MOST_SAVED = 60; // answers

// Asks the kernel; the same methods as those of Server.
class Messages {
  constructor(model) {
    Object.assign(this, { model, tab: newTab(), last: 0, waiting: new Map() });
    this.receive = ({ id, tab, reply }) => {
      if (tab !== this.tab) return; // another view of the same widget
      this.waiting.get(id)?.resolve(reply);
      this.waiting.delete(id);
    };
    model.on("msg:custom", this.receive);
  }

  async post(path, body) {
    this.last += 1;
    const promise = new Promise((resolve, reject) => { this.waiting.set(this.last, { resolve, reject }); });
    this.model.send({ id: this.last, tab: this.tab, path, body: { tab: this.tab, ...body } });
    return promise;
  }

  drop() {
    for (const { reject } of this.waiting.values()) reject(Object.assign(new Error(), { cancelled: true }));
    this.waiting.clear();
  }

  // Answers about the same prompts are saved with the notebook. They are added to what the page has of the widget's
  // state, and not set, which would send them to the kernel.
  async ask(slot, state, question) {
    const data = checked(await this.post("ask", { slot, state, question })), saved = this.model.get("answers");
    const others = saved.filter(([old]) => old.prompt === question.prompt && old.other === question.other && keyOf(old) !== keyOf(question));
    saved.splice(0, saved.length, ...others.slice(1 - MOST_SAVED), [question, data]);
    return data;
  }

  cancel() {
    return this.post("cancel", {}).catch(() => {});
  }

  // The kernel has the answers already.
  async page(state) {
    return new Blob([checked(await this.post("save", { state })).page], { type: "text/html" });
  }

  close() {
    this.model.off("msg:custom", this.receive);
  }
}

// A cell of a notebook: the state is a trait of the widget, and the theme is the notebook's.
class Cell {
  constructor(model, root) {
    Object.assign(this, { model, keys: root, kept: "" });
  }

  transport() {
    return new Messages(this.model);
  }

  read(given) {
    this.kept = JSON.stringify(this.model.get("state"));
    return stateOf(this.model.get("state"), given);
  }

  keep(state) {
    this.kept = JSON.stringify(state);
    this.model.set("state", state);
    this.model.save_changes();
  }

  watch(act, { signal }) {
    const changed = () => { if (JSON.stringify(this.model.get("state")) !== this.kept) act(); };
    this.model.on("change:state", changed);
    signal.addEventListener("abort", () => this.model.off("change:state", changed));
  }

  isDark() {
    const { body, documentElement: top } = document;
    if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false"; // JupyterLab
    if (body.dataset.vscodeThemeKind) return /dark|^vscode-high-contrast$/.test(body.dataset.vscodeThemeKind);
    if (top.hasAttribute("theme")) return top.getAttribute("theme") === "dark"; // Colab
    return matchMedia("(prefers-color-scheme: dark)").matches;
  }

  watchTheme(act, { signal }) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", act, { signal });
    const seen = new MutationObserver(act);
    const attributeFilter = ["data-jp-theme-light", "data-vscode-theme-kind", "theme"];
    for (const node of [document.body, document.documentElement]) seen.observe(node, { attributeFilter });
    signal.addEventListener("abort", () => seen.disconnect());
  }
}

// The views of the widget share its state. With the notebook, the answers are saved: where there is no kernel, they are
// shown as in a saved page until one replies.
function showIn(style) {
  return { render: ({ model, el: place }) => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(`:host { all: initial; display: block } ${style}`);
    const root = el("div", { class: "widget", "data-theme": "light", "data-lm-suppress-shortcuts": "true" });
    root.style.height = `${model.get("height")}px`; // of its own: outputs that fit their content would grow without end
    const host = el("div", { "data-lm-suppress-shortcuts": "true" });
    const shadow = host.attachShadow({ mode: "open" });
    shadow.adoptedStyleSheets = [sheet];
    shadow.append(root);
    place.append(host);
    // Keys are for the page only: typing must not run commands of the notebook.
    for (const kind of ["keydown", "keyup", "keypress"]) root.addEventListener(kind, (event) => event.stopPropagation());
    const saved = model.get("answers");
    let app = null;
    const begin = (live, answers) => {
      app?.end();
      app = new App(root, { live, model: model.get("about"), steps: [{ state: {} }], answers }, new Cell(model, root));
      app.start();
    };
    if (saved.length) {
      begin(false, [...saved]);
      const greeting = new Messages(model);
      greeting.post("hello", {}).then(() => begin(true, []), () => {}).finally(() => greeting.close());
    } else begin(true, []);
    return () => { app.end(); app.server?.close(); host.remove(); };
  } };
}

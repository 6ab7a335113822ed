// Edits: what is selected, what can be done to it, and the list of what is done.

const NAMES = { zero: "zero", scale: "scale", set: "set", mean: "replace with the prompt’s mean", patch: "patch", steer: "steer" };
const isGiven = (value) => value !== undefined && value !== null;

function said(edit) {
  const parts = ["head", "neuron", "feature"].filter((part) => isGiven(edit[part])).map((part) => `${part} ${edit[part]}`);
  const where = [edit.sae || edit.point, ...parts, isGiven(edit.pos) ? positionsSaid(edit.pos) : "all positions"];
  const what = edit.kind === "steer" ? `steer from “${edit.negative}” to “${edit.positive}”`
    : edit.kind === "zero" && isGiven(edit.feature) ? "disable" : NAMES[edit.kind];
  return `${what}: ${where.join(", ")}`;
}

class EditList {
  constructor(app) {
    this.app = app;
    this.here = true; // whether an edit is made at the selected position only
    this.past = [];
    this.node = el("section", { class: "panel edits", "aria-label": "Edits" });
  }

  // The list before is kept for undo, unless the page cannot show the new one.
  put(edits) {
    const before = this.app.state.edits;
    this.past.push(before);
    this.app.change({ edits });
    if (this.app.state.edits === before) this.past.pop();
  }

  undo() {
    if (this.past.length) this.app.change({ edits: this.past.pop() });
  }

  add(kind, more = {}, selected = this.app.link.selected) {
    if (!selected) return;
    const edit = { kind, point: selected.point, on: true, ...more };
    const parts = kind === "steer" ? [] : ["head", "neuron", "sae", "feature"];
    for (const part of parts) if (selected[part] !== undefined) edit[part] = selected[part];
    if (selected.pos !== undefined && this.here) edit.pos = selected.pos;
    this.put([...this.app.state.edits, edit]);
  }

  // An edit by the number in a field.
  addBy(field, kind, more = {}, ...place) {
    if (field.value === "") this.app.tell(`write a number for “${NAMES[kind]}”`);
    else this.add(kind, { ...more, amount: Number(field.value) }, ...place);
  }

  set(at, values) {
    this.put(this.app.state.edits.map((edit, nth) => (nth === at ? { ...edit, ...values } : edit)));
  }

  move(at, by) {
    const edits = [...this.app.state.edits];
    [edits[at], edits[at + by]] = [edits[at + by], edits[at]];
    this.put(edits);
  }

  draw() {
    redraw(this.node, () => this.fill());
  }

  fill() {
    const { edits } = this.app.state;
    const isLive = this.app.isLive;
    this.node.replaceChildren(
      el("h2", {}, "Edits"),
      this.selection(),
      edits.length ? el("ol", {}, edits.map((edit, at) => this.row(edit, at))) : "",
      el("div", { class: "controls" },
        isLive || this.past.length ? el("button", { onclick: () => this.undo(), disabled: !this.past.length, title: "Ctrl+Z" }, "Undo") : null,
        isLive ? el("button", { onclick: () => this.put([]), disabled: !edits.length }, "Remove all") : null,
        isLive || edits.length ? el("button", { onclick: () => this.save(), disabled: !edits.length }, "Save list") : null,
        isLive ? el("label", { class: "button" }, "Load list", el("input", { type: "file", accept: ".json", class: "file", onchange: (event) => this.load(event.target.files[0]) })) : null),
    );
  }

  selection() {
    const { selected } = this.app.link;
    if (!this.app.isLive) return el("p", { class: "hint" }, `This page was saved${this.app.state.edits.length ? ": its edits can be switched off and on" : ""}. To try edits of your own, run hookline explore ${this.app.model.model}.`);
    if (!selected) return el("p", { class: "hint" }, "Click a head, a cell, a bar or a neuron in any view, then choose what to do to it.");
    if (selected.feature !== undefined) return featureActions(this, selected);
    const amount = el("input", { type: "number", step: "any", value: 0.5, "aria-label": "factor" });
    const canSteer = /^blocks\.\d+\.hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_out)$/.test(selected.point);
    return el("div", { class: "selection" },
      el("p", {}, el("code", {}, selected.point), selected.head === undefined ? "" : ` head ${selected.head}`,
        selected.neuron === undefined ? "" : ` neuron ${selected.neuron}`),
      this.neighbors(selected),
      this.whereBox(selected),
      el("div", { class: "controls" },
        el("button", { class: "do", onclick: () => this.add("zero") }, "Zero"),
        el("button", { class: "do", onclick: () => this.add("mean"), title: "replace it with its mean over the positions of the prompt" }, "Prompt mean"),
        el("button", { class: "do", onclick: () => this.add("patch"), disabled: !this.app.state.other, title: "from the second prompt" }, "Patch"),
        el("button", { class: "do", onclick: () => this.addBy(amount, "scale") }, "Scale by"), amount),
      canSteer ? this.steering() : null);
  }

  // Whether an edit is made at the position of what is selected, or at all.
  whereBox({ point, pos }) {
    if (pos === undefined) return null;
    const box = el("input", { type: "checkbox", checked: this.here, onchange: (event) => { this.here = event.target.checked; } });
    return el("label", {}, box, ` only at ${positionsSaid(pos)}`, Array.isArray(pos) || isTower(point) ? "" : `, “${words(this.app)[pos] ?? ""}”`);
  }

  // The same layer as a whole: its attention, its MLP, the stream around them.
  neighbors(selected) {
    const kinds = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"];
    const names = kinds.map((kind) => `blocks.${selected.layer}.hook_${kind}`).filter((name) => name in this.app.model.points);
    if (selected.layer === undefined || !names.length) return null;
    const options = Object.fromEntries([["", "…"], ...[selected.point, ...names].map((name) => [name, name])]);
    return chooser("or all of", options, "", (point) => {
      const { layer, pos } = selected;
      this.app.select(pos === undefined ? { point, layer } : { point, layer, pos });
    });
  }

  steering() {
    const to = el("input", { placeholder: "toward, such as “ Mary”", "aria-label": "prompt to steer toward" });
    const from = el("input", { placeholder: "away from", "aria-label": "prompt to steer away from" });
    const amount = el("input", { type: "number", step: "any", value: 1, "aria-label": "coefficient" });
    const make = () => {
      if (!to.value || !from.value) return this.app.tell("write both prompts: one to steer toward, and one to steer away from");
      return this.addBy(amount, "steer", { positive: to.value, negative: from.value });
    };
    return el("div", { class: "controls" }, to, from, el("button", { class: "do", onclick: make }, "Steer by"), amount);
  }

  row(edit, at) {
    const isLive = this.app.isLive, last = this.app.state.edits.length - 1;
    const hasAmount = ["scale", "set", "steer"].includes(edit.kind);
    const button = (text, label, act, off) => el("button", { class: "small", title: label, "aria-label": `${label}: ${said(edit)}`, onclick: act, disabled: off }, text);
    return el("li", { class: edit.on ? null : "off" },
      el("label", {}, el("input", { type: "checkbox", checked: edit.on, onchange: (event) => this.set(at, { on: event.target.checked }) }), ` ${said(edit)}`),
      hasAmount ? el("input", { type: "number", step: "any", value: edit.amount ?? 1, disabled: !isLive, "aria-label": "amount", onchange: (event) => this.set(at, { amount: Number(event.target.value) || 0 }) }) : null,
      !isLive ? null : el("span", { class: "buttons" }, button("↑", "earlier", () => this.move(at, -1), at === 0), button("↓", "later", () => this.move(at, 1), at === last),
        button("×", "remove", () => this.put(this.app.state.edits.filter((_, nth) => nth !== at)))));
  }

  save() {
    download(new Blob([JSON.stringify(this.app.state.edits, null, 1)], { type: "application/json" }), "edits.json");
  }

  async load(file) {
    try {
      const found = JSON.parse(await file.text());
      if (!Array.isArray(found) || !found.every((edit) => edit && typeof edit.point === "string" && edit.kind in NAMES)) throw new Error();
      this.put(found.map((edit) => ({ on: true, ...edit })));
    } catch {
      this.app.tell(`${file.name} is not a list of edits saved by the explorer`);
    }
  }
}

function download(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

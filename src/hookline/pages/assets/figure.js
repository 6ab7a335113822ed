// A figure: one or more panels, each a heat map, curves, bars, attention over a text, or a text with colored tokens.

const INKS = {
  light: ["#3e34a8", "#b34e00", "#00705a", "#a3195b", "#1c6f93", "#6e6000", "#555e6e", "#7d3fb0"],
  dark: ["#a69cff", "#ff9636", "#3fcfa8", "#ff8dbb", "#6cc7ee", "#d8c84a", "#b4bccb", "#d19cff"],
};
const WITHIN = "within noise (95 %)";
const between = (panel, ...at) => (panel.low ? ` (${number(tensor(panel.low).at(...at), 4)} to ${number(tensor(panel.high).at(...at), 4)})` : "");
const title = (text) => [text ? el("h2", {}, text) : null];
const caption = (text) => [text ? el("p", { class: "hint" }, text) : null];
const named = (axis, label) => (typeof label === "number" ? `${axis} ${label}` : shown(label));
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

class Figure {
  constructor(root, given) {
    Object.assign(this, { root, given, grids: [], watchers: [] });
    this.link = { hovered: null, selected: null, hover: (place) => { this.link.hovered = place; this.light(); }, watch: (act) => this.watchers.push(act) };
    this.chosen = given.panels.map(() => 0); // of several heads or rows of values, which one is shown
  }

  start() {
    paintNowAndLater(this);
  }

  paint() {
    setTheme(this.root, this.given.theme || (this.dark.matches ? "dark" : "light"));
    [this.grids, this.watchers] = [[], []];
    const panels = this.given.panels.map((panel) => el("section", { class: panel.narrow ? "panel" : "panel wide", "aria-label": panel.title }));
    this.root.replaceChildren(el("main", {}, this.given.title ? el("h1", { class: "wide" }, this.given.title) : null, panels));
    panels.forEach((node, at) => this.fill(node, at));
  }

  fill(node, at) {
    const panel = this.given.panels[at];
    const parts = [...title(panel.title), ...caption(panel.caption), ...DRAWN[panel.kind](panel, this, at)];
    node.replaceChildren();
    for (const part of parts.filter(Boolean)) {
      node.append(part instanceof Grid ? part.node : part);
      if (part instanceof Grid) { this.grids.push(part); part.start(); }
    }
  }

  choose(at, which) {
    this.chosen[at] = which;
    redraw(this.root, () => this.paint());
  }

  // Buttons for the heads, or whatever there are several of.
  chips(panel, at) {
    if (panel.names.length < 2) return null;
    return el("div", { class: "strip" }, panel.names.map((name, nth) =>
      el("button", { class: "chip", "aria-pressed": String(nth === this.chosen[at]), onclick: () => this.choose(at, nth) }, name)));
  }

  light() {
    this.grids.forEach((grid) => grid.light());
    this.watchers.forEach((act) => act());
  }
}

function heatPanel(panel, figure) {
  const { names, rows, columns, center, scale, most } = panel;
  const noise = panel.noise ? tensor(panel.noise) : null, isNoise = (row, column) => noise?.at(row, column) > 0;
  const values = tensor(panel.values), isSmall = rows.length <= 40 && columns.length <= 40;
  return [new Grid(`${panel.title || figure.given.title}: ${names.join(" by ")}`, {
    rows: rows.map((label) => named(names[0], label)), columns: columns.map((label) => (typeof label === "string" ? shown(label) : label)), scale, most,
    value: (row, column) => values.at(row, column) - center,
    text: isSmall ? (row, column) => (Number.isNaN(values.at(row, column)) ? "" : brief(values.at(row, column), most)) : null,
    lines: (row, column) => [el("b", {}, `${named(names[0], rows[row])}, ${named(names[1], columns[column])}`), number(values.at(row, column), 6), ...(isNoise(row, column) ? [WITHIN] : [])],
    hatched: noise ? isNoise : null,
    axes: [[names[0], upTo(rows.length)], [names[1], upTo(columns.length)]],
  }, figure.link), legend(most, { center, scale, low: scale === "one" ? 0 : -most }), ...caption(noise ? `hatched: ${WITHIN}` : "")];
}

function barPanel(panel, figure) {
  const values = tensor(panel.values).values, { labels, axis, origin } = panel;
  const shares = Array.from(values, (value) => value - origin);
  const texts = labels.map((label) => named(axis, label));
  const written = values.every(Number.isInteger) ? String : number; // counts
  const ends = panel.low ? [panel.low, panel.high].map((bound) => Array.from(tensor(bound).values, (value) => value - origin)) : [];
  const most = largest([...shares, ...ends.flat()]), longest = Math.max(...texts.map((text) => Math.min(26, text.length)));
  const rows = texts.map((text, at) => ({
    label: cut(text, 26), place: { [axis]: at },
    values: [{ value: Number.isNaN(shares[at]) ? 0 : shares[at], kind: shares[at] < 0 ? "cold" : "warm", text: written(values[at], 4), ends: ends.map((bound) => bound[at]) }],
  }));
  const node = bars(rows, figure.link, { most, signed: [...shares, ...ends.flat()].some((share) => share < 0), labelWidth: Math.max(48, 7 * longest + 12) });
  node.querySelectorAll(".row").forEach((row, at) => {
    row.addEventListener("mousemove", (event) => tip.show([el("b", {}, texts[at]), written(values[at], 6) + between(panel, at)], event.clientX, event.clientY, row));
    row.addEventListener("mouseleave", () => tip.hide());
  });
  return [node, ...caption([...(origin ? [`from ${number(origin, 6)}`] : []), ...marked(panel)].join(", "))];
}

const marked = ({ marks }) => Object.entries(marks).map(([name, value]) => `${name} ${number(value, 6)}`);

function ticks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? rough;
  const first = Math.ceil(low / step);
  return upTo(Math.floor(high / step + 1e-9) - first + 1).map((at) => (first + at) * step);
}

function curvePanel(panel, figure) {
  const curves = new Curves(panel, figure);
  const keys = panel.series.map((name, nth) => el("span", {}, svg("svg", { viewBox: "0 0 14 8", width: 14, height: 8 }, svg("rect", { y: 2, width: 14, height: 4, fill: curves.ink(nth) })), ` ${name}`));
  return [curves.node, panel.series.length > 1 ? el("div", { class: "legend keys" }, keys) : null];
}

// Curves over one axis, with a tip for all of them where the pointer is.
class Curves {
  constructor(panel, figure) {
    Object.assign(this, { panel, figure, at: 0, wide: 640, high: 250, left: 56, up: 8 });
    this.values = tensor(panel.values);
    this.bounds = panel.low ? [tensor(panel.low), tensor(panel.high)] : null;
    const found = [...this.values.values, ...(this.bounds ?? []).flatMap((bound) => [...bound.values]), ...Object.values(panel.marks), 0].filter(Number.isFinite);
    [this.low, this.most] = [Math.min(...found), Math.max(...found)];
    if (this.low === this.most) this.most = this.low + 1;
    this.places = panel.places ?? upTo(panel.labels.length);
    const isWords = panel.labels.some((label) => typeof label === "string" && label.length > 4);
    this.down = isWords ? 74 : 34;
    this.isWords = isWords;
    this.guide = svg("line", { y1: this.up, y2: this.high - this.down, class: "pointer", visibility: "hidden" });
    this.node = svg("svg", {
      viewBox: `0 0 ${this.wide} ${this.high}`, class: "bars curves", tabindex: 0, role: "application",
      "aria-label": `${panel.title || figure.given.title}: ${panel.series.join(", ")} by ${panel.axis}. Arrow keys move.`,
      onmousemove: (event) => this.point(event), onmouseleave: () => this.leave(), onkeydown: (event) => this.key(event), onblur: () => this.leave(),
    }, this.scales(), this.lines(), this.guide);
  }

  x(at) {
    const [first, last] = [Math.min(...this.places), Math.max(...this.places)];
    const room = this.wide - this.left - 90;
    return this.left + 8 + (last === first ? room / 2 : ((this.places[at] - first) / (last - first)) * room);
  }

  y(value) {
    return this.up + ((this.most - value) / (this.most - this.low)) * (this.high - this.down - this.up);
  }

  scales() {
    const right = this.wide - 82, foot = this.high - this.down, { labels, marks, axis } = this.panel;
    const across = ticks(this.low, this.most).map((value) => [
      svg("line", { x1: this.left, x2: right, y1: this.y(value), y2: this.y(value), class: "zero" }),
      svg("text", { x: this.left - 6, y: this.y(value) + 4, class: "value", "text-anchor": "end" }, String(Number(value.toPrecision(4)))),
    ]);
    const every = Math.ceil((labels.length * (this.isWords ? 16 : 26)) / (right - this.left));
    const below = labels.map((label, at) => (at % every ? null : svg("text", {
      class: "value", "text-anchor": this.isWords ? "end" : "middle",
      transform: `translate(${this.x(at) + (this.isWords ? 4 : 0)} ${foot + 16})${this.isWords ? " rotate(-40)" : ""}`,
    }, cut(shown(String(label)), 14))));
    const levels = Object.entries(marks).map(([name, value], at) => [
      svg("line", { x1: this.left, x2: right, y1: this.y(value), y2: this.y(value), class: "mark", "stroke-dasharray": at ? "2 3" : "6 4" }),
      svg("text", { x: right + 4, y: this.y(value) + 4, class: "value" }, name),
    ]);
    return [...across.flat(), ...below, ...levels.flat(), svg("text", { x: (this.left + right) / 2, y: this.high - 4, class: "value", "text-anchor": "middle" }, axis)];
  }

  ink(nth) {
    const inks = INKS[isDark() ? "dark" : "light"];
    return inks[nth % inks.length];
  }

  lines() {
    const { series, labels } = this.panel;
    return [...this.bands(), ...series.map((name, nth) => {
      const points = upTo(labels.length).filter((at) => Number.isFinite(this.values.at(nth, at)));
      const path = points.map((at) => `${this.x(at).toFixed(1)},${this.y(this.values.at(nth, at)).toFixed(1)}`);
      const dots = labels.length > 60 ? [] : points.map((at) => svg("circle", { cx: this.x(at), cy: this.y(this.values.at(nth, at)), r: 3, fill: this.ink(nth) }));
      return [svg("polyline", { points: path.join(" "), fill: "none", stroke: this.ink(nth), "stroke-width": 1.8, "stroke-dasharray": nth < 8 ? null : "5 3" }), ...dots];
    }).flat()];
  }

  // The intervals of all curves, below the curves.
  bands() {
    if (!this.bounds) return [];
    const edge = (bound, nth, at) => `${this.x(at).toFixed(1)},${this.y(bound.at(nth, at)).toFixed(1)}`;
    return this.panel.series.map((name, nth) => {
      const at = upTo(this.places.length).filter((place) => this.bounds.every((bound) => Number.isFinite(bound.at(nth, place))));
      const [low, high] = this.bounds.map((bound) => at.map((place) => edge(bound, nth, place)));
      return svg("polygon", { points: [...low, ...high.reverse()].join(" "), fill: this.ink(nth), opacity: 0.18 });
    });
  }

  point(event) {
    const box = this.node.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.wide;
    const nearest = upTo(this.places.length).reduce((best, at) => (Math.abs(this.x(at) - x) < Math.abs(this.x(best) - x) ? at : best), 0);
    this.show(nearest, event.clientX, event.clientY);
  }

  show(at, x, y) {
    this.at = at;
    for (const end of ["x1", "x2"]) this.guide.setAttribute(end, this.x(at));
    this.guide.setAttribute("visibility", "visible");
    const { series, labels, axis } = this.panel;
    const line = (name, nth) => el("div", { class: "pair" }, el("span", {}, name), number(this.values.at(nth, at), 6) + between(this.panel, nth, at));
    tip.show([el("b", {}, named(axis, labels[at])), ...series.map(line).slice(0, 24)], x, y, this.node);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(this.places.length - 1, this.at + step));
    const box = this.node.getBoundingClientRect();
    this.show(at, box.left + (this.x(at) / this.wide) * box.width, box.top + box.height / 3);
  }

  leave() {
    this.guide.setAttribute("visibility", "hidden");
    tip.hide();
  }
}

// A token of a text, colored by a share of the largest value.
function paintToken(node, share, scale) {
  const { back, ink } = cellColors(share, scale);
  Object.assign(node.style, { background: back, color: ink });
}

function attentionFigure(panel, figure, at) {
  const [, rows, columns] = tensor(panel.values).shape, flat = tensor(panel.values).values, start = figure.chosen[at] * rows * columns;
  const value = (row, column) => flat[start + row * columns + column];
  const texts = panel.tokens.map((text) => shown(text, true));
  let pinned = null;
  const chips = panel.tokens.map((text, pos) => el("button", {
    class: "chip", "data-pos": pos, onmouseenter: () => figure.link.hover({ pos }), onmouseleave: () => figure.link.hover(null),
    onfocus: () => figure.link.hover({ pos }), onblur: () => figure.link.hover(null), onclick: () => { pinned = pinned === pos ? null : pos; paint(); },
  }, shown(text)));
  const paint = () => {
    const row = figure.link.hovered?.pos ?? pinned;
    chips.forEach((chip, pos) => {
      paintToken(chip, row === null ? 0 : value(row, pos), "one");
      chip.title = row === null ? "" : percent(value(row, pos));
      chip.classList.toggle("lit", pos === row);
      chip.setAttribute("aria-pressed", String(pos === pinned));
    });
  };
  figure.link.watch(paint);
  paint();
  return [figure.chips(panel, at), el("div", { class: "strip tokens" }, chips),
    new Grid(`${panel.names[figure.chosen[at]]}: queries by keys`, {
      rows: texts, columns: texts, scale: "one", most: 1, value,
      lines: (row, column) => [el("b", {}, panel.names[figure.chosen[at]]), `“${texts[row]}” looks at “${texts[column]}”: ${number(value(row, column), 4)}`],
      axes: [["pos", upTo(rows)], ["src", upTo(columns)]],
    }, figure.link)];
}

function tokenFigure(panel, figure, at) {
  const values = tensor(panel.values), row = figure.chosen[at];
  const [most, scale] = [panel.most[row], panel.scales[row]];
  const show = (pos) => (event) => {
    const box = event.target.getBoundingClientRect();
    tip.show([el("b", {}, `${pos}: ${shown(panel.tokens[pos])}`), ...panel.names.map((name, nth) => `${name ? `${name}: ` : ""}${number(values.at(nth, pos), 6)}`)], box.left, box.bottom - 12, event.target);
  };
  const spans = panel.tokens.map((text, pos) => {
    const span = el("span", { "data-pos": pos, tabindex: 0, "aria-label": `${text}: ${number(values.at(row, pos), 6)}`, onmouseenter: show(pos), onfocus: show(pos), onmouseleave: () => tip.hide(), onblur: () => tip.hide() }, text);
    if (Number.isFinite(values.at(row, pos))) paintToken(span, values.at(row, pos) / most, scale);
    return span;
  });
  return [figure.chips(panel, at), el("p", { class: "text colored" }, spans), legend(most, { scale, low: scale === "one" ? 0 : -most })];
}

const DRAWN = { heat: heatPanel, bars: barPanel, curves: curvePanel, attention: attentionFigure, tokens: tokenFigure };
const inside = JSON.parse(document.getElementById("data").textContent);
new Figure(document.getElementById("explorer"), inside).start();

// Drawing: colors, bars as SVG, and the tip that follows the pointer. Grids are in grid.js.

// Orange and blue differ for every common kind of color blindness; zero is the color of the paper.
const COLORS = {
  light: { paper: [247, 246, 242], ink: "#1e2430", faint: "#5a6274", warm: [179, 78, 0], cold: [20, 82, 163], one: [62, 52, 168], heat: [214, 92, 0] },
  dark: { paper: [38, 43, 54], ink: "#e8eaf0", faint: "#a2aabb", warm: [255, 150, 54], cold: [92, 168, 255], one: [166, 156, 255], heat: [255, 140, 40] },
};

// Paint a page, and paint it again when the system's theme or the width changes.
function paintNowAndLater(page) {
  page.dark = matchMedia("(prefers-color-scheme: dark)");
  page.paint();
  page.dark.addEventListener("change", () => page.paint());
  let room = page.root.clientWidth;
  new ResizeObserver(() => {
    if (page.root.clientWidth === room) return;
    room = page.root.clientWidth;
    page.paint();
  }).observe(page.root);
}

let theme = "light";
const isDark = () => theme === "dark";
function setTheme(root, name) {
  root.dataset.theme = theme = name;
}
const palette = () => COLORS[isDark() ? "dark" : "light"];

// -1 to 1 around zero, or 0 to 1 with the scale "one": red, green and blue.
function shade(share, scale) {
  const colors = palette();
  if (!Number.isFinite(share)) return null;
  const full = scale === "one" ? colors.one : share < 0 ? colors.cold : colors.warm;
  const part = Math.min(1, scale === "one" ? Math.max(0, share) : Math.abs(share)) ** 0.8;
  return colors.paper.map((from, at) => Math.round(from + (full[at] - from) * part));
}

// How light a color is, from 0 to 1, as WCAG defines it.
const luminance = (rgb) => rgb.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);

// The color of a cell, and black or white, whichever has more contrast on it (4.5 at least): in 512 steps.
const steps = new Map();

function cellColors(share, scale) {
  if (!Number.isFinite(share)) return { back: "transparent", ink: palette().ink };
  const step = Math.round(256 * Math.max(-1, Math.min(1, share))), key = `${isDark()} ${scale} ${step}`;
  if (!steps.has(key)) {
    const rgb = shade(step / 256, scale);
    steps.set(key, { back: `rgb(${rgb.join(" ")})`, ink: luminance(rgb) > 0.179 ? "#000" : "#fff" });
  }
  return steps.get(key);
}

const color = (share, scale) => cellColors(share, scale).back;

// Shown above everything else (as a popover), also where the page is inside something that clips or moves it.
const tip = {
  node: null,
  show(lines, x, y, near) {
    const root = near.closest("[data-theme]");
    if (this.node?.parentNode !== root) {
      this.node?.remove();
      this.node = root.appendChild(el("div", { class: "tip", role: "status", popover: "manual", hidden: true }));
    }
    this.node.replaceChildren(...lines.map((line) =>
      line instanceof Node ? line : el("div", {}, line)));
    if (this.node.hidden) { this.node.hidden = false; this.node.showPopover?.(); }
    const { offsetWidth: wide, offsetHeight: high } = this.node;
    this.node.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - wide - 8))}px`;
    this.node.style.top = `${Math.max(4, y + 18 + high > innerHeight ? y - high - 10 : y + 18)}px`;
  },
  hide() {
    if (!this.node || this.node.hidden) return;
    this.node.hidden = true;
    this.node.hidePopover?.();
  },
};

// Where a label is, or several, as [first, count]; a label may itself be a list, as of the tokens of an image.
function stretches(labels, value) {
  const wanted = new Set([value].flat()), found = [];
  labels.forEach((label, at) => {
    if (!(Array.isArray(label) ? label.some((each) => wanted.has(each)) : wanted.has(label))) return;
    const last = found[found.length - 1];
    if (last && last[0] + last[1] === at) last[1] += 1;
    else found.push([at, 1]);
  });
  return found;
}

// Whether two places have all in common that both name: {layer: 3, head: 4} and {layer: 3, head: 4, pos: 2} do. A head is
// a part of its layer's attention.
function alike(one, other) {
  if (!one || !other) return false;
  [one, other] = [one, other].map((place) => ("head" in place ? { part: "attn", ...place } : place));
  const shared = ["layer", "head", "part", "pos", "src", "feature"].filter((key) => key in one && key in other);
  return shared.length > 0 && shared.every((key) => one[key] === other[key]);
}

const clips = new Map(); // by font, width and text: measuring takes longer than drawing

function clipped(brush, text, room) {
  const key = `${brush.font} ${room.toFixed(0)} ${text}`;
  if (clips.size > 20000) clips.clear();
  if (!clips.has(key)) clips.set(key, clip(brush, text, room));
  return clips.get(key);
}

function clip(brush, text, room) {
  if (brush.measureText(text).width <= room) return text;
  let kept = text;
  while (kept.length > 1 && brush.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}

// Bars as SVG: rows are {label, values: [{value, kind, text}], place, pick}; negative values grow to the left.
function bars(rows, link, { most, signed = false, labelWidth = 88 }) {
  const each = Math.max(...rows.map((row) => row.values.length));
  const high = 13 * each + 7;
  const width = 400, room = width - labelWidth - 58, zero = signed ? labelWidth + room / 2 : labelWidth;
  const unit = (signed ? room / 2 - 44 : room) / most; // negative numbers are written to the left of their bars
  const drawn = rows.map((row, at) => {
    const parts = row.values.map(({ value, kind, text, ends = [] }, nth) => {
      const length = Math.max(1, Math.abs(value) * unit), y = 3 + 13 * nth;
      const end = value < 0 ? zero - length : zero + length;
      const [low, high] = ends.map((side) => zero + side * unit), hasEnds = Number.isFinite(low) && Number.isFinite(high);
      const whisker = hasEnds ? [svg("path", { d: `M${low},${y + 3}v5m0,-2.5H${high}m0,-2.5v5`, class: "whisker", fill: "none" })] : [];
      const [left, right] = hasEnds ? [Math.min(end, low), Math.max(end, high)] : [end, end];
      return [
        svg("rect", { x: value < 0 ? end : zero, y, width: length, height: 11, rx: 2, class: `bar ${kind}` }),
        svg("text", { x: value < 0 ? left - 5 : right + 5, y: y + 9, class: "value", "text-anchor": value < 0 ? "end" : "start" }, text),
        ...whisker,
      ];
    });
    const label = svg("text", { x: labelWidth - 8, y: high / 2 + 3, class: "label", "text-anchor": "end" }, row.label);
    const back = svg("rect", { x: 0, y: 0, width, height: high, class: "back" });
    return svg("g", {
      transform: `translate(0 ${at * high})`, class: "row", tabindex: row.pick ? 0 : null,
      role: row.pick ? "button" : null, "aria-label": `${row.label}: ${row.values.map(({ text }) => text).join(", ")}`,
      onmouseenter: () => link.hover(row.place ?? null), onmouseleave: () => link.hover(null),
      onclick: row.pick ?? null, onkeydown: (event) => event.key === "Enter" && row.pick?.(),
    }, back, label, parts.flat());
  });
  const line = signed ? svg("line", { x1: zero, x2: zero, y1: 0, y2: rows.length * high, class: "zero" }) : null;
  const node = svg("svg", { viewBox: `0 0 ${width} ${rows.length * high}`, class: "bars" }, line, drawn);
  link.watch(() => drawn.forEach((group, at) =>
    group.classList.toggle("lit", Boolean(link.hovered && rows[at].place && alike(rows[at].place, link.hovered)))));
  return rows.length > 24 ? el("div", { class: "scroll" }, node) : node;
}

// A number in a cell: next to larger ones, almost nothing is 0.
const brief = (value, most) => (Math.abs(value) < 0.005 * most ? "0" : number(value, 2));

// The colors of a scale, from one number to another.
function legend(most, { low = -most, scale = "zero", center = 0 } = {}) {
  const strip = upTo(41).map((at) => svg("rect", { x: at * 4, y: 0, width: 4, height: 9, fill: color(scale === "one" ? at / 40 : at / 20 - 1, scale) }));
  return el("div", { class: "legend", "aria-hidden": "true" }, number(center + low, 2), svg("svg", { viewBox: "0 0 164 9", width: 164, height: 9 }, strip), number(center + most, 2));
}

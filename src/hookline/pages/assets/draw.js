// Drawing: colors, grids on a canvas, bars as SVG, and the tip that follows the pointer.

// Orange and blue differ for every common kind of color blindness; zero is the color of the paper.
const COLORS = {
  light: { paper: [247, 246, 242], ink: "#1e2430", faint: "#5a6274", warm: [179, 78, 0], cold: [20, 82, 163], one: [62, 52, 168], on: "#ffffff" },
  dark: { paper: [38, 43, 54], ink: "#e8eaf0", faint: "#a2aabb", warm: [255, 150, 54], cold: [92, 168, 255], one: [166, 156, 255], on: "#10131a" },
};

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

function color(share, scale) {
  const found = shade(share, scale);
  return found ? `rgb(${found.join(" ")})` : "transparent";
}

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

// A grid of cells on a canvas. `spec` has rows, columns (labels), value(row, column), scale, most, and may have
// text(row, column), lines(row, column) for the tip, pick(row, column), and axes: what rows and columns are, such as
// [["layer", [0, 1, 2]], ["head", [0, 1]]], which is how hovering is linked between views.
class Grid {
  constructor(label, spec, link) {
    Object.assign(this, { spec, link, at: null, cursor: [0, 0] });
    this.canvas = el("canvas", {
      tabindex: 0, role: "application", "aria-label": `${label}. Arrow keys move, Enter selects.`,
      onmousemove: (event) => this.point(event), onmouseleave: () => this.leave(),
      onclick: (event) => this.choose(event), onkeydown: (event) => this.key(event), onblur: () => this.leave(),
    });
    this.node = el("div", { class: "scroll" }, this.canvas);
    this.base = document.createElement("canvas");
  }

  // Draw it where it is now in the page, with the cursor of the grid that was there before.
  start(cursor) {
    const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
    const [row, column] = cursor ?? [0, 0];
    this.cursor = [clamp(row, this.spec.rows.length), clamp(column, this.spec.columns.length)];
    this.draw();
  }

  // Sizes depend on the room there is.
  draw() {
    const { rows, columns, text } = this.spec;
    const room = this.node.clientWidth || 480;
    const longest = Math.max(...rows.map((row) => String(row).length));
    this.left = Math.min(96, 14 + 7 * longest);
    const words = columns.some((column) => String(column).length > 3);
    const least = text ? (columns.length <= 60 ? (words ? 44 : 34) : 12) : columns.length > 300 ? 3 : 10;
    this.wide = Math.max(least, Math.min(78, (room - this.left - 8) / columns.length));
    this.high = text ? 24 : rows.length > 120 ? 4 : Math.max(10, Math.min(24, 420 / rows.length));
    this.slanted = words && this.wide < 58;
    this.up = this.slanted ? 58 : 20;
    const width = this.left + this.wide * columns.length + (this.slanted ? 30 : 6);
    const height = this.up + this.high * rows.length + 2;
    const sharp = width * devicePixelRatio > 12000 ? 1 : devicePixelRatio;
    for (const canvas of [this.base, this.canvas]) {
      canvas.width = Math.ceil(width * sharp);
      canvas.height = Math.ceil(height * sharp);
    }
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.sharp = sharp;
    this.paint();
    this.light();
  }

  paint() {
    const { rows, columns, text } = this.spec;
    const brush = this.base.getContext("2d");
    brush.setTransform(this.sharp, 0, 0, this.sharp, 0, 0);
    brush.font = "12px system-ui, sans-serif";
    brush.textBaseline = "middle";
    if (rows.length * columns.length > 20000) this.paintPixels(brush);
    else this.paintCells(brush, text && this.wide >= 30);
    this.labels(brush, palette());
  }

  paintCells(brush, hasText) {
    const { rows, columns, value, text, scale, most } = this.spec;
    const colors = palette(), gap = this.wide > 5 && this.high > 9 ? 1 : 0;
    brush.font = `${this.wide < 44 ? 10.5 : 12}px system-ui, sans-serif`;
    rows.forEach((_, row) => columns.forEach((_, column) => {
      const share = value(row, column) / most;
      brush.fillStyle = color(share, scale);
      const [x, y] = this.corner(row, column);
      brush.fillRect(x, y, this.wide - gap, this.high - gap);
      if (!hasText) return;
      brush.fillStyle = Math.abs(share) > 0.55 ? colors.on : colors.ink;
      brush.textAlign = "center";
      brush.fillText(clipped(brush, text(row, column), this.wide - 2), x + this.wide / 2, y + this.high / 2);
    }));
    brush.font = "12px system-ui, sans-serif";
  }

  // Very many cells: one pixel each, enlarged.
  paintPixels(brush) {
    const { rows, columns, value, scale, most } = this.spec;
    const small = document.createElement("canvas");
    [small.width, small.height] = [columns.length, rows.length];
    const image = small.getContext("2d").createImageData(columns.length, rows.length);
    for (let row = 0; row < rows.length; row += 1) {
      for (let column = 0; column < columns.length; column += 1) {
        const found = shade(value(row, column) / most, scale);
        if (found) image.data.set([...found, 255], 4 * (row * columns.length + column));
      }
    }
    small.getContext("2d").putImageData(image, 0, 0);
    brush.imageSmoothingEnabled = false;
    brush.drawImage(small, this.left, this.up, this.wide * columns.length, this.high * rows.length);
  }

  labels(brush, colors) {
    const { rows, columns } = this.spec;
    brush.fillStyle = colors.faint;
    brush.textAlign = "right";
    const everyRow = Math.max(1, Math.ceil(13 / this.high));
    rows.forEach((row, at) => {
      if (at % everyRow === 0) brush.fillText(clipped(brush, String(row), this.left - 8), this.left - 6, this.up + this.high * (at + 0.5));
    });
    const every = Math.max(1, Math.ceil((this.slanted ? 13 : 24) / this.wide));
    columns.forEach((column, at) => {
      if (at % every !== 0) return;
      brush.save();
      brush.translate(this.left + this.wide * (at + 0.5), this.up - (this.slanted ? 6 : 9));
      if (this.slanted) brush.rotate(-0.85);
      brush.textAlign = this.slanted ? "left" : "center";
      brush.fillText(clipped(brush, String(column), this.slanted ? 64 : this.wide * every - 4), 0, 0);
      brush.restore();
    });
  }

  corner(row, column) {
    return [this.left + this.wide * column, this.up + this.high * row];
  }

  // The labels of a cell, such as {layer: 3, head: 4}.
  place(row, column) {
    const [[rowKey, rows], [columnKey, columns]] = this.spec.axes;
    const found = { [rowKey]: rows[row], [columnKey]: columns[column] };
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
  }

  // Frames around the row, column or cell of what is hovered anywhere, and around what is selected.
  light() {
    if (!this.sharp) return;
    const brush = this.canvas.getContext("2d");
    brush.setTransform(1, 0, 0, 1, 0, 0);
    brush.clearRect(0, 0, this.canvas.width, this.canvas.height);
    brush.drawImage(this.base, 0, 0);
    brush.setTransform(this.sharp, 0, 0, this.sharp, 0, 0);
    brush.strokeStyle = palette().ink;
    if (this.link.hovered) this.frame(brush, this.link.hovered, 1.5, 1);
    if (this.link.selected) this.frame(brush, this.link.selected, 2.5, 2);
    if (this.at) this.box(brush, ...this.at, 1, 1, 2);
  }

  // A place that names one axis of this grid frames a row or a column; one that names both, a cell.
  frame(brush, place, line, least) {
    const [[rowKey, rows], [columnKey, columns]] = this.spec.axes;
    const [hasRow, hasColumn] = [rowKey in place, columnKey in place];
    if (hasRow + hasColumn < least) return;
    const row = hasRow ? rows.indexOf(place[rowKey]) : 0, column = hasColumn ? columns.indexOf(place[columnKey]) : 0;
    if (row < 0 || column < 0) return;
    this.box(brush, row, column, hasRow ? 1 : rows.length, hasColumn ? 1 : columns.length, line);
  }

  box(brush, row, column, down, across, line) {
    const [x, y] = this.corner(row, column);
    brush.lineWidth = line;
    brush.strokeRect(x, y, Math.max(2, this.wide * across - 1), Math.max(2, this.high * down - 1));
  }

  find(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - this.up) / this.high);
    const column = Math.floor((event.clientX - box.left - this.left) / this.wide);
    const isInside = row >= 0 && column >= 0 && row < this.spec.rows.length && column < this.spec.columns.length;
    return isInside ? [row, column] : null;
  }

  point(event) {
    const found = this.find(event);
    if (!found) return this.leave();
    this.touch(found, event.clientX, event.clientY);
  }

  touch(found, x, y) {
    const isNew = !this.at || this.at[0] !== found[0] || this.at[1] !== found[1];
    this.at = found;
    if (this.spec.lines) tip.show(this.spec.lines(...found), x, y, this.canvas);
    if (isNew) this.link.hover(this.place(...found));
  }

  leave() {
    if (!this.at) return;
    this.at = null;
    tip.hide();
    this.link.hover(null);
  }

  choose(event) {
    const found = this.find(event);
    if (found) this.pick(found);
  }

  pick(found) {
    this.cursor = found;
    this.spec.pick?.(...found);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return this.pick(this.cursor);
    }
    if (event.key === "Escape") return this.leave();
    if (!step) return;
    event.preventDefault();
    const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
    this.cursor = [
      clamp(this.cursor[0] + step[0], this.spec.rows.length), clamp(this.cursor[1] + step[1], this.spec.columns.length),
    ];
    const [x, y] = this.corner(...this.cursor);
    const box = this.canvas.getBoundingClientRect();
    this.touch(this.cursor, box.left + x + this.wide / 2, box.top + y + this.high / 2);
  }
}

// Whether two places have all in common that both name: {layer: 3, head: 4} and {layer: 3, head: 4, pos: 2} do.
function alike(one, other) {
  if (!one || !other) return false;
  const shared = ["layer", "head", "part", "pos", "src", "feature"].filter((key) => key in one && key in other);
  return shared.length > 0 && shared.every((key) => one[key] === other[key]);
}

function clipped(brush, text, room) {
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
    const parts = row.values.map(({ value, kind, text }, nth) => {
      const length = Math.max(1, Math.abs(value) * unit), y = 3 + 13 * nth;
      const end = value < 0 ? zero - length : zero + length;
      return [
        svg("rect", { x: value < 0 ? end : zero, y, width: length, height: 11, rx: 2, class: `bar ${kind}` }),
        svg("text", { x: value < 0 ? end - 5 : end + 5, y: y + 9, class: "value", "text-anchor": value < 0 ? "end" : "start" }, text),
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
  return node;
}

// A number in a cell: next to larger ones, almost nothing is 0.
const brief = (value, most) => (Math.abs(value) < 0.005 * most ? "0" : number(value, 2));

// The colors of a scale, from one number to another.
function legend(most, { low = -most, scale = "zero", center = 0 } = {}) {
  const strip = upTo(41).map((at) => svg("rect", { x: at * 4, y: 0, width: 4, height: 9, fill: color(scale === "one" ? at / 40 : at / 20 - 1, scale) }));
  return el("div", { class: "legend", "aria-hidden": "true" }, number(center + low, 2), svg("svg", { viewBox: "0 0 164 9", width: 164, height: 9 }, strip), number(center + most, 2));
}

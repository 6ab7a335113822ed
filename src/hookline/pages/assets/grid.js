// A grid of cells. Only the part that can be seen is on the canvas, so that a grid of any size scrolls; its labels stay at
// the edges. `spec` has rows, columns (labels), value(row, column), scale, most, and may have text(row, column),
// lines(row, column) for the tip, hatched(row, column), pick(row, column), first: the cell that is shown first, and axes: what rows and columns
// are, such as [["layer", [0, 1, 2]], ["head", [0, 1]]], which is how hovering is linked between views.

const FONT = (size) => `${size}px system-ui, sans-serif`;
const LEAST = 13; // pixels of a row with a label

class Grid {
  constructor(label, spec, link) {
    Object.assign(this, { spec, link, at: null, cursor: [0, 0], isSeen: true, waiting: 0 });
    this.canvas = el("canvas", {
      tabindex: 0, role: "application", "aria-label": `${label}. Arrow keys move, Enter selects.`,
      onmousemove: (event) => this.point(event), onmouseleave: () => this.leave(),
      onclick: (event) => this.choose(event), onkeydown: (event) => this.key(event),
      onfocus: () => this.canvas.matches(":focus-visible") && this.show(this.cursor), onblur: () => this.leave(),
    });
    this.room = el("div", { class: "room" }, this.canvas);
    this.node = el("div", { class: "scroll", onscroll: () => this.light() }, this.room);
  }

  // Draw it where it is now in the page; where the grid before had as many cells, with its cursor.
  start(before) {
    const size = (grid) => `${grid?.spec.rows.length} × ${grid?.spec.columns.length}`;
    const isSame = size(before) === size(this);
    this.cursor = isSame ? before.cursor : this.spec.first ?? [0, 0];
    this.measure();
    if (!isSame && this.spec.first) this.reveal(...this.cursor);
    this.paint();
    this.observer = new IntersectionObserver(([{ isIntersecting }]) => { this.isSeen = isIntersecting; this.light(); });
    this.observer.observe(this.node);
  }

  // Sizes depend on the room there is.
  measure() {
    const { rows, columns, text } = this.spec, room = this.node.clientWidth || 480;
    const brush = this.canvas.getContext("2d");
    brush.font = FONT(12);
    const widest = (labels, most) => Math.min(most, Math.max(...labels.slice(0, 400).map((each) => brush.measureText(String(each)).width)));
    const hasWords = columns.some((column) => typeof column === "string");
    this.left = 10 + widest(rows, 84);
    brush.font = FONT(10.5);
    const cells = text ? upTo(Math.min(600, rows.length * columns.length)).map((at) => text(Math.floor(at / columns.length), at % columns.length)) : [];
    const least = text ? Math.max(28, 3 + widest(cells, 54)) : hasWords ? LEAST : 10;
    this.wide = Math.max(least, Math.min(96, (room - this.left - 4) / columns.length));
    const most = text ? (rows.length > 16 ? 19 : 24) : 24;
    this.high = Math.max(text ? 19 : LEAST, Math.min(most, 420 / rows.length));
    this.slanted = hasWords && this.wide < 58;
    this.up = this.slanted ? 58 : 20;
    this.width = this.left + this.wide * columns.length + (this.slanted ? 30 : 2);
    this.height = this.up + this.high * rows.length + 2;
    this.room.style.width = `${this.width}px`;
    this.room.style.height = `${this.height}px`;
    this.sharp = devicePixelRatio;
    this.seen = [Math.min(this.width, room), Math.min(this.height, this.node.clientHeight || this.height)];
    [this.canvas.width, this.canvas.height] = this.seen.map((side) => Math.ceil(side * this.sharp));
    [this.canvas.style.width, this.canvas.style.height] = this.seen.map((side) => `${side}px`);
  }

  paint() {
    const brush = this.canvas.getContext("2d"), [wide, high] = this.seen;
    const { scrollLeft, scrollTop } = this.node;
    this.offset = [scrollLeft, scrollTop];
    brush.setTransform(this.sharp, 0, 0, this.sharp, 0, 0);
    brush.clearRect(0, 0, wide, high);
    brush.textBaseline = "middle";
    brush.save();
    brush.beginPath();
    brush.rect(this.left - 2, this.up - 2, wide, high);
    brush.clip();
    this.paintCells(brush);
    brush.strokeStyle = palette().ink;
    const { hovered } = this.link;
    if (hovered) this.frame(brush, hovered, 1.5, 1);
    if (hovered && "pos" in hovered && !("src" in hovered) && this.spec.axes[1][0] === "src") this.frame(brush, { src: hovered.pos }, 1.5, 1);
    if (this.link.selected) this.frame(brush, this.link.selected, 2.5, 2);
    if (this.at) this.box(brush, ...this.at, 1, 1, 2);
    brush.restore();
    this.paintLabels(brush);
  }

  // The rows and columns that can be seen: [first, after the last].
  visible() {
    const range = (offset, room, each, count) => [Math.max(0, Math.floor(offset / each)), Math.min(count, Math.ceil((offset + room) / each))];
    const [wide, high] = this.seen, [x, y] = this.offset;
    return [range(y, high - this.up, this.high, this.spec.rows.length), range(x, wide - this.left, this.wide, this.spec.columns.length)];
  }

  paintCells(brush) {
    const { value, text, scale, most } = this.spec;
    const gap = this.wide > 5 ? 1 : 0, [[top, bottom], [first, last]] = this.visible();
    brush.font = FONT(this.wide < 44 ? 10.5 : 12);
    brush.textAlign = "center";
    for (let row = top; row < bottom; row += 1) {
      for (let column = first; column < last; column += 1) {
        const { back, ink } = cellColors(value(row, column) / most, scale), [x, y] = this.corner(row, column);
        brush.fillStyle = back;
        brush.fillRect(x, y, this.wide - gap, this.high - gap);
        if (this.spec.hatched?.(row, column)) this.hatch(brush, x, y, this.wide - gap, this.high - gap);
        if (!text || x < this.left - 3 || y < this.up - 3) continue; // half a cell has no text
        brush.fillStyle = ink;
        brush.fillText(clipped(brush, text(row, column), this.wide - 1), x + this.wide / 2, y + this.high / 2);
      }
    }
  }

  // Diagonal lines over a cell.
  hatch(brush, x, y, wide, high) {
    brush.save();
    brush.beginPath();
    brush.rect(x, y, wide, high);
    brush.clip();
    brush.beginPath();
    for (let at = -high; at < wide; at += 6) { brush.moveTo(x + at, y + high); brush.lineTo(x + at + high, y); }
    brush.globalAlpha = 0.35;
    brush.strokeStyle = palette().faint;
    brush.lineWidth = 1;
    brush.stroke();
    brush.restore();
  }

  paintLabels(brush) {
    const { rows, columns } = this.spec, [[top, bottom], [first, last]] = this.visible(), [wide, high] = this.seen;
    brush.font = FONT(12);
    brush.fillStyle = palette().faint;
    brush.textAlign = "right";
    for (let row = top; row < bottom; row += 1) {
      const y = this.corner(row, 0)[1] + this.high / 2;
      if (y > this.up && y < high) brush.fillText(clipped(brush, String(rows[row]), this.left - 8), this.left - 6, y);
    }
    const room = this.slanted ? LEAST : 24, every = Math.max(1, Math.ceil(room / this.wide));
    for (let column = first; column < last; column += 1) {
      const x = this.corner(0, column)[0] + this.wide / 2;
      if (column % every !== 0 || x < this.left || x > wide) continue;
      brush.save();
      brush.translate(x, this.up - (this.slanted ? 6 : 9));
      if (this.slanted) brush.rotate(-0.85);
      brush.textAlign = this.slanted ? "left" : "center";
      brush.fillText(clipped(brush, String(columns[column]), this.slanted ? 64 : this.wide * every - 4), 0, 0);
      brush.restore();
    }
  }

  // Where a cell begins on the canvas.
  corner(row, column) {
    return [this.left + this.wide * column - this.offset[0], this.up + this.high * row - this.offset[1]];
  }

  // The labels of a cell, such as {layer: 3, head: 4}.
  place(row, column) {
    const [[rowKey, rows], [columnKey, columns]] = this.spec.axes;
    const found = { [rowKey]: rows[row], [columnKey]: columns[column] };
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
  }

  // Something else is hovered or seen: painted once in the next frame, if the grid is on the screen.
  light() {
    if (!this.isSeen || this.waiting || !this.sharp) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; if (this.node.isConnected) this.paint(); });
  }

  // A place that names one axis of this grid frames a row or a column; one that names both, a cell.
  frame(brush, place, line, least) {
    const [[rowKey, rows], [columnKey, columns]] = this.spec.axes;
    const [hasRow, hasColumn] = [rowKey in place, columnKey in place];
    if (hasRow + hasColumn < least) return;
    const down = hasRow ? stretches(rows, place[rowKey]) : [[0, rows.length]];
    const across = hasColumn ? stretches(columns, place[columnKey]) : [[0, columns.length]];
    for (const [row, high] of down) for (const [column, wide] of across) this.box(brush, row, column, high, wide, line);
  }

  box(brush, row, column, down, across, line) {
    const [x, y] = this.corner(row, column);
    brush.lineWidth = line;
    brush.strokeRect(x, y, Math.max(2, this.wide * across - 1), Math.max(2, this.high * down - 1));
  }

  find(event) {
    const box = this.canvas.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = Math.floor((y - this.up + this.offset[1]) / this.high), column = Math.floor((x - this.left + this.offset[0]) / this.wide);
    const isInside = x >= this.left && y >= this.up && row < this.spec.rows.length && column < this.spec.columns.length;
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

  // Scroll a cell into view.
  reveal(row, column) {
    const [wide, high] = this.seen, into = (offset, start, size, room) => Math.min(start, Math.max(offset, start + size - room));
    this.node.scrollLeft = into(this.node.scrollLeft, this.wide * column, this.wide, wide - this.left);
    this.node.scrollTop = into(this.node.scrollTop, this.high * row, this.high, high - this.up);
    this.offset = [this.node.scrollLeft, this.node.scrollTop];
  }

  // Move the cursor to a cell, with the tip beside it.
  show(cell) {
    this.cursor = cell;
    this.reveal(...cell);
    const [x, y] = this.corner(...cell), box = this.canvas.getBoundingClientRect();
    this.touch(cell, box.left + x + this.wide / 2, box.top + y + this.high / 2);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -1e9], End: [0, 1e9] }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return this.pick(this.cursor);
    }
    if (event.key === "Escape") return this.leave();
    if (!step) return;
    event.preventDefault();
    const counts = [this.spec.rows.length, this.spec.columns.length];
    this.show(this.cursor.map((at, axis) => Math.max(0, Math.min(counts[axis] - 1, at + step[axis]))));
  }
}

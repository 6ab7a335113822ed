// The image view: the image, colored by what the other views say about its tokens.

const OVERLAYS = { attention: "attention of a head", lens: "what a layer would say", patching: "patching" };

// The pictures themselves, by their URL; `act` is called when one can be drawn.
const pictures = new Map();

function picture(url, act) {
  if (!pictures.has(url)) {
    const made = new Image();
    pictures.set(url, { image: made, isReady: false, ready: new Promise((done) => { made.onload = done; made.onerror = done; }) });
    made.src = url;
  }
  const found = pictures.get(url);
  if (!found.isReady) found.ready.then(() => { found.isReady = true; act(); });
  return found.isReady && found.image.naturalWidth ? found.image : null;
}

// An image with a color and perhaps a text on each region that a token covers. `spec` has url, layout (see
// image_views.py), value(position), scale, most, and may have text(position), lines(position), pick(position, isMore).
class ImageMap {
  constructor(label, spec, link) {
    Object.assign(this, { spec, link, at: null, cursor: [0, 0], boxes: tensor(spec.layout.boxes) });
    this.canvas = el("canvas", {
      tabindex: 0, role: "application", "aria-label": `${label}. Arrow keys move, Enter selects, Shift adds.`,
      onmousemove: (event) => this.point(event), onmouseleave: () => this.leave(), onblur: () => this.leave(),
      onclick: (event) => { const at = this.find(event); if (at !== null) spec.pick(at, event.shiftKey || event.ctrlKey || event.metaKey); },
      onkeydown: (event) => this.key(event),
    });
    this.base = document.createElement("canvas");
    this.node = el("div", { class: "scroll" }, this.canvas);
    link.watch(() => this.light());
  }

  draw() {
    const image = picture(this.spec.url, () => this.canvas.isConnected && this.draw());
    const ratio = image ? image.naturalHeight / image.naturalWidth : 1;
    const wide = Math.min(this.node.clientWidth || 420, 460, 460 / ratio);
    this.size = [wide, wide * ratio];
    for (const canvas of [this.base, this.canvas]) [canvas.width, canvas.height] = this.size.map((side) => Math.ceil(side * devicePixelRatio));
    [this.canvas.style.width, this.canvas.style.height] = this.size.map((side) => `${side}px`);
    const brush = this.base.getContext("2d");
    brush.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    if (image) this.paintImage(brush, image);
    this.spec.layout.main.flat().forEach((at) => this.paintPatch(brush, at));
    this.light();
  }

  // Almost in gray, so that colors are the numbers'; small images keep their pixels.
  paintImage(brush, image) {
    brush.imageSmoothingEnabled = image.naturalWidth > this.size[0] / 2;
    brush.drawImage(image, 0, 0, ...this.size);
    brush.globalCompositeOperation = "saturation";
    [brush.fillStyle, brush.globalAlpha] = ["#808080", 0.7];
    brush.fillRect(0, 0, ...this.size);
    [brush.globalCompositeOperation, brush.globalAlpha] = ["source-over", 1];
  }

  paintPatch(brush, at) {
    const box = this.box(at);
    if (!box) return;
    const { value, text, scale, most, layout } = this.spec, [x, y, wide, high] = box;
    const share = value(layout.positions[at]) / most, colors = palette();
    const found = scale === "one" ? colors.heat : share < 0 ? colors.cold : colors.warm;
    const part = Math.min(1, Math.abs(share));
    brush.fillStyle = `rgb(${found.join(" ")} / ${(0.85 * part ** 0.6).toFixed(3)})`;
    if (Number.isFinite(share)) brush.fillRect(x, y, wide, high);
    brush.strokeStyle = "rgb(128 128 128 / .25)";
    brush.strokeRect(x, y, wide, high);
    if (!text || wide < 26) return;
    brush.font = "11px system-ui, sans-serif";
    [brush.textAlign, brush.textBaseline] = ["center", "middle"];
    const said = clipped(brush, text(layout.positions[at]), wide - 2);
    [brush.lineWidth, brush.strokeStyle, brush.fillStyle] = [3, "rgb(0 0 0 / .65)", "#ffffff"];
    brush.strokeText(said, x + wide / 2, y + high / 2);
    brush.fillText(said, x + wide / 2, y + high / 2);
    brush.lineWidth = 1;
  }

  // The region of a token in pixels; null if it covers none.
  box(at) {
    return this.scaled(upTo(4).map((side) => this.boxes.at(at, side)));
  }

  scaled([left, top, right, bottom]) {
    const [wide, high] = this.size;
    return Number.isNaN(left) ? null : [left * wide, top * high, (right - left) * wide, (bottom - top) * high];
  }

  light() {
    if (!this.size) return;
    const brush = this.canvas.getContext("2d"), { hovered, selected } = this.link;
    brush.setTransform(1, 0, 0, 1, 0, 0);
    brush.clearRect(0, 0, this.canvas.width, this.canvas.height);
    brush.drawImage(this.base, 0, 0);
    brush.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    if (selected && !isTower(selected.point)) this.frame(brush, selected.pos, 2);
    for (const key of ["pos", "src"]) this.frame(brush, hovered?.[key], 3);
    if (hovered && hovered.pos === undefined && "patch" in hovered) this.spec.tower?.(hovered.patch).forEach((box) => this.outline(brush, this.scaled(box), 3));
  }

  frame(brush, pos, line) {
    const wanted = new Set([pos ?? []].flat()), { positions } = this.spec.layout;
    if (wanted.size) positions.forEach((each, at) => { if (wanted.has(each)) this.outline(brush, this.box(at), line); });
  }

  outline(brush, box, line) {
    if (!box) return;
    const [x, y, wide, high] = box;
    for (const [width, color] of [[line + 2, "#ffffff"], [line, "#10131a"]]) {
      [brush.lineWidth, brush.strokeStyle] = [width, color];
      brush.strokeRect(x + 2, y + 2, wide - 4, high - 4);
    }
  }

  // The token under the pointer, as a position of the prompt.
  find(event) {
    const frame = this.canvas.getBoundingClientRect(), [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const { main, positions } = this.spec.layout;
    const found = main.flat().find((at) => {
      const box = this.box(at);
      return box && x >= box[0] && x < box[0] + box[2] && y >= box[1] && y < box[1] + box[3];
    });
    return found === undefined ? null : positions[found];
  }

  point(event) {
    const found = this.find(event);
    if (found === null) return this.leave();
    this.touch(found, event.clientX, event.clientY);
  }

  touch(found, x, y) {
    const isNew = this.at !== found;
    this.at = found;
    tip.show(this.spec.lines(found), x, y, this.canvas);
    if (isNew) this.link.hover({ pos: found, ...(this.spec.patches ? { patch: this.spec.patches(found) } : {}) });
  }

  leave() {
    if (this.at === null) return;
    this.at = null;
    tip.hide();
    this.link.hover(null);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const { main, positions } = this.spec.layout, at = () => main[this.cursor[0]][this.cursor[1]];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return this.spec.pick(positions[at()], event.shiftKey);
    }
    if (event.key === "Escape") return this.leave();
    if (!step) return;
    event.preventDefault();
    const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
    this.cursor = [clamp(this.cursor[0] + step[0], main.length), clamp(this.cursor[1] + step[1], main[0].length)];
    const box = this.box(at()), frame = this.canvas.getBoundingClientRect();
    if (box) this.touch(positions[at()], frame.left + box[0] + box[2] / 2, frame.top + box[1] + box[3] / 2);
  }
}

const isTower = (point) => /^(vision|projector)\./.test(point ?? "");

// The image, colored by what a view says about its tokens: everything is read from the answers of other views.
function imagePanel(app) {
  if (!app.model.placeholder?.token) return null;
  const local = (node) => { node.querySelectorAll("select, input").forEach((input) => { input.dataset.local = ""; }); return node; };
  const show = (values) => { app.change(values, []); app.paint(); };
  return {
    slot: "image", title: "Image", uses: ["tokens", "lens", "attention", "patching"],
    hint: (state) => ({
      attention: `attention of head ${state.layer}.${state.head} from “${words(app)[app.position()] ?? ""}”`,
      lens: `the likeliest token at each image token after layer ${state.layer}`,
      patching: `share of the logit difference that each image token brings back, in layer ${state.layer}`,
    })[state.overlay],
    question: () => null,
    source: () => (app.state.images.length ? app.tokens?.tokens : null),
    empty: "Choose, drop or paste an image beside the prompt.",
    controls: (state) => [
      local(chooser("color by", OVERLAYS, state.overlay, (overlay) => show({ overlay }))),
      integer("layer", state.layer, app.model.layers - 1, (layer) => app.change({ layer }, ["attention", "image"])),
      state.overlay === "attention" ? integer("head", state.head, app.model.heads - 1, (head) => app.change({ head }, ["attention", "image"])) : null,
      state.images.length > 1 ? local(chooser("image", Object.fromEntries(state.images.map((_, nth) => [nth, nth + 1])), state.image, (nth) => show({ image: Number(nth) }))) : null,
      local(el("label", {}, el("input", { type: "checkbox", checked: state.unfolded, onchange: () => show({ unfolded: !state.unfolded }) }), " every image token in the other views")),
    ],
    draw: (list, state) => drawImage(app, list, state),
  };
}

const editedLayer = (state) => (state.overlay === "patching" ? state.layer : 0);

function drawImage(app, list, state) {
  const layout = list.images?.[state.image], url = state.images[state.image];
  if (!layout) return [el("p", { class: "hint" }, "There is nothing here yet.")];
  const notes = [layout.problem, layout.note].filter(Boolean).map((text) => el("p", { class: "note" }, text));
  if (!layout.boxes) return [...notes, el("img", { class: "plain", src: url, alt: `image ${state.image + 1} of the prompt` })];
  const overlay = overlayOf(app, list, state), lens = lensAt(app, list, state.layer), total = layout.positions.length;
  const lines = (pos) => [
    el("b", {}, `${words(app)[pos]}, ${positionsSaid(pos)}`), ...(overlay ? [overlay.said(pos)] : []),
    ...(lens ? [el("i", {}, `after layer ${state.layer}:`), ...lens.top(pos).slice(0, 6).map(([text, prob]) => el("div", { class: "pair" }, el("span", {}, shown(text)), percent(prob)))] : []),
  ];
  const map = new ImageMap(`Image ${state.image + 1}: ${total} tokens`, {
    url, layout, lines, scale: overlay?.scale ?? "one", most: overlay?.most ?? 1, value: overlay?.value ?? (() => NaN), text: overlay?.text,
    ...towerLinks(app, list, layout, state),
    // In the first layer, where every later one still reads it, unless the view is about another.
    pick: (pos, isMore) => app.select({ point: `blocks.${editedLayer(state)}.hook_resid_pre`, layer: editedLayer(state), pos: isMore ? toggled(app.link.selected?.pos, pos) : pos }),
  }, app.link);
  return [...notes, { node: map.node, start: () => map.draw() }, overlay ? el("p", { class: "sum" }, overlay.sum(layout.positions)) : el("p", { class: "hint" }, state.overlay === "patching" ? "Write a second prompt, or give it another image, to patch between them." : "")];
}

// A selection with one more position, or one fewer.
function toggled(pos, more) {
  const chosen = new Set([pos ?? []].flat());
  if (!chosen.delete(more)) chosen.add(more);
  const kept = [...chosen].sort((a, b) => a - b);
  return kept.length > 1 ? kept : kept[0] ?? more;
}

// What colors the image: {value(pos), most, scale, said(pos), sum(positions), text(pos)}; null if it is not there yet.
function overlayOf(app, list, state) {
  const data = app.answer(state.overlay), length = list.ids.length;
  if (!data) return null;
  if (state.overlay === "lens") {
    const lens = lensAt(app, list, state.layer);
    return lens && {
      scale: "one", most: 1, value: (pos) => lens.top(pos)[0][1], text: (pos) => shown(lens.top(pos)[0][0], true), said: () => "",
      sum: (positions) => `most often: ${counted(positions.map((pos) => lens.top(pos)[0][0])).slice(0, 4).map(([text, times]) => `“${shown(text, true)}” × ${times}`).join(", ")}`,
    };
  }
  const values = tensor(data.values);
  if (values.shape[1] !== length) return null; // heads, or an answer about another prompt
  if (state.overlay === "patching") {
    const row = data.layers.map(Number).indexOf(state.layer), value = (pos) => values.at(row, pos);
    return row < 0 ? null : {
      scale: "zero", most: Math.max(1, largest(values.values)), value, said: (pos) => `brings back ${percent(value(pos))}`,
      text: (pos) => brief(value(pos), 1), sum: (positions) => `most: ${percent(REDUCE.largest(positions.map(value)))}`,
    };
  }
  if (data.point !== `blocks.${state.layer}.attn.hook_pattern` || data.head !== state.head) return null; // the answer is on its way
  const value = (pos) => values.at(app.position(), pos);
  const most = (positions) => Math.max(...positions.map(value));
  return {
    scale: "one", most: Math.max(1e-6, ...list.images.flatMap((image) => image.positions ?? []).map(value)), value, said: (pos) => `attention ${percent(value(pos))}`,
    sum: (positions) => `${percent(REDUCE.sum(positions.map(value)))} of this head's attention is on the image; at most ${percent(most(positions))} on one token`,
  };
}

// The lens after a layer: top(pos) is a list of [token, probability].
function lensAt(app, list, layer) {
  const data = app.answer("lens"), row = data ? data.layers.indexOf(layer) : -1;
  if (row < 0 || data.cells[row].length !== list.ids.length) return null;
  const probs = tensor(data.probs), [, columns, top] = probs.shape;
  return { top: (pos) => upTo(top).map((nth) => [data.words[data.cells[row][pos][nth]], probs.values[(row * columns + pos) * top + nth]]) };
}

// Between tokens and patches of the vision tower, where the regions of both are known.
function towerLinks(app, list, layout, state) {
  if (!list.tower) return {};
  const all = tensor(list.tower), [rows, count] = all.shape;
  if (rows === 1 ? list.images.length > 1 : rows !== list.images.length) return {};
  const row = rows === 1 ? 0 : state.image, isHere = rows === 1 || state.pointRow === state.image;
  const box = (patch) => upTo(4).map((side) => all.values[(row * count + patch) * 4 + side]);
  const own = tensor(layout.boxes);
  return {
    tower: (patch) => (isHere ? [patch].flat().map(box) : []),
    patches: (pos) => {
      const at = layout.positions.indexOf(pos), [left, top, right, bottom] = upTo(4).map((side) => own.at(at, side));
      return !isHere ? [] : upTo(count).filter((patch) => {
        const [x0, y0, x1, y1] = box(patch), [x, y] = [(x0 + x1) / 2, (y0 + y1) / 2];
        return x >= left && x < right && y >= top && y < bottom;
      });
    },
  };
}

PANELS.splice(1, 0, imagePanel);

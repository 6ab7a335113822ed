// Images: how they come into a prompt, and what they become there: runs of tokens, each shown as one.

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_IMAGE_BYTES = 6e6; // the server checks it, too

// The images of both prompts: thumbnails beside the text, and files that are chosen, dropped or pasted.
class ImageInput {
  constructor(app) {
    this.app = app;
    this.place = app.model.placeholder ?? { token: "", written: "" };
    this.rows = {};
  }

  // A text with its images; of a model that takes none, the text alone.
  around(key, text) {
    if (!this.place.token) return text;
    const strip = el("div", { class: "images" });
    this.rows[key] = { strip, text };
    const take = (event, data) => {
      const files = [...(data?.files ?? [])];
      if (!files.length || !this.app.isLive) return;
      event.preventDefault();
      this.take(key, files);
    };
    const node = el("div", {
      class: "prompt", ondragover: (event) => event.preventDefault(), ondrop: (event) => take(event, event.dataTransfer),
      onpaste: (event) => take(event, event.clipboardData),
    }, strip, text);
    this.draw();
    return node;
  }

  draw() {
    for (const key of Object.keys(this.rows)) redraw(this.rows[key].strip, () => this.fill(key));
  }

  fill(key) {
    const whose = key === "images" ? "the prompt" : "the second prompt", { isLive } = this.app;
    const chooser = (act) => el("input", { type: "file", accept: IMAGE_TYPES.join(","), class: "file", disabled: !isLive, "aria-label": `image for ${whose}`, onchange: (event) => act(event.target.files[0]) });
    const thumbs = this.app.state[key].map((url, nth) => el("span", { class: "thumb" },
      el("label", { title: "choose another image" }, el("img", { src: url, alt: `image ${nth + 1} of ${whose}` }), chooser((file) => this.put(key, file, nth))),
      isLive ? el("button", { class: "small", "aria-label": `remove image ${nth + 1} of ${whose}`, onclick: () => this.remove(key, nth) }, "×") : null));
    const add = el("label", { class: "button", title: "choose, drop or paste an image" }, "+ image", chooser((file) => this.put(key, file, this.app.state[key].length)));
    this.rows[key].strip.replaceChildren(...thumbs, isLive ? add : "");
  }

  // Files that were dropped or pasted: a single image is replaced, unless the text has a place for one more.
  async take(key, files) {
    const images = this.app.state[key], isFull = this.count(this.rows[key].text.value) <= images.length;
    let at = images.length === 1 && isFull ? 0 : images.length;
    for (const file of files) { await this.put(key, file, at); at += 1; }
  }

  async put(key, file, at) {
    if (!file) return;
    if (!IMAGE_TYPES.includes(file.type)) return this.app.tell(`${file.name} is not an image of type png, jpeg, webp, gif or bmp`);
    if (file.size > MOST_IMAGE_BYTES) return this.app.tell(`${file.name} has ${file.size.toLocaleString("en")} bytes; the explorer takes up to ${MOST_IMAGE_BYTES.toLocaleString("en")}: shrink it`);
    const images = [...this.app.state[key]];
    images[at] = await new Promise((done) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.readAsDataURL(file);
    });
    const { text } = this.rows[key];
    if (!text.value && key === "otherImages") text.value = this.app.prompt.value;
    const missing = images.length - this.count(text.value);
    if (missing > 0) text.value = `${this.place.written.repeat(missing)} ${text.value}`.trimEnd();
    this.show({ [key]: images });
  }

  remove(key, nth) {
    const { text } = this.rows[key], images = this.app.state[key].filter((_, at) => at !== nth);
    const mark = text.value.includes(this.place.written) ? this.place.written : this.place.token;
    let seen = -1;
    if (this.count(text.value) > images.length) text.value = text.value.replaceAll(mark, (found) => { seen += 1; return seen === nth ? "" : found; }).trimStart();
    if (key === "otherImages" && !images.length && text.value === this.app.prompt.value) text.value = "";
    this.show({ [key]: images });
  }

  count(text) {
    return text.split(this.place.token).length - 1;
  }

  show(values) {
    const { app } = this;
    app.kept = new Answers([]); // its keys have no images
    app.change({ ...values, prompt: app.prompt.value, other: app.other.value, image: 0, pos: null, src: 0, target: null, versus: null });
    this.keep();
    this.draw();
  }

  // Images are too long for the address; the tab keeps them for a reload.
  keep() {
    const { images, otherImages } = this.app.state;
    this.app.keptImages = { images, otherImages };
    if (!(this.app.home instanceof Tab)) return; // a widget keeps its whole state
    try {
      sessionStorage.setItem(location.pathname, JSON.stringify({ images, otherImages }));
    } catch { /* larger than a browser keeps: a reload begins with the first image */ }
  }

  static kept() {
    try {
      const found = JSON.parse(sessionStorage.getItem(location.pathname)) ?? {};
      const isFine = [found.images, found.otherImages].every((list) => Array.isArray(list) && list.every((url) => typeof url === "string" && url.startsWith("data:image/")));
      return isFine && location.hash.length > 1 ? found : {};
    } catch {
      return {};
    }
  }

  // The part of a question; a second prompt without images of its own has those of the first.
  question({ images, otherImages, other } = this.app.state) {
    const inherited = this.place.token && other.includes(this.place.token) ? images : [];
    return { images, other_images: other ? (otherImages.length ? otherImages : inherited) : [] };
  }
}

// Which image a position belongs to; undefined for text.
function imageAt(list, at) {
  const found = (list?.images ?? []).findIndex((image) => image.start !== null && at >= image.start && at < image.stop);
  return found < 0 ? undefined : found;
}

const imageName = (list, nth) => (list.images.length > 1 ? `image ${nth + 1}` : "image");

// Labels of positions: the tokens of an image are numbered.
const labelsOf = new WeakMap();

function tokenLabels(list) {
  if (!list) return [];
  if (labelsOf.has(list)) return labelsOf.get(list);
  const labels = list.texts.map((text) => shown(text, true));
  for (const { start, stop, positions } of list.images ?? []) {
    if (start !== null) (positions ?? upTo(stop - start).map((at) => start + at)).forEach((pos, at) => { labels[pos] = `▦ ${at + 1}`; });
  }
  labelsOf.set(list, labels);
  return labels;
}

// Positions as they are shown: [3] for a token, [4, 5, …] for an image; null if nothing is folded.
function foldedPositions(app) {
  const list = app.tokens?.tokens;
  if (app.state.unfolded || !list?.images?.length) return null;
  const groups = [];
  list.ids.forEach((_, at) => {
    const last = groups[groups.length - 1], nth = imageAt(list, at);
    if (last && nth !== undefined && imageAt(list, last[0]) === nth) last.push(at);
    else groups.push([at]);
  });
  return groups;
}

const REDUCE = {
  sum: (values) => values.reduce((a, b) => a + b, 0),
  mean: (values) => values.reduce((a, b) => a + b, 0) / values.length,
  largest: (values) => values.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a)),
};

// A grid in which an image is one row or column: `how` says along which axes, and what becomes of its numbers.
// `text` and `lines` get (row, column), of which one or both are lists of positions, and the number.
function folded(app, spec, how, { text = null, lines = null } = {}) {
  const groups = foldedPositions(app), list = app.tokens?.tokens;
  if (!groups || (how.rows && spec.rows.length !== list.ids.length) || (how.columns && spec.columns.length !== list.ids.length)) return spec;
  const single = (labels) => labels.map((_, at) => [at]);
  const down = how.rows ? groups : single(spec.rows), across = how.columns ? groups : single(spec.columns);
  const plain = (group) => (group.length === 1 ? group[0] : group);
  const isOne = (row, column) => down[row].length === 1 && across[column].length === 1;
  const label = (labels, group) => (group.length === 1 ? labels[group[0]] : `▦ ${imageName(list, imageAt(list, group[0]))}`);
  const axis = ([key, labels], chosen) => [key, chosen.map((group) => plain(group.map((at) => labels[at])))];
  const value = (row, column) => {
    if (isOne(row, column)) return spec.value(down[row][0], across[column][0]);
    return REDUCE[how.columns ?? "mean"](across[column].map((at) => REDUCE[how.rows ?? "mean"](down[row].map((from) => spec.value(from, at)))));
  };
  const said = (row, column) => [
    el("b", {}, `${label(spec.rows, down[row])}, ${label(spec.columns, across[column])}`),
    ...[[down[row], how.rows], [across[column], how.columns]].filter(([group]) => group.length > 1).map(([group, kind]) => `${kind} of ${group.length} image tokens`),
    number(value(row, column), 4),
  ];
  const choose = (own, other) => (row, column) => (isOne(row, column) ? own?.(down[row][0], across[column][0]) : other?.(plain(down[row]), plain(across[column]), value(row, column)));
  const within = (chosen, at) => Math.max(0, chosen.findIndex((group) => group.includes(at)));
  return {
    ...spec, value, first: spec.first ? [within(down, spec.first[0]), within(across, spec.first[1])] : undefined, rows: down.map((group) => label(spec.rows, group)), columns: across.map((group) => label(spec.columns, group)),
    axes: [axis(spec.axes[0], down), axis(spec.axes[1], across)],
    text: spec.text ? choose(spec.text, text) : undefined,
    lines: (row, column) => (isOne(row, column) ? spec.lines(down[row][0], across[column][0]) : lines?.(plain(down[row]), plain(across[column])) ?? said(row, column)),
    pick: choose(spec.pick, spec.pick),
  };
}

// How often each text occurs, the most frequent first.
function counted(texts) {
  const counts = new Map();
  for (const text of texts) counts.set(text, (counts.get(text) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

// The pairs of the token strip, with those of an image together.
function foldedPairs(app, pairs) {
  const data = app.tokens, groups = [];
  let last = "";
  for (const pair of pairs) {
    const [one, two] = [imageAt(data.tokens, pair[0] ?? -1), imageAt(data.other, pair[1] ?? -1)];
    const key = one === undefined && two === undefined ? "" : `${one} ${two}`;
    if (key && key === last && !app.state.unfolded) groups[groups.length - 1].push(pair);
    else groups.push([pair]);
    last = key;
  }
  return groups;
}

function unfoldButton(app, text, title) {
  return el("button", { class: "chip fold", title, "aria-expanded": String(app.state.unfolded), onclick: () => { app.change({ unfolded: !app.state.unfolded }, []); app.paint(); } }, text);
}

// An image in the strip, as one chip that can be expanded.
function imageChip(app, group) {
  const data = app.tokens, first = group.map(([one]) => one).filter((at) => at !== null), second = group.filter(([, two]) => two !== null);
  const list = first.length ? data.tokens : data.other, at = first.length ? first[0] : second[0][1];
  const { images, other_images: others } = app.images.question();
  const nth = imageAt(list, at);
  const differs = data.aligned.length && (first.length !== second.length || images[nth] !== others[nth]);
  const chip = unfoldButton(app, `▦ ${imageName(list, nth)} × ${first.length || second.length}`, "show every token of the image");
  chip.dataset.pos = JSON.stringify(first);
  chip.setAttribute("aria-pressed", String(first.includes(app.position())));
  chip.addEventListener("mouseenter", () => app.link.hover({ pos: first }));
  chip.addEventListener("mouseleave", () => app.link.hover(null));
  return el("span", { class: differs ? "pair differs" : "pair" }, chip,
    data.aligned.length ? el("span", { class: "chip none" }, second.length ? `▦ × ${second.length}` : " ") : null);
}

// Positions in words: 4, or 1–3, 7–9.
function positionsSaid(pos) {
  const runs = [];
  for (const at of [pos].flat()) {
    const last = runs[runs.length - 1];
    if (last && at === last[1] + 1) last[1] = at;
    else runs.push([at, at]);
  }
  const text = runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
  return `${Array.isArray(pos) && pos.length > 1 ? "positions" : "position"} ${text}`;
}

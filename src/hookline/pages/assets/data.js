// Data: what the page got inside, what it asks the server, and the small tools that everything below uses.

const el = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);
const svg = (tag, props = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);

// Text always becomes a text node: nothing that a model or a file says is ever read as HTML.
function fill(node, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "disabled" || key === "selected") node[key] = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return node;
}

// A token as it is shown: spaces and line breaks can be seen.
function shown(text, trim = false) {
  const seen = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  if (/^ +$/.test(seen)) return "␣".repeat(seen.length);
  return trim ? seen.replace(/^ /, "") : seen.replace(/^ /, "·");
}

function number(value, digits = 3) {
  if (value === null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-4)) return value.toExponential(1).replace("-", "−");
  const whole = size < 1 ? 0 : Math.floor(Math.log10(size)) + 1;
  const said = value.toFixed(size >= 100 ? 1 : Math.max(0, digits - whole));
  return (Number(said) === 0 ? said.replace("-", "") : said).replace("-", "−");
}

const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.01 ? 2 : 1)} %`;

// Draw a part of the page anew; what had the focus, and what was scrolled, stays as it was.
function redraw(node, draw) {
  const inside = () => [...node.querySelectorAll("input, select, textarea, button, canvas, [tabindex]")];
  const scrolls = () => [...node.querySelectorAll(".scroll")];
  const focused = inside().indexOf(document.activeElement);
  const scrolled = scrolls().map((each) => [each.scrollLeft, each.scrollTop]);
  draw();
  scrolls().forEach((each, at) => { if (scrolled[at]) [each.scrollLeft, each.scrollTop] = scrolled[at]; });
  if (focused >= 0) inside()[focused]?.focus({ preventScroll: true });
}

const upTo = (count) => Array.from({ length: count }, (_, at) => at);

// A tensor: {shape, values, at(row, column)}. The bytes must be as many as the shape says.
const unpacked = new WeakMap();

function tensor(packed) {
  if (!unpacked.has(packed)) unpacked.set(packed, readTensor(packed));
  return unpacked.get(packed);
}

function readTensor(packed) {
  const letters = atob(packed.f32), bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at);
  const size = packed.shape.reduce((a, b) => a * b, 1);
  if (bytes.length !== 4 * size) throw new Error(`a tensor of shape [${packed.shape}] came with ${bytes.length} bytes`);
  const view = new DataView(bytes.buffer), values = new Float32Array(size);
  for (let at = 0; at < size; at += 1) values[at] = view.getFloat32(4 * at, true);
  const width = packed.shape[packed.shape.length - 1] ?? 1;
  return { shape: packed.shape, values, at: (row, column) => values[row * width + column] };
}

function largest(values) {
  let most = 0;
  for (const value of values) if (Number.isFinite(value) && Math.abs(value) > most) most = Math.abs(value);
  return most || 1;
}

const EMPTY = {
  prompt: "", other: "", pos: null, src: 0, target: null, versus: null, layer: 0, head: 0,
  measure: "attribution", sweep: "stream", point: "", pointHead: 0, edits: [], theme: "", count: 20, step: 0, from: null,
  images: [], otherImages: [], image: 0, overlay: "attention", unfolded: false, pointRow: 0, sae: "", feature: null,
};
const TOO_LONG = ["images", "otherImages"]; // for an address

// The state is in the address, after the #, which browsers keep to themselves.
function stateFrom(hash, given) {
  let found = {};
  try {
    found = hash.length > 1 ? JSON.parse(decodeURIComponent(hash.slice(1))) : {};
  } catch { /* an address that was cut off: start anew */ }
  const state = { ...EMPTY, ...given };
  for (const [key, value] of Object.entries(found ?? {})) {
    const like = EMPTY[key];
    const fits = like === null || (Array.isArray(like) ? Array.isArray(value) : typeof value === typeof like);
    if (key in EMPTY && fits && !TOO_LONG.includes(key)) state[key] = value;
  }
  return state;
}

function addressOf(state, given) {
  const kept = Object.entries(state).filter(([key, value]) =>
    !TOO_LONG.includes(key) && JSON.stringify(value) !== JSON.stringify(given[key]));
  return `#${encodeURIComponent(JSON.stringify(Object.fromEntries(kept)))}`;
}

// Asks the server; newer questions make the server drop older ones of this tab.
class Server {
  constructor() {
    this.tab = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16)).join("");
    this.base = location.pathname.replace(/\/?$/, "/");
    this.stopping = new AbortController();
  }

  // Nobody waits any longer for what was asked so far: a browser has few connections to one server.
  drop() {
    this.stopping.abort();
    this.stopping = new AbortController();
  }

  async post(path, body, signal) {
    const options = { signal, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), keepalive: path === "cancel" };
    let reply;
    try {
      reply = await fetch(this.base + path, options);
    } catch {
      if (signal?.aborted) throw Object.assign(new Error(), { cancelled: true });
      throw new Error("the server does not answer: is hookline explore still running?");
    }
    if (!reply.ok) {
      const told = await reply.json().catch(() => ({ error: `the server answered ${reply.status}` }));
      throw new Error(told.error);
    }
    return reply;
  }

  async ask(slot, state, question) {
    const data = await (await this.post("ask", { tab: this.tab, slot, state, question }, this.stopping.signal)).json();
    if (data.error || data.cancelled) throw Object.assign(new Error(data.error), { cancelled: data.cancelled });
    return data;
  }

  cancel() {
    return this.post("cancel", { tab: this.tab }).catch(() => {});
  }

  async page(state, answers) {
    return (await this.post("save", { state, answers })).blob();
  }
}

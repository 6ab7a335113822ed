// Data: tensors, numbers and text as they are shown, and the small tools that everything below uses.

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

// Text without the marks that turn around what follows them.
const unturned = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

// A token as it is shown: spaces and line breaks can be seen.
function shown(text, trim = false) {
  const seen = unturned(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
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

const percent = (value) => (value === null || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.01 ? 2 : 1)} %`);

// Draw a part of the page anew; what had the focus, and what was scrolled, stays as it was.
function redraw(node, draw) {
  const inside = () => [...node.querySelectorAll("input, select, textarea, button, canvas, [tabindex]")];
  const scrolls = () => [...node.querySelectorAll(".scroll")];
  const focused = inside().indexOf(node.getRootNode().activeElement);
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

// Transport: the state of a page, where it is kept, and how the page asks. A page is a tab with an address of its own,
// or (in widget.js) a widget in a notebook.

const EMPTY = {
  prompt: "", other: "", pos: null, src: 0, target: null, versus: null, layer: 0, head: 0,
  measure: "attribution", sweep: "stream", point: "", pointHead: 0, edits: [], theme: "", count: 20, step: 0, from: null,
  images: [], otherImages: [], image: 0, overlay: "attention", unfolded: false, pointRow: 0, sae: "", feature: null, probePoint: "",
};
const TOO_LONG = ["images", "otherImages"]; // for an address

// A state with the fields that were found, where they are of the right kind.
function stateOf(found, given) {
  const state = { ...EMPTY, ...given };
  for (const [key, value] of Object.entries(found ?? {})) {
    const like = EMPTY[key];
    const fits = like === null || (Array.isArray(like) ? Array.isArray(value) : typeof value === typeof like);
    if (key in EMPTY && fits) state[key] = value;
  }
  return state;
}

// The state is in the address, after the #, which browsers keep to themselves.
function stateFrom(hash, given) {
  let found = {};
  try {
    found = hash.length > 1 ? JSON.parse(decodeURIComponent(hash.slice(1))) : {};
  } catch { /* an address that was cut off: start anew */ }
  return stateOf(Object.fromEntries(Object.entries(found ?? {}).filter(([key]) => !TOO_LONG.includes(key))), given);
}

function addressOf(state, given) {
  const kept = Object.entries(state).filter(([key, value]) =>
    !TOO_LONG.includes(key) && JSON.stringify(value) !== JSON.stringify(given[key]));
  return `#${encodeURIComponent(JSON.stringify(Object.fromEntries(kept)))}`;
}

const newTab = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16)).join("");

function checked(data) {
  if (data.error || data.cancelled) throw Object.assign(new Error(data.error), { cancelled: data.cancelled });
  return data;
}

// Asks the server; newer questions make the server drop older ones of this tab.
class Server {
  constructor() {
    this.tab = newTab();
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
    return checked(await (await this.post("ask", { tab: this.tab, slot, state, question }, this.stopping.signal)).json());
  }

  cancel() {
    return this.post("cancel", { tab: this.tab }).catch(() => {});
  }

  async page(state, answers) {
    return (await this.post("save", { state, answers })).blob();
  }
}

// A tab of its own: its state is in the address.
class Tab {
  constructor() {
    this.keys = window; // where keys are listened to
  }

  transport() {
    return new Server();
  }

  read(given) {
    return stateFrom(location.hash, given);
  }

  // The address has what differs from what is given; a new state can be left with the browser's back button.
  keep(state, given, isNew = false) {
    if (location.protocol === "about:") return; // a page in a frame has no address
    history[isNew ? "pushState" : "replaceState"](null, "", addressOf(state, given));
  }

  // Call when the state was changed from outside.
  watch(act, options) {
    addEventListener("hashchange", act, options);
  }

  isDark() {
    return matchMedia("(prefers-color-scheme: dark)").matches;
  }

  watchTheme(act, options) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", act, options);
  }
}

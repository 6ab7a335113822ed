// A page that is opened from a folder cannot start a worker. There, search runs in a hidden frame of the page instead.
// (MkDocs Material looks for a file of this name, and would otherwise load one from another host.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.waiting = [];
      const load = (source) => new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: reject });
        frame.contentDocument.body.append(script);
      });
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      load(new URL(address, location.href)).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}

// Browsers refuse workers to pages that are opened from a folder. The theme's search then runs in a hidden frame.
// The name of this file tells the theme not to fetch a replacement from the network.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      const inner = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          inner.document.body.appendChild(script);
        });
      inner.IFrameWorker = window.IFrameWorker;
      inner.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      inner.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      const ready = load(url);
      this.postMessage = (data) => ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
      this.terminate = () => frame.remove();
    }
  };
}

// Of a page opened from a folder, browsers start no Worker, and the search is one. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append((this.frame = frame));
      const inside = frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.hear(structuredClone(data)));
      inside.document.open(); // else some browsers load the empty page once more, and lose what is in it
      inside.document.write("<body></body>");
      inside.document.close();
      const script = inside.document.createElement("script");
      this.loaded = new Promise((done) => (script.onload = () => done(inside)));
      script.src = url;
      inside.document.body.append(script);
    }
    hear(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(message) {
      const data = structuredClone(message);
      this.loaded.then((inside) => setTimeout(() => inside.dispatchEvent(new MessageEvent("message", { data }))));
    }
    terminate() {
      this.frame.remove();
    }
  };
}

// Server-sent events by fetch: EventSource cannot send an API key in a header, and a key has no place in an address.

const RETRY_FIRST_MS = 250;
const RETRY_MAX_MS = 3000;
const SILENT_MS = 3500; // three missed seconds
const LOOK_MS = 500;

export class Stream {
  // handlers: event(name, document), stale(sinceMs or null, why), denied(message)
  constructor(path, handlers, keyOf) {
    this.path = path;
    this.handlers = handlers;
    this.keyOf = keyOf;
    this.lastId = null;
    this.heardMs = Date.now();
    this.why = "no answer yet";
    this.isStale = false;
    this.attempt = null;
    setInterval(() => this.look(), LOOK_MS);
  }

  // Again from the start: another key.
  restart() {
    this.lastId = null;
    this.attempt?.abort();
    this.run();
  }

  async run() {
    const attempt = (this.attempt = new AbortController());
    for (let pauseMs = RETRY_FIRST_MS; !attempt.signal.aborted; pauseMs = Math.min(pauseMs * 2, RETRY_MAX_MS)) {
      const beganMs = Date.now();
      try {
        const answer = await fetch(this.path, { headers: this.headers(), cache: "no-store", signal: attempt.signal });
        if (answer.status === 401 || answer.status === 403) {
          this.handlers.denied(await messageOf(answer));
          return;
        }
        if (!answer.ok) throw new Error(await messageOf(answer));
        await this.read(answer.body);
        this.why = "the gateway ended the connection";
      } catch (error) {
        if (attempt.signal.aborted) return;
        this.why = error.message;
      }
      if (this.heardMs > beganMs) pauseMs = RETRY_FIRST_MS;
      await new Promise((resolve) => setTimeout(resolve, pauseMs));
    }
  }

  headers() {
    const headers = {};
    if (this.keyOf()) headers.Authorization = `Bearer ${this.keyOf()}`;
    if (this.lastId) headers["Last-Event-ID"] = this.lastId;
    return headers;
  }

  async read(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      blocks.forEach((block) => this.take(block));
    }
  }

  take(block) {
    const fields = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
    this.heardMs = Date.now();
    if (fields.id) this.lastId = fields.id;
    if (fields.event) this.handlers.event(fields.event, JSON.parse(fields.data));
    this.look();
  }

  look() {
    const stale = Date.now() - this.heardMs > SILENT_MS;
    if (stale || this.isStale) this.handlers.stale(stale ? this.heardMs : null, this.why);
    this.isStale = stale;
  }
}

// The sentence in OpenAI's envelope, or the status where there is none.
export async function messageOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the gateway answered ${answer.status}`;
  }
}

// Server-sent events from a stream of bytes: EventSource can send neither a key nor a body.

const MAX_EVENT_CHARS = 4 * 1024 * 1024;

/** Takes text in pieces of any size; returns the events that are complete. */
export class EventParser {
  #rest = "";
  #type = "";
  #data = [];
  #size = 0;

  /** Returns [{type, data}]; throws an Error when an event is too large. */
  push(text) {
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") this.#finish(events);
      else this.#field(line);
    }
    if (this.#size + this.#rest.length > MAX_EVENT_CHARS) throw new Error("an event is too large");
    return events;
  }

  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment keeps the connection open
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#type = value;
    if (name === "data") {
      this.#data.push(value);
      this.#size += value.length;
    }
  }

  #finish(events) {
    if (this.#data.length) events.push({ type: this.#type || "message", data: this.#data.join("\n") });
    this.#type = "";
    this.#data = [];
    this.#size = 0;
  }
}

/** Yields the events of a response's body. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

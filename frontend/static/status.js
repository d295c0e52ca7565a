// The server's state: a whole one first, then a tick a second, and again after every interruption.

import { ApiError, request } from "./api.js";
import { eventsOf } from "./sse.js";

const MAX_POINTS = 300;
const MAX_EVENTS = 200;
const SILENCE_MS = 10_000;
const MAX_WAIT_S = 15;

/** All that has been received; bounded. */
export class Status {
  layout = null;
  tick = null;
  history = [];
  events = [];

  /** Take in one event of /status/events. */
  apply(type, data) {
    if (type === "state") {
      this.layout = data.layout;
      this.tick = data.tick;
      this.history = data.history.slice(-MAX_POINTS);
      this.events = data.events.slice(-MAX_EVENTS);
    } else if (type === "tick") {
      this.tick = data;
      this.history = [...this.history, data.point].slice(-MAX_POINTS);
      this.events = [...this.events, ...data.events].slice(-MAX_EVENTS);
    }
  }

  /** ready, degraded (some engines), down or stopping. */
  get condition() {
    if (this.tick.stopping) return "stopping";
    const ready = this.tick.ranks.filter(({ state }) => state === "ready").length;
    return ready === this.tick.ranks.length ? "ready" : ready ? "degraded" : "down";
  }
}

/**
 * Follow the server while the page is visible.
 * `changed(status)` after each event; `lost(reason, seconds)` before each wait; `locked(error)` when the
 * key is missing or wrong: call `follow` again with another one.
 */
export async function follow({ changed, lost, locked }) {
  const status = new Status();
  for (let wait = 1; ; wait = Math.min(wait * 2, MAX_WAIT_S)) {
    await visible();
    try {
      await listen(status, () => {
        wait = 0.5;
        changed(status);
      });
      if (document.hidden) {
        wait = 0.5;
        continue;
      }
      lost("the server has ended the connection", wait);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return locked(error);
      lost(error instanceof ApiError ? error.message : "the server cannot be reached", wait);
    }
    await pause(wait * 1e3);
  }
}

/** Until the connection ends, or is silent, or the page is hidden. */
async function listen(status, changed) {
  const abort = new AbortController();
  const hide = () => document.hidden && abort.abort();
  let timer = setTimeout(() => abort.abort(), SILENCE_MS);
  document.addEventListener("visibilitychange", hide);
  try {
    const response = await request("status/events", { signal: abort.signal });
    for await (const { type, data } of eventsOf(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_MS);
      status.apply(type, JSON.parse(data));
      if (status.tick) changed();
    }
  } catch (error) {
    if (!(document.hidden && abort.signal.aborted)) throw error;
  } finally {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", hide);
    abort.abort();
  }
}

/** So many milliseconds, or until the network of this computer has come back. */
function pause(duration) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      removeEventListener("online", done);
      resolve();
    };
    const timer = setTimeout(done, duration);
    addEventListener("online", done);
  });
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

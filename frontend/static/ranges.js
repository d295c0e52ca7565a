// The range of the charts: the last minutes, which come with the state, or hours, which are asked for.

import { request } from "./api.js";
import { byId, setText } from "./dom.js";

const SHORT = { name: "5m", spanS: 300, stepS: 1 };
const SPANS = { "1h": 3600, "6h": 21_600 };

export class Ranges {
  #range = SHORT;
  #points = []; // of the range, if it is a longer one
  #askAt = 0;

  /** `changed()` is called when there are other points. */
  constructor(changed) {
    this.changed = changed;
    byId("ranges").addEventListener("change", (event) => this.#choose(event.target.value));
  }

  /** {points, spanS, stepS} to draw now, for the `history` of the last minutes. Asks for newer points. */
  of(history) {
    if (this.#range === SHORT) return { ...SHORT, points: history };
    if (performance.now() >= this.#askAt) this.#ask(this.#range);
    const last = history.at(-1);
    return { ...this.#range, points: [...this.#points.filter(({ at }) => at < last.at), last] };
  }

  #choose(name) {
    this.#points = [];
    this.#range = name in SPANS ? { name, spanS: SPANS[name], stepS: 60 } : SHORT;
    this.#askAt = 0;
    setText(byId("range-error"), "");
    this.changed();
  }

  async #ask(range) {
    this.#askAt = performance.now() + 15_000; // also after an error
    let text = "";
    try {
      const found = await (await request(`status/history/${range.name}`)).json();
      if (range.name !== this.#range.name) return;
      this.#range = { ...range, stepS: found.seconds_per_point };
      this.#points = found.points;
      this.#askAt = performance.now() + found.seconds_per_point * 1e3;
    } catch (error) {
      text = error.message;
    }
    if (range.name !== this.#range.name) return;
    setText(byId("range-error"), text);
    this.changed();
  }
}

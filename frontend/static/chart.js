// A line chart of the last minutes or hours, drawn again with each tick.

import { el, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { HEIGHT, WIDTH, area, largest, line, nearest, niceTop, runs } from "./scale.js";

const MIN_SPAN_S = 60;
// Points further apart than so many steps are not joined: the page or the server was away.
const MAX_GAP = 4;
const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 };

/**
 * A card with a title, the current value, the chart and a line with values.
 *
 * `series`: [{label, kind, read(point)}]; the first one is the value in the corner, and has an area.
 * `show(value)`: the text of a value; `least`: the smallest top of the scale.
 * `moved(at)`: called with the time that the pointer is at, and null when it leaves.
 */
export class Chart {
  #options;
  #points = []; // those that are drawn, ascending
  #range = null;
  #cursor = null; // a time

  constructor(options) {
    this.#options = options;
    const { title, unit, series } = options;
    this.value = el("span", { class: "value num" }, format.NONE);
    this.plot = this.#makePlot(title, series);
    this.keys = series.map(({ label, kind }) =>
      el(
        "span",
        { class: `key ${kind}${series.length > 1 ? "" : " lone"}` },
        el("i"),
        `${label} `,
        el("span"),
      ),
    );
    this.when = el("span", { class: "when" });
    this.element = el(
      "article",
      { class: "card chart" },
      el("h2", {}, title),
      el("p", { class: "now" }, this.value, " ", el("span", { class: "unit" }, unit)),
      this.plot,
      el("p", { class: "foot num" }, ...this.keys, this.when),
    );
    this.plot.addEventListener("pointermove", (event) => this.#follow(event));
    for (const end of ["pointerleave", "blur"]) this.plot.addEventListener(end, () => options.moved(null));
    this.plot.addEventListener("keydown", (event) => this.#step(event));
  }

  #makePlot(title, series) {
    this.fill = svg("path", { class: `fill ${series[0].kind}` });
    this.lines = series.map(({ kind }) => svg("path", { class: `line ${kind}` }));
    this.rule = svg("path", { class: "rule" });
    this.top = el("span", { class: "axis num" });
    this.middle = el("span", { class: "axis half num" });
    const grid = svg("path", {
      class: "gridlines",
      d: `M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT}H${WIDTH}`,
    });
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    const drawing = svg("svg", box, grid, this.fill, ...this.lines.toReversed(), this.rule);
    return el(
      "div",
      { class: "plot", tabindex: "0", role: "img", "aria-label": title },
      drawing,
      this.top,
      this.middle,
    );
  }

  /** Show `points`, ascending and not empty, `stepS` seconds apart, of `spanS` at most; the last one is now. */
  draw({ points, spanS, stepS }) {
    const { series, show, least, title } = this.#options;
    const now = points.at(-1);
    const to = now.at;
    const span = Math.min(Math.max(to - points[0].at, MIN_SPAN_S), spanS);
    this.#points = points.filter((point) => point.at >= to - span);
    const top = niceTop(
      largest(this.#points.flatMap((point) => series.map(({ read }) => read(point)))),
      least,
    );
    this.#range = { from: to - span, to, top, gap: MAX_GAP * stepS };
    const joined = series.map(({ read }) => runs(this.#points, read, this.#range));
    joined.forEach((found, index) => this.lines[index].setAttribute("d", line(found)));
    this.fill.setAttribute("d", area(joined[0]));
    setText(this.top, show(top));
    setText(this.middle, show(top / 2));
    setText(this.value, this.#text(series[0].read(now)));
    const values = series.map(({ label, read }) => `${label} ${this.#text(read(now))}`);
    this.plot.setAttribute("aria-label", `${title}: ${values.join(", ")}`);
    this.point(this.#cursor);
  }

  /** Show the values at a time; null: the current ones. */
  point(at) {
    this.#cursor = at;
    if (!this.#range) return;
    const { from, to } = this.#range;
    const point = this.#points[at === null ? this.#points.length - 1 : nearest(this.#points, at)];
    const x = ((point.at - from) / (to - from)) * WIDTH;
    this.element.classList.toggle("pointed", at !== null);
    this.rule.setAttribute("d", at === null ? "" : `M${x} 0V${HEIGHT}`);
    this.#options.series.forEach(({ read }, index) =>
      setText(this.keys[index].lastChild, this.#text(read(point))),
    );
    setText(this.when, at === null ? format.span(to - from) : format.time(point.at));
  }

  #text(value) {
    return value === null ? format.NONE : this.#options.show(value);
  }

  #follow(event) {
    if (!this.#range) return;
    const box = this.plot.getBoundingClientRect();
    const { from, to } = this.#range;
    this.#options.moved(from + ((event.clientX - box.left) / box.width) * (to - from));
  }

  #step(event) {
    if (event.key === "Escape") this.#options.moved(null);
    const step = STEPS[event.key];
    if (!step || !this.#range) return;
    event.preventDefault();
    const last = this.#points.length - 1;
    const from = this.#cursor === null ? last : nearest(this.#points, this.#cursor);
    this.#options.moved(this.#points[Math.max(0, Math.min(from + step, last))].at);
  }
}

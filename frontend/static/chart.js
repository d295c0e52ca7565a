// A line chart of the last minutes, drawn again with each tick.

import { el, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { HEIGHT, WIDTH, area, largest, line, nearest, niceTop, runs } from "./scale.js";

const SPAN_S = 300;

/**
 * A card with a title, the current value and the chart.
 * `series`: [{label, read(point), kind}], the first one is the value shown; `show(value)` is its text;
 * `least`: the smallest top of the scale; `summary(points)`: the line below, while nothing is pointed at.
 */
export class Chart {
  #options;
  #points = [];
  #shown = []; // those in the chart's span
  #cursor = null; // index of the point under the pointer

  constructor(options) {
    this.#options = options;
    this.#build();
  }

  #build() {
    const { title, unit, series } = this.#options;
    this.value = el("span", { class: "value num" }, format.NONE);
    this.top = el("span", { class: "axis num" });
    this.middle = el("span", { class: "axis half num" });
    this.foot = el("p", { class: "foot num" });
    this.fills = series.map(({ kind }) => svg("path", { class: `fill ${kind}` }));
    this.lines = series.map(({ kind }) => svg("path", { class: `line ${kind}` }));
    this.rule = svg("path", { class: "rule" });
    const grid = svg("path", { class: "gridlines", d: `M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT}H${WIDTH}` });
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    this.drawing = svg("svg", box, grid, this.fills[0], ...this.lines.toReversed(), this.rule);
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title }, this.drawing, this.top, this.middle);
    this.element = el(
      "article", { class: "card chart" },
      el("h2", {}, title), el("p", { class: "now" }, this.value, " ", el("span", { class: "unit" }, unit ?? "")),
      this.plot, this.foot,
    );
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#move(null));
    this.plot.addEventListener("blur", () => this.#move(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Show `points`, ascending; the last one is now. */
  draw(points) {
    this.#points = points;
    const { series, show, least, title } = this.#options;
    const to = points.at(-1).at;
    const range = { from: to - SPAN_S, to };
    const shown = points.filter((point) => point.at >= range.from);
    this.#shown = shown;
    range.top = niceTop(largest(shown.flatMap((point) => series.map(({ read }) => read(point)))), least);
    series.forEach(({ read }, index) => this.lines[index].setAttribute("d", line(runs(shown, read, range))));
    this.fills[0].setAttribute("d", area(runs(shown, series[0].read, range)));
    setText(this.top, show(range.top));
    setText(this.middle, show(range.top / 2));
    const now = series[0].read(points.at(-1));
    setText(this.value, now === null ? format.NONE : show(now));
    this.plot.setAttribute("aria-label", `${title}: ${this.#read(points.at(-1))}`);
    this.#caption();
  }

  #read(point) {
    const { series, show } = this.#options;
    const text = (value) => (value === null ? format.NONE : show(value));
    return series.map(({ label, read }) => `${label} ${text(read(point))}`).join("   ");
  }

  #caption() {
    const points = this.#points;
    const point = this.#cursor === null ? points.at(-1) : points[Math.min(this.#cursor, points.length - 1)];
    if (!point) return;
    const x = WIDTH - ((points.at(-1).at - point.at) / SPAN_S) * WIDTH;
    this.rule.setAttribute("d", this.#cursor === null ? "" : `M${x} 0V${HEIGHT}`);
    const { summary } = this.#options;
    setText(this.foot, this.#cursor === null ? summary(this.#shown) : `${format.time(point.at)}   ${this.#read(point)}`);
  }

  #move(index) {
    this.#cursor = index;
    this.#caption();
  }

  #point(event) {
    if (!this.#points.length) return;
    const box = this.plot.getBoundingClientRect();
    const at = this.#points.at(-1).at - (1 - (event.clientX - box.left) / box.width) * SPAN_S;
    this.#move(nearest(this.#points, at));
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 }[event.key];
    if (event.key === "Escape") this.#move(null);
    if (!step || !this.#points.length) return;
    event.preventDefault();
    const last = this.#points.length - 1;
    this.#move(Math.max(0, Math.min((this.#cursor ?? last) + step, last)));
  }
}

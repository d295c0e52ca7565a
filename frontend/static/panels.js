// Header, figures and events, drawn from the status.

import { byId, el, resize, setText } from "./dom.js";
import * as format from "./format.js";

/** The line below the model's name. */
export function layoutText(layout, tick) {
  const { data_parallel_size: dp, tensor_parallel_size: tp } = layout;
  const parts = [
    layout.architecture,
    layout.quantization ? `${layout.quantization} (${layout.dtype})` : layout.dtype,
    layout.kv_cache_dtype === "auto" ? "" : `KV ${layout.kv_cache_dtype}`,
    `dp ${dp} × tp ${tp}${layout.expert_parallel ? ", ep" : ""} on ${layout.device}`,
    tick.max_model_len ? `${format.count(tick.max_model_len)} tokens of context` : "",
    layout.speculation
      ? `${layout.speculation}, ${format.counted(layout.num_speculative_tokens, "draft")}`
      : "",
    layout.prefix_caching ? "prefix cache" : "",
    layout.num_frontends > 1 ? `${layout.num_frontends} frontends` : "",
    `ATOM ${layout.version}`,
  ];
  return format.listed(...parts.map((part) => part.replaceAll(" ", "\u00a0"))); // breaks between parts only
}

export function drawHeader(status) {
  const { layout, tick, condition } = status;
  document.title = condition === "ready" ? `${layout.model} – ATOM` : `${condition}: ${layout.model} – ATOM`;
  setText(byId("model"), layout.model);
  setText(byId("layout"), layoutText(layout, tick));
  setText(byId("uptime"), `up ${format.duration(tick.uptime)}`);
  drawCondition(condition);
}

export function drawCondition(condition) {
  const pill = byId("condition");
  pill.dataset.state = condition;
  setText(pill, condition);
}

const FIGURES = [
  [
    "Running",
    ({ tick, layout }) => [
      format.count(tick.point.running),
      `of ${format.count(layout.max_num_seqs * tick.ranks.length)}`,
    ],
  ],
  [
    "Waiting",
    ({ tick, layout }) => [
      format.count(tick.point.waiting),
      `of ${format.count(layout.max_queued_requests)}`,
    ],
  ],
  [
    "KV in use",
    ({ tick }) => [
      format.percent(ratio(tick.ranks, "kv_used", "kv_total")),
      `${format.percent(ratio(tick.ranks, "kv_cached", "kv_total"))} cached`,
    ],
  ],
  [
    "Memory",
    ({ tick: { memory } }) => {
      const [name, { used, total }] = fullest(memory) ?? ["", { used: 0, total: 0 }];
      return [format.percent(total ? used / total : null), name];
    },
  ],
  [
    "Prefix hits",
    ({ tick }) => [format.percent(ratio(tick.ranks, "prefix_hits", "prefix_queries")), "of prompts"],
  ],
  [
    "Requests/s",
    ({ tick: { point } }) => [format.short(point.requests), `${format.short(point.errors)} errors/s`],
  ],
  [
    "Finished",
    ({ tick }) => [
      format.short(sum(Object.values(tick.finished))),
      `${format.short(tick.finished.error ?? 0)} failed`,
    ],
  ],
  ["Refused", ({ tick }) => [format.short(tick.refused), "with 429"]],
];

export function drawFigures(status) {
  const parent = byId("figures");
  resize(parent, FIGURES.length, (index) =>
    el(
      "div",
      { class: "figure" },
      el("span", { class: "name" }, FIGURES[index][0]),
      el("span", { class: "value num" }),
      el("span", { class: "unit num" }),
    ),
  );
  FIGURES.forEach(([, read], index) => {
    const [value, unit] = read(status);
    setText(parent.children[index].children[1], value);
    setText(parent.children[index].children[2], unit);
  });
}

export function drawEvents({ events }) {
  const parent = byId("events");
  resize(parent, events.length, () =>
    el("li", {}, el("time", { class: "num" }), el("i", { class: "dot" }), el("span")),
  );
  events.toReversed().forEach((event, index) => {
    const [when, , text] = parent.children[index].children;
    parent.children[index].dataset.state = event.kind;
    setText(when, format.time(event.at));
    setText(text, event.rank === null ? event.text : `rank ${event.rank} ${event.text}`);
  });
}

/** [name, {used, total}] of the fullest memory: of a GPU, if there is one. */
function fullest(memory) {
  if (!memory) return null;
  const { gpus } = memory;
  if (!gpus.length) return ["of the host", memory];
  const share = ({ used, total }) => used / total;
  const most = gpus.reduce((found, gpu) => (share(gpu) > share(found) ? gpu : found));
  return [gpus.length > 1 ? `the fullest of ${gpus.length} GPUs` : "of the GPU", most];
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function ratio(ranks, part, whole) {
  const total = sum(ranks.map((rank) => rank[whole]));
  return total ? sum(ranks.map((rank) => rank[part])) / total : null;
}

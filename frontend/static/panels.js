// Everything but charts and chat, drawn from the status.

import { byId, el, resize, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { kvCells } from "./scale.js";

const CELLS_WIDE = 48;
const CELLS_HIGH = 4;
const CELL = 5;
const STEP = 6;

/** The line below the model's name. */
export function layoutText(layout) {
  const { data_parallel_size: dp, tensor_parallel_size: tp } = layout;
  return [
    layout.architecture,
    layout.quantization ? `${layout.quantization} (${layout.dtype})` : layout.dtype,
    layout.kv_cache_dtype === "auto" ? null : `KV ${layout.kv_cache_dtype}`,
    `dp ${dp} × tp ${tp}${layout.expert_parallel ? ", ep" : ""} on ${layout.device}`,
    layout.speculation ? `${layout.speculation}, ${format.counted(layout.num_speculative_tokens, "draft")}` : null,
    layout.prefix_caching ? "prefix cache" : null,
    layout.num_frontends > 1 ? `${layout.num_frontends} frontends` : null,
    `ATOM ${layout.version}`,
  ].filter(Boolean).map((part) => part.replaceAll(" ", "\u00a0")).join("  ·  ");
}

export function drawHeader(status) {
  const { layout, tick, condition } = status;
  document.title = condition === "ready" ? `${layout.model} – ATOM` : `${condition}: ${layout.model} – ATOM`;
  setText(byId("model"), layout.model);
  setText(byId("layout"), layoutText(layout));
  setText(byId("uptime"), `up ${format.duration(tick.uptime)}`);
  drawCondition(condition);
}

export function drawCondition(condition, text = condition) {
  const pill = byId("condition");
  pill.dataset.state = condition;
  setText(pill, text);
}

const FIGURES = [
  ["Running", ({ tick, layout }) => [format.count(tick.point.running), `of ${format.count(layout.max_num_seqs * tick.ranks.length)}`]],
  ["Waiting", ({ tick, layout }) => [format.count(tick.point.waiting), `of ${format.count(layout.max_queued_requests)}`]],
  ["KV in use", ({ tick }) => [format.percent(ratio(tick.ranks, "kv_used", "kv_total")), `${format.percent(ratio(tick.ranks, "kv_cached", "kv_total"))} cached`]],
  ["Prefix hits", ({ tick }) => [format.percent(ratio(tick.ranks, "prefix_hits", "prefix_queries")), "of prompts"]],
  ["Finished", ({ tick }) => [format.short(sum(Object.values(tick.finished))), `${format.short(tick.finished.error ?? 0)} failed`]],
  ["Refused", ({ tick }) => [format.short(tick.refused), "with 429"]],
];

export function drawFigures(status) {
  const parent = byId("figures");
  resize(parent, FIGURES.length, (index) =>
    el("div", { class: "figure" }, el("span", { class: "name" }, FIGURES[index][0]), el("span", { class: "value num" }), el("span", { class: "unit num" })),
  );
  FIGURES.forEach(([, read], index) => {
    const [value, unit] = read(status);
    setText(parent.children[index].children[1], value);
    setText(parent.children[index].children[2], unit);
  });
}

export function drawRanks({ tick }) {
  const parent = byId("ranks");
  resize(parent, tick.ranks.length, makeRank);
  tick.ranks.forEach((rank, index) => drawRank(parent.children[index], rank));
}

function makeRank() {
  const box = { viewBox: `0 0 ${CELLS_WIDE * STEP - 1} ${CELLS_HIGH * STEP - 1}`, role: "img" };
  return el(
    "article", { class: "rank" },
    el("div", { class: "rank-head" }, el("i", { class: "dot" }), el("strong"), el("span", { class: "rank-state" }), el("span", { class: "muted num rank-life" })),
    svg("svg", box, svg("path", { class: "used" }), svg("path", { class: "cached" }), svg("path", { class: "free" })),
    el("p", { class: "rank-figures num" }), el("p", { class: "rank-blocks num" }),
  );
}

function drawRank(element, rank) {
  const [head, map, figures, foot] = element.children;
  element.dataset.state = rank.state;
  setText(head.children[1], `rank ${rank.rank}`);
  setText(head.children[2], rank.state);
  setText(head.children[3], rank.life ? `life ${rank.life}` : "");
  const cells = kvCells(rank.kv_used, rank.kv_cached, rank.kv_total, CELLS_WIDE * CELLS_HIGH);
  const ends = [cells.used, cells.used + cells.cached, CELLS_WIDE * CELLS_HIGH];
  [...map.children].forEach((path, index) => path.setAttribute("d", squares(index ? ends[index - 1] : 0, ends[index])));
  const preempted = rank.preemptions ? `  ·  ${format.counted(rank.preemptions, "preemption")}` : "";
  const blocks = rank.kv_total
    ? `${format.count(rank.kv_used)} used, ${format.count(rank.kv_cached)} cached of ${format.counted(rank.kv_total, "KV block")}`
    : "";
  map.setAttribute("aria-label", blocks || "no figures");
  setText(figures, rank.state === "ready" ? rankFigures(rank) : rank.reason || "no reason known");
  figures.title = rank.reason;
  setText(foot, blocks + preempted);
}

function rankFigures(rank) {
  return [
    `${rank.running} running`,
    `${rank.waiting} waiting`,
    `${format.short(rank.decode)} tokens/s`,
    rank.draft_tokens ? `${format.percent(rank.accepted_tokens / rank.draft_tokens)} of drafts accepted` : null,
  ].filter(Boolean).join("  ·  ");
}

/** The `d` of the cells `from` to `to`, column by column. */
function squares(from, to) {
  let path = "";
  for (let cell = from; cell < to; cell++) {
    path += `M${Math.floor(cell / CELLS_HIGH) * STEP} ${(cell % CELLS_HIGH) * STEP}h${CELL}v${CELL}h-${CELL}z`;
  }
  return path;
}

export function drawRequests({ tick }) {
  const rows = byId("requests");
  resize(rows, tick.requests.length, () => el("tr", {}, ...Array.from({ length: 5 }, () => el("td"))));
  tick.requests.forEach((request, index) => {
    const generated = request.tokens ? format.count(request.tokens) : "waiting";
    const cells = [request.id, `${request.rank}`, format.count(request.prompt_tokens), generated, format.duration(request.age)];
    cells.forEach((text, column) => setText(rows.children[index].children[column], text));
  });
  byId("requests-empty").hidden = tick.requests.length > 0;
  const more = tick.num_requests > tick.requests.length ? `the oldest ${tick.requests.length} of ` : "";
  setText(byId("requests-count"), tick.num_requests ? `${more}${format.count(tick.num_requests)}` : "");
}

export function drawEvents({ events }) {
  const parent = byId("events");
  resize(parent, events.length, () => el("li", {}, el("time", { class: "num" }), el("i", { class: "dot" }), el("span")));
  events.toReversed().forEach((event, index) => {
    const [when, , text] = parent.children[index].children;
    parent.children[index].dataset.state = event.kind;
    setText(when, format.time(event.at));
    setText(text, event.rank === null ? event.text : `rank ${event.rank} ${event.text}`);
  });
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function ratio(ranks, part, whole) {
  const total = sum(ranks.map((rank) => rank[whole]));
  return total ? sum(ranks.map((rank) => rank[part])) / total : null;
}

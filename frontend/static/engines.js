// The engine of each rank: its state and its KV blocks.

import { byId, el, resize, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { kvCells } from "./scale.js";

const CELLS_WIDE = 48;
const CELLS_HIGH = 4;
const CELL = 5;
const STEP = 6;

export function drawRanks({ tick }) {
  const parent = byId("ranks");
  resize(parent, tick.ranks.length, makeRank);
  tick.ranks.forEach((rank, index) => drawRank(parent.children[index], rank));
}

function makeRank() {
  const box = { viewBox: `0 0 ${CELLS_WIDE * STEP - 1} ${CELLS_HIGH * STEP - 1}`, role: "img" };
  return el(
    "article",
    { class: "rank" },
    el(
      "div",
      { class: "rank-head" },
      el("i", { class: "dot" }),
      el("strong"),
      el("span", { class: "rank-state" }),
      el("span", { class: "muted num rank-life" }),
    ),
    svg(
      "svg",
      box,
      svg("path", { class: "used" }),
      svg("path", { class: "cached" }),
      svg("path", { class: "free" }),
    ),
    el("p", { class: "rank-figures num" }),
    el("p", { class: "rank-blocks num" }),
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
  [...map.children].forEach((path, index) =>
    path.setAttribute("d", squares(index ? ends[index - 1] : 0, ends[index])),
  );
  const blocks = blocksText(rank);
  map.setAttribute("aria-label", blocks || "no figures");
  setText(figures, rank.state === "ready" ? figuresText(rank) : rank.reason || "no reason known");
  figures.title = rank.reason;
  setText(foot, format.listed(blocks, rank.preemptions && format.counted(rank.preemptions, "preemption")));
}

function blocksText({ kv_used: used, kv_cached: cached, kv_total: total }) {
  if (!total) return "";
  return `${format.count(used)} used, ${format.count(cached)} cached of ${format.counted(total, "KV block")}`;
}

function figuresText(rank) {
  const { draft_tokens: drafts, accepted_tokens: accepted } = rank;
  return format.listed(
    `${rank.running} running`,
    `${rank.waiting} waiting`,
    `${format.short(rank.decode)} tokens/s`,
    drafts && `${format.percent(accepted / drafts)} of drafts accepted`,
  );
}

/** The `d` of the cells `from` to `to`, column by column. */
function squares(from, to) {
  let path = "";
  for (let cell = from; cell < to; cell++) {
    path += `M${Math.floor(cell / CELLS_HIGH) * STEP} ${(cell % CELLS_HIGH) * STEP}h${CELL}v${CELL}h-${CELL}z`;
  }
  return path;
}

// Connects the parts of the page.

import { key, request } from "./api.js";
import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { drawRanks } from "./engines.js";
import * as format from "./format.js";
import { drawHost } from "./host.js";
import { drawCondition, drawEvents, drawFigures, drawHeader } from "./panels.js";
import { Ranges } from "./ranges.js";
import { drawRequests } from "./requests.js";
import { follow } from "./status.js";

// One cursor for all charts: what happened at the same time is seen together.
const moved = (at) => charts.forEach((chart) => chart.point(at));
const tokens = (title, field) =>
  new Chart({
    title,
    unit: "tokens/s",
    show: format.short,
    least: 10,
    moved,
    series: [{ label: "tokens/s", kind: field, read: (point) => point[field] }],
  });
const latency = (title, field, least) =>
  new Chart({
    title,
    unit: "median",
    show: format.seconds,
    least,
    moved,
    series: ["p50", "p90", "p99"].map((label, index) => ({
      label,
      kind: `latency ${label}`,
      read: (point) => point[field]?.[index] ?? null,
    })),
  });
const charts = [
  tokens("Decode", "decode"),
  tokens("Prefill", "prefill"),
  latency("Time to first token", "ttft", 0.01),
  latency("Inter-token latency", "inter_token", 0.001),
  latency("Time in the queue", "queue", 0.001),
  new Chart({
    title: "Requests",
    unit: "requests/s",
    show: format.short,
    least: 1,
    moved,
    series: [
      { label: "ended/s", kind: "decode", read: (point) => point.requests },
      { label: "errors/s", kind: "bad", read: (point) => point.errors },
    ],
  }),
];
const chat = new Chat();
const ranges = new Ranges(drawCharts);
let shown = null; // the status

function drawCharts() {
  if (!shown) return;
  const range = ranges.of(shown.history);
  for (const chart of charts) chart.draw(range);
}

function draw(status) {
  shown = status;
  unlock();
  byId("main").classList.remove("stale");
  drawHeader(status);
  drawFigures(status);
  drawCharts();
  drawRanks(status);
  drawHost(status);
  drawRequests(status);
  drawEvents(status);
  chat.layout = status.layout;
  chat.isConnected = true;
}

function lost(reason, wait) {
  byId("main").classList.add("stale");
  drawCondition("offline");
  chat.isConnected = false;
  setText(byId("uptime"), `${reason}; next try in ${Math.ceil(wait)} s`);
}

function unlock() {
  byId("lock").hidden = true;
  byId("main").hidden = false;
  for (const id of ["jump", "jump-down"]) byId(id).hidden = false;
  byId("forget").hidden = !key.get();
}

async function lock(error) {
  byId("lock").hidden = false;
  byId("main").hidden = true;
  byId("forget").hidden = true;
  for (const id of ["jump", "jump-down"]) byId(id).hidden = true;
  drawCondition("locked");
  setText(byId("lock-error"), key.get() ? error.message : "");
  key.forget();
  byId("key").focus();
  setText(byId("lock-health"), await health());
}

/** What anyone may know. */
async function health() {
  try {
    await request("ready");
    return "It serves requests.";
  } catch (error) {
    return error.status === 503 ? "It is up, and serves no requests now." : "It cannot be reached.";
  }
}

function start() {
  follow({ changed: draw, lost, locked: lock });
}

byId("charts").append(...charts.map(({ element }) => element));
byId("lock-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  start();
});
byId("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
start();

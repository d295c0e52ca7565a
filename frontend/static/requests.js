// The requests that run: what the server knows of each, and their end.

import { post, request } from "./api.js";
import { byId, confirmed, el, setText, textButton } from "./dom.js";
import * as format from "./format.js";

const rows = new Map(); // by key: a row stays with its sequence when those before it end

export function drawRequests({ tick }) {
  const parent = byId("requests");
  const keys = keysOf(tick.requests);
  for (const [key, row] of rows) {
    if (keys.includes(key)) continue;
    row.remove();
    rows.delete(key);
  }
  tick.requests.forEach((sequence, index) => {
    let row = rows.get(keys[index]);
    if (!row) rows.set(keys[index], (row = makeRow(sequence)));
    if (parent.children[index] !== row) parent.insertBefore(row, parent.children[index] ?? null);
    cellsOf(sequence).forEach((text, column) => setText(row.children[column + 1], text));
  });
  byId("requests-empty").hidden = tick.requests.length > 0;
  const more = tick.num_requests > tick.requests.length ? `the oldest ${tick.requests.length} of ` : "";
  setText(byId("requests-count"), tick.num_requests ? `${more}${format.count(tick.num_requests)}` : "");
}

/** The sequences of one request have the same id. */
function keysOf(sequences) {
  const counts = new Map();
  return sequences.map(({ id }) => {
    counts.set(id, (counts.get(id) ?? 0) + 1);
    return `${id} ${counts.get(id)}`;
  });
}

function cellsOf(sequence) {
  return [
    `${sequence.rank}`,
    format.count(sequence.prompt_tokens),
    sequence.tokens ? format.count(sequence.tokens) : "waiting",
    sequence.rate === null ? format.NONE : format.short(sequence.rate),
    format.seconds(sequence.queue),
    format.duration(sequence.age),
  ];
}

function makeRow({ id, is_hidden: isHidden }) {
  const figures = Array.from({ length: 6 }, () => el("td"));
  if (isHidden) {
    const title = "This response may be stored: whoever has its whole id can read it.";
    return el("tr", {}, el("td", { class: "id mono", title }, id), ...figures, el("td"));
  }
  const name = textButton(id, () => show(id, () => request(pathOf(id))));
  name.title = `What the server knows of ${id}`;
  const abort = el("button", { class: "link abort", type: "button", title: `Abort ${id}` }, "Abort");
  confirmed(abort, () =>
    post(`${pathOf(id)}/abort`, {}).catch((error) => show(id, () => Promise.reject(error))),
  );
  return el("tr", {}, el("td", { class: "id mono" }, name), ...figures, el("td", {}, abort));
}

function pathOf(id) {
  return `v1/requests/${encodeURIComponent(id)}`;
}

/** Show the JSON of a response, or why there is none. */
async function show(title, ask) {
  let text;
  try {
    text = JSON.stringify(await (await ask()).json(), null, 2);
  } catch (error) {
    text = error.message;
  }
  setText(byId("report-title"), title);
  setText(byId("report-text"), text);
  if (!byId("report").open) byId("report").showModal();
}

byId("report-close").addEventListener("click", () => byId("report").close());

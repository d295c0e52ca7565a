// The memory of the server's host and GPUs, and its HTTP responses.

import { byId, el, resize, setText, svg } from "./dom.js";
import * as format from "./format.js";

const WIDTH = 100;

export function drawHost({ tick }) {
  drawMemory(tick.memory);
  drawResponses(tick.responses);
}

function drawMemory(memory) {
  const parent = byId("memory");
  const gpus = memory?.gpus ?? [];
  const bars = memory ? [["Host", memory], ...gpus.map((gpu, index) => [`GPU ${index}`, gpu])] : [];
  resize(parent, bars.length, makeBar);
  bars.forEach(([name, { used, total }], index) => {
    const [label, drawing, text] = parent.children[index].children;
    const share = total ? used / total : 0;
    setText(label, name);
    drawing.children[1].setAttribute("d", `M0 0H${(Math.min(share, 1) * WIDTH).toFixed(1)}V6H0z`);
    setText(text, `${format.gibibytes(used)} of ${format.gibibytes(total)} GiB`);
  });
}

function makeBar() {
  const box = { viewBox: `0 0 ${WIDTH} 6`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const whole = svg("path", { class: "free", d: `M0 0H${WIDTH}V6H0z` });
  const drawing = svg("svg", box, whole, svg("path", { class: "used" }));
  return el("p", { class: "bar num" }, el("span"), drawing, el("span"));
}

function drawResponses(responses) {
  const parent = byId("responses");
  const statuses = Object.keys(responses);
  resize(parent, statuses.length, () => el("div", {}, el("dt"), el("dd")));
  statuses.forEach((status, index) => {
    const [name, count] = parent.children[index].children;
    parent.children[index].dataset.kind = status[0];
    setText(name, status);
    setText(count, format.short(responses[status]));
  });
}

// The logic of the page's modules; returns what is wrong. Run in the page, by test_page.py.

const [scale, sse, reply, format, status, { blocksOf }] = await Promise.all(
  ["scale", "sse", "reply", "format", "status", "blocks"].map((name) => import(`/page/${name}.js`)),
);
const failures = [];

function same(name, found, expected) {
  const [a, b] = [JSON.stringify(found), JSON.stringify(expected)];
  if (a !== b) failures.push(`${name}: ${a}, not ${b}`);
}

// Scaling
same(
  "tops",
  [0, 0.3, 7, 9, 11, 99, 100, 101].map((value) => scale.niceTop(value, 0.5)),
  [0.5, 0.5, 8, 10, 15, 100, 100, 150],
);
same("largest", scale.largest([null, 2, undefined, 1]), 2);
const range = { from: 0, to: 100, top: 10 };
const points = [0, 1, 2, 50, 51].map((at) => ({ at, value: at === 1 ? null : at / 5 }));
const read = ({ value }) => value;
same(
  "runs break at gaps, not at single missing values",
  scale.runs(points, read, range).map((run) => run.length),
  [2, 2],
);
same("coordinates", scale.runs(points, read, range)[1][0], [150, 0]);
same("values above the top stay inside", scale.runs([{ at: 0, value: 99 }], read, range), [[[0, 0]]]);
same("points before the chart", scale.runs([{ at: -1, value: 1 }], read, range), []);
same("a dot", scale.line([[[1, 2]]]), "M1 2L1 2");
same(
  "a line",
  scale.line([
    [
      [0, 100],
      [3, 4.567],
    ],
  ]),
  "M0 100L3 4.57",
);
same(
  "an area",
  scale.area([
    [
      [0, 10],
      [3, 4],
    ],
  ]),
  "M0 100L0 10L3 4L3 100Z",
);
same(
  "nearest",
  [-5, 0.6, 30, 99].map((at) => scale.nearest(points, at)),
  [0, 1, 3, 4],
);
same("nearest of none", scale.nearest([], 1), -1);
same("cells", scale.kvCells(500, 250, 1000, 8), { used: 4, cached: 2, free: 2 });
same("cells of little", scale.kvCells(1, 1, 100000, 8), { used: 1, cached: 1, free: 6 });
same("cells of all", scale.kvCells(99999, 1, 100000, 8), { used: 8, cached: 0, free: 0 });
same("cells of nothing", scale.kvCells(0, 0, 0, 8), { used: 0, cached: 0, free: 8 });

// Server-sent events, split everywhere
const stream =
  ': hello\r\nevent: state\r\ndata: {"a":1}\r\n\r\ndata: one\ndata: two\n\n: c\n\ndata:[DONE]\n\n';
const expected = [
  { type: "state", data: '{"a":1}' },
  { type: "message", data: "one\ntwo" },
  { type: "message", data: "[DONE]" },
];
for (let size = 1; size <= stream.length; size++) {
  const parser = new sse.EventParser();
  const found = [];
  for (let at = 0; at < stream.length; at += size) found.push(...parser.push(stream.slice(at, at + size)));
  same(`events in pieces of ${size}`, found, expected);
}
let refused = "";
try {
  new sse.EventParser().push(`data: ${"x".repeat(5e6)}`);
} catch (error) {
  refused = error.message;
}
same("an endless event", refused, "an event is too large");

// Replies
const whole = new reply.Reply();
const chunks = [
  { choices: [{ delta: { role: "assistant", content: "" } }] },
  { choices: [{ delta: { reasoning: "so", reasoning_content: "so" } }] },
  { choices: [{ delta: { content: "Hi" } }], usage: { completion_tokens: 1 } },
  { choices: [{ delta: { tool_calls: [{ index: 0, id: "c", function: { name: "f", arguments: "{" } }] } }] },
  {
    choices: [
      { delta: { tool_calls: [{ index: 0, function: { arguments: "}" } }] }, finish_reason: "tool_calls" },
    ],
  },
  { choices: [], usage: { completion_tokens: 9 } },
];
same("not done", chunks.map((chunk) => whole.add(JSON.stringify(chunk))).some(Boolean), false);
same("done", whole.add("[DONE]"), true);
same(
  "a reply",
  [whole.content, whole.reasoning, whole.usage.completion_tokens, whole.finishReason],
  ["Hi", "so", 9, "tool_calls"],
);
same("its message", whole.message, {
  role: "assistant",
  content: "Hi",
  tool_calls: [{ id: "c", type: "function", function: { name: "f", arguments: "{}" } }],
});
const completion = new reply.Reply();
completion.add(JSON.stringify({ choices: [{ text: "ab" }] }));
same("a completion", completion.content, "ab");
const broken = new reply.Reply();
same("an error ends it", [broken.add('{"error": {"message": "gone"}}'), broken.error], [true, "gone"]);
same("arguments", [reply.prettyArguments('{"a":1}'), reply.prettyArguments("{a")], ['{\n  "a": 1\n}', "{a"]);

// Blocks of a reply
const blocks = (text) =>
  blocksOf(text).map(({ code, text: content }) => (code ? ["code", content] : content));
same("no text", blocks(""), []);
same("paragraphs", blocks("a\nb\n\nc\n\n\nd"), ["a\nb\n\n", "c\n\n", "\nd"]);
same("code", blocks("see\n```python\nx = `1`\n\n\ny\n```\nso"), [
  "see\n",
  ["code", "x = `1`\n\n\ny\n"],
  "so",
]);
same("open code", blocks("```\nx"), [["code", "x"]]);
same("another fence inside", blocks("~~~\n```\n~~~"), [["code", "```\n"]]);
same("no fence", blocks("```a``` b"), ["```a``` b"]);
same(
  "text is kept",
  blocksOf("a\n\nb\n \nc")
    .map(({ text }) => text)
    .join(""),
  "a\n\nb\n \nc",
);

// Numbers
same("short", [0, 9, 0.123, 1234, 12345, 1234567].map(format.short), [
  "0",
  "9",
  "0.12",
  "1,234",
  "12.3k",
  "1.23M",
]);
same("seconds", [null, 0.0004, 0.0231, 0.5, 1.239, 120].map(format.seconds), [
  "–",
  "0.4 ms",
  "23.1 ms",
  "500 ms",
  "1.24 s",
  "120 s",
]);
same("percent", [null, 0, 1e-6, 0.012, 0.5, 1].map(format.percent), [
  "–",
  "0 %",
  "< 0.1 %",
  "1.2 %",
  "50 %",
  "100 %",
]);
same("duration", [5, 65, 7300, 90000].map(format.duration), ["5 s", "1 min 5 s", "2 h 1 min", "1 d 1 h"]);

// State
const seen = new status.Status();
const tick = (at, ...states) => ({
  point: { at },
  events: [{ at }],
  stopping: false,
  ranks: states.map((state) => ({ state })),
});
seen.apply("state", { layout: {}, tick: tick(0, "ready"), history: [{ at: 0 }], events: [] });
same("ready", seen.condition, "ready");
for (let at = 1; at <= 400; at++) seen.apply("tick", tick(at, "ready", "restarting"));
same("bounded", [seen.history.length, seen.history.at(-1).at, seen.events.length], [300, 400, 200]);
same("degraded", seen.condition, "degraded");
seen.apply("tick", tick(401, "down"));
same("down", seen.condition, "down");

return failures;

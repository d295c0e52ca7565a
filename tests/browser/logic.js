// The logic of the page's modules; returns what is wrong. Run in the page, by test_page.py.

const [scale, sse, reply, format, status, { Conversation }, { ChatStore }] = await Promise.all(
  ["scale", "sse", "reply", "format", "status", "conversation", "chats"].map(
    (name) => import(`/page/${name}.js`),
  ),
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
const range = { from: 0, to: 100, top: 10, gap: 4 };
const points = [0, 1, 2, 50, 51].map((at) => ({ at, value: at === 1 ? null : at / 5 }));
const read = ({ value }) => value;
same(
  "runs break at gaps, not at single missing values",
  scale.runs(points, read, range).map((run) => run.length),
  [2, 2],
);
same(
  "runs of a longer range have longer gaps",
  scale.runs(points, read, { ...range, gap: 60 }).map((run) => run.length),
  [4],
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
same("its calls", whole.calls, [{ id: "c", name: "f", arguments: "{}" }]);
const completion = new reply.Reply();
completion.add(JSON.stringify({ choices: [{ text: "ab" }] }));
same("a completion", completion.content, "ab");
const broken = new reply.Reply();
same("an error ends it", [broken.add('{"error": {"message": "gone"}}'), broken.error], [true, "gone"]);
same("arguments", [reply.prettyArguments('{"a":1}'), reply.prettyArguments("{a")], ['{\n  "a": 1\n}', "{a"]);

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

same("spans", [60, 300, 3600, 21600].map(format.span), [
  "last 60 s",
  "last 5 min",
  "last 60 min",
  "last 6 h",
]);
same("gibibytes", [0, 1.5 * 2 ** 30, 80 * 2 ** 30].map(format.gibibytes), ["0.0", "1.5", "80"]);

// Conversations
const user = (content) => ({ role: "user", content });
const assistant = (content, more = {}) => ({ role: "assistant", content, calls: [], ...more });
const talk = new Conversation();
talk.add(user("  a\n b"), assistant("", { error: "gone" }), user("c"));
same("a title", [talk.title, new Conversation().title], ["a b", "New chat"]);
same("what got no reply is not sent again", talk.messages("be brief"), [
  { role: "system", content: "be brief" },
  { role: "user", content: "c" },
]);
const call = { id: "1", name: "f", arguments: "{}" };
talk.add(assistant("", { calls: [call] }), { role: "tool", id: "1", name: "f", content: "7" });
same("calls and results", talk.messages("").slice(1), [
  {
    role: "assistant",
    content: "",
    tool_calls: [{ id: "1", type: "function", function: { name: "f", arguments: "{}" } }],
  },
  { role: "tool", tool_call_id: "1", content: "7" },
]);
talk.cutAt(talk.entries[3]);
same("cut", talk.entries.length, 3);
talk.cutAt({});
same("nothing is cut", talk.entries.length, 3);
same("as it was kept", new Conversation(JSON.parse(JSON.stringify(talk.kept))).kept, talk.kept);
same("strange entries", new Conversation({ entries: [null, { role: "x" }, user("a")] }).entries, [user("a")]);
for (let n = 0; n < 300; n++) talk.add(user(`${n}`));
same("entries are bounded", [talk.entries.length, talk.entries.at(-1).content], [200, "299"]);

// Kept chats
class Room {
  items = new Map();
  constructor(chars) {
    this.chars = chars;
  }
  getItem = (name) => this.items.get(name) ?? null;
  removeItem = (name) => this.items.delete(name);
  setItem(name, text) {
    const others = [...this.items].filter(([other]) => other !== name);
    if (others.reduce((sum, [, each]) => sum + each.length, text.length) > this.chars)
      throw new Error("full");
    this.items.set(name, text);
  }
}
const chat = (id, size = 1) => ({ id: `${id}`, title: `t${id}`, entries: [user("x".repeat(size))] });
const ids = (store) => store.list().map(({ id }) => id);
const large = new Room(1e9);
const store = new ChatStore(large);
for (let id = 0; id < 60; id++) store.save(chat(id));
same("chats are bounded", [ids(store).length, ids(store)[0], large.items.size], [50, "59", 51]);
store.save(chat(20));
same("the latest is first", ids(store)[0], "20");
same("a chat", store.load("20"), chat(20));
store.remove("20");
same("removed", [store.load("20"), ids(store).includes("20")], [null, false]);
same("a chat of half of all", [store.save(chat("a", 1.2e6)), store.save(chat("b", 1.2e6))], [true, true]);
same("it drives out the others", [ids(store), large.items.size], [["b"], 2]);
same("too large a chat", [store.save(chat("c", 2.1e6)), ids(store)], [false, ["b"]]);
const small = new ChatStore(new Room(600));
for (let id = 0; id < 9; id++) same("a full storage keeps the latest", small.save(chat(id, 200)), true);
same("few fit", ids(small).length < 4 && ids(small)[0] === "8", true);
same("none fits", small.save(chat("d", 900)), false);
const none = new ChatStore(null);
same("without storage", [none.save(chat(1)), none.list(), none.load("1")], [false, [], null]);
for (const text of ["{", "7", "[7, null, {}]", "null"]) {
  const odd = new ChatStore(Object.assign(new Room(1e3), { getItem: () => text }));
  same(`storage with ${text}`, [odd.list(), odd.load("1")], [[], null]);
}

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

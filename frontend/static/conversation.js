// A conversation: what was said, and the request that goes on with it.

const MAX_ENTRIES = 200;
const MAX_TITLE = 48;

/**
 * Its entries are {role: "user", content}, {role: "assistant", content, reasoning, calls, foot, error} and
 * {role: "tool", id, name, content}; they are replaced, never changed. `id`, `options` (by name, as they
 * were typed) and `entries` are kept between visits.
 */
export class Conversation {
  constructor(kept = {}) {
    this.id = kept.id ?? newId();
    this.options = kept.options ?? {};
    this.entries = (kept.entries ?? []).filter((entry) => ROLES.has(entry?.role));
  }

  get title() {
    const first = this.entries.find(({ role }) => role === "user");
    const text = first?.content.trim().replaceAll(/\s+/g, " ") ?? "";
    return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE)}…` : text || "New chat";
  }

  /** What the store keeps. */
  get kept() {
    const { id, title, options, entries } = this;
    return { id, title, options, entries };
  }

  add(...entries) {
    this.entries = [...this.entries, ...entries].slice(-MAX_ENTRIES);
  }

  /** Drop `entry` and all after it. */
  cutAt(entry) {
    const index = this.entries.indexOf(entry);
    if (index >= 0) this.entries = this.entries.slice(0, index);
  }

  /** The messages of the API, without replies that have nothing, and without what they were to respond to. */
  messages(system) {
    const first = system ? [{ role: "system", content: system }] : [];
    const isEmpty = (entry) => entry?.role === "assistant" && !entry.content && !entry.calls?.length;
    const useful = this.entries.filter(
      (entry, index) => !isEmpty(entry) && !(entry.role === "user" && isEmpty(this.entries[index + 1])),
    );
    return [...first, ...useful.map(messageOf)];
  }
}

const ROLES = new Set(["user", "assistant", "tool"]);

function messageOf({ role, content, calls, id }) {
  if (role === "tool") return { role, tool_call_id: id, content };
  if (!calls?.length) return { role, content };
  const functions = calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role, content, tool_calls: functions };
}

function newId() {
  const bytes = Array.from(crypto.getRandomValues(new Uint8Array(8)));
  return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

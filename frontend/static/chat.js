// The chat box: a conversation, streamed.

import { post } from "./api.js";
import { blocksOf } from "./blocks.js";
import { byId, el, resize, setText } from "./dom.js";
import * as format from "./format.js";
import { Reply, prettyArguments } from "./reply.js";
import { eventsOf } from "./sse.js";

const MAX_MESSAGES = 200;
const CHAT_HINT = "Enter sends, Shift+Enter starts a line, Esc stops.";
const COMPLETE_HINT = `This model has no chat template: it continues your text. ${CHAT_HINT}`;

export class Chat {
  #history = []; // messages as they are sent; replaced, never changed
  #running = null; // AbortController of the stream
  #layout = null;
  #frame = null; // of the next drawing
  #pendingCalls = []; // tool calls of the last reply, with the fields for their results

  constructor() {
    this.list = byId("messages");
    this.prompt = byId("prompt");
    this.button = byId("send");
    this.empty = byId("chat-empty");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.#running.abort();
      else this.#send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) this.#send();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    for (const id of ["temperature", "max-tokens", "tools"])
      byId(id).addEventListener("input", () => this.#showOptions());
  }

  /** What the server is; without a chat template the box completes texts. */
  set layout(layout) {
    if (this.#layout?.has_chat !== layout.has_chat) {
      setText(byId("chat-title"), layout.has_chat ? "Chat" : "Complete");
      setText(this.empty, layout.has_chat ? CHAT_HINT : COMPLETE_HINT);
      for (const id of ["system", "tools"]) byId(id).disabled = !layout.has_chat;
    }
    this.#layout = layout;
  }

  #clear() {
    this.#running?.abort();
    this.#history = [];
    this.#pendingCalls = [];
    this.list.replaceChildren(this.empty);
    this.empty.hidden = false;
    this.prompt.focus();
  }

  #showOptions() {
    const shown = [];
    if (byId("temperature").value) shown.push(`temperature ${byId("temperature").value}`);
    if (byId("max-tokens").value) shown.push(`${byId("max-tokens").value} tokens`);
    if (byId("tools").value.trim()) shown.push("tools");
    setText(byId("options-shown"), shown.join(", "));
  }

  async #send() {
    const text = this.prompt.value;
    const results = this.#pendingCalls.map(({ call, field }) => ({
      role: "tool",
      tool_call_id: call.id,
      content: field.value,
    }));
    if (!text.trim() && !results.length) return;
    const added = text.trim() ? [...results, { role: "user", content: text }] : results;
    let body;
    try {
      body = this.#body(text, added);
    } catch (error) {
      this.#show("error", error.message);
      return;
    }
    this.prompt.value = "";
    for (const { field } of this.#pendingCalls) field.disabled = true;
    this.#pendingCalls = [];
    if (text.trim()) this.#show("user", text);
    const before = this.#history;
    const { reply, view } = await this.#stream(body);
    if (this.#history !== before || !(reply.content || reply.calls.length)) return; // cleared, or no reply
    this.#history = [...before, ...added, reply.message].slice(-MAX_MESSAGES);
    if (reply.finishReason === "tool_calls") this.#pendingCalls = view.askForResults(reply.calls);
  }

  /** The request with `added` messages. Throws an Error for tools that are no JSON array. */
  #body(text, added) {
    const body = {
      model: this.#layout.model,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    if (byId("temperature").value) body.temperature = Number(byId("temperature").value);
    if (byId("max-tokens").value) body.max_tokens = Number(byId("max-tokens").value);
    if (!this.#layout.has_chat) return { ...body, prompt: text };
    const tools = byId("tools").value.trim();
    if (tools) body.tools = parseTools(tools);
    const system = byId("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return { ...body, messages: [...first, ...this.#history, ...added] };
  }

  async #stream(body) {
    const [reply, view] = [new Reply(), new ReplyView(this.list)];
    this.#running = new AbortController();
    this.#showRunning(true);
    let stopped = false;
    try {
      const path = this.#layout.has_chat ? "v1/chat/completions" : "v1/completions";
      const response = await post(path, body, this.#running.signal);
      for await (const { data } of eventsOf(response)) {
        if (reply.add(data)) break;
        this.#drawSoon(view, reply);
      }
    } catch (error) {
      stopped = error.name === "AbortError";
      if (!stopped) reply.error = error.message;
    }
    this.#running = null;
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.#showRunning(false);
    this.#keepAtEnd(() => view.finish(reply, stopped));
    return { reply, view };
  }

  /** Draw once a frame, however many chunks arrive. */
  #drawSoon(view, reply) {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#keepAtEnd(() => view.draw(reply));
    });
  }

  #showRunning(running) {
    setText(this.button, running ? "Stop" : "Send");
    this.button.classList.toggle("stop", running);
    this.list.setAttribute("aria-busy", `${running}`);
  }

  #show(kind, text) {
    this.#keepAtEnd(() => {
      this.empty.hidden = true;
      this.list.append(el("div", { class: `message ${kind}` }, text));
    }, true);
    while (this.list.children.length > MAX_MESSAGES) this.list.children[1].remove();
  }

  /** Change the list; if its end was visible, it is still. */
  #keepAtEnd(change, always = false) {
    const list = this.list;
    const atEnd = always || list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    change();
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
}

/** The elements of one reply. New text is appended, so that a long reply costs no more than a short one. */
class ReplyView {
  constructor(list) {
    this.reasoning = el("div", { class: "reasoning-text" });
    this.summary = el("summary", {}, "Thinking …");
    this.details = el("details", { class: "reasoning", hidden: "" }, this.summary, this.reasoning);
    this.content = el("div", { class: "content" });
    this.calls = el("div", { class: "calls" });
    this.foot = el("p", { class: "usage num" }, "…");
    this.element = el(
      "div",
      { class: "message assistant", "aria-busy": "true" },
      this.details,
      this.content,
      this.calls,
      this.foot,
    );
    list.append(this.element);
    list.scrollTop = list.scrollHeight;
  }

  draw(reply) {
    this.#append(this.reasoning, reply.reasoning);
    this.#append(this.content, reply.content);
    this.details.hidden = !reply.reasoning;
    if (reply.content || reply.calls.length) setText(this.summary, "Reasoning");
    reply.calls.forEach((call, index) => this.#drawCall(call, index));
    if (reply.usage) setText(this.foot, usageText(reply));
  }

  finish(reply, stopped) {
    this.draw(reply);
    this.element.setAttribute("aria-busy", "false");
    if (reply.reasoning) setText(this.summary, "Reasoning");
    for (const [index, call] of reply.calls.entries())
      setText(this.calls.children[index].querySelector("pre"), prettyArguments(call.arguments));
    const end = stopped
      ? "stopped"
      : { length: "cut at the limit", tool_calls: "tool call" }[reply.finishReason];
    setText(this.foot, format.listed(reply.usage ? usageText(reply) : null, end));
    if (reply.error) this.element.append(el("p", { class: "error", role: "alert" }, reply.error));
  }

  /** [{call, field}]: an input for the result of each call. */
  askForResults(calls) {
    return calls.map((call, index) => {
      const field = el("input", {
        class: "mono",
        placeholder: "result, then Send",
        "aria-label": `Result of ${call.name}`,
      });
      this.calls.children[index].append(field);
      return { call, field };
    });
  }

  /** Append what is new: blocks that are complete are not touched. */
  #append(element, text) {
    const blocks = blocksOf(text);
    resize(element, blocks.length, (index) => el(blocks[index].code ? "pre" : "p"));
    blocks.forEach((block, index) => {
      let shown = element.children[index];
      if (block.code !== (shown.localName === "pre")) {
        const other = el(block.code ? "pre" : "p"); // its beginning did not look like a fence
        shown.replaceWith(other);
        shown = other;
      }
      const old = shown.textContent;
      if (!block.text.startsWith(old)) setText(shown, block.text);
      else if (block.text.length > old.length) shown.append(block.text.slice(old.length));
    });
  }

  #drawCall(call, index) {
    while (this.calls.children.length <= index) {
      this.calls.append(
        el("div", { class: "call" }, el("strong", { class: "mono" }), el("pre", { class: "mono" })),
      );
    }
    const [name, text] = this.calls.children[index].children;
    setText(name, call.name);
    setText(text, call.arguments);
  }
}

/** "12 (8 cached) + 84 tokens · first after 31 ms · 41 tokens/s" */
function usageText({ usage }) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const prompt = format.count(usage.prompt_tokens) + (cached ? ` (${format.count(cached)} cached)` : "");
  return format.listed(
    `${prompt} + ${format.counted(usage.completion_tokens, "token")}`,
    usage.ttft_s ? `first after ${format.seconds(usage.ttft_s)}` : null,
    usage.tpot_s ? `${format.short(1 / usage.tpot_s)} tokens/s` : null,
  );
}

function parseTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`the tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("the tools are not a JSON array");
  return tools;
}

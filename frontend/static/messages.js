// The elements of the messages of a conversation.

import { copyButton, el, setText, textButton } from "./dom.js";
import * as format from "./format.js";
import { MarkdownView } from "./markdown.js";
import { prettyArguments } from "./reply.js";

/** What a user has written, with `edit(text)` for another text in its place. */
export function userMessage({ content }, edit) {
  const text = el("div", { class: "text" }, content);
  const actions = el(
    "p",
    { class: "actions" },
    copyButton(() => content),
  );
  const element = el("div", { class: "message user" }, text, actions);
  actions.append(
    textButton("Edit", () => {
      const editor = editorOf(content, edit, () => editor.replaceWith(element));
      element.replaceWith(editor);
      editor.querySelector("textarea").focus();
    }),
  );
  return element;
}

function editorOf(content, edit, cancel) {
  const field = el("textarea", { rows: "4", "aria-label": "Message" });
  field.value = content;
  const send = el("button", { class: "primary", type: "submit" }, "Send");
  const buttons = el("p", { class: "actions" }, send, textButton("Cancel", cancel));
  const form = el("form", { class: "message user editor" }, field, buttons);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) edit(field.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  return form;
}

/** The result of a tool call, as the user gave it. */
export function toolMessage({ name, content }) {
  const [label, text] = [el("strong", { class: "mono" }, name), el("pre", { class: "mono" }, content)];
  return el("div", { class: "message tool" }, label, text);
}

export function errorMessage(text) {
  return el("div", { class: "message error", role: "alert" }, text);
}

/** The elements of one reply. What is complete is not drawn again, so that a long reply costs little more. */
export class ReplyView {
  #content;
  #text = "";
  #numReasoned = 0; // characters of the reasoning that are shown

  /** `regenerate()` is called for another reply in its place. */
  constructor(regenerate) {
    this.reasoning = el("div", { class: "reasoning-text" });
    this.summary = el("summary", {}, "Thinking …");
    this.details = el("details", { class: "reasoning", hidden: "" }, this.summary, this.reasoning);
    this.content = el("div", { class: "content" });
    this.#content = new MarkdownView(this.content);
    this.calls = el("div", { class: "calls" });
    this.foot = el("p", { class: "usage num" }, "…");
    this.error = el("p", { class: "error", role: "alert" });
    const again = textButton("Regenerate", regenerate);
    again.classList.add("regenerate");
    this.actions = el(
      "p",
      { class: "actions" },
      copyButton(() => this.#text),
      again,
    );
    this.element = el(
      "div",
      { class: "message assistant", "aria-busy": "true" },
      this.details,
      this.content,
      this.calls,
      this.foot,
      this.error,
      this.actions,
    );
  }

  /** Show what there is of a reply, which has the fields of a conversation's entry. */
  draw(reply) {
    this.#text = reply.content;
    this.#appendReasoning(reply.reasoning);
    this.#content.show(reply.content);
    this.details.hidden = !reply.reasoning;
    if (reply.content || reply.calls.length) setText(this.summary, "Reasoning");
    reply.calls.forEach((call, index) => this.#drawCall(call, index));
    if (reply.usage) setText(this.foot, usageText(reply.usage));
  }

  /** Show a whole entry. */
  finish(entry) {
    this.draw(entry);
    this.element.setAttribute("aria-busy", "false");
    setText(this.summary, "Reasoning");
    for (const [index, call] of entry.calls.entries())
      setText(this.calls.children[index].querySelector("pre"), prettyArguments(call.arguments));
    setText(this.foot, entry.foot);
    setText(this.error, entry.error ?? "");
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

  #appendReasoning(text) {
    if (text.length > this.#numReasoned) this.reasoning.append(text.slice(this.#numReasoned));
    this.#numReasoned = text.length;
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

/** The line below a reply: "12 (8 cached) + 84 tokens · first after 31 ms · 41 tokens/s · cut at the limit" */
export function footText({ usage, finishReason }, stopped) {
  const ends = { length: "cut at the limit", tool_calls: "tool call" };
  return format.listed(usage ? usageText(usage) : null, stopped ? "stopped" : ends[finishReason]);
}

function usageText(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const prompt = format.count(usage.prompt_tokens) + (cached ? ` (${format.count(cached)} cached)` : "");
  return format.listed(
    `${prompt} + ${format.counted(usage.completion_tokens, "token")}`,
    usage.ttft_s ? `first after ${format.seconds(usage.ttft_s)}` : null,
    usage.tpot_s ? `${format.short(1 / usage.tpot_s)} tokens/s` : null,
  );
}

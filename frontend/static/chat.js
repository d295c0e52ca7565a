// The chat box: conversations, streamed and kept.

import { post } from "./api.js";
import { ChatStore, browserStorage } from "./chats.js";
import { Conversation } from "./conversation.js";
import { byId, confirmed, el, resize, setText } from "./dom.js";
import { ReplyView, errorMessage, footText, toolMessage, userMessage } from "./messages.js";
import { Options } from "./options.js";
import { Reply } from "./reply.js";
import { eventsOf } from "./sse.js";

const CHAT_HINT = "Enter sends, Shift+Enter starts a line, Esc stops. Chats stay in this browser.";
const COMPLETE_HINT = `This model has no chat template: it continues your text. ${CHAT_HINT}`;
// Drawing may take one part in so many of the time: a long block takes longer.
const DRAWING_SHARE = 4;

export class Chat {
  #store = new ChatStore(browserStorage());
  #chat = new Conversation();
  #running = null; // AbortController of the stream
  #layout = null;
  #frame = null; // of the next drawing
  #notBefore = 0; // time of the next drawing
  #pendingCalls = []; // tool calls of the last reply, with the fields for their results
  #isConnected = true;

  constructor() {
    this.list = byId("messages");
    this.prompt = byId("prompt");
    this.button = byId("send");
    this.empty = byId("chat-empty");
    this.picker = byId("chats");
    this.options = new Options(() => this.#keepOptions());
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
    byId("new-chat").addEventListener("click", () => {
      this.#open(this.#newChat());
      this.prompt.focus();
    });
    confirmed(byId("delete-chat"), () => this.#delete());
    this.picker.addEventListener("change", () => this.#openKept(this.picker.value));
    this.#openKept(this.#store.list()[0]?.id);
  }

  /** What the server is; without a chat template the box completes texts. */
  set layout(layout) {
    if (this.#layout?.has_chat !== layout.has_chat) {
      setText(byId("chat-title"), layout.has_chat ? "Chat" : "Complete");
      setText(this.empty, layout.has_chat ? CHAT_HINT : COMPLETE_HINT);
      this.options.hasChat = layout.has_chat;
    }
    this.#layout = layout;
  }

  /** Whether the server can be reached: what is typed waits until then. */
  set isConnected(isConnected) {
    if (this.#isConnected === isConnected) return;
    this.#isConnected = isConnected;
    this.#showRunning();
  }

  // Conversations

  #newChat() {
    return new Conversation({ options: this.options.values });
  }

  #openKept(id) {
    const kept = id === undefined ? null : this.#store.load(id);
    this.#open(kept ? new Conversation(kept) : this.#newChat());
  }

  #open(chat) {
    this.#running?.abort();
    this.#chat = chat;
    this.options.values = chat.options;
    this.#showEntries();
    this.#showPicker();
  }

  #delete() {
    this.#store.remove(this.#chat.id);
    this.#openKept(this.#store.list()[0]?.id);
  }

  #keepOptions() {
    this.#chat.options = this.options.values;
    if (this.#chat.entries.length) this.#keep(this.#chat);
  }

  #keep(chat) {
    const isKept = this.#store.save(chat.kept);
    byId("not-kept").hidden = isKept;
    this.#showPicker();
  }

  #showPicker() {
    const { id, title } = this.#chat;
    const kept = this.#store.list();
    const all = kept.some((each) => each.id === id) ? kept : [{ id, title }, ...kept];
    resize(this.picker, all.length, () => el("option"));
    all.forEach((each, index) => {
      this.picker.children[index].value = each.id;
      setText(this.picker.children[index], each.title);
    });
    this.picker.value = id;
  }

  #showEntries() {
    this.list.replaceChildren(this.empty);
    this.#append(this.#chat.entries);
  }

  #append(entries) {
    this.empty.hidden = this.#chat.entries.length > 0;
    this.#pendingCalls = [];
    for (const entry of entries) this.#show(entry);
    this.list.scrollTop = this.list.scrollHeight;
  }

  #show(entry) {
    if (entry.role === "user") this.list.append(userMessage(entry, (text) => this.#edit(entry, text)));
    else if (entry.role === "tool") this.list.append(toolMessage(entry));
    else
      this.#finish(
        this.#replyView(() => entry),
        entry,
      );
  }

  #finish(view, entry) {
    view.finish(entry);
    if (entry === this.#chat.entries.at(-1)) this.#pendingCalls = view.askForResults(entry.calls);
  }

  /** A view at the end of the list; `entryOf()` is the entry that it shows, once there is one. */
  #replyView(entryOf) {
    const view = new ReplyView(() => this.#regenerate(entryOf()));
    this.list.append(view.element);
    return view;
  }

  // Requests

  #edit(entry, text) {
    if (this.#running || !this.#canSend()) return;
    this.#chat.cutAt(entry);
    this.#chat.add({ role: "user", content: text });
    this.#showEntries();
    this.#respond();
  }

  #regenerate(entry) {
    if (this.#running || !entry || !this.#canSend()) return;
    this.#chat.cutAt(entry);
    this.#showEntries();
    this.#respond();
  }

  #send() {
    const content = this.prompt.value;
    const results = this.#pendingCalls.map(({ call, field }) => ({
      role: "tool",
      id: call.id,
      name: call.name,
      content: field.value,
    }));
    if ((!content.trim() && !results.length) || !this.#canSend()) return;
    this.prompt.value = "";
    for (const { field } of this.#pendingCalls) field.remove();
    const added = content.trim() ? [...results, { role: "user", content }] : results;
    this.#chat.add(...added);
    this.#append(added);
    this.#respond();
  }

  /** Whether a request can be made now; an error of the options is shown. */
  #canSend() {
    if (!this.#isConnected || !this.#layout) return false;
    try {
      this.options.fields(this.#layout.has_chat);
      return true;
    } catch (error) {
      this.list.append(errorMessage(error.message));
      this.list.scrollTop = this.list.scrollHeight;
      return false;
    }
  }

  #body() {
    const { model, has_chat: hasChat } = this.#layout;
    const body = {
      model,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...this.options.fields(hasChat),
    };
    if (hasChat) return { ...body, messages: this.#chat.messages(this.options.system) };
    return { ...body, prompt: this.#chat.entries.findLast(({ role }) => role === "user")?.content ?? "" };
  }

  /** Get the reply to the conversation so far. */
  async #respond() {
    const chat = this.#chat;
    chat.options = this.options.values;
    this.#keep(chat);
    let entry = null;
    const view = this.#replyView(() => entry);
    this.list.scrollTop = this.list.scrollHeight;
    const { reply, stopped } = await this.#stream(this.#body(), view);
    const { content, reasoning, calls, error } = reply;
    entry = { role: "assistant", content, reasoning, calls, foot: footText(reply, stopped), error };
    chat.add(entry);
    if (this.#store.load(chat.id) || chat === this.#chat) this.#keep(chat); // else it was deleted
    if (chat !== this.#chat) return;
    this.#keepAtEnd(() => this.#finish(view, entry));
  }

  async #stream(body, view) {
    const reply = new Reply();
    const running = new AbortController();
    this.#running = running;
    this.#showRunning();
    let stopped = false;
    try {
      const path = this.#layout.has_chat ? "v1/chat/completions" : "v1/completions";
      const response = await post(path, body, running.signal);
      let isDone = false;
      for await (const { data } of eventsOf(response)) {
        if ((isDone = reply.add(data))) break;
        this.#drawSoon(view, reply);
      }
      if (!isDone) reply.error = "the response ended before it was complete";
    } catch (error) {
      stopped = running.signal.aborted;
      if (!stopped) reply.error = reasonOf(error);
    }
    if (this.#running === running) {
      this.#running = null;
      cancelAnimationFrame(this.#frame);
      this.#frame = null;
      this.#showRunning();
    }
    return { reply, stopped };
  }

  // Drawing

  /** Draw once a frame at most, however many chunks arrive. */
  #drawSoon(view, reply) {
    this.#frame ??= requestAnimationFrame((begun) => {
      this.#frame = null;
      if (begun < this.#notBefore) return this.#drawSoon(view, reply);
      this.#keepAtEnd(() => view.draw(reply));
      const end = performance.now();
      this.#notBefore = end + (DRAWING_SHARE - 1) * (end - begun);
    });
  }

  #showRunning() {
    const isRunning = this.#running !== null;
    setText(this.button, isRunning ? "Stop" : this.#isConnected ? "Send" : "Offline");
    this.button.classList.toggle("stop", isRunning);
    this.button.disabled = !isRunning && !this.#isConnected;
    this.list.setAttribute("aria-busy", `${isRunning}`);
  }

  /** Change the list; if its end was visible, it is still. */
  #keepAtEnd(change) {
    const list = this.list;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    change();
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
}

/** Browsers have names of their own for a connection that is lost. */
function reasonOf(error) {
  return error instanceof TypeError ? "the server cannot be reached: Regenerate tries again" : error.message;
}

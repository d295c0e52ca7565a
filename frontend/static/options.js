// The options of a chat: what is sampled, the system message and the tools.

import { byId, el, setText } from "./dom.js";

// [field of the request, label, attributes of its input]
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.05 }],
  ["seed", "Seed", { min: 0, step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 2, step: 0.05 }],
];
const TEXTS = ["stop", "system", "tools"];

export class Options {
  #fields = new Map();

  /** `changed()` is called when one of them has changed. */
  constructor(changed) {
    byId("numbers").append(...NUMBERS.map(numberField));
    for (const name of [...NUMBERS.map(([name]) => name), ...TEXTS]) {
      const field = byId(name.replaceAll("_", "-"));
      this.#fields.set(name, field);
      field.addEventListener("input", () => this.#show());
      field.addEventListener("change", changed);
    }
  }

  /** What was typed, by name; what is empty is left out. */
  get values() {
    const typed = [...this.#fields].map(([name, field]) => [name, field.value]);
    return Object.fromEntries(typed.filter(([, value]) => value.trim()));
  }

  set values(values) {
    for (const [name, field] of this.#fields) field.value = String(values[name] ?? "");
    this.#show();
  }

  /** Without a chat template there are neither a system message nor tools. */
  set hasChat(hasChat) {
    for (const name of ["system", "tools"]) this.#fields.get(name).disabled = !hasChat;
  }

  get system() {
    return this.#fields.get("system").value.trim();
  }

  /** Fields of a request. Throws an Error for tools that are no JSON array. */
  fields(hasChat) {
    const { values } = this;
    const fields = {};
    for (const [name] of NUMBERS) if (values[name]) fields[name] = Number(values[name]);
    if (values.stop) fields.stop = values.stop.split("\n").filter(Boolean);
    if (values.tools && hasChat) fields.tools = parseTools(values.tools);
    return fields;
  }

  #show() {
    const { values } = this;
    const shown = NUMBERS.filter(([name]) => values[name]).map(
      ([name, label]) => `${label.toLowerCase()} ${values[name]}`,
    );
    for (const name of TEXTS) if (values[name]) shown.push(name);
    setText(byId("options-shown"), shown.join(", "));
  }
}

function numberField([name, label, attributes]) {
  const input = { id: name.replaceAll("_", "-"), type: "number", placeholder: "default", ...attributes };
  return el("label", {}, `${label} `, el("input", input));
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

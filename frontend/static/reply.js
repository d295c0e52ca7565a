// One reply of the model, put together from the chunks of a stream.

/** Content, reasoning, tool calls and usage as far as they have arrived. */
export class Reply {
  content = "";
  reasoning = "";
  calls = [];
  usage = null;
  finishReason = null;
  error = null;

  /** Take in the data of one event; returns whether the stream is done. */
  add(data) {
    if (data === "[DONE]") return true;
    const chunk = JSON.parse(data);
    if (chunk.error) {
      this.error = chunk.error.message;
      return true;
    }
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) this.#addChoice(choice);
    return false;
  }

  #addChoice(choice) {
    const delta = choice.delta ?? { content: choice.text }; // a completion has text
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) {
      const known = (this.calls[call.index] ??= { id: "", name: "", arguments: "" });
      known.id ||= call.id ?? "";
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    this.finishReason = choice.finish_reason ?? this.finishReason;
  }
}

/** Arguments with line breaks, if they are JSON. */
export function prettyArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

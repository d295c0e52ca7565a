// A reply's text as blocks: paragraphs, and code between fences.

const FENCE = /^ {0,3}(`{3,}|~{3,})[^`]*$/;

/**
 * [{code, text}]. The last block may still grow, and a fence may still come; the blocks before it are final.
 * Fences are left out, line breaks between paragraphs are kept in the earlier one.
 */
export function blocksOf(text) {
  const blocks = [];
  let fence = null; // that of the open code block
  for (const line of text.match(/.*\n|.+$/g) ?? []) {
    const last = blocks.at(-1);
    const found = line.trimEnd().match(FENCE)?.[1];
    if (fence ? closes(found, fence, line) : found) {
      fence = fence ? null : found;
      blocks.push({ code: fence !== null, text: "" });
    } else if (last && (fence || last.text === "" || !last.text.endsWith("\n\n"))) {
      last.text += line;
    } else {
      blocks.push({ code: false, text: line });
    }
  }
  return blocks.filter(({ code, text: content }) => code || content);
}

function closes(found, fence, line) {
  return found?.startsWith(fence) && line.trim() === found;
}

// Markdown as elements. markdown-it reads it; what it finds enters as elements and text, never as markup.

import MarkdownIt from "./markdown-it.js";
import { copyButton, el } from "./dom.js";

// The parser's worst cases take longer than the length of a text: what is longer is shown as it is.
const MAX_CHARS = 200_000;
const MAX_INLINE_CHARS = 10_000; // of a paragraph, a heading, a cell

const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "thead", "tbody", "tr", "strong", "em", "s"]);
const SAFE_LINK = /^(https?:|mailto:)/i;

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.py is no address
parser.core.ruler.at("inline", (state) => {
  for (const token of state.tokens) {
    if (token.type !== "inline") continue;
    token.children = [];
    if (token.content.length <= MAX_INLINE_CHARS)
      parser.inline.parse(token.content, parser, state.env, token.children);
    else token.children.push(Object.assign(new state.Token("text", "", 0), { content: token.content }));
  }
});

/** Shows a text that grows in `element`. Blocks that are complete are not read or drawn again. */
export class MarkdownView {
  #element;
  #text = "";
  #end = 0; // of the complete blocks
  #growing = []; // elements of the last block
  #links = Object.create(null); // definitions of links in the complete blocks
  #more = el("p", { class: "plain" }); // what is longer than MAX_CHARS

  constructor(element) {
    this.#element = element;
  }

  show(given) {
    const text = given.replaceAll("\r", "");
    if (text === this.#text) return;
    if (!text.startsWith(this.#text)) this.#clear();
    this.#text = text;
    const rest = text.slice(this.#end, MAX_CHARS);
    const tokens = parser.parse(rest, { references: Object.create(this.#links) });
    const last = tokens.findLastIndex(({ level, nesting, map }) => level === 0 && nesting >= 0 && map);
    for (const old of this.#growing) old.remove();
    this.#more.remove();
    this.#element.append(...elementsOf(tokens.slice(0, Math.max(last, 0))));
    this.#growing = elementsOf(tokens.slice(Math.max(last, 0)));
    this.#element.append(...this.#growing);
    if (last > 0) this.#complete(rest.slice(0, indexOfLine(rest, tokens[last].map[0])));
    if (text.length > MAX_CHARS) {
      this.#more.textContent = text.slice(MAX_CHARS);
      this.#element.append(this.#more);
    }
  }

  #complete(text) {
    this.#end += text.length;
    parser.block.parse(text, parser, { references: this.#links }, []); // what follows may be half a definition
  }

  #clear() {
    this.#element.replaceChildren();
    this.#end = 0;
    this.#growing = [];
    this.#links = Object.create(null);
  }
}

function indexOfLine(text, line) {
  let index = 0;
  for (let passed = 0; passed < line; passed++) index = text.indexOf("\n", index) + 1;
  return index;
}

/** The elements of block tokens, or of the inline tokens of a block. */
function elementsOf(tokens) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.type === "inline") parent.append(...elementsOf(token.children));
    else if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) open.push(token.hidden ? parent : append(parent, containerOf(token)));
    else parent.append(leafOf(token));
  }
  return [...root.childNodes];
}

function append(parent, child) {
  if (child.localName !== "table") parent.append(child);
  else parent.append(el("div", { class: "wide" }, child)); // it scrolls alone
  return child;
}

function containerOf(token) {
  if (/^h[1-6]$/.test(token.tag)) return el(`h${Math.min(Number(token.tag[1]) + 2, 6)}`); // the page has two
  if (token.tag === "table") return el("table");
  if (token.tag === "th" || token.tag === "td")
    return el(token.tag, { class: `cell ${token.attrGet("style")?.replace("text-align:", "to-") ?? ""}` });
  if (token.tag === "ol" && token.attrGet("start")) return el("ol", { start: token.attrGet("start") });
  if (token.tag === "a") return linkTo(token.attrGet("href"));
  return el(TAGS.has(token.tag) ? token.tag : "span");
}

function leafOf(token) {
  switch (token.type) {
    case "softbreak":
    case "hardbreak":
      return el("br");
    case "hr":
      return el("hr");
    case "code_inline":
      return el("code", {}, token.content);
    case "fence":
    case "code_block":
      return codeOf(token);
    case "image": {
      // A picture of another host would tell it who reads this, and perhaps what.
      const link = linkTo(token.attrGet("src"));
      link.append(`[picture: ${token.content}]`);
      return link;
    }
    default:
      return token.content;
  }
}

/** A link that opens in another tab; without a scheme that is safe, only its text. */
function linkTo(address) {
  if (!SAFE_LINK.test(address ?? "")) return el("span");
  return el("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function codeOf(token) {
  const [language = ""] = token.info.trim().split(/\s/);
  const code = token.content.replace(/\n$/, "");
  const head = el(
    "div",
    { class: "code-head" },
    el("span", {}, language),
    copyButton(() => code),
  );
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, code)));
}

// What Markdown becomes, hostile texts included; returns what is wrong. Run in the page, by test_page.py.

const { MarkdownView } = await import("/page/markdown.js");
const failures = [];

function same(name, found, expected) {
  if (found !== expected) failures.push(`${name}: ${found}, not ${expected}`);
}

function shown(text, pieces = text.length) {
  const element = document.createElement("div");
  const view = new MarkdownView(element);
  for (let end = pieces; end < text.length; end += pieces) view.show(text.slice(0, end));
  view.show(text);
  return element;
}

/** As HTML, without the tools around code and tables. */
function html(text, pieces) {
  const element = shown(text, pieces);
  for (const head of element.querySelectorAll(".code-head")) head.remove();
  for (const link of element.querySelectorAll("a")) {
    same("a link keeps its page away", `${link.rel} ${link.target}`, "noopener noreferrer nofollow _blank");
    for (const name of ["rel", "target", "title"]) link.removeAttribute(name);
  }
  return element.innerHTML.replaceAll(/ (class|tabindex)="[^"]*"/g, "").replaceAll(/<\/?div>/g, "");
}

const cases = [
  ["", ""],
  ["a\nb\n\nc", "<p>a<br>b</p><p>c</p>"],
  ["**b** *i* ~~s~~ `c <b>`", "<p><strong>b</strong> <em>i</em> <s>s</s> <code>c &lt;b&gt;</code></p>"],
  ["# One\n### Three\n###### Six", "<h3>One</h3><h5>Three</h5><h6>Six</h6>"],
  [
    "- a\n- b\n  - c\n\n3. d",
    '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="3"><li>d</li></ol>',
  ],
  ["> q\n\n---", "<blockquote><p>q</p></blockquote><hr>"],
  ["```js\n<b>\n```", "<pre><code>&lt;b&gt;</code></pre>"],
  ["```\nopen", "<pre><code>open</code></pre>"],
  [
    "|a|b|\n|-|-:|\n|1|2|",
    "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
  ],
  ['[t](https://a.b/c?d="e")', '<p><a href="https://a.b/c?d=%22e%22">t</a></p>'],
  ["https://a.b and main.py", '<p><a href="https://a.b">https://a.b</a> and main.py</p>'],
  ["[r]: https://a.b\n\n[x][r]", '<p><a href="https://a.b">x</a></p>'],
  ["![p](https://a.b/p.png)", '<p><a href="https://a.b/p.png">[picture: p]</a></p>'],
  ["a\r\n\r\nb", "<p>a</p><p>b</p>"],
  // What must not become markup, or a link
  ["<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"],
  ["<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"],
  ["<div>\n\n*a*\n\n</div>", "<p>&lt;div&gt;</p><p><em>a</em></p><p>&lt;/div&gt;</p>"],
  ["[a](/v1/models)", "<p><span>a</span></p>"],
  ["[a](ftp://b)", "<p><span>a</span></p>"],
  ["[a](//evil.example)", "<p><span>a</span></p>"],
  ["![a](/status)", "<p><span>[picture: a]</span></p>"],
];
for (const [text, expected] of cases) {
  same(JSON.stringify(text), html(text), expected);
  for (const pieces of [1, 2, 3])
    same(`${JSON.stringify(text)} in pieces of ${pieces}`, html(text, pieces), expected);
}

for (const scheme of [
  "javascript",
  "JaVaScRiPt",
  "vbscript",
  "data",
  "file",
  "blob",
  "\tjavascript",
  "java\nscript",
  "&#106;avascript",
  "javascript&colon;x",
  "\u0001javascript",
]) {
  for (const text of [
    `[a](${scheme}:alert(1))`,
    `[a](<${scheme}:alert(1)>)`,
    `![a](${scheme}:text/html,x)`,
    `<${scheme}:alert(1)>`,
    `[a][r]\n\n[r]: ${scheme}:alert(1)`,
  ]) {
    const links = shown(text).querySelectorAll("[href], [src]").length;
    same(`links of ${JSON.stringify(text)}`, links, 0);
  }
}

const allowed = new Set(
  "A BLOCKQUOTE BR BUTTON CODE DIV EM H3 H4 H5 H6 HR LI OL P PRE S SPAN STRONG TABLE TBODY TD TH THEAD TR UL".split(
    " ",
  ),
);
const names = new Set(["class", "href", "rel", "start", "tabindex", "target", "title", "type"]);
const hostile = [
  '<a href="javascript:alert(1)">x</a>',
  "<svg/onload=alert(1)>",
  '<iframe srcdoc="<script>alert(1)</script>">',
  "<style>*{display:none}</style>",
  "<form action=//evil><button>x",
  "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
  '```html" onload=alert(1)\n<b>\n```',
  "[x](https://a.b 'title\" onmouseover=\"alert(1)')",
  "|<td>|\n|:-:onload=x|\n",
  "<!--><img src=x onerror=alert(1)>-->",
  "`<b>`<plaintext>",
  "&lt;script&gt;alert(1)&lt;/script&gt;",
  "[x]: https://a.b\n[x]<b>",
  "1000000000. a\n",
  "-1. a",
  "999999999. a",
];
for (const text of hostile) {
  for (const element of shown(text).querySelectorAll("*")) {
    same(`elements of ${JSON.stringify(text)}`, allowed.has(element.tagName), true);
    for (const { name } of element.attributes)
      same(`attributes of ${JSON.stringify(text)}`, names.has(name), true);
  }
}

// Texts that make a slow parser slow: all of the text is shown, and the whole loop has a deadline in the test.
const size = 60_000;
const repeated = [
  "*",
  "_a",
  "*a **b ",
  "[",
  "![",
  "[a](",
  "`",
  ">",
  "- ",
  "> - ",
  "1. ",
  "|a",
  "<![CDATA[",
  "<a ",
  "~~a",
  "**x* ",
  "a@",
  "http://a.",
  "\\",
  "&",
  "[a]: b\n",
  "a\n=\n",
  "```\n",
  "    a\n",
];
for (const each of repeated) {
  const text = each.repeat(size / each.length);
  same(`a long text of ${JSON.stringify(each)}`, shown(text).isConnected, false);
}
const table = `${"|a".repeat(200)}\n${"|-".repeat(200)}\n${"|\n".repeat(20_000)}`;
same("the cells of a table are bounded", shown(table).querySelectorAll("td").length < 100_000, true);
const deep = shown(Array.from({ length: 2000 }, (_, depth) => `${" ".repeat(depth * 2)}- a`).join("\n"));
same("lists are not too deep", deep.querySelectorAll("li").length < 200, true);
const paragraph = `${"word ".repeat(3000)}**bold**`;
same("a long paragraph is shown as it is", shown(paragraph).textContent, paragraph);
const long = `**a**\n\n${"b\n\n".repeat(80_000)}`;
same("a long text is shown to its end", shown(long, 150_000).textContent.replaceAll("\n", "").length, 80_001);

// Complete blocks stay as they are while a text grows, so that a long one costs no more at its end.
const element = document.createElement("div");
const view = new MarkdownView(element);
let text = "";
for (let n = 0; n < 300; n++) {
  text += `Paragraph **${n}** with text.\n\n`;
  view.show(text);
  if (n === 100) element.children[50].dataset.kept = "yes";
}
same("complete blocks are kept", element.children[50].dataset.kept, "yes");
same("all blocks", element.children.length, 300);
view.show("another text");
same("another text", element.textContent, "another text");

return failures;

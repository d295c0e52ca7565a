// Making and changing elements. Data enters as text, never as markup.

/** An element; `attributes` may hold class and the like, children are elements or strings. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Set the text, if it is another one. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Give `parent` exactly `length` children, made by `make(index)`; those that are there stay. */
export function resize(parent, length, make) {
  while (parent.children.length > length) parent.lastElementChild.remove();
  while (parent.children.length < length) parent.append(make(parent.children.length));
}

/** A button that runs `action`; a small one, without a frame. */
export function textButton(text, action) {
  const button = el("button", { class: "link", type: "button" }, text);
  button.addEventListener("click", action);
  return button;
}

/** Let `button` run `action` at the second click within three seconds. */
export function confirmed(button, action) {
  const text = button.textContent;
  let timer = null;
  const disarm = () => {
    clearTimeout(timer);
    timer = null;
    setText(button, text);
  };
  button.addEventListener("click", () => {
    if (timer === null) {
      setText(button, "Sure?");
      timer = setTimeout(disarm, 3000);
    } else {
      disarm();
      action();
    }
  });
  return button;
}

/** A button that copies what `read()` returns. */
export function copyButton(read) {
  const button = textButton("Copy", async () => {
    setText(button, (await copy(read())) ? "Copied" : "Not copied");
    setTimeout(() => setText(button, "Copy"), 1500);
  });
  return button;
}

/** Whether it was copied. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS there is no clipboard, but this still works.
  }
  const field = el("textarea", { class: "hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

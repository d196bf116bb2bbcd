// Markdown as the server renders it (pages/render). What it sends has no scripts, styles or images; where it cannot
// render, the text is shown as it is.

import { call, element } from "./session.js";

const MOST_CHARS = 1 << 16; // of one call
const MOST_TEXTS = 64;
const LEAST_WAIT = 150; // ms between two renderings of an answer that grows
const kept = new Map(); // HTML by text, of what was rendered lately
const MOST_KEPT = 300;

async function ask(texts) {
  const reply = await call("pages/render", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ texts }),
  });
  if (!reply.ok) throw new Error(`not rendered: ${reply.status}`);
  return (await reply.json()).html;
}

function keep(text, html) {
  kept.set(text, html);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
}

// The HTML of each text; null of one that cannot be rendered.
async function rendered(texts) {
  const missing = [...new Set(texts)].filter((text) => !kept.has(text) && text.length <= MOST_CHARS);
  const found = new Map();
  for (let group = []; missing.length; group = []) {
    for (let chars = 0; missing.length && group.length < MOST_TEXTS && chars + missing[0].length <= MOST_CHARS;) {
      chars += missing[0].length;
      group.push(missing.shift());
    }
    try {
      (await ask(group)).forEach((html, index) => found.set(group[index], html));
    } catch {
      if (group.length === 1) continue; // this one is shown as it is, and not kept as such
      for (const text of group) { // one of them is the reason, or the server does not answer
        try { found.set(text, (await ask([text]))[0]); } catch { /* shown as it is */ }
      }
    }
  }
  for (const [text, html] of found) keep(text, html);
  return texts.map((text) => found.get(text) ?? kept.get(text) ?? null);
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // no clipboard without https: an older way
    const area = element("textarea", { value: text, className: "unseen" });
    button.after(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
    area.remove();
    button.focus();
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

export function copyButton(text, name) {
  const button = element("button", { type: "button", className: "plain", textContent: "Copy" });
  button.setAttribute("aria-label", name);
  button.addEventListener("click", () => copy(button, text()));
  return button;
}

// The nodes of rendered HTML, with a bar above each block of code and tables that scroll by themselves.
function nodes(html) {
  const body = new DOMParser().parseFromString(html, "text/html").body;
  for (const pre of body.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const language = /^language-(.+)$/.exec(code.className)?.[1] ?? "text";
    const bar = element("div", { className: "bar" },
      element("span", { textContent: language }), copyButton(() => code.textContent, `Copy the ${language} block`));
    const box = element("div", { className: "code" });
    pre.replaceWith(box);
    pre.tabIndex = 0;
    box.append(bar, pre);
  }
  for (const table of body.querySelectorAll("table")) {
    const box = element("div", { className: "scroll", tabIndex: 0 });
    table.replaceWith(box);
    box.append(table);
  }
  return [...body.childNodes].map((node) => document.adoptNode(node));
}

function put(place, text, html) {
  place.classList.toggle("plain-text", html === null);
  place.replaceChildren(...(html === null ? [text] : nodes(html)));
}

// Shows whole texts, each in its place.
export async function show(pairs) {
  const all = await rendered(pairs.map(([, text]) => text));
  pairs.forEach(([place, text], index) => { if (place.isConnected) put(place, text, all[index]); });
}

// Where the text up to here will not change its meaning any more: before the last paragraph that begins at the margin.
export function boundary(text) {
  let fence = null, found = 0, at = 0, blank = false;
  for (const line of text.split("\n")) {
    const mark = /^\s*(`{3,}|~{3,})(.*)$/.exec(line);
    if (!fence && blank && /^[^\s\-*+>|\d]/.test(line)) found = at;
    if (mark && !fence) fence = mark[1];
    else if (mark && fence && mark[1].startsWith(fence) && !mark[2].trim()) fence = null;
    blank = !fence && !line.trim();
    at += line.length + 1;
  }
  return found;
}

const INNER = new Set(["P", "UL", "OL", "LI", "BLOCKQUOTE", "DIV", "PRE", "CODE", "H4", "H5", "H6"]);

// An answer that grows: what is finished is rendered once, the rest again and again, and what came since is appended as
// it is. The cost of an answer is that of its length, and not of its length's square.
export class Growing {
  constructor(place, changed) {
    this.place = place;
    this.changed = changed; // runs a change of the page, and keeps the reader's place
    this.text = "";
    this.done = 0; // characters that are rendered for good
    this.shown = 0; // characters that the page has
    this.failed = this.ended = false;
    this.wait = LEAST_WAIT;
    this.tail = element("div");
    this.raw = element("span", { className: "raw" });
    this.place.replaceChildren(this.tail);
    this.tail.append(this.raw);
    this.timer = null;
  }

  update(text) {
    this.text = text;
    if (text.length > this.shown) this.changed(() => this.raw.append(text.slice(this.shown)));
    this.shown = text.length;
    if (!this.failed) this.timer ??= setTimeout(() => this.render(), this.wait);
  }

  async render() {
    const text = this.text, start = this.done;
    const cut = boundary(text.slice(start));
    const head = text.slice(start, start + cut), tail = text.slice(start + cut);
    const began = performance.now();
    try {
      if (tail.length > MOST_CHARS) throw new Error("too long");
      const html = await ask([head, tail]);
      if (!this.ended) this.changed(() => this.put(start + cut, html, text.length));
    } catch {
      this.failed = true; // the rest stays as it is until the answer is whole
    }
    this.wait = Math.max(LEAST_WAIT, 3 * (performance.now() - began)); // a busy server has better things to do
    this.timer = null;
    if (!this.ended && this.text.length > text.length) this.update(this.text);
  }

  put(done, [head, tail], rendered) {
    if (done > this.done) this.tail.before(...nodes(head));
    this.done = done;
    this.tail.replaceChildren(...nodes(tail));
    this.raw.textContent = this.text.slice(rendered);
    let at = this.tail;
    while (INNER.has(at.lastElementChild?.tagName)) at = at.lastElementChild;
    at.append(this.raw);
  }

  // The whole text at once: only so are links right whose addresses stand at its end.
  async finish(text) {
    this.ended = true;
    clearTimeout(this.timer);
    const [html] = await rendered([text]);
    this.changed(() => put(this.place, text, html));
  }
}

// The landing page: what is served, how to call it, and a chat that streams. All text from outside becomes text nodes.

import { call, element, errorText, events, hasKey } from "./session.js";

const log = document.getElementById("log");
const form = document.getElementById("chat");
const text = document.getElementById("text");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const base = new URL(".", location.href).href.replace(/\/$/, "");

let model = null;
let history = [];
let running = null; // the AbortController of the answer that is being written

for (const place of document.querySelectorAll("[data-origin]")) place.textContent = base;

async function describe() {
  const reply = await call("v1/models");
  if (!reply.ok) throw new Error(await errorText(reply));
  const served = (await reply.json()).data[0];
  model = served.id;
  const length = served.max_model_len.toLocaleString("en");
  document.getElementById("serving").replaceChildren(
    "Serving ", element("strong", { textContent: model }), `, ${length} tokens of context.`);
  document.title = `${model} – Quire`;
  for (const place of document.querySelectorAll("[data-model]")) place.textContent = model;
  if (hasKey()) {
    document.getElementById("with-key").hidden = false;
    for (const place of document.querySelectorAll("[data-key-line]")) place.hidden = false;
    for (const place of document.querySelectorAll("[data-key]")) place.textContent = "your key";
  }
}

function bubble(role, label) {
  log.querySelector(":scope > .hint")?.remove();
  const body = element("div", { className: "text" });
  const article = element("article", { className: role }, element("h3", { textContent: label }), body);
  log.append(article);
  return { article, body };
}

// Follow the text only while the reader is at its end.
function following(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function thoughts(article, body) {
  const inner = element("div", { className: "text" });
  const summary = element("summary", { textContent: "Thinking…" });
  article.insertBefore(element("details", {}, summary, inner), body);
  return { inner, summary };
}

async function answer(article, body) {
  const started = performance.now();
  const reply = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages: history, stream: true, stream_options: { include_usage: true } }),
    signal: running.signal,
  });
  if (!reply.ok) throw new Error(await errorText(reply));
  let said = "", thinking = null, usage = null, why = null;
  try {
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      why = choice.finish_reason ?? why;
      const thought = choice.delta?.reasoning ?? choice.delta?.reasoning_content;
      const part = choice.delta?.content;
      following(() => {
        if (thought) {
          thinking ??= thoughts(article, body);
          thinking.inner.append(thought);
        }
        if (part) {
          if (thinking) thinking.summary.textContent = "Thoughts";
          said += part;
          body.append(part);
        }
      });
    }
  } finally {
    if (thinking) thinking.summary.textContent = "Thoughts";
    if (said) history.push({ role: "assistant", content: said });
  }
  const seconds = (performance.now() - started) / 1000;
  const notes = [];
  if (usage) notes.push(`${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`);
  if (why === "length") notes.push("ended at the length limit");
  if (notes.length) following(() => article.append(element("p", { className: "hint small", textContent: notes.join(", ") })));
}

async function submit() {
  const message = text.value.trim();
  if (!message || running) return;
  running = new AbortController();
  send.hidden = true;
  stop.hidden = false;
  text.value = "";
  history.push({ role: "user", content: message });
  const length = history.length;
  bubble("user", "You").body.append(message);
  const { article, body } = bubble("assistant", model ?? "Model");
  article.setAttribute("aria-busy", "true");
  log.scrollTop = log.scrollHeight;
  try {
    await answer(article, body);
  } catch (error) {
    const stopped = error.name === "AbortError";
    const said = stopped ? "Stopped." : error.message || "The connection was lost.";
    following(() => article.append(element("p", { className: stopped ? "hint small" : "problem", textContent: said })));
    if (history.length === length && history.at(-1)?.content === message) {
      history.pop(); // without an answer the question is asked anew
      if (!text.value) text.value = message;
    }
  } finally {
    article.removeAttribute("aria-busy");
    running = null;
    stop.hidden = true;
    send.hidden = false;
    text.focus();
  }
}

form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("new").addEventListener("click", () => {
  running?.abort();
  history = [];
  log.replaceChildren();
  text.focus();
});

// Links to what needs the key are shown here when there is one: the browser itself would not send it.
const dialog = document.getElementById("shown");
for (const link of document.querySelectorAll("[data-keyed]")) {
  link.addEventListener("click", async (event) => {
    if (!hasKey()) return;
    event.preventDefault();
    const reply = await call(link.getAttribute("href"));
    dialog.querySelector("pre").textContent = reply.ok ? JSON.stringify(await reply.json(), null, 2) : await errorText(reply);
    dialog.showModal();
  });
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.innerText);
      button.textContent = "Copied";
    } catch { // no clipboard without https: the text is selected instead
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

describe().catch((error) => { document.getElementById("serving").textContent = error.message; });

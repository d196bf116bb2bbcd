// The chat: one conversation is shown, at most one answer is written. Puts the parts together and knows them all.

import { answer } from "./answer.js";
import * as conversations from "./conversations.js";
import { describe } from "./connect.js";
import { Attached, withFiles } from "./files.js";
import { View, renderAll } from "./messages.js";
import { element } from "./session.js";
import { FIRST, Models, Settings, toolsOf } from "./settings.js";
import { Sidebar } from "./sidebar.js";

const SAVE_MS = 1000; // between two savings of an answer that grows
const HINT = "What you write is answered by the model that runs here.";

const byId = (id) => document.getElementById(id);
const log = byId("log"), text = byId("text"), send = byId("send"), stop = byId("stop");
const serving = byId("serving"), spoken = byId("spoken");

let shown = conversations.create({ ...FIRST, ...conversations.lastSettings() });
let views = new Map(); // by the id of a message that is shown
let running = null; // the answer that is written: its conversation, message and AbortController
let recalled = 0; // how many messages back ArrowUp has gone

const attached = new Attached(byId("files"), (words) => { serving.textContent = words; });
const settings = new Settings(byId("settings"), (changed) => {
  shown.settings = changed;
  conversations.keepSettings(changed);
  if (shown.messages.length) keep(shown);
});
const models = new Models(byId("model"), (model) => {
  if (!model) return;
  settings.describe(model.default_sampling_params);
  describe(model);
  document.title = `${model.id} – Quire`;
  serving.replaceChildren(`${model.max_model_len.toLocaleString("en")} tokens of context`);
});
const sidebar = new Sidebar({
  current: () => shown.id,
  open: (id) => { const found = stored(id); if (found) open(found); },
  change: (id, change) => {
    const found = stored(id);
    change(found);
    keep(found);
    if (id === shown.id) named();
  },
  removed: (id) => {
    if (running?.conversation.id === id) running.controller.abort();
    if (id === shown.id) fresh();
  },
});

// The conversation itself where it is in use: what is written goes on in that one.
function stored(id) {
  if (id === shown.id) return shown;
  return id === running?.conversation.id ? running.conversation : conversations.load(id);
}

function keep(conversation) {
  if (!conversations.save(conversation)) {
    serving.textContent = "The browser's storage is full: this chat is lost when the page is closed. Export or delete some.";
  }
}

function named() {
  byId("title").textContent = conversations.titleOf(shown);
}

// Follow the text only while the reader is at its end.
function following(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

const acts = {
  edit: (message, words) => {
    if (!words && !message.files?.length) return;
    ask(conversations.parentOf(shown, message), { role: "user", content: words, files: message.files });
  },
  retry: (message) => write(conversations.parentOf(shown, message), message.problem && !message.content ? message : null),
  proceed: (message) => write(conversations.parentOf(shown, message), message),
  branch: (message) => {
    const made = conversations.branch(shown, message);
    keep(made);
    open(made);
  },
  choose: (message) => {
    conversations.select(shown, message);
    keep(shown);
    draw();
    log.querySelector(`[data-id="${message.id}"] .acts button`)?.focus();
  },
  results: (message, texts) => {
    let last = message;
    message.calls.forEach((call, index) => {
      last = conversations.add(shown, last, { role: "tool", content: texts[index], call: call.id });
    });
    write(last, null);
  },
};

function draw() {
  named();
  const path = conversations.path(shown);
  views = new Map(path.map((message, index) => {
    if (running?.view.message === message) return [message.id, running.view];
    const list = conversations.siblings(shown, message);
    const versions = { list, index: list.indexOf(message), answered: index < path.length - 1 };
    return [message.id, new View(message, versions, acts, following)];
  }));
  const articles = [...views.values()].map((view) => view.article);
  log.replaceChildren(...(articles.length ? articles : [element("p", { className: "hint", textContent: HINT })]));
  log.scrollTop = log.scrollHeight;
  renderAll([...views.values()]).then(() => { log.scrollTop = log.scrollHeight; });
  sidebar.draw();
}

function open(conversation) {
  shown = conversation;
  recalled = 0;
  settings.show(shown.settings);
  models.choose(conversations.path(shown).findLast((message) => message.model)?.model);
  history.replaceState(null, "", shown.messages.length ? `#${shown.id}` : location.pathname + location.search);
  closeChats();
  draw();
  text.focus();
}

const fresh = () => open(conversations.create({ ...FIRST, ...conversations.lastSettings() }));

// What the model is asked for a message that follows `parent`.
function bodyOf(parent, beginning) {
  const before = [];
  for (let at = parent; at; at = conversations.parentOf(shown, at)) before.unshift(at);
  const messages = before.map((message) => {
    if (message.role === "tool") return { role: "tool", content: message.content, tool_call_id: message.call };
    if (message.role === "user") return { role: "user", content: withFiles(message) };
    const calls = message.calls?.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return { role: "assistant", content: message.content, ...(calls ? { tool_calls: calls } : {}) };
  }).filter((message) => message.content || message.tool_calls || message.role === "tool");
  const { system, sampling, tools } = shown.settings;
  if (system?.trim()) messages.unshift({ role: "system", content: system });
  const body = { model: models.chosen?.id, messages, ...sampling };
  const list = toolsOf(tools);
  if (list) body.tools = list;
  if (beginning) {
    messages.push({ role: "assistant", content: beginning });
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  }
  return body;
}

function busy(is) {
  send.hidden = is;
  stop.hidden = !is;
  if (!is && [document.body, stop, send, null].includes(document.activeElement)) text.focus();
}

// Has the model write a message after `parent`: a new version, or what is missing of `message`.
async function write(parent, message) {
  if (running) return;
  const conversation = shown;
  const target = message ?? conversations.add(conversation, parent, { role: "assistant" });
  for (const name of ["problem", "wait", "finish", "stats"]) delete target[name];
  target.model = models.chosen?.id ?? target.model;
  const list = conversations.siblings(conversation, target);
  const view = new View(target, { list, index: list.indexOf(target), answered: false }, acts, following);
  running = { conversation, message: target, view, controller: new AbortController() };
  busy(true);
  keep(conversation);
  history.replaceState(null, "", `#${conversation.id}`);
  view.begin();
  draw();
  spoken.textContent = "The model is answering.";
  await stream(running, parent);
  running = null;
  busy(false);
  keep(conversation);
  await view.end();
  spoken.textContent = target.problem ?? (view.body.textContent || "The answer is empty.");
  if (target.problem?.startsWith("The server cannot be reached")) serving.textContent = "The server does not answer.";
  sidebar.draw();
}

async function stream({ conversation, message, view, controller }, parent) {
  let saved = performance.now();
  const grown = () => {
    view.grow();
    if (performance.now() - saved < SAVE_MS) return;
    saved = performance.now();
    keep(conversation);
  };
  try {
    await answer(message, bodyOf(parent, message.content), { signal: controller.signal, grown, tell: (words) => view.tell(
      words && `${words} The answer goes on by itself when it can.`) });
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else Object.assign(message, { problem: error.message, ...(error.seconds ? { wait: error.seconds } : {}) });
  }
}

function ask(parent, fields) {
  if (running) return;
  write(conversations.add(shown, parent, fields), null);
}

function submit() {
  const words = text.value.trim();
  if (running || (!words && !attached.files.length)) return;
  const files = attached.take();
  text.value = "";
  recalled = 0;
  fit();
  ask(conversations.path(shown).at(-1) ?? null, { role: "user", content: words, ...(files.length ? { files } : {}) });
}

// The last messages come back with ArrowUp, as in a shell.
function recall(step) {
  const said = conversations.path(shown).filter((message) => message.role === "user");
  const next = recalled + step;
  if (next < 0 || next > said.length) return;
  recalled = next;
  text.value = recalled ? said.at(-recalled).content : "";
  text.setSelectionRange(0, 0);
  fit();
}

function fit() {
  text.rows = Math.min(10, text.value.split("\n").length);
}

function closeChats() {
  document.body.classList.remove("chats-open");
  byId("open-chats").setAttribute("aria-expanded", "false");
}

byId("chat").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
text.addEventListener("input", () => { recalled = 0; fit(); });
text.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const free = !text.value || recalled > 0;
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); submit(); }
  if (event.key === "ArrowUp" && free && text.selectionStart === 0) { event.preventDefault(); recall(1); }
  if (event.key === "ArrowDown" && recalled > 0 && text.selectionStart === 0) { event.preventDefault(); recall(-1); }
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  running?.controller.abort();
  closeChats();
});
addEventListener("pagehide", () => { if (running) keep(running.conversation); });
stop.addEventListener("click", () => running?.controller.abort());
byId("new").addEventListener("click", fresh);
byId("open-chats").addEventListener("click", () => {
  const is = document.body.classList.toggle("chats-open");
  byId("open-chats").setAttribute("aria-expanded", String(is));
});
byId("open-settings").addEventListener("click", () => byId("settings").showModal());
byId("open-connect").addEventListener("click", () => byId("connect").showModal());
byId("attach").addEventListener("click", () => byId("attach-file").click());
byId("attach-file").addEventListener("change", async ({ target }) => {
  await attached.add(target.files);
  target.value = "";
  text.focus();
});

// Until there is a model: a server that starts answers with what it does.
async function begin() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 5000)) {
    try {
      await models.load();
      return;
    } catch (error) {
      serving.textContent = error instanceof TypeError ? "The server cannot be reached; trying again." : error.message;
      if (error.status && error.status !== 503) return;
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

const linked = conversations.load(location.hash.slice(1));
if (linked) open(linked);
else fresh();
begin().then(() => models.choose(conversations.path(shown).findLast((message) => message.model)?.model));

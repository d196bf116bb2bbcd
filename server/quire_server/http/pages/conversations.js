// Conversations in this browser's storage. Each is a tree of messages: an edit or another answer is a sibling, and one
// path from the beginning to a leaf is shown. Nothing here knows the page.

const PREFIX = "quire-chat:";
const SETTINGS = "quire-chat-settings";
const FORMAT = "quire-conversations";
const ROLES = new Set(["user", "assistant", "tool"]);
const TEXTS = ["content", "thought", "finish", "problem", "call", "model", "request"];
const LONGEST_TITLE = 60;

const memory = new Map(); // where a browser forbids storage, conversations live as long as the page

function read(key) {
  try { return localStorage.getItem(key) ?? memory.get(key) ?? null; } catch { return memory.get(key) ?? null; }
}

// Whether it is kept: the storage of a browser has an end.
function write(key, text) {
  try {
    localStorage.setItem(key, text);
    memory.delete(key);
    return true;
  } catch {
    memory.set(key, text);
    return false;
  }
}

function keys() {
  const found = new Set(memory.keys());
  try { for (let at = 0; at < localStorage.length; at += 1) found.add(localStorage.key(at)); } catch { /* none */ }
  return [...found].filter((key) => key.startsWith(PREFIX));
}

function parsed(text) {
  try { return JSON.parse(text); } catch { return null; }
}

function newId() {
  return [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const lastSettings = () => parsed(read(SETTINGS)) ?? {};
export const keepSettings = (settings) => write(SETTINGS, JSON.stringify(settings));

export function create(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, messages: [], leaf: null };
}

export const load = (id) => parsed(read(PREFIX + id));

export function save(conversation) {
  conversation.updated = Date.now();
  return write(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(id) {
  memory.delete(PREFIX + id);
  try { localStorage.removeItem(PREFIX + id); } catch { /* there was none */ }
}

// All of them, the newest first.
export function all() {
  return keys().map((key) => parsed(read(key))).filter(Boolean).sort((one, other) => other.updated - one.updated);
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  const title = conversation.title || first?.content.trim() || first?.files?.[0]?.name || "New chat";
  return title.length > LONGEST_TITLE ? `${title.slice(0, LONGEST_TITLE - 1)}…` : title;
}

const messageOf = (conversation, id) => conversation.messages.find((message) => message.id === id);

// The messages that are shown, from the first to the last.
export function path(conversation) {
  const found = [];
  for (let at = messageOf(conversation, conversation.leaf); at; at = messageOf(conversation, at.parent)) found.unshift(at);
  return found;
}

// A new message after another one, at the end of what is shown from now on.
export function add(conversation, parent, fields) {
  const message = { id: newId(), parent: parent?.id ?? null, content: "", ...fields };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  return message;
}

export const parentOf = (conversation, message) => messageOf(conversation, message.parent) ?? null;
export const siblings = (conversation, message) => conversation.messages.filter((one) => one.parent === message.parent);

// Shows a message, and below it what was written last.
export function select(conversation, message) {
  let leaf = message;
  for (let next = leaf; next; next = conversation.messages.findLast((one) => one.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

// A new conversation with what is shown up to a message.
export function branch(conversation, message) {
  const made = create(conversation.settings);
  made.title = titleOf(conversation);
  for (const one of path(conversation)) {
    made.messages.push({ ...one });
    if (one.id === message.id) break;
  }
  made.leaf = message.id;
  return made;
}

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

const text = (value) => (typeof value === "string" ? value : "");
const numbers = (value) => Object.fromEntries(
  Object.entries(value ?? {}).filter(([, number]) => typeof number === "number" && Number.isFinite(number)));

function knownMessage(one, before) {
  if (!ROLES.has(one?.role) || typeof one.id !== "string" || before.has(one.id)) return null;
  if (one.parent !== null && !before.has(one.parent)) return null; // so that there is no circle
  const message = { id: one.id, parent: one.parent, role: one.role, content: text(one.content) };
  for (const name of TEXTS) if (text(one[name])) message[name] = one[name];
  const files = Array.isArray(one.files) ? one.files : [];
  if (files.length) message.files = files.map((file) => ({ name: text(file?.name), text: text(file?.text) }));
  const calls = Array.isArray(one.calls) ? one.calls : [];
  if (calls.length) {
    message.calls = calls.map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) }));
  }
  if (one.stats) message.stats = numbers(one.stats);
  return message;
}

// The conversations of an exported file, each as a new one; throws an Error in words. Only what is known is taken.
export function imported(file) {
  const found = parsed(file);
  if (found?.format !== FORMAT || !Array.isArray(found.conversations)) {
    throw new Error("This is no file of exported conversations.");
  }
  return found.conversations.map((one) => {
    const made = create(knownSettings(one?.settings));
    made.title = text(one?.title);
    const before = new Set();
    for (const each of Array.isArray(one?.messages) ? one.messages : []) {
      const message = knownMessage(each, before);
      if (message) {
        before.add(message.id);
        made.messages.push(message);
      }
    }
    made.leaf = before.has(one?.leaf) ? one.leaf : made.messages.at(-1)?.id ?? null;
    return made;
  });
}

function knownSettings(settings) {
  return { system: text(settings?.system), tools: text(settings?.tools), sampling: numbers(settings?.sampling) };
}

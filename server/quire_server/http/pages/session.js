// What the pages share: the API key of this tab, calls that carry it, and the events of a streamed reply.
// Addresses are relative, so that the pages also work behind a proxy that serves them under a path of its own.

const form = document.getElementById("key-form");
const STORED = form.dataset.store ?? "quire-api-key"; // a page may need another key than the API's
const field = document.getElementById("key");
const problem = document.getElementById("key-problem");
let waiting = [];

let memory = null; // where a browser forbids storage, the key lives as long as the page
function stored() {
  try { return sessionStorage.getItem(STORED) ?? memory; } catch { return memory; }
}
function store(key) {
  memory = key;
  try { sessionStorage.setItem(STORED, key); } catch { /* kept in memory */ }
}

export const hasKey = () => Boolean(stored());

const bearer = (key) => `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;

// A question for the operator alone: with the admin key of this tab, if the dashboard has asked for it. Never asks for one.
export function callAsOperator(path) {
  let key = null;
  try { key = sessionStorage.getItem("quire-admin-key"); } catch { /* there is none */ }
  key ??= stored();
  return fetch(path, key ? { headers: { Authorization: bearer(key) } } : {});
}

// Shows the field for the key; resolves when one was entered.
export function askForKey(reason) {
  form.hidden = false;
  problem.textContent = reason;
  field.focus();
  return new Promise((resolve) => waiting.push(resolve));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  store(field.value.trim());
  field.value = "";
  problem.textContent = "";
  form.hidden = true;
  const ready = waiting;
  waiting = [];
  for (const resolve of ready) resolve();
});

// A fetch with the key. A 401 asks for one and tries again; the caller sees every other status.
export async function call(path, options = {}) {
  for (;;) {
    const key = stored();
    const headers = { ...options.headers };
    // Header values are Latin-1 in fetch: a key with other letters goes out as the bytes of its UTF-8.
    if (key) headers.Authorization = bearer(key);
    const reply = await fetch(path, { ...options, headers });
    if (reply.status !== 401) return reply;
    // Of several calls that were refused together the later ones use the key that was entered meanwhile.
    if (stored() === key) await askForKey(key ? "The server does not accept this key." : "");
  }
}

// The error's own words, whatever came, and its code.
export async function problemOf(reply) {
  const text = await reply.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return { message, code };
  } catch {
    return { message: text || `The server answered ${reply.status}.`, code: null };
  }
}

export const errorText = async (reply) => (await problemOf(reply)).message;

// The data of each server-sent event. Comments (keep-alive) are skipped; [DONE] ends it.
export async function* events(reply) {
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      buffer += done ? decoder.decode() + "\n\n" : decoder.decode(value, { stream: true });
      const blocks = buffer.split(/\r?\n\r?\n/);
      buffer = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, "")).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const RETRY_SECONDS = [1, 1, 2, 3, 5];

// Takes each event of the path, over connections that are made again, until the server refuses: a refusal would not
// change by itself.
export async function follow(path, take, tell) {
  for (let failures = 0; ;) {
    try {
      const reply = await call(path);
      if (!reply.ok) {
        tell(await errorText(reply), true);
        if (reply.status < 500 && reply.status !== 429) return;
      } else {
        for await (const message of events(reply)) {
          failures = 0;
          take(message);
        }
        tell("The server ended the connection.", true);
      }
    } catch (error) {
      tell(`The connection was lost${error instanceof TypeError ? "" : `: ${error.message}`}.`, true);
    }
    const wait = RETRY_SECONDS[Math.min(failures, RETRY_SECONDS.length - 1)];
    failures += 1;
    await new Promise((resolve) => setTimeout(resolve, wait * 1e3));
    tell("Connecting again…", true);
  }
}

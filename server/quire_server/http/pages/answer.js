// One answer of the model, as it comes. Knows the API and nothing of the page.

import { call, errorText, events, problemOf } from "./session.js";

const SILENCE = 2000; // ms without a piece of the answer, after which the server is asked whether it works

// What keeps an answer from coming, in words; `seconds`: after which to try again; `lost`: the server does not answer.
export class Trouble extends Error {
  constructor(words, { seconds = null, lost = false, full = false } = {}) {
    super(words);
    Object.assign(this, { seconds, lost, full });
  }
}

const WORDS = {
  queue_full: "The server has as many requests as it can take.",
  context_length_exceeded: "The conversation does not fit into the model's context any more.",
};

async function refused(reply) {
  const { message, code } = await problemOf(reply);
  const seconds = Number(reply.headers.get("retry-after")) || null;
  const words = [WORDS[code], message].filter(Boolean).join(" ");
  return new Trouble(words, { seconds, full: code === "context_length_exceeded" });
}

// Why the server does not work just now; null: it does, or there is nothing to be told.
async function unreadiness() {
  try {
    const reply = await fetch("health/ready");
    return reply.ok ? null : await errorText(reply);
  } catch {
    return "The server cannot be reached.";
  }
}

// Calls `tell` with the reason while nothing comes because the server does not work, and with null when that is over.
class Watch {
  constructor(tell) {
    this.tell = tell;
    this.told = null;
    this.heard = performance.now();
    this.timer = setInterval(() => this.look(), SILENCE / 2);
  }
  alive() {
    this.heard = performance.now();
    if (this.told) this.tell(null);
    this.told = null;
  }
  async look() {
    if (performance.now() - this.heard < SILENCE) return;
    const why = await unreadiness();
    if (why && this.timer) this.tell(this.told = why);
  }
  end() {
    clearInterval(this.timer);
    this.timer = null;
    if (this.told) this.tell(null);
  }
}

function addCalls(calls, deltas) {
  for (const delta of deltas) {
    const call = calls[delta.index ?? 0] ??= { id: "", name: "", arguments: "" };
    call.id = delta.id ?? call.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }
}

// Numbers of an answer: tokens, seconds to the first one, tokens a second from then on.
function stats(started, first, last, usage) {
  const tokens = usage?.completion_tokens ?? 0;
  return {
    tokens, prompt: usage?.prompt_tokens ?? 0, seconds: (last - started) / 1e3,
    first: first === null ? 0 : (first - started) / 1e3,
    rate: tokens > 1 && last > first ? (tokens - 1) / ((last - first) / 1e3) : 0,
  };
}

async function post(body, signal) {
  try {
    return await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server cannot be reached. It has ended, or the network is down.", { lost: true });
  }
}

// Streams the answer into `message`, whose `content` and `thought` may have a beginning; `grown` is called after each
// change, `tell` with words or null where there is something to wait for. Throws Trouble, and AbortError when stopped.
export async function answer(message, body, { signal, grown, tell }) {
  const started = performance.now();
  let first = null, last = started, usage = null;
  const watch = new Watch(tell);
  try {
    const reply = await post(body, signal);
    message.request = reply.headers.get("x-request-id") ?? "";
    if (!reply.ok) throw await refused(reply);
    for await (const event of events(reply)) {
      watch.alive();
      if (event.error) throw new Trouble(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const { content, reasoning, reasoning_content: other, tool_calls: calls } = choice.delta ?? {};
      if (content || reasoning || other || calls) {
        last = performance.now();
        first ??= last;
      }
      message.finish = choice.finish_reason ?? message.finish;
      message.content += content ?? "";
      if (reasoning ?? other) message.thought = (message.thought ?? "") + (reasoning ?? other);
      if (calls) addCalls(message.calls ??= [], calls);
      grown();
    }
    if (!message.finish) throw new Trouble("The connection ended before the answer did.", { lost: true });
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Trouble) throw error;
    throw new Trouble("The connection was lost in the middle of the answer.", { lost: true });
  } finally {
    watch.end();
    message.stats = stats(started, first, last, usage);
  }
}

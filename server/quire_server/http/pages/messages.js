// The messages of a conversation as a reader sees them. Gets what a button does as functions; knows no storage.

import { Growing, copyButton, show } from "./markdown.js";
import { element } from "./session.js";
import { explain } from "./slow.js";

const LABELS = { user: "You", tool: "Result of a tool" };

function button(text, name, act) {
  const made = element("button", { type: "button", className: "plain", textContent: text });
  if (name) made.setAttribute("aria-label", name);
  made.addEventListener("click", act);
  return made;
}

export function numbersOf(stats) {
  if (!stats?.tokens) return "";
  const rate = stats.rate ? `, ${stats.rate.toFixed(1)} tokens/s` : "";
  return `${stats.tokens} tokens${rate}, first after ${stats.first.toFixed(2)} s, ${stats.seconds.toFixed(1)} s in all`;
}

// A message of the log; `acts` has the functions edit, retry, proceed, branch, choose, results.
export class View {
  constructor(message, versions, acts, following) {
    this.message = message;
    this.acts = acts;
    this.following = following; // runs a change, and keeps the reader at the end if it was there
    this.body = element("div", { className: "text" });
    this.notes = element("div", { className: "notes" });
    this.article = element("article", { className: message.role },
      element("h3", { textContent: LABELS[message.role] ?? message.model ?? "Model" }), this.body, this.notes);
    this.article.dataset.id = message.id;
    this.versions = versions;
    this.thought = null;
    this.growing = null;
    for (const file of message.files ?? []) {
      const summary = element("summary", { textContent: `${file.name}, ${file.text.length.toLocaleString("en")} characters` });
      this.article.insertBefore(element("details", { className: "file" }, summary,
        element("pre", { className: "wrap", tabIndex: 0, textContent: file.text })), this.body);
    }
    if (message.role !== "assistant") this.body.classList.add("plain-text");
    this.body.textContent = message.content;
    if (message.role === "assistant") this.body.classList.add("plain-text");
    this.drawThought(false);
    this.drawNotes();
  }

  drawThought(live) {
    const { thought, content } = this.message;
    if (!thought) return;
    if (!this.thought) {
      this.thought = element("details", { className: "thought" }, element("summary"), element("div", { className: "text plain-text" }));
      this.article.insertBefore(this.thought, this.body);
    }
    const [summary, inner] = this.thought.children;
    summary.textContent = live && !content ? "Thinking…" : "Thoughts";
    inner.append(thought.slice(inner.textContent.length));
  }

  begin() {
    this.article.setAttribute("aria-busy", "true");
    this.notes.replaceChildren();
    this.body.classList.remove("plain-text");
    this.growing = new Growing(this.body, this.following);
    if (this.message.content) this.growing.update(this.message.content);
  }

  grow() {
    this.following(() => this.drawThought(true));
    this.growing?.update(this.message.content);
  }

  // Words about what the answer waits for; null: nothing any more.
  tell(words) {
    this.following(() => this.notes.replaceChildren(...(words ? [element("p", { className: "hint small", textContent: words })] : [])));
  }

  async end() {
    await this.growing?.finish(this.message.content);
    this.growing = null;
    this.article.removeAttribute("aria-busy");
    this.following(() => {
      this.drawThought(false);
      this.drawNotes();
    });
  }

  drawNotes() {
    const { message, acts } = this;
    const parts = [];
    for (const [index, each] of (message.calls ?? []).entries()) parts.push(this.callOf(each, index));
    if (message.calls?.length && !this.versions.answered) parts.push(button("Send results", "", () => this.sendResults()));
    if (message.problem) parts.push(this.problemOf(message));
    if (message.role === "assistant") {
      const why = { length: "ended at the length limit", stopped: "stopped" }[message.finish];
      const line = [numbersOf(message.stats), why].filter(Boolean).join(", ");
      if (line) parts.push(element("p", { className: "hint small stats", textContent: line }));
    }
    parts.push(this.buttons(message, acts));
    this.notes.replaceChildren(...parts);
  }

  buttons(message, acts) {
    const bar = element("div", { className: "acts" });
    const { list, index } = this.versions;
    if (list.length > 1) {
      const before = button("‹", "Earlier version", () => acts.choose(list[index - 1]));
      const after = button("›", "Later version", () => acts.choose(list[index + 1]));
      before.disabled = index === 0;
      after.disabled = index === list.length - 1;
      bar.append(before, element("span", { className: "small", textContent: `${index + 1} of ${list.length}` }), after);
    }
    if (message.content) bar.append(copyButton(() => message.content, "Copy the message"));
    if (message.role === "user") bar.append(button("Edit", "Edit the message", () => this.edit()));
    if (message.role === "assistant") {
      const cut = !message.problem && message.content && ["length", "stopped", undefined].includes(message.finish);
      if (cut) bar.append(button("Continue", "Continue the answer", () => acts.proceed(message)));
      bar.append(button("Regenerate", "Another answer", () => acts.retry(message)));
      bar.append(button("Branch", "Go on from here in a new chat", () => acts.branch(message)));
      if (message.request && message.stats?.tokens) {
        bar.append(button("Why slow?", "Where the time of this answer went", (event) => explain(message, event.target, this.notes)));
      }
    }
    return bar;
  }

  problemOf(message) {
    const words = element("p", { textContent: message.problem });
    words.setAttribute("role", "alert");
    const again = button("Try again", "", () => this.acts.retry(message));
    const box = element("div", { className: "problem" }, words, again);
    if (message.content) box.append(button("Continue", "Continue the answer", () => this.acts.proceed(message)));
    let left = message.wait ?? 0;
    if (left > 0) {
      const step = () => {
        again.textContent = left > 0 ? `Try again (in ${Math.ceil(left)} s)` : "Try again";
        if (left > 0 && (box.isConnected || left === message.wait)) setTimeout(step, 1000);
        left -= 1;
      };
      step();
    }
    return box;
  }

  callOf(call, index) {
    let shown = call.arguments;
    try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* as the model wrote it */ }
    const box = element("div", { className: "call" },
      element("h4", {}, "Calls ", element("code", { textContent: call.name })),
      element("pre", { className: "wrap", tabIndex: 0, textContent: shown }));
    if (!this.versions.answered) {
      const field = element("textarea", { rows: 1, id: `result-${this.message.id}-${index}`, className: "mono result" });
      box.append(element("label", { htmlFor: field.id, className: "small", textContent: `Result of ${call.name}` }), field);
    }
    return box;
  }

  sendResults() {
    const fields = [...this.notes.querySelectorAll(".result")];
    this.acts.results(this.message, fields.map((field) => field.value));
  }

  edit() {
    const field = element("textarea", { value: this.message.content, rows: Math.min(12, this.message.content.split("\n").length + 1) });
    field.setAttribute("aria-label", "Your message, changed");
    const done = () => { this.article.replaceChild(this.body, form); this.drawNotes(); };
    const form = element("form", { className: "edit" }, field, element("span", { className: "row" },
      element("button", { textContent: "Send" }), button("Cancel", "", done)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.acts.edit(this.message, field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); done(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    });
    this.article.replaceChild(form, this.body);
    this.notes.replaceChildren();
    field.focus();
  }
}

// Renders the answers of a conversation that is opened.
export function renderAll(views) {
  return show(views.filter((view) => view.message.role === "assistant" && view.message.content && !view.growing)
    .map((view) => [view.body, view.message.content]));
}

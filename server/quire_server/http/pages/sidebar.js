// The list of conversations: open, rename, delete and undo, export and import.

import * as conversations from "./conversations.js";
import { element } from "./session.js";

const UNDO_MS = 10_000;

function small(text, name, act) {
  const made = element("button", { type: "button", className: "plain", textContent: text });
  made.setAttribute("aria-label", name);
  made.addEventListener("click", act);
  return made;
}

export class Sidebar {
  constructor(acts) {
    this.acts = acts; // open(id), current(), changed(id) after a conversation was renamed or deleted
    this.list = document.getElementById("list");
    this.undo = document.getElementById("undo");
    const file = document.getElementById("import-file");
    document.getElementById("export").addEventListener("click", () => this.save());
    document.getElementById("import").addEventListener("click", () => file.click());
    file.addEventListener("change", async () => {
      if (file.files[0]) this.take(await file.files[0].text());
      file.value = "";
    });
    addEventListener("storage", () => this.draw()); // another tab has written
  }

  draw() {
    const current = this.acts.current();
    this.list.replaceChildren(...conversations.all().map((one) => this.row(one, one.id === current)));
  }

  row(conversation, isCurrent) {
    const title = conversations.titleOf(conversation);
    const open = element("button", { type: "button", className: "open", textContent: title });
    if (isCurrent) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.acts.open(conversation.id));
    const row = element("li", {}, open,
      small("Rename", `Rename ${title}`, () => this.rename(row, conversation, title)),
      small("Delete", `Delete ${title}`, () => this.remove(conversation, title)));
    return row;
  }

  rename(row, { id }, title) {
    const field = element("input", { value: title, maxLength: 200 });
    field.setAttribute("aria-label", "Name of the conversation");
    let over = false;
    const done = (keep) => {
      if (over) return;
      over = true;
      if (keep && field.value.trim()) {
        this.acts.change(id, (conversation) => { conversation.title = field.value.trim(); });
      }
      this.draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") done(event.key === "Enter");
    });
    field.addEventListener("blur", () => done(true));
    row.replaceChildren(field);
    field.focus();
    field.select();
  }

  remove(conversation, title) {
    const kept = conversations.load(conversation.id);
    conversations.remove(conversation.id);
    this.acts.removed(conversation.id);
    const back = small("Undo", `Undo: keep ${title}`, () => {
      conversations.save(kept);
      this.say("");
      this.draw();
    });
    this.say(`Deleted “${title}”. `, back);
    this.draw();
  }

  say(...words) {
    clearTimeout(this.timer);
    this.undo.replaceChildren(...words);
    this.timer = setTimeout(() => this.undo.replaceChildren(), UNDO_MS);
  }

  save() {
    const text = conversations.exported(conversations.all());
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    element("a", { href: address, download: "quire-conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  take(file) {
    try {
      const made = conversations.imported(file);
      for (const one of made) conversations.save(one);
      this.say(`Imported ${made.length} conversation${made.length === 1 ? "" : "s"}.`);
    } catch (error) {
      this.say(error.message);
    }
    this.draw();
  }
}

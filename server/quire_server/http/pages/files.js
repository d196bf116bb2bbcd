// Text files that are attached to a message: read here, sent as part of its text.

import { element } from "./session.js";

const MOST_BYTES = 512 << 10; // of one file; a larger one fits no context

// The text of a file; throws an Error in words.
async function read(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than ${MOST_BYTES >> 10} KB.`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { name: file.name, text };
  } catch { /* not UTF-8 */ }
  throw new Error(`${file.name} is no text file.`);
}

// What the model gets of a message: its files in fences that are longer than any in them, then its own words.
export function withFiles(message) {
  const parts = (message.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map((found) => found[0].length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, message.content].filter(Boolean).join("\n\n");
}

// The files that the next message will have.
export class Attached {
  constructor(list, tell) {
    this.list = list;
    this.tell = tell; // shows words
    this.files = [];
  }

  async add(files) {
    for (const file of files) {
      try {
        this.files.push(await read(file));
      } catch (error) {
        this.tell(error.message);
      }
    }
    this.draw();
  }

  take() {
    const taken = this.files;
    this.files = [];
    this.draw();
    return taken;
  }

  draw() {
    this.list.replaceChildren(...this.files.map((file) => {
      const away = element("button", { type: "button", className: "plain", textContent: "Remove" });
      away.setAttribute("aria-label", `Remove ${file.name}`);
      away.addEventListener("click", () => {
        this.files = this.files.filter((one) => one !== file);
        this.draw();
      });
      return element("li", {}, element("span", { textContent: file.name }), away);
    }));
  }
}

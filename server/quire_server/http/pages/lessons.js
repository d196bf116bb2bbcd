// The exercises beside the pictures: what is to be done, and what this server says of it. It grades, not this page.

import { call, element, errorText } from "./session.js";

export class Exercises {
  constructor(place, said, owners) {
    Object.assign(this, { place, said, owners, lines: new Map(), text: "" });
  }

  list(exercises) {
    if (this.lines.size) return;
    let lesson = "";
    for (const one of exercises) {
      if (one.lesson !== lesson) this.place.append(element("h3", { textContent: lesson = one.lesson }));
      const state = element("span", { className: "unseen", textContent: "open" }), said = element("p", { className: "said hint" });
      const line = element("details", {}, element("summary", {}, element("span", { textContent: one.title }), state), element("p", { textContent: one.task }));
      if (one.asks) line.append(this.#form(one, said));
      line.append(said);
      this.place.append(line);
      this.lines.set(one.name, { line, state, said, title: one.title });
    }
  }

  #form(one, said) {
    const field = element("input", { type: "number", min: 0, max: 1e9, step: "any", required: true });
    const form = element("form", {}, element("label", {}, `Your answer, ${one.asks}`, field), element("button", { className: "plain", textContent: "Check" }));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const body = JSON.stringify({ answer: Number(field.value) });
      const reply = await call(`learn/exercises/${one.name}`, { method: "POST", body, headers: { "Content-Type": "application/json" } });
      said.textContent = reply.ok ? (await reply.json()).said : await errorText(reply);
    });
    return form;
  }

  // Requests have a letter on this page.
  #lettered(text) {
    for (const [id, { letters }] of this.owners.known) if (text.includes(id)) text = text.replaceAll(id, letters);
    return text;
  }

  show(states) {
    const text = JSON.stringify(states);
    if (text === this.text) return;
    this.text = text;
    const news = [];
    for (const { name, done, said: raw } of states) {
      const said = this.#lettered(raw);
      const known = this.lines.get(name);
      if (!known) continue;
      if (done && !known.line.classList.contains("done")) news.push(known.title);
      known.line.classList.toggle("done", done);
      known.state.textContent = done ? "done" : "open";
      if (known.said.textContent !== said && (said || done || !known.line.querySelector("form"))) known.said.textContent = said;
    }
    const count = states.filter((one) => one.done).length;
    this.said.textContent = `${count} of ${states.length} done.${news.length ? ` New: ${news.join(", ")}.` : ""}`;
  }
}

// What the requests that run here would take of memory without pages: each reserves one run of slots for the longest it
// may become, in the first hole that fits.

const SVG = "http://www.w3.org/2000/svg";
const number = new Intl.NumberFormat("en").format;

export class Contiguous {
  constructor(place, said, owners) {
    Object.assign(this, { place, said, owners, runs: new Map() });
  }

  show(pool) {
    const slots = pool.num_blocks * pool.block_size, outside = [];
    const live = new Map(pool.tables.map((table) => [`${table.request_id}.${table.choice}`, table]));
    for (const key of this.runs.keys()) if (!live.has(key)) this.runs.delete(key);
    for (const [key, table] of live) {
      if (!this.runs.has(key)) {
        const length = table.num_prompt + Math.max(table.max_new_tokens - 1, 0), start = this.#hole(length, slots);
        if (start === null) {
          outside.push(this.owners.label(table.request_id, table.choice));
          continue;
        }
        this.runs.set(key, { start, length, table });
      }
      this.runs.get(key).table = table;
    }
    this.#draw(slots, outside);
  }

  #hole(length, slots) {
    let at = 0;
    for (const run of [...this.runs.values()].sort((a, b) => a.start - b.start)) {
      if (run.start - at >= length) return at;
      at = run.start + run.length;
    }
    return slots - at >= length ? at : null;
  }

  #draw(slots, outside) {
    const drawing = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${slots} 10`, preserveAspectRatio: "none", role: "img" })) drawing.setAttribute(name, value);
    let reserved = 0, used = 0;
    for (const { start, length, table } of this.runs.values()) {
      const full = Math.min(table.num_computed, length), colour = `o${this.owners.of(table.request_id).colour}`;
      for (const [kind, x, width] of [["reserved", start, length], ["used", start, full]]) {
        const shape = document.createElementNS(SVG, "rect");
        for (const [name, value] of Object.entries({ class: `${kind} ${colour}`, x, width, y: 0, height: 10 })) shape.setAttribute(name, value);
        drawing.append(shape);
      }
      reserved += length;
      used += full;
    }
    const text = `${number(slots)} slots: ${number(reserved)} reserved, ${number(used)} of them with a token, ${number(slots - reserved)} in holes.`
      + (outside.length ? ` Without room: ${outside.join(", ")}.` : "");
    drawing.setAttribute("aria-label", text);
    this.place.replaceChildren(drawing);
    if (this.said.textContent !== text) this.said.textContent = text;
  }
}

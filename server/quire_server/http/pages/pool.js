// The pool as squares, one for each block, in the colours of their owners; and the page tables.

import { element } from "./session.js";

const FEWEST = 640; // squares of a large pool, if no later block is used
const number = new Intl.NumberFormat("en").format;

// Requests get a letter and a colour in the order in which they are seen.
export class Owners {
  constructor() { this.known = new Map(); this.names = {}; }

  of(requestId) {
    if (!this.known.has(requestId)) {
      let rest = this.known.size, letters = "";
      do { letters = String.fromCharCode(65 + rest % 26) + letters; rest = Math.floor(rest / 26) - 1; } while (rest >= 0);
      this.known.set(requestId, { letters, colour: this.known.size % 8 });
    }
    return this.known.get(requestId);
  }

  label(requestId, choice = 0, several = false) {
    return this.of(requestId).letters + (several || choice ? `.${choice + 1}` : "");
  }
}

export class Pool {
  constructor(place, said, owners) {
    Object.assign(this, { place, said, owners, squares: [], before: new Set(), shown: null });
  }

  show(pool) {
    this.shown = pool;
    const holders = new Map();
    for (const table of pool.tables) {
      for (const block of table.blocks) {
        if (!holders.has(block)) holders.set(block, []);
        holders.get(block).push(table);
      }
    }
    const cached = new Set(pool.cached);
    const last = Math.max(-1, ...holders.keys(), ...pool.cached);
    const count = Math.min(pool.shown, pool.shown > FEWEST ? Math.max(FEWEST, Math.ceil((last + 1) / 64) * 64) : pool.shown);
    this.place.dataset.size = count <= 200 ? "large" : count <= FEWEST ? "small" : "tiny";
    while (this.squares.length < count) this.squares.push(element("div", { className: "block free" }));
    if (this.place.childElementCount !== count) this.place.replaceChildren(...this.squares.slice(0, count));
    for (let block = 0; block < count; block += 1) this.#square(block, holders.get(block), cached.has(block));
    this.before = new Set(holders.keys());
    const more = pool.num_blocks > count ? ` The first ${number(count)} are shown; a server with --kv-memory 1MiB has a pool whose blocks are all seen.` : "";
    const used = pool.num_blocks - pool.num_free - pool.num_cached;
    const text = `${number(pool.num_blocks)} blocks of ${pool.block_size} tokens: ${number(used)} used, ${number(pool.num_shared)} of them shared`
      + ` (which saves ${number(pool.num_saved)}), ${number(pool.num_cached)} cached, ${number(pool.num_free)} free.${more}`;
    if (this.said.textContent !== text) this.said.textContent = text;
  }

  #square(block, tables, isCached) {
    const square = this.squares[block];
    let look = "free", text = "", title = `block ${block}: free`;
    if (tables) {
      const ids = [...new Set(tables.map((table) => table.request_id))];
      const one = this.owners.of(ids[0]), other = this.owners.of(ids[1] ?? ids[0]);
      look = tables.length > 1 ? `shared o${one.colour} p${other.colour}` : `owned o${one.colour}`;
      look += this.before.has(block) ? "" : " fresh";
      text = tables.length > 1 ? `×${tables.length}` : one.letters;
      title = `block ${block}: ${tables.map((table) => this.owners.label(table.request_id, table.choice)).join(", ")}`;
    } else if (isCached) {
      look = "cached";
      title = `block ${block}: cached, in no table`;
    }
    const lit = square.classList.contains("lit") ? " lit" : "";
    const name = `block ${look}${lit}`;
    if (square.className !== name) square.className = name;
    if (square.textContent !== text) square.textContent = text;
    if (square.title !== title) square.title = title;
  }

  light(blocks) {
    const lit = new Set(blocks ?? []);
    this.place.classList.toggle("lights", lit.size > 0);
    this.squares.forEach((square, block) => square.classList.toggle("lit", lit.has(block)));
  }
}

const HEADINGS = ["Request", "Tokens", "Blocks", "Table"];
const MOST_ENTRIES = 96; // of one table; those in the middle are left out

export class Tables {
  constructor(place, owners, pool) {
    Object.assign(this, { place, owners, pool, text: "" });
    this.body = element("tbody");
    place.append(element("thead", {}, element("tr", {}, ...HEADINGS.map((textContent) => element("th", { scope: "col", textContent })))), this.body);
  }

  show(pool) {
    const text = JSON.stringify([pool.tables, pool.waiting]);
    if (text === this.text) return;
    this.text = text;
    const holders = new Map();
    for (const table of pool.tables) for (const block of table.blocks) holders.set(block, (holders.get(block) ?? 0) + 1);
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.of : null;
    const rows = pool.tables.map((table) => this.#row(table, holders, pool.block_size));
    rows.push(...pool.waiting.map((one) => this.#waiting(one)));
    if (!rows.length) rows.push(element("tr", {}, element("td", { colSpan: 4, className: "hint", textContent: "No request has blocks. Send one." })));
    this.body.replaceChildren(...rows);
    if (focused) this.body.querySelector(`[data-of="${CSS.escape(focused)}"]`)?.focus();
  }

  #row(table, holders, size) {
    const owner = this.owners.of(table.request_id), label = this.owners.label(table.request_id, table.choice);
    const entries = table.blocks.map((block, index) => {
      const filled = Math.max(0, Math.min(size, table.num_computed - index * size));
      const shared = holders.get(block) > 1;
      const entry = element("span", {
        className: `entry o${owner.colour}${shared ? " shared" : ""}${filled < size ? " part" : ""}`, textContent: block,
        title: `positions ${index * size} to ${(index + 1) * size - 1}: block ${block}, ${filled} of ${size} tokens${shared ? ", shared" : ""}`,
      });
      entry.style.setProperty("--full", `${100 * filled / size}%`);
      return entry;
    });
    const left = entries.length - MOST_ENTRIES;
    if (left > 0) entries.splice(MOST_ENTRIES / 2, left, element("span", { className: "hint", textContent: ` … ${number(left)} more … ` }));
    const row = element("tr", { className: `o${owner.colour}`, tabIndex: 0 },
      element("th", { scope: "row" }, element("span", { className: "chip", textContent: label })),
      element("td", { textContent: `${number(table.num_computed)} of ${number(table.num_tokens)}` }),
      element("td", { textContent: number(table.num_blocks) }),
      element("td", {}, ...entries));
    row.dataset.of = `${table.request_id}.${table.choice}`;
    const on = () => this.pool.light(table.blocks), off = () => this.pool.light(null);
    row.addEventListener("mouseenter", on);
    row.addEventListener("mouseleave", off);
    row.addEventListener("focus", on);
    row.addEventListener("blur", off);
    return row;
  }

  #waiting(one) {
    const owner = this.owners.of(one.request_id);
    const why = one.state === "held" ? `held: ${one.reason === "adapters" ? "other adapters have their turn" : "its client does not read"}`
      : `${one.state === "preempted" ? "preempted, waits" : "waits"}${WHY[one.reason] ?? ""}`;
    const kept = one.swapped_blocks ? `, ${one.swapped_blocks} blocks kept in host memory` : "";
    return element("tr", { className: `o${owner.colour}` },
      element("th", { scope: "row" }, element("span", { className: "chip", textContent: owner.letters })),
      element("td", { textContent: `0 of ${number(one.num_tokens)}` }), element("td", { textContent: "0" }),
      element("td", { className: "hint", textContent: why + kept }));
  }
}

export const WHY = {
  kv: " for blocks", slots: " for a slot", budget: " for the step’s tokens", prefix: " for a prefix that another computes", "": "",
};

// The table of requests: a bar for each, as long as it took, in the colours of where the time went.

import { number, seconds, shape } from "./charts.js";
import { element } from "./session.js";

const PARTS = [
  { name: "queue", colour: "s6", of: (row) => Math.max(row.queue - row.kv_wait, 0) },
  { name: "waiting for KV blocks", colour: "s2", of: (row) => row.kv_wait },
  { name: "prompt", colour: "s1", of: (row) => row.prefill },
  { name: "output", colour: "s3", of: (row) => row.decode },
  { name: "no token yet", colour: "s5", of: (row) => row.waited },
];
const HEADINGS = ["Request", "State", "Prompt", "Cached", "Output", "Seconds", ""];
const NUMBERS = new Set([2, 3, 4, 5]);
const MOST_ROWS = 60;

const table = document.getElementById("requests");
const note = document.getElementById("requests-note");
const body = element("tbody");
const lines = [];

table.append(
  element("thead", {}, element("tr", {}, ...HEADINGS.map((text, index) => {
    const made = element("th", { scope: "col", textContent: text, className: NUMBERS.has(index) ? "number" : "" });
    if (!text) made.append(element("span", { className: "unseen", textContent: "Where the time went" }));
    return made;
  }))),
  body,
);
document.getElementById("requests-legend").append(
  ...PARTS.map((part) => element("span", { className: part.colour, textContent: part.name })));

function newLine() {
  const cells = HEADINGS.map((_, index) => element("td", { className: NUMBERS.has(index) ? "number" : "" }));
  const bar = shape("svg", { role: "img", preserveAspectRatio: "none", viewBox: "0 0 1000 10" });
  const rects = PARTS.map((part) => shape("rect", { class: `solid ${part.colour}`, y: 0, height: 10 }));
  bar.append(...rects);
  cells.at(-1).className = "bar-cell";
  cells.at(-1).append(bar);
  return { row: element("tr", {}, ...cells), cells, bar, rects };
}

const total = (row) => PARTS.reduce((sum, part) => sum + part.of(row), 0);

// Rows are reused, so that the table neither jumps nor loses the reader's place.
export function showRequests(rows, numLive) {
  const shown = rows.slice(0, MOST_ROWS);
  const longest = Math.max(...shown.map(total), 1e-3);
  while (lines.length < shown.length) lines.push(newLine());
  if (body.childElementCount !== shown.length) body.replaceChildren(...lines.slice(0, shown.length).map((line) => line.row));
  shown.forEach((row, index) => {
    const { cells, bar, rects } = lines[index];
    const preempted = row.preemptions ? `, preempted ${row.preemptions}×` : "";
    const choices = row.n > 1 ? ` ×${row.n}` : "";
    const texts = [row.id.slice(-8) || "–", row.state + preempted, number(row.prompt_tokens), number(row.cached_tokens),
      number(row.generated_tokens) + choices, total(row).toFixed(2)];
    texts.forEach((text, column) => { if (cells[column].textContent !== text) cells[column].textContent = text; });
    cells[0].title = row.id;
    let at = 0;
    const said = [];
    PARTS.forEach((part, number_) => {
      const width = 1000 * part.of(row) / longest;
      rects[number_].setAttribute("x", at.toFixed(1));
      rects[number_].setAttribute("width", width.toFixed(1));
      at += width;
      if (part.of(row) > 0) said.push(`${part.name} ${seconds(part.of(row))}`);
    });
    bar.setAttribute("aria-label", said.join(", ") || "no time yet");
    cells.at(-1).title = said.join(", ");
  });
  note.textContent = `${number(numLive)} unfinished, oldest first, then those that ended last. The longest bar is ${seconds(longest)}.`;
}

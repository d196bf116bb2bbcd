// The last steps as columns, each sequence as a lane; and every step's decisions in words.

import { element } from "./session.js";
import { WHY } from "./pool.js";

const SVG = "http://www.w3.org/2000/svg";
const COLUMN = 24, LANE = 34, LEFT = 46, TOP = 20, MOST_LANES = 24;
const CAUSES = {
  blocks: "blocks ran short", elder: "the oldest must go on", class: "an interactive request goes first",
  share: "its tenant had more than its share", device: "the device had no memory",
};
const number = new Intl.NumberFormat("en").format;

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Which lane a step's copy is for: the table that has the copy's target now, if it still has it.
function takerOf(target, pool) {
  return pool.tables.find((table) => table.blocks.includes(target));
}

export class Lanes {
  constructor(place, said, owners) {
    Object.assign(this, { place, said, owners, steps: [], waiting: new Set() });
  }

  get columns() {
    return Math.max(12, Math.floor((this.place.parentElement.clientWidth - LEFT - 8) / COLUMN));
  }

  add(steps, pool) {
    for (const step of steps) {
      for (const { kind, request_id: id } of step.decisions) {
        if (kind === "waits" || kind === "preempted") this.waiting.add(id);
        if (kind === "enters") this.waiting.delete(id);
      }
      step.waits = [...this.waiting];
      for (const [id] of step.ends) this.waiting.delete(id);
      step.marks = new Map();
      for (const [, target] of step.copies) {
        const taker = takerOf(target, pool);
        if (taker) step.marks.set(`${taker.request_id}.${taker.choice}`, "⇒");
      }
    }
    const live = new Set([...pool.waiting, ...pool.tables].map((each) => each.request_id));
    for (const id of this.waiting) if (!live.has(id)) this.waiting.delete(id); // it was aborted
    this.steps.push(...steps);
    this.steps.splice(0, this.steps.length - 200);
  }

  draw() {
    const steps = this.steps.slice(-this.columns), lanes = new Map();
    const lane = (id, choice) => {
      const key = `${id}.${choice}`;
      if (!lanes.has(key)) lanes.set(key, { id, choice, cells: new Map() });
      return lanes.get(key);
    };
    const cell = (id, choice, column) => {
      const { cells } = lane(id, choice);
      if (!cells.has(column)) cells.set(column, { marks: [] });
      return cells.get(column);
    };
    steps.forEach((step, column) => {
      for (const [id, choice, start, size] of step.slices) Object.assign(cell(id, choice, column), { size, start });
      for (const decision of step.decisions) {
        if (decision.kind === "enters" && decision.num_tokens) cell(decision.request_id, 0, column).cached = decision.num_tokens;
        if (decision.kind === "preempted") cell(decision.request_id, 0, column).marks.push(decision.num_tokens ? "⇅" : "✕");
      }
      for (const id of step.waits) cell(id, 0, column).waits = true;
      for (const [key, mark] of step.marks) lanes.get(key)?.cells.get(column)?.marks.push(mark);
      for (const [id, choice] of step.ends) cell(id, choice, column).marks.push("■");
    });
    const shown = [...lanes.values()].slice(-MOST_LANES);
    const several = new Set(shown.filter((one) => one.choice).map((one) => one.id));
    const width = LEFT + this.columns * COLUMN, height = TOP + Math.max(shown.length, 1) * LANE + 4;
    const drawing = shape("svg", { width, height, role: "img", "aria-label": this.#summary(steps, shown) });
    steps.forEach((step, column) => {
      const x = LEFT + column * COLUMN;
      if (step.step_id % 5 === 0) {
        drawing.append(shape("rect", { class: "column", x, y: TOP - 4, width: COLUMN, height: height - TOP }));
        drawing.append(shape("text", { x: x + COLUMN / 2, y: 12, "text-anchor": "middle" }, String(step.step_id)));
      }
    });
    shown.forEach((one, row) => this.#lane(drawing, one, TOP + row * LANE, width, several.has(one.id), steps.length));
    this.place.replaceChildren(drawing);
    const step = steps.at(-1);
    if (step) {
      this.said.textContent = `Step ${number(step.step_id)}: ${step.prefill_tokens} prompt and ${step.decode_tokens} output tokens`
        + ` in ${(1e3 * step.seconds).toFixed(1)} ms; ${step.running} run, ${step.waiting} wait.`;
    }
  }

  #lane(drawing, { id, choice, cells }, y, width, several, count) {
    const owner = this.owners.of(id), bottom = y + LANE - 3, middle = bottom - 9;
    const group = shape("g", { class: `o${owner.colour}` });
    group.append(shape("line", { class: "lane", x1: LEFT, x2: width, y1: bottom, y2: bottom }));
    group.append(shape("rect", { class: "owner", x: 2, y: bottom - 19, width: LEFT - 8, height: 18, rx: 4 }));
    group.append(shape("text", { class: "name", x: LEFT / 2 - 2, y: bottom - 6, "text-anchor": "middle" }, this.owners.label(id, choice, several)));
    for (let column = 0; column < count; column += 1) {
      const found = cells.get(column);
      if (!found) continue;
      const x = LEFT + column * COLUMN;
      if (found.waits) group.append(shape("line", { class: "wait", x1: x + 1, x2: x + COLUMN - 1, y1: middle, y2: middle }));
      if (found.size > 1 || (found.size === 1 && found.start === 0)) {
        group.append(shape("rect", { class: "owner", x: x + 1, y: bottom - 18, width: COLUMN - 2, height: 17, rx: 2 }));
        group.append(shape("text", { class: "count", x: x + COLUMN / 2, y: bottom - 6 }, String(found.size)));
      } else if (found.size === 1) {
        group.append(shape("circle", { class: "owner", cx: x + COLUMN / 2, cy: middle, r: 4.5 }));
      }
      if (found.cached) {
        group.append(shape("rect", { class: "cached", x: x + 1, y: bottom - 18, width: COLUMN - 2, height: 17, rx: 2 }));
        found.marks.unshift(`+${found.cached}`);
      }
      if (found.marks.length) group.append(shape("text", { class: "mark", x: x + COLUMN / 2, y: bottom - 21 }, [...new Set(found.marks)].join("")));
    }
    drawing.append(group);
  }

  #summary(steps, shown) {
    if (!steps.length) return "No step yet.";
    const names = shown.map((one) => this.owners.label(one.id, one.choice)).join(", ");
    return `Steps ${steps[0].step_id} to ${steps.at(-1).step_id}; lanes: ${names}. What happened says the same in words.`;
  }
}

// What a step has done but for decodes, in sentences: [step, words, request].
export function sentences(step, owners) {
  const said = [], name = (id) => owners.of(id).letters;
  for (const { kind, request_id: id, reason, num_tokens: tokens, by } of step.decisions) {
    if (kind === "enters") said.push([id, tokens ? `${name(id)} enters with ${number(tokens)} tokens that are cached` : `${name(id)} enters`]);
    if (kind === "waits") said.push([id, `${name(id)} waits${WHY[reason] ?? ""}`]);
    if (kind === "elder") said.push([id, `${name(id)} is the oldest: it is not preempted any more`]);
    if (kind === "preempted") {
      said.push([id, `${name(id)} is preempted${by ? ` for ${name(by)}` : ""}: ${CAUSES[reason] ?? reason};`
        + ` ${tokens ? `its ${number(tokens)} tokens are kept in host memory` : "it will compute its tokens again, and they will be the same"}`]);
    }
  }
  for (const [id, choice, start, size] of step.slices) {
    if (size > 1) said.push([id, `${owners.label(id, choice)} computes ${number(size)} prompt tokens, from position ${number(start)} on`]);
  }
  for (const [source, target] of step.copies) said.push(["", `copy on write: block ${source} is copied to ${target}`]);
  if (step.swaps[0]) said.push(["", `${step.swaps[0]} blocks are copied to host memory`]);
  if (step.swaps[1]) said.push(["", `${step.swaps[1]} blocks come back from host memory`]);
  for (const [id, choice, why, count] of step.ends) said.push([id, `${owners.label(id, choice)} ends (${why}) after ${number(count)} tokens`]);
  return said.map(([id, words]) => element("li", {},
    element("span", { className: "at", textContent: `${number(step.step_id)}` }),
    ...(id ? [element("span", { className: `chip o${owners.of(id).colour}`, textContent: name(id) })] : []), words));
}

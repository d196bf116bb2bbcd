// Charts by hand: one SVG path a series, a legend whose buttons hide a series, a cursor for the mouse and for arrow keys.
// What they show is said in words too: in the label of the picture, and under the cursor.

import { element } from "./session.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 18;
const GAP_SECONDS = 3.5; // without a frame: the line is broken, not drawn through

export function shape(name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function number(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toPrecision(2);
}

export function seconds(value) {
  if (value >= 60) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${(value * 1e3).toPrecision(value < 1e-2 ? 2 : 3)} ms`;
}

export const percent = (value) => `${(value * 100).toFixed(1)} %`;

// The least of 1, 2, 2.5 and 5 times a power of ten that is not below the value.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((bound) => bound >= value * 0.9999);
}

const place = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

class Chart {
  constructor(id, { label, series, format, floor = 1, ceiling = Infinity }) {
    this.label = label;
    this.format = format;
    this.floor = floor; // the axis goes at least so far
    this.ceiling = ceiling;
    this.series = series.map((one) => ({ ...one, shown: !one.hidden }));
    this.cursor = null; // index of the point
    this.points = [];
    const figure = document.getElementById(id);
    this.svg = shape("svg", { role: "img", tabindex: "0", "aria-describedby": `${id}-readout` });
    this.axis = shape("g");
    this.line = shape("line", { class: "cursor", visibility: "hidden" });
    for (const one of this.series) {
      one.path = shape("path", { class: `${one.kind} ${one.look ?? ""} ${one.colour}` });
    }
    // Areas first, so that no line is hidden behind one.
    const ordered = [...this.series].sort((a, b) => (a.kind === "line") - (b.kind === "line"));
    this.svg.append(this.axis, ...ordered.map((one) => one.path), this.line);
    this.readout = element("p", { className: "readout", id: `${id}-readout` });
    const legend = element("figcaption", { className: "legend" }, ...this.series.map((one) => this.button(one)));
    figure.append(this.svg, legend, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => { this.readout.removeAttribute("aria-live"); this.move(null); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.render()).observe(this.svg);
  }

  button(one) {
    const made = element("button", { type: "button", className: one.colour, textContent: one.name });
    made.setAttribute("aria-pressed", String(one.shown));
    made.addEventListener("click", () => {
      one.shown = !one.shown;
      made.setAttribute("aria-pressed", String(one.shown));
      this.render();
    });
    return made;
  }

  key(event) {
    const last = this.points.length - 1;
    const from = this.cursor ?? last + (event.key === "ArrowLeft" ? 1 : 0);
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.move(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.readout.setAttribute("aria-live", "polite"); // only who steps through the points wants each of them read
    this.move(Math.min(Math.max(to, 0), last));
  }

  point(x) {
    let nearest = null, least = Infinity;
    this.points.forEach((_, index) => {
      const distance = Math.abs(this.x(index) - x);
      if (distance < least) [nearest, least] = [index, distance];
    });
    this.move(nearest);
  }

  move(index) {
    this.cursor = index;
    this.mark();
  }

  get width() { return Math.max(this.svg.clientWidth, 120); }
  get height() { return Math.max(this.svg.clientHeight, 80); }
  y(value) { return TOP + (this.height - TOP - BOTTOM) * (1 - Math.min(value, this.top) / this.top); }

  // The visible series' values, those that are stacked on what lies below them.
  stacked(point) {
    let below = 0;
    return this.series.map((one) => {
      const value = one.value(point);
      if (!one.shown || value === null || value === undefined) return null;
      if (!one.stack) return { low: 0, high: value };
      const low = below;
      below += value;
      return { low, high: below };
    });
  }

  render() {
    const layers = this.points.map((point) => this.stacked(point));
    const highest = Math.max(this.floor, ...layers.flat().map((one) => one?.high ?? 0));
    this.top = Math.min(round(highest), this.ceiling);
    this.drawAxis();
    this.series.forEach((one, index) => {
      one.path.setAttribute("d", one.shown ? this.path(one, layers.map((layer) => layer[index])) : "");
    });
    this.svg.setAttribute("aria-label", `${this.label}. ${this.summary()}`);
    this.mark();
  }

  path(one, values) {
    return this.runs(values).map((run) => {
      const tops = run.map((index) => place(this.x(index), this.y(values[index].high)));
      if (one.kind === "line") return `M${tops.join("L")}`;
      const bottoms = run.map((index) => place(this.x(index), this.y(values[index].low))).reverse();
      return `M${tops.join("L")}L${bottoms.join("L")}Z`;
    }).join("");
  }

  drawAxis() {
    const drawn = [];
    for (const part of [0, 0.5, 1]) {
      const y = this.y(this.top * part);
      drawn.push(shape("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      const text = shape("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" });
      text.textContent = part ? this.format(this.top * part) : "0";
      drawn.push(text);
    }
    for (const [x, said, anchor] of this.labels()) {
      const text = shape("text", { x, y: this.height - 4, "text-anchor": anchor });
      text.textContent = said;
      drawn.push(text);
    }
    this.axis.replaceChildren(...drawn);
  }

  said(point) {
    const parts = this.series.map((one) => {
      const value = one.value(point);
      return value === null || value === undefined ? null : `${one.name} ${(one.format ?? this.format)(value)}`;
    });
    return parts.filter(Boolean).join(", ") || "nothing";
  }

  mark() {
    const index = this.cursor !== null && this.cursor < this.points.length ? this.cursor : null;
    this.line.setAttribute("visibility", index === null ? "hidden" : "visible");
    if (index !== null) {
      for (const [name, value] of Object.entries({ x1: this.x(index), x2: this.x(index), y1: TOP, y2: this.height - BOTTOM })) {
        this.line.setAttribute(name, value);
      }
    }
    const shown = index === null ? this.points.at(-1) : this.points[index];
    this.readout.textContent = shown === undefined ? "No data yet." : `${this.when(shown, index)}: ${this.said(shown)}.`;
  }

  summary() {
    const last = this.points.at(-1);
    return last === undefined ? "No data yet." : `Now: ${this.said(last)}. Arrow keys go through the points.`;
  }
}

// Frames over time. `show(frames, span)`: those of the last so many seconds.
export class TimeChart extends Chart {
  show(frames, span) {
    const marked = this.cursor === null ? null : this.points[this.cursor];
    this.until = frames.at(-1)?.t ?? 0;
    // No more than there is, from a minute on: a server that has just started has no empty minutes before it.
    this.span = Math.min(span, Math.max(60, Math.ceil((this.until - (frames[0]?.t ?? 0)) / 60) * 60));
    this.points = frames.filter((frame) => frame.t >= this.until - span);
    if (marked) { // the cursor stays on its moment while the chart moves on
      const found = this.points.indexOf(marked);
      this.cursor = found < 0 ? null : found;
    }
    this.render();
  }

  x(index) {
    const share = 1 - (this.until - this.points[index].t) / (this.span || 1);
    return LEFT + (this.width - LEFT - RIGHT) * share;
  }

  runs(values) {
    const found = [];
    values.forEach((value, index) => {
      if (value === null) return;
      const last = found.at(-1);
      const joins = last && last.at(-1) === index - 1 && this.points[index].t - this.points[index - 1].t < GAP_SECONDS;
      if (joins) last.push(index); else found.push([index]);
    });
    return found.map((run) => (run.length > 1 ? run : [run[0], run[0]]));
  }

  labels() {
    const begin = this.span >= 120 ? `${this.span / 60} min ago` : `${this.span} s ago`;
    return [[LEFT, begin, "start"], [this.width - RIGHT, "now", "end"]];
  }

  when(frame, index) {
    return index === null ? "Now" : new Date(frame.t * 1e3).toLocaleTimeString("en", { hour12: false });
  }
}

// One bar beside the other, as many as there is room for. `show(bars)`.
export class BarChart extends Chart {
  show(bars) {
    this.points = bars.slice(-Math.floor((this.width - LEFT - RIGHT) / 3));
    this.cursor = null;
    this.render();
  }

  get step() { return (this.width - LEFT - RIGHT) / Math.max(this.points.length, 60); }
  x(index) { return this.width - RIGHT - (this.points.length - index - 0.5) * this.step; }

  path(one, values) {
    const half = Math.max(this.step * 0.4, 0.5);
    return values.map((value, index) => {
      if (value === null || value.high <= value.low) return "";
      const [low, high, x] = [this.y(value.low), this.y(value.high), this.x(index)];
      return `M${place(x - half, low)}V${high.toFixed(1)}H${(x + half).toFixed(1)}V${low.toFixed(1)}Z`;
    }).join("");
  }

  labels() { return [[LEFT, "earlier steps", "start"], [this.width - RIGHT, "latest", "end"]]; }
  when(_, index) { return index === null ? "Latest" : `${this.points.length - 1 - index} bars before the latest`; }
}

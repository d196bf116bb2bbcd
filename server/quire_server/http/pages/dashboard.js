// The dashboard: follows the server's own history over server-sent events and draws it. All text from outside becomes
// text nodes. When the connection is lost it is made again, and what the server has kept meanwhile is shown.

import { BarChart, TimeChart, number, percent, seconds } from "./charts.js";
import { showRequests } from "./requests.js";
import { element, follow } from "./session.js";

const MOST_FRAMES = 600; // as many as the server keeps
const MOST_BARS = 600;

const state = document.getElementById("state");
const pause = document.getElementById("pause");
const spans = document.getElementById("span");
const alerts = document.getElementById("alerts");
const tiles = document.getElementById("tiles");

let frames = [], bars = [], latest = null, server = null;
let span = 300, paused = false, due = false;

const waiting = (reason) => (frame) => frame.waiting[reason] ?? 0;
const KNOWN_REASONS = ["kv", "slots", "budget", "prefix"];
const others = (frame) => Object.entries(frame.waiting)
  .reduce((sum, [reason, count]) => sum + (KNOWN_REASONS.includes(reason) ? 0 : count), 0);
const percentiles = (name) => ["p50", "p95", "p99"].map((title, index) => ({
  name: title, kind: "line", colour: `s${index + 1}`, look: ["", "dashed", "dotted"][index],
  value: (frame) => frame[name]?.[index] ?? null,
}));

const charts = [
  new TimeChart("blocks", {
    label: "KV blocks over time", format: number, floor: 10,
    series: [
      { name: "one sequence’s", kind: "area", stack: true, colour: "s1", value: (f) => f.blocks.unshared },
      { name: "shared", kind: "area", stack: true, colour: "s3", value: (f) => f.blocks.shared },
      { name: "cached", kind: "area", stack: true, colour: "s6", value: (f) => f.blocks.cached },
      { name: "peak of the second", kind: "line", look: "dotted", colour: "s1", value: (f) => f.blocks.peak },
      { name: "saved by sharing", kind: "line", look: "dotted", colour: "s3", value: (f) => f.blocks.saved },
      { name: "static, longest of the batch", kind: "line", look: "dashed", colour: "s2", value: (f) => f.blocks.static_longest },
      { name: "static, longest context", kind: "line", look: "dashed", colour: "s4", hidden: true, value: (f) => f.blocks.static_full },
      { name: "pool", kind: "line", colour: "s5", hidden: true, value: (f) => f.blocks.total },
    ],
  }),
  new TimeChart("queue", {
    label: "Sequences running and waiting over time", format: number, floor: 4,
    series: [
      { name: "running", kind: "area", stack: true, colour: "s1", value: (f) => f.running },
      { name: "waiting for KV blocks", kind: "area", stack: true, colour: "s2", value: waiting("kv") },
      { name: "for a slot", kind: "area", stack: true, colour: "s4", value: waiting("slots") },
      { name: "for the step’s budget", kind: "area", stack: true, colour: "s5", value: waiting("budget") },
      { name: "for a prefix that another computes", kind: "area", stack: true, colour: "s3", value: waiting("prefix") },
      { name: "for something else", kind: "area", stack: true, colour: "s6", value: others },
    ],
  }),
  new TimeChart("ttft", { label: "Time to first token, of the last ten seconds", format: seconds, floor: 0.01, series: percentiles("ttft") }),
  new TimeChart("itl", { label: "Time between tokens, of the last ten seconds", format: seconds, floor: 0.001, series: percentiles("itl") }),
  new TimeChart("tokens", {
    label: "Tokens per second", format: number, floor: 10,
    series: [
      { name: "prompt tokens computed", kind: "line", colour: "s1", value: (f) => f.prefill },
      { name: "tokens generated", kind: "line", colour: "s3", value: (f) => f.generated },
    ],
  }),
  new TimeChart("batching", {
    label: "Share of the reserved token slots that held a token, last minute", format: percent, floor: 1, ceiling: 1,
    series: [
      { name: "computed here", kind: "line", colour: "s1", value: (f) => f.efficiency },
      { name: "static batching of the same requests", kind: "line", look: "dashed", colour: "s2", value: (f) => f.static_efficiency },
    ],
  }),
  new TimeChart("little", {
    label: "Little’s law over the last minute: sequences in the system, and arrivals times the time they stay", format: number, floor: 1,
    series: [
      { name: "L, in the system", kind: "line", colour: "s1", value: (f) => f.in_system },
      { name: "λ·W, arrivals × time", kind: "line", look: "dashed", colour: "s2", value: (f) => f.arrivals * f.seconds },
      { name: "residual", kind: "line", colour: "s6", hidden: true, format: percent, value: (f) => f.residual },
    ],
  }),
];
const steps = new BarChart("steps", {
  label: "Prompt and output tokens in each of the last steps", format: number, floor: 8,
  series: [
    { name: "prompt tokens", kind: "solid", stack: true, colour: "s1", value: ([prefill, , , count]) => prefill / count },
    { name: "output tokens", kind: "solid", stack: true, colour: "s3", value: ([, decode, , count]) => decode / count },
    { name: "time of a step", kind: "solid", colour: "s6", hidden: true, format: seconds, value: ([, , ms, count]) => ms / count / 1e3 },
    { name: "steps in this bar", kind: "solid", colour: "s6", hidden: true, value: ([, , , count]) => count },
  ],
});

// Why a second had no guesses, where the server makes them.
const WHY_NONE = {
  batch: "full steps", request: "not asked", turn: "in turns", nothing: "not found", cost: "too dear", blocks: "no block",
};
// Name, text of a frame, and whether the tile is hidden until it has one.
const TILES = [
  ["Running", (f) => number(f.running)],
  ["Waiting", (f) => number(Object.values(f.waiting).reduce((sum, count) => sum + count, 0))],
  ["Wait for KV", (f) => (f.kv_waited ? seconds(f.kv_waited) : "0 s")],
  ["KV in use", (f) => percent(f.blocks.total ? f.blocks.used / f.blocks.total : 0)],
  ["Output/s", (f) => number(f.generated)],
  ["TTFT p95", (f) => (f.ttft ? seconds(f.ttft[1]) : "–")],
  ["ITL p95", (f) => (f.itl ? seconds(f.itl[1]) : "–")],
  ["Engine busy", (f) => percent(f.busy)],
  ["GPU busy", (f) => (f.gpu === null ? null : percent(f.gpu)), "hidden"],
  ["Little’s residual", (f) => (f.seconds ? percent(f.residual) : "–")],
  ["Tokens a decode", (f) => (f.guessed && f.decode ? ((f.decode + f.guessed_right) / f.decode).toFixed(2) : null), "hidden"],
  ["Guesses right", (f) => (f.guessed ? percent(f.guessed_right / f.guessed) : WHY_NONE[f.undrafted] ?? null), "hidden"],
];
const values = TILES.map(([name, , hidden]) => {
  const value = element("dd", { textContent: "–" });
  tiles.append(element("div", { hidden: hidden !== undefined }, element("dt", { textContent: name }), value));
  return value;
});

function showAlerts(found) {
  const said = found.map((alert) => [alert, `${alert.name}: ${alert.summary}${alert.firing ? "" : " (not for long yet)"}`]);
  const text = said.map(([, words]) => words).join("\n") || "None.";
  if (alerts.dataset.text === text) return; // a screen reader hears what is new, not every second
  alerts.dataset.text = text;
  alerts.replaceChildren(...(said.length
    ? said.map(([alert, words]) => element("li", { className: alert.firing ? "firing" : "" }, words,
      element("span", { className: "advice", textContent: alert.advice })))
    : [element("li", { className: "calm", textContent: "None." })]));
}

function showTenants(tenants) {
  document.getElementById("tenants-section").hidden = tenants.length === 0;
  const all = tenants.reduce((sum, one) => sum + one.service, 0) || 1;
  const head = element("tr", {}, ...["Tenant", "Share of service", "Running", "Waiting"].map((text) => element("th", { scope: "col", textContent: text })));
  const rows = tenants.map((one) => element("tr", {}, ...[one.name || "without a name", percent(one.service / all), number(one.running), number(one.waiting)]
    .map((text) => element("td", { textContent: text }))));
  document.getElementById("tenants").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

const REASONS = { cached: "for what is cached", load: "for the least load", moved: "after a move" };

function showReplicas(board) {
  document.getElementById("replicas-section").hidden = !board?.rows.length;
  if (!board?.rows.length) return;
  const routes = Object.entries(board.routes).map(([reason, count]) => `${number(count)} ${REASONS[reason] ?? reason}`);
  document.getElementById("replicas-note").textContent =
    `Requests given to a replica: ${routes.join(", ") || "none"}. Streams moved: ${number(board.moved)}. First output: a mean of the last ones.`;
  const head = element("tr", {}, ...["Replica", "State", "Streams", "Tokens ahead", "First output, predicted", "Seen"].map((text) => element("th", { scope: "col", textContent: text })));
  const time = (value) => (value === null ? "–" : seconds(value));
  const rows = board.rows.map((one) => element("tr", {}, ...[one.name, one.state, number(one.streams), number(one.prompt_tokens_ahead), time(one.predicted), time(one.seen)]
    .map((text) => element("td", { textContent: text }))));
  document.getElementById("replicas").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

function draw() {
  due = false;
  for (const chart of charts) chart.show(frames, span);
  steps.show(bars);
  const frame = frames.at(-1);
  if (frame) {
    TILES.forEach(([, tell], index) => {
      const text = tell(frame), tile = values[index].parentElement;
      tile.hidden &&= text === null;
      values[index].textContent = text ?? "–";
    });
    showTenants(frame.tenants);
  }
  if (latest) {
    showAlerts(latest.alerts);
    showReplicas(latest.replicas);
    showRequests(latest.requests, latest.num_live);
  }
}

function redraw() {
  if (due || paused) return;
  due = true;
  requestAnimationFrame(draw); // which does not come while nobody looks at the tab
}

function take(message) {
  if (message.error) throw new Error(message.error.message);
  if (message.past) {
    server = message.server;
    frames = message.past.frames;
    bars = message.past.bars.flat();
    latest = null;
    document.getElementById("serving").replaceChildren(
      "Serving ", element("strong", { textContent: server.model }),
      `, ${number(server.num_blocks)} KV blocks of ${server.block_size} tokens, up to ${number(server.max_num_seqs)} sequences at once.`);
    document.title = `${server.model} – Dashboard`;
  } else if (message.now) {
    latest = message.now;
    frames.push(latest.frame);
    bars.push(...latest.bars);
  }
  frames.splice(0, frames.length - MOST_FRAMES);
  bars.splice(0, bars.length - MOST_BARS);
  redraw();
}

function tell(text, lost = false) {
  state.textContent = text;
  state.classList.toggle("lost", lost);
}

spans.addEventListener("change", (event) => { span = Number(event.target.value); paused ? draw() : redraw(); });
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  pause.textContent = paused ? "Go on" : "Pause";
  tell(paused ? "Paused. The server goes on." : "Live.");
  redraw();
});
follow("dashboard/events", (message) => {
  take(message);
  if (!paused) tell("Live.");
}, tell);

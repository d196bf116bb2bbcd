// The page /learn: follows the engine's steps and its pool, lets an operator set the pace, and sends requests to look at.
// All text from outside becomes text nodes.

import { Contiguous } from "./contiguous.js";
import { Lanes, sentences } from "./lanes.js";
import { Owners, Pool, Tables } from "./pool.js";
import { Exercises } from "./lessons.js";
import { call, element, errorText, events, follow } from "./session.js";

const MOST_EVENTS = 200, MOST_ANSWERS = 40;
const get = (id) => document.getElementById(id);

const owners = new Owners();
const pool = new Pool(get("pool"), get("pool-said"), owners);
const contiguous = new Contiguous(get("contiguous"), get("contiguous-said"), owners);
const tables = new Tables(get("tables"), owners, pool);
const lanes = new Lanes(get("lanes"), get("steps-said"), owners);
const exercises = new Exercises(get("lessons"), get("lessons-said"), owners);
let server = null, pace = { mode: "run", seconds: 0, steps_left: 0 }, latest = null, due = false;

function tell(text, lost = false) {
  if (get("state").textContent !== text) get("state").textContent = text;
  get("state").classList.toggle("lost", lost);
}

function draw() {
  due = false;
  if (!latest) return;
  pool.show(latest);
  contiguous.show(latest);
  tables.show(latest);
  lanes.draw();
}

function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(draw);
}

function showPace() {
  const paused = pace.mode === "pause", slow = pace.mode === "slow";
  get("pause").textContent = paused ? "Go on" : "Pause";
  get("pause").setAttribute("aria-pressed", String(paused));
  get("slow").setAttribute("aria-pressed", String(slow));
  tell(paused ? "Paused: every request waits." : slow ? `Slow: a step every ${pace.seconds.toFixed(2)} s.` : "Live.");
}

function take(message) {
  if (message.error) throw new Error(message.error.message);
  if (message.server) {
    server = message.server;
    get("serving").replaceChildren("Serving ", element("strong", { textContent: server.model }),
      `: up to ${server.max_num_seqs} sequences at once and ${server.max_num_batched_tokens} tokens a step.`);
    document.title = `${server.model} – Learn`;
    for (const name of ["pause", "step", "slow", "speed"]) get(name).disabled = !server.may_pause;
    get("pace-note").hidden = server.may_pause;
    exercises.list(server.exercises);
    return;
  }
  if (message.trouble) {
    tell(`The engine does not answer: ${message.trouble}.`, true);
    return;
  }
  if (message.pool) latest = message.pool;
  pace = message.pace ?? pace;
  if (message.exercises) exercises.show(message.exercises);
  showPace();
  const log = get("events");
  for (const step of message.steps) {
    for (const [id] of step.slices) owners.of(id);
    const said = sentences(step, owners);
    if (said.length) log.prepend(...said.reverse());
  }
  if (message.missed > 0) log.prepend(element("li", { className: "hint", textContent: `${message.missed} steps were too fast to be told` }));
  while (log.childElementCount > MOST_EVENTS) log.lastElementChild.remove();
  lanes.add(message.steps, message.pool ?? latest);
  redraw();
}

async function order(body) {
  if (!server?.may_pause) return;
  const reply = await call("admin/pace", { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
  if (reply.ok) {
    pace = await reply.json();
    showPace();
  } else {
    tell(await errorText(reply), true);
  }
}

const speed = () => Number(get("speed").value);
const togglePause = () => order({ mode: pace.mode === "pause" ? "run" : "pause" });
const singleStep = () => order({ mode: "pause", steps: 1 });
const toggleSlow = () => order(pace.mode === "slow" ? { mode: "run" } : { mode: "slow", seconds: speed() });
get("pause").addEventListener("click", togglePause);
get("step").addEventListener("click", singleStep);
get("slow").addEventListener("click", toggleSlow);
get("speed").addEventListener("input", () => { get("speed-said").textContent = `${speed().toFixed(2)} s`; });
get("speed").addEventListener("change", () => { if (pace.mode === "slow") order({ mode: "slow", seconds: speed() }); });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, button, select, a")) return;
  const act = { " ": togglePause, ".": singleStep, s: toggleSlow }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

// ---- requests ---------------------------------------------------------------------------------------------------

const STORY = "The captain opened the letter slowly. It was from the harbour master, who wrote about the storm, the lost cargo and the"
  + " three ships that had not come back. He read it twice, folded it and went on deck, where the crew waited for his word. ";
const STORY_TOKENS = 84, ROOM = 60; // of the story here, about; tokens that an answer and a beginning take
// As long as the pool has room for, and no longer than eight stories.
function longPrompt() {
  const slots = server ? server.num_blocks * server.block_size : Infinity;
  const share = Math.min(8, Math.max(1, (slots - ROOM) / STORY_TOKENS));
  return `# ${STORY.repeat(8).slice(0, Math.floor(share * STORY.length))}`;
}

const PRESETS = [
  ["Two that begin alike", { prompt: `${STORY}Then he said: #`, count: 2, choices: 1, tokens: 60 }],
  ["Four choices", { prompt: "Once upon a time there was a", count: 1, choices: 4, tokens: 60 }],
  ["A long prompt", { prompt: longPrompt, count: 1, choices: 1, tokens: 40 }],
  ["Eight at once", { prompt: "# is my number. Tell me a story.", count: 8, choices: 1, tokens: 200 }],
];

function fill(preset) {
  for (const name of ["count", "choices", "tokens"]) get(name).value = preset[name];
  get("prompt").value = typeof preset.prompt === "function" ? preset.prompt() : preset.prompt;
}

get("presets").append(...PRESETS.map(([name, preset]) => {
  const button = element("button", { type: "button", className: "plain", textContent: name });
  button.addEventListener("click", () => { fill(preset); get("send").requestSubmit(); });
  return button;
}));
fill(PRESETS[0][1]);
get("prompt").title = "# becomes the request's number";

function apiHeaders() { // the key that the home page has asked for, where clients need one
  let key = null;
  try { key = sessionStorage.getItem("quire-api-key"); } catch { /* no storage, no key */ }
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` } : {}) };
}

let sent = 0;
async function send(prompt, choices, tokens) {
  const turn = ++sent;
  const line = element("li", {}, element("span", { className: "hint", textContent: `${turn}. waits…` }));
  get("answers").prepend(line);
  while (get("answers").childElementCount > MOST_ANSWERS) get("answers").lastElementChild.remove();
  const body = { prompt, max_tokens: tokens, n: choices, ignore_eos: true, stream: true, temperature: choices > 1 ? 1 : 0, seed: 7 };
  const reply = await fetch("v1/completions", { method: "POST", body: JSON.stringify(body), headers: apiHeaders() });
  if (!reply.ok) {
    line.remove();
    const hint = reply.status === 401 ? " Enter the key on this server's home page." : "";
    get("send-problem").textContent = `${await errorText(reply)}${hint}`;
    return;
  }
  const texts = Array(choices).fill("");
  for await (const message of events(reply)) {
    if (message.error) { get("send-problem").textContent = message.error.message; break; }
    for (const choice of message.choices) texts[choice.index] += choice.text;
    line.textContent = texts.map((text, index) => `${turn}${choices > 1 ? `.${index + 1}` : ""}. ${text}`).join("\n");
  }
}

get("send").addEventListener("submit", (event) => {
  event.preventDefault();
  get("send-problem").textContent = "";
  const [count, choices, tokens] = ["count", "choices", "tokens"].map((name) => Number(get(name).value));
  for (let one = 1; one <= count; one += 1) {
    send(get("prompt").value.replaceAll("#", String(one)), choices, tokens)
      .catch((error) => { get("send-problem").textContent = error.message; });
  }
});
get("clear").addEventListener("click", async () => {
  const reply = await call("admin/reset-prefix-cache", { method: "POST" });
  get("send-problem").textContent = reply.ok ? "" : await errorText(reply);
});
get("again").addEventListener("click", () => call("learn/exercises", { method: "DELETE" }));
addEventListener("resize", redraw);
showPace();
follow("learn/events", take, tell);

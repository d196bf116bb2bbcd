// The settings of a chat: system prompt, sampling with the model's own values shown, tools; and the choice of a model.

import { call, element, errorText } from "./session.js";

// What an empty field means where the model has no value of its own.
const FIELDS = [
  { name: "max_tokens", label: "Length limit, in tokens", step: 1, min: 1, otherwise: "none" },
  { name: "temperature", label: "Temperature", step: 0.05, min: 0, max: 2, otherwise: "1" },
  { name: "top_p", label: "Top P", step: 0.01, min: 0.01, max: 1, otherwise: "1" },
  { name: "top_k", label: "Top K", step: 1, min: 0, otherwise: "off" },
  { name: "min_p", label: "Min P", step: 0.01, min: 0, max: 1, otherwise: "0" },
  { name: "repetition_penalty", label: "Repetition penalty", step: 0.05, min: 0.05, max: 2, otherwise: "1" },
  { name: "presence_penalty", label: "Presence penalty", step: 0.1, min: -2, max: 2, otherwise: "0" },
  { name: "frequency_penalty", label: "Frequency penalty", step: 0.1, min: -2, max: 2, otherwise: "0" },
  { name: "seed", label: "Seed", step: 1, otherwise: "random" },
];
export const FIRST = { system: "", tools: "", sampling: { max_tokens: 1024 } };

// The list of tools; throws an Error in words.
export function toolsOf(text) {
  if (!text?.trim()) return null;
  let found;
  try { found = JSON.parse(text); } catch (error) { throw new Error(`Tools are no JSON: ${error.message}`); }
  if (!Array.isArray(found)) throw new Error("Tools are a list: [{\"type\": \"function\", \"function\": {…}}].");
  return found;
}

export class Settings {
  constructor(dialog, changed) {
    this.dialog = dialog;
    this.changed = changed; // gets the settings after each change
    this.settings = FIRST;
    this.system = dialog.querySelector("#system");
    this.tools = dialog.querySelector("#tools");
    this.problem = dialog.querySelector("#tools-problem");
    this.inputs = new Map(FIELDS.map(({ name, label, otherwise, ...bounds }) => {
      const input = element("input", { id: `set-${name}`, type: "number", inputMode: "decimal", ...bounds });
      const named = element("label", { htmlFor: input.id, textContent: label });
      dialog.querySelector("#sampling").append(element("div", {}, named, input));
      return [name, input];
    }));
    dialog.addEventListener("input", () => this.take());
  }

  // Names in each empty field what holds then.
  describe(defaults) {
    for (const { name, otherwise } of FIELDS) {
      const own = defaults?.[name];
      this.inputs.get(name).placeholder = own === undefined ? otherwise : `${own}, the model's own`;
    }
  }

  show(settings) {
    this.settings = { ...FIRST, ...settings };
    this.system.value = this.settings.system;
    this.tools.value = this.settings.tools;
    for (const [name, input] of this.inputs) input.value = this.settings.sampling?.[name] ?? "";
    this.problem.textContent = "";
  }

  take() {
    const sampling = {};
    for (const [name, input] of this.inputs) {
      if (input.value && input.checkValidity()) sampling[name] = input.valueAsNumber;
    }
    this.settings = { system: this.system.value, tools: this.tools.value, sampling };
    try {
      toolsOf(this.tools.value);
      this.problem.textContent = "";
    } catch (error) {
      this.problem.textContent = error.message;
    }
    this.changed(this.settings);
  }
}

const STATES = { loaded: "in memory", unloaded: "loads when asked", sleeping: "wakes when asked", restarting: "restarts" };
const LOOK_MS = 5000; // between two looks at the states of several models

// The models of the server, those in memory and those that a request would load.
export class Models {
  constructor(select, changed) {
    this.select = select;
    this.changed = changed; // gets the model that is chosen
    this.models = [];
    select.addEventListener("change", () => changed(this.chosen));
    setInterval(() => { if (this.models.length > 1 && !document.hidden) this.load().catch(() => {}); }, LOOK_MS);
  }

  get chosen() { return this.models.find((model) => model.id === this.select.value) ?? null; }

  choose(id) {
    if (this.models.some((model) => model.id === id) && this.select.value !== id) {
      this.select.value = id;
      this.changed(this.chosen);
    }
  }

  // Throws an Error with the server's own words; a status of 503 is that of a model that is still being loaded.
  async load() {
    const reply = await call("v1/models");
    if (!reply.ok) throw Object.assign(new Error(await errorText(reply)), { status: reply.status });
    const every = (await reply.json()).data;
    this.models = every.filter((model) => model.parent !== null || model.root === model.id); // one name of each
    const before = this.select.value;
    const options = this.models.map((model) => element("option", {
      value: model.id,
      textContent: this.models.length > 1 ? `${model.id} (${STATES[model.state] ?? model.state})` : model.id,
    }));
    const same = [...this.select.options].map((one) => one.textContent).join("\n");
    if (same !== options.map((one) => one.textContent).join("\n")) this.select.replaceChildren(...options);
    if (this.models.some((model) => model.id === before)) this.select.value = before;
    if (this.select.value !== before) this.changed(this.chosen);
  }
}

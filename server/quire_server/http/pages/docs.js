// The API reference: draws /openapi.json and lets each route be tried. The server's own description is all it knows.

import { askForKey, call, element } from "./session.js";

const state = document.getElementById("state");
const LONGEST_SHOWN = 200_000; // characters of a reply
const LARGEST = 2 ** 31 - 1; // bounds from here on are those of integers

document.getElementById("authorize").addEventListener("click", () => askForKey(""));

let whole = {};

function resolved(schema) {
  let found = schema ?? {};
  for (let depth = 0; found.$ref && depth < 8; depth += 1) {
    found = found.$ref.slice(2).split("/").reduce((node, part) => node?.[part], whole) ?? {};
  }
  return found;
}

const nameOf = (schema) => schema.$ref.split("/").at(-1);

// A type in a few words: "string or list of integer". Null is left out: every optional field may be null.
function typeName(schema) {
  if (!schema || schema === true) return "any";
  if (schema.$ref) return nameOf(schema);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  const branches = schema.anyOf ?? schema.oneOf;
  if (branches) {
    return [...new Set(branches.filter((branch) => branch.type !== "null").map(typeName))].join(" or ") || "null";
  }
  if (schema.type === "array") return `list of ${typeName(schema.items)}`;
  return schema.type ?? "any";
}

// The bounds that a value must keep, from wherever in the schema they are said.
function bounds(schema) {
  const said = [];
  for (const part of [schema, ...(schema.anyOf ?? [])]) {
    if (part.minimum > -LARGEST) said.push(`≥ ${part.minimum}`);
    if (part.exclusiveMinimum !== undefined) said.push(`> ${part.exclusiveMinimum}`);
    if (part.maximum < LARGEST) said.push(`≤ ${part.maximum}`);
    if (part.maxLength !== undefined) said.push(`at most ${part.maxLength} characters`);
    if (part.maxItems !== undefined) said.push(`at most ${part.maxItems} items`);
  }
  return [...new Set(said)].join(", ");
}

const given = (value) => value === undefined || value === null ? "" : `${JSON.stringify(value)} by default`;

// Names of the object schemas within a schema, so that they can be listed below it.
function nested(schema, found = []) {
  if (!schema || typeof schema !== "object") return found;
  if (schema.$ref) {
    if (!found.includes(schema.$ref)) found.push(schema.$ref);
    return found;
  }
  for (const part of [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), schema.items]) nested(part, found);
  return found;
}

function cell(content, name = "td") { return element(name, {}, ...[content].flat()); }

function table(headings, rows) {
  const head = element("thead", {}, element("tr", {}, ...headings.map((text) => {
    const made = cell(text, "th");
    made.scope = "col";
    return made;
  })));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((content) => cell(content)))));
  return element("div", { className: "scroll" }, element("table", {}, head, body));
}

const code = (text) => element("code", { textContent: text });

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const entries = Object.entries(schema.properties ?? {});
  entries.sort(([one], [other]) => required.has(other) - required.has(one)); // stable
  const rows = entries.map(([name, field]) => [
    [code(name), required.has(name) ? " required" : ""],
    typeName(field),
    [field.description, bounds(field), given(field.default)].filter(Boolean).join("; "),
  ]);
  return rows.length ? [table(["Field", "Type", "Meaning"], rows)] : [];
}

function schemaTables(schema, title) {
  const drawn = [];
  const queue = nested(schema);
  if (!queue.length) return [element("p", { className: "hint" }, code(typeName(schema)))];
  for (let index = 0; index < queue.length && index < 24; index += 1) {
    const found = resolved({ $ref: queue[index] });
    const name = queue[index].split("/").at(-1);
    const tables = fields(found);
    for (const field of Object.values(found.properties ?? {})) nested(field, queue);
    if (!tables.length) continue;
    drawn.push(index === 0 ? element("div", {}, ...tables)
      : element("details", {}, element("summary", {}, code(name)), ...tables));
  }
  return [element("h3", { textContent: title }), ...drawn];
}

// What a required field may be, to begin with.
const BEGINNINGS = {
  messages: [{ role: "user", content: "Hello!" }], prompt: "Hello!", input: "Hello!", max_tokens: 64, tokens: [1, 2, 3],
  text_1: "a cat", text_2: "a dog", input_prefix: "The capital of France", input_suffix: " Paris.", n_predict: 16,
  max_output_tokens: 64,
};
function example(schema) {
  const object = resolved(schema);
  const names = new Set(object.required ?? []);
  for (const form of [["messages"], ["prompt"], ["input"], ["text_1", "text_2"], ["model"]]) {
    if (!names.size && object.properties?.[form[0]]) form.forEach((name) => names.add(name)); // one of several forms
  }
  for (const name of ["n_predict", "max_output_tokens"]) if (object.properties?.[name]) names.add(name);
  if (names.has("max_tokens") || (object.properties?.stream && object.properties?.max_tokens)) names.add("max_tokens");
  return Object.fromEntries([...names].map((name) => [name, BEGINNINGS[name] ?? valueOf(object.properties[name])]));
}
function valueOf(schema, depth = 0) {
  const found = resolved(schema);
  if (found.default !== undefined) return found.default;
  if (found.anyOf) return valueOf(found.anyOf[0], depth);
  if (found.enum) return found.enum[0];
  if (found.type === "array") return depth > 3 ? [] : [valueOf(found.items, depth + 1)];
  if (found.type === "object") {
    return Object.fromEntries((depth > 3 ? [] : found.required ?? []).map((n) => [n, valueOf(found.properties[n], depth + 1)]));
  }
  return { string: "a", integer: 1, number: 1, boolean: false }[found.type] ?? null;
}

function trial(path, method, operation) {
  const result = element("pre", { className: "wrap", hidden: true, tabIndex: 0 });
  const status = element("p", { className: "hint" });
  status.setAttribute("role", "status");
  const form = element("form");
  const inputs = {};
  for (const parameter of (operation.parameters ?? []).filter((one) => one.in === "path" || one.in === "query")) {
    const input = element("input", { required: Boolean(parameter.required), autocomplete: "off" });
    inputs[parameter.name] = { input, where: parameter.in };
    form.append(element("label", {}, `${parameter.name} `, input));
  }
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  let body = null;
  if (schema) {
    const start = JSON.stringify(example(schema), null, 2);
    body = element("textarea", { className: "mono", spellcheck: false, rows: Math.min(start.split("\n").length + 1, 12), value: start });
    form.append(element("label", {}, "Body", body));
  }
  const button = element("button", { textContent: "Send" });
  form.append(element("div", { className: "bar" }, button));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    const started = performance.now();
    try {
      let target = path;
      const query = new URLSearchParams();
      for (const [name, { input, where }] of Object.entries(inputs)) {
        if (where === "path") target = target.replace(`{${name}}`, encodeURIComponent(input.value).replaceAll("%2F", "/"));
        else if (input.value) query.set(name, input.value);
      }
      const suffix = query.size ? `?${query}` : "";
      const options = { method: method.toUpperCase() };
      if (body) Object.assign(options, { body: body.value, headers: { "Content-Type": "application/json" } });
      status.textContent = "Waiting for the reply…";
      const reply = await call(target.replace(/^\//, "") + suffix, options);
      status.className = reply.ok ? "ok" : "problem";
      status.textContent = `${reply.status} ${reply.statusText}`;
      await show(reply, result);
      status.textContent += `, ${((performance.now() - started) / 1000).toFixed(2)} s, ${reply.headers.get("x-request-id") ?? ""}`;
    } catch (error) {
      status.className = "problem";
      status.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  });
  return element("details", {}, element("summary", { textContent: "Try it" }), form, status, result);
}

// A stream is shown as it comes, JSON is indented, anything else stays what it is.
async function show(reply, result) {
  result.hidden = false;
  result.textContent = "";
  const decoder = new TextDecoder();
  const reader = reply.body?.getReader();
  for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
    if (result.textContent.length < LONGEST_SHOWN) result.append(decoder.decode(part.value, { stream: true }));
  }
  if ((reply.headers.get("content-type") ?? "").includes("json")) {
    try { result.textContent = JSON.stringify(JSON.parse(result.textContent), null, 2); } catch { /* too long: as it came */ }
  }
}

function drawOperation(path, method, operation) {
  const summary = element("summary", {},
    element("span", { className: "method", textContent: method.toUpperCase() }), code(path),
    element("span", { className: "about", textContent: operation.description?.split("\n")[0] ?? "" }));
  const parts = element("details", { className: "operation" }, summary);
  parts.addEventListener("toggle", () => { // drawn when first opened: there are hundreds of fields
    if (parts.childElementCount > 1) return;
    const schema = operation.requestBody?.content?.["application/json"]?.schema;
    parts.append(trial(path, method, operation));
    if (schema) parts.append(...schemaTables(schema, "Body"));
    const replies = Object.entries(operation.responses ?? {}).map(([status, reply]) => [
      code(status), reply.description ?? "",
      Object.values(reply.content ?? {}).map((kind) => typeName(kind.schema)).filter((name) => name !== "object")[0] ?? "",
    ]);
    parts.append(element("h3", { textContent: "Replies" }), table(["Status", "When", "Schema"], replies));
    const good = operation.responses?.["200"]?.content?.["application/json"]?.schema;
    if (good?.$ref) parts.append(...schemaTables(good, "The reply's fields"));
  });
  return parts;
}

async function draw() {
  const reply = await call("openapi.json");
  if (!reply.ok) throw new Error(`openapi.json: ${reply.status}`);
  whole = await reply.json();
  const models = await call("v1/models"); // while the model is loaded there are none to name
  if (models.ok) BEGINNINGS.model = (await models.json()).data[0]?.id ?? BEGINNINGS.model;
  const groups = new Map();
  for (const [path, operations] of Object.entries(whole.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "other";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(drawOperation(path, method, operation));
    }
  }
  const sections = [...groups].map(([tag, operations]) =>
    element("section", {}, element("h2", { textContent: tag[0].toUpperCase() + tag.slice(1) }), ...operations));
  document.getElementById("operations").replaceChildren(...sections);
  state.textContent = `${whole.info.title} ${whole.info.version}, ${Object.keys(whole.paths).length} routes.`;
}

draw().catch((error) => { state.textContent = error.message; });

// Why an answer took so long: the engine's own account of the request, which only an operator may ask for.

import { callAsOperator, element, errorText } from "./session.js";

const PHASES = {
  transit: "on the way to the engine", queue: "in the queue", prefill: "computing the prompt", decode: "writing the answer",
  preempted: "waiting without its memory", recompute: "computing again what it had",
  held: "set aside",
};

function table(request) {
  const rows = request.spent.filter(({ seconds }) => seconds >= 0.0005).map(({ phase, reason, seconds }) => element("tr", {},
    element("th", { scope: "row", textContent: `${PHASES[phase] ?? phase}${reason ? ` (${reason})` : ""}` }),
    element("td", { className: "right", textContent: `${seconds.toFixed(3)} s` })));
  return rows.length ? [element("table", {}, element("tbody", {}, ...rows))] : [];
}

async function account(message) {
  const reply = await callAsOperator(`debug/requests/${encodeURIComponent(message.request)}?model=${encodeURIComponent(message.model ?? "")}`);
  if (reply.status === 401 || reply.status === 403) {
    return [element("p", { textContent: "Only the operator may ask: enter the admin key on the dashboard, in this tab." })];
  }
  if (!reply.ok) return [element("p", { textContent: await errorText(reply) })];
  const { requests } = await reply.json();
  return requests.flatMap((request) => [element("p", { textContent: request.why }), ...table(request)]);
}

// Shows the account below an answer, or takes it away again.
export async function explain(message, button, place) {
  const shown = place.querySelector(".slow");
  if (shown) {
    shown.remove();
    button.setAttribute("aria-expanded", "false");
    return;
  }
  const box = element("div", { className: "slow small" });
  box.setAttribute("role", "status");
  place.append(box);
  button.setAttribute("aria-expanded", "true");
  try {
    box.replaceChildren(...await account(message));
  } catch {
    box.replaceChildren(element("p", { textContent: "The server cannot be reached." }));
  }
}

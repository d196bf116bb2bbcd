// How to call this server from elsewhere, with its address, its model and whether it has keys.

import { call, errorText, hasKey } from "./session.js";

const base = new URL(".", location.href).href.replace(/\/$/, "");
const dialog = document.getElementById("shown");

for (const place of document.querySelectorAll("[data-origin]")) place.textContent = base;

export function describe(model) {
  for (const place of document.querySelectorAll("[data-model]")) place.textContent = model.id;
  if (hasKey()) {
    document.getElementById("with-key").hidden = false;
    for (const place of document.querySelectorAll("[data-key-line]")) place.hidden = false;
    for (const place of document.querySelectorAll("[data-key]")) place.textContent = "your key";
  }
}

// Links to what needs the key are shown here when there is one: the browser itself would not send it.
for (const link of document.querySelectorAll("[data-keyed]")) {
  link.addEventListener("click", async (event) => {
    if (!hasKey()) return;
    event.preventDefault();
    const reply = await call(link.getAttribute("href"));
    dialog.querySelector("pre").textContent = reply.ok ? JSON.stringify(await reply.json(), null, 2) : await errorText(reply);
    dialog.showModal();
  });
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch { // no clipboard without https: the text is selected instead
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

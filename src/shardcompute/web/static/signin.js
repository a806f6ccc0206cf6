// Where a server wants an API key, it is asked for here. It stays in this tab and is sent to this server alone.

import { key, onRefused, setKey } from "./api.js";
import { h, say } from "./dom.js";
import { retry } from "./feed.js";
import { store, subscribe } from "./store.js";

export function offerSignIn(button) {
  const input = h("input", { id: "api-key", type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "sk-…" });
  const refusal = h("p", { class: "bad small", role: "alert" });
  const form = h("form", { method: "dialog" },
    h("h2", { id: "sign-in-title" }, "Sign in"),
    h("p", { class: "muted" }, "This server wants an API key. It was printed when the cluster was started; more can be made under Connect."),
    h("div", { class: "field" }, h("label", { for: "api-key" }, "API key"), input),
    refusal,
    h("div", { class: "row end" }, h("button", { type: "submit", class: "primary" }, "Sign in")));
  const dialog = h("dialog", { "aria-labelledby": "sign-in-title" }, form);
  document.body.append(dialog);

  const ask = (message) => {
    say(refusal, key() ? message : "");
    if (!dialog.open) dialog.showModal();
    input.focus();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    input.value = "";
    dialog.close();
    retry();
  });
  button.addEventListener("click", () => {
    if (!key()) return ask("");
    setKey("");
    location.reload();
  });
  onRefused(ask);
  subscribe(() => {
    button.hidden = !key() && store.connection !== "refused";
    say(button, key() && store.connection !== "refused" ? "Sign out" : "Sign in");
  });
}

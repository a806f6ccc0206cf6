// Signing in: by a link that `up` or `shardcompute page` printed, or with an API key. The key stays in this tab and is sent to
// this server alone.

import { call, key, onRefused, setKey } from "./api.js";
import { h, say, toast } from "./dom.js";
import { retry } from "./feed.js";
import { store, subscribe } from "./store.js";

const LINK = /^#\/sign-in\/([\w-]+)$/;

/** Exchanges the code of a link for a key of this tab. The link is good once, so it is not kept in the history. */
export async function signInByLink() {
  const code = LINK.exec(location.hash)?.[1];
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  try {
    setKey((await call("POST", "/session", { code })).key);
  } catch (error) {
    toast(error.message);
  }
}

export function offerSignIn(button) {
  const input = h("input", { id: "api-key", type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "sk-…" });
  const refusal = h("p", { class: "bad small", role: "alert" });
  const form = h("form", { method: "dialog" },
    h("h2", { id: "sign-in-title" }, "Sign in"),
    h("p", { class: "muted" }, "The command shardcompute page, on the machine that runs the cluster, prints a link that signs you in. Or give an API key: one of role operate may do everything, one of role observe see it, one of role use chat."),
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
    call("DELETE", "/session").catch(() => {}).finally(() => {
      setKey("");
      location.reload();
    });
  });
  onRefused((message) => {
    ask(message);
    // A sign-in that is over is not kept: where no key is needed, there is a chat without.
    if (key().startsWith("sk-page-")) setKey("");
  });
  addEventListener("hashchange", async () => {
    if (!LINK.test(location.hash)) return;
    await signInByLink();
    if (dialog.open) dialog.close();
    retry();
  });
  subscribe(() => {
    button.hidden = !key() && !["refused", "forbidden"].includes(store.connection);
    say(button, key() && store.connection !== "refused" ? "Sign out" : "Sign in");
  });
}

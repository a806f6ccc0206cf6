// Ready-made beginnings for clients, with this server's address and a served model, and the keys that they need.

import { call, key } from "../api.js";
import { confirm, copyable, h, keyed, pill, say, toast } from "../dom.js";
import { clock } from "../format.js";
import { refreshServed } from "../feed.js";
import { store } from "../store.js";
import { CLIENTS } from "./snippets.js";
import { chips } from "./usage.js";

const ROLES = [["use", "use models"], ["observe", "see the cluster"], ["operate", "do everything"]];

export function createConnect() {
  const model = h("select", { id: "connect-model", onchange: draw });
  const place = h("div");
  const note = h("p", { class: "muted small" });
  const tabs = h("div");
  const keys = createKeys();
  const element = h("div", { class: "stack" },
    h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: -1 }, "Connect"), h("p", {}, "Any OpenAI client works: give it this address, and a model that is served here."))),
    h("section", { class: "card", "aria-labelledby": "snippet-title" },
      h("header", {}, h("h2", { id: "snippet-title" }, "Client"), h("div", { class: "row" }, h("label", { for: "connect-model" }, "Model"), model)),
      h("div", { class: "stack" }, tabs, place, note)),
    keys.element);
  let choice = null, offered = "", needsKey = Boolean(key());

  async function learnRoutes() {
    let paths = null;
    try {
      const described = await call("GET", "/openapi.json");
      paths = Object.keys(described.paths);
      needsKey = Boolean(described.security);
    } catch {
      return;
    }
    const clients = CLIENTS.filter((client) => paths.includes(client.needs));
    const now = clients.map((client) => client.id).join();
    if (now === offered) return;
    offered = now;
    choice = chips("Client", clients.map((client) => [client.id, client.name]), draw);
    tabs.replaceChildren(choice.element);
    draw();
  }

  function draw() {
    const client = CLIENTS.find((each) => each.id === choice?.value());
    if (!client) return;
    const hasKey = needsKey;
    const text = client.write({ origin: location.origin, model: model.value || "default", hasKey, key: hasKey ? "YOUR_API_KEY" : "none" });
    const shown = place.querySelector("pre");
    if (shown) say(shown, text);
    else place.replaceChildren(copyable(text, "snippet"));
    say(note, hasKey ? "This server wants a key: put yours where the snippet says so." : "This server asks for no key. Clients that insist on one take any text.");
  }

  function update() {
    const names = store.served.length ? store.served : ["default"];
    const before = model.value;
    keyed(model, names, (name) => name, (name) => h("option", { value: name }, name));
    if (model.value !== before) draw();
    keys.element.hidden = store.connection === "alone";
    if (!choice && (store.connection === "live" || store.connection === "alone")) learnRoutes();
  }
  return { element, update, show() { refreshServed(); learnRoutes(); keys.refresh(); draw(); } };
}

function createKeys() {
  const label = h("input", { id: "key-label", maxlength: 80, placeholder: "what it is for", autocomplete: "off" });
  const role = h("select", { id: "key-role" }, ROLES.map(([value, text]) => h("option", { value }, text)));
  const made = h("div", { class: "stack" });
  const list = h("ul", { class: "models" });
  const form = h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); make(); } },
    h("div", { class: "field grow" }, h("label", { for: "key-label" }, "New key"), label), h("div", { class: "field" }, h("label", { for: "key-role" }, "May"), role), h("div", { class: "field push" }, h("button", { type: "submit" }, "Make a key")));
  const element = h("section", { class: "card join", "aria-labelledby": "keys-title" }, h("header", {}, h("h2", { id: "keys-title" }, "API keys")), h("div", { class: "stack" }, form, made, list));

  async function refresh() {
    if (store.connection === "alone") return;
    try {
      const { data } = await call("GET", "/cluster/keys");
      keyed(list, data.filter((each) => !each.is_revoked), (each) => each.id, makeRow);
    } catch (error) {
      if (error.status !== 401 && error.status !== 404) toast(error.message);
    }
  }

  async function make() {
    try {
      const fresh = await call("POST", "/cluster/keys", { label: label.value.trim(), role: role.value });
      label.value = "";
      made.replaceChildren(copyable(fresh.key, "API key"), h("p", { class: "muted small" }, "Copy it now: it is not shown again."));
      refresh();
    } catch (error) {
      toast(error.message);
    }
  }

  function makeRow(each) {
    const revoke = h("button", { type: "button", class: "danger", "aria-label": `Revoke ${each.label || each.id}`, onclick: async () => {
      if (!(await confirm(`Revoke ${each.label || each.id}?`, "Whoever uses it is refused from now on.", "Revoke"))) return;
      await call("DELETE", `/cluster/keys/${encodeURIComponent(each.id)}`).catch((error) => toast(error.message));
      refresh();
    } }, "Revoke");
    return h("li", { class: "model" }, h("header", {}, h("h3", {}, each.label || "unnamed"), pill(each.id), pill(each.role), h("span", { class: "muted small" }, `made ${new Date(each.created_at_s * 1000).toLocaleDateString()} ${clock(each.created_at_s, false)}`), h("div", { class: "row" }, revoke)));
  }
  return { element, refresh };
}

// The ledger: what every machine has contributed, as the coordinator has signed it. Hidden from who may not see it.

import { call } from "../api.js";
import { h, say } from "../dom.js";
import { bytes, clock, day, plural } from "../format.js";
import { store } from "../store.js";

const LOOK_MS = 60_000;
const HEADINGS = ["Machine", "Uptime", "Tokens", "× layers", "Not credited", "Audits", "Stored"];

export function createLedger() {
  const body = h("tbody"), note = h("p", { class: "muted small" }), doubts = h("ul", { class: "warnings", "aria-label": "Doubts about the ledger" });
  const element = h("section", { class: "card", "aria-labelledby": "ledger-title", hidden: true },
    h("header", {}, h("h2", { id: "ledger-title" }, "Ledger")), doubts,
    h("div", { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "Contributions" },
      h("table", {}, h("thead", {}, h("tr", {}, HEADINGS.map((text, index) => h("th", { scope: "col", class: index ? "right" : "" }, text)))), body)), note);
  let askedMs = -LOOK_MS;

  /** Called with every change of the cluster: looks again once in a while. */
  async function update() {
    const nowMs = performance.now();
    if (store.connection !== "live" || document.hidden || nowMs - askedMs < LOOK_MS) return;
    askedMs = nowMs;
    const ledger = await call("GET", "/cluster/ledger").catch(() => null);
    element.hidden = !ledger?.log && !ledger?.problem;
    if (ledger) refresh(ledger);
  }

  function refresh(ledger) {
    const troubles = [...(ledger.problem ? [`Nothing is added at present: ${ledger.problem}`] : []),
      ...Object.entries(ledger.doubts).map(([node, reason]) => `${node} doubts it: ${reason}`)];
    doubts.hidden = !troubles.length;
    doubts.replaceChildren(...troubles.map((text) => h("li", {}, text)));
    body.replaceChildren(...ledger.machines.map((each) => h("tr", {}, h("td", { title: each.node }, each.name || each.node),
      ...cells(each).map((text) => h("td", { class: "right number" }, text)))));
    say(note, ledger.log ? `${plural(ledger.size, "line")} and ${plural(ledger.receipts, "receipt")}, signed ${day(ledger.signed_s)}, ${clock(ledger.signed_s)} · root ${ledger.root.slice(0, 16)}…` : "");
  }
  return { element, update };
}

function cells(each) {
  const audits = each.audits_against ? `${each.audits_passed}, ${each.audits_against} against` : String(each.audits_passed);
  return [hours(each.uptime_s), each.tokens.toLocaleString("en"), each.token_layers.toLocaleString("en"), each.uncredited_token_layers.toLocaleString("en"), audits, bytes(each.stored_bytes)];
}

function hours(seconds) {
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

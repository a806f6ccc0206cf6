// Generations that run and the last thousand that ended, or those of the history, as waterfalls. Only the rows in sight
// are in the document.

import { call } from "../api.js";
import { h, keyed, mark, pill, say, toast } from "../dom.js";
import { clock, day, rate, seconds } from "../format.js";
import { store } from "../store.js";
import { createHistory } from "./history.js";
import { drawRequest, partsOf } from "./waterfall.js";

const MOST = 1000, PAGE = 500, LOOK_MS = 1000, SPARE_ROWS = 6;
const TONES = { done: "good", decode: "accent", prefill: "accent", waiting: "warn", failed: "bad", cancelled: "" };

export function createRequests() {
  const rows = h("div", { role: "rowgroup" });
  const scroll = h("div", { class: "virtual", tabindex: 0, role: "table", "aria-label": "Requests, newest first" }, rows);
  const head = h("div", { class: "request-head", "aria-hidden": "true" }, ["When", "Model", "State", "Time", "Speed"].map((text) => h("span", {}, text)));
  const empty = h("p", { class: "empty" }, h("strong", {}, "No request yet"), "Ask something under Chat, or with any client from Connect.");
  const count = h("p", {});
  const aside = h("aside", { class: "card", "aria-label": "One request", hidden: true });
  const key = h("span", { class: "key", "aria-hidden": "true" }, ["queue", "prefill", "decode", "rescue"].map((part) => h("span", {}, h("i", { class: `dot of-${part}` }), part)));
  const past = createHistory("requests", PAGE, schedule, (problem) => { if (problem) toast(problem); });
  const frame = h("div", { class: "requests" }, h("section", { class: "card", "aria-label": "List of requests" }, empty, head, scroll, past.older), aside);
  const element = h("div", {}, h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: -1 }, "Requests"), count), h("div", { class: "row" }, key, past.range)), frame);
  let live = [], ended = [], seen = 0, chosen = null, timer = null, isDue = false;

  scroll.addEventListener("scroll", schedule, { passive: true });
  addEventListener("resize", schedule);

  function schedule() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; draw(); });
  }

  async function look() {
    clearTimeout(timer);
    try {
      if (store.connection === "live" && !document.hidden) {
        const answer = await call("GET", `/cluster/requests?after=${seen}`);
        // A server that was started again counts anew.
        if (answer.ended < seen) ended = [];
        live = answer.data.filter((request) => ["waiting", "prefill", "decode"].includes(request.state));
        const over = answer.data.filter((request) => !["waiting", "prefill", "decode"].includes(request.state));
        const known = new Set(over.map((request) => request.id));
        ended = [...over, ...ended.filter((request) => !known.has(request.id))].slice(0, MOST);
        const isAgain = answer.ended < seen;
        seen = isAgain ? 0 : answer.ended;
        schedule();
      }
    } catch {
      // The next look will tell; the frame of the page says that the connection is lost.
    }
    if (timer !== null) timer = setTimeout(look, LOOK_MS);
  }

  function draw() {
    const isLate = past.isLate(), kept = past.entries();
    const all = isLate ? [...live, ...ended] : kept;
    const rowHeight = matchMedia("(max-width: 46rem)").matches ? 60 : 44;
    empty.hidden = all.length > 0;
    head.hidden = scroll.hidden = all.length === 0;
    const told = isLate ? `${live.length} running, the last ${ended.length} that ended` : `${kept.length}${past.hasMore() ? " and more" : ""} that ended`;
    say(count, all.length ? told : "Every generation with where its time went.");
    mark(scroll, "aria-rowcount", all.length);
    rows.style.height = `${all.length * rowHeight}px`;
    const from = Math.max(0, Math.floor(scroll.scrollTop / rowHeight) - SPARE_ROWS);
    const to = Math.min(all.length, Math.ceil((scroll.scrollTop + scroll.clientHeight) / rowHeight) + SPARE_ROWS);
    const shown = all.slice(from, to).map((request, index) => ({ request, index: from + index }));
    const longest = Math.max(0.001, ...shown.map(({ request }) => request.elapsed_s));
    keyed(rows, shown, ({ request }) => request.id, ({ request }) => makeRow(request.id), (row, { request, index }) => row.refresh(request, index, rowHeight, longest));
    const detail = all.find((request) => request.id === chosen);
    if (chosen && !detail) open(null);
    if (detail) drawRequest(aside, detail, () => open(null));
  }

  function open(id) {
    const former = chosen;
    chosen = id;
    aside.hidden = id === null;
    frame.classList.toggle("is-open", id !== null);
    schedule();
    if (id === null && former) rows.keyed?.get(former)?.querySelector("button").focus();
  }

  function makeRow(id) {
    const when = h("button", { type: "button", class: "plain number" });
    const model = h("span", { class: "cut", role: "cell" }), state = pill(""), fall = h("div", { class: "fall" });
    const speed = h("span", { class: "muted number small cut request-speed", role: "cell" });
    const row = h("div", { class: "request", role: "row", onclick: () => open(id) }, h("span", { role: "cell" }, when), model, h("span", { role: "cell" }, state), h("div", { class: "fall-cell", role: "cell" }, fall), speed);
    row.refresh = (now, index, height, longest) => {
      row.style.top = `${index * height}px`;
      mark(row, "aria-rowindex", index + 1);
      row.classList.toggle("is-chosen", id === chosen);
      say(when, past.isLate() ? clock(now.started_at_s) : `${day(now.started_at_s)} ${clock(now.started_at_s, false)}`);
      mark(when, "aria-label", `Request ${now.id.slice(0, 8)} at ${clock(now.started_at_s)}: details`);
      say(model, now.model);
      say(state, now.state === "done" && now.finish === "length" ? "cut off" : now.state);
      mark(state, "data-tone", TONES[now.state] ?? "");
      const parts = partsOf(now);
      mark(fall, "aria-label", parts.map((part) => `${part.name} ${seconds(part.s)}`).join(", "));
      mark(fall, "role", "img");
      fall.style.width = `${Math.max(1, (now.elapsed_s / longest) * 100)}%`;
      keyed(fall, parts, (part) => part.name, (part) => h("i", { class: `of-${part.kind}` }), (bar, part) => (bar.style.flexGrow = String(Math.max(part.s, 0.0001))));
      say(speed, now.tokens_per_s ? rate(now.tokens_per_s) : seconds(now.elapsed_s));
    };
    return row;
  }

  return {
    element,
    show() { timer = 0; look(); },
    hide() { clearTimeout(timer); timer = null; },
  };
}

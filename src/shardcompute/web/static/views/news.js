// What happened in the cluster, newest first, as the server tells it: lately, or as far back as it has kept.

import { call } from "../api.js";
import { h, keyed, say } from "../dom.js";
import { clock, day } from "../format.js";
import { store } from "../store.js";
import { chips } from "./usage.js";

const RANGES = [["lately", "Lately"], ["86400", "Day"], ["604800", "Week"], ["all", "All"]];
const SHOWN = 40, PAGE = 100;

export function createNews() {
  const range = chips("Time", RANGES, () => begin());
  const list = h("ol", { class: "news", "aria-label": "What happened, newest first", tabindex: 0 });
  const quiet = h("p", { class: "empty" });
  const older = h("button", { type: "button", hidden: true, onclick: () => fetchOlder() }, "Older");
  const element = h("section", { class: "card news-card", "aria-labelledby": "news-title" },
    h("header", {}, h("h2", { id: "news-title" }, "What happened"), range.element), quiet, list, older);
  let kept = [], next = null, asked = 0;

  async function begin() {
    kept = [];
    next = null;
    asked += 1;
    update();
    if (range.value() !== "lately") await fetchOlder();
  }

  async function fetchOlder() {
    const mine = asked, wanted = range.value();
    const since = wanted === "all" ? 0 : Math.floor(Date.now() / 1000 - Number(wanted));
    older.disabled = true;
    try {
      const page = await call("GET", `/cluster/history/events?since=${since}&limit=${PAGE}${next === null ? "" : `&before=${next}`}`);
      if (mine !== asked) return;
      kept = [...kept, ...page.data];
      next = page.next;
      say(quiet, page.problem || "Nothing happened in this time.");
    } catch (error) {
      if (mine === asked) say(quiet, error.message);
    } finally {
      older.disabled = false;
    }
    update();
  }

  function update() {
    const isLate = range.value() === "lately";
    const lines = isLate ? [...(store.cluster?.events ?? [])].reverse().slice(0, SHOWN) : kept;
    if (isLate) say(quiet, "Nothing has happened lately.");
    quiet.hidden = lines.length > 0;
    list.hidden = !quiet.hidden;
    older.hidden = isLate || next === null;
    keyed(list, lines, (line) => line.number, (line) =>
      h("li", { "data-tone": line.tone }, h("time", { datetime: new Date(line.at_s * 1000).toISOString() }, isLate ? clock(line.at_s) : `${day(line.at_s)} ${clock(line.at_s, false)}`), h("span", {}, line.text)));
  }
  return { element, update };
}

// What happened in the cluster, newest first, as the server tells it: lately, or as far back as it has kept.

import { h, keyed, say } from "../dom.js";
import { clock, day } from "../format.js";
import { store } from "../store.js";
import { createHistory } from "./history.js";

const SHOWN = 40, PAGE = 100;

export function createNews() {
  const past = createHistory("events", PAGE, () => update(), (problem) => say(quiet, problem || "Nothing happened in this time."));
  const list = h("ol", { class: "news", "aria-label": "What happened, newest first", tabindex: 0 });
  const quiet = h("p", { class: "empty" });
  const element = h("section", { class: "card news-card", "aria-labelledby": "news-title" },
    h("header", {}, h("h2", { id: "news-title" }, "What happened"), past.range), quiet, list, past.older);

  function update() {
    const isLate = past.isLate();
    const lines = isLate ? [...(store.cluster?.events ?? [])].reverse().slice(0, SHOWN) : past.entries();
    if (isLate) say(quiet, "Nothing has happened lately.");
    quiet.hidden = lines.length > 0;
    list.hidden = !quiet.hidden;
    keyed(list, lines, (line) => line.number, (line) =>
      h("li", { "data-tone": line.tone }, h("time", { datetime: new Date(line.at_s * 1000).toISOString() }, isLate ? clock(line.at_s) : `${day(line.at_s)} ${clock(line.at_s, false)}`), h("span", {}, line.text)));
  }
  return { element, update };
}

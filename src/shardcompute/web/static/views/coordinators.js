// Coordinators that share a store: who leads, who waits to, since when. Nothing where there is one alone.

import { h, keyed, mark, pill, say } from "../dom.js";
import { clock, day } from "../format.js";

const TONES = { leads: "good", waits: "accent", away: "bad" };

export function createCoordinators() {
  const list = h("ul", { class: "coordinators" });
  const element = h("section", { class: "card", "aria-labelledby": "coordinators-title", hidden: true },
    h("header", {}, h("h2", { id: "coordinators-title" }, "Coordinators")), list);

  function update(view) {
    const all = view.coordinators ?? [];
    element.hidden = !all.length;
    keyed(list, all, (each) => each.node, makeRow, (row, each) => row.refresh(each));
  }
  return { element, update };
}

function makeRow() {
  const name = h("span", { class: "cut" }), state = pill(""), since = h("span", { class: "muted small number" });
  const row = h("li", {}, name, state, since);
  row.refresh = (each) => {
    say(name, each.api_url || each.node);
    mark(name, "title", each.node);
    say(state, each.status);
    mark(state, "data-tone", TONES[each.status]);
    say(since, each.since_s ? `since ${day(each.since_s)}, ${clock(each.since_s)}` : "");
  };
  return row;
}

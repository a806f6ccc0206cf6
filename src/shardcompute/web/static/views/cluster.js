// The cluster at a glance: how busy, which machine holds which layers, where they are, what happened.

import { h, keyed, mark, say } from "../dom.js";
import { bytes, percent, plural, rate } from "../format.js";
import { isLive, store } from "../store.js";
import { createChains } from "./chains.js";
import { createCoordinators } from "./coordinators.js";
import { createFinetuning } from "./finetuning.js";
import { createJoin } from "./join.js";
import { createLedger } from "./ledger.js";
import { createMachines } from "./machines.js";
import { createMap } from "./map.js";
import { createNews } from "./news.js";
import { createSparkline } from "./sparkline.js";

export function createCluster() {
  const stats = createStats();
  const chains = createChains();
  const machines = createMachines();
  const map = createMap((id) => machines.open(id));
  const join = createJoin();
  const news = createNews();
  const coordinators = createCoordinators();
  const ledger = createLedger();
  const finetuning = createFinetuning();
  const warnings = h("ul", { class: "warnings", "aria-label": "Warnings" });
  const subtitle = h("p");
  const element = h("div", { class: "stack" },
    h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: -1 }, "Cluster"), subtitle)),
    warnings,
    stats.element,
    chains.element,
    h("div", { class: "map-and-news" },
      h("section", { class: "card map-card", "aria-labelledby": "map-title" }, h("header", {}, h("h2", { id: "map-title" }, "Map"), map.legend), map.element),
      h("div", { class: "stack" },
        news.element,
        join.element)),
    finetuning.element,
    machines.element,
    ledger.element,
    coordinators.element);

  function update() {
    const view = store.cluster;
    say(subtitle, view ? describe(view) : "Waiting for the cluster…");
    if (!view) return;
    stats.update(view);
    chains.update(view);
    map.update(view);
    machines.update(view);
    coordinators.update(view);
    ledger.update();
    join.update(view);
    news.update();
    finetuning.update();
    warnings.hidden = !view.warnings?.length;
    keyed(warnings, view.warnings ?? [], (text) => text, (text) => h("li", {}, text));
  }
  return { element, update };
}

function describe(view) {
  const live = view.nodes.filter(isLive).length;
  const serving = view.models.filter((model) => model.status === "serving").length;
  if (!live) return "No machine has joined yet. Make a join line below and paste it on one.";
  return `${plural(live, "machine")} ${live === 1 ? "serves" : "serve"} ${serving ? plural(serving, "model") : "no model yet"} · version ${view.version}`;
}

function createStats() {
  const spark = createSparkline("Tokens a second during the last two minutes");
  const tiles = ["Speed now", "Answering", "Held weights", "KV used"].map((label) => {
    const value = h("dd", { class: "value number" });
    const note = h("dd", { class: "muted small" });
    return { value, note, element: h("div", { class: "tile" }, h("dt", {}, label), value, note) };
  });
  tiles[0].element.append(h("dd", {}, spark.element));
  const split = createSplit();
  tiles[2].element.append(h("dd", {}, split.element));
  const element = h("dl", { class: "card tiles" }, tiles.map((tile) => tile.element));

  function update(view) {
    const live = view.nodes.filter(isLive);
    const room = live.reduce((sum, node) => sum + node.memory_bytes, 0);
    const used = live.reduce((sum, node) => sum + node.used_bytes, 0);
    const weights = live.reduce((sum, node) => sum + node.parts.held_weights_bytes, 0);
    const kv = live.reduce((sum, node) => sum + node.parts.kv_reserved_bytes, 0);
    const other = Math.max(0, used - weights - kv);
    say(tiles[0].value, rate(view.load.tokens_per_s));
    spark.update(store.samples);
    say(tiles[1].value, String(view.load.running));
    say(tiles[1].note, view.load.waiting ? `${view.load.waiting} waiting` : "nobody waits");
    say(tiles[2].value, bytes(weights));
    say(tiles[2].note, `${bytes(kv)} KV reserved, ${bytes(other)} scratch and processes, ${bytes(Math.max(0, room - used))} free of ${bytes(room)}`);
    split.update(room ? [weights / room, kv / room] : [0, 0], `Of ${bytes(room)} on ${plural(live.length, "machine")}: held weights ${bytes(weights)}, KV reserved ${bytes(kv)}`);
    say(tiles[3].value, percent(view.load.kv_used_fraction));
    say(tiles[3].note, `of the ${bytes(kv)} KV reserved`);
    mark(tiles[3].value, "data-tone", view.load.kv_used_fraction > 0.9 ? "warn" : null);
  }
  return { element, update };
}

/** What fills the machines' memory: weights, then room for conversations. */
function createSplit() {
  const parts = ["is-weights", "is-kv"].map((kind) => h("i", { class: kind }));
  const element = h("div", { class: "split", role: "img" }, parts);
  return { element, update(fractions, label) {
    mark(element, "aria-label", label);
    parts.forEach((part, index) => (part.style.width = `${Math.min(100, fractions[index] * 100)}%`));
  } };
}

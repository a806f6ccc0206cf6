// For each chain the row of its layers by machine, how far they are loaded, and what holds it back.

import { h, keyed, mark, pill, say } from "../dom.js";
import { bytes, layers, memoryParts, percent, rate, seconds, sentence } from "../format.js";
import { nickname } from "../names.js";
import { hueOf, nameOf, store } from "../store.js";

const TONES = { ready: "good", loading: "accent", planned: "accent", moving: "accent", recovering: "warn", broken: "bad" };
const WORDS = { ready: "serving", loading: "loading", planned: "planned", moving: "moving", recovering: "being repaired", broken: "broken" };

export function createChains() {
  const list = h("div", { class: "stack" });
  const empty = h("div", { class: "card empty" }, h("strong", {}, "No model is placed yet"), "Load one under Models; its layers will appear here, machine by machine.");
  const element = h("section", { "aria-label": "Chains" }, empty, list);

  function update(view) {
    empty.hidden = view.chains.length > 0;
    keyed(list, view.chains, (chain) => chain.id, makeChain, (card, chain) => card.refresh(chain, view));
  }
  return { element, update };
}

function makeChain(chain) {
  const state = pill("");
  const id = h("span", { class: "muted small" }, `chain ${chain.id.slice(chain.id.lastIndexOf("#") + 1)}`);
  const speed = h("span", { class: "muted small number" });
  const row = h("ol", { class: "layers", "aria-label": `Layers of ${chain.model} by machine` });
  const standbys = h("ol", { class: "layers standbys", "aria-label": "Machines that stand by" });
  const words = h("p", { class: "small bottleneck" });
  const moves = makeMoves();
  const card = h("article", { class: "card chain", "data-chain": chain.id },
    h("header", {}, h("div", { class: "row" }, h("h2", { class: "cut" }, chain.model), state, id), speed),
    row, standbys, words, moves);

  card.refresh = (now, view) => {
    say(state, WORDS[now.status] ?? now.status);
    id.hidden = view.chains.filter((each) => each.model === now.model).length < 2;
    row.classList.toggle("is-many", now.stages.length > 8);
    mark(state, "data-tone", TONES[now.status] ?? "");
    const count = view.models.find((model) => model.name === now.model)?.layer_count ?? Math.max(1, ...now.stages.map((stage) => stage.stop));
    say(speed, now.predicted_tokens_per_s_one_stream
      ? `expected ${rate(now.predicted_tokens_per_s_one_stream)} for one, ${rate(now.predicted_tokens_per_s_many)} for many` : "");
    keyed(row, now.stages, (stage) => `${stage.node} ${stage.start}`, makeStage, (item, stage) => item.refresh(stage, count));
    standbys.hidden = now.standbys.length === 0;
    keyed(standbys, now.standbys, (stage) => `${stage.node} ${stage.start}`, makeStage, (item, stage) => item.refresh(stage, count, true));
    const reason = now.status === "ready" ? now.bottleneck : now.reason || now.bottleneck;
    const short = now.missing_bytes ? ` ${bytes(now.missing_bytes)} are missing.` : "";
    const cost = (now.cost_told ?? []).map((line) => ` ${sentence(line)}`).join("");
    say(words, reason ? `${sentence(reason)}${short}${cost}${driversOf(now)}${draftersOf(now)}` : short.trim());
    words.hidden = !words.textContent;
    moves.refresh(now.moves ?? []);
  };
  return card;
}

/** How the chain has moved, newest first: why, what was expected, and what came of it. */
function makeMoves() {
  const title = h("summary", {});
  const list = h("ol", { class: "moves small", "aria-label": "Moves" });
  const box = h("details", {}, title, list);
  box.refresh = (moves) => {
    box.hidden = moves.length === 0;
    say(title, moves.length === 1 ? "1 move of late" : `${moves.length} moves of late`);
    keyed(list, moves, (move) => String(move.number), () => {
      const item = h("li", {}, h("p"), h("p", { class: "muted" }), h("p", { class: "muted" }));
      return item;
    }, (item, move) => {
      const [why, expected, outcome] = item.children;
      say(why, sentence(move.reason));
      say(expected, move.expected_before_s && move.expected_after_s
        ? `Expected: a step takes ${seconds(move.expected_after_s)} instead of ${seconds(move.expected_before_s)}.` : "");
      expected.hidden = !expected.textContent;
      say(outcome, move.outcome ? `What came of it: ${move.outcome}.` : "What came of it is not known yet.");
    });
  };
  return box;
}

/** Who sends the chain its work, where that is not the coordinator alone. */
function driversOf(chain) {
  if (!chain.drivers?.some((each) => each.node !== store.cluster.driver && each.node !== chain.driver_host)) {
    return chain.driver_host ? ` ${sentence(chain.driver_host_reason)}` : "";
  }
  const named = chain.drivers.map((each) => `${nameOf(each.node)}${each.round_trip_s === null ? "" : ` (${seconds(each.round_trip_s)} around)`}`);
  return ` Driven from ${named.join(", ")}.`;
}

/** What guesses tokens for the chain: those that were of use, and one that was meant to and is not at work. */
function draftersOf(chain) {
  const told = (chain.drafters ?? []).filter((each) => each.state !== "at work" || each.rounds_share !== null);
  return told.length ? ` Drafts: ${told.map((each) => each.text).join("; ")}.` : "";
}

function makeStage() {
  const name = h("b", { class: "cut" });
  const range = h("span", { class: "cut" });
  const time = h("span", { class: "cut muted" });
  const fill = h("i", { "aria-hidden": "true" });
  const ranks = h("ol", { class: "ranks", "aria-label": "Machines that compute each of these layers together" });
  const item = h("li", {}, fill, name, range, time, ranks);
  item.refresh = (stage, count, isStandby = false) => {
    item.className = `${hueOf(stage.node)}${stage.fraction < 1 ? " is-loading" : ""}`;
    item.style.flexGrow = String(stage.stop - stage.start);
    if (isStandby) {
      item.style.left = `${(stage.start / count) * 100}%`;
      item.style.width = `${((stage.stop - stage.start) / count) * 100}%`;
    }
    fill.style.transform = `scaleX(${stage.fraction})`;
    const members = stage.ranks?.length ? stage.ranks.map((rank) => rank.node) : [stage.node];
    ranks.hidden = members.length < 2;
    keyed(ranks, ranks.hidden ? [] : stage.ranks, (rank) => rank.node, () => h("li"), (line, rank) => {
      mark(line, "class", `cut ${hueOf(rank.node)}`);
      say(line, `rank ${members.indexOf(rank.node)}: ${nickname(nameOf(rank.node))}, weight ${rank.weight}`);
    });
    const named = members.map((node) => nickname(nameOf(node))).join(" + ");
    say(name, isStandby ? `${named} stands by` : named);
    say(range, layers(stage.start, stage.stop));
    const gone = store.cluster.nodes.find((node) => node.id === stage.node)?.status;
    item.classList.toggle("is-lost", gone === "lost" || gone === "gone");
    say(time, stage.fraction < 1 ? `${percent(stage.fraction)} loaded` : stage.timing ? `${seconds(stage.timing.compute_s)} / step` : stage.predicted_s ? `about ${seconds(stage.predicted_s)}` : "");
    const shared = members.length > 1 && stage.timing?.exchange_s ? `, ${seconds(stage.timing.exchange_s)} of a step exchanging${stage.timing.slowest ? `, mostly for ${nameOf(stage.timing.slowest)}` : ""}` : "";
    item.title = `${members.map(nameOf).join(" + ")}: ${layers(stage.start, stage.stop)}, ${memoryParts(stage.parts)}${shared}`;
  };
  return item;
}

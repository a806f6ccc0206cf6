// Every machine in a row: what it is, what it holds, what it is doing; opened, also its links and what can be done to it.

import { call } from "../api.js";
import { confirm, h, keyed, mark, meter, pill, say, setMeter, toast } from "../dom.js";
import { bytes, clock, day, layers, linkSpeed, memoryParts, percent, plural, rate, seconds } from "../format.js";
import { hueOf, isLive, nameOf } from "../store.js";

const TONES = { ready: "good", joining: "accent", suspected: "warn", draining: "warn", resting: "warn", quarantined: "bad", lost: "bad", gone: "" };
const MOST_LINKS = 12;
const FORGOTTEN = 8; // Of those that are no more, only the first few are listed.

export function createMachines() {
  const list = h("ul", { class: "machines" });
  const title = h("h2", { id: "machines-title" }, "Machines");
  const empty = h("p", { class: "empty" }, h("strong", {}, "No machine yet"), "Workers appear here as they join.");
  const element = h("section", { class: "card", "aria-labelledby": "machines-title" }, h("header", {}, title), empty, list);
  let newest = null;

  function update(view) {
    newest = view;
    const live = view.nodes.filter(isLive), dead = view.nodes.filter((node) => !isLive(node));
    const names = new Set(live.map((node) => node.name));
    // A machine that came back under a new identity is not listed twice for ever.
    const shown = [...live, ...dead.filter((node) => node.status === "lost" || !names.has(node.name)).slice(0, FORGOTTEN)];
    shown.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
    empty.hidden = shown.length > 0;
    keyed(list, shown, (node) => node.id, makeRow, (row, node) => row.refresh(node, view));
  }

  function open(id) {
    const row = list.keyed?.get(id);
    if (!row || !newest) return;
    row.toggle(true);
    row.scrollIntoView({ block: "center" });
    row.querySelector("button").focus();
  }
  return { element, update, open };
}

function makeRow(node) {
  let isOpen = false, latest = null;
  const detailId = `machine-${node.id}`;
  const name = h("button", { type: "button", class: "plain", "aria-expanded": "false", "aria-controls": detailId, onclick: () => toggle(!isOpen) }, node.name);
  const state = pill("");
  const device = h("span", { class: "muted small cut" });
  const memory = meter(`Memory of ${node.name}`), memoryText = h("span", { class: "muted small number" });
  const trouble = h("p", { class: "warn small", hidden: true });
  const doing = h("span", { class: "small cut" });
  const progress = meter(`Loading on ${node.name}`);
  const details = h("div", { class: "machine-details", id: detailId, hidden: true });
  const row = h("li", { "data-node": node.id },
    h("div", { class: "machine" },
      h("div", { class: "machine-name" }, h("span", { class: `dot ${hueOf(node.id)}`, "aria-hidden": "true" }), name, state),
      device,
      h("div", { class: "machine-memory" }, memory, memoryText),
      h("div", { class: "machine-doing" }, doing, progress)),
    trouble, details);

  function toggle(wanted) {
    isOpen = wanted;
    details.hidden = !isOpen;
    name.setAttribute("aria-expanded", String(isOpen));
    if (isOpen && latest) refreshDetails(details, ...latest);
  }
  row.toggle = toggle;
  row.refresh = (now, view) => {
    latest = [now, view];
    say(name, now.name);
    mark(name, "title", now.name);
    say(state, now.rest_reason && isLive(now) ? "resting" : now.is_draining && isLive(now) ? "being emptied" : now.status);
    mark(state, "title", now.status_reason);
    mark(state, "data-tone", TONES[now.status] ?? "");
    row.classList.toggle("is-away", !isLive(now));
    say(device, `${deviceOf(now)}${now.role === "worker" ? "" : ` · ${now.role}`}`);
    mark(device, "title", deviceFacts(now));
    trouble.hidden = !isLive(now) || now.unused_devices.length + now.device_remark.length === 0;
    say(trouble, troubleOf(now));
    setMeter(memory, now.memory_bytes ? now.used_bytes / now.memory_bytes : 0);
    say(memoryText, `${bytes(now.used_bytes)} of ${bytes(now.memory_bytes)}`);
    mark(memoryText, "title", memoryOf(now));
    const loading = now.loading[0];
    progress.hidden = !loading || !isLive(now);
    if (loading) setMeter(progress, loading.fraction, `${now.name} fetches ${layers(loading.start, loading.stop)}`);
    say(doing, words(now, view));
    if (isOpen) refreshDetails(details, now, view);
  };
  return row;
}

function deviceOf(node) {
  return node.device === "cpu" ? `cpu · ${plural(node.threads, "thread")}` : `${node.device} · ${node.device_label || node.backend}`;
}

function deviceFacts(node) {
  return [node.device, node.device_label, node.device_bytes ? bytes(node.device_bytes) : "", node.backend].filter(Boolean).join(", ");
}

/** GPUs that are there and cannot be used, each with the line that changes that. */
function troubleOf(node) {
  return [...node.unused_devices.map((each) => `${each.label} cannot be used, ${each.problem}; ${each.fix}`), node.device_remark].filter(Boolean).join(" · ");
}

function words(node, view) {
  if (!isLive(node)) return node.status_reason || `it is ${node.status}`;
  if (node.role === "driver") return node.api_url ? `answers clients at ${node.api_url}` : "answers clients";
  if (node.loading.length) return `fetches ${layers(node.loading[0].start, node.loading[0].stop)}: ${percent(node.loading[0].fraction)}`;
  if (node.failures.length) return `could not load ${node.failures[0].model}: ${node.failures[0].reason}`;
  const spare = view.chains.flatMap((chain) => chain.standbys.map((standby) => `${standby.node} ${chain.id} ${standby.start}`));
  const isSpare = node.layers.length > 0 && node.layers.every((each) => spare.includes(`${node.id} ${each.chain} ${each.start}`));
  const held = node.layers.map((each) => `${layers(each.start, each.stop)}${view.models.length > 1 ? ` of ${each.model}` : ""}`);
  if (held.length) return `${node.is_standby || isSpare ? "stands by with" : "holds"} ${held.join(", ")}`;
  return node.duty || (node.is_standby ? "stands by" : "has nothing to do");
}

// Whoever is dialled where it says needs no word for it.
function isDetour(link) {
  return link.rung !== "direct" && link.rung !== "local";
}

function refreshDetails(place, node, view) {
  if (place.node === node && place.links === view.links) return;
  Object.assign(place, { node, links: view.links });
  // Buttons are made once: one that has the focus, or is being pressed, must not vanish.
  if (!place.firstChild) place.append(h("dl", { class: "facts" }), h("div", {}, h("h3", {}, "Links"), h("ul", { class: "links small" })), actions(node));
  const [facts, links, buttons] = place.children;
  facts.replaceChildren(...factsOf(node).flatMap(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]));
  const rows = linksOf(node, view);
  links.hidden = rows.length === 0;
  links.lastChild.replaceChildren(...rows.map(({ link, other }) => h("li", { title: link.remark }, h("span", {}, nameOf(other)),
    h("span", { class: "muted number" }, link.is_open ? [isDetour(link) ? link.rung : "", seconds(link.rtt_s), linkSpeed(link)].filter(Boolean).join(" · ") : "closed"))));
  buttons.hidden = !isLive(node);
  buttons.firstChild.disabled = node.is_draining;
}

function memoryOf(node) {
  const free = Math.max(0, node.memory_bytes - node.used_bytes);
  return `${memoryParts(node.parts)}, ${bytes(node.process_bytes)} process, ${bytes(free)} free`;
}

/** What was measured on it: with each model that is served, else without any. */
function speedOf(node) {
  const when = (at) => (at ? `, ${day(at)} ${clock(at, false)}` : "");
  const served = node.speeds.filter((each) => each.layer_count).map((each) => [
    `${seconds(each.layer_s)} a layer of ${each.model}`,
    each.batch_layer_s ? `${seconds(each.batch_layer_s)} for 8 rows` : "",
    each.prefill_layer_s ? `prompts ${rate(1 / (each.prefill_layer_s * each.layer_count))}` : "",
    `measured ${each.source === "service" ? "in service" : "when loaded"}${when(each.measured_at_s)}`,
  ].filter(Boolean).join(", "));
  if (served.length) return served.join("; ");
  return node.probed_at_s ? `${bytes(node.weights_bytes_per_s)}/s of weights, probed${when(node.probed_at_s)}` : "not measured, guessed";
}

function factsOf(node) {
  const held = node.layers.map((each) => `${layers(each.start, each.stop)} of ${each.model} (${memoryParts(each.parts)})`);
  const cached = node.cached.map((each) => `${layers(each.start, each.stop)} of ${each.model}`);
  const facts = [["Id", node.id], ["Address", node.address], ["Version", node.version], ["Computes on", deviceFacts(node)], ["Holds", held.join(", ") || "nothing"],
    ["Memory set aside", memoryOf(node)], ["KV used", `${bytes(node.kv_used_bytes)} of ${bytes(node.parts.kv_reserved_bytes)} reserved`],
    ["Resident", node.resident_bytes ? `${bytes(node.resident_bytes)}: all that its process takes now` : "it does not say"], ["On its disk", cached.join(", ") || "nothing"]];
  if (node.role === "worker") facts.push(["Speed", speedOf(node)]);
  if (node.attested) facts.push(["Hardware", `attested: ${node.attested}`]);
  if (node.audits) facts.push(["Audits", `${node.audits}, of which ${node.audits_failed} against it; reputation ${node.reputation.toFixed(2)}`]);
  if (node.standing) facts.push(["Standing", `${node.standing}; it came without a token`]);
  if (node.memory_reason) facts.push(["Offers less since", node.memory_reason]);
  return node.status_reason ? [...facts, ["Why", node.status_reason]] : facts;
}

/** The nearest few, each other machine once. */
function linksOf(node, view) {
  const seen = new Set();
  return view.links.filter((link) => link.a === node.id || link.b === node.id)
    .map((link) => ({ link, other: link.a === node.id ? link.b : link.a }))
    .filter(({ other }) => !seen.has(other) && seen.add(other))
    .sort((a, b) => a.link.rtt_s - b.link.rtt_s)
    .slice(0, MOST_LINKS);
}

function actions(node) {
  const drain = h("button", { type: "button", onclick: () => act("POST", `/cluster/nodes/${encodeURIComponent(node.id)}/drain`, {}) }, "Empty and release");
  const remove = h("button", { type: "button", class: "danger", onclick: async () => {
    const isSure = await confirm(`Throw out ${node.name}?`, "Its certificate is refused from now on, and so are the join lines that it used. It can only come back as a new machine with a new join line.", "Throw out");
    if (isSure) act("DELETE", `/cluster/nodes/${encodeURIComponent(node.id)}`);
  } }, "Throw out");
  return h("div", { class: "row" }, drain, remove);
}

async function act(method, path, body) {
  try {
    await call(method, path, body);
  } catch (error) {
    toast(error.message);
  }
}

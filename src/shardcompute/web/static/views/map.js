// Machines and the links between them, on a ring in the order of the first chain, whose way is drawn boldly: from its
// driver once around. All that is drawn here is said in words in the list of machines, so screen readers get a summary.

import { h, keyed, mark, s, say } from "../dom.js";
import { bytes, layers, linkSpeed, plural, seconds } from "../format.js";
import { withoutDomain } from "../names.js";
import { hueOf, isLive } from "../store.js";
import { createFlow } from "./map_flow.js";
import { bendOf, nameSpot, placeHopWords, ringOf, shapeOf, shorten, textBox } from "./map_layout.js";

const FEW = 10; // Up to here every link has its line.
const NAME_WEIGHT = 620;
const pairOf = (a, b) => (a < b ? `${a} ${b}` : `${b} ${a}`);

export function createMap(onPick) {
  const links = s("g", { class: "map-links" }), ways = s("g", { class: "map-ways" }), labels = s("g", { class: "map-labels" });
  const nodes = s("g", { class: "map-nodes" });
  const flow = createFlow();
  const element = s("svg", { class: "map", role: "img" }, links, ways, flow.element, nodes, labels);
  const legend = h("span", { class: "muted small" });
  let drawn = null, pixels = 0, rounds = [];

  function update(view) {
    const now = element.clientWidth || 640;
    // Load changes every second; the picture only when machines, links or chains do.
    if (!drawn || (now < 480) !== (pixels < 480) || ["nodes", "links", "chains", "driver"].some((name) => drawn[name] !== view[name])) draw(view, now);
    flow.update(view, rounds);
  }

  function draw(view, now) {
    drawn = view;
    pixels = now;
    const chain = view.chains.find((each) => each.status === "ready") ?? view.chains[0];
    const { shown, shape } = arrange(view, chain, pixels);
    const places = new Map(shown.map((node) => [node.id, node]));
    mark(element, "viewBox", `0 0 ${shape.width} ${shape.height}`);
    mark(element, "data-size", shape.isSmall ? "small" : shape.hasLine ? "large" : "crowd");
    mark(element, "aria-label", summary(view, chain));
    say(legend, { full: "round trip and bandwidth of each hop", short: "round trip of each hop", none: `${plural(shape.count, "machine")}; pick one for its links` }[shape.hop]);
    const known = new Map(view.links.map((link) => [pairOf(link.a, link.b), link]));
    const hops = hopsOf(view, places);
    drawLinks(links, [...known.values()].filter((link) => shape.count <= FEW && places.has(link.a) && places.has(link.b)), places);
    keyed(ways, hops, (hop) => hop.key, () => s("path"), (path, hop) => drawWay(path, hop, places));
    keyed(nodes, shown, (node) => node.id, (node) => makeNode(node, onPick), (group, node) => group.refresh(node, shape));
    keyed(labels, wordsOf(hops, known, places, shown, shape), (label) => label.hop.pair, makeLabel, (group, label) => group.refresh(label));
    rounds = roundsOf(hops, places);
  }
  return { element, legend, update };
}

/** Who sends a chain its work: the worker that it was given to, or the coordinator. */
const driverOf = (view, chain) => chain.driver_host || view.driver;

/** The coordinator, then stages in their order, then the others; with places, names as far as they fit, and what they do. */
function arrange(view, chain, pixels) {
  const order = new Map(chain ? chain.stages.flatMap(membersOf).map((node, index) => [node, index]) : []);
  const rank = (node) => order.get(node.id) ?? 1000 + (isLive(node) ? 0 : 1000);
  const around = view.nodes.filter((node) => node.status !== "gone" && node.id !== view.driver)
    .sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, undefined, { numeric: true }));
  const shape = shapeOf(around.length, pixels);
  const ring = ringOf(shape);
  const own = view.nodes.find((node) => node.id === view.driver);
  const hub = { ...(own ?? {}), id: view.driver, name: own?.name ?? "coordinator", isHub: true, status: "ready", ...ring.hub };
  const roles = rolesOf(view);
  const shown = [hub, ...around.map((node, index) => ({ ...node, ...ring.places[index] }))].map((node) => {
    const spot = nameSpot(node, shape, node.isHub), size = node.isHub ? 13 : shape.name;
    const placed = { ...node, drives: roles.drivers.has(node.id), spot, size };
    const line = node.isHub || shape.hasLine ? shorten(caption(placed, roles), node.isHub ? 12 : shape.line, spot.room) : "";
    return { ...placed, label: shorten(withoutDomain(node.name), size, spot.room, NAME_WEIGHT), line };
  });
  return { shown, shape };
}

/** The machines of a stage: those that compute it together, the leading one first. */
const membersOf = (stage) => (stage.ranks?.length ? stage.ranks.map((rank) => rank.node) : [stage.node]);

function rolesOf(view) {
  const stages = new Map();
  for (const chain of view.chains) for (const stage of chain.stages) membersOf(stage).forEach((node, index, all) => {
    const told = `${layers(stage.start, stage.stop)}${all.length > 1 ? ` · rank ${index}` : ""}`;
    stages.set(node, stages.has(node) ? null : told);
  });
  return {
    stages,
    standbys: new Set(view.chains.flatMap((each) => each.standbys.map((standby) => standby.node))),
    drivers: new Set([...view.chains.map((chain) => driverOf(view, chain)), ...(view.chains.length ? [] : [view.driver]), ...view.nodes.filter((node) => node.role === "driver").map((node) => node.id)]),
  };
}

function hopsOf(view, places) {
  const hops = [];
  for (const chain of view.chains) {
    const isUp = chain.status === "ready", stages = chain.stages.map((stage) => stage.node);
    const add = (way, kind) => way.filter((id) => places.has(id)).forEach((from, index, all) => {
      const to = all[index + 1];
      if (to && to !== from) hops.push({ chain: chain.id, key: `${chain.id} ${kind} ${index} ${from} ${to}`, from, to, pair: pairOf(from, to), isUp, kind });
    });
    const driver = driverOf(view, chain);
    add([driver, ...stages, driver], "round");
    for (const members of chain.stages.map(membersOf)) members.slice(1).forEach((node, index) => add([members[0], node], `ranks ${index}`));
    if (driver !== view.driver) add([view.driver, driver], "handover");
    for (const other of chain.drivers ?? []) {
      if (other.node === driver || other.node === view.driver || !stages.length) continue;
      add([other.node, stages[0]], "other");
      add([stages.at(-1), other.node], "other back");
    }
  }
  return hops;
}

/** The whole way of each chain that is up, for what moves along it. */
function roundsOf(hops, places) {
  const rounds = new Map();
  for (const hop of hops.filter((each) => each.kind === "round" && each.isUp)) {
    const bend = bendOf(places.get(hop.from), places.get(hop.to));
    const round = rounds.get(hop.chain) ?? { chain: hop.chain, d: "", hops: 0 };
    round.d += `${round.d ? "L" : "M"}${bend.start}${bend.curve}`;
    round.hops += 1;
    rounds.set(hop.chain, round);
  }
  return [...rounds.values()];
}

function wordsOf(hops, known, places, shown, shape) {
  const found = new Map();
  for (const hop of hops) {
    const link = known.get(hop.pair);
    if (!link || found.has(hop.pair)) continue;
    const texts = link.is_local ? ["local"] : [[seconds(link.rtt_s), linkSpeed(link)].filter(Boolean).join(" · "), seconds(link.rtt_s)];
    found.set(hop.pair, { pair: hop.pair, from: places.get(hop.from), to: places.get(hop.to), texts });
  }
  const taken = shown.flatMap((node) => [
    { x: node.x, y: node.y, width: node.r * 2 + 6, height: node.r * 2 + 4 },
    textBox(node.label, node.size, node.spot, node.spot.y, NAME_WEIGHT),
    ...(node.line ? [textBox(node.line, node.isHub ? 12 : shape.line, node.spot, node.spot.lineY)] : []),
  ]);
  return placeHopWords([...found.values()], taken, shape);
}

function drawLinks(group, shown, places) {
  keyed(group, shown, (link) => pairOf(link.a, link.b), () => s("line"), (line, link) => {
    const a = places.get(link.a), b = places.get(link.b);
    mark(line, "x1", a.x.toFixed(1)); mark(line, "y1", a.y.toFixed(1)); mark(line, "x2", b.x.toFixed(1)); mark(line, "y2", b.y.toFixed(1));
    mark(line, "class", link.is_open ? "" : "is-closed");
  });
}

function drawWay(path, hop, places) {
  const bend = bendOf(places.get(hop.from), places.get(hop.to));
  mark(path, "d", `M${bend.start}${bend.curve}`);
  mark(path, "class", `way is-${hop.kind.split(" ")[0]}${hop.isUp ? "" : " is-down"}`);
}

function makeLabel() {
  const back = s("rect", { rx: 8 }), text = s("text", { "text-anchor": "middle" });
  const group = s("g", {}, back, text);
  group.refresh = (label) => {
    say(text, label.text);
    mark(back, "width", label.width.toFixed(1)); mark(back, "height", label.height); mark(back, "x", (label.x - label.width / 2).toFixed(1)); mark(back, "y", (label.y - label.height / 2).toFixed(1));
    mark(text, "x", label.x.toFixed(1)); mark(text, "y", (label.y + 4).toFixed(1));
  };
  return group;
}

function makeNode(node, onPick) {
  const ring = s("circle", { class: "ring" }), used = s("circle", { class: "used", pathLength: 100 }), disc = node.isHub ? s("rect", { class: "disc", rx: 8 }) : s("circle", { class: "disc" });
  const progress = s("circle", { class: "progress", pathLength: 100 }), badge = s("rect", { class: "badge", rx: 2 });
  const name = s("text", { class: "name" }), line = s("text", { class: "line" });
  const tip = s("title");
  const group = s("g", { onclick: () => node.isHub || onPick(node.id), "data-node": node.id }, tip, ring, used, progress, disc, badge, name, line);
  group.refresh = (now, shape) => {
    const classes = ["node", `is-${now.status}`, now.isHub ? "is-hub" : hueOf(now.id), now.drives && "is-driver", now.is_draining && "is-draining"];
    mark(group, "class", classes.filter(Boolean).join(" "));
    mark(group, "transform", `translate(${now.x.toFixed(1)} ${now.y.toFixed(1)})`);
    for (const circle of [ring, used]) mark(circle, "r", now.r);
    mark(progress, "r", now.r + 4);
    if (now.isHub) { mark(disc, "x", -now.r); mark(disc, "y", -now.r); mark(disc, "width", now.r * 2); mark(disc, "height", now.r * 2); }
    else mark(disc, "r", Math.max(3, now.r - (now.r > 20 ? 8 : 4)));
    const half = Math.max(2, now.r * 0.28);
    badge.toggleAttribute("hidden", now.isHub || !now.drives);
    mark(badge, "x", -half); mark(badge, "y", -half); mark(badge, "width", half * 2); mark(badge, "height", half * 2);
    const share = now.memory_bytes ? now.used_bytes / now.memory_bytes : 0;
    mark(used, "stroke-dasharray", `${Math.min(100, share * 100).toFixed(1)} 100`);
    const loading = now.loading?.length ? now.loading.reduce((sum, each) => sum + each.fraction, 0) / now.loading.length : null;
    mark(progress, "stroke-dasharray", loading === null ? "0 100" : `${Math.max(2, loading * 100).toFixed(1)} 100`);
    for (const [text, words, y, size] of [[name, now.label, now.spot.y, now.size], [line, now.line, now.spot.lineY, now.isHub ? 12 : shape.line]]) {
      say(text, words);
      mark(text, "text-anchor", now.spot.anchor);
      mark(text, "x", (now.spot.x - now.x).toFixed(1)); mark(text, "y", (y - now.y).toFixed(1));
      mark(text, "font-size", size);
    }
    say(tip, now.isHub ? `${now.name}: requests start and end here` : `${now.name}, ${now.status}: ${now.device}, ${bytes(now.used_bytes)} set aside of ${bytes(now.memory_bytes)}`);
  };
  return group;
}

function caption(node, roles) {
  if (node.isHub) return node.drives ? "driver" : "coordinator";
  if (!isLive(node)) return node.status;
  if (node.status === "suspected") return "not heard from";
  if (node.role === "driver") return "driver";
  if (node.loading.length) return `fetches ${layers(node.loading[0].start, node.loading[0].stop)}`;
  const told = [node.drives && "driver", roles.stages.get(node.id), !roles.stages.has(node.id) && (node.is_standby || roles.standbys.has(node.id)) && "stands by"].filter(Boolean);
  return told.length ? told.join(" · ") : `${node.device} · ${bytes(node.memory_bytes)}`;
}

function summary(view, chain) {
  const live = view.nodes.filter(isLive).length;
  const way = chain ? ` ${chain.model} runs over ${plural(chain.stages.length, "stage")}.` : "";
  return `Map of ${plural(live, "machine")} around the coordinator.${way} Details are in the list of machines.`;
}

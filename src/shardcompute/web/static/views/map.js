// Machines and the links between them, on a ring in the order of the first chain, whose way is drawn boldly: from the
// driver at the top once around. In a crowd the driver stands in the middle, so that all its links are short.
// All that is drawn here is said in words in the list of machines, so screen readers get a summary.

import { h, keyed, mark, s, say } from "../dom.js";
import { bandwidth, bytes, layers, plural, seconds } from "../format.js";
import { hueOf, isLive } from "../store.js";

const WIDE = 620, NARROW = 400, HEIGHT = 430; // A phone gets a picture of its own, or nobody could read it there.
const FEW = 10; // Up to here everything has its label and every link its line.
const pairOf = (a, b) => (a < b ? `${a} ${b}` : `${b} ${a}`);

export function createMap(onPick) {
  const links = s("g", { class: "map-links" }), ways = s("g", { class: "map-ways" }), labels = s("g", { class: "map-labels" });
  const nodes = s("g", { class: "map-nodes" });
  const element = s("svg", { class: "map", role: "img" }, links, ways, nodes, labels);
  const legend = h("span", { class: "muted small" });
  let drawn = null, width = 0;

  function update(view) {
    const fitting = element.clientWidth < 480 ? NARROW : WIDE;
    // Load changes every second; the picture only when machines, links or chains do.
    if (drawn && fitting === width && ["nodes", "links", "chains", "driver"].every((name) => drawn[name] === view[name])) return;
    drawn = view;
    width = fitting;
    mark(element, "viewBox", `0 0 ${width} ${HEIGHT}`);
    const chain = view.chains.find((each) => each.status === "ready") ?? view.chains[0];
    const shown = arrange(view, chain, width);
    const isSmall = shown.length <= FEW;
    const places = new Map(shown.map((node) => [node.id, node]));
    element.classList.toggle("is-crowded", !isSmall);
    say(legend, isSmall ? "round trip and bandwidth of each hop" : `${plural(shown.length - 1, "machine")}; pick one for its links`);
    mark(element, "aria-label", summary(view, chain));
    const known = new Map(view.links.map((link) => [pairOf(link.a, link.b), link]));
    const hops = hopsOf(view, places);
    drawLinks(links, [...known.values()].filter((link) => isSmall && places.has(link.a) && places.has(link.b)), places);
    keyed(ways, hops, (hop) => hop.key, makeWay, (path, hop) => path.refresh(hop, places));
    keyed(labels, isSmall ? labelled(hops, known) : [], (hop) => hop.pair, makeLabel, (label, hop) => label.refresh(hop, places));
    keyed(nodes, shown, (node) => node.id, (node) => makeNode(node, onPick), (group, node) => group.refresh(node, isSmall));
  }
  return { element, legend, update };
}

/** Stages in their order, then the others. */
function arrange(view, chain, width) {
  const middle = { x: width / 2, y: HEIGHT / 2 };
  const order = new Map(chain ? chain.stages.map((stage, index) => [stage.node, index]) : []);
  const rank = (node) => order.get(node.id) ?? 1000 + (isLive(node) ? 0 : 1000);
  const around = view.nodes.filter((node) => node.status !== "gone" && node.id !== view.driver)
    .sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, undefined, { numeric: true }));
  const isSmall = around.length < FEW;
  const driver = view.nodes.find((node) => node.id === view.driver);
  const hub = { ...(driver ?? {}), id: view.driver, name: driver?.name ?? "coordinator", isHub: true, status: "ready", ...middle, r: 13 };
  const ring = isSmall ? [hub, ...around] : around;
  const spare = new Set(view.chains.flatMap((each) => each.standbys.map((standby) => standby.node)));
  const serving = new Set(view.chains.flatMap((each) => each.stages.map((stage) => stage.node)));
  const placed = ring.map((node, index) => {
    // Neighbours on a crowded ring alternate between two orbits.
    const orbit = ring.length > 32 && index % 2 ? 0.78 : 1;
    const angle = -Math.PI / 2 + (index / ring.length) * 2 * Math.PI;
    const [rx, ry] = isSmall ? [width / 2 - (width === NARROW ? 70 : 95), 140] : [width / 2 - 25, HEIGHT / 2 - 20];
    return { ...node, standsBy: !serving.has(node.id) && (node.is_standby || spare.has(node.id)), x: middle.x + Math.cos(angle) * rx * orbit, y: middle.y - (isSmall ? 2 : 0) + Math.sin(angle) * ry * orbit, r: !isSmall ? (ring.length > 32 ? 9 : 13) : node.isHub ? 18 : 25 };
  });
  return isSmall ? placed : [...placed, hub];
}

function hopsOf(view, places) {
  const hops = [];
  for (const chain of view.chains) {
    const way = [view.driver, ...chain.stages.map((stage) => stage.node), view.driver].filter((id) => places.has(id));
    for (let index = 0; index + 1 < way.length; index += 1) {
      if (way[index] !== way[index + 1]) {
        hops.push({ key: `${chain.id} ${index} ${way[index]} ${way[index + 1]}`, from: way[index], to: way[index + 1], pair: pairOf(way[index], way[index + 1]), isUp: chain.status === "ready" });
      }
    }
  }
  return hops;
}

function labelled(hops, known) {
  const found = new Map();
  for (const hop of hops) if (known.has(hop.pair) && !found.has(hop.pair)) found.set(hop.pair, { ...hop, link: known.get(hop.pair) });
  return [...found.values()];
}

function drawLinks(group, shown, places) {
  keyed(group, shown, (link) => pairOf(link.a, link.b), () => s("line"), (line, link) => {
    const a = places.get(link.a), b = places.get(link.b);
    mark(line, "x1", a.x.toFixed(1)); mark(line, "y1", a.y.toFixed(1)); mark(line, "x2", b.x.toFixed(1)); mark(line, "y2", b.y.toFixed(1));
    mark(line, "class", link.is_open ? "" : "is-closed");
  });
}

function makeWay() {
  const path = s("path", { class: "way" });
  path.refresh = (hop, places) => {
    const bend = bendOf(places.get(hop.from), places.get(hop.to));
    mark(path, "d", bend.d);
    mark(path, "class", `way${hop.isUp ? "" : " is-down"}`);
  };
  return path;
}

/** A slight curve, so that there and back are two lines. */
function bendOf(from, to) {
  const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy) || 1;
  const ax = from.x + (dx / length) * (from.r + 5), ay = from.y + (dy / length) * (from.r + 5);
  const bx = to.x - (dx / length) * (to.r + 7), by = to.y - (dy / length) * (to.r + 7);
  const lift = Math.min(30, length * -0.1);
  const cx = (ax + bx) / 2 - (dy / length) * lift, cy = (ay + by) / 2 + (dx / length) * lift;
  return { d: `M${ax.toFixed(1)} ${ay.toFixed(1)}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${bx.toFixed(1)} ${by.toFixed(1)}`, x: (ax + 2 * cx + bx) / 4, y: (ay + 2 * cy + by) / 4 };
}

function makeLabel() {
  const back = s("rect", { rx: 8, height: 20 }), text = s("text", { "text-anchor": "middle" });
  const group = s("g", {}, back, text);
  group.refresh = (hop, places) => {
    const at = bendOf(places.get(hop.from), places.get(hop.to));
    const words = [seconds(hop.link.rtt_s), bandwidth(hop.link.bytes_per_s)].filter(Boolean).join(" · ");
    say(text, words);
    const width = words.length * 6.6 + 14;
    mark(back, "width", width); mark(back, "x", (at.x - width / 2).toFixed(1)); mark(back, "y", (at.y - 10).toFixed(1));
    mark(text, "x", at.x.toFixed(1)); mark(text, "y", (at.y + 4).toFixed(1));
  };
  return group;
}

function makeNode(node, onPick) {
  const ring = s("circle", { class: "ring" }), used = s("circle", { class: "used", pathLength: 100 }), disc = node.isHub ? s("rect", { class: "disc", rx: 8 }) : s("circle", { class: "disc" });
  const progress = s("circle", { class: "progress", pathLength: 100 });
  const name = s("text", { class: "name", "text-anchor": "middle" }), line = s("text", { class: "line", "text-anchor": "middle" });
  const tip = s("title");
  const group = s("g", { onclick: () => node.isHub || onPick(node.id) }, tip, ring, used, progress, disc, name, line);
  group.refresh = (now, isSmall) => {
    mark(group, "class", `node is-${now.status} ${now.isHub ? "is-hub" : hueOf(now.id)}${now.role === "driver" ? " is-driver" : ""}`);
    mark(group, "transform", `translate(${now.x.toFixed(1)} ${now.y.toFixed(1)})`);
    for (const circle of [ring, used]) mark(circle, "r", now.r);
    mark(progress, "r", now.r + 5);
    if (now.isHub) { mark(disc, "x", -now.r); mark(disc, "y", -now.r); mark(disc, "width", now.r * 2); mark(disc, "height", now.r * 2); }
    else mark(disc, "r", Math.max(3, now.r - (isSmall ? 9 : 5)));
    const share = now.memory_bytes ? now.used_bytes / now.memory_bytes : 0;
    mark(used, "stroke-dasharray", `${Math.min(100, share * 100).toFixed(1)} 100`);
    const loading = now.loading?.length ? now.loading.reduce((sum, each) => sum + each.fraction, 0) / now.loading.length : null;
    mark(progress, "stroke-dasharray", loading === null ? "0 100" : `${Math.max(2, loading * 100).toFixed(1)} 100`);
    say(name, isSmall ? now.name : "");
    mark(name, "y", now.isHub ? -now.r - 24 : now.r + 19);
    say(line, isSmall ? caption(now) : "");
    mark(line, "y", now.isHub ? -now.r - 9 : now.r + 35);
    say(tip, now.isHub ? `${now.name}: requests start and end here` : `${now.name}, ${now.status}: ${now.device}, ${bytes(now.used_bytes)} of ${bytes(now.memory_bytes)}`);
  };
  return group;
}

function caption(node) {
  if (node.isHub) return "driver";
  if (!isLive(node)) return node.status;
  if (node.role === "driver") return "driver";
  if (node.status === "suspected") return "not heard from";
  if (node.loading.length) return `fetches ${layers(node.loading[0].start, node.loading[0].stop)}`;
  if (node.standsBy) return "stands by";
  return `${node.device} · ${bytes(node.memory_bytes)}`;
}

function summary(view, chain) {
  const live = view.nodes.filter(isLive).length;
  const way = chain ? ` ${chain.model} runs over ${plural(chain.stages.length, "stage")}.` : "";
  return `Map of ${plural(live, "machine")} around the driver.${way} Details are in the list of machines.`;
}

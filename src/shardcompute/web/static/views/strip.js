// When the pieces of an answer came: a bar for each, as high as the wait for it, and what that adds up to.

import { h, mark, s, say } from "../dom.js";
import { plural, rate, seconds } from "../format.js";

const MOST_BARS = 300, HEIGHT = 26;

export function createStrip() {
  const bars = s("g"), drawing = s("svg", { viewBox: `0 0 100 ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": "Time between pieces" }, bars);
  const words = h("p", { class: "muted small number" });
  const element = h("div", { class: "strip" }, drawing, words);
  const started = performance.now();
  let last = started, first = null, isDue = false, timings = null, usage = null, note = "";
  const waits = [], rescued = new Set();

  /** A piece came; `isRescued`: after a machine was lost and replaced. */
  function tick(isRescued = false) {
    const now = performance.now();
    if (isRescued) rescued.add(waits.length);
    waits.push((now - last) / 1000);
    first ??= (now - started) / 1000;
    last = now;
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    isDue = false;
    const shown = merged(waits), size = Math.ceil(waits.length / Math.max(1, shown.length));
    const marked = new Set([...rescued].map((index) => Math.floor(index / size)));
    const rest = shown.slice(1).sort((a, b) => a - b);
    const usual = rest.length ? rest[Math.floor(rest.length / 2)] : shown[0] ?? 0;
    const most = Math.max(usual * 2, ...shown.slice(1), 0.01);
    mark(drawing, "viewBox", `0 0 ${Math.max(140, shown.length) * 4} ${HEIGHT}`);
    while (bars.children.length > shown.length) bars.lastChild.remove();
    shown.forEach((wait, index) => {
      const bar = bars.children[index] ?? bars.appendChild(s("rect", { width: 3, rx: 1 }));
      const height = Math.max(2, Math.min(1, wait / most) * HEIGHT);
      mark(bar, "x", index * 4);
      mark(bar, "y", (HEIGHT - height).toFixed(1));
      mark(bar, "height", height.toFixed(1));
      mark(bar, "class", marked.has(index) ? "is-rescued" : index === 0 ? "is-first" : wait > 0.25 && wait > usual * 4 ? "is-slow" : null);
    });
    describe();
  }

  function describe() {
    const told = [];
    const tokens = timings?.generated_tokens ?? usage?.completion_tokens;
    told.push(tokens ? plural(tokens, "token") : plural(waits.length, "piece"));
    if (first !== null) told.push(`first after ${seconds(first)}`);
    const speed = timings?.decode_tokens_per_s ?? (waits.length > 1 ? (waits.length - 1) / ((last - started) / 1000 - first) : 0);
    if (speed > 0 && Number.isFinite(speed)) told.push(rate(speed));
    const longest = Math.max(0, ...waits.slice(1));
    if (longest > 0) told.push(`longest wait ${seconds(longest)}`);
    if (timings?.interrupted_s) told.push(`${seconds(timings.interrupted_s)} for another machine to take over`);
    if (timings?.drafted_tokens) told.push(`${timings.accepted_tokens} of ${timings.drafted_tokens} drafts accepted`);
    if (timings?.traversals) told.push(`${plural(timings.traversals, "traversal")}${traversal(timings)}`);
    if (note) told.push(note);
    say(words, told.join(" · "));
  }

  return { element, tick, close: draw, timings: (value) => (timings = value), usage: (value) => (usage = value), note: (value) => (note = value), told: () => words.textContent };
}

/** Where the time of one goes, as far as the server tells. */
function traversal({ compute_s, wire_s }) {
  const parts = [compute_s && `${seconds(compute_s)} computing`, wire_s && `${seconds(wire_s)} network`].filter(Boolean);
  return parts.length ? `, each ${parts.join(" and ")}` : "";
}

/** As many bars as fit; each stands for the longest wait of its group, so that none is hidden. */
function merged(waits) {
  if (waits.length <= MOST_BARS) return waits;
  const size = Math.ceil(waits.length / MOST_BARS);
  const groups = [];
  for (let index = 0; index < waits.length; index += size) groups.push(Math.max(...waits.slice(index, index + size)));
  return groups;
}

// Fine-tuning runs: how their loss, speed and gradients have gone, while they go on and for a while after.

import { call } from "../api.js";
import { h, keyed, mark, pill, say } from "../dom.js";
import { plural, rate } from "../format.js";
import { store } from "../store.js";
import { createSparkline } from "./sparkline.js";

const LOOK_MS = 2000, IDLE_MS = 5000, MOST_VALUES = 120;
const TONES = { running: "accent", done: "good", silent: "warn" };
const CURVES = [
  ["Loss", (point) => point.loss, (value) => value.toFixed(4)],
  ["Speed", (point) => point.tokens_per_s, (value) => rate(value)],
  ["Gradient norm", (point) => point.norm, (value) => value.toFixed(3)],
];

export function createFinetuning() {
  const runs = h("div", { class: "stack" });
  const element = h("section", { class: "card", "aria-labelledby": "finetuning-title", hidden: true },
    h("header", {}, h("h2", { id: "finetuning-title" }, "Fine-tuning")), runs);
  let timer = null;

  async function look() {
    let isRunning = false;
    try {
      if (store.connection === "live" && !document.hidden && element.isConnected) {
        const { data } = await call("GET", "/cluster/finetuning");
        element.hidden = data.length === 0;
        keyed(runs, data, (run) => run.id, createRun, (node, run) => node.show(run));
        isRunning = data.some((run) => run.status === "running");
      }
    } catch {
      // The next look will tell; the frame of the page says that the connection is lost.
    }
    timer = setTimeout(look, isRunning ? LOOK_MS : IDLE_MS);
  }
  // From the first time that there is a cluster to show; nothing is asked while another view is open.
  return { element, update: () => { timer ??= setTimeout(look, 0); } };
}

function createRun(run) {
  const title = h("strong"), state = h("span"), note = h("span", { class: "muted small" });
  const curves = CURVES.map(([label]) => {
    const spark = createSparkline(`${label} of ${run.model}, step by step`);
    const value = h("dd", { class: "value number" });
    return { spark, value, element: h("div", { class: "tile" }, h("dt", {}, label), value, h("dd", {}, spark.element)) };
  });
  const element = h("article", { "aria-label": `Fine-tuning of ${run.model}` },
    h("div", { class: "row" }, title, state, note), h("dl", { class: "tiles" }, curves.map((curve) => curve.element)));
  element.show = (now) => {
    const last = now.points.at(-1);
    say(title, now.model);
    state.replaceChildren(pill(now.status, TONES[now.status]));
    const heldOut = now.points.findLast((point) => point.held_out !== null);
    say(note, `step ${last ? last.step : 0} of ${now.steps} · ${plural(now.workers, "worker")}${heldOut ? ` · held out ${heldOut.held_out.toFixed(4)}` : ""}`);
    curves.forEach(({ spark, value }, index) => {
      const [, read, write] = CURVES[index];
      say(value, last ? write(read(last)) : "–");
      spark.update(thin(now.points.map(read)));
    });
    mark(element, "data-status", now.status);
  };
  element.show(run);
  return element;
}

/** So many of them as a line has room for, evenly, the last among them. */
function thin(values) {
  if (values.length <= MOST_VALUES) return values;
  return Array.from({ length: MOST_VALUES }, (_, index) => values[Math.round((index * (values.length - 1)) / (MOST_VALUES - 1))]);
}

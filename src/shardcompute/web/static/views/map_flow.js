// Tokens on their way around a chain: a few dots that follow its line while it answers. Far slower than the real ones,
// and not at all where people asked their system for less motion: there the line is merely drawn more strongly.

import { keyed, mark, s } from "../dom.js";
import { store } from "../store.js";

const MOST_DOTS = 8, FRESH_MS = 3000;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function createFlow() {
  const element = s("g", { class: "map-flow" });
  const steps = new Map();

  /** `ways` are `{chain, d, hops}` of chains that are ready; whether each is at work is seen by its newest step. */
  function update(view, ways) {
    const isBusy = store.connection === "live" && view.load.tokens_per_s > 0;
    const running = isBusy ? ways.filter((way) => ways.length === 1 || isFresh(view, way.chain)) : [];
    element.parentNode?.classList.toggle("is-answering", running.length > 0);
    const dots = calm.matches ? [] : running.flatMap((way) => dotsOf(way, view.load.running));
    keyed(element, dots, (dot) => dot.key, makeDot, (circle, dot) => circle.refresh(dot));
  }

  function isFresh(view, id) {
    const chain = view.chains.find((each) => each.id === id);
    const step = chain?.stages.map((stage) => stage.timing?.compute_s).join();
    if (steps.get(id)?.step !== step) steps.set(id, { step, at: performance.now() });
    return performance.now() - steps.get(id).at < FRESH_MS;
  }
  return { element, update };
}

function dotsOf(way, running) {
  const count = Math.max(1, Math.min(MOST_DOTS, running)), seconds = Math.max(2, Math.min(9, way.hops * 0.4));
  return Array.from({ length: count }, (_, index) => ({ key: `${way.chain} ${index} ${count}`, d: way.d, seconds, offset: (index / count) * seconds }));
}

function makeDot() {
  const motion = s("animateMotion", { repeatCount: "indefinite" });
  const circle = s("circle", { class: "token", r: 3.5 }, motion);
  circle.refresh = ({ d, seconds, offset }) => {
    mark(motion, "path", d);
    mark(motion, "dur", `${seconds.toFixed(1)}s`);
    mark(motion, "begin", `${(-offset).toFixed(2)}s`);
  };
  return circle;
}

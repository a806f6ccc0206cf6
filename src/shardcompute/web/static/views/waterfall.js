// One request opened up: when it waited, read its prompt and wrote, and which stages and links that time went to.

import { h } from "../dom.js";
import { clock, plural, rate, seconds } from "../format.js";
import { hueOf, nameOf } from "../store.js";
import { tell } from "./messages.js";

/** Queue, prefill and decode as far as they are known; what is not yet told apart counts for where the request is now. */
export function partsOf(request) {
  const decode = request.decode_s ?? 0;
  const before = Math.max(0, request.elapsed_s - decode);
  if (request.queue_s !== null && request.queue_s !== undefined) {
    return [part("Queue", "queue", request.queue_s), part("Prefill", "prefill", request.prefill_s ?? 0), part("Decode", "decode", decode), ...rescueOf(request)];
  }
  if (request.state === "waiting") return [part("Queue", "queue", request.elapsed_s)];
  return [part("Prefill", "prefill", Math.max(0, before - (request.interrupted_s ?? 0))), part("Decode", "decode", decode), ...rescueOf(request)].filter((each) => each.s > 0);
}

/** Time in which nobody computed, as a machine was lost and another one took over. */
function rescueOf(request) {
  return request.interrupted_s > 0 ? [part("Rescue", "rescue", request.interrupted_s)] : [];
}

function part(name, kind, s) {
  return { name, kind, s };
}

export function drawRequest(place, request, close) {
  const key = JSON.stringify(request);
  if (place.drawn === key) return;
  const hadFocus = place.contains(document.activeElement);
  place.drawn = key;
  const parts = partsOf(request);
  const total = Math.max(0.0001, parts.reduce((sum, each) => sum + each.s, 0));
  let at = 0;
  const phases = parts.map((each) => {
    const bar = line(each.name, `of-${each.kind}`, at, each.s, total);
    at += each.s;
    return bar;
  });
  const facts = [["Id", request.id], ["Model", request.model], ["Chain", request.chain], ["Started", clock(request.started_at_s)], ["Took", seconds(request.elapsed_s)],
    ["Tokens", `${request.prompt_tokens} in, ${request.generated_tokens} out`], ["Speed", request.tokens_per_s ? rate(request.tokens_per_s) : "–"],
    ["Key", request.key || "none asked for"], ["Ended", request.error || request.finish || "running"]];
  if (request.drafted_tokens) facts.push(["Drafts", `${request.accepted_tokens} of ${request.drafted_tokens} accepted in ${plural(request.traversals, "traversal")}`]);
  for (const each of request.interruptions ?? []) facts.push(["Rescue", tell(each)]);
  const button = h("button", { type: "button", class: "ghost square", "aria-label": "Close details", onclick: close }, "✕");
  place.replaceChildren(h("header", {}, h("h2", {}, `Request ${request.id.slice(0, 8)}`), button),
    h("div", { class: "stack" }, h("ol", { class: "waterfall", "aria-label": "Phases" }, phases), ...stagesOf(request), h("dl", { class: "facts" }, facts.map(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]))));
  if (hadFocus) button.focus();
}

/** The steps that were looked at, laid end to end: stage after stage, then what lies between them. */
function stagesOf(request) {
  if (!request.stages.length) return [];
  const steps = Math.max(...request.stages.map((stage) => stage.steps));
  const busy = (request.prefill_s ?? 0) + (request.decode_s ?? 0);
  const lines = request.stages.map((stage) => ({ name: nameOf(stage.node), kind: hueOf(stage.node), s: stage.compute_s }));
  const waited = request.stages.reduce((sum, stage) => sum + stage.queue_s, 0), packed = request.stages.reduce((sum, stage) => sum + stage.codec_s, 0);
  const known = lines.reduce((sum, each) => sum + each.s, 0) + waited + packed;
  lines.push({ name: "Stage queues", kind: "of-wait", s: waited }, { name: "Packing", kind: "of-codec", s: packed }, { name: "Links, the rest", kind: "of-wire", s: Math.max(0, busy - known) });
  const total = Math.max(0.0001, known, busy);
  let at = 0;
  const bars = lines.map((each) => {
    const bar = line(each.name, each.kind, at, each.s, total);
    at += each.s;
    return bar;
  });
  return [h("div", {}, h("h3", {}, "By stage"), h("p", { class: "muted small" }, `Sum of ${plural(steps, "step")} that were looked at; other requests may have shared them.`)), h("ol", { class: "waterfall", "aria-label": "By stage" }, bars)];
}

function line(name, kind, at, length, total) {
  const bar = h("i", { class: kind });
  bar.style.left = `${(at / total) * 100}%`;
  bar.style.width = `${(length / total) * 100}%`;
  return h("li", {}, h("span", { class: "cut" }, name), h("div", { class: "track", "aria-hidden": "true" }, bar), h("span", { class: "right number muted" }, seconds(length)));
}

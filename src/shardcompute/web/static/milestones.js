// What happened between two looks at a cluster, in lines for people: {text, tone}.

import { bytes, layers, plural } from "./format.js";

const isLive = (node) => node !== undefined && node.status !== "lost" && node.status !== "gone";

/** `served` is who served each chain when it last did; a repair is told as one step, however many looks it takes. */
export function milestones(before, after, served) {
  if (before === null) return [];
  const lines = [];
  const old = new Map(before.nodes.map((node) => [node.id, node]));
  const names = new Map(after.nodes.map((node) => [node.id, node.name]));
  const name = (id) => names.get(id) ?? id.slice(0, 8);
  for (const node of after.nodes) lines.push(...nodeLines(old.get(node.id), node));
  const chains = new Map(before.chains.map((chain) => [chain.id, chain]));
  for (const chain of after.chains) lines.push(...chainLines(chains.get(chain.id), chain, name, served.get(chain.id)));
  const models = new Map(after.models.map((model) => [model.name, model]));
  for (const model of before.models) if (!models.has(model.name)) lines.push({ text: `${model.name} is no longer served` });
  for (const fetch of after.fetches) {
    const former = before.fetches.find((each) => each.model === fetch.model);
    if (!former) lines.push({ text: `${fetch.name} was asked for`, tone: "accent" });
    if (fetch.status === "failed" && former?.status !== "failed") lines.push({ text: `${fetch.name} failed: ${fetch.error}`, tone: "bad" });
  }
  return lines;
}

function* nodeLines(old, node) {
  if (!isLive(node)) {
    if (!isLive(old)) return;
    if (node.status === "gone") yield { text: `${node.name} left`, tone: "warn" };
    else yield { text: `${node.name} is ${node.status}${node.status_reason ? `: ${node.status_reason}` : ""}`, tone: "bad" };
    return;
  }
  if (!isLive(old)) {
    const verb = old === undefined ? "joined" : "is back";
    yield { text: `${node.name} ${verb}: ${plural(node.threads, "thread")}, ${bytes(node.memory_bytes)}`, tone: "good" };
  }
  if (node.status === "suspected" && old?.status !== "suspected") yield { text: `${node.name} has not been heard from`, tone: "warn" };
  if (isLive(old) && old.status === "suspected" && node.status !== "suspected") yield { text: `${node.name} is heard again`, tone: "good" };
  if (node.is_draining && old && !old.is_draining) yield { text: `${node.name} is being emptied`, tone: "warn" };
  const place = (each) => `${each.chain} ${each.start} ${each.stop}`;
  const loading = new Set((old?.loading ?? []).map(place));
  for (const each of node.loading) if (!loading.has(place(each))) yield { text: `${node.name} fetches ${layers(each.start, each.stop)}`, tone: "accent" };
  const held = new Set(isLive(old) ? old.layers.map(place) : []);
  for (const each of node.layers) if (!held.has(place(each))) yield { text: `${node.name} holds ${layers(each.start, each.stop)} of ${each.model}`, tone: "good" };
  const known = new Set((old?.failures ?? []).map((each) => each.reason));
  for (const each of node.failures) if (!known.has(each.reason)) yield { text: `${node.name} could not load ${each.model}: ${each.reason}`, tone: "bad" };
}

function* chainLines(old, chain, name, former) {
  if (old && old.status === chain.status && old.epoch === chain.epoch) return;
  if (chain.status === "ready") {
    const way = chain.stages.map((stage) => `${name(stage.node)} (${stage.start}–${stage.stop - 1})`).join(" → ");
    const replacing = former ? chain.stages.filter((stage) => !former.has(stage.node)).map((stage) => name(stage.node)) : [];
    const who = replacing.length ? `; ${replacing.join(", ")} took over` : "";
    yield { text: `${chain.model} is served by ${way}${who}`, tone: "good" };
  } else if (chain.status === "recovering") {
    yield { text: `${chain.model} is being repaired${chain.reason ? `: ${chain.reason}` : ""}`, tone: "warn" };
  } else if (chain.status === "broken") {
    yield { text: `${chain.model} cannot be served: ${chain.reason}`, tone: "bad" };
  }
}

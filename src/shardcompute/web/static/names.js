// Machines' names where there is little room. What all of them share says nothing: a domain at the end, a long beginning.

import { store } from "./store.js";

const LONG = 11;
let known = null, shared = { start: "", end: "" };

/** A name without the domain that all machines have. */
export function withoutDomain(name) {
  learn();
  return shared.end && name.endsWith(shared.end) ? name.slice(0, -shared.end.length) : name;
}

/** As little of a name as tells it from the others, where it is long. */
export function nickname(name) {
  const host = withoutDomain(name);
  return host.length > LONG && shared.start && host.startsWith(shared.start) ? `…${host.slice(shared.start.length)}` : host;
}

function learn() {
  const nodes = store.cluster?.nodes ?? [];
  if (nodes === known) return;
  known = nodes;
  const names = [...new Set(nodes.map((node) => node.name))];
  if (names.length < 2) {
    shared = { start: "", end: "" };
    return;
  }
  const end = common(names.map((name) => [...name].reverse().join("")));
  const tail = [...end].reverse().join("");
  // Whole parts only: of a.lab and b.lab that is ".lab", of box1 and tax1 it is nothing.
  shared.end = tail.includes(".") ? tail.slice(tail.indexOf(".")) : "";
  const hosts = names.map((name) => (shared.end ? name.slice(0, -shared.end.length) : name));
  const start = common(hosts);
  shared.start = start.slice(0, Math.max(...["-", "_", "."].map((mark) => start.lastIndexOf(mark))) + 1);
}

function common(texts) {
  let length = 0;
  while (length < texts[0].length && texts.every((text) => text[length] === texts[0][length])) length += 1;
  return texts[0].slice(0, length);
}

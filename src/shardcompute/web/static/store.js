// What the page knows of the cluster. Whoever shows it is told at most once per frame, however much changes.

const MOST_EVENTS = 200;
const SAMPLES = 120;
const KEYS = {
  nodes: (node) => node.id,
  links: (link) => `${link.a} ${link.b}`,
  models: (model) => model.name,
  chains: (chain) => chain.id,
  fetches: (fetch) => fetch.model,
};

const hues = new Map();
const listeners = new Set();
let isScheduled = false;

export const store = {
  /** The newest `ClusterView`; null before the first, and where there is no cluster. */
  cluster: null,
  /** connecting, live, lost, refused (no key), forbidden (not from here), alone (no cluster behind this server) */
  connection: "connecting",
  reason: "",
  /** When the server was last heard, by `Date.now()`; 0 before it was. */
  heardAt: 0,
  /** When it is tried again, while the connection is lost. */
  retryAt: 0,
  /** Tokens per second, once a second. */
  samples: [],
  /** Names of models that this server answers for. */
  served: [],
  /** How many tokens each of them can hold. */
  contexts: new Map(),
};

export function subscribe(listener) {
  listeners.add(listener);
}

export function changed() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    for (const listener of listeners) listener();
  });
}

export function setConnection(connection, reason = "") {
  if (store.connection === connection && store.reason === reason) return;
  store.connection = connection;
  store.reason = reason;
  changed();
}

export function take(view) {
  for (const node of view.nodes) hueOf(node.id);
  store.cluster = view;
  changed();
}

export function takeChange(change) {
  if (!store.cluster) return;
  const view = { ...store.cluster };
  for (const [name, keyOf] of Object.entries(KEYS)) {
    // What did not change stays the same array, by which whoever draws it can tell.
    if (!change[name]?.length && !change.gone?.[name]?.length) continue;
    const items = new Map(view[name].map((item) => [keyOf(item), item]));
    for (const item of change[name] ?? []) items.set(keyOf(item), item);
    for (const key of change.gone?.[name] ?? []) items.delete(key);
    view[name] = [...items.keys()].sort().map((key) => items.get(key));
  }
  if (change.load) view.load = change.load;
  if (change.events?.length) view.events = [...view.events, ...change.events].slice(-MOST_EVENTS);
  if (change.warnings) view.warnings = change.warnings;
  if (change.coordinators) view.coordinators = change.coordinators;
  take(view);
}

export function sample() {
  if (!store.cluster || store.connection !== "live") return;
  store.samples = [...store.samples, store.cluster.load.tokens_per_s].slice(-SAMPLES);
  changed();
}

/** The colour of a node, the same wherever it is shown. */
export function hueOf(id) {
  if (!hues.has(id)) hues.set(id, hues.size % 8);
  return `hue-${hues.get(id)}`;
}

export function nameOf(id) {
  const node = store.cluster?.nodes.find((each) => each.id === id);
  if (node) return node.name;
  return id === store.cluster?.driver ? "coordinator" : id.slice(0, 8);
}

/** What is shown is no longer what is: nobody has heard from the server for a while. */
export function isStale() {
  return store.connection === "lost" && store.heardAt > 0;
}

export function isLive(node) {
  return node.status !== "lost" && node.status !== "gone";
}

// Follows the cluster for as long as the page is open: a lost connection is dialled again, a refused one waits for a key.

import { call, events, send } from "./api.js";
import { sample, setConnection, store, take, takeChange, changed } from "./store.js";

const SILENCE_MS = 10_000; // The server says something every 3 seconds.
const FIRST_WAIT_MS = 300;
const MOST_WAIT_MS = 4_000;

let wake = () => {};

/** Try again now, because there is another key. */
export function retry() {
  wake();
}

export async function follow() {
  setInterval(sample, 1000);
  let wait = FIRST_WAIT_MS;
  addEventListener("online", retry);
  // A machine that slept, or a tab in the background, learns at once how old its picture is.
  document.addEventListener("visibilitychange", () => document.hidden || (store.connection === "lost" && retry()));
  for (;;) {
    const outcome = await read(() => (wait = FIRST_WAIT_MS));
    if (outcome === "refused" || outcome === "forbidden") await pause(60_000);
    else {
      await pause(wait);
      wait = Math.min(wait * 1.7, MOST_WAIT_MS);
    }
  }
}

async function read(connected) {
  const leaving = new AbortController();
  let watch = setTimeout(() => leaving.abort(), SILENCE_MS);
  const heard = () => {
    store.heardAt = Date.now();
    clearTimeout(watch);
    watch = setTimeout(() => leaving.abort(), SILENCE_MS);
  };
  try {
    const response = await send("GET", "/cluster/events", { signal: leaving.signal });
    refreshServed();
    for await (const { event, data } of events(response, heard)) {
      connected();
      setConnection("live");
      if (event === "state") take(JSON.parse(data));
      else if (event === "change") takeChange(JSON.parse(data));
    }
  } catch (error) {
    if (error.status === 401) return tell("refused", error.message);
    if (error.status === 403) return tell("forbidden", error.message);
    if (error.status === 404) return await alone(connected);
  } finally {
    clearTimeout(watch);
    leaving.abort();
  }
  return tell("lost");
}

/** A server without a cluster: it has models, and that is all there is to see. */
async function alone(connected) {
  try {
    await refreshServed();
    connected();
    setConnection("alone");
    await pause(MOST_WAIT_MS);
    return "alone";
  } catch (error) {
    return error.status === 401 ? tell("refused", error.message) : tell("lost");
  }
}

export async function refreshServed() {
  const models = await call("GET", "/v1/models").catch((error) => {
    if (store.connection === "alone") throw error;
    return null;
  });
  if (models) {
    store.served = models.data.map((model) => model.id);
    store.contexts = new Map(models.data.map((model) => [model.id, model.max_model_len ?? Infinity]));
  }
  changed();
}

function tell(connection, reason = "") {
  setConnection(connection, reason);
  return connection;
}

function pause(milliseconds) {
  return new Promise((resolve) => {
    store.retryAt = Date.now() + milliseconds;
    const timer = setTimeout(resolve, milliseconds);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

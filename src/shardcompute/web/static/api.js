// Calls to the server that the page came from, with the key if there is one. The key lives as long as the tab.

const KEY = "shardcompute.key";
const listeners = new Set();

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** `listener(message)` is called when the server wants another key than it was shown. */
export function onRefused(listener) {
  listeners.add(listener);
}

/** The response, if it is a good one; otherwise an ApiError with the server's own words. */
export async function send(method, path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store", credentials: "omit", redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const message = await words(response);
  if (response.status === 401) for (const listener of listeners) listener(message);
  throw new ApiError(response.status, message);
}

export async function call(method, path, body) {
  return (await send(method, path, { body })).json();
}

async function words(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** The events of a stream, as `{event, data}`. `heard` is called for every piece of it, pings too. */
export async function* events(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const event = { event: "message", data: "" };
        for (const line of rest.slice(0, end).split("\n")) {
          if (line.startsWith("event: ")) event.event = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        rest = rest.slice(end + 2);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Numbers as people read them.

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count, unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.round(value / 3600)} h`;
}

export function rate(value) {
  return `${value >= 100 ? Math.round(value) : value.toFixed(1)} tok/s`;
}

/** What a link carries, in words: nothing where that was not measured, and no number within one machine. */
export function linkSpeed({ bytes_per_s, is_local }) {
  if (is_local) return "local";
  return bytes_per_s > 0 ? `${bytes(bytes_per_s)}/s` : "";
}

export function count(value) {
  if (value < 10_000) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)}M`;
}

export function plural(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

/** What memory is for, in the words of docs/memory.md. */
export function memoryParts({ held_weights_bytes, scratch_bytes, kv_reserved_bytes }) {
  return `${bytes(held_weights_bytes)} held weights, ${bytes(scratch_bytes)} scratch, ${bytes(kv_reserved_bytes)} KV reserved`;
}

/** Layers `[start, stop)` as people count them. */
export function layers(start, stop) {
  return stop - start === 1 ? `layer ${start}` : `layers ${start}–${stop - 1}`;
}

export function clock(wallSeconds, withSeconds = true) {
  return new Date(wallSeconds * 1000).toLocaleTimeString([], {
    hour: "2-digit", minute: "2-digit", second: withSeconds ? "2-digit" : undefined, hour12: false,
  });
}

export function day(wallSeconds) {
  return new Date(wallSeconds * 1000).toLocaleDateString([], { day: "numeric", month: "short" });
}

export function percent(fraction) {
  return `${Math.round(fraction * 100)} %`;
}

export function sentence(text) {
  return text ? text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".") : "";
}

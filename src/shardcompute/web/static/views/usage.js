// Tokens over time, by key or by model, and their sums.

import { call } from "../api.js";
import { h, mark, s, say } from "../dom.js";
import { clock, count } from "../format.js";
import { store } from "../store.js";

const SPANS = { minutes: { s: 60, kept: 60, name: "Last hour" }, hours: { s: 3600, kept: 168, name: "Last week" }, days: { s: 86_400, kept: 90, name: "Last 90 days" } };
const WIDTH = 900, HEIGHT = 240, LEFT = 44, BOTTOM = 22;
const LOOK_MS = 5000, MOST_SERIES = 8, MOST_PAGES = 10;

export function createUsage() {
  const span = chips("Time", Object.entries(SPANS).map(([value, { name }]) => [value, name]), () => look());
  const by = chips("Colour by", [["model", "By model"], ["key", "By key"]], refresh);
  const chart = s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const legend = h("div", { class: "key" });
  const body = h("tbody"), totalsTitle = h("h2", { id: "totals-title" });
  const empty = h("p", { class: "empty" }, h("strong", {}, "Nothing was used yet"), "Tokens are counted from the first answer on, and kept across restarts.");
  const filled = h("div", { class: "stack" },
    h("section", { class: "card", "aria-label": "Tokens over time" }, h("header", {}, h("div", { class: "row" }, span.element, by.element), legend), h("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": "Chart" }, chart)),
    h("section", { class: "card", "aria-labelledby": "totals-title" }, h("header", {}, totalsTitle),
      h("div", { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "Totals" }, h("table", {}, h("thead", {}, h("tr", {}, ["Key", "Model", "Requests", "Tokens in", "Tokens out"].map((text, index) => h("th", { scope: "col", class: index > 1 ? "right" : "" }, text)))), body))));
  const element = h("div", {}, h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: -1 }, "Usage"), h("p", {}, "Tokens by API key and model."))), empty, filled);
  let rows = null, labels = new Map(), timer = null;

  async function look() {
    clearTimeout(timer);
    if (store.connection === "live" && !document.hidden) {
      const wanted = span.value();
      // Who may see usage may not be one who may see keys.
      const [found, keys] = await Promise.all([rowsOf(wanted), call("GET", "/cluster/keys").catch(() => ({ data: [] }))]).catch(() => [null, null]);
      if (found && wanted === span.value()) {
        rows = found;
        labels = new Map(keys.data.map((key) => [key.id, key.label]));
        refresh();
      }
    }
    if (timer !== null) timer = setTimeout(look, rows ? LOOK_MS : 700);
  }

  function nameKey(key) {
    const label = labels.get(key);
    return !key ? "no key" : label ? `${label} (${key})` : key;
  }

  function refresh() {
    // The chips stay, so that another time can be looked at.
    empty.hidden = !rows || rows.length > 0;
    filled.hidden = !rows;
    if (!rows) return;
    say(totalsTitle, SPANS[span.value()].name);
    body.replaceChildren(...totalsOf(rows).map((row) => h("tr", {}, h("td", {}, nameKey(row.key)), h("td", {}, row.model),
      ...[row.requests, row.prompt_tokens, row.generated_tokens].map((value) => h("td", { class: "right number" }, value.toLocaleString("en"))))));
    drawChart();
  }

  function drawChart() {
    const { s: spanS, kept, name } = SPANS[span.value()];
    const series = seriesOf(rows, by.value(), by.value() === "key" ? nameKey : (model) => model);
    const now = Date.now() / 1000, end = Math.max(now - (now % spanS), ...rows.map((row) => row.start_s)), start = end - (kept - 1) * spanS;
    const columns = Array.from({ length: kept }, () => new Map());
    for (const row of rows) {
      const column = columns[Math.round((row.start_s - start) / spanS)];
      const place = series.place(row);
      column?.set(place, (column.get(place) ?? 0) + row.prompt_tokens + row.generated_tokens);
    }
    const most = nice(Math.max(1, ...columns.map((column) => [...column.values()].reduce((a, b) => a + b, 0))));
    const step = (WIDTH - LEFT) / kept, scale = (HEIGHT - BOTTOM - 8) / most;
    const parts = [];
    for (const fraction of [0, 0.5, 1]) {
      const y = HEIGHT - BOTTOM - most * fraction * scale;
      parts.push(s("line", { x1: LEFT, x2: WIDTH, y1: y, y2: y }), s("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, count(most * fraction)));
    }
    columns.forEach((column, index) => {
      let y = HEIGHT - BOTTOM;
      for (const [place, tokens] of [...column].sort((a, b) => a[0] - b[0])) {
        const height = tokens * scale;
        y -= height;
        parts.push(s("rect", { class: `hue-${place}`, x: (LEFT + index * step + step * 0.12).toFixed(1), y: y.toFixed(1), width: (step * 0.76).toFixed(1), height: height.toFixed(1), rx: Math.min(2, height / 2) }));
      }
    });
    for (let tick = 0; tick <= 4; tick += 1) {
      const index = Math.round((tick / 4) * (kept - 1));
      const text = spanS === 60 ? clock(start + index * spanS, false) : new Date((start + index * spanS) * 1000).toLocaleDateString([], { weekday: "short", day: "numeric" });
      parts.push(s("text", { x: LEFT + (index + 0.5) * step, y: HEIGHT - 5, "text-anchor": tick === 0 ? "start" : tick === 4 ? "end" : "middle" }, text));
    }
    chart.replaceChildren(...parts);
    const total = rows.reduce((sum, row) => sum + row.prompt_tokens + row.generated_tokens, 0);
    mark(chart, "aria-label", `${name}: ${total.toLocaleString("en")} tokens. The sums are in the table below.`);
    legend.replaceChildren(...series.names.map((text, index) => h("span", {}, h("i", { class: `dot hue-${index}` }), text)));
  }

  return { element, show() { timer = 0; look(); }, hide() { clearTimeout(timer); timer = null; } };
}

/** What was used by the minute is in the coordinator's memory; by the hour and by the day in its history. */
async function rowsOf(span) {
  if (span === "minutes") return (await call("GET", "/cluster/usage")).minutes;
  const { s: spanS, kept } = SPANS[span];
  const since = Math.floor(Date.now() / 1000 - kept * spanS), found = [];
  for (let before = 0, pages = 0; before !== null && pages < MOST_PAGES; pages += 1) {
    const page = await call("GET", `/cluster/history/usage?since=${since}&span=${spanS}&limit=1000${before ? `&before=${before}` : ""}`);
    found.push(...page.data);
    before = page.next;
  }
  return found;
}

function totalsOf(rows) {
  const sums = new Map();
  for (const row of rows) {
    const sum = sums.get(`${row.key} ${row.model}`) ?? { key: row.key, model: row.model, requests: 0, prompt_tokens: 0, generated_tokens: 0 };
    for (const name of ["requests", "prompt_tokens", "generated_tokens"]) sum[name] += row[name];
    sums.set(`${row.key} ${row.model}`, sum);
  }
  return [...sums.values()].sort((a, b) => b.generated_tokens - a.generated_tokens);
}

/** The largest few by name; the rest together. */
function seriesOf(rows, field, nameOf) {
  const sums = new Map();
  for (const row of rows) sums.set(row[field], (sums.get(row[field]) ?? 0) + row.prompt_tokens + row.generated_tokens);
  const order = [...sums].sort((a, b) => b[1] - a[1]).map(([name]) => name);
  const own = order.slice(0, order.length > MOST_SERIES ? MOST_SERIES - 1 : MOST_SERIES);
  const names = own.map(nameOf);
  if (order.length > own.length) names.push("others");
  return { names, place: (row) => (own.includes(row[field]) ? own.indexOf(row[field]) : own.length) };
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function chips(label, options, onChange) {
  let chosen = options[0][0];
  const buttons = options.map(([value, text]) => h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => {
    chosen = value;
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(options[index][0] === chosen)));
    onChange();
  } }, text));
  return { element: h("div", { class: "chips", role: "group", "aria-label": label }, buttons), value: () => chosen };
}

export { chips };

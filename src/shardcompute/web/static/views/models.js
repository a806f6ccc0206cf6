// What is served, what is on its way, what lies on the disk, and what loading another model would lead to.

import { call } from "../api.js";
import { confirm, h, keyed, mark, meter, pill, say, setMeter, toast } from "../dom.js";
import { bytes, memoryParts, plural, sentence } from "../format.js";
import { refreshServed } from "../feed.js";
import { store } from "../store.js";
import { createPlan } from "./plan.js";

const TONES = { serving: "good", loading: "accent", moving: "accent", recovering: "warn", unservable: "bad", unloading: "" };

export function createModels() {
  const served = h("div", { class: "models" });
  const none = h("p", { class: "empty" }, h("strong", {}, "No model is served"), "Choose one below.");
  const plan = createPlan();
  const catalogue = createCatalogue((model) => plan.choose(model));
  const element = h("div", { class: "stack" },
    h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: -1 }, "Models"), h("p", {}, "Served by this cluster, on the coordinator's disk, or fetched from the hub."))),
    h("section", { class: "card", "aria-labelledby": "served-title" }, h("header", {}, h("h2", { id: "served-title" }, "Served")), none, served),
    h("div", { class: "columns" }, plan.element, catalogue.element));
  let names = "";

  function update() {
    const view = store.cluster;
    if (!view) return;
    const items = [...view.fetches.map((fetch) => ({ key: `fetch ${fetch.model}`, fetch })), ...view.models.map((model) => ({ key: model.name, model }))];
    none.hidden = items.length > 0;
    keyed(served, items, (item) => item.key, (item) => (item.fetch ? makeFetch(item.fetch) : makeModel(item.model)), (row, item) => row.refresh(item.fetch ?? item.model, view));
    const now = view.models.map((model) => `${model.name} ${model.status}`).join() + view.fetches.length;
    if (now !== names) {
      names = now;
      refreshServed();
      catalogue.refresh();
    }
  }
  return { element, update, show: () => catalogue.refresh() };
}

function makeModel(model) {
  const state = pill("");
  const facts = h("p", { class: "muted small" });
  const reasons = h("ul", { class: "reasons" });
  const progress = meter(`Loading ${model.name}`);
  const unload = h("button", { type: "button", onclick: async () => {
    const isSure = await confirm(`Stop serving ${model.name}?`, "Requests that it is answering end with an error. Its files stay on the disk.", "Unload");
    if (isSure) act("DELETE", `/cluster/models/${model.name.split("/").map(encodeURIComponent).join("/")}`);
  } }, "Unload");
  const row = h("article", { class: "model", "data-model": model.name }, h("header", {}, h("h3", {}, model.name), state, h("div", { class: "row" }, unload)), facts, progress, reasons);
  row.refresh = (now, view) => {
    say(state, now.status);
    mark(state, "data-tone", TONES[now.status] ?? "");
    say(facts, [plural(now.layer_count, "layer"), now.weight_form, `${bytes(now.file_bytes)} file`, memoryParts(now.parts), `context of ${now.context_length.toLocaleString("en")}`, ...(now.sees ? ["sees images"] : []), `${now.ready_chains} of ${plural(now.wanted_chains, "chain")} ready`].join(" · "));
    const stages = view.chains.filter((chain) => chain.model === now.name).flatMap((chain) => chain.stages);
    const total = stages.reduce((sum, stage) => sum + stage.memory_bytes, 0);
    const done = stages.reduce((sum, stage) => sum + stage.memory_bytes * stage.fraction, 0);
    progress.hidden = now.status !== "loading" && now.status !== "recovering";
    setMeter(progress, total ? done / total : null);
    unload.disabled = now.status === "unloading";
    const short = now.missing_bytes ? [`${bytes(now.missing_bytes)} of memory are missing: join another machine, choose a smaller form, or unload another model`] : [];
    keyed(reasons, now.status === "serving" ? [] : [...short, ...now.reasons.slice(0, 6)], (text) => text, (text) => h("li", {}, text));
  };
  return row;
}

function makeFetch(fetch) {
  const state = pill("");
  const doing = h("p", { class: "muted small", role: "status" });
  const progress = meter(`Fetching ${fetch.name}`);
  const drop = h("button", { type: "button", onclick: () => act("DELETE", `/cluster/models/${fetch.model.split("/").map(encodeURIComponent).join("/")}`) }, "Cancel");
  // Its size was known only once it had been fetched: now it turns out that others would have to give way.
  const replace = h("button", { type: "button", onclick: async () => {
    if (await confirm(`Replace what is served by ${fetch.name}?`, `${sentence(latest.error)} Answers that run are finished first; new requests for it are refused from now on.`, "Replace")) {
      act("POST", "/cluster/models", { model: latest.model, form: latest.form, chains: latest.chains, replace: true });
    }
  } }, "Replace");
  let latest = fetch;
  const row = h("article", { class: "model" }, h("header", {}, h("h3", {}, fetch.name), state, h("div", { class: "row" }, replace, drop)), doing, progress);
  row.refresh = (now) => {
    const isFailed = now.status === "failed";
    latest = now;
    replace.hidden = !isFailed || now.error_kind !== "WouldReplaceError";
    say(state, isFailed ? "failed" : now.chains ? "fetching" : "pulling");
    mark(state, "data-tone", isFailed ? "bad" : "accent");
    say(drop, isFailed ? "Dismiss" : "Cancel");
    say(doing, isFailed ? now.error : `${now.doing}${now.total_bytes ? `: ${bytes(now.done_bytes)} of ${bytes(now.total_bytes)}` : ""}`);
    progress.hidden = isFailed;
    setMeter(progress, now.total_bytes ? now.done_bytes / now.total_bytes : null);
  };
  return row;
}

function createCatalogue(onChoose) {
  const list = h("ul", { class: "models" });
  const empty = h("p", { class: "empty" }, "Looking at the disk…");
  const element = h("section", { class: "card", "aria-labelledby": "catalogue-title" }, h("header", {}, h("h2", { id: "catalogue-title" }, "On the coordinator's disk")), empty, list);
  async function refresh() {
    let entries;
    try {
      entries = (await call("GET", "/cluster/catalogue")).data;
    } catch (error) {
      say(empty, error.status === 401 ? "" : error.message);
      return;
    }
    empty.hidden = entries.length > 0;
    keyed(list, entries, (entry) => `${entry.model} ${entry.is_here}`, (entry) => {
      const pull = h("button", { type: "button", onclick: () => act("POST", "/cluster/pulls", { model: entry.model }) }, "Pull");
      return h("li", { class: "model" }, h("header", {}, h("h3", {}, entry.model), pill(entry.damage ? "damaged" : entry.is_here ? "here" : "not here yet", entry.damage ? "bad" : entry.is_here ? "good" : ""),
        h("div", { class: "row" }, entry.is_here ? "" : pull, h("button", { type: "button", onclick: () => onChoose(entry.model) }, "Choose"))),
        h("p", { class: "muted small" }, entry.damage || `${entry.name} · ${bytes(entry.size_bytes)} file`));
    });
  }
  return { element, refresh };
}

export async function act(method, path, body) {
  try {
    return await call(method, path, body);
  } catch (error) {
    toast(error.message);
    return null;
  }
}

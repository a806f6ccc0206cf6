// A model before it is loaded: where its layers would go, why there, and how fast it would be.

import { call } from "../api.js";
import { confirm, h, say } from "../dom.js";
import { bytes, layers, memoryParts, plural, rate, seconds, sentence } from "../format.js";
import { hueOf } from "../store.js";

const FORMS = [["native", "as stored"], ["int8", "int8"], ["int4", "int4"], ["mixed", "mixed int4/int8"], ["float32", "float32"]];

export function createPlan() {
  const model = h("input", { id: "plan-model", placeholder: "org/repo, org/repo:Q4_K_M, smollm2 or a folder", autocomplete: "off", spellcheck: "false", required: true, maxlength: 4096 });
  const form = h("select", { id: "plan-form" }, FORMS.map(([value, text]) => h("option", { value }, text)));
  const chains = h("input", { id: "plan-chains", type: "number", min: 1, max: 64, value: 1 });
  const preview = h("button", { type: "submit" }, "Preview");
  const load = h("button", { type: "button", class: "primary", onclick: () => load_() }, "Load");
  const pull = h("button", { type: "button", onclick: () => run("/cluster/pulls") }, "Only pull");
  const status = h("p", { class: "small", role: "status" });
  const result = h("div", { class: "plan" });
  const order = h("form", { class: "stack", onsubmit: (event) => { event.preventDefault(); run("/cluster/plan"); } },
    h("div", { class: "field" }, h("label", { for: "plan-model" }, "Model"), model),
    h("div", { class: "row" },
      h("div", { class: "field grow" }, h("label", { for: "plan-form" }, "Weights in memory"), form),
      h("div", { class: "field" }, h("label", { for: "plan-chains" }, "Chains"), chains)),
    h("div", { class: "row" }, preview, load, pull), status, result);
  const element = h("section", { class: "card", "aria-labelledby": "plan-title" }, h("header", {}, h("h2", { id: "plan-title" }, "Load a model")), order);

  /** Loads it; where others would have to give way, asks first and says what happens to them. */
  async function load_() {
    await run("/cluster/models");
    if (!refusal) return;
    const what = refusal;
    if (await confirm("Replace what is served?", `${sentence(what)} Answers that run are finished first; new requests for it are refused from now on.`, "Replace")) await run("/cluster/models", true);
    else say(status, "Nothing was changed.");
  }

  let refusal = null;

  async function run(path, replaces = false) {
    if (!order.reportValidity()) return;
    for (const button of [preview, load, pull]) button.disabled = true;
    result.replaceChildren();
    status.className = "small muted";
    say(status, path === "/cluster/plan" ? "Looking at the model…" : "");
    refusal = null;
    const wanted = { model: model.value.trim() };
    if (replaces) wanted.replace = true;
    if (path !== "/cluster/pulls") Object.assign(wanted, { form: form.value, chains: Number(chains.value) });
    try {
      const answer = await call("POST", path, wanted);
      if (path === "/cluster/plan") {
        say(status, `${answer.model}: ${plural(answer.layer_count, "layer")}, ${bytes(answer.file_bytes)} file; in memory ${bytes(answer.memory_bytes)}: ${memoryParts(answer.parts)}`);
        result.replaceChildren(...replacing(answer), ...answer.chains.map((chain, index) => drawChain(chain, index, answer)));
      } else say(status, `${answer.name} is on its way; see above.`);
    } catch (error) {
      if (error.status === 409 && path === "/cluster/models" && !replaces) refusal = error.message;
      status.className = "small bad";
      say(status, error.message);
    } finally {
      for (const button of [preview, load, pull]) button.disabled = false;
    }
  }

  function choose(name) {
    model.value = name;
    run("/cluster/plan");
    model.focus();
  }
  return { element, choose };
}

/** Who would have to give way. */
function replacing({ replaces }) {
  return replaces?.length ? [h("p", { class: "warn small" }, `It would take the place of ${replaces.join(" and ")}: there is not enough memory for both. You are asked before that happens.`)] : [];
}

function drawChain(chain, index, plan) {
  const title = plan.chains.length > 1 ? h("h3", {}, `Chain ${index + 1}`) : "";
  const weighed = (chain.alternatives ?? []).map((each) => `${each.kind}: ${each.layout}, ${rate(each.predicted_tokens_per_s_one_stream)} for one stream, ${rate(each.predicted_tokens_per_s_many)} for many${each.is_chosen ? " ← chosen" : ""}`);
  const reasons = h("ul", { class: "reasons" }, [...(weighed.length > 1 ? [...weighed, sentence(chain.reason_of_choice)] : []), ...chain.reasons, ...chain.left_out.map((node) => `${node.name} is left out: ${node.why}${node.duty ? `; it ${node.duty}` : ""}`)].slice(0, 16).map((text) => h("li", {}, text)));
  if (!chain.is_possible) {
    return h("div", { class: "plan" }, title, h("p", { class: "bad" }, `It does not fit: ${bytes(chain.missing_bytes)} are missing. Join another machine, or choose a smaller form.`), reasons);
  }
  const stages = chain.stages.map((stage) => {
    const device = stage.device === "cpu" || !stage.device_label ? "" : `${stage.device_label} · `;
    const item = h("li", { class: hueOf(stage.node) }, h("b", { class: "cut" }, stage.name), h("span", { class: "cut" }, `${layers(stage.start, stage.stop)}${stage.ranks > 1 ? `, rank ${stage.rank + 1} of ${stage.ranks}` : ""}`), h("span", { class: "cut muted" }, `${device}${bytes(stage.memory_bytes)} of ${bytes(stage.offered_bytes)} · ${seconds(stage.predicted_s)}`));
    item.title = `${memoryParts(stage.parts)}, ${bytes(stage.process_bytes)} process, ${bytes(stage.used_bytes)} other models, of ${bytes(stage.offered_bytes)}`;
    item.style.flexGrow = String(stage.stop - stage.start);
    return item;
  });
  return h("div", { class: "plan" }, title, h("ol", { class: "layers", "aria-label": "Planned layers by machine" }, stages),
    h("div", { class: "speeds" },
      h("div", {}, h("b", { class: "number" }, rate(chain.predicted_tokens_per_s_one_stream)), h("span", { class: "muted small" }, "expected for one stream")),
      h("div", {}, h("b", { class: "number" }, rate(chain.predicted_tokens_per_s_many)), h("span", { class: "muted small" }, "for many at once"))),
    h("p", { class: "small bottleneck" }, sentence(chain.bottleneck)),
    (chain.cost_told ?? []).length ? h("p", { class: "small muted cost" }, chain.cost_told.map(sentence).join(" ")) : "", reasons);
}

// How another machine joins: a line to paste there, or a code to type. Both are secret, so they are made when they are
// wanted and shown once.

import { call } from "../api.js";
import { copyable, h, toast } from "../dom.js";

const LIVES = [["an hour", 3600], ["a day", 86_400], ["a week", 604_800]];

/** The same as a link, whose secret is behind # and sent to nobody, and as what a phone reads. */
function invitation(token) {
  if (!token.link) return [];
  return [copyable(token.link, "invitation link"),
    h("img", { class: "qr", alt: "QR code of the invitation link", src: `data:image/svg+xml,${encodeURIComponent(token.qr)}` })];
}

export function createJoin() {
  const life = h("select", { id: "join-life" }, LIVES.map(([text, value]) => h("option", { value, selected: value === 86_400 }, text)));
  const uses = h("select", { id: "join-uses" }, h("option", { value: "8" }, "eight"), h("option", { value: "1" }, "one"), h("option", { value: "" }, "any number"));
  const button = h("button", { type: "button", class: "primary", onclick: make }, "Make a join line");
  const codeButton = h("button", { type: "button", onclick: makeCode }, "Show a pairing code");
  const place = h("div", { class: "stack" });
  const hint = h("p", { class: "muted small" });
  const element = h("section", { class: "card join", "aria-labelledby": "join-title" },
    h("header", {}, h("h2", { id: "join-title" }, "Add a machine")),
    h("div", { class: "stack" },
      h("p", { class: "muted small" }, "Install ShardCompute there and paste one line. It measures itself, fetches its share of the weights and takes part."),
      h("div", { class: "pair" },
        h("div", { class: "field" }, h("label", { for: "join-life" }, "Valid for"), life),
        h("div", { class: "field" }, h("label", { for: "join-uses" }, "Machines"), uses)),
      h("div", { class: "row" }, button, codeButton), place, hint));
  let isNear = false;

  async function make() {
    button.disabled = true;
    try {
      const token = await call("POST", "/cluster/tokens", { expires_s: Number(life.value), max_uses: uses.value ? Number(uses.value) : null, origin: location.origin });
      const line = `shardcompute join ${token.token}${isNear ? " --data-dir FOLDER" : ""}`;
      place.replaceChildren(copyable(line, "join line"), ...invitation(token),
        h("p", { class: "muted small" }, "Whoever has this line or link can join. They are not shown again."));
    } catch (error) {
      toast(error.message);
    } finally {
      button.disabled = false;
    }
  }

  async function makeCode() {
    codeButton.disabled = true;
    try {
      const made = await call("POST", "/cluster/pairing", {});
      place.replaceChildren(copyable(made.code, "pairing code"), h("p", { class: "muted small" },
        `On a machine of the same network run: shardcompute join. Where it does not find this cluster, add --at ${location.hostname}:${made.join_port}. The code is good for one machine and ${Math.round(made.life_s / 60)} minutes; after a wrong try, make another.`));
    } catch (error) {
      toast(error.message);
    } finally {
      codeButton.disabled = false;
    }
  }

  function update(view) {
    isNear = /^\w+:\/\/(127\.|localhost|\[::1\])/.test(view.url);
    hint.hidden = !isNear;
    if (isNear && !hint.textContent) hint.textContent = "This cluster listens to its own machine only. Started with --host 0.0.0.0, it lets other machines join.";
  }
  return { element, update };
}

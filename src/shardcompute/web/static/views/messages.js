// One message of a conversation on the page: what was said, as Markdown, and what can be done with it. An answer that comes
// token by token shows when each came, and says where a machine was lost under it.

import { h, mark, say } from "../dom.js";
import { plural, seconds } from "../format.js";
import { render } from "../markdown.js";
import { createStrip } from "./strip.js";

/** What a person said; `edit(text)` asks again with other words. */
export function createQuestion(message, { edit }) {
  const text = h("div", { class: "text" }, message.content);
  const pen = h("button", { type: "button", class: "ghost small", onclick: begin }, "Edit");
  const tools = h("div", { class: "tools" }, pen);
  const element = h("article", { class: "said user" }, h("span", { class: "who" }, "You"), text, tools);

  function begin() {
    const field = h("textarea", { "aria-label": "Edit your message", rows: 3 });
    field.value = message.content;
    const close = () => { form.replaceWith(text); tools.hidden = false; pen.focus(); };
    const form = h("form", { class: "editing", onsubmit: (event) => { event.preventDefault(); if (field.value.trim()) edit(field.value.trim()); } },
      field, h("div", { class: "row end" }, h("span", { class: "muted small" }, "What follows is asked again."), h("button", { type: "button", onclick: close }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Send")));
    form.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); close(); } });
    text.replaceWith(form);
    tools.hidden = true;
    field.focus();
  }
  return { element, update({ isIdle }) { pen.disabled = !isIdle; } };
}

/** What a model said, or is saying. `message` is filled as it comes: content, interruptions, note, error, finish. */
export function createAnswer(message, { regenerate, resume }) {
  const body = h("div", { class: "text markdown" });
  const notes = h("div", { class: "rescues" });
  const waiting = h("p", { class: "rescue is-waiting", role: "status", hidden: true });
  const words = h("p", { class: "bad small", role: "alert" });
  const stripPlace = h("div");
  const past = h("p", { class: "muted small number" });
  const again = h("button", { type: "button", class: "ghost small", onclick: regenerate }, "Regenerate");
  const further = h("button", { type: "button", class: "ghost small", onclick: resume }, "Continue");
  const copy = h("button", { type: "button", class: "ghost small", onclick: copyText }, "Copy");
  const tools = h("div", { class: "tools" }, copy, further, again);
  const element = h("article", { class: "said" }, h("span", { class: "who" }, message.model), body, waiting, notes, words, stripPlace, past, tools);
  let strip = null, isDue = false, shownNotes = 0;
  draw();

  function draw() {
    isDue = false;
    render(body, message.content);
    for (const each of message.interruptions.slice(shownNotes)) notes.append(h("p", { class: "rescue", "data-lost": each.lost.length ? "" : null }, tell(each)));
    shownNotes = message.interruptions.length;
    say(words, message.error ?? "");
    say(past, strip ? "" : message.told ?? "");
  }

  async function copyText() {
    try {
      await navigator.clipboard.writeText(message.content);
    } catch {
      getSelection().selectAllChildren(body);
      document.execCommand("copy");
    }
    say(copy, "Copied");
    setTimeout(() => say(copy, "Copy"), 1600);
  }

  return {
    element,
    begin() {
      strip = createStrip();
      stripPlace.replaceChildren(strip.element);
      body.classList.add("caret");
      draw();
    },
    take(chunk) {
      const piece = chunk.choices?.[0]?.delta?.content;
      if (chunk.interruptions) message.interruptions.push(...chunk.interruptions);
      if (piece) {
        message.content += piece;
        strip.tick(Boolean(chunk.interruptions));
      }
      if (chunk.timings) strip.timings(chunk.timings);
      if (chunk.usage) strip.usage(chunk.usage);
      message.finish = chunk.choices?.[0]?.finish_reason ?? message.finish;
      if ((piece || chunk.interruptions) && !isDue) {
        isDue = true;
        requestAnimationFrame(draw);
      }
    },
    end() {
      body.classList.remove("caret");
      waiting.hidden = true;
      strip?.note(message.finish === "length" ? "cut off at the most tokens" : message.finish === "stopped" ? "stopped" : "");
      strip?.close();
      message.told = strip?.told() ?? message.told;
      draw();
    },
    /** While nothing comes because the chain is being repaired, that is said where the answer is awaited. */
    wait(reason) {
      waiting.hidden = !reason;
      say(waiting, reason ? `${reason}. The answer goes on as soon as another machine has taken over; what was said stays.` : "");
    },
    update({ isIdle, isLast }) {
      tools.hidden = !isIdle;
      again.hidden = !isLast;
      further.hidden = !isLast || !message.content || message.finish === "stop";
      say(again, message.error && !message.content ? "Retry" : "Regenerate");
      mark(again, "class", message.error ? "primary small" : "ghost small");
      copy.hidden = !message.content;
    },
  };
}

/** A rescue in a sentence or two. */
export function tell({ lost, taken_over_by, pause_s, after_tokens }) {
  const by = taken_over_by.length ? list(taken_over_by) : "";
  const when = after_tokens ? `after ${plural(after_tokens, "token")}` : "before the first token";
  const pause = `The answer paused for ${seconds(pause_s)}; no token was lost.`;
  if (lost.length) {
    const isSame = by && list(lost) === by;
    const took = isSame ? `; ${lost.length > 1 ? "they are" : "it is"} back` : by ? `; ${by} took over` : "";
    return `${list(lost)} ${lost.length > 1 ? "were" : "was"} lost ${when}${took}. ${pause}`;
  }
  return by ? `Layers moved to ${by} ${when}. ${pause}` : `A link was replaced ${when}. ${pause}`;
}

function list(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

// A conversation with a served model. What the model says is text and stays text.

import { ApiError, events, send } from "../api.js";
import { announce, h, keyed, say } from "../dom.js";
import { store } from "../store.js";
import { refreshServed } from "../feed.js";
import { createStrip } from "./strip.js";

export function createChat() {
  const model = h("select", { id: "chat-model" });
  const talk = h("div", { class: "talk", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: 0 });
  const empty = h("div", { class: "empty" }, h("strong", {}, "Say something"), "Each answer shows when its tokens came, so that a slow machine, or one that was replaced, can be seen.");
  const text = h("textarea", { id: "chat-text", rows: 1, placeholder: "Ask the model…", "aria-label": "Message" });
  const submit = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => running?.abort() }, "Stop");
  const system = h("input", { id: "chat-system", autocomplete: "off" });
  const most = h("input", { id: "chat-most", type: "number", min: 1, max: 100000, value: 512 });
  const heat = h("input", { id: "chat-heat", type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
  const clear = h("button", { type: "button", class: "ghost", onclick: forget }, "New conversation");
  const settings = h("details", { class: "settings" }, h("summary", {}, "Settings"),
    h("div", { class: "row" },
      h("div", { class: "field grow" }, h("label", { for: "chat-system" }, "System prompt"), system),
      h("div", { class: "field" }, h("label", { for: "chat-most" }, "Most tokens"), most),
      h("div", { class: "field" }, h("label", { for: "chat-heat" }, "Temperature"), heat)));
  const composer = h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); ask(); } }, text,
    h("div", { class: "row" }, h("div", { class: "row" }, h("label", { for: "chat-model", class: "unseen" }, "Model"), model), h("div", { class: "row" }, stop, submit)));
  const element = h("div", { class: "chat" },
    h("div", { class: "head" }, h("h1", { tabindex: -1 }, "Chat"), clear), talk, h("div", { class: "stack" }, settings, composer));
  talk.append(empty);
  const messages = [];
  let running = null;

  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      composer.requestSubmit();
    }
  });
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });

  function update() {
    const names = store.served;
    const chosen = model.value;
    keyed(model, names.length ? names : ["no model yet"], (name) => name, (name) => h("option", { value: names.length ? name : "" }, name));
    if (names.includes(chosen)) model.value = chosen;
    submit.disabled = running !== null || names.length === 0;
  }

  function forget() {
    running?.abort();
    messages.length = 0;
    talk.replaceChildren(empty);
    text.focus();
  }

  async function ask() {
    const content = text.value.trim();
    if (!content || running || !model.value) return;
    text.value = "";
    empty.remove();
    messages.push({ role: "user", content });
    talk.append(h("article", { class: "said user" }, h("span", { class: "who" }, "You"), h("div", { class: "text" }, content)));
    const answer = createAnswer(model.value);
    talk.append(answer.element);
    talk.scrollTop = talk.scrollHeight;
    running = new AbortController();
    stop.hidden = false;
    update();
    try {
      await stream(answer, running.signal);
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError" || running.signal.aborted) answer.end("stopped");
      else answer.fail(error.message);
    } finally {
      if (answer.content()) messages.push({ role: "assistant", content: answer.content() });
      else messages.pop();
      running = null;
      stop.hidden = true;
      update();
    }
  }

  async function stream(answer, signal) {
    const first = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    const response = await send("POST", "/v1/chat/completions", { signal, body: {
      model: model.value, messages: [...first, ...messages], stream: true, stream_options: { include_usage: true },
      max_tokens: Math.min(Number(most.value) || 512, Math.floor((store.contexts.get(model.value) ?? Infinity) / 2)), temperature: Number(heat.value) } });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
      answer.take(chunk);
      if (isAtEnd) talk.scrollTop = talk.scrollHeight;
    }
    answer.end();
  }

  return { element, update, show: () => { refreshServed(); } };
}

function createAnswer(model) {
  const strip = createStrip();
  const body = h("div", { class: "text caret" });
  const words = h("p", { class: "bad small", role: "alert" });
  const element = h("article", { class: "said" }, h("span", { class: "who" }, model), body, words, strip.element);
  let content = "", isDue = false;

  function draw() {
    isDue = false;
    render(body, content);
  }

  return {
    element,
    content: () => content,
    take(chunk) {
      const piece = chunk.choices?.[0]?.delta?.content;
      if (piece) {
        content += piece;
        strip.tick();
        if (!isDue) {
          isDue = true;
          requestAnimationFrame(draw);
        }
      }
      if (chunk.timings) strip.timings(chunk.timings);
      if (chunk.usage) strip.usage(chunk.usage);
      if (chunk.choices?.[0]?.finish_reason === "length") strip.note("cut off at the most tokens");
    },
    end(note) {
      draw();
      body.classList.remove("caret");
      if (note) strip.note(note);
      strip.close();
    },
    fail(message) {
      this.end();
      say(words, message);
    },
  };
}

/** Text, with fenced code set apart. Only the part that grows is touched. */
function render(place, content) {
  const parts = content.split(/^```[^\n]*$/m);
  parts.forEach((part, index) => {
    const isCode = index % 2 === 1;
    let element = place.children[index];
    if (!element || (element.tagName === "PRE") !== isCode) {
      element?.remove();
      element = isCode ? h("pre", { tabindex: 0, "aria-label": "Code" }) : h("span");
      place.insertBefore(element, place.children[index] ?? null);
    }
    say(element, isCode ? part.replace(/^\n|\n$/g, "") : part);
  });
  while (place.children.length > parts.length) place.lastChild.remove();
}

// A conversation with a served model: asked, answered token by token, asked otherwise, gone on with. Nothing of it is lost by
// a reload, another view or a failed request, and no other than this browser keeps it.

import { ApiError, events, send } from "../api.js";
import { chatSettings, forget, forgetAll, lastConversation, listConversations, newConversation, openConversations, save, saveSettings, setKeeps } from "../conversations.js";
import { announce, confirm, h, keyed, mark, say } from "../dom.js";
import { refreshServed } from "../feed.js";
import { store } from "../store.js";
import { createAnswer, createQuestion } from "./messages.js";

const SAVE_MS = 1000, SLOW_MS = 1500;

export function createChat() {
  openConversations();
  const parts = createParts({ ask: () => send_(), stop: () => running?.abort(), fresh: () => open(newConversation()), remove, clear, keep });
  const { element, talk, text, model, submit, stop, past } = parts;
  const shown = new Map();
  let conversation = lastConversation(), running = null, timer = null, heardAt = 0;

  text.addEventListener("input", () => keepDraft());
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      parts.composer.requestSubmit();
    }
  });
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  past.addEventListener("change", () => {
    const chosen = listConversations().find((each) => each.id === past.value);
    if (chosen) open(chosen);
  });
  // A reload, or a closed tab, may come in the middle of an answer.
  addEventListener("pagehide", keepNow);
  document.addEventListener("visibilitychange", () => document.hidden && keepNow());

  function keepDraft() {
    conversation.draft = text.value;
    keepSoon();
  }

  function keepSoon() {
    timer ??= setTimeout(keepNow, SAVE_MS);
  }

  function keepNow() {
    clearTimeout(timer);
    timer = null;
    conversation.draft = text.value;
    const isKept = save(conversation);
    parts.unkept.hidden = isKept || !chatSettings().keeps || !conversation.messages.length;
  }

  function open(wanted) {
    running?.abort();
    if (conversation.messages.length || conversation.draft) keepNow();
    conversation = wanted;
    shown.clear();
    talk.replaceChildren();
    text.value = conversation.draft ?? "";
    if (conversation.model) model.dataset.wanted = conversation.model;
    saveSettings({ newest: conversation.id });
    update();
    talk.scrollTop = talk.scrollHeight;
    text.focus();
  }

  function update() {
    updateModels();
    const { messages } = conversation, isIdle = running === null;
    parts.empty.hidden = messages.length > 0;
    if (!parts.empty.parentNode) talk.prepend(parts.empty);
    for (const [message, view] of shown) if (!messages.includes(message)) { view.element.remove(); shown.delete(message); }
    messages.forEach((message, index) => {
      const view = shown.get(message) ?? show(message);
      view.update({ isIdle, isLast: index === messages.length - 1 });
    });
    submit.disabled = !isIdle || store.served.length === 0;
    stop.hidden = isIdle;
    updatePast();
  }

  function show(message) {
    const view = message.role === "user"
      ? createQuestion(message, { edit: (content) => editAt(message, content) })
      : createAnswer(message, { regenerate: () => regenerate(message), resume: () => answer(message) });
    shown.set(message, view);
    talk.append(view.element);
    return view;
  }

  function updateModels() {
    const names = store.served, chosen = model.dataset.wanted || model.value;
    keyed(model, names.length ? names : ["no model yet"], (name) => name, (name) => h("option", { value: names.length ? name : "" }, name));
    if (names.includes(chosen)) model.value = chosen;
  }

  function updatePast() {
    const known = listConversations();
    parts.history.hidden = known.length === 0;
    const items = known.includes(conversation) ? known : [{ id: "", title: "New conversation" }, ...known];
    keyed(past, items, (each) => `${each.id} ${each.title}`, (each) => h("option", { value: each.id }, each.title || "Untitled"));
    past.value = known.includes(conversation) ? conversation.id : "";
    parts.removal.disabled = !known.includes(conversation);
  }

  function send_() {
    const content = text.value.trim();
    if (!content || running || !model.value) return;
    text.value = "";
    conversation.messages.push({ role: "user", content });
    answer();
  }

  function editAt(message, content) {
    if (running) return;
    conversation.messages.splice(conversation.messages.indexOf(message), Infinity, { role: "user", content });
    answer();
  }

  function regenerate(message) {
    if (running) return;
    conversation.messages.splice(conversation.messages.indexOf(message));
    answer();
  }

  /** Has the conversation answered; `cut`, an answer that ended early, is gone on with. */
  async function answer(cut = null) {
    if (running || !model.value) return;
    conversation.model = model.value;
    model.dataset.wanted = model.value;
    const message = cut ?? { role: "assistant", content: "", model: model.value, interruptions: [] };
    const asked = messagesFor(conversation.messages, cut);
    if (!cut) conversation.messages.push(message);
    Object.assign(message, { finish: "cut", error: "" });
    running = new AbortController();
    const own = running, mine = conversation;
    update();
    const view = shown.get(message);
    view.begin();
    talk.scrollTop = talk.scrollHeight;
    keepNow();
    const watch = setInterval(() => view.wait(performance.now() - heardAt > SLOW_MS ? trouble(message.model) : ""), 500);
    try {
      await stream(view, message, asked, own.signal);
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError" || own.signal.aborted) message.finish = "stopped";
      else message.error = error.message;
    } finally {
      clearInterval(watch);
      if (running === own) running = null;
      view.end();
      if (conversation === mine) keepNow();
      else save(mine);
      update();
    }
  }

  async function stream(view, message, asked, signal) {
    const { system, most, heat } = chatSettings();
    heardAt = performance.now();
    const room = Math.floor((store.contexts.get(message.model) ?? Infinity) / 2);
    const body = { model: message.model, messages: [...(system.trim() ? [{ role: "system", content: system.trim() }] : []), ...asked],
      stream: true, stream_options: { include_usage: true }, max_tokens: Math.min(most, room), temperature: heat };
    if (asked.at(-1).role === "assistant") body.continue_final_message = true;
    const response = await send("POST", "/v1/chat/completions", { signal, body });
    let isWhole = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") { isWhole = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      heardAt = performance.now();
      const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
      view.take(chunk);
      view.wait("");
      if (isAtEnd) requestAnimationFrame(() => (talk.scrollTop = talk.scrollHeight));
      keepSoon();
    }
    if (!isWhole) throw new ApiError(0, "The connection ended before the answer did.");
  }

  async function remove() {
    if (!(await confirm("Delete this conversation?", "It is kept in this browser alone, and cannot be brought back.", "Delete"))) return;
    const gone = conversation;
    gone.messages = [];
    open(listConversations()[0] ?? newConversation());
    forget(gone);
    update();
  }

  async function clear() {
    if (!(await confirm("Delete all conversations?", "All that this browser keeps of them, and cannot be brought back.", "Delete all"))) return;
    running?.abort();
    conversation.messages = [];
    forgetAll();
    open(newConversation());
  }

  function keep(isWanted) {
    setKeeps(isWanted);
    if (isWanted) keepNow();
  }

  text.value = conversation.draft ?? "";
  if (conversation.model) model.dataset.wanted = conversation.model;
  model.addEventListener("change", () => (model.dataset.wanted = model.value));
  return { element, update, show: () => { refreshServed(); talk.scrollTop = talk.scrollHeight; } };
}

/** What a model is shown: every question with its answer; those that failed without a word are left out. */
function messagesFor(messages, cut) {
  const kept = messages.filter((message) => message.content && (message.role === "user" || message !== cut));
  const plain = kept.map(({ role, content }) => ({ role, content }));
  return cut?.content ? [...plain, { role: "assistant", content: cut.content }] : plain;
}

/** Why nothing comes, as far as the cluster tells. */
function trouble(model) {
  const chains = store.cluster?.chains.filter((chain) => chain.model === model || model === "default") ?? [];
  const hurt = chains.find((chain) => chain.status === "recovering" || chain.status === "broken");
  if (!hurt) return "";
  // Its shape may be another one by now, but the reason still names who was lost.
  const lost = store.cluster.nodes.filter((node) => node.status === "lost" && (hurt.stages.some((stage) => stage.node === node.id) || hurt.reason.includes(node.name)));
  return lost.length ? `${lost.map((node) => node.name).join(", ")} ${lost.length > 1 ? "are" : "is"} lost` : hurt.reason || "The chain is being repaired";
}

function createParts(on) {
  const settings = chatSettings();
  const model = h("select", { id: "chat-model" });
  const talk = h("div", { class: "talk", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: 0 });
  const empty = h("div", { class: "empty" }, h("strong", {}, "Say something"), "Each answer shows when its tokens came. Where a machine is lost and another takes over, the answer says so and goes on.");
  const text = h("textarea", { id: "chat-text", rows: 1, placeholder: "Ask the model…", "aria-label": "Message" });
  const submit = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", hidden: true, onclick: on.stop }, "Stop");
  const field = (id, label, attributes, save, isWide) => {
    const input = h("input", { id, onchange: () => save(input), ...attributes });
    return h("div", { class: isWide ? "field grow" : "field" }, h("label", { for: id }, label), input);
  };
  const keeps = h("input", { id: "chat-keeps", type: "checkbox", onchange: () => on.keep(keeps.checked) });
  keeps.checked = settings.keeps;
  const box = h("details", { class: "settings" }, h("summary", {}, "Settings"),
    h("div", { class: "row" },
      field("chat-system", "System prompt", { autocomplete: "off", value: settings.system }, (input) => saveSettings({ system: input.value }), true),
      field("chat-most", "Most tokens", { type: "number", min: 1, max: 100000, value: settings.most }, (input) => saveSettings({ most: Number(input.value) || 512 })),
      field("chat-heat", "Temperature", { type: "number", min: 0, max: 2, step: 0.1, value: settings.heat }, (input) => saveSettings({ heat: Number(input.value) }))),
    h("div", { class: "row keeping" }, h("label", { for: "chat-keeps" }, keeps, " Keep conversations in this browser"), h("button", { type: "button", class: "danger", onclick: on.clear }, "Delete all conversations")));
  const unkept = h("p", { class: "bad small", role: "status", hidden: true }, "This browser has no room to keep this conversation.");
  const past = h("select", { id: "chat-past" });
  const removal = h("button", { type: "button", class: "ghost", onclick: on.remove }, "Delete");
  const history = h("div", { class: "row past" }, h("label", { for: "chat-past", class: "unseen" }, "Kept conversations"), past, removal);
  const composer = h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); on.ask(); } }, text,
    h("div", { class: "row" }, h("div", { class: "row" }, h("label", { for: "chat-model", class: "unseen" }, "Model"), model), h("div", { class: "row" }, stop, submit)));
  const element = h("div", { class: "chat" },
    h("div", { class: "head" }, h("h1", { tabindex: -1 }, "Chat"), h("div", { class: "row" }, history, h("button", { type: "button", class: "ghost", onclick: on.fresh }, "New conversation"))),
    talk, h("div", { class: "stack" }, unkept, box, composer));
  return { element, talk, empty, text, model, submit, stop, composer, past, history, removal, unkept };
}

// Conversations, kept in this browser if people want that: one entry each, few and small enough that there is room for all.
// Nothing here is ever sent anywhere; what cannot be kept is kept for as long as the page is open.

const PREFIX = "shardcompute.chat.", SETTINGS = "shardcompute.chat-settings";
const MOST = 50, MOST_CHARACTERS = 2_000_000;
const USUAL = { keeps: true, system: "", most: 512, heat: 0.7, newest: "" };

const all = new Map();
let settings = { ...USUAL };

/** Reads what was kept; whatever is not a conversation is left out. */
export function openConversations() {
  settings = { ...USUAL, ...parsed(localStorage.getItem(SETTINGS)) };
  for (const key of Object.keys(localStorage).filter((each) => each.startsWith(PREFIX))) {
    const found = parsed(localStorage.getItem(key));
    if (found && Array.isArray(found.messages) && found.messages.every(isMessage)) all.set(found.id, { title: "", draft: "", model: "", updated: 0, ...found });
    else localStorage.removeItem(key);
  }
}

function isMessage(message) {
  return message && ["user", "assistant"].includes(message.role) && typeof message.content === "string";
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}

/** Newest first; those without a word in them are not listed. */
export function listConversations() {
  return [...all.values()].filter((each) => each.messages.length).sort((a, b) => b.updated - a.updated);
}

/** The one that was open last, with its draft, or a new one. */
export function lastConversation() {
  return all.get(settings.newest) ?? newConversation();
}

export function newConversation() {
  const conversation = { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", model: "", updated: Date.now(), draft: "", messages: [] };
  all.set(conversation.id, conversation);
  return conversation;
}

/** Keeps it as it is now. False: there is no room for it, or it is not wanted. */
export function save(conversation) {
  conversation.updated = Date.now();
  conversation.title ||= (conversation.messages.find((message) => message.role === "user")?.content ?? "").trim().slice(0, 80);
  all.set(conversation.id, conversation);
  saveSettings({ newest: conversation.id });
  if (!settings.keeps) return false;
  makeRoom(conversation);
  return write(conversation);
}

function write(conversation) {
  const text = JSON.stringify(conversation);
  if (text.length > MOST_CHARACTERS) return false;
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return true;
    } catch {
      const oldest = kept().filter((each) => each.id !== conversation.id).at(-1);
      if (!oldest) return false;
      forget(oldest);
    }
  }
}

function kept() {
  return [...all.values()].sort((a, b) => b.updated - a.updated);
}

/** The oldest go first. */
function makeRoom(newest) {
  let size = 0, count = 0;
  for (const each of [newest, ...kept().filter((other) => other !== newest)]) {
    size += JSON.stringify(each).length;
    count += 1;
    if (each !== newest && (size > MOST_CHARACTERS || count > MOST)) forget(each);
  }
}

export function forget(conversation) {
  all.delete(conversation.id);
  localStorage.removeItem(PREFIX + conversation.id);
}

export function forgetAll() {
  for (const conversation of [...all.values()]) forget(conversation);
  for (const key of Object.keys(localStorage).filter((each) => each.startsWith(PREFIX))) localStorage.removeItem(key);
  saveSettings({ newest: "" });
}

export function chatSettings() {
  return settings;
}

export function saveSettings(changes) {
  settings = { ...settings, ...changes };
  const { system, newest, ...others } = settings;
  try {
    // Where nothing is to be kept, that alone is.
    localStorage.setItem(SETTINGS, JSON.stringify(settings.keeps ? settings : others));
  } catch {
    // They hold for as long as the page is open.
  }
}

/** From now on conversations are kept, or not; those that were go with it. */
export function setKeeps(keeps) {
  saveSettings({ keeps });
  if (keeps) for (const conversation of all.values()) write(conversation);
  else for (const key of Object.keys(localStorage).filter((each) => each.startsWith(PREFIX))) localStorage.removeItem(key);
}

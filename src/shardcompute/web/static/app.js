// The frame: which view is shown, the connection, the theme, the key.

import { key } from "./api.js";
import { announce, h, mark, say } from "./dom.js";
import { follow, retry } from "./feed.js";
import { clock, seconds } from "./format.js";
import { icon } from "./icons.js";
import { createInvitation } from "./invitation.js";
import { offerSignIn, signInByLink } from "./signin.js";
import { changed, isStale, store, subscribe } from "./store.js";
import { setUpTheme } from "./theme.js";
import { createChat } from "./views/chat.js";
import { createCluster } from "./views/cluster.js";
import { createConnect } from "./views/connect.js";
import { createModels } from "./views/models.js";
import { createRequests } from "./views/requests.js";
import { createUsage } from "./views/usage.js";

const VIEWS = [
  { id: "cluster", name: "Cluster", create: createCluster, needsCluster: true },
  { id: "models", name: "Models", create: createModels, needsCluster: true },
  { id: "chat", name: "Chat", create: createChat },
  { id: "requests", name: "Requests", create: createRequests, needsCluster: true },
  { id: "usage", name: "Usage", create: createUsage, needsCluster: true },
  { id: "connect", name: "Connect", create: createConnect },
];

const place = document.getElementById("view");
const lost = document.getElementById("lost");
const lostWords = h("span", { role: "alert" });
const age = h("span", { class: "number" });
const again = h("button", { type: "button", onclick: retry }, "Try now");
const connection = document.getElementById("connection");
const made = new Map();
let current = null;
let wasLost = false;

function choose() {
  const wanted = location.hash.replace(/^#\/?/, "");
  const offered = VIEWS.filter(isOffered);
  return offered.find((view) => view.id === wanted) ?? offered[0];
}

/** Without a cluster, and with a key for chatting alone, there is less to see. */
function isOffered(view) {
  if (store.connection === "forbidden") return view.id === "chat";
  return !view.needsCluster || store.connection !== "alone";
}

function show({ isMove = false } = {}) {
  const view = choose();
  if (current?.id !== view.id) {
    made.get(current?.id)?.hide?.();
    if (!made.has(view.id)) made.set(view.id, view.create());
    current = view;
    place.replaceChildren(made.get(view.id).element);
    made.get(view.id).show?.();
    document.title = `${view.name} · ShardCompute`;
    for (const link of document.querySelectorAll(".rail a")) mark(link, "aria-current", link.dataset.view === view.id ? "page" : null);
    if (isMove) {
      scrollTo(0, 0);
      place.querySelector("h1")?.focus();
    }
  }
  made.get(view.id).update?.();
}

function buildRail() {
  const links = VIEWS.map((view) =>
    h("a", { href: `#/${view.id}`, "data-view": view.id }, icon(view.id), h("span", {}, view.name), view.id === "requests" && h("b", { id: "running", "aria-hidden": "true" })));
  document.getElementById("rail").append(...links);
}

const WORDS = { connecting: "Connecting", live: "Live", lost: "Connection lost", refused: "Signed out", forbidden: "Chat only", alone: "Ready" };

function showConnection() {
  const isLost = store.connection === "lost";
  mark(connection, "data-state", store.connection === "alone" ? "live" : store.connection);
  say(connection.lastElementChild, WORDS[store.connection]);
  // Whoever was given a key for chatting has all that it is for; others are told how to see more.
  const isBarred = store.connection === "forbidden" && !key();
  lost.hidden = !isLost && !isBarred;
  say(lostWords, isLost ? "The connection to the server is lost." : isBarred ? store.reason : "");
  tellAge();
  if (wasLost && !isLost && store.connection === "live") announce("Connected again");
  wasLost = isLost;
  say(document.getElementById("cluster-name"), store.cluster?.name ?? "");
  const running = store.cluster ? store.cluster.load.running + store.cluster.load.waiting : 0;
  say(document.getElementById("running"), running ? String(running) : "");
  for (const view of VIEWS) {
    document.querySelector(`.rail a[data-view="${view.id}"]`).hidden = !isOffered(view);
  }
}

/** How old what is shown is, and when the next try is; not announced, as it changes every second. */
function tellAge() {
  const isLost = store.connection === "lost", wait = Math.max(0, Math.ceil((store.retryAt - Date.now()) / 1000));
  again.hidden = !isLost;
  say(age, !isLost ? "" : `${isStale() ? `What you see is ${since(store.heardAt)} old (as of ${clock(store.heardAt / 1000)}). ` : ""}${wait ? `Trying again in ${wait} s…` : "Trying again…"}`);
  // Grey is for what came from the cluster: a conversation is as true as before.
  place.classList.toggle("is-stale", isStale() && Boolean(current?.needsCluster));
}

function since(moment) {
  const passed = Math.max(0, Math.round((Date.now() - moment) / 1000));
  return passed < 60 ? `${passed} s` : seconds(passed);
}

const invitation = createInvitation();
setUpTheme(document.getElementById("theme-button"));
if (invitation) {
  document.title = "Invitation · ShardCompute";
  connection.hidden = true;
  document.getElementById("key-button").hidden = true;
  place.replaceChildren(invitation);
} else {
  lost.append(lostWords, age, again);
  setInterval(tellAge, 1000);
  await signInByLink();
  buildRail();
  offerSignIn(document.getElementById("key-button"));
  addEventListener("hashchange", () => show({ isMove: true }));
  addEventListener("resize", changed);
  subscribe(() => {
    showConnection();
    show();
  });
  show();
  follow();
}

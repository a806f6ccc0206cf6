// An invitation: the page as somebody sees it who was sent a link with a join token behind #. Nothing of it is sent anywhere, and
// nobody needs to sign in to read it.

import { copyable, h } from "./dom.js";

const LINK = /^#\/join\/(sc1\.[\w-]+)$/;

/** What to show whoever opened such a link; null for everybody else. The token does not stay in the address bar. */
export function createInvitation() {
  const token = LINK.exec(location.hash)?.[1];
  if (!token) return null;
  history.replaceState(null, "", location.pathname);
  return h("section", { class: "card join", "aria-labelledby": "invitation-title" },
    h("header", {}, h("h1", { id: "invitation-title", tabindex: -1 }, "You are invited to join a cluster")),
    h("div", { class: "stack" },
      h("p", {}, "It serves language models from many machines. On the machine that is to take part, install ShardCompute:"),
      copyable("pip install shardcompute", "install line"),
      h("p", {}, "and run:"),
      copyable(`shardcompute join ${token}`, "join line"),
      h("p", { class: "muted small" }, "Whoever has this line can join: keep it to yourself. A machine that joins sees what it computes, and is asked to compute; --only-on-mains and --only-when-idle let it rest.")));
}

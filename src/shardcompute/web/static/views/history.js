// The past of one kind, page by page: which time is wanted, what has come of it so far, and a button for older entries.

import { call } from "../api.js";
import { h } from "../dom.js";
import { chips } from "./usage.js";

const RANGES = [["lately", "Lately"], ["86400", "Day"], ["604800", "Week"], ["all", "All"]];

/** Of `kind`, in pages of so many. `onChange` after each page; `onNews` with a page's problem, an error's words, or "". */
export function createHistory(kind, size, onChange, onNews) {
  const range = chips("Time", RANGES, () => begin());
  const older = h("button", { type: "button", hidden: true, onclick: () => fetchOlder() }, "Older");
  let kept = [], next = null, asked = 0;

  async function begin() {
    kept = [];
    next = null;
    asked += 1;
    change();
    if (!isLate()) await fetchOlder();
  }

  async function fetchOlder() {
    const mine = asked, wanted = range.value();
    const since = wanted === "all" ? 0 : Math.floor(Date.now() / 1000 - Number(wanted));
    older.disabled = true;
    try {
      const page = await call("GET", `/cluster/history/${kind}?since=${since}&limit=${size}${next === null ? "" : `&before=${next}`}`);
      if (mine !== asked) return;
      kept = [...kept, ...page.data];
      next = page.next;
      onNews(page.problem);
    } catch (error) {
      if (mine === asked) onNews(error.message);
    } finally {
      older.disabled = false;
    }
    change();
  }

  function change() {
    older.hidden = isLate() || next === null;
    onChange();
  }

  /** Whether what happens now is wanted, and not the past. */
  function isLate() {
    return range.value() === "lately";
  }
  return { range: range.element, older, isLate, entries: () => kept, hasMore: () => next !== null };
}

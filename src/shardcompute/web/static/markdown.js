// Markdown as models write it, as elements. Everything is made by hand from text: no HTML is ever parsed, tags that a model
// writes are shown as they are, links lead to http and https alone, and pictures, which would be fetched from others, are
// links. What is not understood is text.

import { copyable, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8; // Quotes in quotes, lists in lists: beyond this they are text.

/** The blocks of a text: `{key, make}`, where equal keys stand for equal elements. */
export function blocksOf(text) {
  return read(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

/** Shows a text in `place`; blocks that have not changed stay the elements that they are. */
export function render(place, text) {
  const blocks = blocksOf(text), shown = (place.blocks ??= []);
  blocks.forEach((block, index) => {
    if (shown[index]?.key === block.key) return;
    const element = block.make();
    if (shown[index]) shown[index].element.replaceWith(element);
    else place.append(element);
    shown[index] = { key: block.key, element };
  });
  for (const old of shown.splice(blocks.length)) old.element.remove();
}

function read(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at, depth) ?? list(lines, at, depth) ?? table(lines, at) ?? paragraph(lines, at, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function fence(lines, at) {
  const opened = FENCE.exec(lines[at]);
  if (!opened) return null;
  const isEnd = (line) => line.trim().startsWith(opened[1]) && !line.trim().slice(opened[1].length).replaceAll(opened[1][0], "");
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).join("\n"), language = opened[2].trim().split(/\s/)[0].slice(0, 20);
  return [{ key: `code ${language} ${code}`, make: () => codeBlock(code, language) }, Math.min(end + 1, lines.length)];
}

function codeBlock(code, language) {
  const element = copyable(code, language ? `${language} code` : "code");
  if (language) element.prepend(h("span", { class: "language" }, language));
  return element;
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  // The page has h1 to h3 of its own; an answer's headings are below them.
  return found && [{ key: `h ${lines[at]}`, make: () => h("p", { class: `heading of-${found[1].length}`, role: "heading", "aria-level": Math.min(6, found[1].length + 2) }, inline(found[2])) }, at + 1];
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? [{ key: "rule", make: () => h("hr") }, at + 1] : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at]) || depth >= DEEPEST) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ key: `quote ${inner.join("\n")}`, make: () => h("blockquote", {}, read(inner, depth + 1).map((block) => block.make())) }, end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= DEEPEST) return null;
  const indent = first[1].length, isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]), isBlank = !lines[end].trim();
    const deeper = lines[end].search(/\S/) > indent;
    if (item && item[1].length <= indent + 1 && !(item[1].length > indent && deeper && item[1].length >= indent + 2)) {
      if (item[1].length < indent || /\d/.test(item[2]) !== isOrdered) break;
      items.push([item[3]]);
    } else if (isBlank) {
      const next = lines[end + 1];
      if (next === undefined || (!ITEM.test(next) && next.search(/\S/) <= indent)) break;
      items.at(-1).push("");
    } else if (deeper || (!item && items.at(-1).at(-1).trim())) {
      items.at(-1).push(lines[end].replace(new RegExp(`^ {0,${indent + (isOrdered ? 3 : 2)}}`), ""));
    } else break;
    end += 1;
  }
  const tag = isOrdered ? "ol" : "ul", start = isOrdered ? Number.parseInt(first[2], 10) : null;
  const make = () => h(tag, { class: "bullets", start: start > 1 ? start : null }, items.map((inner) => h("li", {}, itemParts(inner, depth))));
  return [{ key: `${tag} ${lines.slice(at, end).join("\n")}`, make }, end];
}

/** A short item is its words; one with more in it has blocks. */
function itemParts(inner, depth) {
  const task = /^\[([ xX])\]\s+/.exec(inner[0]);
  const lines = task ? [inner[0].slice(task[0].length), ...inner.slice(1)] : inner;
  const mark = task ? [h("span", { class: "task", role: "img", "aria-label": task[1] === " " ? "to do" : "done" }, task[1] === " " ? "☐ " : "☑ ")] : [];
  const blocks = read(lines, depth + 1);
  return [...mark, ...blocks.map((block) => (block.words ? h("span", {}, inline(block.words)) : block.make()))];
}

function table(lines, at) {
  if (!lines[at].includes("|") || !TABLE_LINE.test(lines[at + 1] ?? "") || !lines[at + 1].includes("-")) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  const head = cells(lines[at]), rows = lines.slice(at + 2, end).map(cells);
  const sides = cells(lines[at + 1]).map((mark) => (/:$/.test(mark) ? "right" : ""));
  const row = (tag, texts) => h("tr", {}, head.map((_, index) => h(tag, { class: sides[index] || null, scope: tag === "th" ? "col" : null }, inline(texts[index] ?? ""))));
  const make = () => h("div", { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, rows.map((texts) => row("td", texts)))));
  return [{ key: `table ${lines.slice(at, end).join("\n")}`, make }, end];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  const ends = (line, next) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || (depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line))) || (line.includes("|") && TABLE_LINE.test(next ?? ""));
  while (end < lines.length && !ends(lines[end], lines[end + 1])) end += 1;
  const words = lines.slice(at, end).join("\n");
  return [{ key: `p ${words}`, words, make: () => h("p", {}, inline(words)) }, end];
}

// Code first, as nothing in it counts; then links, then emphasis. Each alternative begins with a character of its own, so a
// text is read once, whatever is in it.
const INLINE = /(`+)([^`]|[^`][\s\S]{0,2000}?[^`])\1(?!`)|!?\[([^\][\n]{0,500})\]\(\s*<?([^\s()<>]{0,2000})>?(?:\s+"[^"\n]{0,200}")?\s*\)|(https?:\/\/[^\s<>"')\]]{1,2000})|(\*\*|__)(?=\S)([^\n]{0,600}?\S)\6|(~~)(?=\S)([^\n~]{1,600}?)\8|(?<![\w*])\*(?=[^\s*])([^\n*]{0,600}?[^\s*])\*(?!\w)|(?<!\w)_(?=[^\s_])([^\n_]{0,600}?[^\s_])_(?!\w)|\\([\\`*_{}[\]()#+\-.!>~|])/g;

function inline(text, depth = 0) {
  if (depth > 4) return [text];
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > at) parts.push(...broken(text.slice(at, found.index)));
    at = found.index + found[0].length;
    const [whole, ticks, code, label, target, bare, strong, strongText, strike, struck, starred, underlined, escaped] = found;
    if (ticks) parts.push(h("code", {}, code.replace(/^ (.*) $/s, "$1")));
    else if (target !== undefined) parts.push(link(target, label || target, whole, depth));
    else if (bare) parts.push(...bareLink(bare));
    else if (strong) parts.push(h("strong", {}, inline(strongText, depth + 1)));
    else if (strike) parts.push(h("s", {}, inline(struck, depth + 1)));
    else if (starred ?? underlined) parts.push(h("em", {}, inline(starred ?? underlined, depth + 1)));
    else parts.push(escaped);
  }
  if (at < text.length) parts.push(...broken(text.slice(at)));
  return parts;
}

/** Two spaces, or a backslash, before the end of a line break it; others are kept as they are by the style. */
function broken(text) {
  return text.split(/(?: {2,}|\\)\n/).flatMap((line, index) => (index ? [h("br"), line] : [line]));
}

function bareLink(found) {
  const target = found.replace(/[.,;:!?]+$/, "");
  return [link(target, target, target, 4), found.slice(target.length)];
}

function link(target, label, whole, depth) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return whole;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return whole;
  // An answer may try to show one address and lead to another: where it leads is said when pointed at.
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, inline(label, depth + 1));
}

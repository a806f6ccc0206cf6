// Elements made by hand. Text is always text: nothing here, and nothing elsewhere, ever parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `on…` are listeners, true and false are attributes that are there or not, the rest is set as it is. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Sets text only where it differs, so that an idle page does not touch the DOM. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

export function mark(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
}

/**
 * Makes the children of `container` those of `items`, in order. An element lives as long as its key does, so focus
 * and scroll positions stay. `make(item)` gives an element; `update(element, item)` is called for all of them.
 */
export function keyed(container, items, keyOf, make, update = () => {}) {
  const old = (container.keyed ??= new Map());
  const kept = new Map();
  let place = container.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    const element = old.get(key) ?? make(item);
    update(element, item);
    kept.set(key, element);
    if (element === place) place = place.nextSibling;
    else container.insertBefore(element, place);
  }
  for (const [key, element] of old) if (!kept.has(key)) element.remove();
  container.keyed = kept;
}

export function pill(text, tone = "") {
  return h("span", { class: "pill", "data-tone": tone }, text);
}

/** A bar from 0 to 1; null: nobody knows how far. */
export function meter(label) {
  return h("div", { class: "meter", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, h("i"));
}

export function setMeter(element, fraction, label) {
  element.classList.toggle("busy", fraction === null);
  if (label) mark(element, "aria-label", label);
  mark(element, "aria-valuenow", fraction === null ? null : Math.round(fraction * 100));
  element.firstChild.style.transform = fraction === null ? "" : `scaleX(${Math.max(0, Math.min(1, fraction))})`;
}

export function copyable(text, what) {
  const pre = h("pre", { tabindex: 0, "aria-label": what }, text);
  const button = h("button", { type: "button", "aria-label": `Copy ${what}`, onclick: () => copy(pre, button) }, "Copy");
  return h("div", { class: "code" }, pre, button);
}

async function copy(pre, button) {
  try {
    await navigator.clipboard.writeText(pre.textContent);
  } catch {
    // Clipboards are for secure contexts; elsewhere the old way works, with the text selected either way.
    getSelection().selectAllChildren(pre);
    document.execCommand("copy");
  }
  say(button, "Copied");
  announce("Copied");
  setTimeout(() => say(button, "Copy"), 1600);
}

export function announce(text) {
  const place = document.getElementById("announcer");
  place.textContent = "";
  requestAnimationFrame(() => (place.textContent = text));
}

export function toast(text) {
  const places = document.getElementById("toasts");
  const element = h("div", { class: "toast", role: "alert" }, h("span", {}, text));
  element.append(h("button", { type: "button", "aria-label": "Dismiss", onclick: () => element.remove() }, "✕"));
  places.append(element);
  while (places.children.length > 3) places.firstChild.remove();
  setTimeout(() => element.remove(), 9000);
}

/** Asks before something that cannot be undone; a promise of yes or no. */
export function confirm(title, text, verb) {
  return new Promise((answer) => {
    const dialog = h("dialog", { "aria-labelledby": "confirm-title" });
    const close = (yes) => () => { dialog.close(); dialog.remove(); answer(yes); };
    dialog.append(
      h("div", { class: "stack" }, h("h2", { id: "confirm-title" }, title), h("p", { class: "muted" }, text),
        h("div", { class: "row end" },
          h("button", { type: "button", onclick: close(false) }, "Cancel"),
          h("button", { type: "button", class: "danger", onclick: close(true) }, verb))));
    dialog.addEventListener("cancel", close(false));
    document.body.append(dialog);
    dialog.showModal();
  });
}

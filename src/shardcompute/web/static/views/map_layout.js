// Where everything on the map goes; nothing is drawn here. Machines stand on two sides of a ring, in rows of equal
// height, their names outside of it and what is said of hops inside, so that no text meets another however many there
// are. What finds no room is left out rather than put over something else.

const WIDE = { width: 640, side: 172, scale: 1 }, NARROW = { width: 400, side: 122, scale: 0.7 }; // A phone gets a picture of its own.
const TOP = 92, BOTTOM = 24, LEAST_HEIGHT = 430;
const SIZES = [
  { upTo: 10, r: 24, row: 76, name: 14, line: 12, hasLine: true, hop: "full" },
  { upTo: 24, r: 12, row: 40, name: 12.5, line: 11, hasLine: true, hop: "short" },
  { upTo: Infinity, r: 6, row: 19, name: 11.5, line: 0, hasLine: false, hop: "none" },
];
const HUB = { x: 0, y: 52, r: 14 };
const GAP = 8, HOP_SIZE = 11.5, HOP_HEIGHT = 18;

export function shapeOf(count, pixels) {
  const frame = pixels < 480 ? NARROW : WIDE;
  const size = SIZES.find((each) => count <= each.upTo);
  const r = Math.max(5, Math.round(size.r * frame.scale));
  const hop = frame === NARROW && size.hop === "full" ? "short" : size.hop;
  // An odd one of a few stands at the bottom, in the middle.
  const hasFoot = count % 2 === 1 && count < 10;
  const rows = Math.ceil((count - (hasFoot ? 1 : 0)) / 2);
  const height = Math.max(LEAST_HEIGHT, TOP + rows * size.row + BOTTOM + (hasFoot ? r * 2 + 50 : 0));
  return { ...frame, ...size, r, hop, isSmall: count <= SIZES[0].upTo, rows, hasFoot, height, count };
}

/** `{x, y, r}` for the hub and for so many machines, clockwise from the top right. */
export function ringOf(shape) {
  const { width, side, height, r, rows, hasFoot, count } = shape;
  const middle = width / 2, wide = middle - side;
  const stop = height - BOTTOM - (hasFoot ? r * 2 + 50 : 0);
  const left = count - rows - (hasFoot ? 1 : 0);
  const at = (index, of, sign) => {
    const v = ((index + 0.5) / of) * 2 - 1;
    return { x: middle + sign * wide * (1 - Math.abs(v) ** 3) ** (1 / 3), y: TOP + ((index + 0.5) / of) * (stop - TOP), r, side: sign };
  };
  const right = Array.from({ length: rows }, (_, index) => at(index, rows, 1));
  const foot = hasFoot ? [{ x: middle, y: height - BOTTOM - r - 34, r, side: 0 }] : [];
  const back = Array.from({ length: left }, (_, index) => at(left - 1 - index, left, -1));
  return { hub: { ...HUB, x: middle, side: 0 }, places: [...right, ...foot, ...back] };
}

/** Where a machine's name goes and how wide it may be. */
export function nameSpot(place, shape, isHub = false) {
  const { width, r, name, line, hasLine } = shape;
  if (isHub) return { x: place.x, y: place.y - place.r - 22, lineY: place.y - place.r - 8, anchor: "middle", room: width / 2 };
  if (place.side === 0) return { x: place.x, y: place.y + r + name + 3, lineY: place.y + r + name + line + 6, anchor: "middle", room: width - 2 * GAP };
  const x = place.x + place.side * (r + GAP);
  const room = place.side > 0 ? width - 2 - x : x - 2;
  const y = hasLine ? place.y - 2 : place.y + name * 0.36;
  return { x, y, lineY: place.y + line + 1, anchor: place.side > 0 ? "start" : "end", room };
}

/** A slight curve, so that there and back are two lines. */
export function bendOf(from, to) {
  const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy) || 1;
  const ax = from.x + (dx / length) * (from.r + 4), ay = from.y + (dy / length) * (from.r + 4);
  const bx = to.x - (dx / length) * (to.r + 5), by = to.y - (dy / length) * (to.r + 5);
  const lift = Math.min(24, length * -0.08);
  const cx = (ax + bx) / 2 - (dy / length) * lift, cy = (ay + by) / 2 + (dx / length) * lift;
  const point = (t) => ({ x: (1 - t) ** 2 * ax + 2 * t * (1 - t) * cx + t ** 2 * bx, y: (1 - t) ** 2 * ay + 2 * t * (1 - t) * cy + t ** 2 * by });
  const n = (value) => value.toFixed(1);
  return { start: `${n(ax)} ${n(ay)}`, curve: `Q${n(cx)} ${n(cy)} ${n(bx)} ${n(by)}`, point };
}

/**
 * A place for each hop's words: `{hop, text, x, y, width, height}` by the middle of the box. `taken` are boxes that nothing may
 * touch. A hop says less, or nothing, where there is no room for more.
 */
export function placeHopWords(hops, taken, shape) {
  const placed = [];
  if (shape.hop === "none") return placed;
  for (const hop of hops) {
    const bend = bendOf(hop.from, hop.to);
    const found = hop.texts.slice(shape.hop === "full" ? 0 : -1)
      .flatMap((text) => spots(bend, widthOf(text, HOP_SIZE) + 12, shape).map((spot) => ({ text, ...spot })))
      .find((spot) => !taken.some((box) => meets(spot, box)));
    if (!found) continue;
    taken.push(found);
    placed.push({ hop, ...found });
  }
  return placed;
}

/** On the line itself, then beside it, in the middle first. */
function spots(bend, width, shape) {
  const height = HOP_HEIGHT, found = [];
  for (const shift of [0, width * 0.3, -width * 0.3, width / 2 + 4, width / 2 + shape.r + 14]) {
    for (const t of [0.5, 0.38, 0.62, 0.28, 0.72]) {
      const { x, y } = bend.point(t);
      const inward = Math.sign(shape.width / 2 - x) || 1;
      found.push({ x: x + inward * shift, y, width, height });
    }
  }
  return found.filter((box) => box.x - width / 2 > 1 && box.x + width / 2 < shape.width - 1 && box.y - height / 2 > 1 && box.y + height / 2 < shape.height - 1);
}

function meets(a, b) {
  return Math.abs(a.x - b.x) < (a.width + b.width) / 2 + 2 && Math.abs(a.y - b.y) < (a.height + b.height) / 2 + 1;
}

/** The box of a text by its middle, as `meets` wants it. */
export function textBox(text, size, { x, anchor }, y, weight = 400) {
  const width = widthOf(text, size, weight);
  const middle = anchor === "middle" ? x : anchor === "start" ? x + width / 2 : x - width / 2;
  return { x: middle, y: y - size * 0.34, width, height: size * 1.25 };
}

const widths = new Map();
let pen = null;

/** How wide a text is drawn; a little more rather than less. */
export function widthOf(text, size, weight = 400) {
  const key = `${weight} ${text}`;
  if (!widths.has(key)) {
    if (widths.size > 4000) widths.clear();
    pen ??= document.createElement("canvas").getContext("2d");
    pen.font = `${weight} 100px ${getComputedStyle(document.body).fontFamily}`;
    widths.set(key, pen.measureText(text).width / 100);
  }
  return widths.get(key) * size * 1.03;
}

/** A name that fits: of a longer one both ends stay, as machines often differ in the last letters. */
export function shorten(text, size, room, weight = 400) {
  if (widthOf(text, size, weight) <= room) return text;
  const letters = [...text];
  let least = 0, most = letters.length;
  const cut = (kept) => `${letters.slice(0, Math.ceil(kept * 0.6)).join("")}…${kept > 1 ? letters.slice(-Math.floor(kept * 0.4) || letters.length).join("") : ""}`;
  while (least < most) {
    const kept = Math.ceil((least + most) / 2);
    if (widthOf(cut(kept), size, weight) <= room) least = kept;
    else most = kept - 1;
  }
  return cut(least);
}

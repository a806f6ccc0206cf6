// A line of the last values, without axes.

import { mark, s } from "../dom.js";

const WIDTH = 120, HEIGHT = 28;

export function createSparkline(label) {
  const line = s("polyline", { class: "spark-line", points: "" });
  const area = s("polygon", { class: "spark-area", points: "" });
  const element = s("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, area, line);

  function update(values) {
    const most = Math.max(1, ...values);
    const start = WIDTH - values.length;
    const points = values.map((value, index) => `${start + index},${(HEIGHT - 2 - (value / most) * (HEIGHT - 5)).toFixed(1)}`);
    mark(line, "points", points.join(" "));
    mark(area, "points", points.length > 1 ? `${start},${HEIGHT} ${points.join(" ")} ${WIDTH - 1},${HEIGHT}` : "");
  }
  return { element, update };
}

// Small drawings, 20 by 20, in the colour of the text around them.

import { s } from "./dom.js";

const PATHS = {
  cluster: ["M10 3.5v4M5.5 14.5l3-4M14.5 14.5l-3-4", "M10 3.5m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M4.5 16m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M15.5 16m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M10 9m-1.8 0a1.8 1.8 0 1 0 3.6 0a1.8 1.8 0 1 0-3.6 0"],
  models: ["M10 2.8l7 3.6-7 3.6-7-3.6zM3 10l7 3.6 7-3.6M3 13.6l7 3.6 7-3.6"],
  chat: ["M3 5.5a2 2 0 0 1 2-2h10a2 2 0 0 1 2 2v6a2 2 0 0 1-2 2H9l-4 3.2V13.500H5a2 2 0 0 1-2-2z"],
  requests: ["M3 5h7M6 10h8M10 15h7"],
  usage: ["M4 16.500V10M10 16.500V4M16 16.500v-5"],
  connect: ["M7.500 5.500L3 10l4.500 4.500M12.500 5.500L17 10l-4.500 4.500"],
  light: ["M10 6.500a3.500 3.500 0 1 0 0 7a3.500 3.500 0 1 0 0-7M10 1.800v1.700M10 16.500v1.700M1.800 10h1.700M16.500 10h1.700M4.200 4.200l1.200 1.200M14.600 14.600l1.200 1.200M4.200 15.800l1.200-1.200M14.600 5.400l1.200-1.200"],
  dark: ["M16.500 11.800A7 7 0 0 1 8.200 3.500a7 7 0 1 0 8.300 8.300z"],
  system: ["M10 3a7 7 0 1 0 0 14a7 7 0 1 0 0-14M10 3v14a7 7 0 0 0 0-14"],
};

export function icon(name) {
  const drawing = s("svg", { viewBox: "0 0 20 20", width: 20, height: 20, fill: "none", stroke: "currentColor", "stroke-width": 1.6,
    "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true" });
  drawing.append(...PATHS[name].map((d) => s("path", { d })));
  if (name === "system") drawing.append(s("path", { d: "M10 3v14a7 7 0 0 0 0-14", fill: "currentColor", stroke: "none" }));
  return drawing;
}

// Light, dark, or as the system says; remembered in this browser.

import { mark } from "./dom.js";
import { icon } from "./icons.js";

const NAME = "shardcompute.theme";
const ORDER = ["system", "light", "dark"];
const WORDS = { system: "as the system", light: "light", dark: "dark" };

export function setUpTheme(button) {
  let theme = localStorage.getItem(NAME) ?? "system";
  const apply = () => {
    mark(document.documentElement, "data-theme", theme === "system" ? null : theme);
    button.setAttribute("aria-label", `Theme: ${WORDS[theme]}`);
    button.title = `Theme: ${WORDS[theme]}`;
    button.replaceChildren(icon(theme));
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    localStorage.setItem(NAME, theme);
    apply();
  });
  if (!ORDER.includes(theme)) theme = "system";
  apply();
}

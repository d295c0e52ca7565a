// Light or dark, as chosen before: runs before the page is drawn, so that nothing flashes.
"use strict";

(() => {
  const NAME = "atom-theme";
  const root = document.documentElement;

  function chosen() {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null; // storage is off: the system's choice counts
    }
  }

  function isDark() {
    return root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const before = chosen();
  if (before === "light" || before === "dark") root.dataset.theme = before;

  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem(NAME, root.dataset.theme);
      } catch {
        // the choice lasts until the page is left
      }
    });
  });
})();

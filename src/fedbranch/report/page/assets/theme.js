// Light or dark: as the system has it, until somebody says otherwise.

const KEY = "fedbranch-theme";
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function rememberedTheme() {
  try {
    const theme = localStorage.getItem(KEY);
    return theme === "light" || theme === "dark" ? theme : null;
  } catch {
    return null; // a viewer may forbid it
  }
}

function rememberTheme(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // It holds until the page is closed.
  }
}

const theTheme = () => document.documentElement.dataset.theme;

function showTheme(theme) {
  const other = theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = other === "dark" ? "Dark" : "Light";
  byId("theme").setAttribute("aria-label", `Switch to ${other} colours`);
}

function startTheme(onChange) {
  let chosen = rememberedTheme();
  const ofSystem = () => (systemIsDark.matches ? "dark" : "light");
  showTheme(chosen ?? ofSystem());
  byId("theme").addEventListener("click", () => {
    chosen = theTheme() === "dark" ? "light" : "dark";
    rememberTheme(chosen);
    showTheme(chosen);
    onChange();
  });
  const follow = () => {
    showTheme(chosen ?? ofSystem());
    onChange();
  };
  systemIsDark.addEventListener("change", follow);
  addEventListener("beforeprint", () => {
    showTheme("light"); // paper is white
    onChange();
  });
  addEventListener("afterprint", follow);
}

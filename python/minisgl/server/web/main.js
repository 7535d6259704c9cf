// Entry point: theme, chat, live view.
import { key, startChat } from "./chat.js";
import { startLive } from "./live.js";

const root = document.documentElement;

function setTheme(name) {
  root.dataset.theme = name;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  setTheme(root.dataset.theme === "dark" ? "light" : "dark");
});

startChat();
startLive(key);

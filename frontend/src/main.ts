// The page: its head, the choice of runs, the views, and the look for new records.
import "./style.css";
import { get, isExported } from "./api";
import { fill, h } from "./dom";
import { addViews, chooser, closeMenu, tabs, updateHead } from "./head";
import { overview } from "./overview";
import { plan } from "./plan";
import { samples } from "./samples";
import { main, readAddress, readRuns, readSummaries, shared, type Page, type ViewName } from "./state";
import { time } from "./time";

const VIEWS: [ViewName, string, () => Page][] = [
  ["overview", "Overview", overview], ["samples", "Samples", samples], ["time", "Time", time], ["plan", "Plan", plan],
];
const LOOK_MS = 500; // an answer without news is a few bytes
const RUNS_MS = 5000;

const root = document.getElementById("app")!;
const content = h("main", { id: "content", tabIndex: -1 }), trouble = h("p", { class: "notice", hidden: true, role: "alert" });
let page: Page | null = null, shownView = "", timer = 0, runsRead = 0;

type Theme = "auto" | "light" | "dark";
function theme(next?: Theme): Theme {
  let now: Theme = "auto";
  try {
    if (next) localStorage.setItem("pentad-theme", next);
    now = (localStorage.getItem("pentad-theme") as Theme) ?? "auto";
  } catch { now = next ?? "auto"; } // a file opened from disk may have no storage
  document.documentElement.dataset.theme = now === "auto" ? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light") : now;
  return now;
}

const themeButton = h("button", { type: "button", class: "ghost", onclick: () => {
  const isDark = document.documentElement.dataset.theme === "dark";
  theme(isDark ? "light" : "dark");
  show(true);
} }, "Theme");

function show(isForced = false): void {
  const { view, ids, params } = shared.state;
  const key = JSON.stringify([view, ids, view === "samples" || view === "time" ? params.get("step") : "", document.documentElement.dataset.theme]);
  if (isForced || key !== shownView) {
    page?.close?.();
    shownView = key;
    page = VIEWS.find(([name]) => name === view)![2]();
    fill(content, page.el);
    document.title = `${main()?.name ?? "pentad view"} · ${VIEWS.find(([name]) => name === view)![1]}`;
    void guarded(async () => page?.update());
  }
  updateHead();
}

async function guarded(act: () => unknown): Promise<void> {
  try {
    await act();
    trouble.hidden = true;
  } catch (error) {
    trouble.textContent = (error as Error).message;
    trouble.hidden = false;
  }
}

async function look(): Promise<void> {
  await guarded(async () => {
    if (Date.now() - runsRead > RUNS_MS) { await readRuns(); runsRead = Date.now(); }
    if (!shared.state.ids.length && shared.runs.length) return route();
    const isNew = await readSummaries();
    updateHead();
    if (isNew) await page?.update();
  });
  const isReading = shared.state.ids.some((id) => (shared.summaries.get(id)?.progress ?? 1) < 1);
  if (!isExported) timer = window.setTimeout(look, isReading ? 50 : document.hidden ? 10 * LOOK_MS : LOOK_MS);
}

async function route(): Promise<void> {
  await guarded(async () => {
    shared.state = readAddress();
    if (!shared.runs.length) { await readRuns(); runsRead = Date.now(); }
    const known = new Set(shared.runs.map((run) => run.id));
    shared.state.ids = shared.state.ids.filter((id) => known.has(id));
    if (!shared.state.ids.length && shared.runs.length) shared.state.ids = [shared.runs[0].id];
    if (!shared.state.ids.length) {
      fill(content, h("p", { class: "notice" }, "There is no run here yet: start one with `pentad demo` or `pentad train`, and it appears."));
      return;
    }
    await readSummaries();
    if (main()?.state === "recipe") shared.state.view = "plan";
    show();
  });
}

async function begin(): Promise<void> {
  theme();
  addViews(VIEWS.map(([name, label]) => [name, label]));
  fill(root, h("a", { class: "skip", href: "#content", onclick: (e: Event) => { e.preventDefault(); content.focus(); } }, "Skip to the content"),
    h("header", { class: "top" }, h("span", { class: "brand" }, "pentad"), chooser, h("span", { class: "grow" }), tabs, themeButton), trouble, content);
  await guarded(async () => { shared.fields = await get("fields"); });
  await route();
  window.addEventListener("hashchange", () => void route());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(timer); void look(); } });
  document.addEventListener("click", (event) => closeMenu(event.target as Node));
  timer = window.setTimeout(look, LOOK_MS); // first the view itself
}

void begin();

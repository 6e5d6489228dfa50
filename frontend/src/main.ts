// The page: its head, the choice of runs, the views, and the look for new records.
import "./style.css";
import { get, isExported } from "./api";
import { fill, h } from "./dom";
import { clock, num } from "./format";
import { overview } from "./overview";
import { plan } from "./plan";
import { samples } from "./samples";
import { address, main, readAddress, readRuns, readSummaries, shared, type Page, type ViewName } from "./state";
import { time } from "./time";

const VIEWS: [ViewName, string, () => Page][] = [
  ["overview", "Overview", overview], ["samples", "Samples", samples], ["time", "Time", time], ["plan", "Plan", plan],
];
const LOOK_MS = 500; // an answer without news is a few bytes
const RUNS_MS = 5000;
const MAX_RUNS = 8;

const root = document.getElementById("app")!;
const tabs = h("nav", { "aria-label": "Views" }), chooser = h("div", { class: "chooser" });
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

let shownHead = "";
/** Anew only where it changed: a link that is replaced while it is pressed or has the focus is lost. */
function head(): void {
  const run = main(), { view, ids } = shared.state;
  const now = JSON.stringify([view, ids, shared.runs, run?.name, run?.state, run?.has_plan]);
  if (now === shownHead) return;
  shownHead = now;
  fill(tabs, VIEWS.filter(([name]) => (name === "plan" ? run?.has_plan : run?.state !== "recipe")).map(([name, label]) =>
    h("a", { href: address(name, ids), "aria-current": name === view ? "page" : null }, label)));
  const open = chooser.querySelector("details")?.open ?? false;
  const states = run ? h("span", { class: `state ${run.state}` }, run.state) : null;
  const list = shared.runs.map((one) => {
    const isOn = ids.includes(one.id);
    return h("li", null,
      h("input", { type: "checkbox", checked: isOn, id: `run-${one.id}`, "aria-label": `Compare ${one.name}`, onchange: () => {
        const next = isOn ? ids.filter((id) => id !== one.id) : [...ids, one.id].slice(-MAX_RUNS);
        location.hash = address(next.length > 1 ? "overview" : view, next.length ? next : [one.id]); // runs are compared there
      } }),
      h("a", { href: address(view, [one.id]), title: one.path, onclick: () => { chooser.querySelector("details")!.open = false; } }, one.name), h("span", { class: `state ${one.state}` }, one.state),
      h("span", { class: "muted" }, one.step !== null ? `step ${one.step}` : one.state === "recipe" ? "" : "no step", one.reward !== null && one.reward !== undefined ? ` · reward ${num(one.reward)}` : "", one.time ? ` · ${clock(one.time)}` : ""));
  });
  fill(chooser, shared.runs.length > 1 || !run
    ? h("details", { class: "runs", open }, h("summary", null, run ? run.name : "no run", ids.length > 1 ? ` + ${ids.length - 1}` : ""), h("div", { class: "menu" }, h("p", { class: "muted small" }, "Tick runs to compare them."), h("ul", null, list)))
    : h("span", { class: "runname", title: run.path }, run.name), states);
}

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
  head();
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
    head();
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
  fill(root, h("a", { class: "skip", href: "#content", onclick: (e: Event) => { e.preventDefault(); content.focus(); } }, "Skip to the content"),
    h("header", { class: "top" }, h("span", { class: "brand" }, "pentad"), chooser, h("span", { class: "grow" }), tabs, themeButton), trouble, content);
  await guarded(async () => { shared.fields = await get("fields"); });
  await route();
  window.addEventListener("hashchange", () => void route());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(timer); void look(); } });
  document.addEventListener("click", (event) => {
    const menu = chooser.querySelector("details");
    if (menu?.open && !menu.contains(event.target as Node)) menu.open = false;
  });
  timer = window.setTimeout(look, LOOK_MS); // first the view itself
}

void begin();

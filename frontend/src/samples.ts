// What the policy wrote: lists by step, filters and words, a prompt's group, its tokens.
import { get, type Json } from "./api";
import { css, faded } from "./chart";
import { choice, fill, h, type Child } from "./dom";
import { difference, num, share } from "./format";
import { address, remember, shared, type Page } from "./state";

const FILTERS: [string, string, string][] = [
  ["min_reward", "reward from", "number"], ["max_reward", "to", "number"],
  ["min_length", "tokens from", "number"], ["max_length", "to", "number"],
  ["version", "weights version", "number"],
];

export function samples(): Page {
  const params = shared.state.params, id = shared.state.ids[0];
  const list = h("div", { class: "cards", "aria-live": "polite" }), detail = h("div", { class: "detail" });
  const status = h("p", { class: "muted status" });
  const more = h("button", { type: "button", class: "ghost", hidden: true, onclick: () => void load(true) }, "More");
  let next: number | null = null, asked = 0, shownKey = "", opened = params.get("open") ?? "";
  const isLatest = () => !params.get("step") && !isSearch();
  const names = ["text", "finish", "version", "prompt", "environment", ...FILTERS.map(([n]) => n)];
  const isSearch = () => params.get("all") === "1" || (!params.get("step") && names.some((n) => params.get(n)));

  const step = h("input", { type: "number", min: "1", class: "step", "aria-label": "Step", placeholder: "latest",
    onchange: () => goto(step.value ? Number(step.value) : null) });
  const goto = (to: number | null) => {
    remember("all", null);
    remember("step", to === null ? null : String(Math.max(1, to)));
    step.value = to === null ? "" : String(Math.max(1, to));
    void load();
  };
  const near = (by: number) => goto((Number(params.get("step")) || lastStep || 1) + by);
  let lastStep: number | null = null;
  const search = h("input", { type: "search", placeholder: "Search all steps", value: params.get("text") ?? "", "aria-label": "Search the text of samples",
    onchange: () => { remember("text", search.value); void load(); } });
  const boxes = FILTERS.map(([name, label, type]) => h("label", { class: "inline" }, label,
    h("input", { type, step: "any", class: "short", value: params.get(name) ?? "", onchange: (event: Event) => { remember(name, (event.target as HTMLInputElement).value); void load(); } })));
  const select = (name: string, label: string, options: [string, string][]) => {
    const box = h("select", { "aria-label": label, onchange: () => { remember(name, box.value); void load(); } },
      options.map(([value, text]) => h("option", { value, selected: params.get(name) === value }, text)));
    return box;
  };
  const environments = select("environment", "Environment", []), finishes = select("finish", "Why an answer ended", []);
  environments.hidden = finishes.hidden = true;
  let again = 0, isChosen = false, isPending = Boolean(opened); // the address names a sample
  const filters = h("details", { class: "filters", open: isSearch() }, h("summary", null, "Filters"),
    h("div", { class: "bar" }, boxes, environments, finishes,
      h("label", { class: "inline" }, h("input", { type: "checkbox", checked: params.get("all") === "1", onchange: (e: Event) => { remember("all", (e.target as HTMLInputElement).checked ? "1" : null); void load(); } }), "all steps"),
      h("button", { type: "button", class: "ghost", onclick: () => {
        for (const name of ["all", ...names]) remember(name, null);
        filters.querySelectorAll("input").forEach((box) => { box.value = ""; box.checked = false; });
        filters.querySelectorAll("select").forEach((box) => { box.value = ""; });
        search.value = "";
        void load();
      } }, "Clear")));
  const el = h("div", null,
    h("div", { class: "bar" },
      h("span", { class: "inline" }, "Step", h("button", { type: "button", class: "ghost", "aria-label": "Step before", onclick: () => near(-1) }, "‹"), step,
        h("button", { type: "button", class: "ghost", "aria-label": "Next step", onclick: () => near(1) }, "›"),
        h("button", { type: "button", class: "ghost", onclick: () => goto(null) }, "Latest")),
      choice("Which samples", [["", "All"], ["best", "Best"], ["worst", "Worst"], ["random", "Random"]], params.get("pick") ?? "", (value) => { remember("pick", value); void load(); }),
      select("order", "Order", [["", "as recorded"], ["newest", "newest first"], ["worst", "lowest reward first"], ["best", "highest reward first"], ["longest", "longest first"], ["shortest", "shortest first"], ["oldest", "oldest first"]]),
      h("span", { class: "grow" }), search),
    filters, h("div", { class: "split" }, h("div", { class: "side" }, status, list, more), detail));
  step.value = params.get("step") ?? "";

  /** `isLive`: new records are the reason, so what was opened by hand stays open. */
  async function load(isMore = false, isLive = false): Promise<void> {
    const mine = ++asked;
    const wanted: Record<string, string> = { most: "40", skip: isMore && next !== null ? String(next) : "0" };
    for (const name of ["pick", "order", ...names]) {
      const value = params.get(name);
      if (value) wanted[name] = value;
    }
    if (!isSearch() && params.get("step")) wanted.step = params.get("step") as string;
    if (!isSearch() && !wanted.order) wanted.order = "oldest"; // of a step: as recorded, the best and the worst first
    if (isLatest()) wanted.last = "1";
    let found: Json;
    try {
      found = await get("samples", { run: id, ...wanted });
    } catch (error) {
      fill(status, String((error as Error).message));
      return;
    }
    if (mine !== asked) return;
    lastStep = found.last_step;
    offer(environments, "any environment", "environment", found.words?.environment ?? []);
    offer(finishes, "any end", "finish", found.words?.finish ?? []);
    window.clearTimeout(again);
    if (found.progress < 1) again = window.setTimeout(() => { if (el.isConnected && mine === asked) void load(false, true); }, 100);
    next = found.next;
    more.hidden = next === null;
    const key = JSON.stringify([wanted, found.samples.map((s: Json) => [s.step, s.gid, s.index]), found.step]);
    const isSame = key === shownKey && !isMore; // though more of the file may be read
    shownKey = key;
    const cards = isSame ? [] : found.samples.map(card);
    if (isMore) list.append(...cards); else if (!isSame) fill(list, cards);
    const where = isSearch() ? "in all steps" : found.step ? `of step ${found.step}` : "";
    const count = found.total === null ? `${list.children.length}${next === null ? "" : "+"}` : String(found.total);
    fill(status, found.samples.length || isMore ? `${count} ${count === "1" ? "sample" : "samples"} ${where}`
      : next !== null ? "Nothing yet; press More to search on."
      : found.last_step === null ? "samples.jsonl has no samples yet: telemetry.samples_per_step says how many a step leaves; supervised runs have none."
      : `No sample ${where} fits.`,
      found.progress < 1 && ` · reading samples.jsonl: ${share(found.progress)}`);
    if (params.get("prompt")) fill(status, `The same prompt ${where}: ${count} samples`);
    if (isSame) return;
    const isListed = found.samples.some((s: Json) => keyOf(s) === opened), isKept = isListed || (isLive && isChosen);
    if (isPending) {
      isPending = false;
      const [step, gid, index] = opened.split(".").map(Number);
      void open({ step, gid, index }, true);
    } else if (!isMore && found.samples.length && !isKept && matchMedia("(min-width: 900px)").matches) void open(found.samples[0]);
  }

  function offer(box: HTMLSelectElement, any: string, name: string, known: string[]): void {
    box.hidden = !known.length;
    if (box.options.length === known.length + 1) return;
    fill(box, ["", ...known].map((word) => h("option", { value: word, selected: params.get(name) === word }, word || any)));
  }

  function card(s: Json): HTMLElement {
    const isOn = opened === keyOf(s);
    return h("button", { type: "button", class: "card", "aria-pressed": isOn ? "true" : "false", "data-key": keyOf(s), onclick: () => void open(s, true) },
      h("span", { class: "top" }, h("span", { class: `pick ${s.pick}` }, s.pick ?? ""), (isSearch() || params.get("pick")) && h("span", { class: "muted" }, `step ${s.step}`),
        s.environment && h("span", { class: "pick" }, s.environment), h("span", { class: "grow" }), h("span", { class: "muted" }, "reward"), rewardOf(s.reward), h("span", { class: "muted" }, `${num(s.num_sampled, 6)} tok · ${s.finish ?? "–"}`)),
      h("span", { class: "question" }, clip(s.question ?? s.prompt ?? "", 160)),
      h("span", { class: "answer" }, clip(turnsOf(s).length ? turnsOf(s).map((t) => t[1]).join(" / ") : s.text, 260)));
  }

  async function open(s: Json, isAsked = false): Promise<void> {
    isChosen = isAsked;
    opened = keyOf(s);
    remember("open", opened);
    list.querySelectorAll<HTMLElement>(".card").forEach((c) => c.setAttribute("aria-pressed", c.dataset.key === opened ? "true" : "false"));
    let group: Json;
    try {
      if (!Number.isInteger(s.gid)) throw new Error("This record names no group: another version wrote it. The list has what is known of it.");
      group = await get("group", { run: id, step: s.step, gid: s.gid });
    } catch (error) {
      fill(detail, h("p", { class: "notice" }, (error as Error).message));
      return;
    }
    if (opened !== keyOf(s)) return; // another one was opened meanwhile
    showGroup(group, s.index);
    if (isAsked && !matchMedia("(min-width: 900px)").matches) detail.scrollIntoView({ block: "start" });
  }

  function showGroup(group: Json, index: number): void {
    const many: Json[] = [...group.samples];
    const names = [...new Set(many.flatMap((s) => Object.keys(s.tokens?.columns ?? {})))];
    let by = (names.includes(params.get("color") ?? "") ? params.get("color") : "") as string;
    const body = h("div", { class: "answers" }), later = h("div", null);
    const question = group.question ?? group.prompt ?? `group ${group.gid}`;
    const rewards = many.map((s) => s.reward).filter((r) => r !== null && r !== undefined);
    const mean = rewards.reduce((a: number, b: number) => a + b, 0) / (rewards.length || 1);
    const hint = h("span", { class: "muted small" });
    const paint = () => {
      const scale = scaleOf(many, by);
      hint.textContent = !by ? "" : by === "logprob" ? "the redder, the less likely" : `${num(scale.low)} to ${num(scale.high)}`;
      const order = [...many].sort((a, b) => Number(b.index === index) - Number(a.index === index) || (b.reward ?? 0) - (a.reward ?? 0));
      fill(body, order.map((s) => answer(s, by, s.index === index, scale)));
    };
    const labels: [string, string][] = [["", "plain"], ...names.map((n): [string, string] => [n, n === "logprob" ? "log-prob" : n.replace(/_/g, " ")])];
    fill(detail,
      h("div", { class: "bar" }, h("h2", null, `Group ${group.gid}, step ${group.step}`), h("span", { class: "grow" }),
        names.length > 0 && h("span", { class: "inline wrap" }, "Tokens by", choice("Colour tokens by", labels, by, (value) => { by = value; remember("color", value); paint(); }), hint)),
      (group.notes ?? []).map((text: string) => h("p", { class: "muted small" }, text)),
      h("div", { class: "prompt" }, h("span", { class: "role" }, "prompt"), h("pre", null, question)),
      group.prompt && group.prompt !== question && h("details", null, h("summary", null, "As the model saw it"), h("pre", { class: "box" }, group.prompt)),
      group.expected && h("div", { class: "prompt" }, h("span", { class: "role" }, "expected"), h("pre", null, group.expected)),
      many.length > 1 && h("div", { class: "spread", role: "img", "aria-label": `${many.length} rewards, mean ${num(mean)}` },
        [...many].sort((a, b) => (a.reward ?? 0) - (b.reward ?? 0)).map((s) => bar(s, rewards, index)),
        h("span", { class: "muted" }, `${many.length} samples, mean reward ${num(mean)}`)),
      body, later);
    paint();
    const key = list.querySelector<HTMLElement>(`[data-key="${opened}"]`) ? lastKey(opened) : null;
    if (key !== null) void showSame(later, key);
  }

  const keys = new Map<string, number>();
  function lastKey(key: string): number | null { return keys.get(key) ?? null; }
  function keyOf(s: Json): string {
    const key = `${s.step}.${s.gid}.${s.index}`;
    if (s.prompt_key !== undefined) keys.set(key, s.prompt_key);
    return key;
  }

  async function showSame(el: HTMLElement, key: number): Promise<void> {
    const found = await get("samples", { run: id, prompt: key, order: "oldest", most: 60 });
    const steps = new Set(found.samples.map((s: Json) => s.step));
    if (steps.size < 2) return;
    fill(el, h("h3", null, `The same prompt in ${steps.size} steps`), h("ol", { class: "same" }, found.samples.map((s: Json) =>
      h("li", null, h("a", { href: address("samples", [id], { step: String(s.step), open: keyOf(s) }) }, `step ${s.step}`), rewardOf(s.reward),
        h("span", { class: "answer" }, clip(s.text ?? "", 140))))));
  }

  let seen = 0;
  return {
    el,
    update: () => {
      if (!seen++ || isLatest()) return load(false, true);
      return undefined;
    },
  };
}

function bar(s: Json, rewards: number[], index: number): HTMLElement {
  const low = Math.min(0, ...rewards), high = Math.max(...rewards, low + 1e-9);
  const height = 4 + 26 * (((s.reward ?? low) - low) / (high - low));
  return h("i", { class: s.index === index ? "on" : "", title: `sample ${s.index}: ${num(s.reward)}`, style: { height: `${height}px` } });
}

function rewardOf(value: number | null): Child {
  return h("span", { class: "reward", title: "reward" }, num(value));
}

function turnsOf(s: Json): [string, string][] {
  return Array.isArray(s.turns) ? s.turns.filter(Array.isArray) : [];
}

function clip(text: unknown, most: number): string {
  const flat = String(text ?? "").replace(/\s+/g, " ").trim();
  return flat.length > most ? `${flat.slice(0, most)} …` : flat || "(empty)";
}

interface Scale { low: number; high: number; isSigned: boolean }

function scaleOf(many: Json[], by: string): Scale {
  const all: number[] = many.flatMap((s) => (s.tokens?.columns?.[by] ?? []).filter((_: number, n: number) => s.tokens.mask[n]));
  let low = Infinity, high = -Infinity;
  for (const v of all) { low = Math.min(low, v); high = Math.max(high, v); }
  return { low, high, isSigned: low < 0 && high > 0 };
}

function answer(s: Json, by: string, isOn: boolean, scale: Scale): HTMLElement {
  const parts = Object.entries((s.reward_parts ?? {}) as Record<string, number>);
  const rel = s.above_mean;
  return h("article", { class: isOn ? "answer-box on" : "answer-box" },
    h("header", null, h("b", null, `sample ${s.index}`), s.pick && h("span", { class: `pick ${s.pick}` }, s.pick), h("span", { class: "grow" }),
      h("span", { class: "muted" }, "reward"), rewardOf(s.reward),
      rel != null && h("span", { class: rel > 0 ? "good" : rel < 0 ? "bad" : "muted", title: "reward less the mean of the group" }, difference(rel))),
    parts.length > 0 && h("div", { class: "parts" }, parts.map(([name, value]) => h("span", null, `${name} `, h("b", null, num(value))))),
    h("div", { class: "text" }, by && s.tokens?.columns?.[by] ? tokens(s.tokens, by, scale)
      : turnsOf(s).length ? turnsOf(s).map(([role, text]) => h("div", { class: `turn ${role === "assistant" ? "own" : "env"}` }, h("span", { class: "role" }, role === "assistant" ? "policy (trained)" : role), h("pre", null, text)))
      : h("pre", null, s.text || "(empty)")),
    h("footer", null, `${num(s.num_sampled, 6)} ${s.num_sampled === 1 ? "token" : "tokens"} · ended by ${s.finish ?? "–"}`));
}

function tokens(t: Json, by: string, scale: Scale): HTMLElement {
  const values: number[] = t.columns[by];
  const first = t.mask.indexOf(true);
  return h("pre", { class: "tokens" }, t.words.map((word: string, n: number) => {
    if (n < first) return null;
    if (!t.mask[n]) return h("span", { class: "given" }, word);
    return h("span", { style: { background: tint(values[n], by, scale) }, title: `${by} ${num(values[n], 4)}` }, word);
  }));
}

function tint(value: number, by: string, scale: Scale): string {
  if (by === "logprob") return faded(css("--bad"), 0.75 * (1 - Math.exp(value)));
  if (scale.isSigned) return faded(css(value >= 0 ? "--good" : "--bad"), (0.75 * Math.abs(value)) / Math.max(scale.high, -scale.low));
  return faded(css("--c1"), scale.high > scale.low ? 0.08 + (0.6 * (value - scale.low)) / (scale.high - scale.low) : 0.15);
}

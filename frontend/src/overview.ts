// The curves of one run or several, with what happened on the way.
import { get, isExported, type Mark, type Series, type Summary } from "./api";
import { Chart, COLORS, nearest, type Frame, type Line } from "./chart";
import { choice, fill, h, table, type Child } from "./dom";
import { clock, duration, num, share } from "./format";
import { address, main, remember, shared, type Page } from "./state";
import { costOf } from "./time";

interface Wanted { title: string; keys: string[]; log?: boolean; scale?: number; unit?: string; isEval?: boolean; isExact?: boolean }

/** Of several runs each has its colour, and each of its lines a dash. */
const DASHES = [undefined, [6, 4], [2, 3], [10, 3, 2, 3]];

const PLAN: [string, Wanted[]][] = [
  ["Learning", [
    { title: "Reward", keys: ["rl/reward_mean"] },
    { title: "Held-out accuracy", keys: ["accuracy"], isEval: true },
    { title: "Parts of the reward", keys: ["rl/reward_parts/*"] },
    { title: "Reward by environment", keys: ["rl/environments/*/reward_mean"] },
    { title: "Preferred answer ranked higher", keys: ["preference/accuracy"] },
    { title: "Margin", keys: ["preference/margin"] },
    { title: "Held-out margin", keys: ["margin"], isEval: true, unit: "nats" },
    { title: "Reward of chosen and rejected", keys: ["preference/chosen_reward", "preference/rejected_reward"] },
    { title: "Divergence from the reference", keys: ["preference/divergence"] },
    { title: "Loss", keys: ["loss"] },
    { title: "Held-out loss", keys: ["loss"], isEval: true },
    { title: "Answer length", keys: ["rl/length_mean"] },
    { title: "Cut at the limit", keys: ["rl/truncated_share"] },
    { title: "Groups without variance", keys: ["rl/groups_without_variance"] },
  ]],
  ["Policy and gradient", [
    { title: "Entropy", keys: ["rl/entropy"] },
    { title: "KL to the reference", keys: ["rl/kl_ref"] },
    { title: "Clip share", keys: ["rl/clip_fraction", "rl/outside_clip_share"] },
    { title: "Trainer against sampler", keys: ["rl/logprob_diff_mean", "rl/logprob_diff_p99"] },
    { title: "Importance ratio", keys: ["rl/ratio_mean", "rl/ratio_p95"] },
    { title: "Gradient norm", keys: ["grad_norm"] },
    { title: "Learning rate", keys: ["lr"], isExact: true },
    { title: "Critic loss", keys: ["rl/critic_loss"] },
    { title: "Tokens of an expert", keys: ["kernel/tokens_per_expert_mean", "kernel/tokens_per_expert_std"] },
  ]],
  ["Speed and memory", [
    { title: "Tokens a second", keys: ["tokens_per_sec"] },
    { title: "Time of a step", keys: ["wall_clock_ms"], scale: 1e-3, unit: "s" },
    { title: "MFU", keys: ["mfu"] },
    { title: "Device memory", keys: ["memory/peak_allocated_gb", "memory/reserved_gb"] },
    { title: "Host memory", keys: ["memory/host_rss_gb"] },
  ]],
];

export function overview(): Page {
  const params = shared.state.params;
  let axis = (params.get("x") ?? "step") as "step" | "time";
  let smoothing = Number(params.get("smooth") ?? "-1");
  let range: [number, number] | null = null, whole: [number, number] | null = null; // what is zoomed to, and all that any chart has
  let data = new Map<string, Series>();
  let asked = 0;
  const added = new Set(params.getAll("key"));
  const charts: { chart: Chart; wanted: Wanted }[] = [];
  const strip = h("div", { class: "stats" }), grid = h("div", null), happened = h("div", null), compared = h("div", null);
  const slider = h("input", { type: "range", min: "0", max: "12", step: "1", id: "smooth", "aria-label": "Smoothing",
    oninput: () => { smoothing = spanOf(Number(slider.value)); remember("smooth", String(smoothing)); showSpan(); draw(); } });
  const spanText = h("output", { for: "smooth" });
  const reset = h("button", { type: "button", class: "ghost", hidden: true, onclick: () => zoom(null) }, "Show all steps");
  const more = h("select", { "aria-label": "Add a chart of another number", onchange: () => {
    if (!more.value) return;
    added.add(more.value);
    shared.state.params.append("key", more.value);
    remember("x", axis);
    build();
    void load();
  } });
  const bar = h("div", { class: "bar" },
    choice("Axis", [["step", "Steps"], ["time", "Wall clock"]], axis, (value) => {
      axis = value;
      range = null;
      remember("x", axis);
      void load();
    }),
    h("label", { class: "inline", for: "smooth" }, "Smoothing", slider, spanText),
    more, reset, h("span", { class: "grow" }), exports());
  const el = h("div", null, strip, happened, compared, bar, grid);

  function spanOf(notch: number): number { return notch === 0 ? 0 : Math.round(2 ** (notch - 1) * 1.5); }
  function showSpan(): void { spanText.textContent = smoothing > 0 ? `${smoothing} steps` : "off"; }

  function exports(): Child {
    const run = main();
    if (!run || isExported) return null;
    const id = encodeURIComponent(run.id);
    return [h("a", { class: "ghost", href: `/export.csv?run=${id}`, download: true }, "CSV"),
      h("a", { class: "ghost", href: `/export.html?run=${id}`, download: true, title: "One HTML file that shows this run without a server" }, "HTML file")];
  }

  function keysOf(wanted: Wanted): string[] {
    const known = new Set(shared.state.ids.flatMap((id) => shared.summaries.get(id)?.keys ?? []));
    return wanted.keys.flatMap((key) =>
      key.includes("*") ? [...known].filter((k) => k.startsWith(key.split("*")[0]) && k.endsWith(key.split("*")[1])) : known.has(key) ? [key] : []);
  }

  function evalsOf(run: Summary, key: string): { x: number[]; y: number[]; low?: number[]; high?: number[] } {
    const lines = run.evals.filter((e) => typeof e[key] === "number");
    const has = key === "accuracy" && lines.every((e) => typeof e.accuracy_low === "number");
    return { x: lines.map((e) => e.version), y: lines.map((e) => e[key]),
      ...(has ? { low: lines.map((e) => e.accuracy_low), high: lines.map((e) => e.accuracy_high) } : {}) };
  }

  function isShown(wanted: Wanted): boolean {
    if (wanted.isEval) return shared.state.ids.some((id) => evalsOf(shared.summaries.get(id)!, wanted.keys[0]).x.length > 0);
    return keysOf(wanted).length > 0;
  }

  function build(): void {
    charts.splice(0).forEach(({ chart }) => chart.destroy());
    const groups: [string, Wanted[]][] = [...PLAN, ["Added", [...added].map((key) => ({ title: key, keys: [key] }))]];
    fill(grid, groups.map(([name, wanted]) => {
      const shown = wanted.filter(isShown);
      if (!shown.length) return null;
      return h("section", null, h("h2", { class: "group" }, name), h("div", { class: "charts" }, shown.map((one) => {
        const key = keysOf(one)[0] ?? one.keys[0];
        const field = shared.fields[key] ?? shared.fields[key.split("/").slice(0, 2).join("/")];
        const about = one.isEval ? "evals.jsonl: with its 95% interval where it has one" : field?.meaning ?? key;
        const chart = new Chart(one.title, about, one.unit ?? (one.isEval ? "" : field?.unit ?? ""),
          { zoom: (low, high) => zoom([low, high]), reset: () => zoom(null), pick }, { log: one.log, named: one.keys[0].includes("*") });
        charts.push({ chart, wanted: one });
        return chart.el;
      })));
    }));
    const used = new Set(charts.flatMap(({ wanted }) => keysOf(wanted)));
    const others = (main()?.keys ?? []).filter((key) => !used.has(key) && !["step", "schema", "generation", "superseded", "time_s"].includes(key));
    fill(more, h("option", { value: "" }, "Add a chart ..."), others.map((key) => h("option", { value: key }, key)));
  }

  function stepAt(x: number): number {
    if (axis === "step") return Math.round(x);
    const series = data.get(shared.state.ids[0])!;
    return series.step[nearest(series.time.map((t) => t - series.time[0]), x)];
  }

  function pick(x: number): void {
    const step = stepAt(x), ids = shared.state.ids;
    fill(picked, h("b", null, `Step ${step}`),
      h("a", { href: address("samples", ids, { step: String(step) }) }, "Samples"),
      h("a", { href: address("time", ids, { step: String(step) }) }, "Where its time went"),
      h("button", { type: "button", class: "ghost", onclick: () => { picked.hidden = true; } }, "Close"));
    picked.hidden = false;
  }
  const picked = h("div", { class: "picked", hidden: true, role: "status" });
  el.append(picked);

  function zoom(to: [number, number] | null): void {
    range = to;
    reset.hidden = to === null;
    charts.forEach(({ chart }) => chart.setRange(range ?? whole));
    void load();
  }

  async function load(): Promise<void> {
    const mine = ++asked;
    const keys = [...new Set(charts.filter((c) => !c.wanted.isEval).flatMap((c) => keysOf(c.wanted)))];
    const found = new Map<string, Series>();
    const within = axis === "step" && range ? { from: Math.floor(range[0]), to: Math.ceil(range[1]) } : {};
    for (const id of shared.state.ids) found.set(id, await get("series", { run: id, keys: keys.join(","), points: 900, ...within }));
    if (mine !== asked) return;
    data = found;
    if (smoothing < 0) {
      const rows = Math.max(...[...data.values()].map((s) => s.rows));
      const notch = rows < 150 ? 0 : Math.min(12, Math.max(1, Math.round(Math.log2(rows / 50 / 1.5)) + 1));
      smoothing = spanOf(notch);
      slider.value = String(notch);
    } else if (!slider.dataset.set) {
      slider.value = String(smoothing ? Math.round(Math.log2(smoothing / 1.5)) + 1 : 0);
    }
    slider.dataset.set = "1";
    showSpan();
    draw();
  }

  function position(series: Series, step: number): number {
    if (axis === "step") return step;
    return (series.time[nearest(series.step, step)] ?? 0) - series.time[0];
  }

  function frame(): Omit<Frame, "range"> {
    const first = data.get(shared.state.ids[0]);
    const marks = first ? (main()?.marks ?? []).filter((m) => m.step !== null)
      .map((mark) => ({ x: position(first, mark.step as number), mark: { ...mark, text: wordsOf(mark) } })) : [];
    const perStep = first && first.time.length > 1 ? (first.time.at(-1)! - first.time[0]) / Math.max(1, first.step.at(-1)! - first.step[0]) : 1;
    return {
      marks, smoothing: axis === "step" ? smoothing : smoothing * perStep,
      xText: (x) => (axis === "step" ? `step ${Math.round(x)}` : `${duration(x)} · step ${stepAt(x)}`),
      xTicks: axis === "time" ? (values) => values.map((v) => duration(v)) : undefined,
    };
  }

  function draw(): void {
    const now = frame();
    const drawn = charts.map(({ wanted }) => linesOf(wanted)), ends = drawn.flat().flatMap(({ x }) => (x.length ? [x[0], x[x.length - 1]] : []));
    whole = Math.min(...ends) < Math.max(...ends) ? [Math.min(...ends), Math.max(...ends)] : null;
    charts.forEach(({ chart }, n) => chart.draw(drawn[n], { ...now, range: range ?? whole }));
  }

  /** The trial alone where all runs shown are of one experiment. */
  function shortName(run: Summary): string {
    const parts = run.name.split("/");
    const isOne = shared.state.ids.every((id) => shared.summaries.get(id)!.name.startsWith(`${parts[0]}/`));
    return isOne ? parts[1] : run.name;
  }

  function linesOf(wanted: Wanted): Line[] {
    const keys = wanted.isEval ? wanted.keys : keysOf(wanted), several = shared.state.ids.length > 1;
    return shared.state.ids.flatMap((id, r) => {
      const series = data.get(id)!, run = shared.summaries.get(id)!;
      return keys.flatMap((key, k): Line[] => {
        const color = COLORS[(several ? r : k) % COLORS.length];
        const name = key.split("/").slice(2).filter((word) => word !== "reward_mean").join("/") || (key.split("/").at(-1) as string);
        const label = several ? (keys.length > 1 ? `${shortName(run)} ${name}` : shortName(run)) : name;
        if (wanted.isEval) {
          const found = evalsOf(run, key);
          return [{ ...found, x: found.x.map((v) => position(series, v)), label, color, isDots: true }];
        }
        const curve = series.series[key];
        if (!curve) return [];
        const scaled = (v?: (number | null)[]) => v && (wanted.scale ? v.map((y) => (y === null ? null : y * wanted.scale!)) : v);
        const x = axis === "step" ? series.step : series.time.map((t) => t - series.time[0]);
        return [{ label, color, isExact: wanted.isExact, dash: several ? DASHES[k % DASHES.length] : undefined, x, y: scaled(curve.mean)!,
          low: scaled(curve.min), high: scaled(curve.max) }];
      });
    });
  }

  let differing = "";
  async function compare(): Promise<void> {
    const ids = shared.state.ids;
    if (ids.length < 2) { fill(compared); return; }
    const found = await get("compare", { run: ids });
    const now = JSON.stringify([found, ids.map((id) => shared.summaries.get(id)!.sign)]);
    if (now === differing) return;
    differing = now;
    const names = ids.map((id) => shared.summaries.get(id)!.name);
    const keys = Object.entries(found.keys as Record<string, unknown[]>);
    fill(compared, h("section", { class: "panel compared" }, h("h2", null, "What differs"),
      found.partings.map((p: any, n: number) => h("p", null, h("b", null, names[0]), " and ", h("b", null, names[n + 1]), p
        ? [" part at ", h("a", { href: address("samples", [ids[0]], { step: String(p.step) }) }, `step ${p.step}`), `: ${p.key} is ${num(p.values[0], 6)} and ${num(p.values[1], 6)}.`]
        : " agree in every step that both have.")),
      table(["", ...names.map((name, n) => [h("i", { class: "swatch", style: { background: `var(${COLORS[n % COLORS.length]})` } }), name])], [
        ...FIGURES.map(([label, of]) => [label, ...ids.map((id) => of(shared.summaries.get(id)!))]).filter(([, ...values]) => values.some((v) => v !== "–")),
        ...keys.map(([key, values]) => [h("code", null, key), ...values.map((v) => h("code", null, typeof v === "string" ? v : JSON.stringify(v)))])]),
      !keys.length && h("p", { class: "muted" }, "Their configs are equal.")));
  }

  function stats(): void {
    const run = main();
    if (!run) return;
    const last = run.last ?? {}, rl = last.rl ?? {}, pairs = last.preference ?? {};
    const evaluated = run.evals.filter((e) => e.accuracy != null).at(-1), heldOut = run.evals.filter((e) => e.loss != null).at(-1);
    const item = (label: string, value: Child, note: Child = null, title = "") =>
      h("div", { class: "stat", title }, h("span", { class: "label" }, label), h("span", { class: "value" }, value), h("span", { class: "note" }, note));
    const total = run.total_steps;
    strip.hidden = shared.state.ids.length > 1 || !run.last; // the table of what differs has the figures of each
    fill(strip,
      item("Step", num(run.step, 6), total ? `of ${total}` : null),
      rl.reward_mean != null && item("Reward", num(rl.reward_mean), rl.reward_std != null && `± ${num(rl.reward_std, 2)} over samples`),
      rl.reward_mean == null && item("Loss", num(last.loss, 4), heldOut && `held out ${num(heldOut.loss, 4)}, step ${heldOut.version}`),
      pairs.accuracy != null && item("Pairs ranked right", share(pairs.accuracy), `margin ${num(pairs.margin)}`, shared.fields["preference/accuracy"]?.meaning),
      evaluated && item("Held-out accuracy", num(evaluated.accuracy),
        `${evaluated.accuracy_low != null ? `${num(evaluated.accuracy_low)} to ${num(evaluated.accuracy_high)}, ` : ""}step ${evaluated.version}`),
      last.tokens_per_sec != null && item("Tokens a second", num(last.tokens_per_sec, 4), last.wall_clock_ms != null && `${duration(last.wall_clock_ms / 1e3)} a step`),
      run.state === "running" ? item("Time left", duration(run.eta_s), run.eta_s === null ? "after two steps" : `until ${clock(Date.now() / 1e3 + run.eta_s)}`)
        : item("Took", duration(tookOf(run)), run.time ? `${run.state} ${clock(run.time)}` : run.state),
      last.infra?.ettr != null && item("Effective time", share(last.infra.ettr), "of the wall clock", shared.fields["infra/ettr"]?.meaning));
  }

  function events(): void {
    const run = main();
    if (!run) return;
    const marks: Mark[] = [...run.marks].reverse();
    const ends: Record<string, string> = {
      failed: `The run failed: ${run.reason || "exit.json and the end of log.txt say why"}`,
      interrupted: "The run was interrupted: its program ended without noting why (killed, or its machine was lost). The same command starts it again.",
    };
    const notes = [...run.notes, ...(ends[run.state] ? [ends[run.state]] : [])];
    const open = happened.querySelector("details")?.open ?? false;
    fill(happened, notes.map((text) => h("p", { class: "notice" }, text)),
      run.progress < 1 && h("p", { class: "notice" }, `Reading steps.jsonl: ${share(run.progress)}; until then the curves show every few steps.`),
      marks.length > 0 && h("details", { class: "events", open }, h("summary", null, `${marks.length} ${marks.length === 1 ? "event" : "events"}: `,
        h("span", { class: "muted" }, `${marks[0].kind} at step ${marks[0].step ?? "–"}: ${wordsOf(marks[0])}`)),
        h("ul", null, marks.slice(0, 100).map((mark) => h("li", null, h("span", { class: `kind ${mark.kind}` }, mark.kind),
          h("a", { href: address("samples", shared.state.ids, { step: String(mark.step ?? "") }) }, `step ${mark.step ?? "–"}`), " ", wordsOf(mark))))));
  }

  let shape = "";
  async function update(): Promise<void> {
    stats();
    events();
    const now = JSON.stringify(shared.state.ids.map((id) => [shared.summaries.get(id)?.keys, (shared.summaries.get(id)?.evals.length ?? 0) > 0]));
    if (now !== shape) { shape = now; build(); }
    await load();
    await compare();
  }
  return { el, update, close: () => charts.forEach(({ chart }) => chart.destroy()) };
}

function tookOf(run: Summary): number | null {
  const first = Date.parse(run.starts[0]?.time) / 1e3;
  return run.last?.time_s && first ? run.last.time_s - first : null;
}

const FIGURES: [string, (run: Summary) => string][] = [
  ["step", (run) => num(run.step, 6)], ["reward", (run) => num(run.reward)], ["loss", (run) => num(run.loss, 4)],
  ["held-out accuracy", (run) => num(run.evals.filter((e) => e.accuracy != null).at(-1)?.accuracy)],
  ["tokens a second", (run) => num(run.last?.tokens_per_sec, 4)], ["took", (run) => duration(tookOf(run))],
];

/** Without the step, which stands beside it. */
function wordsOf(mark: Mark): string {
  const words = mark.text.replace(/^step \d+: /, "");
  return mark.cost && Object.keys(mark.cost).length ? `${words}; it cost ${costOf(mark.cost)}` : words;
}

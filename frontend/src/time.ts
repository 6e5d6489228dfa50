// Where the time went: phases of each step, what each process did and which gate was closed, the slow
// steps and why, lag, the funnel, publishes, saves, starts.
import { get, type Json, type Series, type Summary } from "./api";
import { Chart, COLORS, css, type Frame, type Line } from "./chart";
import { choice, fill, h, panel, table, type Child } from "./dom";
import { clock, clockSeconds, duration, num, share } from "./format";
import { address, main, remember, shared, type Page } from "./state";

const PHASE_ORDER = ["rollout", "train", "publish", "evaluate", "save", "record", "other"];
/** The same colour in every run. */
const phaseColor = (name: string) => COLORS[PHASE_ORDER.includes(name) ? PHASE_ORDER.indexOf(name) : 8 + (name.length % 4)];
const PUBLISH = ["gather", "transfer", "pause", "install"].map((n) => `infra/publish_${n}_ms`);
const SAVES = ["infra/recover_stall_ms", "infra/recover_commit_ms", "infra/async_ckpt_commit_ms"];

export function time(): Page {
  const id = shared.state.ids[0];
  let range: [number, number] | null = null, series: Series | null = null;
  const events = { zoom: (a: number, b: number) => { range = [a, b]; void load(); }, reset: () => { range = null; void load(); }, pick: (x: number) => { remember("step", String(Math.round(x))); void load(); } };
  const phases = new Chart("Phases of each step", "duration of each phase; they exclude each other and sum to the step", "s", events, { stacked: true, height: 240 });
  const publishes = new Chart("Publishes", "of the last publish that samplers confirmed, by its parts", "ms", events);
  const gates = new Chart("Closed gates", "how long each gate kept prompts from being admitted, since the record before", "s", events, { stacked: true, named: true });
  const saves = new Chart("Checkpoints", "time training stood still for a recovery checkpoint, its commit, and the commit of an export", "ms", events);
  const totals = h("div", null), slow = h("div", null), one = h("div", null), rest = h("div", { class: "columns" }), line = h("div", null), lanes = h("div", { class: "lanes" });
  const charts = h("div", { class: "charts" }), worst = h("p", { class: "muted small under" });
  const el = h("div", null, h("section", { class: "panel flush" }, phases.el, worst), lanes, h("div", { class: "columns" }, h("div", null, totals, one), h("div", null, slow, line)), charts, rest);

  function phaseNames(run: Summary): string[] {
    const names = run.keys.filter((k) => k.startsWith("phases/")).map((k) => k.slice(7));
    const rank = (n: string) => (PHASE_ORDER.includes(n) ? PHASE_ORDER.indexOf(n) : 5.5);
    return names.sort((a, b) => rank(a) - rank(b));
  }

  async function load(): Promise<void> {
    const run = main();
    if (!run) return;
    const names = phaseNames(run), lags = run.keys.filter((k) => k.startsWith("rl/staleness/"));
    const closed = run.keys.filter((k) => k.startsWith("gates/"));
    const keys = [...names.map((n) => `phases/${n}`), ...closed, ...PUBLISH, ...SAVES, ...lags, "wall_clock_ms"];
    const within = range ? { from: Math.floor(range[0]), to: Math.ceil(range[1]) } : {};
    series = (await get("series", { run: id, keys: keys.join(","), points: 600, ...within })) as Series;
    if (!series.step.length || !names.length) {
      fill(totals, h("p", { class: "notice" }, "No step of this run has phases yet."));
      phases.el.hidden = true;
      return;
    }
    phases.el.hidden = false;
    const found = series;
    const lineOf = (key: string, label: string, n: number, scale = 1): Line => ({ label, color: COLORS[n % COLORS.length], x: found.step, y: (found.series[key]?.mean ?? []).map((v) => (v === null ? null : v * scale)) });
    const frame: Frame = { range: null, smoothing: 0, xText: (x) => `step ${x}`, marks: run.marks.filter((m) => m.step !== null && m.kind !== "warning").map((mark) => ({ x: mark.step as number, mark })) };
    const picked = Number(shared.state.params.get("step"));
    const here = picked ? [{ x: picked, mark: { kind: "picked", step: picked, time: null, text: "shown below" } }] : [];
    phases.draw(names.map((n) => ({ ...lineOf(`phases/${n}`, n, 0, 1e-3), color: phaseColor(n) })), { ...frame, marks: [...frame.marks, ...here] });
    const drawn: HTMLElement[] = [];
    for (const [chart, wanted, scale] of [[gates, closed, 1e-3], [publishes, PUBLISH, 1], [saves, SAVES, 1]] as const) {
      const have = wanted.filter((k) => found.series[k]?.mean.some((v) => v !== null));
      if (!have.length) continue;
      drawn.push(chart.el);
      if (!chart.el.isConnected) charts.append(chart.el);
      chart.draw(have.map((k, i) => lineOf(k, k.replace(/^\w+\/|_ms$/g, "").replace(/_/g, " "), i, scale)), frame);
    }
    fillTotals(names);
    fillTimeline(names, run);
    fillSlow(names);
    fillRest(run, lags);
    await fillStep(run, names);
  }

  function sums(keys: string[]): number[] {
    return keys.map((k) => (series?.series[k]?.mean ?? []).reduce((a: number, v) => a + (v ?? 0), 0));
  }

  function fillTotals(names: string[]): void {
    const parts = sums(names.map((n) => `phases/${n}`)), whole = parts.reduce((a, b) => a + b, 0) || 1;
    const mean = whole / series!.step.length / 1e3;
    fill(totals, panel(range ? "Share of these steps" : "Share of all steps", `a step takes ${duration(mean)} on average`,
      names.map((name, n) => meter(name, parts[n] / whole, phaseColor(name), share(parts[n] / whole)))));
  }

  function fillTimeline(names: string[], run: Summary): void {
    const times = series!.time, walls = (series!.series.wall_clock_ms?.mean ?? []).map((v) => (v ?? 0) / 1e3);
    const started = Date.parse(run.starts[0]?.time) / 1e3;
    const begin = !range && started ? Math.min(started, times[0] - walls[0]) : times[0] - walls[0];
    const end = times.at(-1)!, whole = end - begin || 1;
    const place = (t: number) => `${(100 * (t - begin)) / whole}%`;
    const gaps: { from: number; to: number }[] = [];
    const typical = [...walls].sort((a, b) => a - b)[walls.length >> 1] || 1;
    const stride = (times.at(-1)! - times[0]) / Math.max(1, times.length - 1);
    for (let n = 1; n < times.length; n++) {
      const idle = times[n] - times[n - 1] - Math.max(walls[n], stride);
      if (idle > Math.max(2, 3 * typical)) gaps.push({ from: times[n - 1], to: times[n] - walls[n] });
    }
    const spot = (t: number | null | undefined, cls: string, title: string) => t == null || t < begin || t > end ? null : h("i", { class: cls, style: { left: place(t) }, title });
    const stepTime = (step: number) => times[series!.step.findIndex((s) => s >= step)];
    fill(line, panel("The whole run", `${clock(begin)} to ${clock(end)}, ${duration(whole)} of wall clock`,
      lane("learner", [h("i", { class: "block", style: { left: "0", width: "100%", background: css(phaseColor("train")) } }),
        gaps.map((g) => h("i", { class: "block idle", style: { left: place(g.from), width: `${(100 * (g.to - g.from)) / whole}%` }, title: `no step for ${duration(g.to - g.from)}` }))]),
      lane("starts", run.starts.map((s) => spot(Date.parse(s.time) / 1e3 || null, "spot info", `${s.time}: started from step ${s.from_step}`)).concat(
        run.recoveries.map((r) => spot(Date.parse(r.time) / 1e3 || null, "spot bad", `learners recovered in ${r.total_s} s: ${r.cause}`)))),
      lane("evaluations", run.evals.map((e) => spot(stepTime(e.version), "spot good", `version ${e.version}: ${duration(e.seconds)}`))),
      lane("alarms", run.marks.filter((m) => ["alarm", "error", "rollback", "skipped"].includes(m.kind)).map((m) => spot(m.step === null ? null : stepTime(m.step), "spot warn", m.text))),
      gaps.length > 0 && h("p", { class: "muted small" }, `${gaps.length} ${gaps.length === 1 ? "gap" : "gaps"} without steps, ${duration(gaps.reduce((a, g) => a + g.to - g.from, 0))} in all`)));
  }

  function medians(names: string[]): Record<string, number> {
    return Object.fromEntries(names.map((n) => {
      const values = (series!.series[`phases/${n}`]?.mean ?? []).map((v) => v ?? 0).sort((a, b) => a - b);
      return [n, values[values.length >> 1] ?? 0];
    }));
  }

  function fillSlow(names: string[]): void {
    const walls = series!.series.wall_clock_ms?.mean ?? [], usual = medians(names);
    const order = walls.map((v, n) => [v ?? 0, n]).sort((a, b) => b[0] - a[0]).slice(0, 8);
    const rows = order.map(([wall, n]): [Child, string, string] => {
      const over = names.map((name) => [name, (series!.series[`phases/${name}`]?.mean[n] ?? 0) - usual[name]] as const).sort((a, b) => b[1] - a[1])[0];
      const step = series!.step[n];
      const why = over[1] > 0.02 * wall ? `${over[0]} +${duration(over[1] / 1e3)}${reasonOf(over[0], over[1] / 1e3, step)}` : "no phase took more than usual";
      return [h("a", { href: address("time", shared.state.ids, { step: String(step) }) }, String(step)), duration(wall / 1e3), why];
    });
    fill(slow, panel("Slowest steps", "and the phase that took most beyond its median", table(["step", "took", "because"], rows, [1])));
    const [step, took, reason] = [series!.step[order[0][1]], rows[0][1], rows[0][2]];
    fill(worst, "Slowest: ", h("a", { href: address("time", shared.state.ids, { step: String(step) }) }, `step ${step}`), ` took ${took}: ${reason}. Click a step to see its processes.`);
  }

  /** What else is known of the phase of a step. */
  function reasonOf(phase: string, over: number, step: number): string {
    const run = main()!, evaluated = run.evals.find((e) => e.version === step);
    if (phase === "publish" && evaluated) {
      const seconds = duration(evaluated.seconds);
      return evaluated.seconds <= over ? `, of which the evaluation ${seconds}` : `, while an evaluation of ${seconds} began`;
    }
    const mark = run.marks.find((m) => m.step === step && m.kind !== "warning");
    return mark ? `, ${mark.kind} at this step` : "";
  }

  async function fillStep(run: Summary, names: string[]): Promise<void> {
    const step = Number(shared.state.params.get("step")) || run.step;
    if (!step) return;
    let record: Json;
    try { record = await get("step", { run: id, step }); } catch (error) { fill(one, h("p", { class: "notice" }, (error as Error).message)); return; }
    await fillProcesses(run, names, record);
    const usual = medians(names), wall = record.wall_clock_ms ?? 1, most = Math.max(wall, ...Object.values(usual));
    const rows = names.map((name) => meter(name, (record.phases?.[name] ?? 0) / most, phaseColor(name),
      `${duration((record.phases?.[name] ?? 0) / 1e3)} (median ${duration(usual[name] / 1e3)})`));
    const balance = record.kernel?.balance as Record<string, Record<string, number>> | null;
    fill(one, panel(`Step ${step}`, `${duration(wall / 1e3)}, ${num(record.num_tokens, 6)} tokens, ${num(record.tokens_per_sec, 4)} tokens/s`, h("div", { class: "steady" }, rows),
      record.infra?.straggler != null && h("p", { class: "notice" }, `Rank ${record.infra.straggler} computed 1.5 times as long as the others.`),
      balance && [h("h3", null, "Experts' load by layer"), table(["layer", "mean", "std", "min", "max", "idle"], Object.entries(balance).map(([layer, b]) => [layer, num(b.mean), num(b.std), num(b.min), num(b.max), num(b.num_idle)]), [1, 2, 3, 4, 5])]));
  }

  /** What every process did around a step, and the gates that were closed. */
  async function fillProcesses(run: Summary, names: string[], record: Json): Promise<void> {
    const wide = Number(shared.state.params.get("wide")) || 3, wall = (record.wall_clock_ms ?? 0) / 1e3;
    let begin = record.time_s - wide * wall, lines: Json[], problem = "";
    try {
      if (wide < record.step) begin = (await get("step", { run: id, step: record.step - wide })).time_s;
      lines = await get("timeline", { run: id, from: begin, to: record.time_s });
    } catch (error) { lines = []; problem = (error as Error).message; }
    const end = record.time_s as number, whole = end - begin || 1;
    const spans: Span[] = lines.flatMap((line) => line.spans.map(([lane, what, from, length]: [string, string, number, number]) => ({ lane, what, begin: line.from_s + from / 1e3, length: length / 1e3 })));
    const shown = spans.filter((s) => s.begin < end && s.begin + s.length > begin);
    const order = (name: string) => (name === "learner" ? 0 : isWait(name) ? 3 : ["publish", "evaluation", "rewards"].includes(name) ? 2 : 1);
    const steps = lines.map((line) => ({ step: line.step, isRedone: line.superseded, to: line.from_s + Math.max(0, ...line.spans.map((s: number[]) => s[2] + s[3])) / 1e3 }));
    const all = new Set(shown.map((s) => s.lane)); // a scorer of several processes is shown by these
    const found = [...all].filter((n) => n === "learner" || !all.has(`${n}-0`)).sort((a, b) => order(a) - order(b) || a.localeCompare(b, undefined, { numeric: true })).slice(0, 64);
    const said = h("p", { class: "muted small said" }, "Point at a bar, or tab to a line, to read it.");
    const color = (s: Span) => (s.lane === "learner" ? phaseColor(s.what) : order(s.lane) === 2 ? "--c3" : "--c1");
    const bar = (s: Span): HTMLElement => {
      const isIdle = isWait(s.lane) || s.what.startsWith("waits");
      const from = Math.max(begin, s.begin), text = `${s.lane}: ${s.what}, ${duration(s.length)} from ${clockSeconds(s.begin)} on`;
      return h("i", { class: isIdle ? "block wait" : "block", title: text, onmouseenter: () => { said.textContent = text; },
        style: { left: `${(100 * (from - begin)) / whole}%`, width: `max(1px, ${(100 * (Math.min(end, s.begin + s.length) - from)) / whole}%)`, background: isIdle ? "" : `var(${color(s)})` } });
    };
    const closed = new Map<string, { seconds: number; what: string }>();
    for (const s of shown.filter((one) => one.lane === GATES)) {
      const gate = s.what.split(":")[0], seconds = Math.min(end, s.begin + s.length) - Math.max(begin, s.begin);
      closed.set(gate, { seconds: (closed.get(gate)?.seconds ?? 0) + seconds, what: s.what });
    }
    const pick = (to: number) => () => { remember("step", String(to)); void fillStep(run, names); };
    fill(lanes, panel("Processes and gates", `${wide === 1 ? `step ${record.step}` : `steps ${Math.max(1, record.step - wide + 1)} to ${record.step}`}: ${clockSeconds(begin)} to ${clockSeconds(end)}, ${duration(whole)}`,
      h("div", { class: "bar" },
        h("button", { type: "button", class: "ghost", "aria-label": "Earlier step", disabled: record.step <= 1, onclick: pick(record.step - 1) }, "‹"),
        h("button", { type: "button", class: "ghost", "aria-label": "Later step", disabled: record.step >= (run.step ?? 0), onclick: pick(record.step + 1) }, "›"),
        choice("Steps shown", [["1", "1 step"], ["3", "3 steps"], ["10", "10 steps"]], String(wide), (value) => { remember("wide", value); void fillStep(run, names); })),
      problem ? h("p", { class: "muted" }, problem) : !found.length && h("p", { class: "muted" }, "timeline.jsonl is missing or has nothing of this time."),
      found.length > 0 && lane("step", steps.map((one, n) => {
        const from = Math.max(begin, steps[n - 1]?.to ?? begin), to = Math.min(end, one.to), text = one.isRedone ? `${one.step}, done again later` : String(one.step);
        return to > from && h("span", { class: "stepname", title: text, style: { left: `${(100 * (from - begin)) / whole}%`, width: `${(100 * (to - from)) / whole}%` } }, text);
      })),
      found.map((name) => {
        const own = shown.filter((s) => s.lane === name), row = lane(name, own.map(bar)), track = row.lastElementChild as HTMLElement;
        const text = `${name}: ${totalsOf(own)}`;
        for (const [key, value] of [["tabindex", "0"], ["role", "img"], ["aria-label", text]]) track.setAttribute(key, value);
        track.addEventListener("focus", () => { said.textContent = text; });
        return row;
      }), found.length > 0 && said,
      closed.size > 0 && table(["closed gate", "for", "share", "last time"], [...closed].sort((a, b) => b[1].seconds - a[1].seconds).map(([gate, g]) => [gate, duration(g.seconds), share(g.seconds / whole), g.what.split(": ")[1] ?? ""]), [1, 2])));
  }

  function fillRest(run: Summary, lags: string[]): void {
    const counts = sums(lags), tokens = counts.reduce((a, b) => a + b, 0);
    const sorted = lags.map((k, n) => [Number(k.split("/").at(-1)), counts[n]]).sort((a, b) => a[0] - b[0]);
    const funnel = run.last?.funnel;
    const drawn = funnel?.drawn || 1;
    fill(rest,
      tokens > 0 && panel("Lag", "versions between sampling and training, by sampled tokens", sorted.map(([lag, count]) => meter(String(lag), count / tokens, "--c1", share(count / tokens)))),
      funnel?.drawn != null && panel("Funnel", `${num(funnel.drawn, 7)} prompts drawn = trained + dropped + in flight`,
        meter("trained", funnel.trained / drawn, "--good", num(funnel.trained, 7)),
        Object.entries((funnel.dropped ?? {}) as Record<string, number>).map(([why, count]) => meter(`dropped: ${why}`, count / drawn, "--warn", num(count, 7))),
        meter("in flight", funnel.in_flight / drawn, "--c1", num(funnel.in_flight, 7))),
      run.recoveries.length > 0 && wide("Recoveries", "what a loss of learners cost, by phase", table(["when", "cause", "total", "of which"], run.recoveries.slice(-20).reverse().map((r) => [r.time, r.cause, duration(r.total_s),
        Object.entries(r).filter(([k, v]) => k.endsWith("_s") && k !== "total_s" && typeof v === "number").map(([k, v]) => `${k.slice(0, -2).replace(/_/g, " ")} ${num(v as number)} s`).join(", ")]), [2])),
      wide("Starts", "each time the program was started in this folder, and what a restart cost", table(["when", "from step", "cost", "changed", "machine"], run.starts.slice(-20).reverse().map((s) => [
        Date.parse(s.time) ? clock(Date.parse(s.time) / 1e3) : s.time, num(s.from_step, 6), costOf(s.cost), (s.config_changes ?? []).join("; ") || "–",
        [s.hardware?.host, s.hardware?.gpus?.length ? `${s.hardware.gpus.length} × ${s.hardware.gpus[0]}` : `${s.hardware?.num_cpus ?? "?"} CPUs`].filter(Boolean).join(", ")]), [1])));
  }

  function wide(...given: Parameters<typeof panel>): HTMLElement {
    const found = panel(...given);
    found.classList.add("wide");
    return found;
  }

  return { el, update: load, close: () => [phases, gates, publishes, saves].forEach((c) => c.destroy()) };
}

interface Span { lane: string; what: string; begin: number; length: number }

const GATES = "rollout waits";
const isWait = (name: string) => name.endsWith(" waits");

function lane(label: string, items: Child[]): HTMLElement {
  return h("div", { class: "lane" }, h("span", { class: "label", title: label }, label), h("div", { class: "track" }, items));
}

/** Seconds by what was done, numbers aside, the longest first. */
function totalsOf(spans: Span[]): string {
  const found = new Map<string, number>();
  for (const s of spans) {
    const what = s.what.split(":")[0].replace(/ *\d+/g, "");
    found.set(what, (found.get(what) ?? 0) + s.length);
  }
  return [...found].sort((a, b) => b[1] - a[1]).map(([what, seconds]) => `${what} ${duration(seconds)}`).join(", ");
}

/** What a start cost, in parts that add up. */
export function costOf(cost: Record<string, number>): string {
  const parts: [string, number | undefined][] = [["away", cost.away_s], ["until its first step", cost.until_step_s], [`in ${cost.redone} steps done again`, cost.redone ? cost.redone_s : undefined]];
  const known = parts.filter((p): p is [string, number] => p[1] !== undefined && p[1] !== null);
  if (!known.length) return "–";
  const each = known.map(([name, s]) => `${duration(Math.max(0, s))} ${name}`).join(", ");
  return known.length > 1 ? `${duration(known.reduce((a, [, s]) => a + Math.max(0, s), 0))}: ${each}` : each;
}

export function meter(label: string, part: number, color: string, text: string): HTMLElement {
  return h("div", { class: "meter" }, h("span", { class: "label" }, label),
    h("span", { class: "track" }, h("i", { style: { width: `${Math.min(100, Math.max(0.3, 100 * (part || 0)))}%`, background: `var(${color})` } })), h("span", { class: "value" }, text));
}

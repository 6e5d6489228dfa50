// One chart: lines with their range, marks, a shared cursor, zoom, and its picture as a file.
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Mark } from "./api";
import { h, fill, save } from "./dom";
import { num } from "./format";

export const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8", "--c9", "--c10", "--c11", "--c12"];
const HEIGHT = 190;
/** Distances of ticks, in steps and in seconds. */
const STEPS = Array.from({ length: 27 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));
const TIMES = [0.001, 0.01, 0.1, 1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((n) => 60 * n), ...[1, 2, 3, 6, 12, 24, 48, 168, 720].map((n) => 3600 * n)];

export function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export interface Line {
  label: string;
  color: string; // name of a CSS variable
  dash?: number[];
  x: number[];
  y: (number | null)[];
  low?: (number | null)[];
  high?: (number | null)[];
  isDots?: boolean; // points with their interval, not smoothed
  isExact?: boolean; // never smoothed
}

export interface Frame {
  range: [number, number] | null;
  marks: { x: number; mark: Mark }[];
  smoothing: number;
  xText: (x: number) => string;
  xTicks?: (values: number[]) => string[];
}

export interface ChartEvents {
  zoom: (low: number, high: number) => void;
  reset: () => void;
  pick: (x: number) => void;
}

/** Exponential mean over `span` units of x, so that it does not depend on how far data are cut down;
 * of the steps before and after alike, so that a rise is drawn where it was and not later. */
export function smoothed(x: number[], y: (number | null)[], span: number): (number | null)[] {
  const order = y.map((_, n) => n).filter((n) => y[n] !== null);
  const found: (number | null)[] = y.map(() => null);
  for (const way of [order, [...order].reverse()]) {
    let mean = 0, at: number | null = null;
    for (const n of way) {
      mean = at === null ? y[n]! : mean + (1 - Math.exp(-Math.abs(x[n] - at) / span)) * (y[n]! - mean);
      at = x[n];
      found[n] = (found[n] ?? 0) + mean / 2;
    }
  }
  return found;
}

const MARK_COLORS: Record<string, string> = {
  alarm: "--bad", error: "--bad", warning: "--warn", restart: "--info", recovery: "--info",
  rollback: "--bad", skipped: "--warn", picked: "--text",
};

export class Chart {
  readonly el: HTMLElement;
  private plot: uPlot | null = null;
  private box = h("div", { class: "plot" });
  private legend = h("div", { class: "legend", "aria-live": "off" });
  private tip = h("div", { class: "tip", hidden: true });
  private lines: Line[] = [];
  private shape = "";
  private frame: Frame | null = null;
  private columns: { line: number; part: "raw" | "main" | "low" | "high" }[] = [];

  constructor(
    readonly title: string, readonly about: string, readonly unit: string,
    private events: ChartEvents, private options: { stacked?: boolean; log?: boolean; named?: boolean; height?: number } = {},
  ) {
    this.box.append(this.tip);
    this.el = h("figure", { class: "chart" },
      h("figcaption", null,
        h("span", { class: "title", title: about }, title),
        unit && h("span", { class: "unit" }, unit),
        h("span", { class: "tools" },
          h("button", { type: "button", class: "ghost", title: "Save as PNG", "aria-label": `Save ${title} as PNG`, onclick: () => this.savePng() }, "PNG"),
          h("button", { type: "button", class: "ghost", title: "Save as SVG", "aria-label": `Save ${title} as SVG`, onclick: () => this.saveSvg() }, "SVG"))),
      this.legend, this.box);
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", `${title}: ${about}. Arrow keys move the cursor, Enter picks the step, Escape shows all.`);
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.fit()).observe(this.box);
  }

  draw(lines: Line[], frame: Frame): void {
    this.lines = lines;
    this.frame = frame;
    const data = this.table();
    const shape = JSON.stringify([lines.map((l) => [l.label, l.color, l.dash, l.isDots]), this.columns]);
    if (!this.plot || shape !== this.shape) {
      this.plot?.destroy();
      this.plot = new uPlot(this.uplotOptions(), data, this.box);
      this.shape = shape;
      this.plot.over.addEventListener("click", () => {
        const at = this.plot?.cursor.idx;
        if (at !== null && at !== undefined && this.plot) this.events.pick(this.plot.data[0][at]);
      });
    } else {
      this.plot.setData(data, false);
    }
    this.setRange(frame.range);
    this.showLegend();
  }

  setRange(range: [number, number] | null): void {
    const x = this.plot?.data[0] as number[] | undefined;
    if (!this.plot || !x?.length) return;
    let [min, max] = range ?? [x[0], x[x.length - 1]];
    if (this.options.stacked && !range) [min, max] = [min - half(x), max + half(x)]; // whole bars
    else if (min === max) [min, max] = [Math.max(0, min - 1), max + 1];
    this.plot.setScale("x", { min, max });
  }

  redraw(): void {
    this.plot?.redraw(true, true);
    this.showLegend();
  }

  destroy(): void {
    this.plot?.destroy();
  }

  private table(): uPlot.AlignedData {
    const xs = [...new Set(this.lines.flatMap((l) => l.x))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, n) => [x, n]));
    const spread = (l: Line, values: (number | null)[]) => {
      const out: (number | null)[] = new Array(xs.length).fill(null);
      l.x.forEach((x, n) => { out[place.get(x) as number] = values[n] ?? null; });
      return out;
    };
    const columns: (number | null)[][] = [];
    this.columns = [];
    const add = (line: number, part: "raw" | "main" | "low" | "high", values: (number | null)[]) => {
      this.columns.push({ line, part });
      columns.push(values);
    };
    if (this.options.stacked) { // each reaches down to zero, so the highest is drawn first
      const stack = new Array(xs.length).fill(0);
      const tops = this.lines.map((l) => spread(l, l.y).map((v, i) => (stack[i] += v ?? 0)));
      for (let n = tops.length - 1; n >= 0; n--) add(n, "main", tops[n]);
      return [xs, ...columns] as uPlot.AlignedData;
    }
    this.lines.forEach((l, n) => {
      if (l.low && l.high) { add(n, "low", spread(l, l.low)); add(n, "high", spread(l, l.high)); }
      const isSmooth = !l.isDots && !l.isExact && (this.frame?.smoothing ?? 0) > 0;
      if (isSmooth) add(n, "raw", spread(l, l.y));
      add(n, "main", spread(l, isSmooth ? smoothed(l.x, l.y, this.frame!.smoothing) : l.y));
    });
    return [xs, ...columns] as uPlot.AlignedData;
  }

  private uplotOptions(): uPlot.Options {
    const width = Math.max(200, this.box.clientWidth);
    const bands: uPlot.Band[] = [];
    const count = new Set(this.lines.flatMap((l) => l.x)).size;
    const series: uPlot.Series[] = [{}];
    const bars = uPlot.paths.bars!({ size: [1, Infinity], gap: 0 });
    this.columns.forEach(({ line, part }, n) => {
      const l = this.lines[line];
      const color = () => css(l.color);
      if (part === "high" && !l.isDots) bands.push({ series: [n + 1, n], fill: () => faded(css(l.color), 0.16) });
      if (this.options.stacked) {
        series.push({ width: 0, paths: bars, points: { show: false }, fill: color });
      } else if (part === "main") {
        series.push({ stroke: color, width: l.isDots ? 1.5 : 1.75, dash: l.dash, spanGaps: true,
          points: { show: l.isDots || count < 30, size: 5, fill: color } });
      } else if (part === "raw") {
        series.push({ stroke: () => faded(css(l.color), 0.28), width: 1, spanGaps: true, points: { show: false } });
      } else {
        series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      }
    });
    const axis = {
      stroke: () => css("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: () => css("--grid"), width: 1 },
    };
    return {
      width, height: this.options.height ?? HEIGHT, series, bands, padding: [8, 12, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false },
        y: {
          distr: this.options.log ? 3 : 1,
          range: this.options.log ? undefined : (_u, low, high) => nice(low, high, Boolean(this.options.stacked)),
        },
      },
      axes: [
        { ...axis, size: 26, space: 56, incrs: () => (this.frame?.xTicks ? TIMES : STEPS), values: (_u, v) => this.xLabels(v) },
        { ...axis, size: 54, space: 34, values: (_u, v, _a, _s, step) => tickLabels(v, step) },
      ],
      cursor: {
        sync: { key: "pentad", setSeries: false }, focus: { prox: -1 },
        points: { size: 6 },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { this.events.reset(); return null; } },
      },
      hooks: {
        setCursor: [() => { this.showLegend(); this.showTip(); }],
        setSelect: [(u) => {
          if (u.select.width < 6) return;
          const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.events.zoom(low, high);
        }],
        draw: [(u) => this.drawMarks(u), (u) => this.drawIntervals(u)],
      },
    };
  }

  /** The first says what is counted. */
  private xLabels(values: (number | null)[]): string[] {
    if (this.frame?.xTicks) return this.frame.xTicks(values as number[]);
    const whole = values.map((x) => (Number.isInteger(x) ? num(x, 6) : ""));
    const first = whole.findIndex((text, n) => text && (values[n] as number) > 0 && n < whole.length - 1);
    return whole.map((text, n) => (n === first ? `step ${text}` : text));
  }

  private drawMarks(u: uPlot): void {
    const { ctx } = u, { top, height, left, width } = u.bbox;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { x, mark } of this.frame?.marks ?? []) {
      const at = Math.round(u.valToPos(x, "x", true));
      if (at < left || at > left + width) continue;
      ctx.strokeStyle = faded(css(MARK_COLORS[mark.kind] ?? "--muted"), 0.65);
      ctx.beginPath();
      ctx.moveTo(at, top);
      ctx.lineTo(at, top + height);
      ctx.stroke();
    }
    ctx.restore();
  }

  private drawIntervals(u: uPlot): void {
    const { ctx } = u;
    for (const l of this.lines) {
      if (!l.isDots || !l.low || !l.high) continue;
      ctx.save();
      ctx.strokeStyle = faded(css(l.color), 0.6);
      ctx.lineWidth = 1.25 * devicePixelRatio;
      l.x.forEach((x, n) => {
        const low = l.low![n], high = l.high![n];
        if (low === null || high === null) return;
        const at = u.valToPos(x, "x", true);
        ctx.beginPath();
        ctx.moveTo(at, u.valToPos(low, "y", true));
        ctx.lineTo(at, u.valToPos(high, "y", true));
        ctx.stroke();
      });
      ctx.restore();
    }
  }

  private showLegend(): void {
    const u = this.plot;
    if (!u) return;
    const at = u.cursor.idx;
    const isAt = at !== null && at !== undefined && at < u.data[0].length && (u.cursor.left ?? -1) >= 0;
    const entries = this.lines.map((l) => {
      const place = isAt ? nearest(l.x, u.data[0][at!]) : l.x.length - 1;
      let n = place;
      while (!isAt && n > 0 && l.y[n] === null) n--;
      let text = num(l.y[n], 4);
      if (l.isDots && l.low?.[n] != null) text += ` [${num(l.low[n], 3)}, ${num(l.high![n], 3)}]`;
      return h("span", { class: "entry" }, swatch(l),
        (this.lines.length > 1 || this.options.named) && h("span", { class: "label" }, l.label), h("b", null, text));
    });
    const where = isAt && this.frame ? h("span", { class: "where" }, this.frame.xText(u.data[0][at!])) : null;
    fill(this.legend, entries, where);
  }

  private showTip(): void {
    const u = this.plot, left = u?.cursor.left ?? -1;
    const close = (this.frame?.marks ?? []).filter(({ x }) => u && left >= 0 && Math.abs(u.valToPos(x, "x") - left) < 5);
    const isOwn = u?.cursor.event?.type !== undefined && this.box.matches(":hover, :focus-within");
    this.tip.hidden = !close.length || !isOwn;
    if (this.tip.hidden || !u) return;
    fill(this.tip, close.slice(0, 4).map(({ mark }) => h("div", null, h("b", null, mark.kind), " ", mark.text)));
    const isRight = left > u.over.clientWidth / 2;
    Object.assign(this.tip.style, {
      left: isRight ? "auto" : `${left + 66}px`, right: isRight ? `${u.over.clientWidth - left + 20}px` : "auto",
    });
  }

  private key(event: KeyboardEvent): void {
    const u = this.plot;
    if (!u) return;
    const x = u.data[0] as number[];
    const now = u.cursor.idx ?? x.length - 1;
    if (event.key === "Escape") this.events.reset();
    else if (event.key === "Enter") this.events.pick(x[now]);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const next = Math.min(x.length - 1, Math.max(0, now + (event.key === "ArrowLeft" ? -1 : 1)));
      u.setCursor({ left: u.valToPos(x[next], "x"), top: u.over.clientHeight / 2 });
    } else return;
    event.preventDefault();
  }

  private fit(): void {
    const width = this.box.clientWidth;
    if (this.plot && width > 50 && width !== this.plot.width) {
      this.plot.setSize({ width, height: this.options.height ?? HEIGHT });
    }
  }

  private savePng(): void {
    if (!this.plot) return;
    const { canvas } = this.plot.ctx, r = devicePixelRatio, head = 34 * r;
    const page = h("canvas", { width: canvas.width, height: canvas.height + head });
    const ctx = page.getContext("2d")!;
    ctx.fillStyle = css("--panel");
    ctx.fillRect(0, 0, page.width, page.height);
    ctx.fillStyle = css("--text");
    ctx.font = `600 ${13 * r}px system-ui, sans-serif`;
    ctx.fillText(`${this.title}${this.unit ? ` (${this.unit})` : ""}`, 10 * r, 22 * r);
    let right = page.width - 10 * r;
    ctx.font = `${12 * r}px system-ui, sans-serif`;
    for (const l of [...this.lines].reverse().slice(0, 6)) {
      right -= ctx.measureText(l.label).width;
      ctx.fillStyle = css(l.color);
      ctx.fillText(l.label, right, 22 * r);
      right -= 14 * r;
    }
    ctx.drawImage(canvas, 0, head);
    page.toBlob((blob) => blob && save(`${fileName(this.title)}.png`, blob));
  }

  private saveSvg(): void {
    const u = this.plot;
    if (!u) return;
    const width = u.width, height = (this.options.height ?? HEIGHT) + 34, r = devicePixelRatio;
    const box = { left: u.bbox.left / r, top: u.bbox.top / r + 34, width: u.bbox.width / r, height: u.bbox.height / r };
    const out = [`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" font-family="system-ui, sans-serif" font-size="11">`,
      `<rect width="${width}" height="${height}" fill="${css("--panel")}"/>`,
      `<text x="10" y="20" font-size="13" font-weight="600" fill="${css("--text")}">${escaped(`${this.title}${this.unit ? ` (${this.unit})` : ""}`)}</text>`];
    const ticks = (n: number): [number, string][] => { // those that are drawn
      const { _splits, _values } = u.axes[n] as unknown as { _splits: number[]; _values: string[] };
      return _splits.map((value, i) => [value, _values[i]]);
    };
    for (const [x, text] of ticks(0)) out.push(`<text x="${u.valToPos(x, "x") + box.left}" y="${box.top + box.height + 16}" text-anchor="middle" fill="${css("--muted")}">${escaped(text)}</text>`);
    for (const [y, text] of ticks(1)) {
      const at = u.valToPos(y, "y") + box.top;
      out.push(`<text x="${box.left - 6}" y="${at + 4}" text-anchor="end" fill="${css("--muted")}">${escaped(text)}</text><path d="M${box.left} ${at}h${box.width}" stroke="${css("--grid")}"/>`);
    }
    const across = (x: number) => (u.valToPos(x, "x") + box.left).toFixed(1), up = (y: number) => (u.valToPos(y, "y") + box.top).toFixed(1);
    const xs = u.data[0] as number[], wide = half(xs);
    for (const { x, mark } of (this.frame?.marks ?? []).filter((one) => one.mark.kind !== "picked")) {
      out.push(`<path d="M${across(x)} ${box.top}v${box.height}" stroke="${css(MARK_COLORS[mark.kind] ?? "--muted")}" stroke-dasharray="3 3"><title>${escaped(mark.text)}</title></path>`);
    }
    this.columns.forEach(({ line, part }, n) => {
      if (part === "low" || part === "high") return;
      const ys = u.data[n + 1] as (number | null)[], color = css(this.lines[line].color);
      const points = ys.map((y, i) => (y === null ? "" : this.options.stacked ? `M${across(xs[i] - wide)} ${up(0)}V${up(y)}H${across(xs[i] + wide)}V${up(0)}z` : `${across(xs[i])},${up(y)}`)).filter(Boolean).join(" ");
      out.push(this.options.stacked ? `<path fill="${color}" d="${points}"/>`
        : `<polyline fill="none" stroke="${color}" stroke-opacity="${part === "raw" ? 0.3 : 1}" stroke-width="1.6" points="${points}"/>`);
    });
    for (const l of this.lines.filter((one) => one.isDots && one.low && one.high)) {
      l.x.forEach((x, n) => out.push(`<path d="M${across(x)} ${up(l.low![n]!)}V${up(l.high![n]!)}" stroke="${css(l.color)}" stroke-opacity="0.6"/>`));
    }
    let right = width - 10;
    for (const l of [...this.lines].reverse().slice(0, 8)) {
      out.push(`<text x="${right}" y="20" text-anchor="end" fill="${css(l.color)}">${escaped(l.label)}</text>`);
      right -= 6.5 * l.label.length + 14;
    }
    save(`${fileName(this.title)}.svg`, new Blob([out.join("\n"), "\n</svg>\n"], { type: "image/svg+xml" }));
  }
}

/** The colour of a line, and its dashes where it has some. */
function swatch(l: Line): HTMLElement {
  const color = css(l.color), [on, off] = l.dash ?? [1, 0];
  return h("i", { class: l.dash ? "swatch dashed" : "swatch", style: { background: `repeating-linear-gradient(90deg, ${color} 0 ${on}px, transparent ${on}px ${on + off}px)` } });
}

/** Half of what lies between two bars. */
function half(x: number[]): number {
  return x.length > 1 ? (x[x.length - 1] - x[0]) / (x.length - 1) / 2 : 0.5;
}

function escaped(text: string): string {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
}

function fileName(title: string): string {
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
}

export function faded(color: string, alpha: number): string {
  const n = parseInt(color.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
}

/** From zero where that costs little, with some air else. */
function nice(low: number | null, high: number | null, isStacked: boolean): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (isStacked) return [0, high * 1.05 || 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  const air = (high - low) * 0.08;
  const bottom = low >= 0 && low < (high - low) * 0.6 ? 0 : low - air;
  return [bottom, bottom === 0 && high <= 1 && high > 0.9 ? 1.02 : high + air];
}

/** As many digits as tell ticks apart; where that is too many, their distance from the middle. */
function tickLabels(values: number[], step: number): string[] {
  const most = Math.max(...values.map(Math.abs));
  const digits = most && step ? Math.max(2, Math.ceil(Math.log10(most / step) + 0.3) + 1) : 3;
  if (digits <= 6) return values.map((y) => num(y, digits));
  const base = Number(most.toPrecision(4));
  return values.map((y) => (Math.abs(y - base) < step / 2 ? num(base, 4) : `${y > base ? "+" : "−"}${num(Math.abs(y - base), 2)}`));
}

export function nearest(x: number[], at: number): number {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const mid = (low + high) >> 1;
    if (x[mid] > at) high = mid; else low = mid;
  }
  return high >= 0 && Math.abs((x[high] ?? Infinity) - at) < Math.abs((x[low] ?? Infinity) - at) ? high : low;
}

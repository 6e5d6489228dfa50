// The plan of the run: its processes and devices, and memory by phase against the device.
import { get, type Json } from "./api";
import { COLORS } from "./chart";
import { fill, h, panel, table, type Child } from "./dom";
import { gib, num } from "./format";
import { shared, type Page } from "./state";

export function plan(): Page {
  const el = h("div", null, h("p", { class: "muted" }, "Planning ..."));
  let isRead = false;

  async function update(): Promise<void> {
    if (isRead) return;
    try {
      show(await get("plan", { run: shared.state.ids[0] }));
      isRead = true;
    } catch (error) {
      fill(el, h("p", { class: "notice" }, (error as Error).message));
    }
  }

  function show(p: Json): void {
    const device = p.device.memory_bytes;
    fill(el,
      h("div", { class: "stats" },
        stat("Verdict", p.fits ? "fits" : "does not fit", `${gib(p.peak_bytes)} of ${gib(device)} at the peak`),
        stat("Model", `${num(p.model.num_params, 3)}`, `parameters${p.model.num_active_params !== p.model.num_params ? `, ${num(p.model.num_active_params)} active` : ""}`),
        stat("Layout", p.allocation.text, p.device.kind === "cuda" ? `${p.allocation.num_devices} GPUs` : "on the CPU"),
        stat("Batch", `${num(p.batch.samples, 6)}`, `sequences a step, at most ${num(p.batch.max_tokens, 3)} tokens`)),
      p.lacks.map((text: string) => h("p", { class: "notice" }, `Does not fit: ${text}.`)),
      panel("Processes", "what a run starts, and on which devices", table(["process", "runs", "machine", "devices", "shares with", "started by"],
        alike(p.processes).map(([one, last]) => [upTo(one.name, last.name), upTo((one.runs ?? []).join(", "), (last.runs ?? []).join(", ")), one.node ?? "any", (one.devices ?? []).join(", ") || "–", (one.shares_with ?? []).join(", ") || "–", one.started_by])),
        p.device.kind === "cuda" && devices(p)),
      p.trainers.map((trainer: Json) => memory(trainer, device)),
      p.samplers.length > 0 && panel("Samplers", "memory of a device, and room for sequences at once", p.samplers.map((s: Json) => sampler(s, device)), legendOf(["weights", "key-value cache", "a pass", ...(p.samplers.some((s: Json) => s.slots_bytes) ? ["states"] : [])])),
      p.remedies.length > 0 && !p.fits && panel("What would help", "each on top of those before it", table(["overrides", "peak", ""], p.remedies.map((r: Json) => [h("code", null, r.overrides.join(" ")), gib(r.peak_bytes), r.fits ? "fits" : ""]), [1])),
      p.notes.length > 0 && panel("Notes", "", h("ul", null, p.notes.map((text: string) => h("li", null, text)))));
  }

  function devices(p: Json): Child {
    const parts = [...p.trainers.map((t: Json) => [t.role, t.devices]), ...p.samplers.map((s: Json) => [s.component, s.devices])] as [string, [number, number]][];
    const count = Math.min(64, p.allocation.num_devices);
    return h("div", { class: "devices", role: "img", "aria-label": "which roles are on which device" }, Array.from({ length: count }, (_, n) =>
      h("div", { class: "device" }, h("span", { class: "muted" }, String(n)), parts.map(([name, [from, to]], i) => (n >= from && n < to ? h("i", { style: { background: `var(${COLORS[i % COLORS.length]})` }, title: name }) : null)))),
      legendOf(parts.map(([name]) => name)));
  }

  function memory(trainer: Json, device: number): HTMLElement {
    const size = (row: Json) => Math.max(...Object.values(row as Record<string, Json>).map((phase) => total(phase.device)));
    const ranks: Json[] = trainer.pipeline_ranks;
    const rank = ranks.reduce((best, row, n) => (size(row) > size(ranks[best]) ? n : best), 0);
    const at = ranks.length > 1 ? `, pipeline rank ${rank}` : "";
    const names = [...new Set(Object.values(ranks[rank] as Record<string, Json>).flatMap((phase) => Object.keys(phase.device)))];
    const most = size(ranks[rank]), scale = scaleOf(most, device);
    const line = scale < device ? `the device has ${gib(device)}` : "the line is the device's memory";
    return panel(`${trainer.role}: memory by phase`, `a device${at}, ${trainer.layout}; an estimate, ${line}`,
      Object.entries(ranks[rank] as Record<string, Json>).map(([name, phase]) => stack(name, phase.device, device, gib(total(phase.device)), scale, names)),
      legendOf(names));
  }

  return { el, update };
}

/** The first and the last of processes in a row that differ in their numbers alone. */
function alike(processes: Json[]): [Json, Json][] {
  const kind = (one: Json) => JSON.stringify([one.name.replace(/\d+$/, ""), one.runs?.map((r: string) => r.replace(/\d+$/, "")), one.node, one.devices, one.shares_with, one.started_by]);
  const found: [Json, Json][] = [];
  for (const one of processes) {
    const before = found.at(-1);
    if (before && kind(before[1]) === kind(one)) before[1] = one; else found.push([one, one]);
  }
  return found;
}

function upTo(first: string, last: string): string {
  return first === last ? first : `${first} to ${last.match(/\d+$/)?.[0] ?? last}`;
}

function stat(label: string, value: string, note: string): HTMLElement {
  return h("div", { class: "stat" }, h("span", { class: "label" }, label), h("span", { class: value.length > 12 ? "value long" : "value" }, value), h("span", { class: "note" }, note));
}

function sampler(s: Json, device: number): HTMLElement {
  const parts = { weights: s.weights_bytes, "key-value cache": s.kv_bytes, "a pass": s.pass_bytes ?? 0, states: s.slots_bytes ?? 0 };
  const text = `${gib(total(parts))}, room for ${num(s.num_running, 6)} sequences`;
  return stack(s.component, parts, device, text, scaleOf(total(parts), device));
}

function legendOf(names: string[]): HTMLElement {
  return h("p", { class: "parts" }, names.map((name, n) => h("span", null, h("i", { class: "swatch", style: { background: `var(${COLORS[n % COLORS.length]})` } }), name)));
}

function total(parts: Record<string, number>): number {
  return Object.values(parts).reduce((a, b) => a + b, 0);
}

/** Bytes of a whole bar: the device's, unless all that is shown is small against it. */
function scaleOf(most: number, device: number): number {
  return most < 0.1 * device ? most / 0.8 || 1 : Math.max(device, most);
}

function stack(label: string, parts: Record<string, number>, device: number, text: string, scale: number, order: string[] = Object.keys(parts)): HTMLElement {
  return h("div", { class: text.length > 12 ? "meter long" : "meter" }, h("span", { class: "label" }, label),
    h("span", { class: "track" }, order.map((name, n) => h("i", { style: { width: `${(100 * (parts[name] ?? 0)) / scale}%`, background: `var(${COLORS[n % COLORS.length]})` }, title: `${name} ${gib(parts[name] ?? 0)}` })),
      scale >= device && h("em", { style: { left: `${(100 * device) / scale}%` }, title: `the device: ${gib(device)}` })),
    h("span", { class: "value" }, text));
}

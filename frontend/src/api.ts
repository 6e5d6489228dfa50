// What the page asks for: of the server, or of the records inside an exported file.

export type Json = any; // records of a run: read with care, whatever version wrote them

export interface Mark { kind: string; step: number | null; time: number | null; text: string; cost?: Record<string, number> }
export interface Brief {
  id: string; name: string; path: string; state: string; step: number | null; time: number;
  reward: number | null; loss: number | null;
}
export interface Summary extends Brief {
  sign: string; last: Json; progress: number; keys: string[];
  total_steps: number | null; eta_s: number | null; evals: Json[]; recoveries: Json[];
  starts: Json[]; marks: Mark[]; reason: string | null; notes: string[]; has_plan: boolean;
}
export interface Curve { mean: (number | null)[]; min?: (number | null)[]; max?: (number | null)[] }
export interface Series { step: number[]; time: number[]; series: Record<string, Curve>; rows: number }
export interface Field { meaning: string; unit: string }

const held = document.getElementById("data")?.textContent;
const inside: Json = held ? JSON.parse(held) : null;
export const isExported = inside !== null;

export class Failed extends Error {}

export async function get(path: string, params: Record<string, Json> = {}): Promise<Json> {
  if (inside) return fromInside(path, params);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, String(one));
  }
  let answer: Response;
  try {
    answer = await fetch(`/api/${path}?${query}`);
  } catch {
    throw new Failed("The server does not answer: is `pentad view` still running?");
  }
  const kind = answer.headers.get("content-type") ?? "";
  if (!kind.startsWith("application/json")) throw new Failed(await answer.text());
  const body = await answer.json();
  if (!answer.ok) throw new Failed(body.error ?? `${path}: ${answer.status}`);
  return body;
}

function fromInside(path: string, params: Record<string, Json>): Json {
  switch (path) {
    case "runs": return { runs: [inside.run] };
    case "run": return inside.run;
    case "fields": return inside.fields;
    case "plan": if (inside.plan?.error) throw new Failed(inside.plan.error); return inside.plan;
    case "series": return sliced(inside.series, params);
    case "samples": return listed(params);
    case "group": {
      const same = (g: Json) => g.step === Number(params.step) && g.gid === Number(params.gid);
      const samples = inside.samples.filter(same);
      const group = inside.groups.find(same);
      if (group) return group;
      const notes = ["The exported file has the samples of samples.jsonl alone for this group."];
      return { ...(samples[0] ?? {}), samples, notes };
    }
    default: throw new Failed("An exported file does not hold this; open the run with `pentad view`.");
  }
}

function sliced(all: Series, params: Record<string, Json>): Series {
  const low = params.from ?? -Infinity, high = params.to ?? Infinity;
  const keep = all.step.map((s, n) => (s >= low && s <= high ? n : -1)).filter((n) => n >= 0);
  const pick = <T>(values: T[]) => keep.map((n) => values[n]);
  const series: Record<string, Curve> = {};
  for (const key of String(params.keys).split(",")) {
    const curve = all.series[key];
    if (!curve) continue;
    series[key] = { mean: pick(curve.mean) };
    if (curve.min && curve.max) Object.assign(series[key], { min: pick(curve.min), max: pick(curve.max) });
  }
  return { step: pick(all.step), time: pick(all.time), series, rows: keep.length };
}

function listed(p: Record<string, Json>): Json {
  const all: Json[] = inside.samples;
  const last = all.length ? Math.max(...all.map((s) => s.step)) : null;
  const step = p.last ? last : p.step ? Number(p.step) : null;
  const text = String(p.text ?? "").toLowerCase();
  const within = (v: number, low: Json, high: Json) =>
    (low === undefined || low === "" || v >= Number(low)) && (high === undefined || high === "" || v <= Number(high));
  const found = all.filter((s) =>
    (step === null || s.step === step) && (!p.pick || s.pick === p.pick) && (!p.finish || s.finish === p.finish) &&
    (!p.environment || s.environment === p.environment) && (!p.version || (s.min_version <= Number(p.version) && s.max_version >= Number(p.version))) &&
    (!p.prompt || s.prompt_key === Number(p.prompt)) && within(s.reward, p.min_reward, p.max_reward) &&
    within(s.num_sampled, p.min_length, p.max_length) &&
    (!text || JSON.stringify([s.question, s.prompt, s.text, s.turns]).toLowerCase().includes(text)));
  const orders: Record<string, (s: Json) => number> = {
    best: (s) => -s.reward, worst: (s) => s.reward, longest: (s) => -s.num_sampled,
    shortest: (s) => s.num_sampled, oldest: (s) => s.step, newest: (s) => -s.step,
  };
  const by = orders[p.order ?? "newest"];
  found.sort((a, b) => by(a) - by(b));
  const skip = Number(p.skip ?? 0), most = Number(p.most ?? 50);
  const next = found.length > skip + most ? skip + most : null;
  const words = (name: string) => [...new Set(all.map((s) => s[name]).filter(Boolean))];
  return { samples: found.slice(skip, skip + most), total: found.length, next, last_step: last, step, progress: 1,
    words: { finish: words("finish"), environment: words("environment") } };
}

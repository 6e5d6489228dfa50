// What the page shows: runs, the view, the axis; kept in the address, so that a link shows the same.
import { get, type Brief, type Field, type Summary } from "./api";

export type ViewName = "overview" | "samples" | "time" | "plan";

export interface State {
  view: ViewName;
  ids: string[]; // runs shown, the first is the main one
  params: URLSearchParams; // further keys of the address, a view's own
}

export interface Page {
  el: HTMLElement;
  update: () => void | Promise<void>; // the run has new records
  close?: () => void;
}

export const shared: {
  runs: Brief[];
  summaries: Map<string, Summary>;
  fields: Record<string, Field>;
  state: State;
} = {
  runs: [], summaries: new Map(), fields: {},
  state: { view: "overview", ids: [], params: new URLSearchParams() },
};

export function main(): Summary | undefined {
  return shared.summaries.get(shared.state.ids[0]);
}

export function readAddress(): State {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const params = new URLSearchParams(query ?? "");
  const ids = params.getAll("run");
  params.delete("run");
  const views: ViewName[] = ["overview", "samples", "time", "plan"];
  return { view: views.find((v) => v === path) ?? "overview", ids, params };
}

export function address(view: ViewName, ids: string[], params?: URLSearchParams | Record<string, string>): string {
  const query = new URLSearchParams(params as URLSearchParams);
  for (const id of ids) query.append("run", id);
  return `#/${view}?${query}`;
}

/** Keeps a value of the view in the address without leaving the page. */
export function remember(name: string, value: string | null): void {
  if (value === null || value === "") shared.state.params.delete(name);
  else shared.state.params.set(name, value);
  history.replaceState(null, "", address(shared.state.view, shared.state.ids, shared.state.params));
}

export async function readRuns(): Promise<void> {
  shared.runs = (await get("runs")).runs;
}

/** True if something of a shown run is new. */
export async function readSummaries(): Promise<boolean> {
  let isNew = false;
  for (const id of shared.state.ids) {
    const now: Partial<Summary> = await get("run", { run: id, sign: shared.summaries.get(id)?.sign });
    if (!now.id) continue; // as before
    shared.summaries.set(id, now as Summary);
    isNew = true;
  }
  return isNew;
}

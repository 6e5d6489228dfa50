// Numbers and times as people read them.

/** A dash for what is no number: records may be of any version. */
export function num(value: unknown, digits = 3): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    if (size >= 1e12 || size < 1e-3) return minus(value.toExponential(1).replace("+", ""));
    if (size >= 1e9) return `${trim(value / 1e9, digits)}G`;
    if (size >= 1e6) return `${trim(value / 1e6, digits)}M`;
    return `${trim(value / 1e3, digits)}k`;
  }
  return trim(value, size >= 1000 ? 4 : digits);
}

function trim(value: number, digits: number): string {
  return minus(String(Number(value.toPrecision(digits))));
}

function minus(text: string): string {
  return text.replace(/-/g, "−");
}

/** How far above or below. */
export function difference(value: number): string {
  return value === 0 ? "±0" : `${value > 0 ? "+" : ""}${num(value)}`;
}

export function duration(seconds: unknown): string {
  if (typeof seconds !== "number" || !Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.1) return `${num(seconds * 1e3, 2)} ms`;
  if (seconds < 60) return `${num(seconds, 3)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  const rest = (value: number, unit: string) => (value ? ` ${value} ${unit}` : "");
  if (minutes < 60) return `${minutes} min${rest(Math.round(seconds) % 60, "s")}`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h${rest(minutes % 60, "min")}` : `${Math.floor(hours / 24)} d${rest(hours % 24, "h")}`;
}

export function clock(seconds: number): string {
  return new Date(seconds * 1e3).toLocaleString(undefined, {
    month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false,
  });
}

export function clockSeconds(seconds: number): string {
  return new Date(seconds * 1e3).toLocaleTimeString(undefined, { hour12: false });
}

export function gib(bytes: number): string {
  return `${num(bytes / 2 ** 30, 3)} GiB`;
}

export function share(value: number): string {
  return `${num(100 * value, 2)} %`;
}

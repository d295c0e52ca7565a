// Numbers and times as text.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

export const NONE = "–";

/** 1,234 */
export function count(value) {
  return whole.format(value);
}

/** 0.25, 12, 1,234, 56.7k, 1.2M */
export function short(value) {
  if (value >= 1e6) return `${digits(value / 1e6)}M`;
  if (value >= 1e4) return `${digits(value / 1e3)}k`;
  return value < 10 && !Number.isInteger(value) ? digits(value) : whole.format(value);
}

/** 0.4 ms, 23 ms, 1.24 s */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  return `${digits(value)} s`;
}

/** 34 % */
export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const shown = value * 100;
  if (shown > 0 && shown < 0.1) return "< 0.1 %";
  return `${shown > 0 && shown < 10 ? shown.toFixed(1) : Math.round(shown)} %`;
}

/** 42 s, 3 min 5 s, 2 h 7 min, 5 d 3 h */
export function duration(value) {
  const total = Math.max(0, Math.floor(value));
  const [days, hours, minutes] = [
    Math.floor(total / 86400),
    Math.floor(total / 3600) % 24,
    Math.floor(total / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes) return `${minutes} min ${total % 60} s`;
  return `${total} s`;
}

/** "last 60 s", "last 5 min", "last 6 h" */
export function span(value) {
  if (value < 120) return `last ${Math.round(value)} s`;
  return value < 7200 ? `last ${Math.round(value / 60)} min` : `last ${Math.round(value / 360) / 10} h`;
}

/** 71.2, of bytes */
export function gibibytes(bytes) {
  return digits(bytes / 2 ** 30);
}

/** 14:03:59, of seconds since the epoch. */
export function time(at) {
  return clock.format(new Date(at * 1e3));
}

/** "12 running  ·  3 waiting"; what is null or empty is left out. */
export function listed(...parts) {
  return parts.filter(Boolean).join("  ·  ");
}

/** "1 token", "2 tokens" */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

function digits(value) {
  return value >= 100
    ? whole.format(value)
    : value >= 10
      ? value.toFixed(1).replace(/\.0$/, "")
      : value.toFixed(2).replace(/0$/, "");
}

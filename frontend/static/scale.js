// From values to coordinates: x 0 to WIDTH is the time, y HEIGHT to 0 the value.

export const WIDTH = 300;
export const HEIGHT = 100;

/** The smallest of 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20 … that is at least `value` and `least`. */
export function niceTop(value, least) {
  const wanted = Math.max(value, least);
  const decade = 10 ** Math.floor(Math.log10(wanted));
  for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8])
    if (step * decade >= wanted * (1 - 1e-9)) return step * decade;
  return 10 * decade;
}

/** The largest number among `values`, 0 if there is none; null and undefined are skipped. */
export function largest(values) {
  let found = 0;
  for (const value of values) if (value > found) found = value;
  return found;
}

/**
 * Runs of [x, y] that are joined. `read(point)` is a number or null; `from` and `to` are times.
 * Points that are more than `gap` seconds apart are not joined.
 */
export function runs(points, read, { from, to, top, gap }) {
  const found = [];
  let last = -Infinity;
  for (const point of points) {
    const value = read(point);
    if (value === null || value === undefined || point.at < from || point.at > to) continue;
    const x = ((point.at - from) / (to - from)) * WIDTH;
    const y = HEIGHT - Math.min(value / top, 1) * HEIGHT;
    if (point.at - last > gap) found.push([]);
    found.at(-1).push([x, y]);
    last = point.at;
  }
  return found;
}

/** The `d` of an SVG path along the runs; a run of one point is a dot. */
export function line(found) {
  return found.map((run) => `M${joined(run.length > 1 ? run : [run[0], run[0]])}`).join("");
}

/** The `d` of the area below the runs. */
export function area(found) {
  return found.map((run) => `M${joined([[run[0][0], HEIGHT], ...run, [run.at(-1)[0], HEIGHT]])}Z`).join("");
}

/** The index of the point nearest to `at`; -1 without points. Points are ascending. */
export function nearest(points, at) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].at < at) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && at - points[low - 1].at < points[low].at - at) return low - 1;
  return points.length ? low : -1;
}

/** How many of `cells` cells stand for used, cached and free blocks; what is there has one at least. */
export function kvCells(used, cached, total, cells) {
  if (!total) return { used: 0, cached: 0, free: cells };
  const share = (blocks) => (blocks ? Math.max(1, Math.round((blocks / total) * cells)) : 0);
  const inUse = Math.min(share(used), cells);
  const kept = Math.min(share(cached), cells - inUse);
  return { used: inUse, cached: kept, free: cells - inUse - kept };
}

function joined(run) {
  return run.map(([x, y]) => `${fixed(x)} ${fixed(y)}`).join("L");
}

function fixed(value) {
  return Math.round(value * 100) / 100;
}

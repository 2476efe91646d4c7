// Numbers for people. Units as in docs and command line: GiB, seconds, tokens.

const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const [unit, size] = SIZES.find(([, size]) => Math.abs(count) >= size) ?? ["B", 1];
  return `${(count / size).toFixed(unit === "GiB" ? 2 : unit === "MiB" ? 1 : 0)} ${unit}`;
}

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count < 1) return `${Math.round(count * 1000)} ms`;
  if (count < 10) return `${count.toFixed(1)} s`;
  if (count < 60) return `${Math.round(count)} s`;
  if (count < 3600) return `${Math.floor(count / 60)} min ${Math.round(count % 60)} s`;
  if (count < 86400) return `${Math.floor(count / 3600)} h ${Math.round((count % 3600) / 60)} min`;
  return `${Math.floor(count / 86400)} d ${Math.round((count % 86400) / 3600)} h`;
}

export function number(count, digits = 0) {
  if (count === null || count === undefined) return "–";
  return count.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
}

export const count = (value, one, many) => `${number(value)} ${value === 1 ? one : many}`;
export const clock = (timeS) => new Date(timeS * 1000).toLocaleTimeString();
export const moment = (timeS) => new Date(timeS * 1000).toLocaleString();
export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");
export const words = (name) => name.replaceAll("_", " ");

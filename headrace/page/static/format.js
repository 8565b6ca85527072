// Numbers, times and texts as people read them. Pure functions.

/** A number with about `digits` digits: 1234 → "1,234", 0.000123 → "1.23e-4", null → "–". */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const units = [
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"],
    ];
    const unit = size < 1e15 && units.find(([each]) => size >= each);
    return unit ? `${trim(value / unit[0], digits)}${unit[1]}` : value.toExponential(digits - 1);
  }
  return size >= 1000 ? Math.round(value).toLocaleString("en") : trim(value, digits);
}

const trim = (value, digits) => String(Number(value.toPrecision(digits)));

/** A whole number with separators. */
export const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));

/** A share as per cent: 0.331 → "33 %". */
export const percent = (value) =>
  value === null || value === undefined
    ? "–"
    : `${value > 0 && value < 0.0995 ? trim(value * 100, 2) : Math.round(value * 100)} %`;

/** Seconds as "850 ms", "12.3 s", "4:05 min", "2:10 h", "3 d 4 h". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${trim(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  const two = (value) => String(value).padStart(2, "0");
  if (seconds < 3599.5) return `${Math.floor(Math.round(seconds) / 60)}:${two(Math.round(seconds) % 60)} min`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)}:${two(minutes % 60)} h`;
  const hours = Math.round(minutes / 60);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Unix seconds as local date and time. */
export const time = (seconds) =>
  seconds === null || seconds === undefined ? "–" : new Date(seconds * 1000).toLocaleString("sv").slice(0, 19);

/** Unix seconds as local time with tenths of a second. */
export const clock = (seconds) => {
  const at = new Date(seconds * 1000);
  return `${at.toLocaleTimeString("sv")}.${Math.floor(at.getMilliseconds() / 100)}`;
};

/** How long ago, from now, as people say it: "12 s ago", "48 min ago", "5 h ago", "3 d ago". */
export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  const [, size, unit] = [
    [172800, 86400, "d"],
    [3600, 3600, "h"],
    [60, 60, "min"],
    [0, 1, "s"],
  ].find(([least]) => past >= least);
  return `${Math.floor(past / size)} ${unit} ago`;
}

/** Bytes in binary units. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${trim(value / 1024 ** power, 3)} ${units[power]}`;
}

/**
 * Text of a model, a data set or an environment, with the characters visible that would act on the text around them: controls, and those
 * that reverse its direction. Line feeds and tabs stay.
 */
export const visible = (text) =>
  String(text ?? "").replace(
    // biome-ignore lint/suspicious/noControlCharactersInRegex: these are the characters meant
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );

// Numbers as people read them. Pure. null and undefined are "not known".

const UNKNOWN = "–";
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const THOUSANDS = [[1e12, " T"], [1e9, " G"], [1e6, " M"]];

const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

// Three digits, and no point where there are as many before it.
function short(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < BINARY.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${short(value)} ${BINARY[unit]}`;
}

export const bytesPerSecond = (value) => (isKnown(value) ? `${bytes(value)}/s` : UNKNOWN);

export function count(value) {
  if (!isKnown(value)) return UNKNOWN;
  for (const [size, name] of THOUSANDS) {
    if (Math.abs(value) >= size) return short(value / size) + name;
  }
  return Number.isInteger(value) ? value.toLocaleString("en-US") : short(value);
}

export const perSecond = (value) => (isKnown(value) ? `${count(value)}/s` : UNKNOWN);

export function percent(ratio) {
  if (!isKnown(ratio)) return UNKNOWN;
  const hundredths = 100 * ratio;
  return `${hundredths >= 9.95 || hundredths === 0 ? hundredths.toFixed(0) : hundredths.toFixed(1)}%`;
}

export function seconds(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value < 60) return `${short(value)} s`;
  const steps = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
  const [size, name, smaller, rest] = steps.find(([least]) => value >= least);
  const left = Math.floor((value % size) / smaller);
  return `${Math.floor(value / size)} ${name}${left ? ` ${left} ${rest}` : ""}`;
}

export const clock = (unix_s, withSeconds) => new Date(1000 * unix_s).toLocaleTimeString(
  [], { hour: "2-digit", minute: "2-digit", second: withSeconds ? "2-digit" : undefined, hour12: false });

// "no_such_thing" -> "no such thing"
export const words = (name) => name.replaceAll("_", " ");

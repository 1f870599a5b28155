// Values as text.
export const escaped = (name) => name.split("/").map(encodeURIComponent).join("/");
export const modelPage = (id) => `#/models/${escaped(id)}`;
export const modelRoute = (id) => `/v1/models/${escaped(id)}`;
export const requestPage = (id) => `#/requests/${encodeURIComponent(id)}`;
export const phaseName = (name) => name.replace("_", " ");
export const count = (value) => value.toLocaleString("en");
export const rate = (value) => (value >= 100 ? count(Math.round(value)) : value.toFixed(1));
export const seconds = (value) =>
  value < 1
    ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`
    : value < 60
      ? `${value.toFixed(1)} s`
      : `${count(Math.round(value))} s`;
const CENTS = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
const LESS = { maximumSignificantDigits: 2 };
export const dollars = (value) => `$${Number(value).toLocaleString("en", value < 1 ? LESS : CENTS)}`;
export const percent = (share) => `${Math.floor(share * 100)}%`;
export const bytes = (value) => {
  const power = value < 1000 ? 0 : Math.min(Math.floor(Math.log10(value) / 3), 4);
  return `${power ? (value / 1000 ** power).toPrecision(3) : value} ${["B", "kB", "MB", "GB", "TB"][power]}`;
};
export const time = (unixS) => new Date(unixS * 1000).toISOString().slice(0, 19).replace("T", " ");

import { html, useMemo, useState } from "/console/vendor/preact-htm.js";
import { count } from "/console/format.js";
import { Answered, Select, Table, useAnswer } from "/console/parts.js";
import { Plot } from "/console/plot.js";

const GROUPS = ["day", "model", "key"];
const FIGURES = {
  requests: "Requests",
  prompt_tokens: "Prompt tokens",
  cached_tokens: "Cached tokens",
  completion_tokens: "Output tokens",
  cost: "Cost, $",
};
// A spreadsheet would compute a cell that begins with one of these characters.
const cell = (value) =>
  `"${String(value)
    .replace(/^[=+\-@\t\r]/, "'$&")
    .replaceAll('"', '""')}"`;

function save(groupBy, rows) {
  const names = [groupBy, ...Object.keys(FIGURES)];
  const lines = [names, ...rows.map((row) => names.map((name) => row[name]))];
  const address = URL.createObjectURL(
    new Blob([lines.map((line) => line.map(cell).join(",")).join("\r\n")], { type: "text/csv" }),
  );
  Object.assign(document.createElement("a"), { href: address, download: `usage-by-${groupBy}.csv` }).click();
  URL.revokeObjectURL(address);
}

const DAY_S = 86_400;
const MAX_BARS = 12;
const PLOTTED = ["cost", "requests", "completion_tokens"];
const short = (name) => (name.length > 15 ? `${name.slice(0, 14)}…` : name);

// Days lie on an axis of time, so that a day without use is a gap; models and keys are bars by size.
function dataOf(rows, groupBy, figure) {
  const values = (shown) => shown.map((row) => Number(row[figure]));
  if (groupBy === "day") {
    const days = rows.map((row) => Date.parse(row.day) / 1000);
    return { data: [days, values(rows)], range: [days[0] - DAY_S, days.at(-1) + DAY_S] };
  }
  const largest = [...rows].sort((left, right) => right[figure] - left[figure]).slice(0, MAX_BARS);
  return {
    data: [largest.map((_, index) => index), values(largest)],
    range: [-0.7, largest.length - 0.3],
    labels: largest.map((row) => short(row[groupBy])),
  };
}

function Bars({ rows, groupBy }) {
  const [figure, setFigure] = useState("cost");
  const plot = useMemo(() => dataOf(rows, groupBy, figure), [rows, groupBy, figure]);
  const which = groupBy !== "day" && rows.length > MAX_BARS ? `, the largest ${MAX_BARS} of ${count(rows.length)}` : "";
  const title = `${FIGURES[figure]} by ${groupBy}${which}`;
  return html`<p><${Select} isInline label="Plot of" value=${figure} onChange=${setFigure} options=${PLOTTED.map((name) => [name, FIGURES[name]])} /></p>
    <div class="plots"><${Plot} key=${groupBy} title=${title} ...${plot} isBars=${true} height=${plot.labels ? 260 : 180} /></div>`;
}

export function Usage() {
  const [groupBy, setGroupBy] = useState("day");
  const answer = useAnswer(`/v1/usage?group_by=${groupBy}`);
  const { data } = answer;
  const figure = ([name, title]) => [title, (row) => (name === "cost" ? row.cost : count(row[name])), "number"];
  const first = [`${groupBy[0].toUpperCase()}${groupBy.slice(1)}`, (row) => row[groupBy]];
  const columns = [first, ...Object.entries(FIGURES).map(figure)];
  return html`<form class="row">
    <${Select} label="Sums by" value=${groupBy} onChange=${setGroupBy} options=${GROUPS} />
    <button type="button" disabled=${!data?.data.length} onClick=${() => save(groupBy, data.data)}>Save as CSV</button></form>
    <${Answered} answer=${answer}>${() =>
      html`
      ${data.data.length > 0 && html`<${Bars} rows=${data.data} groupBy=${groupBy} />`}
      <${Table} label="Usage" columns=${columns} rows=${data.data}
        total=${{ ...data.total, [groupBy]: "Total" }}>
        Nothing was used yet. Send a request from the <a href="#/playground">playground</a>.<//>`}<//>`;
}

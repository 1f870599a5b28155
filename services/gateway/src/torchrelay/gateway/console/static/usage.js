import { html, useState } from "/console/vendor/preact-htm.js";
import { count } from "/console/format.js";
import { Alert, Loading, Table, useAnswer } from "/console/parts.js";

const GROUPS = ["day", "model", "key"];
const FIGURES = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost"];
// A spreadsheet would compute a cell that begins with one of these characters.
const cell = (value) => `"${String(value).replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;

function save(groupBy, rows) {
  const lines = [[groupBy, ...FIGURES], ...rows.map((row) => [groupBy, ...FIGURES].map((name) => row[name]))];
  const address = URL.createObjectURL(new Blob([lines.map((line) => line.map(cell).join(",")).join("\r\n")], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: address, download: `usage-by-${groupBy}.csv` }).click();
  URL.revokeObjectURL(address);
}

export function Usage() {
  const [groupBy, setGroupBy] = useState("day");
  const { data, error } = useAnswer(`/v1/usage?group_by=${groupBy}`);
  const figure = (name) => [name.replace("_", " "), (row) => (name === "cost" ? `$${row.cost}` : count(row[name])), "number"];
  const columns = [[groupBy, (row) => row[groupBy]], ...FIGURES.map(figure)];
  return html`<form class="row">
    <label>Sums by <select value=${groupBy} onChange=${(event) => setGroupBy(event.target.value)}>${GROUPS.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
    <button type="button" disabled=${!data?.data.length} onClick=${() => save(groupBy, data.data)}>Save as CSV</button></form>
    ${error && html`<${Alert}>${error}<//>`}
    ${data ? html`<${Table} label="Usage" columns=${columns} rows=${data.data} total=${{ ...data.total, [groupBy]: "total" }}>Nothing was used yet. Send a request from the playground.<//>` : !error && html`<${Loading} />`}`;
}

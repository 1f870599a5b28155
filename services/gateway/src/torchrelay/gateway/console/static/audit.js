import { html, useState } from "/console/vendor/preact-htm.js";
import { json } from "/console/api.js";
import { time } from "/console/format.js";
import { Alert, Answered, Table, useAnswer } from "/console/parts.js";

const PATH = "/v1/audit?limit=100";
const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// The fields that a change sets, or that differ.
function Difference({ before, after }) {
  const names = Object.keys({ ...before, ...after }).filter((name) => (before && after) || (before ?? after)[name]);
  return html`<ul class="difference">${names.map(
    (name) =>
      html`<li>${name}: ${before && after ? `${text(before[name])} → ${text(after[name])}` : text((before ?? after)[name])}</li>`,
  )}</ul>`;
}

const COLUMNS = [
  ["Time, UTC", (change) => time(Date.parse(change.at) / 1000), "time"],
  ["Actor", (change) => change.actor],
  ["Change", (change) => change.action],
  ["Target", (change) => change.target],
  ["Before → after", (change) => html`<${Difference} ...${change} />`],
];

export function Audit() {
  const newest = useAnswer(PATH);
  const [older, setOlder] = useState([]);
  const [isMore, setIsMore] = useState(true);
  const [error, setError] = useState("");
  const more = async (last) => {
    await json(`${PATH}&before=${last}`).then(
      ({ data, has_more }) => {
        setOlder([...older, ...data]);
        setIsMore(has_more);
        setError("");
      },
      (failure) => setError(failure.message),
    );
  };
  return html`<p class="dim">Changes of keys, tenants, models, prices and operators, the newest first.</p>
    ${error && html`<${Alert}>${error}<//>`}
    <${Answered} answer=${newest}>${({ data, has_more }) => {
      const rows = [...data, ...older];
      return html`<${Table} label="Changes" columns=${COLUMNS} rows=${rows}>Nobody has changed anything yet.<//>
      ${has_more && isMore && html`<button onClick=${() => more(rows.at(-1).id)}>Show older changes</button>`}`;
    }}<//>`;
}
